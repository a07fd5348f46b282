"""Sources without a length: read once per epoch, never whole, the same run with any number of workers."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from datasets import IterableDataset
from lightning.pytorch.callbacks import Callback

from foundry_lightning import DataPipeline, MLMConfig, MLMTrainer
from foundry_lightning.data.loader import Deal, WindowLoader
from tests.conftest import WORDS, texts, tiny_bert

ROWS = texts(22)
SETTINGS = {"progress_bar": False, "device": "cpu", "log_every": 1, "learning_rate": 1e-3}


class Rows(Callback):
    """The row numbers of each batch, by epoch."""

    def __init__(self) -> None:
        self.epochs: dict[int, list[list[int]]] = {}

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.epochs.setdefault(batch["info"]["epoch"], []).append(batch["row_ids"].tolist())


def run(tokenizer, data, *, total_steps=None, shuffle=False, held_out=None, on_step=None, **config):
    rows = Rows()
    settings = {**SETTINGS, "trainer_kwargs": {"callbacks": [rows]}, **config}
    trainer = MLMTrainer(tiny_bert(len(tokenizer), num_hidden_layers=1), tokenizer, MLMConfig(**settings))
    result = trainer.train(data, held_out, on_step, shuffle=shuffle, total_steps=total_steps)
    weights = torch.cat([p.detach().flatten() for p in trainer.student.parameters()])
    return SimpleNamespace(trainer=trainer, result=result, epochs=rows.epochs, weights=weights)


def stream_of(kind: str):
    if kind == "dataset":
        return IterableDataset.from_generator(lambda: ({"text": text} for text in ROWS))
    if kind == "shards":
        return IterableDataset.from_generator(
            lambda parts: ({"text": text} for part in parts for text in ROWS[part::3]), gen_kwargs={"parts": [0, 1, 2]}
        )
    return lambda: iter(ROWS)


def pipe(source, tokenizer, **settings) -> DataPipeline:
    return DataPipeline(source, tokenizer, **{"batch_size": 4, "max_length": 16, **settings})


@pytest.mark.parametrize(
    ("kind", "shuffle_buffer", "long_rows"),
    [("callable", 0, "truncate"), ("callable", 7, "split"), ("dataset", 7, "truncate"), ("shards", 0, "truncate")],
)
def test_each_row_comes_once_per_epoch_and_workers_change_nothing(tokenizer, kind, shuffle_buffer, long_rows):
    def fit(workers):
        settings = {"shuffle_buffer": shuffle_buffer, "long_rows": long_rows, "max_length": 8}
        data = pipe(stream_of(kind), tokenizer, **settings)
        return run(tokenizer, data, num_workers=workers, epochs=2, lr_scheduler="constant", grad_accumulation_steps=2)

    alone, four = fit(0), fit(4)
    assert four.epochs == alone.epochs
    assert four.result["losses"] == alone.result["losses"]
    assert torch.equal(four.weights, alone.weights)
    seen = [sorted(itertools.chain(*batches)) for batches in alone.epochs.values()]
    assert len(seen) == 2
    assert seen[0] == seen[1]
    assert len(set(seen[0])) == len(seen[0])
    if long_rows == "truncate":
        assert seen[0] == list(range(22))
    else:
        assert len(seen[0]) > 22
    assert all(len(batch) == 4 for batch in alone.epochs[0][:-1])


def test_a_stream_trains_as_the_list_of_its_rows(tokenizer):
    listed = run(tokenizer, pipe(ROWS, tokenizer), total_steps=8)
    streamed = run(tokenizer, pipe(stream_of("callable"), tokenizer), total_steps=8)
    assert streamed.result["losses"] == listed.result["losses"]
    assert torch.equal(streamed.weights, listed.weights)


def test_a_shuffled_stream_permutes_consecutive_blocks_anew_in_each_epoch(tokenizer):
    data = pipe(stream_of("callable"), tokenizer, shuffle_buffer=8)
    orders = [list(itertools.chain(*batches)) for batches in run(tokenizer, data, total_steps=12).epochs.values()]
    assert orders[0] != orders[1]
    for order in orders:
        assert order[:8] != list(range(8))
        assert [sorted(order[first : first + 8]) for first in (0, 8, 16)] == [
            list(range(8)),
            list(range(8, 16)),
            list(range(16, 22)),
        ]


def test_shuffle_without_a_buffer_is_said_to_have_no_effect_on_a_stream(tokenizer):
    with pytest.warns(UserWarning, match="shuffle=True has no effect on a stream; set shuffle_buffer"):
        run(tokenizer, pipe(stream_of("callable"), tokenizer), shuffle=True, total_steps=1)


def test_an_endless_stream_is_read_only_a_window_ahead_of_the_updates(tokenizer):
    read, at_update = [], []

    def endless():
        for n in itertools.count():
            read.append(n)
            yield ROWS[n % len(ROWS)]

    result = run(
        tokenizer,
        pipe(endless, tokenizer),
        total_steps=3,
        grad_accumulation_steps=2,
        on_step=lambda step, loss: at_update.append(len(read)),
    ).result
    assert len(result["losses"]) == 6
    assert at_update == [16, 24, 32]  # 8 rows to a window


def test_an_endless_stream_ends_with_its_workers(tokenizer):
    data = pipe(lambda: itertools.cycle(ROWS), tokenizer)
    assert len(run(tokenizer, data, total_steps=5, num_workers=2).result["losses"]) == 5
    assert not multiprocessing.active_children()

    def stop(step, loss):
        raise KeyError(step)

    with pytest.raises(KeyError):
        run(tokenizer, data, total_steps=5, num_workers=2, on_step=stop)
    assert not multiprocessing.active_children()


def test_a_stream_that_ends_early_starts_its_next_epoch_and_says_so_once(tokenizer):
    data = pipe(stream_of("callable"), tokenizer)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        done = run(tokenizer, data, total_steps=14)
    said = [str(w.message) for w in caught if "the stream ended" in str(w.message)]
    assert said == ["the stream ended after 6 updates, before the run's 14: epoch 1 reads it again."]
    assert [len(batches) for batches in done.epochs.values()] == [6, 6, 2]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("make", [lambda: iter([]), None], ids=["callable", "dataset"])
def test_an_empty_stream_raises(tokenizer, workers, make):
    source = make or IterableDataset.from_generator(lambda: iter(()))
    with pytest.raises(ValueError, match="empty"):
        run(tokenizer, pipe(source, tokenizer), total_steps=3, num_workers=workers)
    assert not multiprocessing.active_children()


def test_a_one_shot_iterator_serves_one_epoch(tokenizer):
    data = pipe(iter(ROWS), tokenizer)
    done = run(tokenizer, data, lr_scheduler="constant")
    assert list(itertools.chain(*done.epochs[0])) == list(range(22))
    with pytest.raises(ValueError, match="was read already .* pass a callable"):
        run(tokenizer, data, lr_scheduler="constant")


@pytest.mark.parametrize(
    ("settings", "named"),
    [({"epochs": 2}, "epochs=2"), ({"num_workers": 1}, "num_workers=1")],
    ids=["epochs", "workers"],
)
def test_a_one_shot_iterator_is_refused_before_training_where_it_would_be_read_twice(tokenizer, settings, named):
    calls = []
    with pytest.raises(ValueError, match=rf"read once .* got {named}; pass a callable"):
        run(
            tokenizer,
            pipe(iter(ROWS), tokenizer),
            lr_scheduler="constant",
            on_step=lambda *call: calls.append(call),
            **settings,
        )
    assert not calls


def test_a_one_shot_iterator_that_ends_before_total_steps_raises(tokenizer):
    with pytest.raises(ValueError, match="was read already .* pass a callable"):
        run(tokenizer, pipe(iter(ROWS), tokenizer), total_steps=9)
    done = run(tokenizer, pipe(iter(ROWS), tokenizer), total_steps=4)
    assert len(done.result["losses"]) == 4


def test_a_one_shot_iterator_is_refused_for_evaluation(tokenizer):
    with pytest.raises(ValueError, match="pass a callable"):
        run(tokenizer, pipe(ROWS, tokenizer), held_out=pipe(iter(ROWS), tokenizer), eval_every=1)
    trainer = MLMTrainer(tiny_bert(len(tokenizer)), tokenizer, MLMConfig(**SETTINGS))
    with pytest.raises(ValueError, match="pass a callable"):
        trainer.evaluate(pipe(iter(ROWS), tokenizer))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stream_can_be_evaluated(tokenizer, workers):
    trainer = MLMTrainer(tiny_bert(len(tokenizer)), tokenizer, MLMConfig(**SETTINGS, num_workers=workers))
    listed = trainer.evaluate(pipe(ROWS, tokenizer))
    assert trainer.evaluate(pipe(stream_of("callable"), tokenizer)) == listed
    assert trainer.evaluate(pipe(stream_of("callable"), tokenizer)) == listed


@pytest.mark.parametrize("schedule", ["cosine", "linear"])
def test_a_stream_without_total_steps_is_refused_unless_the_rate_is_constant(tokenizer, schedule):
    with pytest.raises(ValueError, match=rf"lr_scheduler='{schedule}' .*give total_steps.*lr_scheduler='constant'"):
        run(tokenizer, pipe(stream_of("callable"), tokenizer), lr_scheduler=schedule)
    done = run(tokenizer, pipe(stream_of("callable"), tokenizer), lr_scheduler="constant", epochs=2)
    assert len(done.result["losses"]) == 12


def test_a_stream_has_no_length(tokenizer):
    with pytest.raises(TypeError, match="is a stream and has no length"):
        len(pipe(stream_of("callable"), tokenizer))


@pytest.mark.slow
def test_memory_is_flat_over_a_million_rows_of_a_shuffled_stream(tokenizer):
    """It grows by less than 16 MiB from 50,000 rows on, while 100 MB of text are read."""

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    row = " ".join(WORDS)
    pipe = DataPipeline(
        lambda: (f"{n} {row}" for n in range(1_000_000)), tokenizer, batch_size=500, max_length=32, shuffle_buffer=4096
    )
    loader = WindowLoader(pipe, deal=lambda: Deal(accumulation=2), count=lambda batch, epoch: {"num_rows": 500})
    after = {}
    for number, _ in enumerate(loader, start=1):
        if number in (100, 2000):
            after[number] = resident()
    assert number == 2000
    assert after[2000] - after[100] < 16 * 2**20
