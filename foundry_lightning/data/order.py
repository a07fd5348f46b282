"""Which rows make which batch of an epoch: a pure function of the rows' lengths, the seed and the epoch.

Full batches come from a plan over the sorted lengths, which are the same in every epoch: the plan says which places of
the sorted rows belong together, an epoch's permutation says which row of that length takes a place. So the number of
batches never changes, while the company of a row does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from foundry_lightning.draws import permutation

PAD_TO = 8  # widths are multiples of it: tensor cores and vector units like them


@dataclass(frozen=True)
class Order:
    """The rows of an epoch, in groups: group g is `rows[starts[g]:starts[g + 1]]`."""

    rows: Sequence[int] | np.ndarray
    starts: Sequence[int] | np.ndarray

    def groups(self, first: int, stop: int) -> list[list[int]]:
        """The rows of some groups; fewer where the epoch ends."""
        starts = self.starts[first : stop + 1]
        return [list(map(int, self.rows[a:b])) for a, b in zip(starts[:-1], starts[1:], strict=True)]


def plain_order(size: int, *, seed: int, epoch: int, shuffle: bool) -> Order:
    """Each row a group of its own, in the source's order or permuted."""
    rows = permutation(size, seed=seed, epoch=epoch).numpy() if shuffle else range(size)
    return Order(rows, range(size + 1))


def grouped_order(lengths: np.ndarray, *, seed: int, epoch: int, shuffle: bool, batch_size: int, over: int) -> Order:
    """Rows of like lengths follow each other: sorted within stretches of `over` batches, then batches permuted."""
    order = np.asarray(plain_order(len(lengths), seed=seed, epoch=epoch, shuffle=shuffle).rows)
    stretch = np.arange(len(order)) // (batch_size * over)
    order = order[np.lexsort((lengths[order], stretch))]
    if shuffle:
        full = len(order) // batch_size  # the short batch stays last
        batches = order[: full * batch_size].reshape(full, batch_size)[
            permutation(full, seed=seed, epoch=epoch).numpy()
        ]
        order = np.concatenate([batches.ravel(), order[full * batch_size :]])
    return Order(order, range(len(order) + 1))


@dataclass(frozen=True)
class Plan:
    """Groups of places in the rows sorted by length, longest first; group g has `places[starts[g]:starts[g + 1]]`."""

    places: np.ndarray
    starts: np.ndarray

    def order(self, lengths: np.ndarray, *, seed: int, epoch: int, shuffle: bool) -> Order:
        """Rows take the places of their length, and groups follow each other, in an order of the epoch's own."""
        rows = np.asarray(plain_order(len(lengths), seed=seed, epoch=epoch, shuffle=shuffle).rows)
        rows = rows[np.argsort(-lengths[rows], kind="stable")][self.places]
        if not shuffle:
            return Order(rows, self.starts)
        chosen = permutation(len(self.starts) - 1, seed=seed, epoch=epoch).numpy()
        sizes = np.diff(self.starts)[chosen]
        starts = np.concatenate([[0], np.cumsum(sizes)])
        within = np.arange(len(rows)) - np.repeat(starts[:-1], sizes)
        return Order(rows[np.repeat(self.starts[:-1][chosen], sizes) + within], starts)


def batches_of_tokens(lengths: np.ndarray, *, batch_tokens: int) -> Plan:
    """Batches of rows of like lengths whose rows × width stays within `batch_tokens`.

    Args:
        lengths: `[rows]` tokens of each row, none above `batch_tokens`.
        batch_tokens: Places of a batch, padding included.
    """
    descending = -np.sort(-lengths)
    widths = np.maximum(-(-descending // PAD_TO) * PAD_TO, PAD_TO)
    starts = [0]
    while starts[-1] < len(lengths):
        starts.append(min(starts[-1] + max(batch_tokens // int(widths[starts[-1]]), 1), len(lengths)))
    return Plan(np.arange(len(lengths)), np.asarray(starts))


def packed_rows(lengths: np.ndarray, *, max_length: int) -> Plan:
    """Texts that share a row of at most `max_length` tokens: best fit, longest first, over the histogram of lengths.

    Works on kinds of rows (which lengths lie in it, how many such rows) instead of rows, so its cost depends on
    `max_length` and not on the number of texts (the idea of Krell et al. 2021, arXiv:2107.02027, section 3).

    Args:
        lengths: `[rows]` tokens of each text, from 0 to `max_length`.
        max_length: Places of a row.
    """
    histogram = np.bincount(np.maximum(lengths, 1), minlength=max_length + 1)
    # room left -> kinds of rows: lengths in it -> number of such rows
    rows: list[dict[tuple[int, ...], int]] = [{} for _ in range(max_length + 1)]
    rows[max_length][()] = len(lengths)  # empty rows, more than will be needed
    for length in range(max_length, 0, -1):
        left = int(histogram[length])
        for room in range(length, max_length + 1):  # the tightest first
            while left and rows[room]:
                kind, number = rows[room].popitem()
                each = min(room // length, left)
                taken = min(left // each, number)
                if number > taken:
                    rows[room][kind] = number - taken
                made = (*kind, *(length,) * each)
                rows[room - each * length][made] = rows[room - each * length].get(made, 0) + taken
                left -= taken * each
    rows[max_length].pop((), None)
    kinds = [(kind, number) for by_kind in rows for kind, number in by_kind.items()]
    next_place = np.concatenate([[0], np.cumsum(histogram[::-1])])[: max_length + 1][::-1].copy()  # of each length
    places, sizes = [], []
    for kind, number in kinds:
        columns = []
        for length in kind:
            columns.append(np.arange(next_place[length], next_place[length] + number))
            next_place[length] += number
        places.append(np.stack(columns, axis=1).ravel())
        sizes.append(np.full(number, len(kind)))
    return Plan(np.concatenate(places), np.concatenate([[0], np.cumsum(np.concatenate(sizes))]))
