"""The moment after an update and the evaluation that may be due at it."""

from __future__ import annotations

from typing import Any

import lightning
from lightning.pytorch.callbacks import Callback


class AfterUpdate(Callback):
    """Calls `after_update` once after each update that is due and after the run's last, whoever ends the run.

    An evaluation that is due at the update comes before.
    """

    _last_step = _acted = -1
    _waiting = False
    _window: dict[str, Any]

    def interval(self, module: Any) -> int:
        """Updates between two that are due; 0: only the last."""
        return int(module.log_every)

    def after_update(self, trainer: lightning.Trainer, module: Any) -> None:
        """Does what the callback is for; `trainer.global_step` updates are done."""
        raise NotImplementedError

    def on_train_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """Starts from the updates already done."""
        self._last_step = self._acted = trainer.global_step
        self._waiting = False

    def on_train_batch_end(
        self, trainer: lightning.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Acts at once, or leaves it to the end of the evaluation."""
        if trainer.global_step == self._last_step:
            return
        self._last_step, self._window = trainer.global_step, {**pl_module._window}
        loop = trainer.fit_loop.epoch_loop
        assert trainer.fit_loop._data_fetcher is not None
        # Lightning decides by the same call right after this hook
        self._waiting = loop._should_check_val_fx(trainer.fit_loop._data_fetcher)
        if not self._waiting:
            self._act(trainer, pl_module)

    def on_train_batch_start(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Acts where an evaluation was due and there was nothing to evaluate."""
        self._act_late(trainer, pl_module)

    def on_validation_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """Acts after the evaluation."""
        if not trainer.sanity_checking:
            self._act_late(trainer, pl_module)

    def on_train_epoch_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """The same, at an epoch's end."""
        self._act_late(trainer, pl_module)

    def on_train_end(self, trainer: lightning.Trainer, pl_module: Any) -> None:
        """Acts where a callback has ended the run after this one had seen its last update."""
        if trainer.global_step != self._acted:
            pl_module._window = self._window  # a run that ends within a window has begun to sum it
            self._act(trainer, pl_module, ended=True)

    def _act_late(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        if self._waiting:
            self._act(trainer, pl_module)

    def _act(self, trainer: lightning.Trainer, module: Any, *, ended: bool = False) -> None:
        self._waiting = False
        every = self.interval(module)
        if ended or module.is_last_update() or (every and trainer.global_step % every == 0):
            self._acted = trainer.global_step
            self.after_update(trainer, module)
