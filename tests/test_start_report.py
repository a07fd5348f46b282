"""The start report tells what data and model are, warns of what is bad, and changes nothing of the run."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from foundry_lightning import DataPipeline, MLMConfig, MLMTrainer
from foundry_lightning.callbacks.start_report import StartReport
from foundry_lightning.facts import data_facts, free_memory, memory_facts, sample_rows, unigram_loss, warnings_of
from tests.conftest import texts, tiny_bert
from tests.several import in_ranks


def facts(source, tokenizer, *, shuffle: bool = False, **settings) -> dict:
    pipeline = DataPipeline(source, tokenizer, **{"batch_size": 2, "max_length": 16, **settings})
    masking = MLMTrainer(tiny_bert(len(tokenizer)), tokenizer, MLMConfig(mask_prob=0.5)).module.masking
    return data_facts(pipeline, masking=masking, seed=0, shuffle=shuffle)


def test_the_shares_of_four_rows_are_those_counted_by_hand(tokenizer):
    found = facts(["the cat", "the cat", "the zebra sat on a mat and saw", "the cat sat"], tokenizer)
    assert (found["rows"], found["tokens"]) == (4, 4 + 4 + 10 + 5)
    assert found["duplicate_share"] == 0.25
    assert found["unknown_share"] == pytest.approx(1 / 15)  # zebra among 15 words
    assert found["special_share"] == pytest.approx(9 / 23)  # two a row, and the unknown one
    assert found["masked_share"] == pytest.approx(0.5 * 14 / 23)
    assert found["padding_share"] == pytest.approx(1 - 23 / (2 * 8 + 2 * 16))  # widths 8 and 16
    assert found["cut_share"] == 0


def test_a_text_as_long_as_max_length_is_not_cut_and_a_longer_one_is(tokenizer):
    found = facts(["the cat", "the cat sat"], tokenizer, max_length=4)
    assert found["cut_share"] == 0.5
    assert facts(["the cat", "the cat sat"], tokenizer, max_length=4, long_rows="split")["cut_share"] == 0


def test_one_long_text_among_many_is_warned_of_by_the_share_of_its_tokens(tokenizer):
    found = facts(["the cat"] * 99 + ["the cat " * 100], tokenizer, max_length=8)
    assert found["cut_share"] == 0.01
    assert found["cut_token_share"] == pytest.approx((202 - 8) / (99 * 4 + 202))
    plan = {"batches_per_epoch": 9, "batches_per_update": 1}
    (said,) = warnings_of(
        {"data": {**found, "duplicate_share": 0}, "plan": plan, "memory": {"memory_free": None, "memory_to_come": 0}}
    )
    assert "cuts 1.0% of the texts, and with them 32% of all tokens; long_rows='split'" in said


def test_rows_that_differ_in_order_only_are_no_duplicates(tokenizer):
    assert facts(["the cat", "cat the", "the", "the the"], tokenizer)["duplicate_share"] == 0


@pytest.mark.parametrize("settings", [{"group_by_length": True}, {"pack": True}])
def test_the_padding_is_that_of_the_batches(tokenizer, settings):
    pipeline = DataPipeline(texts(40), tokenizer, batch_size=4, max_length=32, **settings)
    batches = list(pipeline)
    real = 1 - sum(int(b["attention_mask"].sum()) for b in batches) / sum(b["input_ids"].numel() for b in batches)
    found = data_facts(pipeline, masking=None, seed=pipeline.seed, shuffle=False)
    assert found["padding_share"] == pytest.approx(real, abs=0.05 if "pack" in settings else 1e-9)


def test_a_large_source_is_described_by_a_sample(tokenizer):
    pipeline = DataPipeline(["the cat", "the cat sat"] * 100_001, tokenizer, max_length=8)
    assert len(sample_rows(pipeline)) == 10_000


def test_a_look_at_a_stream_takes_no_row_of_an_iterator_that_serves_one_pass(tokenizer):
    iterator = iter(["the cat"] * 4)
    for source in (iterator, lambda: iterator):
        assert facts(source, tokenizer)["sampled_rows"] == 0
    assert len(list(iterator)) == 4
    assert facts(lambda: iter(["the cat"] * 4), tokenizer)["sampled_rows"] == 4


def train(
    tokenizer, source, *, folder: str = "", show: bool = False, student=None, **settings
) -> tuple[dict, MLMTrainer]:
    if folder:
        settings["trainer_kwargs"] = {"callbacks": [StartReport(folder, show=show)]}
    config = MLMConfig(device="cpu", progress_bar=False, learning_rate=1e-2, **settings)
    trainer = MLMTrainer(student or tiny_bert(len(tokenizer)), tokenizer, config)
    val = DataPipeline(texts(9, seed=1), tokenizer, max_length=32)
    pipeline = DataPipeline(source, tokenizer, batch_size=4, max_length=32)
    return trainer.train(pipeline, val, total_steps=4), trainer


@pytest.mark.parametrize("kind", ["list", "callable"])
def test_a_facade_reports_where_the_callback_is_given_and_the_run_stays_the_same(tokenizer, kind):
    source = texts(20) if kind == "list" else lambda: iter(texts(20))
    plain, first = train(tokenizer, source)
    assert not list(Path.cwd().rglob("start_report.json"))
    reported, second = train(tokenizer, source, folder="here")
    assert plain["losses"] == reported["losses"]
    pairs = zip(first.student.parameters(), second.student.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    report = json.loads(Path("here/start_report.json").read_text())
    num_batches = report["plan"]["batches_per_epoch"]
    assert report["data"]["rows"] == (20 if kind == "list" else None)
    assert report["plan"]["updates"] == 4
    assert report["plan"]["epochs_planned"] == (4 / num_batches if kind == "list" else None)
    assert report["model"]["parameters"] == sum(p.numel() for p in second.student.parameters())
    assert 0 < report["unigram_baseline"] < 4


def test_a_share_of_masks_that_falls_is_told_with_its_end(tokenizer):
    train(tokenizer, texts(20), folder="here", mask_prob=0.5, mask_prob_end=0.1)
    found = json.loads(Path("here/start_report.json").read_text())["data"]
    assert found["masked_at_end_share"] == pytest.approx(found["masked_share"] / 5)


def test_bad_figures_are_warned_of_with_advice(tokenizer):
    source = ["the zebra " * 20] * 3 + ["the cat"]
    train(tokenizer, source, folder="here", grad_accumulation_steps=3)
    found = "\n".join(json.loads(Path("here/start_report.json").read_text())["warnings"])
    for part in ("50% of the rows are copies", "train one on this text", "long_rows='split'", "lower the accumulation"):
        assert part in found


def test_the_baseline_is_the_cross_entropy_counted_by_hand(tokenizer):
    train_data, val = (DataPipeline(t, tokenizer) for t in (["the the cat"], ["the cat"]))
    found = unigram_loss(train_data, val, special_token_ids=(0, 1, 2, 3, 4), vocab_size=len(tokenizer))
    total = 3 + len(tokenizer)  # add-one smoothing over all ids
    expected = -(torch.tensor([3 / total]).log() + torch.tensor([2 / total]).log()) / 2
    assert found == pytest.approx(float(expected), rel=1e-6)


@pytest.mark.ddp
@pytest.mark.parametrize("kind", ["list", "callable"])
def test_rank_0_alone_reports_and_no_rank_waits_for_ever(tokenizer, tmp_path, kind):
    source = texts(20) if kind == "list" else lambda: iter(texts(20))
    settings = {"devices": 2, "strategy": "ddp"}

    def run(folder: str):
        return lambda rank: train(tokenizer, source, **settings, folder=folder)[0]["losses"]

    losses = [in_ranks(run(name), 2, tmp_path / f"ranks{name}") for name in ("", "here")]
    assert losses[0] == losses[1]
    assert len(list(tmp_path.rglob("start_report.json"))) == 1


def test_parameters_that_no_loss_reaches_are_counted_and_nothing_changes(tokenizer):
    student = tiny_bert(len(tokenizer))
    student.spare = torch.nn.Linear(3, 4)
    student.frozen = torch.nn.Linear(3, 4).requires_grad_(False)
    train(tokenizer, texts(8), folder="here", student=student)
    model = json.loads(Path("here/start_report.json").read_text())["model"]
    assert model["unreached_parameters"] == 16
    assert model["frozen_parameters"] == 16


def test_a_model_too_large_for_a_short_step_is_not_tried(tokenizer, monkeypatch):
    monkeypatch.setattr("foundry_lightning.facts._MOST_PARAMETERS", 10)
    train(tokenizer, texts(8), folder="here")
    assert json.loads(Path("here/start_report.json").read_text())["model"]["unreached_parameters"] is None


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_memory_is_the_bytes_that_weights_gradients_and_optimizer_hold(tokenizer, optimizer):
    _, trainer = train(tokenizer, texts(8), folder="here", optimizer=optimizer, save_dir="run", save_every=4)
    memory = json.loads(Path("here/start_report.json").read_text())["memory"]
    weights = 4 * sum(p.numel() for p in trainer.student.parameters())
    state = torch.load("run/checkpoint.ckpt", weights_only=True)["optimizer_states"][0]["state"]
    held = sum(v.numel() * v.element_size() for entry in state.values() for v in entry.values() if v.ndim)
    assert memory["memory_of_gradients"] == weights
    assert memory["memory_of_optimizer"] == held
    assert memory["memory_without_activations"] == 2 * weights + held
    assert memory["memory_to_come"] == weights + held


def test_moments_that_a_resumed_run_holds_are_not_still_to_come(tokenizer):
    module = torch.nn.Linear(3, 4)
    optimizer = torch.optim.AdamW(module.parameters())
    before = memory_facts(module, torch.device("cpu"), optimizers=[optimizer])
    assert before["memory_to_come"] == 3 * 4 * 16
    module(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    after = memory_facts(module, torch.device("cpu"), optimizers=[optimizer])
    assert after["memory_to_come"] == 4 * 16
    assert after["memory_without_activations"] == before["memory_without_activations"] == 4 * 4 * 16


def test_free_memory_is_told_where_the_system_tells_it():
    assert free_memory(torch.device("meta")) is None
    free = free_memory(torch.device("cpu"))
    assert free is None or 0 < free < 2**50


def test_too_little_memory_is_warned_of(tokenizer, monkeypatch):
    monkeypatch.setattr("foundry_lightning.facts.free_memory", lambda device: 2**20 // 100)
    train(tokenizer, texts(8), folder="here")
    (found,) = [
        w for w in json.loads(Path("here/start_report.json").read_text())["warnings"] if "memory" in w or "MiB" in w
    ]
    assert "take a smaller model" in found


def test_the_tokens_of_the_text_are_shown_and_said_to_be_estimated_where_they_are(tokenizer, capsys):
    for number, said in ((1, "2, 9 tokens"), (100_001, "200,002, about [89]\\d\\d,\\d{3} tokens; the shares describe")):
        train(tokenizer, ["the cat", "the cat sat"] * number, folder="here", show=True)
        assert re.search(said, capsys.readouterr().out)
