"""Parameter groups, the optimizers and their schedule, in the form that Lightning wants."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.overrides import TorchFunctionMode

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


def hidden_matrices(modules: Iterable[nn.Module], *, num_ids: int | None) -> list[nn.Parameter]:
    """Trainable matrices between hidden states: no embedding, and nothing with a side as long as the vocabulary.

    Args:
        modules: What is trained.
        num_ids: Rows of the output projection, where there is one.
    """
    modules = list(modules)
    tables = {p for m in modules for e in m.modules() if isinstance(e, nn.Embedding) for p in e.parameters()}
    parameters = dict.fromkeys(p for module in modules for p in module.parameters() if p.requires_grad)
    return [p for p in parameters if p.ndim == 2 and p not in tables and num_ids not in p.shape]


class _Float32OnCPU(TorchFunctionMode):
    """What Muon computes in bfloat16 is computed in float32 on a CPU, most of which emulate bfloat16, slowly."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        halves = func is torch.Tensor.bfloat16 or (  # from torch 2.15 on
            func is torch.Tensor.to and any(value is torch.bfloat16 for value in (*args, *(kwargs or {}).values()))
        )
        if halves and args[0].device.type == "cpu":
            return args[0].to(torch.float32, copy=True)
        return func(*args, **(kwargs or {}))


class MuonWithAdamW(Optimizer):
    """Muon for hidden matrices and AdamW for the rest, as one optimizer with one list of groups and one state.

    Muon (Jordan et al. 2024) is torch's, with its update scaled to the size of AdamW's (Liu et al. 2025, "Muon is
    scalable for LLM training", section 2.2), so that both take the same learning rate, schedule and weight decay.

    Args:
        groups: AdamW's parameter groups, which may hold the matrices too; these are taken out.
        hidden: The matrices that Muon updates.
        lr: Learning rate of both.
        fused: AdamW's fused kernel.

    Raises:
        ValueError: no hidden matrix.
    """

    def __init__(
        self, groups: list[dict[str, Any]], *, hidden: list[nn.Parameter], lr: float, fused: bool | None = None
    ) -> None:
        if not hidden:
            raise ValueError("optimizer='muon' needs hidden matrices, and the student has none; set optimizer='adamw'.")
        taken = set(hidden)
        decay = next(group["weight_decay"] for group in groups if taken & set(group["params"]))
        rest = [{**group, "params": [p for p in group["params"] if p not in taken]} for group in groups]
        muon = torch.optim.Muon(hidden, lr=lr, weight_decay=decay, adjust_lr_fn="match_rms_adamw")
        self._parts: list[Optimizer] = [muon]
        self._adamw = partial(AdamW, lr=lr, fused=fused)
        if rest := [group for group in rest if group["params"]]:
            self._parts.append(self._adamw(rest))
        super().__init__([group for part in self._parts for group in part.param_groups], defaults={})
        self._share()

    def _share(self) -> None:
        """Lets the parts work on the groups and the state of the whole."""
        groups = iter(self.param_groups)
        for part in self._parts:
            part.param_groups = [next(groups) for _ in part.param_groups]
            part.state = self.state

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """AdamW updates what is added later, such as what a callback unfreezes."""
        if all(param_group is not group for part in self._parts for group in part.param_groups):
            if len(self._parts) > 1:
                self._parts[1].add_param_group(param_group)
            else:
                self._parts.append(self._adamw([param_group]))
                self._parts[1].state = self.state
        super().add_param_group(param_group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes over groups and state, which torch makes anew."""
        super().load_state_dict(state_dict)
        self._share()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """One update of all parameters."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with _Float32OnCPU():
            for part in self._parts:
                part.step()
        return loss


def optimizer_with_schedule(
    modules: Iterable[nn.Module],
    *,
    learning_rate: float,
    weight_decay: float,
    schedule: str,
    warmup_steps: int,
    total_steps: int,
    decay_steps: int = 0,
    name: str = "adamw",
    num_ids: int | None = None,
    fused: bool = True,
) -> dict[str, Any]:
    """The optimizer and the schedule as Lightning's dict.

    `adamw` is AdamW (Loshchilov & Hutter 2019; betas 0.9, 0.999, eps 1e-8), `muon` is `MuonWithAdamW`.

    Args:
        modules: Their trainable parameters are updated.
        learning_rate: Peak rate.
        weight_decay: On matrices.
        schedule: See `lr_factor`.
        warmup_steps: See `lr_factor`.
        total_steps: See `lr_factor`.
        decay_steps: See `lr_factor`.
        name: `adamw` or `muon`.
        num_ids: See `hidden_matrices`.
        fused: Use the fused kernel where the parameters' device has it.

    Raises:
        ValueError: no trainable parameter, or for `muon` no hidden matrix.
    """
    modules = list(modules)
    groups = parameter_groups(modules, weight_decay=weight_decay)
    if not groups:
        raise ValueError("student has no trainable parameter; set requires_grad on what should be trained.")
    fused = fused and all(
        p.device.type in ("cpu", "cuda", "mps") and p.is_floating_point() for g in groups for p in g["params"]
    )
    optimizer: Optimizer
    if name == "muon":
        hidden = hidden_matrices(modules, num_ids=num_ids)
        optimizer = MuonWithAdamW(groups, hidden=hidden, lr=learning_rate, fused=fused)
    else:
        optimizer = AdamW(groups, lr=learning_rate, fused=fused)
    settings = {"total_steps": total_steps, "warmup_steps": warmup_steps, "decay_steps": decay_steps}
    scheduler = LambdaLR(optimizer, partial(lr_factor, schedule=schedule, **settings))
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step", "name": "lr"}}
