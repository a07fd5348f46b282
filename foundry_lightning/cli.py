"""The command line: LightningCLI for fit, validate, test and predict; plain commands for tokenizer and export."""

from __future__ import annotations

import json as jsonlib
import logging
import os
import re
import shutil
import sys
import warnings
from argparse import ArgumentError
from collections.abc import Callable
from difflib import get_close_matches
from itertools import takewhile
from pathlib import Path
from typing import Any

import lightning
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins.io import CheckpointIO
from transformers.utils import logging as transformers_logging

from foundry_lightning.callbacks import NEVER, EvaluateEvery, LogSettings, SaveEvery, StopOnSignal
from foundry_lightning.callbacks.console import ConsoleReport, PrintGuesses
from foundry_lightning.callbacks.start_report import StartReport
from foundry_lightning.checkpoint import AtomicCheckpointIO, checkpoint_file, logged_as, path_of, read_checkpoint
from foundry_lightning.data.datamodule import MLMDataModule
from foundry_lightning.export import export_onnx, export_student, load_student_weights
from foundry_lightning.modules.base import EncoderModule

_LOOPS = ("fit", "validate", "test", "predict")
_OVERVIEW = """\
foundry-lightning: pretrain your own encoder from raw text, or distil one from a teacher.

  foundry-lightning fit --config configs/mlm.yaml        train; writes runs/mlm/1/ and runs/mlm/export/
  foundry-lightning validate --config configs/mlm.yaml   evaluate the newest checkpoint of that run
  foundry-lightning predict --config configs/mlm.yaml --data.predict '["a list of [MASK]"]'   fill blanks
  foundry-lightning tokenizer --source 'data/*.txt' --vocab-size 8000 --out my-tokenizer      train a tokenizer
  foundry-lightning export --config configs/mlm.yaml --ckpt runs/mlm/1 --out my-model         export a checkpoint
  foundry-lightning probe my-model --task ner --train ner.txt    compare encoders on labelled data

Each command has --help. --debug before a command shows the full traceback of an error.
"""


class _SaveConfig(SaveConfigCallback):
    """Keeps the resolved config in the run folder; it can be run again as it is."""

    def setup(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, stage: str) -> None:
        if stage == "fit" and trainer.is_global_zero and not self.already_saved:
            folder = Path(trainer.default_root_dir)
            folder.mkdir(parents=True, exist_ok=True)
            config = self.config.clone()
            config.resume = False
            if "ckpt_path" in config:
                config.ckpt_path = None
            self.parser.save(config, str(folder / "config.yaml"), overwrite=True, multifile=False)
            self.already_saved = True


