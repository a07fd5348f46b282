"""The settings of a run, for the loggers."""

from __future__ import annotations

from typing import Any

import lightning
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import TensorBoardLogger


class LogSettings(Callback):
    """Logs the settings when training starts (wandb: config), and for tensorboard's hparams page how the run ended.

    Args:
        settings: The settings; the student's class and size and what decides the order of the data are added.
    """

    def __init__(self, settings: dict[str, Any]) -> None:
        self.settings = settings

    def on_train_start(self, trainer: lightning.Trainer, module: Any) -> None:
        """Logs what is known now."""
        student = module.student
        self.settings = {
            **self.settings,
            "student": type(student).__name__,
            "parameters": sum(p.numel() for p in student.parameters()),
            "order": trainer.datamodule.order_settings(),  # type: ignore[attr-defined]
        }
        for logger in trainer.loggers:
            logger.log_hyperparams(self.settings)

    def on_train_end(self, trainer: lightning.Trainer, module: Any) -> None:
        """Logs the last losses beside the settings; `final/`, because a curve of the same name would get a point."""
        final = {f"final/{name}": value for name, value in trainer.callback_metrics.items() if "/" in name}
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoardLogger) and final:
                logger.log_hyperparams(self.settings, final, step=trainer.global_step)
