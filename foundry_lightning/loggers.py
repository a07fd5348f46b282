"""The loggers of a facade, and how a resumed run goes on in the record of the run it continues."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

import lightning
from lightning.pytorch.loggers import TensorBoardLogger, WandbLogger


def require_logger(backend: str) -> None:
    """Checks that the package of a `log_backend` is there.

    Raises:
        ModuleNotFoundError: it is missing; the message holds the install command.
    """
    if backend != "none" and importlib.util.find_spec(backend) is None:
        raise ModuleNotFoundError(
            f"log_backend={backend!r} needs the package {backend}: pip install 'foundry-lightning[{backend}]'."
        )


def build_logger(config: Any, *, records: dict[str, Any] | None = None) -> Any:
    """The Lightning logger of `log_backend`; False for `none`.

    Args:
        config: The settings.
        records: `logger_records` of the checkpoint that is resumed; its record is continued.

    Raises:
        ModuleNotFoundError: the backend's package is missing.
    """
    backend = config.log_backend
    require_logger(backend)
    record = (records or {}).get(backend)
    folder = config.save_dir or "."
    if backend == "wandb":
        offline = os.environ.get("WANDB_MODE") == "offline"
        resume = {} if record is None else {"id": record, "resume": "allow"}
        name = config.run_name or None
        log_model: Any = "all" if config.log_checkpoints else False
        settings = {"name": name, "save_dir": folder, "offline": offline, "log_model": log_model}
        return WandbLogger(project=config.project, **settings, **resume)
    if backend == "tensorboard":
        name = config.run_name or "tensorboard"
        return TensorBoardLogger(folder, name=name, version=record, default_hp_metric=False)
    return False


def logger_records(trainer: lightning.Trainer) -> dict[str, Any]:
    """What names the record of each logger: wandb's run id, tensorboard's version."""
    records: dict[str, Any] = {}
    for logger in trainer.loggers if trainer.is_global_zero else []:
        if isinstance(logger, WandbLogger):
            records["wandb"] = logger.version
        elif isinstance(logger, TensorBoardLogger):
            records["tensorboard"] = logger.version
    return records


def log_checkpoint(trainer: lightning.Trainer, file: Path, *, is_last: bool) -> None:
    """Gives a checkpoint to wandb as the next version of the run's model, where `log_model` of its logger asks for it.

    Args:
        trainer: The trainer.
        file: The checkpoint.
        is_last: Whether it ends the run; `log_model=True` wants only that one, `log_model="all"` each.
    """
    for logger in trainer.loggers if trainer.is_global_zero else []:
        if isinstance(logger, WandbLogger) and (logger._log_model == "all" or (logger._log_model is True and is_last)):
            import wandb

            step = trainer.global_step
            artifact = wandb.Artifact(f"model-{logger.version}", type="model", metadata={"step": step})
            artifact.add_file(str(file), name="checkpoint.ckpt")
            logger.experiment.log_artifact(artifact, aliases=["latest", f"step-{step}"])
