"""The facades: a config is translated into Lightning's objects, which do the work."""

from __future__ import annotations

import copy
import inspect
import os
from collections.abc import Callable
from dataclasses import asdict, replace
from numbers import Integral
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning
import rich
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import Callback, LambdaCallback, ProgressBar
from lightning.pytorch.plugins import Precision
from lightning.pytorch.plugins.io import CheckpointIO
from lightning.pytorch.strategies import SingleDeviceStrategy, Strategy
from torch import nn

from foundry_lightning.callbacks import NEVER, EvaluateEvery, History, LogSettings, SaveEvery, StopOnSignal
from foundry_lightning.callbacks.console import ConsoleReport
from foundry_lightning.callbacks.launched import is_launched
from foundry_lightning.callbacks.samples import Samples
from foundry_lightning.callbacks.start_report import StartReport
from foundry_lightning.checkpoint import AtomicCheckpointIO, checkpoint_file, logged_as, read_checkpoint, require_folder
from foundry_lightning.config import (
    PRECISIONS,
    Checks,
    DistilMLMConfig,
    EncoderDistillConfig,
    MLMConfig,
    gathered,
    plain,
    problems_to_error,
)
from foundry_lightning.data.datamodule import MLMDataModule
from foundry_lightning.export import export_student, load_student_weights
from foundry_lightning.loggers import build_logger, require_logger
from foundry_lightning.modules.base import EncoderModule
from foundry_lightning.modules.distil_mlm import DistilMLMLitModule
from foundry_lightning.modules.encoder_distil import EncoderDistillLitModule
from foundry_lightning.modules.mlm import MLMLitModule
from foundry_lightning.quiet import quiet_lightning


def _lightning_shows(callbacks: list[Callback]) -> bool:
    """Whether Lightning's bar is drawn: one that the user gives, or its own on a terminal where nothing else shows."""
    if any(isinstance(callback, ProgressBar) for callback in callbacks):
        return True
    return rich.get_console().is_terminal and not any(isinstance(callback, ConsoleReport) for callback in callbacks)


def build_trainer(
    config: Any, *, callbacks: list[Callback], total_steps: int | None, logger: Any, evaluates: bool = True
) -> lightning.Trainer:
    """Translates a config into a `lightning.Trainer`; `trainer_kwargs` win, their callbacks and plugins are added.

    Raises:
        ValueError: Lightning refuses a setting.
    """
    extra = dict(config.trainer_kwargs)
    plugins = extra.pop("plugins", None) or []
    plugins = [*plugins] if isinstance(plugins, (list, tuple)) else [plugins]
    if not any(isinstance(plugin, CheckpointIO) for plugin in plugins):
        plugins.append(AtomicCheckpointIO())
    if isinstance(extra.get("strategy"), Strategy):
        extra["strategy"] = copy.copy(extra["strategy"])  # a Trainer writes into it, and `evaluate` needs another
    own = extra.pop("callbacks", None) or []
    own = own if isinstance(own, (list, tuple)) else [own]
    least = {"max_steps": -1, "max_epochs": -1, "accumulate_grad_batches": 1, "log_every_n_steps": 1}
    extra |= {name: plain(extra[name]) for name in least.keys() & extra.keys()}
    checks = Checks(SimpleNamespace(**extra))
    for name in [name for name in least if name in extra]:
        checks.integer(name, low=least[name], optional=name.startswith("max"))
    problems_to_error(checks.problems, of="trainer_kwargs")
    for callback in own:
        if not isinstance(callback, Callback):
            raise TypeError(f"trainer_kwargs['callbacks'] must be Lightning callbacks, got {callback!r}.")
    callbacks = [*callbacks, *own]
    settings: dict[str, Any] = {
        "accelerator": config.device,
        "devices": config.devices,
        "num_nodes": config.num_nodes,
        "strategy": config.strategy,
        "precision": PRECISIONS[config.torch_dtype],
        "max_steps": -1 if total_steps is None else total_steps,
        "max_epochs": config.epochs if total_steps is None else -1,
        "accumulate_grad_batches": config.grad_accumulation_steps,
        "gradient_clip_val": config.max_grad_norm or None,
        "limit_val_batches": None if evaluates else 0,
        "num_sanity_val_steps": 0,
        "log_every_n_steps": config.log_every,
        "logger": logger,
        "enable_checkpointing": any(isinstance(callback, SaveEvery) for callback in callbacks),
        "enable_progress_bar": config.progress_bar and _lightning_shows(callbacks),
        "enable_model_summary": False,
        "use_distributed_sampler": False,
        "default_root_dir": config.save_dir or None,
    }
    if any(isinstance(plugin, Precision) for plugin in plugins):
        del settings["precision"]  # the plugin is one
    if not extra.keys() & {"check_val_every_n_epoch", "val_check_interval"}:
        settings |= {"check_val_every_n_epoch": None, "val_check_interval": NEVER}
    try:
        return lightning.Trainer(**{**settings, **extra}, callbacks=callbacks, plugins=plugins)
    except (MisconfigurationException, ValueError, TypeError, RuntimeError, ImportError) as error:
        raise ValueError(
            f"lightning.Trainer refuses a setting of the config or its trainer_kwargs: {error}; correct it."
        ) from error


