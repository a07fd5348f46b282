"""Dropout on the CPU: the draws' law, and that torch's own kernel is back after a fit."""

from __future__ import annotations

import lightning
import pytest
import torch

from foundry_lightning import DataPipeline, MLMConfig, MLMTrainer
from foundry_lightning.callbacks import dropout_draws
from foundry_lightning.callbacks.dropout_draws import bernoulli_, draws_one_by_one, four_draws_a_number
from tests.conftest import texts, tiny_bert


@pytest.fixture(autouse=True)
def _one_by_one(monkeypatch):
    """As on a CPU for which torch has no library, whatever this one is."""
    monkeypatch.setattr(dropout_draws, "draws_one_by_one", lambda: True)


def drawn(p, *shape, seed=0, dtype=torch.float32):
    return bernoulli_(torch.empty(shape, dtype=dtype), p, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("p", [0.05, 0.1, 0.5, 0.9, 1 - 2**-12])
def test_each_of_the_four_draws_of_a_number_has_the_probability(p):
    lanes = drawn(p, 250_000, 4).double()
    share, deviation = lanes.mean(dim=0), (p * (1 - p) / len(lanes)) ** 0.5
    assert (share - p).abs().max() < 4.5 * deviation + 2**-17
    assert set(lanes.unique().tolist()) == {0.0, 1.0}


def test_draws_of_a_number_and_of_neighbours_are_independent():
    flat = drawn(0.5, 400_000).double() * 2 - 1
    for distance in (1, 2, 3, 4, 8):
        products = flat[distance:] * flat[:-distance]
        assert products.mean().abs() < 4.5 / len(products) ** 0.5


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.bool, torch.uint8]
)
def test_every_type_and_layout_gets_the_same_draws(dtype):
    for shape in [(), (1,), (7,), (3, 5), (0,)]:
        expected = drawn(0.5, *shape)
        assert torch.equal(drawn(0.5, *shape, dtype=dtype).float(), expected)
    strided = torch.empty(5, 3, dtype=dtype).t()
    assert torch.equal(bernoulli_(strided, 0.5, generator=torch.Generator().manual_seed(0)).float(), drawn(0.5, 3, 5))


def test_probabilities_at_and_beyond_the_ends():
    for p, value in ((0, 0), (1, 1), (0.0, 0), (1e-9, 0), (1 - 1e-9, 1)):
        assert (drawn(p, 10) == value).all()
    for p in (-0.1, 1.1, float("nan")):
        with pytest.raises(RuntimeError, match="p to be in"):
            drawn(p, 10)


def test_they_follow_the_seed_and_torchs_own_are_back_afterwards():
    def dropped():
        torch.manual_seed(3)
        return torch.nn.functional.dropout(torch.ones(1000), 0.1)

    before = dropped()
    with four_draws_a_number():
        first, second = dropped(), dropped()
    assert torch.equal(first, second)
    assert not torch.equal(first, before)
    assert torch.equal(dropped(), before)


def test_torchs_own_stay_where_they_are_quick(monkeypatch):
    monkeypatch.setattr(dropout_draws, "draws_one_by_one", lambda: False)
    torch.manual_seed(3)
    before = torch.empty(100).bernoulli_(0.5)
    with four_draws_a_number():
        torch.manual_seed(3)
        assert torch.equal(torch.empty(100).bernoulli_(0.5), before)


def test_finding_out_leaves_the_global_generator_alone():
    state = torch.get_rng_state()
    assert draws_one_by_one.__wrapped__() in (True, False)
    assert torch.equal(torch.get_rng_state(), state)


class Spy(lightning.Callback):
    """Whose draws a fit and its evaluation see."""

    def __init__(self, fail=False):
        self.fail = fail
        self.seen = []

    def on_train_batch_end(self, *args):
        torch.manual_seed(0)
        self.seen.append(torch.empty(64).bernoulli_(0.5))
        if self.fail:
            raise OSError("disk full")


@pytest.mark.parametrize("fail", [False, True])
def test_a_fit_draws_four_at_a_time_and_leaves_torch_as_it_was(tokenizer, fail):
    torch.manual_seed(0)
    own = torch.empty(64).bernoulli_(0.5)
    spy = Spy(fail)
    trainer = MLMTrainer(
        tiny_bert(), tokenizer, MLMConfig(device="cpu", progress_bar=False, trainer_kwargs={"callbacks": [spy]})
    )
    pipe = DataPipeline(texts(8), tokenizer, batch_size=4, max_length=16)
    if fail:
        with pytest.raises(OSError, match="disk full"):
            trainer.train(pipe)
    else:
        trainer.train(pipe)
    assert torch.equal(spy.seen[0], drawn(0.5, 64))
    torch.manual_seed(0)
    assert torch.equal(torch.empty(64).bernoulli_(0.5), own)


def test_a_recomputed_layer_drops_what_its_forward_dropped(tokenizer):
    def losses(**settings):
        student = tiny_bert(dropout=0.4)
        config = MLMConfig(device="cpu", progress_bar=False, learning_rate=0.01, **settings)
        pipe = DataPipeline(texts(16), tokenizer, batch_size=4, max_length=16)
        return MLMTrainer(student, tokenizer, config).train(pipe)["losses"]

    assert losses(gradient_checkpointing=True) == pytest.approx(losses(), rel=1e-5)
