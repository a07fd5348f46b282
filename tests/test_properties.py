"""Whatever the run: each row once, all ranks alike, a resume at any place, exact window totals."""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from foundry_lightning import DataPipeline
from foundry_lightning.data.loader import Deal, WindowLoader
from foundry_lightning.data.ready import ReadyBatches
from foundry_lightning.masking import PIECE_SHIFT

LONGEST = 5  # tokens of a row after tokenising
PROPERTY = settings(max_examples=60, deadline=None, derandomize=True)


@dataclass(frozen=True)
class Run:
    """A drawn run; `texts` are rows of token ids before any cutting."""

    texts: list[list[int]]
    kind: str  # a list or a stream of rows, or a list of ready batches
    batch_size: int
    splits: bool
    filling: dict[str, Any]  # how a list's batches are filled
    shuffle: bool
    shuffle_buffer: int
    seed: int
    epoch: int
    num_ranks: int
    accumulation: int

    @property
    def batches(self) -> DataPipeline | ReadyBatches:
        if self.kind == "ready":
            firsts = range(0, len(self.texts), self.batch_size)
            return ReadyBatches([padded(self.texts[first : first + self.batch_size]) for first in firsts])
        return DataPipeline(
            self.texts if self.kind == "list" else lambda: iter(self.texts),
            batch_size=self.batch_size,
            max_length=LONGEST,
            long_rows="split" if self.splits else "truncate",
            **(self.filling if self.kind == "list" else {}),
            shuffle_buffer=self.shuffle_buffer if self.kind == "stream" else 0,
        )

    def expected(self) -> dict[int, list[int]]:
        """Row number -> token ids, of all rows of an epoch."""
        if self.kind == "ready":
            return dict(enumerate(self.texts))
        pieces = {
            n + (start // LONGEST << PIECE_SHIFT): text[start : start + LONGEST]
            for n, text in enumerate(self.texts)
            for start in range(0, max(len(text), 1), LONGEST)
        }
        found = {n: ids for n, ids in pieces.items() if self.splits or n >> PIECE_SHIFT == 0}
        packed = self.kind == "list" and self.filling.get("pack")  # an empty text leaves no trace in a packed row
        return {n: ids for n, ids in found.items() if ids or not packed}

    def places(
        self, rank: int = 0, *, start: int = 0, count: Any = None, updates_done: Any = None
    ) -> list[dict[str, Any]]:
        """The batches of a rank, from the local place `start`."""
        loader = WindowLoader(
            self.batches,
            deal=lambda: Deal(rank, self.num_ranks, self.accumulation),
            position=lambda: (self.epoch, start),
            updates_done=updates_done,
            shuffle=self.shuffle,
            seed=self.seed,
            count=count,
        )
        return list(loader)

    def ranks(self) -> list[list[dict[str, Any]]]:
        return [self.places(rank) for rank in range(self.num_ranks)]


def padded(rows: list[list[int]]) -> dict[str, Any]:
    width = max(1, *map(len, rows))
    ids = [row + [0] * (width - len(row)) for row in rows]
    return {"input_ids": ids, "attention_mask": [[1] * len(row) + [0] * (width - len(row)) for row in rows]}


TEXTS = st.lists(st.integers(0, 12), min_size=1, max_size=24).map(
    lambda lengths: [[100 * n + place for place in range(length)] for n, length in enumerate(lengths)]
)
RUNS = st.builds(
    Run,
    texts=TEXTS,
    kind=st.sampled_from(["list", "stream", "ready"]),
    batch_size=st.integers(1, 5),
    splits=st.booleans(),
    filling=st.sampled_from(
        [
            {},
            {"group_by_length": True},
            {"group_by_length": True, "batch_tokens": 16},
            {"pack": True},
            {"pack": True, "batch_tokens": 16},
        ]
    ),
    shuffle=st.booleans(),
    shuffle_buffer=st.integers(0, 9),
    seed=st.integers(0, 2**40),
    epoch=st.integers(0, 3),
    num_ranks=st.integers(1, 4),
    accumulation=st.integers(1, 4),
)


def rows_of(batches: list[dict[str, Any]]) -> list[tuple[int, list[int]]]:
    """(row number, its attended ids) of all rows, fillers left out."""
    found = []
    for batch in (batch for batch in batches if not batch["info"]["filler"]):
        for number, ids, attended in zip(batch["row_ids"], batch["input_ids"], batch["attention_mask"], strict=True):
            if number.dim():  # a packed row names the text of each token
                texts = number[attended == 1].unique_consecutive()
                found += [(int(text), ids[(attended == 1) & (number == text)].tolist()) for text in texts]
            else:
                found.append((int(number), ids[attended == 1].tolist()))
    return found


def global_order(ranks: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """The batches that exist, by their number."""
    return sorted((b for rank in ranks for b in rank if not b["info"]["filler"]), key=lambda b: b["info"]["number"])


def assert_equal(left: list[dict[str, Any]], right: list[dict[str, Any]]) -> None:
    assert [batch["info"] for batch in left] == [batch["info"] for batch in right]
    for one, other in zip(left, right, strict=True):
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one if name != "info")


@PROPERTY
@given(RUNS)
def test_each_row_comes_once_per_epoch_over_all_ranks_with_its_tokens(run):
    rows = rows_of([batch for rank in run.ranks() for batch in rank])
    assert len(rows) == len(run.expected())
    assert dict(rows) == run.expected()


@PROPERTY
@given(RUNS)
def test_all_ranks_have_equally_many_places_and_fillers_only_at_the_end(run):
    ranks = run.ranks()
    num_batches = len(global_order(ranks))
    assert {len(rank) for rank in ranks} == {-(-num_batches // run.num_ranks)}
    for rank, batches in enumerate(ranks):
        numbers = [batch["info"]["number"] for batch in batches]
        assert numbers == [place * run.num_ranks + rank for place in range(len(batches))]
        assert [batch["info"]["filler"] for batch in batches] == [number >= num_batches for number in numbers]


@PROPERTY
@given(RUNS, st.integers(1, 4))
def test_the_global_order_is_the_same_for_any_number_of_ranks(run, other):
    assert_equal(global_order(run.ranks()), global_order(replace(run, num_ranks=other).ranks()))


@PROPERTY
@given(RUNS, st.data())
def test_from_any_place_on_comes_the_tail_of_the_whole(run, data):
    rank = data.draw(st.integers(0, run.num_ranks - 1), label="rank")
    whole = run.places(rank)
    start = data.draw(st.integers(0, len(whole)), label="start")
    assert_equal(run.places(rank, start=start), whole[start:])


@PROPERTY
@given(RUNS, st.integers(0, 3))
def test_each_batch_names_the_update_it_is_part_of_wherever_the_run_begins(run, windows):
    size, start = run.num_ranks * run.accumulation, windows * run.accumulation
    for rank in range(run.num_ranks):
        for batch in run.places(rank, start=start, updates_done=lambda: 100 + windows):
            assert batch["info"]["update"] == 100 + batch["info"]["number"] // size


@settings(PROPERTY, max_examples=20)
@given(RUNS)
def test_an_epochs_order_is_its_own_and_a_seeds_own(run):
    assert_equal(run.places(), run.places())
    big = replace(run, texts=[[n] for n in range(40)], shuffle=True, shuffle_buffer=40, batch_size=4)
    numbers = [n for n, _ in rows_of(big.places())]
    for other in (replace(big, epoch=run.epoch + 1), replace(big, seed=run.seed + 1)):
        assert numbers != [n for n, _ in rows_of(other.places())]


class Meeting:
    """Threads as ranks: adds up what they bring, in the place of `torch.distributed.all_reduce`."""

    def __init__(self, num_ranks: int) -> None:
        self.barrier, self.brought = threading.Barrier(num_ranks, timeout=20), [torch.zeros(0)] * num_ranks
        self.rank = threading.local()

    def all_reduce(self, values: torch.Tensor, group: Any = None) -> None:
        self.brought[self.rank.number] = values.clone()
        self.barrier.wait()
        values.copy_(torch.stack(self.brought).sum(0))
        self.barrier.wait()


def together(run: Run, count: Any) -> list[list[dict[str, Any]]]:
    """The places of all ranks that run at the same time, with the windows' totals."""
    meeting, found = Meeting(run.num_ranks), [[] for _ in range(run.num_ranks)]

    def work(rank: int) -> None:
        meeting.rank.number = rank
        found[rank] = run.places(rank, count=count, updates_done=lambda: 100)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_reduce", meeting.all_reduce)
        patch.setattr(dist, "new_group", lambda backend: backend)
        threads = [threading.Thread(target=work, args=(rank,)) for rank in range(run.num_ranks)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return found


def counted(batch: dict[str, Any], info: dict[str, Any]) -> dict[str, int]:
    return {"num_attended": int(batch["attention_mask"].sum()), "num_rows": len(batch["row_ids"]) + info["epoch"]}


@PROPERTY
@given(RUNS)
def test_a_windows_totals_are_the_sums_over_its_batches_of_all_ranks(run):
    ranks = together(run, counted)
    assert all(ranks)
    size = run.num_ranks * run.accumulation
    for batch in (batch for rank in ranks for batch in rank):
        window = batch["info"]["number"] // size
        members = [b for b in global_order(ranks) if b["info"]["number"] // size == window]
        sums = {name: sum(counted(b, b["info"])[name] for b in members) for name in ("num_attended", "num_rows")}
        assert batch["info"]["window"] == sums
        assert batch["info"]["undo"] == size


@PROPERTY
@given(RUNS, st.sampled_from([(1, 4), (2, 2), (4, 1)]), st.sampled_from([(1, 4), (2, 2), (4, 1)]))
def test_windows_hold_the_same_batches_for_any_split_over_ranks_and_accumulation(run, one, other):
    found = [
        global_order(together(replace(run, num_ranks=ranks, accumulation=accumulation), counted))
        for ranks, accumulation in (one, other)
    ]
    assert_equal(*found)
