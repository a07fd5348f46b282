"""Parameter groups, AdamW and its schedule, in the form that Lightning wants."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

from torch import nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

from foundry_lightning.schedule import lr_factor


def parameter_groups(modules: Iterable[nn.Module], *, weight_decay: float) -> list[dict[str, Any]]:
    """Trainable parameters in two groups: matrices with weight decay, vectors (biases, normalisation) without.

    A tied weight is one parameter and stands once. Frozen parameters stand nowhere.
    """
    parameters = dict.fromkeys(p for module in modules for p in module.parameters() if p.requires_grad)
    matrices = [p for p in parameters if p.ndim >= 2]
    vectors = [p for p in parameters if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def adamw_with_schedule(
    modules: Iterable[nn.Module],
    *,
    learning_rate: float,
    weight_decay: float,
    schedule: str,
    warmup_steps: int,
    total_steps: int,
    decay_steps: int = 0,
    fused: bool = True,
) -> dict[str, Any]:
    """AdamW (Loshchilov & Hutter 2019; betas 0.9, 0.999, eps 1e-8) and the schedule as Lightning's dict.

    Args:
        modules: Their trainable parameters are updated.
        learning_rate: Peak rate.
        weight_decay: On matrices.
        schedule: See `lr_factor`.
        warmup_steps: See `lr_factor`.
        total_steps: See `lr_factor`.
        decay_steps: See `lr_factor`.
        fused: Use the fused kernel where the parameters' device has it.

    Raises:
        ValueError: no trainable parameter.
    """
    groups = parameter_groups(modules, weight_decay=weight_decay)
    if not groups:
        raise ValueError("student has no trainable parameter; set requires_grad on what should be trained.")
    fused = fused and all(
        p.device.type in ("cpu", "cuda", "mps") and p.is_floating_point() for g in groups for p in g["params"]
    )
    optimizer = AdamW(groups, lr=learning_rate, fused=fused)
    settings = {"total_steps": total_steps, "warmup_steps": warmup_steps, "decay_steps": decay_steps}
    factor = partial(lr_factor, schedule=schedule, **settings)
    scheduler = LambdaLR(optimizer, factor)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step", "name": "lr"}}
