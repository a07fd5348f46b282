"""Everything of a fit that can be checked without training: one line for each check, all problems together."""

from __future__ import annotations

import netrc
import os
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import lightning
from jsonargparse import Namespace
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.plugins.io import CheckpointIO
from lightning.pytorch.utilities.seed import isolate_rng
from rich.console import Console
from rich.table import Table
from rich.text import Text

from foundry_lightning.callbacks import SaveEvery
from foundry_lightning.checkpoint import AtomicCheckpointIO, require_folder
from foundry_lightning.cli import FoundryCLI
from foundry_lightning.data.pipeline import DataPipeline
from foundry_lightning.doctor.first_batch import MIB, Advice, Enough, FirstBatch
from foundry_lightning.loggers import require_logger
from foundry_lightning.models import uses_flash_attention
from foundry_lightning.modules.teacher import WithTeacher
from foundry_lightning.parsing import WrongUsage, explain
from foundry_lightning.projection import ScoredProjection
from foundry_lightning.tokenizer import load_tokenizer

_COLOURS = {"ok": "green", "advice": "yellow", "problem": "red", "not checked": "dim"}
_OURS = (ValueError, TypeError, OSError, ModuleNotFoundError, MisconfigurationException)  # their text is a sentence
_ON_ONE = {"devices": 1, "num_nodes": 1, "strategy": "auto"}
_NOTHING_WRITTEN = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "default_root_dir": None,
    "profiler": None,
    "fast_dev_run": False,
}


@dataclass(frozen=True)
class Finding:
    """The result of a check.

    Attributes:
        name: What was checked.
        status: `ok`, `advice`, `problem` or `not checked`.
        text: A sentence; that of a problem says what to do.
    """

    name: str
    status: str
    text: str


class _Parsed(FoundryCLI):
    """Reads the options of `fit`, and builds and runs nothing."""

    def before_instantiate_classes(self) -> None:
        """Leaves the run folder to a check."""

    def instantiate_classes(self) -> None:
        """Leaves the objects to checks of their own."""

    def _run_subcommand(self, subcommand: str) -> None:
        pass

    @property
    def settings(self) -> Any:
        """The parsed config."""
        return self.config["fit"]

    def build(self, part: str, **changes: Any) -> Any:
        """What a part of the config describes.

        Args:
            part: `data`, `model` or `trainer`.
            changes: Settings of it that take another value.
        """
        config = self.settings[part].clone()
        settings = config.get("init_args") if part != "trainer" else config
        for name, value in changes.items():
            if name in settings:
                settings[name] = value
        parser = self._subcommand_parsers["fit"]
        try:
            return parser.instantiate(Namespace({part: config}), instantiate_groups=False)[part]
        except ValueError as error:
            raise ValueError(explain(str(error), options=())) from error

    def decide_folder(self) -> Path:
        """The folder that a fit would write to; reads the checkpoint that it would resume."""
        before = os.environ.get("FOUNDRY_LIGHTNING_RUN_FOLDER")
        try:
            super().before_instantiate_classes()
        finally:  # a fit of this process decides anew
            os.environ.pop("FOUNDRY_LIGHTNING_RUN_FOLDER", None)
            if before is not None:
                os.environ["FOUNDRY_LIGHTNING_RUN_FOLDER"] = before
        root = self.settings.trainer.get("default_root_dir")
        return self.run_folder if root is None else Path(root)


