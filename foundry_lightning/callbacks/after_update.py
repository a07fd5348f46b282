"""The moment after an update and the evaluation that may be due at it."""

from __future__ import annotations

from typing import Any

import lightning
from lightning.pytorch.callbacks import Callback


class AfterUpdate(Callback):
    """Calls `after_update` once after each optimizer update, after an evaluation that is due at it."""

    _last_step = -1
    _waiting = False

    def after_update(self, trainer: lightning.Trainer, module: Any) -> None:
        """Does what the callback is for; `trainer.global_step` updates are done."""
        raise NotImplementedError

    def on_train_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """Starts from the updates already done."""
        self._last_step, self._waiting = trainer.global_step, False

    def on_train_batch_end(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Acts at once, or leaves it to the end of the evaluation."""
        if trainer.global_step == self._last_step:
            return
        self._last_step = trainer.global_step
        loop = trainer.fit_loop.epoch_loop
        assert trainer.fit_loop._data_fetcher is not None
        # Lightning decides by the same call right after this hook
        self._waiting = loop._should_check_val_fx(trainer.fit_loop._data_fetcher)
        if not self._waiting:
            self.after_update(trainer, pl_module)

    def on_train_batch_start(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Acts where an evaluation was due and there was nothing to evaluate."""
        self._act(trainer, pl_module)

    def on_validation_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """Acts after the evaluation."""
        if not trainer.sanity_checking:
            self._act(trainer, pl_module)

    def on_train_epoch_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """The same, at an epoch's end."""
        self._act(trainer, pl_module)

    def _act(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        if self._waiting:
            self._waiting = False
            self.after_update(trainer, pl_module)
