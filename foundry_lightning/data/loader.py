"""The one global list of batches of an epoch, dealt to ranks and workers, with each window's totals attached."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from torch.utils.data import Dataset as MapDataset

from foundry_lightning.data.pipeline import DataPipeline
from foundry_lightning.data.ready import ReadyBatches
from foundry_lightning.data.rows import Batch

Count = Callable[[Batch, dict[str, Any]], dict[str, int]]  # (batch, its info) -> what losses are divided by


@dataclass(frozen=True)
class Deal:
    """Who reads which batches, and in windows of how many.

    Attributes:
        rank: Of this process.
        num_ranks: Processes that train together.
        accumulation: Batches of one update on each rank.
        limit: Places of a rank after which the Trainer ends an epoch; None: it does not.
    """

    rank: int = 0
    num_ranks: int = 1
    accumulation: int = 1
    limit: int | None = None

    def num_local(self, num_batches: int) -> int:
        """Places of a rank in an epoch; equal on all ranks, the last may be filled with a batch of weight zero."""
        return -(-num_batches // self.num_ranks)


_host_group: tuple[Any, Any] = (None, None)


def host_group() -> Any:
    """The process group that joins the hosts of all ranks: what it carries makes no device wait. A collective call."""
    global _host_group
    world = dist.group.WORLD
    if _host_group[0] is not world:
        _host_group = (world, dist.new_group(backend="gloo"))
    return _host_group[1]


class _Reading:
    """The batch that each worker (without workers: this process) is reading, seen from all of them."""

    def __init__(self, num_workers: int) -> None:
        self.numbers = torch.full((max(num_workers, 1),), -1).share_memory_()

    def note(self, number: int) -> None:
        """This worker begins to read a batch."""
        worker = get_worker_info()
        self.numbers[0 if worker is None else worker.id] = number

    def explain(self, error: BaseException, epoch: int, rows: Callable[[int], list[int]]) -> None:
        """Adds the batches that were being read, and their rows, to PyTorch's error of a worker that died."""
        if isinstance(error, RuntimeError) and str(error).startswith("DataLoader worker"):
            numbers = sorted(number for number in self.numbers.tolist() if number >= 0)
            found = ", ".join(f"{number} (rows {', '.join(map(str, rows(number)))})" for number in numbers)
            error.args = (
                f"a data worker died while the batches {found} of epoch {epoch} were being read "
                f"({str(error).strip()}); look at these rows and at the memory left, or set num_workers=0.",
            )


@contextmanager
def _named(number: int, epoch: int) -> Iterator[None]:
    """Names the batch in an error of the user's source; errors that are sentences of ours stay as they are."""
    try:
        yield
    except (ValueError, TypeError, OSError):
        raise
    except Exception as error:
        raise RuntimeError(
            f"batch {number} of epoch {epoch} could not be read ({error!r}); look at its rows."
        ) from error


def _outlive_signals(worker_id: int) -> None:
    """Lets a worker serve the window that its rank finishes after a signal to the whole process group."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(signal, "alarm"):
        signal.signal(signal.SIGTERM, lambda *_: signal.alarm(20))


class _SizedReader(MapDataset[Batch]):
    """Batch by local place; the order of places is the sampler's, so workers change nothing."""

    def __init__(
        self,
        batches: DataPipeline | ReadyBatches,
        *,
        order: Any,
        deal: Deal,
        finish: _Finish,
        reading: _Reading,
    ) -> None:
        self.batches, self.order, self.deal, self.finish, self.reading = batches, order, deal, finish, reading
        self.num_batches = batches.num_batches()

    def __len__(self) -> int:
        return self.deal.num_local(self.num_batches)

    def __getitem__(self, place: int) -> Batch:
        number = place * self.deal.num_ranks + self.deal.rank
        exists = number < self.num_batches
        self.reading.note(number)
        with _named(number, self.finish.epoch):
            batch = self.batches.batch(number, self.order) if exists else None
        return self.finish(number, batch)


class _StreamReader(IterableDataset[Batch]):
    """The local places of a stream; worker w of W reads places w, w + W, …, which the loader takes in turn."""

    def __init__(
        self,
        pipeline: DataPipeline,
        *,
        seed: int,
        epoch: int,
        start: int,
        deal: Deal,
        finish: _Finish,
        reading: _Reading,
    ) -> None:
        self.pipeline, self.seed, self.epoch, self.start = pipeline, seed, epoch, start
        self.deal, self.finish, self.reading = deal, finish, reading

    def __iter__(self) -> Iterator[Batch]:
        worker = get_worker_info()
        index, workers = (0, 1) if worker is None else (worker.id, worker.num_workers)
        ranks = self.deal.num_ranks
        numbers = range((self.start + index) * ranks + self.deal.rank, sys.maxsize, workers * ranks)
        stream = self.pipeline.stream(seed=self.seed, epoch=self.epoch, numbers=numbers, num_ranks=ranks)
        for number in numbers:
            self.reading.note(number)
            with _named(number, self.epoch):
                found = next(stream, None)
            if found is None:
                return
            yield self.finish(*found)


@dataclass(frozen=True)
class _Finish:
    """Adds what the step needs to know of a batch, on the host, in the worker."""

    epoch: int
    window: int  # batches of an update
    first_update: int | None  # updates of the run before this epoch's first
    count: Count | None
    filler_id: int
    filler_width: int

    def __call__(self, number: int, batch: Batch | None) -> Batch:
        info = {"epoch": self.epoch, "number": number, "filler": batch is None}
        if self.first_update is not None:
            info["update"] = self.first_update + number // self.window
        if batch is None:
            row = torch.full((1, self.filler_width), self.filler_id)
            batch = {
                "input_ids": row,
                "attention_mask": torch.ones_like(row),
                "row_ids": torch.zeros(1).long(),
                "word_ids": torch.full_like(row, -1),
            }
        counts = self.count(batch, info) if self.count else {}
        return {**batch, "info": {**info, **(dict.fromkeys(counts, 0) if info["filler"] else counts)}}