class FoundryCLI(LightningCLI):
    """LightningCLI with run folders, checkpoints and evaluation counted in updates, and an export at the end."""

    def __init__(self, args: list[str] | None = None, *, run: bool = True) -> None:
        self._stop = StopOnSignal()
        super().__init__(
            EncoderModule,
            MLMDataModule,
            subclass_mode_model=True,
            subclass_mode_data=True,
            seed_everything_default=42,
            save_config_callback=_SaveConfig,
            load_from_checkpoint_support=False,
            auto_configure_optimizers=False,
            trainer_defaults={
                "check_val_every_n_epoch": None,
                "val_check_interval": NEVER,
                "num_sanity_val_steps": 0,
                "use_distributed_sampler": False,
                "enable_model_summary": False,
                "enable_progress_bar": False,
                "gradient_clip_val": 1.0,
            },
            parser_kwargs={"exit_on_error": False, **{name: {"exit_on_error": False} for name in _LOOPS}},
            args=args,
            run=run,
        )

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """Parses, and turns what does not parse into one sentence.

        Raises:
            ValueError: an unknown option (with the closest known one), or a value that does not fit.
        """
        try:
            super().parse_arguments(parser, args)
        except ArgumentError as error:
            text = str(error)
            unknown = re.search(r"unrecognized arguments: (--[\w.]+)", text)
            options = [o for p in self._subcommand_parsers.values() for a in p._actions for o in a.option_strings]
            close = get_close_matches(unknown[1], options, n=1) if unknown else []
            raise ValueError(text + (f"; did you mean {close[0]}?" if close else "")) from error

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Adds what this package has beside Lightning's own settings."""
        parser.add_argument("--run_name", type=str, default="mlm", help="Runs go to RUNS_DIR/RUN_NAME/1, 2, …")
        parser.add_argument("--runs_dir", type=str, default="runs", help="Folder of all runs.")
        parser.add_argument("--resume", type=bool, default=False, help="Go on with the newest run of this name.")
        parser.add_lightning_class_args(EvaluateEvery, "evaluate")
        parser.add_lightning_class_args(SaveEvery, "checkpoint")
        parser.add_lightning_class_args(ConsoleReport, "console")
        parser.set_defaults({"evaluate.every": 100, "checkpoint.every": 500})

    # ------------------------------------------------------------- run folders

    def before_instantiate_classes(self) -> None:
        """Decides the run folder, and the checkpoint where none is named."""
        config = self.config if self.subcommand is None else self.config[self.subcommand]
        self.run_root: Path = Path(str(config.runs_dir)) / str(config.run_name)
        if self.subcommand is None:
            self.run_folder = self._new_folder()
            return
        if config.ckpt_path is None and (config.resume or self.subcommand != "fit"):
            newest = self._newest_run()
            if newest is None:
                raise FileNotFoundError(
                    f"{self.run_root} holds no checkpoint to {'resume' if self.subcommand == 'fit' else 'load'}; "
                    "run fit first, or give --ckpt_path or --run_name."
                )
            config.ckpt_path = str(newest)
        if config.ckpt_path is None:
            self.run_folder = self._new_folder()
            return
        file = checkpoint_file(config.ckpt_path)
        config.ckpt_path = str(file)
        self._continue_logging(config.trainer, logged_as(read_checkpoint(file)))
        in_a_run = file.resolve().parent.parent == self.run_root.resolve()
        self.run_folder = file.parent if in_a_run or self.subcommand != "fit" else self._new_folder()

    def _continue_logging(self, trainer: Any, records: dict[str, Any]) -> None:
        """Lets the loggers that the config names go on in the records of the resumed run."""
        loggers = trainer.get("logger")
        for logger in loggers if isinstance(loggers, list) else [loggers]:
            name = str(getattr(logger, "class_path", ""))
            if name.endswith("WandbLogger") and records.get("wandb") and not logger.init_args.get("id"):
                logger.init_args.id = records["wandb"]
                logger.dict_kwargs = {**(logger.get("dict_kwargs") or {}), "resume": "allow"}
            elif name.endswith("TensorBoardLogger") and logger.init_args.get("version") is None:
                logger.init_args.version = records.get("tensorboard")

    def _new_folder(self) -> Path:
        # processes that Lightning starts on this node run this code again and must find the same folder
        known = os.environ.get("FOUNDRY_LIGHTNING_RUN_FOLDER")
        if known is not None and os.environ.get("LOCAL_RANK", "0") != "0":
            return Path(known)
        folder = self.run_root / str(max(self._run_numbers(), default=0) + 1)
        os.environ["FOUNDRY_LIGHTNING_RUN_FOLDER"] = str(folder)
        return folder

    def _run_numbers(self) -> list[int]:
        if not self.run_root.is_dir():
            return []
        return [int(path.name) for path in self.run_root.iterdir() if path.name.isdigit()]

    def _newest_run(self) -> Path | None:
        runs = [self.run_root / str(n) for n in sorted(self._run_numbers(), reverse=True)]
        return next((run for run in runs if (run / "checkpoint.ckpt").is_file()), None)

    def instantiate_trainer(self, **kwargs: Any) -> lightning.Trainer:
        """Adds the checkpoint writer and, where the config names no logger, one that writes metrics.csv."""
        trainer = self._get(self.config_init, "trainer")
        plugins = trainer.get("plugins") or []
        plugins = plugins if isinstance(plugins, list) else [plugins]
        if not any(isinstance(plugin, CheckpointIO) for plugin in plugins):
            kwargs["plugins"] = [*plugins, AtomicCheckpointIO()]
        fit = self.subcommand in (None, "fit")
        if trainer.get("default_root_dir") is None:
            kwargs["default_root_dir"] = str(self.run_folder)
        else:
            self.run_folder = Path(trainer.default_root_dir)
        if trainer.get("logger") in (None, True):
            kwargs["logger"] = fit and _metrics_logger(self.run_folder)
        for_fit = [self._stop, self._settings(), StartReport()] if fit else []
        own = [PrintGuesses()] if self.subcommand == "predict" else for_fit
        kwargs["callbacks"] = [*(trainer.get("callbacks") or []), *own]
        return super().instantiate_trainer(**kwargs)

    def _settings(self) -> LogSettings:
        config = self.config if self.subcommand is None else self.config[self.subcommand]
        return LogSettings({k: v for k, v in config.clone().as_dict().items() if k != "config"})

    # ------------------------------------------------------------- after a fit

    def after_fit(self) -> None:
        """Exports the student, also as the newest of this run name, and says where it lies."""
        self._stop.receive(self.trainer)
        self._stop.raise_if_stopped(self.trainer)
        if not self.trainer.is_global_zero:
            return
        folder = self.run_folder
        metrics = {k: f"{float(v):.4f}" for k, v in self.trainer.callback_metrics.items() if k.startswith("val/")}
        facts = {"updates": self.trainer.global_step, **metrics, **self.model.unchangeable()}
        export = export_student(self.model.student, folder / "export", tokenizer=self.model.tokenizer, facts=facts)
        newest = _publish(export, self.run_root / "export")
        print(f"exported: {export}, also at {newest}\nresume or extend: add --resume true (and a larger limit)")