def _device_problems(config: Any) -> list[str]:
    """What this machine does not have."""
    there = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    problems = []
    if not there.get(config.device, True):
        problems.append(f"device={config.device!r} is not there, torch finds none; set device='auto' or 'cpu'.")
    on_cpu = config.device == "cpu" or (config.device == "auto" and not any(there.values()))
    if config.torch_dtype == "float16" and on_cpu:
        problems.append("torch_dtype='float16' needs a GPU, and this run is on the CPU; use 'bfloat16' or 'float32'.")
    return problems


def _takes_step_and_loss(on_step: Any) -> bool:
    if not callable(on_step):
        return False
    try:
        inspect.signature(on_step).bind(1, 0.0)
    except TypeError:
        return False
    except ValueError:  # some builtins do not tell
        return True
    return True


def _require_data(dataset: Any) -> None:
    if dataset is None:
        raise TypeError("dataset must be a source of texts, a DataPipeline or a list of batches, got None; give one.")


def _to_device(module: EncoderModule, trainer: lightning.Trainer) -> None:
    """Gives the module its place back, which Lightning moves to the host after a run.

    Where Lightning forked the ranks it stays there: a process that has used CUDA can fork none again.
    """
    if not is_launched(trainer):
        module.to(trainer.strategy.root_device)


