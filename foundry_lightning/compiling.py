"""`torch.compile` of a model's layers, one by one, while it trains; `block_losses` compiles the loss.

A model's layers are alike, so one graph serves all of them: compiling takes as long as for one layer, and what is
around them (the body's masks, the head at scored positions, hooks) stays as it is. `Module.compile` works in place: no
name in a checkpoint changes, and compiled and plain runs load each other's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch._dynamo
from torch import nn

# Dropout by torch's own operators: the compiler's generator makes one number after the other on a CPU, and takes a
# seventh of a step more. The draws are then those of the run that is not compiled.
_ON_CPU: dict[str, str | int | bool | Callable[..., Any]] = {"fallback_random": True}


# In a process, for all models: layers of most of transformers' models are entered by the same few lines, whose graphs
# torch counts together. Kinds of layers x train and evaluation x first and any width x student and teacher come to 16,
# where torch goes uncompiled from 8 on.
_MOST_GRAPHS = 64


def require_compiler(device: torch.device, *, named: str) -> None:
    """Compiles a sum on this device.

    Raises:
        ValueError: nothing can be compiled here; `named` is the setting that asks for it.
    """
    try:
        torch.compile(lambda x: x + 1)(torch.zeros(2, device=device))
    except RuntimeError as error:  # what the compiler raises is one; its first paragraph says what
        reason = " ".join(str(error).split("\n\n")[0].split())
        raise ValueError(
            f"{named} is True, but torch.compile does not work on {device.type} here ({reason}); "
            f"install a C++ compiler such as g++ (and Triton for a GPU), or set {named} to False."
        ) from error


def compile_layers(model: nn.Module) -> list[nn.Module]:
    """Compiles each layer of the model's stacks (`nn.ModuleList`s that lie in no other), or all of a model without one.

    Returns:
        What was compiled, for `release`.
    """
    stacks = {name: module for name, module in model.named_modules() if isinstance(module, nn.ModuleList) and module}
    outer = [name for name in stacks if not any(name.startswith(f"{other}.") for other in stacks)]
    layers = [layer for name in outer for layer in stacks[name]] or [model]
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _MOST_GRAPHS)
    on_cpu = next(model.parameters()).device.type == "cpu"
    for layer in layers:
        layer.compile(options=_ON_CPU if on_cpu else None)
    return layers


def release(layers: list[nn.Module]) -> None:
    """Lets the layers run as they did before."""
    for layer in layers:
        layer._compiled_call_impl = None
