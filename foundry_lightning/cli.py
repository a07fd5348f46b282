"""LightningCLI for fit, validate, test and predict: run folders, resume, and an export at the end of a fit."""

from __future__ import annotations

import argparse
import os
import re
import shutil
from argparse import ArgumentError
from pathlib import Path
from typing import Any

import lightning
from jsonargparse import DefaultHelpFormatter
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins.io import CheckpointIO

from foundry_lightning.callbacks import NEVER, EvaluateEvery, LogSettings, SaveEvery, StopOnSignal
from foundry_lightning.callbacks.console import CompareWithTeacher, ConsoleReport, PrintGuesses
from foundry_lightning.callbacks.samples import Samples
from foundry_lightning.callbacks.start_report import StartReport
from foundry_lightning.checkpoint import AtomicCheckpointIO, checkpoint_file, logged_as, path_of, read_checkpoint
from foundry_lightning.data.datamodule import MLMDataModule
from foundry_lightning.export import export_student
from foundry_lightning.modules.base import EncoderModule
from foundry_lightning.parsing import WrongUsage, explain

_RUN = "foundry-lightning {} --config configs/mlm.yaml"
LOOPS = {  # command -> what its --help says
    "fit": (
        "Trains; writes runs/RUN_NAME/1, 2, … and runs/RUN_NAME/export.",
        f"{_RUN} --run_name mine --data.init_args.train 'data/*.txt' --trainer.max_steps 2000",
    ),
    "validate": ("Evaluates the newest checkpoint of a run on its validation data.", _RUN),
    "test": ("The same as validate.", f"{_RUN} --ckpt_path runs/mlm/1"),
    "predict": (
        "Fills the blanks of texts with the newest checkpoint of a run.",
        _RUN + """ --data.init_args.predict '["return the [MASK] of the list"]'""",
    ),
}


class Help(argparse.RawDescriptionHelpFormatter, DefaultHelpFormatter):
    """Leaves the lines of a description, an example among them, as they are; of classes it names this package's."""

    def _expand_help(self, action: argparse.Action) -> str:
        text = re.sub(r", known subclasses: ([^)]*)", _public_classes, super()._expand_help(action))
        return re.sub(r":\w+:`~?(?:[\w.]+\.)?(\w+)`", r"`\1`", text)  # Lightning's text is written for Sphinx


def _public_classes(known: re.Match[str]) -> str:
    public = [path for path in known[1].split(", ") if re.fullmatch(r"foundry_lightning\.[A-Z]\w+", path)]
    return f", for example {', '.join(public)}" if public else ""


class _Parser(LightningArgumentParser):
    """Its --SETTING.help, a parser of its own class, is formatted as its --help."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"formatter_class": Help, **kwargs})


class _SaveConfig(SaveConfigCallback):
    """Keeps the resolved config in the run folder; it can be run again as it is."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        folder = Path(os.environ.get("FOUNDRY_LIGHTNING_RUN_FOLDER", ""))
        self._missing = [place for place in (folder, *folder.parents) if not place.exists()]

    def setup(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, stage: str) -> None:
        """Not yet: a resume that is refused leaves the config of its run alone."""

    def on_train_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """Writes the config, without what is about this start alone."""
        if trainer.is_global_zero and not self.already_saved:
            folder = Path(trainer.default_root_dir)
            folder.mkdir(parents=True, exist_ok=True)
            config = self.config.clone()
            config.resume = False
            if "ckpt_path" in config:
                config.ckpt_path = None
            self.parser.save(config, str(folder / "config.yaml"), overwrite=True, multifile=False)
            self.already_saved = True

    def on_exception(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, exception: BaseException
    ) -> None:
        """Takes away the folders that loggers have made for a run that was refused: it would count as a run."""
        if trainer.is_global_zero and trainer.default_root_dir == os.environ.get("FOUNDRY_LIGHTNING_RUN_FOLDER"):
            for place in self._missing:
                if not place.is_dir() or any(place.iterdir()):
                    break
                place.rmdir()