class Doctor:
    """Runs the checks of a config in the order in which a fit would come upon them.

    Args:
        args: The options of `fit`.

    Attributes:
        findings: The results so far.
    """

    def __init__(self, args: list[str]) -> None:
        self.args = args
        self.findings: list[Finding] = []
        self.trainer_settings: dict[str, Any] = {}

    # ------------------------------------------------------------------ results

    def say(self, name: str, status: str, text: str) -> None:
        """Adds a finding, on one line."""
        self.findings.append(Finding(name, status, " ".join(text.replace("\n  - ", " ").split())))

    def failed(self, name: str) -> bool:
        """Whether a check found a problem or could not run."""
        return any(f.name == name and f.status in ("problem", "not checked") for f in self.findings)

    def check(self, name: str, look: Callable[[], str], *, needs: tuple[str, ...] = ()) -> bool:
        """Runs a check; what it raises is a problem, what it returns a sentence.

        Returns:
            Whether nothing stands in the way.
        """
        if lacking := [need for need in needs if self.failed(need)]:
            self.say(name, "not checked", f"it needs {' and '.join(lacking)}.")
            return False
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                text = look()
            except WrongUsage:
                raise
            except _OURS as error:
                known = next((f for f in self.findings if f.text == " ".join(str(error).split())), None)
                said = (
                    ("problem", str(error)) if known is None else ("not checked", f"the same problem as {known.name}.")
                )
                self.say(name, *said)
                return False
            except Exception as error:  # models, data and callbacks are the user's code
                self.say(
                    name, "problem", f"{type(error).__name__}: {error}; with --debug a fit shows where it is raised."
                )
                return False
        self.say(name, "advice" if isinstance(text, Advice) else "ok", text)
        package = str(Path(__file__).parents[1])
        for text in dict.fromkeys(str(w.message) for w in caught if w.filename.startswith(package)):
            self.say(name, "advice", text)
        return True

    # ------------------------------------------------------------------ checks

    def run(self) -> list[Finding]:
        """All checks.

        Raises:
            WrongUsage: an option that does not exist.
        """
        if not self.check("config", self._config):
            return self.findings
        self.check("resume", self._resume)
        self.check("run folder", self._run_folder, needs=("resume",))
        self.check("logger", self._logger)
        self.check("device", self._device)
        self._data()
        self.check("settings", self._module)
        self.check("tokenizer", self._tokenizer, needs=("settings", "training data"))
        self.check("student", self._student, needs=("settings", "tokenizer"))
        models: tuple[str, ...] = ("student",)
        if self._has_teacher:
            self.check("teacher", self._teacher, needs=("settings", "tokenizer"))
            models = ("student", "teacher")
        self.check("vocabulary", self._vocabulary, needs=models)
        if not self.failed("vocabulary") and getattr(self.module, "projection", None) is not None:
            self.check("projection", self._projection)
        packs = not self.failed("training data") and getattr(self.data.train, "pack", False)
        if packs:
            self.check("packing", self._packing, needs=models)
        self.check("lengths", self._lengths, needs=("vocabulary", "training data"))
        self.check("disk space", self._disk_space, needs=("student", "run folder"))
        self._first_batch(
            needs=("lengths", *(["packing"] if packs else []), *([] if self.trainer_settings else ["device"]))
        )
        return self.findings

    def _config(self) -> str:
        argv, sys.argv = sys.argv, sys.argv[:1]  # Lightning warns of arguments beside those of the command line
        try:
            self.cli = _Parsed(["fit", *self.args])
        finally:
            sys.argv = argv
        files = [str(file) for file in self.cli.settings.get("config") or []]
        return f"{' and '.join(files) or 'the options'} can be read."

    def _resume(self) -> str:
        self.folder = self.cli.decide_folder()
        checkpoint = self.cli.settings.ckpt_path
        return "a new run." if checkpoint is None else f"goes on from {checkpoint}."

    def _run_folder(self) -> str:
        SaveEvery(**self.cli.settings.checkpoint)  # refuses its settings
        self.checkpoints = Path(self.cli.settings.checkpoint.folder or self.folder)
        for name, folder, option in (
            ("run folder", self.folder, "--runs_dir"),
            ("checkpoint.folder", self.checkpoints, "--checkpoint.folder"),
        ):
            require_folder(folder, name=name)
            existing = _existing(folder)
            try:
                with tempfile.TemporaryFile(dir=existing):
                    pass
            except OSError as error:
                raise OSError(
                    f"{existing} must be writable for {folder} ({error.strerror}); give another {option}."
                ) from error
        return f"{self.folder} can be written."

    def _logger(self) -> str:
        given = self.cli.settings.trainer.get("logger")
        entries = given if isinstance(given, list) else [given]
        names = [str(getattr(entry, "class_path", "")).rpartition(".")[2] for entry in entries if entry]
        if given in (None, True):
            return "metrics.csv in the run folder."
        for backend, name in (("wandb", "WandbLogger"), ("tensorboard", "TensorBoardLogger")):
            if name in names:
                require_logger(backend)
        self.cli.build("trainer", callbacks=None)
        wandb = next((e for e, name in zip(entries, names, strict=False) if name == "WandbLogger"), None)
        if wandb is None:
            return f"{', '.join(names) or 'none'}."
        if wandb.init_args.get("offline") or os.environ.get("WANDB_MODE") in ("offline", "dryrun", "disabled"):
            return "WandbLogger, offline: `wandb sync` sends the run later."
        if not wandb_login():
            return Advice("no login of wandb was found: run `wandb login`, or set WANDB_MODE=offline.")
        return "WandbLogger, with a login."

    def _device(self) -> str:
        settings = self.trainer_settings = {**self.cli.build("trainer", logger=None), **_NOTHING_WRITTEN}
        plugins = settings["plugins"] or []
        plugins = plugins if isinstance(plugins, list) else [plugins]
        if not any(isinstance(plugin, CheckpointIO) for plugin in plugins):
            settings["plugins"] = [*plugins, AtomicCheckpointIO()]
        asked = ", ".join(f"{name}={settings[name]!r}" for name in ("accelerator", "devices", "strategy"))
        try:
            trainer = lightning.Trainer(**{**settings, "callbacks": []})
        except Exception as error:
            settings.update(_ON_ONE, accelerator="cpu", precision="32-true")  # what does not depend on it is looked at
            text = f"the trainer cannot start here: {str(error).rstrip('.')}"
            try:
                lightning.Trainer(**{**settings, "callbacks": []})
            except Exception:  # it is another setting
                self.trainer_settings = {}
                raise ValueError(f"{text}; correct this setting of the trainer.") from error
            raise ValueError(
                f"{text} ({asked}); --trainer.accelerator auto --trainer.devices 1 --trainer.strategy auto starts "
                "everywhere."
            ) from error
        ranks, root = trainer.world_size, trainer.strategy.root_device
        settings.update(_ON_ONE)  # one process with accumulation k is the same run as k processes
        settings["accumulate_grad_batches"] = trainer.accumulate_grad_batches * ranks
        if root.type == "cuda":
            settings["devices"] = [root.index or 0]
        return f"{root}, {ranks} process{'es' * (ranks > 1)}, precision {trainer.precision}."

    def _data(self) -> None:
        cli, settings = self.cli, self.cli.settings.data.get("init_args")

        def train() -> str:
            self.data = cli.build("data", val=None)
            return _first_rows(self.data.train)

        def val() -> str:
            if settings.get("val") is not None:
                text = _first_rows(cli.build("data", train=None).val)
                if not self.failed("training data"):
                    self.data = cli.build("data")
                return text
            if self.failed("training data"):
                return Advice("none is named.")
            if self.data.val is None:
                return Advice("there is none: nothing is evaluated while it trains; give --data.init_args.val.")
            return _first_rows(self.data.val)

        self.check("training data", train)
        self.check("validation data", val)

    def _module(self) -> str:
        self.module = self.cli.build("model", tokenizer=None)
        return f"{type(self.module).__name__}."

    @property
    def _has_teacher(self) -> bool:
        return not self.failed("settings") and isinstance(self.module, WithTeacher) and self.module.needs_teacher

    def _tokenizer(self) -> str:
        own = self.cli.settings.model.get("init_args", {}).get("tokenizer")
        if own is not None:
            self.module.tokenizer = load_tokenizer(own)
        self.data.prepare_data()
        if self.module.tokenizer is None:
            self.module.tokenizer = self.data.tokenizer
        if self.module.tokenizer is None:
            return "none: the data hold token ids."
        return f"{len(self.module.tokenizer):,} tokens."

    def _student(self) -> str:
        student = self.module.build_student()
        return f"{type(student).__name__}, {sum(p.numel() for p in student.parameters()):,} parameters."

    def _teacher(self) -> str:
        teacher = self.module.build_teacher()
        return f"{type(teacher).__name__}, {sum(p.numel() for p in teacher.parameters()):,} parameters."

    def _vocabulary(self) -> str:
        self.module.prepare()
        masking = getattr(self.module, "masking", None)
        if masking is None:
            return "student and teacher give hidden states."
        fit = "student, teacher and tokenizer fit" if self._has_teacher else "student and tokenizer fit"
        return f"{fit}: {masking.vocab_size:,} ids, {masking.mask_token_id} is the mask."

    def _projection(self) -> str:
        found = [("student", self.module.projection), ("teacher", getattr(self.module, "teacher_projection", None))]
        plain = [f"{name}: {p.reason}" for name, p in found if p is not None and not isinstance(p, ScoredProjection)]
        if plain:
            return Advice(f"all places are scored, which is slower ({'; '.join(plain)}).")
        return "only masked places are scored."

    def _packing(self) -> str:
        names = ("student", "teacher") if self._has_teacher else ("student",)
        for name in names:
            self.module.prove_packing(name)
        if any(uses_flash_attention(getattr(self.module, name)) for name in names):
            return Advice("flash attention's packing is proven by the first step, on a GPU.")
        return "proven: texts of a row do not see each other."

    def _lengths(self) -> str:
        self.module.connect_data(self.data)
        return f"rows of at most {self.data.train.max_length} tokens fit."

    def _disk_space(self) -> str:
        saver = SaveEvery(**self.cli.settings.checkpoint)
        sizes = [p.numel() * p.element_size() for m in self.module.trained_modules() for p in m.parameters()]
        checkpoint, export = 3 * sum(sizes), sum(sizes)  # with two moments for each weight
        files = (saver.keep if saver.every else 1) + 1  # the next one is written before the oldest is removed
        needed, free = files * checkpoint + 2 * export, shutil.disk_usage(_existing(self.checkpoints)).free
        text = f"{files} checkpoints and 2 exports take {needed / MIB:,.0f} MiB, {free / MIB:,.0f} MiB are free"
        if needed > free:
            raise OSError(f"{text}; free some, give another --runs_dir, or lower --checkpoint.keep.")
        return f"{text}."

    # ------------------------------------------------------------------ one batch

    def _first_batch(self, *, needs: tuple[str, ...]) -> None:
        """Starts the fit, and ends it after forward and backward of its first batch."""
        names = ("start", "first batch", "gradients", "validation batch", "memory", "report")
        if lacking := [need for need in needs if self.failed(need)]:
            for name in names:
                self.say(name, "not checked", f"it needs {' and '.join(lacking)}.")
            return
        watch = FirstBatch(self.look_at)
        settings = {**self.trainer_settings, "callbacks": [watch]}

        def fit() -> str:
            trainer = lightning.Trainer(**settings)
            try:
                trainer.fit(
                    self.module,
                    datamodule=self.data,
                    ckpt_path=None if self.failed("resume") else self.cli.settings.ckpt_path,
                )
            except Enough:
                return watch.plan()
            raise ValueError("the fit ends before its first batch; give more rows, or raise --trainer.max_steps.")

        place = len(self.findings)
        self.check("start", fit)
        self.findings[place:] = sorted(self.findings[place:], key=lambda finding: finding.name != "start")
        if self.failed("start"):
            for name in names[1:]:
                self.say(name, "not checked", "it needs start.")

    def look_at(self, watch: FirstBatch) -> None:
        """The checks within the fit, when its first batch is there."""
        self.check("first batch", watch.forward)
        self.check("gradients", watch.gradients, needs=("first batch",))
        if watch.trainer.datamodule.val is not None:
            self.check("validation batch", watch.validation)
        self.check("memory", watch.memory, needs=("device", "first batch"))
        for sentence in watch.facts["warnings"]:
            self.say("report", "advice", sentence)
        if not watch.facts["warnings"]:
            self.say("report", "ok", "no figure of the data looks wrong.")