def _metrics_logger(folder: Path) -> CSVLogger:
    """Writes `metrics.csv`; Lightning's logger would delete the one of the run that is resumed."""
    metrics = folder / "metrics.csv"
    if metrics.is_file():
        parts = len(list(folder.glob("metrics.part*.csv")))
        metrics.rename(folder / f"metrics.part{parts + 1}.csv")
    return CSVLogger(folder, name="", version="")


def _publish(folder: Path, target: Path) -> Path:
    """Copies a folder to `target`, replacing what is there at once."""
    partial, old = target.with_name(f".{target.name}.{os.getpid()}.partial"), target.with_name(f".{target.name}.old")
    shutil.rmtree(partial, ignore_errors=True)
    shutil.copytree(folder, partial)
    if target.exists():
        shutil.rmtree(old, ignore_errors=True)
        os.replace(target, old)
    os.replace(partial, target)
    shutil.rmtree(old, ignore_errors=True)
    return target


def from_yaml(path: str | os.PathLike[str]) -> tuple[lightning.Trainer, EncoderModule, MLMDataModule]:
    """Builds trainer, module and data of a config as `foundry-lightning fit --config path` would.

    `trainer.fit(module, datamodule=data)` trains.

    Raises:
        FileNotFoundError: no such file.
        TypeError: `path` is no path.
        ValueError: a config that does not fit.
    """
    if not path_of(path, name="config path").is_file():
        raise FileNotFoundError(f"config {path} does not exist; give a YAML file such as configs/mlm.yaml.")
    try:
        cli = FoundryCLI(["--config", str(path)], run=False)
    except (ValueError, TypeError, AttributeError, MisconfigurationException) as error:
        raise ValueError(f"config {path} does not fit: {error}") from error
    return cli.trainer, cli.model, cli.datamodule


def train_tokenizer_command(
    source: str,
    out: str,
    vocab_size: int = 8000,
    kind: str = "wordpiece",
    lowercase: bool = True,
    min_frequency: int = 2,
    text_column: str = "text",
) -> None:
    """Trains a tokenizer on texts and writes a folder that AutoTokenizer loads.

    Example: foundry-lightning tokenizer --source 'data/*.txt' --vocab-size 8000 --out my-tokenizer

    Args:
        source: A file or glob (.txt, .jsonl, .gz, .zst, .parquet), or an embedded corpus (python-docs).
        out: The folder to write.
        vocab_size: Number of tokens, special ones included.
        kind: wordpiece, bpe or unigram.
        lowercase: Whether text is lower-cased.
        min_frequency: Least number of times a token must occur.
        text_column: Column of the text in .jsonl and .parquet.
    """
    from foundry_lightning.tokenizer import train_tokenizer

    tokenizer = train_tokenizer(
        source,
        vocab_size=vocab_size,
        kind=kind,
        lowercase=lowercase,
        min_frequency=min_frequency,
        text_column=text_column,
    )
    tokenizer.save_pretrained(out)
    print(f"{len(tokenizer)} tokens written to {out}")


def export_command(ckpt: str, out: str, config: str | None = None, onnx: bool = False) -> None:
    """Writes the student of a checkpoint as a folder that AutoModelForMaskedLM loads.

    Example: foundry-lightning export --ckpt runs/mlm/1 --out my-model

    Args:
        ckpt: A .ckpt file, or the folder of a run.
        out: The folder to write.
        config: The run's config; by default the config.yaml beside the checkpoint.
        onnx: Whether the base is written as model.onnx too (needs the extra `onnx`).
    """
    file = checkpoint_file(ckpt)
    state = read_checkpoint(file)
    config_file = Path(config) if config is not None else file.parent / "config.yaml"
    _, module, data = from_yaml(config_file)
    data.prepare_data()
    if module.tokenizer is None:
        module.tokenizer = data.tokenizer
    student = module.build_student()
    load_student_weights(student, state)
    facts = {"updates": state["global_step"]}
    print(f"exported: {export_student(student, out, tokenizer=module.tokenizer, facts=facts)}")
    if onnx:
        print(f"exported: {export_onnx(out)}")


