"""Dropout on the CPU: four of its draws from each random number.

Where torch has no library for it (all CPUs but Intel's), `bernoulli_` makes a 53-bit number for each element, one by
one: 8 ns each, an eighth of a packed step. 16 bits decide as well: the probability is kept to 1/65,536.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache

import lightning
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor

_LANES = 4  # draws of 16 bits in a number of 64


def bernoulli_(out: Tensor, p: float = 0.5, *, generator: torch.Generator | None = None) -> Tensor:
    """Fills `out` with 1 with probability `p`, rounded to 1/65,536, else with 0.

    Raises:
        RuntimeError: `p` is no probability.
    """
    if not 0 <= p <= 1:
        raise RuntimeError(f"bernoulli_ expects p to be in [0, 1], but got p={p}")
    share = round(p * 2**16)
    if share in (0, 2**16):
        return out.fill_(share >> 16)
    numbers = torch.empty(-(-out.numel() // _LANES), dtype=torch.int64).random_(-(2**63), None, generator=generator)
    draws = numbers.view(torch.int16)[: out.numel()].view(out.shape)
    return torch.lt(draws, share - 2**15, out=out)


@cache
def draws_one_by_one() -> bool:
    """Whether torch's own `bernoulli_` compares one uniform number with p for each element."""
    generators = [torch.Generator().manual_seed(0) for _ in range(2)]
    drawn = torch.empty(64, dtype=torch.float64).bernoulli_(0.5, generator=generators[0])
    return torch.equal(drawn, (torch.rand(64, dtype=torch.float64, generator=generators[1]) < 0.5).double())


@contextmanager
def four_draws_a_number() -> Iterator[None]:
    """Within it, `bernoulli_` on the CPU is the one above, whoever calls it in this process, also in a backward pass.

    Changes nothing where torch's own is quick.
    """
    if not draws_one_by_one():
        yield
        return
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Warning only once for all operators")  # that is what we want
        library.impl("bernoulli_.float", bernoulli_, "CPU")
    try:
        yield
    finally:
        del library  # which gives torch its own back


class DropoutDraws(Callback):
    """Makes dropout's draws four at a time while a fit runs on the CPU, where torch makes them one by one."""

    def __init__(self) -> None:
        self._active = ExitStack()

    def on_train_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """Begins."""
        if pl_module.device.type == "cpu":
            self._active.enter_context(four_draws_a_number())

    def on_train_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """Ends."""
        self._active.close()

    def on_exception(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, exception: BaseException
    ) -> None:
        """Ends."""
        self._active.close()
