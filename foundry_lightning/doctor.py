"""Everything of a fit that can be checked without training: one line for each check, all problems together."""

from __future__ import annotations

import netrc
import os
import re
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import lightning
import torch
from jsonargparse import Namespace
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins.io import CheckpointIO
from lightning.pytorch.utilities.seed import isolate_rng
from rich.console import Console
from rich.table import Table
from rich.text import Text

from foundry_lightning.callbacks import SaveEvery
from foundry_lightning.checkpoint import AtomicCheckpointIO, require_folder
from foundry_lightning.cli import FoundryCLI
from foundry_lightning.data.order import PAD_TO
from foundry_lightning.data.pipeline import DataPipeline
from foundry_lightning.facts import facts_of
from foundry_lightning.loggers import require_logger
from foundry_lightning.modules.teacher import WithTeacher
from foundry_lightning.parsing import WrongUsage, explain
from foundry_lightning.projection import ScoredProjection, left_untouched
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
_MIB = 2**20


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


class _Advice(str):
    """A sentence of a check that found no problem, but something to look at."""


class _Enough(Exception):
    """Ends a fit before its first update."""


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
        self.say(name, "advice" if isinstance(text, _Advice) else "ok", text)
        package = str(Path(__file__).parent)
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
            return _Advice("no login of wandb was found: run `wandb login`, or set WANDB_MODE=offline.")
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
                return _Advice("none is named.")
            if self.data.val is None:
                return _Advice("there is none: nothing is evaluated while it trains; give --data.init_args.val.")
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
            return _Advice(f"all places are scored, which is slower ({'; '.join(plain)}).")
        return "only masked places are scored."

    def _packing(self) -> str:
        for name in ("student", "teacher") if self._has_teacher else ("student",):
            self.module.packing(name)
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
        text = f"{files} checkpoints and 2 exports take {needed / _MIB:,.0f} MiB, {free / _MIB:,.0f} MiB are free"
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
        watch = _Watch(self)
        settings = {**self.trainer_settings, "callbacks": [watch]}

        def fit() -> str:
            trainer = lightning.Trainer(**settings)
            try:
                trainer.fit(
                    self.module,
                    datamodule=self.data,
                    ckpt_path=None if self.failed("resume") else self.cli.settings.ckpt_path,
                )
            except _Enough:
                return watch.plan()
            raise ValueError("the fit ends before its first batch; give more rows, or raise --trainer.max_steps.")

        place = len(self.findings)
        self.check("start", fit)
        self.findings[place:] = sorted(self.findings[place:], key=lambda finding: finding.name != "start")
        if self.failed("start"):
            for name in names[1:]:
                self.say(name, "not checked", "it needs start.")

    def look_at(self, watch: _Watch) -> None:
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


