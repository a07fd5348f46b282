"""The loggers of a facade, and how a resumed run goes on in the record of the run it continues."""

from __future__ import annotations

import importlib.util
import os
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
        return WandbLogger(project=config.project, name=name, save_dir=folder, offline=offline, **resume)
    if backend == "tensorboard":
        return TensorBoardLogger(folder, name=config.run_name or "tensorboard", version=record)
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
