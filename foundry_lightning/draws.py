"""Counter-based draws: what is random in masks and in the order of rows, equal on every device.

Every draw is a hash of (seed, epoch, row number, position, purpose), computed in 64-bit integers (the finaliser of
SplitMix64, Steele et al. 2014, doi:10.1145/2660193.2660195). There is no generator state to keep or to restore.
"""

from __future__ import annotations

import torch
from torch import Tensor

_MIX = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_GAMMA = 0x9E3779B97F4A7C15
SELECT, REPLACE, RANDOM, COUNT, CROSS, SPAN, ORDER = range(7)  # the purposes of a draw
_NUM_PURPOSES = 8


def _signed(value: int) -> int:
    """The signed 64-bit integer with the bits of `value`."""
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >> 63 else value


def shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical right shift of int64 (torch's is arithmetic)."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: Tensor) -> Tensor:
    """SplitMix64's finaliser, a bijection of 64-bit integers."""
    x = (x ^ shift_right(x, 30)) * _signed(_MIX[0])
    x = (x ^ shift_right(x, 27)) * _signed(_MIX[1])
    return x ^ shift_right(x, 31)


def row_keys(row_ids: Tensor, *, seed: int, epoch: int) -> Tensor:
    """A hash of (seed, epoch, row number), int64 of `row_ids`' shape, to draw from."""
    key = _mix(torch.full((), _signed(seed * _GAMMA + 1), dtype=torch.int64, device=row_ids.device))
    key = _mix(key + _signed((epoch + 1) * _GAMMA))
    return _mix(_mix(key + row_ids * _signed(_GAMMA)) + _signed(_GAMMA))


def draw(keys: Tensor, positions: Tensor | int, purpose: int) -> Tensor:
    """Hash of (row, position, purpose), int64."""
    counter = positions * _NUM_PURPOSES + purpose + 1
    return _mix(keys + (counter * _signed(_GAMMA) if isinstance(counter, Tensor) else _signed(counter * _GAMMA)))


def draw32(keys: Tensor, positions: Tensor | int, purpose: int) -> Tensor:
    """32 bits of the hash, in [0, 2^32)."""
    return shift_right(draw(keys, positions, purpose), 32)


def permutation(size: int, *, seed: int, epoch: int, first: int = 0) -> Tensor:
    """`[size]` int64, a permutation of 0 … size−1 drawn for rows `first`, `first + 1`, …: their hashes, sorted."""
    rows = torch.arange(first, first + size, dtype=torch.int64)
    return draw(row_keys(rows, seed=seed, epoch=epoch), 0, ORDER).argsort(stable=True)


def batch_seed(number: int, *, seed: int, epoch: int) -> int:
    """Seed of the generators for the forward of a batch, by its number in the global order of the epoch."""
    return int(draw(row_keys(torch.tensor(number), seed=seed, epoch=epoch), 1, ORDER))
