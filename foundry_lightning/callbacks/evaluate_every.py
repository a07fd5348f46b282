"""Evaluation counted in updates."""

from __future__ import annotations

from typing import Any

import lightning
from lightning.pytorch.callbacks import Callback

NEVER = 10**12  # batches; infinity would make Lightning validate at each epoch's end


class EvaluateEvery(Callback):
    """Evaluates every so many updates, and at the end of the run.

    Args:
        every: Updates between two evaluations; 0: none at all.

    Needs `Trainer(check_val_every_n_epoch=None, val_check_interval=NEVER)`, with which Lightning counts batches over
    epochs and leaves the rest to this callback; another interval is the user's, and evaluates as Lightning says.
    """

    def __init__(self, every: int) -> None:
        self.every = every

    def on_train_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """Nothing is due before the first update."""
        self._last_step = trainer.global_step
        self._acts = getattr(trainer, "val_check_interval", None) == NEVER  # a Trainer told a time has no such field
        if self._acts:
            trainer.val_check_batch = NEVER

    def on_train_batch_end(
        self, trainer: lightning.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Sets Lightning's own condition, (batches done) % val_check_batch == 0, to hold at due updates only."""
        if not self._acts:
            return
        step = trainer.global_step
        due = self.every and step != self._last_step and (step % self.every == 0 or pl_module.is_last_update())
        self._last_step = step
        trainer.val_check_batch = trainer.fit_loop.total_batch_idx + 1 if due else NEVER
