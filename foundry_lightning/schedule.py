"""The learning-rate schedule: a pure function of the number of updates done. Standard library only."""

from __future__ import annotations

import math


def lr_factor(step: int, *, total_steps: int, warmup_steps: int = 0, schedule: str = "cosine") -> float:
    """Share of the peak learning rate that update number `step + 1` uses.

    With T updates, W warm-up and k updates done: (k+1)/W for k < W, then with x = (k−W)/(T−W) `linear` 1−x,
    `cosine` (1+cos πx)/2, `constant` 1. T=6, W=2, linear: 1/2, 1, 1, 3/4, 1/2, 1/4.

    Args:
        step: k, the updates done.
        total_steps: T, the updates of the whole run (not read by `constant`).
        warmup_steps: W.
        schedule: `cosine`, `linear` or `constant`.

    Raises:
        ValueError: unknown schedule.
    """
    if schedule not in ("cosine", "linear", "constant"):
        raise ValueError(f"lr_scheduler must be one of 'cosine', 'linear', 'constant', got {schedule!r}.")
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    if schedule == "constant":
        return 1.0
    x = min((step - warmup_steps) / max(total_steps - warmup_steps, 1), 1.0)
    return 1 - x if schedule == "linear" else (1 + math.cos(math.pi * x)) / 2
