"""What changes over a run, as pure functions of the number of updates done. Standard library only."""

from __future__ import annotations

import math

LR_SCHEDULERS = ("cosine", "linear", "constant", "wsd")
_DECAY_SHARE = 5  # `wsd` decays over a fifth of the run by default


def lr_factor(
    step: int, *, total_steps: int, warmup_steps: int = 0, schedule: str = "cosine", decay_steps: int = 0
) -> float:
    """Share of the peak learning rate that update number `step + 1` uses.

    With T updates, W warm-up and k updates done: (k+1)/W for k < W, then with x = (k−W)/(T−W) `linear` 1−x,
    `cosine` (1+cos πx)/2, `constant` 1, and with D updates of decay `wsd` (warm-up, stable, decay: Hu et al. 2024,
    MiniCPM, section 4) min(1, (T−k)/D). T=6, W=2, linear: 1/2, 1, 1, 3/4, 1/2, 1/4; wsd with D=2: 1/2, 1, 1, 1, 1, 1/2.

    Args:
        step: k, the updates done.
        total_steps: T, the updates of the whole run (not read by `constant`).
        warmup_steps: W.
        schedule: `cosine`, `linear`, `constant` or `wsd`.
        decay_steps: D, read by `wsd`; 0: a fifth of T, at least 1, and never more than T−W.

    Raises:
        ValueError: unknown schedule.
    """
    if schedule not in LR_SCHEDULERS:
        raise ValueError(f"lr_scheduler must be one of {', '.join(map(repr, LR_SCHEDULERS))}, got {schedule!r}.")
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    if schedule == "constant":
        return 1.0
    after_warmup = max(total_steps - warmup_steps, 1)
    if schedule == "wsd":
        decay_steps = decay_steps or min(max(total_steps // _DECAY_SHARE, 1), after_warmup)
        return min(max(total_steps - step, 0) / decay_steps, 1.0)
    x = min((step - warmup_steps) / after_warmup, 1.0)
    return 1 - x if schedule == "linear" else (1 + math.cos(math.pi * x)) / 2


def mask_share(step: int, *, total_steps: int, start: float, end: float) -> float:
    """Share of the eligible tokens that update number `step + 1` masks: from `start` to `end` in a straight line.

    The first update of a run has `start`, the last one `end`. T=4 from 0.3 to 0.15: 0.3, 0.25, 0.2, 0.15.

    Args:
        step: The updates done.
        total_steps: T, the updates of the whole run.
        start: Share of the first update.
        end: Share of the last update, and of any after it.
    """
    return start + (end - start) * min(step / max(total_steps - 1, 1), 1.0)