def _quiet() -> None:
    """Leaves out what Lightning says of itself at each start; warnings of this package and errors stay."""
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    transformers_logging.disable_progress_bar()
    warnings.filterwarnings("ignore", message=".*LeafSpec.*deprecated")
    warnings.filterwarnings("ignore", message=".*in eval mode at the start of training")  # a teacher always is
    # meant so: EncoderModule looks at every batch, ours and a user's own
    warnings.filterwarnings("ignore", message=".*have overridden `on_before_batch_transfer`")


def probe_command(
    models: list[str],
    task: str,
    train: str,
    test: str | None = None,
    how: str = "linear",
    seeds: int = 3,
    max_length: int | None = None,
    columns: tuple[str, str] | None = None,
    fields: tuple[int, int] | None = None,
    epochs: int = 3,
    batch_size: int = 32,
    learning_rate: float = 1e-4,
    device: str = "auto",
    json: str | None = None,
) -> None:
    """Compares encoders on labelled data, beside random weights and a word lookup or bag of words.

    Example: foundry-lightning probe my-model other-model --task ner --train train.txt --test test.txt --how both

    Args:
        models: Folders or names that AutoModel and AutoTokenizer load.
        task: ner (scored in entities), pos (any tags, by words) or classify (texts).
        train: A CoNLL file, a .jsonl file, or a folder of Dataset.save_to_disk.
        test: The same, scored; without it each seed holds out a fifth of train.
        how: linear (logistic regression on frozen states), finetune, or both.
        seeds: Number of seeds.
        max_length: Tokens of a row.
        columns: Names of input and label in .jsonl and datasets.
        fields: Numbers of word and tag in a line of a CoNLL file.
        epochs: Of fine-tuning.
        batch_size: Of fine-tuning.
        learning_rate: Peak rate of fine-tuning.
        device: auto, cpu or cuda.
        json: A file that gets all figures.
    """
    from rich.console import Console

    from foundry_lightning.probe import FineTuning, probe

    found = probe(
        models,
        task=task,
        train=train,
        test=test,
        how=how,
        seeds=seeds,
        max_length=max_length,
        columns=columns,
        fields=fields,
        fine_tuning=FineTuning(epochs=epochs, batch_size=batch_size, learning_rate=learning_rate),
        device=device,
    )
    Console().print(found.table())
    if json is not None:
        Path(json).write_text(found.to_json())


_COMMANDS: dict[str, Callable[..., None]] = {
    "tokenizer": train_tokenizer_command,
    "export": export_command,
    "probe": probe_command,
}


def main(args: list[str] | None = None) -> int:
    """Runs a command; an error of the input is printed in a sentence, exit code 2."""
    args = list(sys.argv[1:] if args is None else args)
    debug = "--debug" in args
    args = [arg for arg in args if arg != "--debug"]
    if not args or args[0] in ("-h", "--help", "help"):
        print(_OVERVIEW)
        return 0
    if not debug:
        _quiet()
    try:
        if args[0] in _COMMANDS:
            from jsonargparse import auto_cli

            command = _COMMANDS[args[0]]
            options = [re.sub(r"^--[\w-]+", lambda name: "--" + name[0][2:].replace("-", "_"), arg) for arg in args[1:]]
            models = list(takewhile(lambda option: not option.startswith("-"), options))
            if args[0] == "probe" and models:
                options = [f"--models={jsonlib.dumps(models)}", *options[len(models) :]]
            auto_cli(command, args=options, prog=f"foundry-lightning {args[0]}", as_positional=False)
        elif args[0] not in _LOOPS:
            names = [*_LOOPS, *_COMMANDS]
            close = get_close_matches(args[0], names, n=1)
            raise ValueError(
                f"unknown command {args[0]!r}; "
                + (f"did you mean {close[0]}?" if close else f"the commands are {', '.join(names)}.")
            )
        else:
            sys.argv = ["foundry-lightning", *args]
            FoundryCLI()
    except (ValueError, TypeError, FileNotFoundError, ModuleNotFoundError, OSError, MisconfigurationException) as error:
        if debug:
            raise
        print(f"foundry-lightning: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
