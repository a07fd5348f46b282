"""What a facade's `train` returns and calls back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning
import torch

from foundry_lightning.callbacks.after_update import AfterUpdate
from foundry_lightning.callbacks.launched import received, send

_FLUSH = 1000  # losses kept on the device before the host reads them


class History(AfterUpdate):
    """Collects the loss of each batch of this rank and of each evaluation, and calls `on_step`.

    Args:
        on_step: Called as `on_step(global_step, loss)` on rank 0, at multiples of `log_every` and at the last step,
            after the update and a due evaluation, with the window's loss over all ranks.
    """

    def __init__(self, on_step: Callable[[int, float], Any] | None = None) -> None:
        self.on_step = on_step
        self.eval_losses: dict[int, float] = {}
        self._read: list[float] = []
        self._unread: list[torch.Tensor] = []

    @property
    def losses(self) -> list[float]:
        """One float per training batch; the host waits for the device."""
        if self._unread:
            self._read += torch.stack(self._unread).float().tolist()
            self._unread = []
        return self._read

    def on_train_batch_end(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Keeps the batch's loss."""
        if not batch["info"]["filler"]:
            self._unread.append(outputs["batch_loss"])
            if len(self._unread) >= _FLUSH:
                _ = self.losses
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)

    def after_update(self, trainer: lightning.Trainer, module: Any) -> None:
        """Calls `on_step`."""
        if self.on_step is None:
            return
        loss = module.window_metrics()["loss"]
        if trainer.is_global_zero:
            self.on_step(trainer.global_step, loss)

    def on_validation_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """Keeps `val/loss`."""
        if not trainer.sanity_checking and "val/loss" in trainer.callback_metrics:
            self.eval_losses[trainer.fit_loop.epoch_loop.global_step] = float(trainer.callback_metrics["val/loss"])
        super().on_validation_end(trainer, pl_module)

    def on_fit_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """Hands the results to the process that started the ranks."""
        send(
            trainer,
            losses=self.losses,
            eval_steps=list(self.eval_losses),
            eval_losses=list(self.eval_losses.values()),
        )

    def receive(self, trainer: lightning.Trainer) -> None:
        """Takes the results of rank 0, where it was a process of its own."""
        if found := received(trainer, "losses", "eval_steps", "eval_losses"):
            self._read = found[0]
            self.eval_losses = {int(step): loss for step, loss in zip(found[1], found[2], strict=True)}