class _Watch(Callback):
    """Looks at a fit until its first batch is there."""

    trainer: Any
    module: Any
    batch: Any
    facts: Mapping[str, Any]

    def __init__(self, doctor: Doctor) -> None:
        self.doctor = doctor
        self.grown: int | None = None

    def on_train_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """What the start report would tell."""
        self.facts = facts_of(trainer, pl_module)

    def on_train_batch_start(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Checks, and ends the fit."""
        self.trainer, self.module, self.batch = trainer, pl_module, batch
        buffers = [(buffer, buffer.clone()) for buffer in pl_module.buffers()]
        self.doctor.look_at(self)
        pl_module.zero_grad()
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)
        raise _Enough

    def plan(self) -> str:
        """How long the run is."""
        plan = self.facts["plan"]
        window, of_epoch = plan["batches_per_update"], plan["batches_per_epoch"]
        if plan["updates"] is None:
            return "the run ends when it is stopped."
        text = f"{plan['updates']:,} updates of {window} batch{'es' * (window > 1)}"
        if not of_epoch:
            return f"{text} of a stream."
        epochs = plan["updates"] / -(-of_epoch // window)
        text += f", {epochs:.3g} pass{'es' * (epochs != 1)} over {of_epoch:,} batches"
        if epochs < 1:
            return _Advice(f"{text}: the rest of the data is never seen; raise --trainer.max_steps to see all of it.")
        return f"{text}."

    def forward(self) -> str:
        """Forward and backward of the first batch as the fit would do them."""
        self.module.on_train_batch_start(self.batch, 0)
        with _grown_memory(self.module.device) as grown:
            output = self.trainer.strategy.training_step(self.batch, 0)
            self.trainer.strategy.backward(output["loss"], self.trainer.optimizers[0])
        self.grown = grown[0] if grown else None
        loss, info = float(output["batch_loss"]), self.batch["info"]
        rows, width = self.batch["input_ids"].shape
        what = f"{rows} × {width} tokens" + (f", {info['num_masked']:,} masked" if "num_masked" in info else "")
        if not torch.isfinite(output["batch_loss"]):
            raise ValueError(
                f"the loss of the first batch ({what}) is {loss}; look at the student's weights and at these rows."
            )
        if not sum(value for name, value in info.items() if name.startswith("num_")):
            return _Advice(f"{what}: it teaches nothing; look at the texts, they hold special tokens only.")
        return f"{what}, loss {loss:.4f}."

    def gradients(self) -> str:
        """Whether each parameter has a finite gradient."""
        parameters = [p for p in self.module.parameters() if p.requires_grad]
        norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        scaled = self.trainer.precision == "16-mixed"  # an overflow is how the scaler finds its scale
        if not scaled and not torch.isfinite(norm):
            raise ValueError(
                f"the gradient's norm is {float(norm)} though the loss is finite; look at the student's layers."
            )
        idle = sum(p.numel() for p in parameters if p.grad is None)
        if idle:
            return _Advice(f"no loss reaches {idle:,} of the trainable parameters; they stay as they are.")
        return "finite." if scaled else f"finite, norm {float(norm):.3g}."

    def validation(self) -> str:
        """One evaluation step."""
        data, module = self.trainer.datamodule, self.module
        batches = iter(data.val_dataloader())
        batch = next(batches)
        batches.close()
        batch = module.transfer_batch_to_device(batch, module.device, 0)
        with left_untouched(module.student), self.trainer.precision_plugin.val_step_context():
            module.validation_step(batch, 0)
        means = module.val_metric.compute()
        module.val_metric.reset()
        wrong = [name for name, value in means.items() if not torch.isfinite(value)]
        if wrong:
            raise ValueError(f"{', '.join(wrong)} of the first validation batch is not finite; look at its rows.")
        return ", ".join(f"{name.replace('_', ' ')} {float(value):.4f}" for name, value in means.items()) + "."

    def memory(self) -> str:
        """What the run takes at its largest batch, beside what is free."""
        memory, rows = self.facts["memory"], self.batch["input_ids"].numel()
        device, free = self.module.device, memory["memory_free"]
        if self.grown is None:
            known = f"{memory['memory_without_activations'] / _MIB:,.0f} MiB for weights, gradients and optimizer state"
            return _Advice(f"{known}; activations cannot be measured on {device.type}.")
        largest = max(_largest_batch(self.trainer.datamodule.train), rows)
        activations = max(self.grown - memory["memory_of_gradients"], 0) * largest / rows
        needed = memory["memory_to_come"] + activations
        text = (
            f"{memory['memory_without_activations'] / _MIB:,.0f} MiB for weights, gradients and optimizer state, about "
            f"{activations / _MIB:,.0f} MiB for a batch of {largest:,} places (measured with {rows:,})"
        )
        if free is None:
            return _Advice(f"{text}; this system does not say how much is free.")
        if needed > free:
            raise ValueError(
                f"{text}, {needed / _MIB:,.0f} MiB of it still to come, and {free / _MIB:,.0f} MiB are free; lower "
                "batch_size (and raise accumulate_grad_batches), or set gradient_checkpointing=True."
            )
        return f"{text}; {free / _MIB:,.0f} MiB are free."


def _first_rows(batches: Any) -> str:
    """Reads the first rows of a source."""
    if problems := batches.source_problems():
        raise ValueError(" ".join(problems))
    if not isinstance(batches, DataPipeline):
        return "ready batches."
    if batches.is_stream:
        list(batches.source.peek(1000))
    return f"{batches.source.description}, its first rows can be read."


def _largest_batch(batches: Any) -> int:
    """Places of the largest batch, padding included."""
    if not isinstance(batches, DataPipeline):
        return max(int(batch["input_ids"].numel()) for batch in batches.batches)
    if batches.batch_tokens is not None:
        return batches.batch_tokens
    longest = batches.max_length
    if not (batches.pack or batches.is_stream):
        longest = min(-(-int(batches.lengths.max()) // PAD_TO) * PAD_TO, longest)
    return batches.batch_size * longest


@contextmanager
def _grown_memory(device: torch.device) -> Iterator[list[int]]:
    """Leaves in the list by how many bytes the memory in use grew at most; nothing where that cannot be measured."""
    grown: list[int] = []
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        yield grown
        grown.append(torch.cuda.max_memory_allocated(device) - before)
        return
    status, reset = Path("/proc/self/status"), Path("/proc/self/clear_refs")
    if device.type != "cpu" or not os.access(reset, os.W_OK):
        yield grown
        return

    def resident(name: str) -> int:
        found = re.search(rf"{name}:\s+(\d+) kB", status.read_text())
        assert found is not None
        return int(found[1]) * 1024

    reset.write_text("5")  # the peak begins anew
    before = resident("VmRSS")
    yield grown
    grown.append(resident("VmHWM") - before)


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