class WindowLoader:
    """Iterates the batches of this rank for one epoch, window by window.

    Each batch is a dict of tensors and `info`, plain numbers: `epoch`, `number` (in the global order), `filler`, the
    batch's counts, and under `window` the same counts summed over the window and all ranks, and `undo`, the factor by
    which Lightning and DDP divide a batch's loss; with `updates_done` also `update`, those before the batch's own.

    Args:
        batches: Where the batches come from.
        deal: Function that gives this process's share, asked when an epoch begins.
        position: Function that gives (epoch, first local place), asked when an epoch begins.
        updates_done: Function that gives the run's updates so far, asked when an epoch begins.
        shuffle: Whether each epoch has an order of its own.
        seed: Seed of the order.
        count: Counts of a batch; None attaches no totals.
        filler_id: Token id that fills a batch of weight zero.
        num_workers: Worker processes.
        pin_memory: Whether batches are copied to page-locked memory.
    """

    def __init__(
        self,
        batches: DataPipeline | ReadyBatches,
        *,
        deal: Callable[[], Deal],
        position: Callable[[], tuple[int, int]] = lambda: (0, 0),
        updates_done: Callable[[], int] | None = None,
        shuffle: bool = False,
        seed: int = 42,
        count: Count | None = None,
        filler_id: int = 0,
        num_workers: int = 0,
        pin_memory: bool = False,
    ) -> None:
        self.batches, self.deal, self.position, self.updates_done = batches, deal, position, updates_done
        self.shuffle, self.seed, self.count, self.filler_id = shuffle, seed, count, filler_id
        self.num_workers, self.pin_memory = num_workers, pin_memory
        self._reading: tuple[_Reading, int] | None = None

    def __len__(self) -> int:
        """Batches of this rank in an epoch.

        Raises:
            TypeError: the source is a stream.
        """
        return self.deal().num_local(self.batches.num_batches())

    def __iter__(self) -> Iterator[Batch]:
        deal, (epoch, start) = self.deal(), self.position()
        width = min(8, self.batches.max_length)
        finish = _Finish(
            epoch=epoch,
            window=deal.accumulation * deal.num_ranks,
            first_update=None if self.updates_done is None else self.updates_done() - start // deal.accumulation,
            count=self.count,
            filler_id=self.filler_id,
            filler_width=width,
        )
        reading = _Reading(self.num_workers)
        self._reading = (reading, epoch)
        options: dict[str, Any] = {
            "batch_size": None,
            "num_workers": self.num_workers,
            "pin_memory": self.pin_memory,
            "worker_init_fn": _outlive_signals,
        }
        if self.batches.is_stream:
            assert isinstance(self.batches, DataPipeline)
            stream = _StreamReader(
                self.batches, seed=self.seed, epoch=epoch, start=start, deal=deal, finish=finish, reading=reading
            )
            loader: DataLoader[Batch] = DataLoader(stream, **options)
        else:
            order = self.batches.order(seed=self.seed, epoch=epoch, shuffle=self.shuffle)
            reader = _SizedReader(self.batches, order=order, deal=deal, finish=finish, reading=reading)
            loader = DataLoader(reader, sampler=range(start, len(reader)), **options)
        batches = iter(loader)
        # a window that the Trainer cuts has the totals of what is left of it
        places = islice(batches, None if deal.limit is None else max(deal.limit - start, 0))
        served = start
        try:
            while window := self._window(places, deal):
                served += len(window)
                if deal.limit is not None and served < deal.limit and len(window) < deal.accumulation:
                    raise ValueError(
                        f"the stream ended after {served} batches, before limit_train_batches={deal.limit} and within "
                        f"a window of {deal.accumulation}, for which no update would be made; lower "
                        "limit_train_batches, or leave it out."
                    )
                yield from window
        finally:
            if self.num_workers:  # an error's traceback would keep them, and garbage collection wait for them in vain
                batches._shutdown_workers()  # type: ignore[attr-defined]

    def _window(self, places: Iterator[Batch], deal: Deal) -> list[Batch]:
        """The next window's batches, with its totals."""
        try:
            window = list(islice(places, deal.accumulation))
        except (ConnectionError, EOFError) as error:
            if not self.num_workers or str(error).startswith("Caught "):  # the source's own
                raise
            raise RuntimeError(f"DataLoader worker died while a batch was taken from it: {error!r}") from error
        if window and self.count is not None:
            self._attach_totals(window, deal)
        return window

    def explain(self, error: BaseException) -> None:
        """Names the batches that were being read where the error says that a worker died."""
        if self._reading is not None:
            reading, epoch = self._reading
            order: dict[str, Any] = {"seed": self.seed, "epoch": epoch, "shuffle": self.shuffle}
            reading.explain(error, epoch, lambda number: self.batches.row_numbers(number, **order))

    def state_dict(self) -> dict[str, Any]:
        """Nothing: Lightning's progress says where the run stands; without a state it warns of unreliable results."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Nothing to do."""

    def _attach_totals(self, window: list[Batch], deal: Deal) -> None:
        names = [name for name in window[0]["info"] if name.startswith("num_")]
        totals = torch.tensor([sum(batch["info"][name] for batch in window) for name in names])
        if deal.num_ranks > 1:
            dist.all_reduce(totals, group=host_group())
        for batch in window:
            batch["info"]["window"] = dict(zip(names, totals.tolist(), strict=True))
            batch["info"]["undo"] = deal.accumulation * deal.num_ranks
