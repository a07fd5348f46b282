"""Checkpoints counted in updates."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import lightning
from lightning.pytorch.callbacks import Checkpoint

from foundry_lightning.callbacks.after_update import AfterUpdate
from foundry_lightning.checkpoint import sync_folder
from foundry_lightning.loggers import log_checkpoint


class SaveEvery(AfterUpdate, Checkpoint):
    """Writes `step=00000100.ckpt` every so many updates and at the end, the newest also as `checkpoint.ckpt`.

    Args:
        every: Updates between two checkpoints; 0: only at the end of the run.
        folder: Where they go; None: the Trainer's `default_root_dir`.
        keep: Step files kept, the newest ones; at least 1.

    Raises:
        ValueError: `every` below 0, or `keep` below 1.
    """

    def __init__(self, every: int, *, folder: str | os.PathLike[str] | None = None, keep: int = 3) -> None:
        for name, value, least in (("every", every, 0), ("keep", keep, 1)):
            if value < least:
                raise ValueError(f"{name} of the checkpoints must be an integer of at least {least}, got {value!r}.")
        self.every, self.keep = every, keep
        self._folder = None if folder is None else Path(folder)

    def folder(self, trainer: lightning.Trainer) -> Path:
        """Where checkpoints go."""
        return Path(trainer.default_root_dir) if self._folder is None else self._folder

    def interval(self, module: Any) -> int:
        """Updates between two checkpoints."""
        return self.every

    def after_update(self, trainer: lightning.Trainer, module: Any) -> None:
        """Saves."""
        self.save(trainer)

    def save(self, trainer: lightning.Trainer) -> None:
        """Saves now."""
        folder = self.folder(trainer)
        path = folder / f"step={trainer.global_step:08d}.ckpt"
        trainer.save_checkpoint(path, weights_only=False)
        if trainer.is_global_zero:
            self._point_newest_to(path)
            written = sorted(folder.glob("step=*.ckpt"), key=lambda file: (file.stat().st_mtime_ns, file.name))
            for old in written[: -self.keep]:
                old.unlink()
            log_checkpoint(trainer, path, is_last=trainer.lightning_module.is_last_update())  # type: ignore[operator]
        trainer.strategy.barrier("SaveEvery")

    def _point_newest_to(self, path: Path) -> None:
        partial = path.with_name(".checkpoint.ckpt.newest.partial")
        partial.unlink(missing_ok=True)
        try:
            os.link(path, partial)
        except OSError:  # a file system without hard links
            shutil.copyfile(path, partial)
        os.replace(partial, path.with_name("checkpoint.ckpt"))
        sync_folder(path.parent)