def _help(command: str) -> dict[str, str]:
    what, example = LOOPS[command]
    more = (
        "Each setting is an option too, the later one counts: --data.init_args.batch_size 32, "
        "--data.init_args.tokenizer FOLDER, --model.init_args.config.learning_rate 1e-3 (README, Settings).\n"
        "--model.help CLASS lists the settings of a class."
    )
    return {
        "usage": f"foundry-lightning {command} --config FILE [--config FILE …] [--SETTING VALUE …]",
        "description": f"{what}\n\nExample: {example.format(command)}\n\n{more}",
    }


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
            parser_class=_Parser,
            parser_kwargs={
                "exit_on_error": False,
                "allow_abbrev": False,  # a shortened option is a typo more often than meant
                **{name: {"exit_on_error": False, **_help(name)} for name in LOOPS},
            },
            args=args,
            run=run,
        )

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """Parses, and turns what does not parse into one sentence.

        Raises:
            WrongUsage: an unknown option, with the closest known one.
            ValueError: a config with an unknown setting or a value that does not fit.
        """
        try:
            super().parse_arguments(parser, args)
        except ArgumentError as error:
            parsers = getattr(self, "_subcommand_parsers", {"": parser}).values()
            options = dict.fromkeys(o for p in parsers for a in p._actions for o in a.option_strings)
            # an option that nests below a class is reported like a setting of a file
            is_option = re.search(
                r"nrecognized arguments|NestedArg\(|arguments are required: fit\.data, fit\.model", str(error)
            )
            raise (WrongUsage if is_option else ValueError)(explain(str(error), options=options)) from error

    def add_core_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Adds what this package has beside Lightning's own settings; first, as --help lists them in this order."""
        parser.add_argument("--run_name", type=str, default="mlm", help="Runs go to RUNS_DIR/RUN_NAME/1, 2, …")
        parser.add_argument("--runs_dir", type=str, default="runs", help="Folder of all runs.")
        parser.add_argument("--resume", type=bool, default=False, help="Go on with the newest run of this name.")
        parser.add_lightning_class_args(EvaluateEvery, "evaluate")
        parser.add_lightning_class_args(SaveEvery, "checkpoint")
        parser.add_lightning_class_args(ConsoleReport, "console")
        parser.add_lightning_class_args(Samples, "samples")
        parser.set_defaults({"evaluate.every": 100, "checkpoint.every": 500})
        super().add_core_arguments_to_parser(parser)

    def instantiate_classes(self) -> None:
        """Builds the objects, and says in one sentence what an object refuses.

        Raises:
            ValueError: a setting that the objects refuse.
        """
        try:
            super().instantiate_classes()
        except ValueError as error:
            text = explain(str(error), options=())
            if text == str(error):
                raise
            raise ValueError(text) from error

    # ------------------------------------------------------------- run folders

    def before_instantiate_classes(self) -> None:
        """Decides the run folder, and the checkpoint where none is named."""
        config = self.config if self.subcommand is None else self.config[self.subcommand]
        if config.trainer.check_val_every_n_epoch is not None and config.trainer.val_check_interval == NEVER:
            config.trainer.val_check_interval = None  # the user lets Lightning evaluate by epochs
        if config.console.mode == "quiet":
            config.samples.show = False
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
        own: list[Callback] = [PrintGuesses()] if self.subcommand == "predict" else []
        if fit:
            quiet = self._get(self.config, "console.mode") == "quiet"
            own = [self._stop, self._settings(), StartReport(show=not quiet)] + [CompareWithTeacher()] * (not quiet)
        kwargs["callbacks"] = [*(trainer.get("callbacks") or []), *own]
        return super().instantiate_trainer(**kwargs)

    def _settings(self) -> LogSettings:
        config = self.config if self.subcommand is None else self.config[self.subcommand]
        return LogSettings({k: v for k, v in config.clone().as_dict().items() if k != "config"})

    # ------------------------------------------------------------- after a fit

    def after_fit(self) -> None:
        """Exports the student, also as the newest of this run name, and says where it lies."""
        self._stop.receive(self.trainer)
        if self._stop.stopped_by and self.trainer.is_global_zero:
            print(f"stopped and saved in {self.run_folder}; to go on, add --resume true")
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