def _first_rows(batches: Any) -> str:
    """Reads the first rows of a source."""
    if problems := batches.source_problems():
        raise ValueError(" ".join(problems))
    if not isinstance(batches, DataPipeline):
        return "ready batches."
    if batches.is_stream:
        list(batches.source.peek(1000))
    return f"{batches.source.description}, its first rows can be read."


def _existing(folder: Path) -> Path:
    """The folder, or the nearest above it that is there."""
    return next(place for place in (folder, *folder.absolute().parents) if place.exists())


def wandb_login() -> bool:
    """Whether an API key of wandb is in the environment or in the netrc file; its value is not looked at."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = urlparse(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    file = Path(os.environ.get("NETRC", Path.home() / ("_netrc" if os.name == "nt" else ".netrc")))
    try:
        return file.is_file() and netrc.netrc(file).authenticators(host) is not None
    except (netrc.NetrcParseError, OSError):
        return False


def diagnose(args: list[str]) -> int:
    """Checks everything of a fit that can be checked without training, and prints a line for each check.

    Example: foundry-lightning doctor --config configs/mlm.yaml --data.init_args.train 'data/*.txt'

    Takes all options of fit. Nothing is written but the cache of tokens and tokenizers. The exit code is 0 without a
    problem (advice is none), 1 with one.

    Args:
        args: The options of `fit`.

    Returns:
        The exit code.

    Raises:
        WrongUsage: an option that does not exist.
    """
    console = Console(highlight=False)
    doctor = Doctor(args)
    with console.status("checking"), isolate_rng():
        findings = doctor.run()
    if console.is_terminal:
        table = Table(show_header=False, box=None, pad_edge=False)
        for finding in findings:
            colour = _COLOURS[finding.status]
            table.add_row(f"[{colour}]{finding.status}[/{colour}]", finding.name, Text(finding.text))
        console.print(table)
    else:
        for finding in findings:
            console.print(f"{finding.status:<11} {finding.name}: {finding.text}", soft_wrap=True, markup=False)
    problems = sum(finding.status == "problem" for finding in findings)
    console.print(f"{problems or 'no'} problem{'s' * (problems > 1)} found.")
    return int(problems > 0)