class _Facade:
    """Builds the objects, fits, returns the result. No loop of its own."""

    module: EncoderModule
    config: Any

    def _start(self, module: EncoderModule) -> None:
        problems = _device_problems(self.config)
        require_logger(self.config.log_backend)
        module.by_facade = True
        with gathered(problems):
            module.prepare()
        problems_to_error(problems, of=type(self).__name__)
        self.module = module
        self._trainer: lightning.Trainer | None = None
        self._resume: Path | None = None

    @property
    def student(self) -> nn.Module:
        """The model in training."""
        return self.module.build_student()

    @quiet_lightning()
    def train(
        self,
        dataset: Any,
        eval_dataset: Any = None,
        on_step: Callable[[int, float], Any] | None = None,
        shuffle: bool = False,
        total_steps: int | None = None,
    ) -> dict[str, Any]:
        """Trains the student in place and leaves it in eval mode.

        Args:
            dataset: A `DataPipeline`, a list of ready batches, or a source that `DataPipeline` takes.
            eval_dataset: The same, evaluated every `eval_every` updates and at the end.
            on_step: Called as `on_step(global_step, loss)` at multiples of `log_every` and at the last step.
            shuffle: Whether rows (ready batches: batches) are permuted in each epoch.
            total_steps: Updates of the run, over as many epochs as it takes; None: `epochs` decides.

        Returns:
            `losses`: a float per training batch of this rank; `eval_losses`: step -> `val/loss`; `device`.

        Raises:
            ValueError: what the data show to be wrong, before any file is written.
        """
        if total_steps is not None:
            if not isinstance(total_steps, Integral) or isinstance(total_steps, bool) or total_steps < 1:
                raise ValueError(f"total_steps must be an integer of at least 1 or None, got {total_steps!r}.")
            total_steps = int(total_steps)
        limit = self.config.trainer_kwargs.get("max_steps")
        if total_steps is not None and limit not in (None, -1, total_steps):
            raise ValueError(
                f"total_steps={total_steps} and trainer_kwargs['max_steps']={limit} both end the run; give one."
            )
        if on_step is not None and not _takes_step_and_loss(on_step):
            raise TypeError(f"on_step must be a function of (global_step, loss), got {on_step!r}; take both.")
        _require_data(dataset)
        if self.config.save_dir:
            require_folder(Path(self.config.save_dir), name="save_dir")
        data = MLMDataModule(train=dataset, val=eval_dataset, shuffle=shuffle, num_workers=self.config.num_workers)
        history = History(on_step)

        def began(trainer: lightning.Trainer, _: Any = None) -> None:
            self._trainer, self._resume = trainer, None

        callbacks: list[Callback] = [
            LambdaCallback(on_train_start=began),  # a run that is refused has not begun
            EvaluateEvery(self.config.eval_every if eval_dataset is not None else 0),
            history,
            LogSettings({k: v for k, v in asdict(self.config).items() if k != "trainer_kwargs"}),
        ]
        saver = SaveEvery(self.config.save_every, folder=self.config.save_dir) if self.config.save_dir else None
        stop = StopOnSignal(saver)
        callbacks.append(stop)
        if self._shows_progress():
            folder = self.config.save_dir
            callbacks += [StartReport(folder), ConsoleReport(), Samples(folder=folder)]
        if saver is not None and self.config.save_every:
            callbacks.append(saver)
        records = None if self._resume is None else logged_as(read_checkpoint(self._resume))
        logger = build_logger(self.config, records=records)
        trainer = build_trainer(
            self.config, callbacks=callbacks, total_steps=total_steps, logger=logger, evaluates=eval_dataset is not None
        )
        trainer.fit(self.module, datamodule=data, ckpt_path=self._resume, weights_only=True)
        began(trainer)
        history.receive(trainer)
        stop.receive(trainer)
        _to_device(self.module, trainer)
        self.student.eval()
        stop.raise_if_stopped(trainer)
        device = trainer.strategy.root_device.type
        return {"losses": history.losses, "eval_losses": history.eval_losses, "device": device}

    def _shows_progress(self) -> bool:
        """Whether this package shows how the run goes: not where the user asks for Lightning's bar."""
        extra = self.config.trainer_kwargs
        own = extra.get("callbacks") or []
        own = own if isinstance(own, (list, tuple)) else [own]
        bars = any(isinstance(callback, (ProgressBar, ConsoleReport)) for callback in own)
        return bool(self.config.progress_bar) and "enable_progress_bar" not in extra and not bars

    @quiet_lightning()
    def evaluate(self, dataset: Any) -> dict[str, float]:
        """Evaluates the student: the same tokens are scored at every call.

        Returns:
            `loss`, `mlm`, `perplexity`, `masked_accuracy` (token means over all ranks).

        Raises:
            ValueError: called from within `train` where several ranks train.
        """
        _require_data(dataset)
        module, fit = self.module, self.module._trainer
        fits = fit is not None and fit.state.fn == "fit" and not fit.state.stopped
        if fits and not isinstance(module.trainer.strategy, SingleDeviceStrategy):
            raise ValueError(
                "evaluate must wait for the end of train() where several ranks train, got a call on one of them; "
                "give train() an eval_dataset and set eval_every."
            )
        data = MLMDataModule(train=None, val=dataset, num_workers=self.config.num_workers)
        # what watches the user's training is not to take this for a part of it
        extra = {k: v for k, v in self.config.trainer_kwargs.items() if k not in ("logger", "callbacks", "profiler")}
        config = replace(self.config, trainer_kwargs=extra)
        trainer = build_trainer(config, callbacks=[], total_steps=None, logger=False)
        modes, hook = [(part, part.training) for part in module.modules()], module._current_fx_name
        try:
            trainer.validate(module, datamodule=data, verbose=False)
        finally:  # a fit may be going on
            _to_device(module, trainer)
            module.trainer, module._current_fx_name = fit, hook
            for part, mode in modes:
                part.training = mode
        values = trainer.callback_metrics
        names = ("loss", "mlm", "perplexity", "masked_accuracy")
        return {name: float(values[f"val/{name}"]) for name in names if f"val/{name}" in values}

    def export(self, path: str | os.PathLike[str]) -> Path:
        """Writes the folder that `AutoModelForMaskedLM` and `AutoTokenizer` load."""
        return export_student(self.student, path, tokenizer=self.module.tokenizer, facts=self._facts())

    def _facts(self) -> dict[str, Any]:
        settings = asdict(self.config)
        return {name: settings[name] for name in settings if settings[name] not in ("", None, {}, ())}

    @quiet_lightning()
    def save_checkpoint(self, path: str | os.PathLike[str]) -> Path:
        """Saves student, optimizer, schedule and position; works before, during and after `train`.

        Args:
            path: A `.ckpt` file, or a folder that gets `checkpoint.ckpt`.
        """
        file = checkpoint_file(path)
        if self._resume is not None:  # nothing was trained since
            AtomicCheckpointIO().save_checkpoint(read_checkpoint(self._resume), file)
        elif self._trainer is None:
            trainer = build_trainer(self.config, callbacks=[], total_steps=None, logger=False)
            trainer.strategy.connect(self.module)
            self.module.trainer = trainer
            trainer.save_checkpoint(file, weights_only=False)
        else:
            self._trainer.save_checkpoint(file, weights_only=False)
        return file

    def resume_from_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Loads the student's weights at once; the next `train` on the same data goes on where it was taken.

        Args:
            path: A `.ckpt` file, or a folder with `checkpoint.ckpt`.

        Raises:
            FileNotFoundError: no such checkpoint.
            ValueError: a damaged checkpoint, or one of another model.
        """
        file = checkpoint_file(path)
        checkpoint = read_checkpoint(file)
        load_student_weights(self.student, checkpoint)
        projector, weight = getattr(self.module, "projector", None), checkpoint["state_dict"].get("projector.weight")
        if projector is not None and weight is not None:  # an evaluation before the next `train` needs it
            projector.load_state_dict({"weight": weight})
        self._resume = file


class MLMTrainer(_Facade):
    """Pretrains a student by masked-language modeling.

    Args:
        student: A masked language model (`.logits` `[B, S, V]`), trained in place.
        tokenizer: Its tokenizer, or a folder or hub name; None: `config.mask_token_id` is required.
        config: The settings.

    Raises:
        TypeError: the student is no module.
        ValueError: all that student, tokenizer and config show to be wrong, in one message.
    """

    def __init__(self, student: nn.Module, tokenizer: Any = None, config: MLMConfig | None = None) -> None:
        module = MLMLitModule(student, config=config, tokenizer=tokenizer)
        self.config: MLMConfig = module.config
        self._start(module)


class DistilMLMTrainer(_Facade):
    """Distils a teacher into a student while it learns from the data (the DistilBERT objective).

    Args:
        student: A masked language model, trained in place.
        teacher: A masked language model with the same vocabulary; it is frozen.
        tokenizer: The tokenizer of both, or a folder or hub name; None: `config.mask_token_id` is required.
        config: The settings.

    Raises:
        TypeError: student or teacher is no module.
        ValueError: all that student, teacher, tokenizer and config show to be wrong.
    """

    def __init__(
        self, student: nn.Module, teacher: nn.Module, tokenizer: Any = None, config: DistilMLMConfig | None = None
    ) -> None:
        module = DistilMLMLitModule(student, teacher, config=config, tokenizer=tokenizer)
        self.config: DistilMLMConfig = module.config
        self._start(module)


class EncoderDistillTrainer(_Facade):
    """Distils a teacher's hidden states into a student, token by token.

    Args:
        student: An encoder that returns `.last_hidden_state`, trained in place.
        teacher: An encoder that returns `.last_hidden_state`; it is frozen.
        config: The settings.

    Raises:
        TypeError: student or teacher is no module.
        ValueError: a model without `.last_hidden_state`, or a problem of the config.
    """

    def __init__(self, student: nn.Module, teacher: nn.Module, config: EncoderDistillConfig | None = None) -> None:
        module = EncoderDistillLitModule(student, teacher, config=config)
        self.config: EncoderDistillConfig = module.config
        self._start(module)
