"""Numbers for the process that started the ranks, where Lightning forks or spawns them (`ddp_fork`, notebooks)."""

from __future__ import annotations

import lightning
import torch
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher


def is_launched(trainer: lightning.Trainer) -> bool:
    """Whether Lightning forks or spawns the ranks from this process."""
    return isinstance(trainer.strategy.launcher, _MultiProcessingLauncher)


def send(trainer: lightning.Trainer, **values: list[float]) -> None:
    """In a started rank: leaves the numbers in `callback_metrics`, all that Lightning carries back from rank 0."""
    if is_launched(trainer):
        for name, numbers in values.items():
            trainer.callback_metrics[f"sent/{name}"] = torch.tensor(numbers, dtype=torch.float64)


def received(trainer: lightning.Trainer, *names: str) -> list[list[float]] | None:
    """In the starting process: the numbers of rank 0; None where this process is a rank itself."""
    if not is_launched(trainer):
        return None
    return [trainer.callback_metrics.pop(f"sent/{name}").tolist() for name in names]
