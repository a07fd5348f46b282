"""The same run on any number of ranks: real processes on gloo."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import time

import pytest
import torch
from transformers import BertModel

from foundry_lightning import DataPipeline, MLMConfig, MLMTrainer, WithMLMHead
from tests.conftest import BiasStudent, texts, tiny_bert
from tests.several import free_port, in_ranks

QUIET = {"progress_bar": False, "device": "cpu", "log_every": 1}


def config(num_ranks: int, **settings) -> MLMConfig:
    return MLMConfig(**{**QUIET, "devices": num_ranks, "strategy": "ddp" if num_ranks > 1 else "auto", **settings})


def train(num_ranks: int, tokenizer, *, data=None, student=None, call=None, resume=None, **settings) -> dict:
    """A facade's run in this rank: what it returns, what `on_step` got, and the trained weights."""
    student = student or tiny_bert(len(tokenizer))
    trainer = MLMTrainer(student, tokenizer, config(num_ranks, **settings))
    if resume is not None:
        trainer.resume_from_checkpoint(resume)
    steps: list[tuple[int, float]] = []
    forwards: list[float] = []
    student.register_forward_pre_hook(
        lambda m, a, k: forwards.append(k["input_ids"].sum().item()) if m.training else None, with_kwargs=True
    )
    data = DataPipeline(texts(36), tokenizer, batch_size=3, max_length=32) if data is None else data
    result = trainer.train(data, on_step=lambda *pair: steps.append(pair), **(call or {}))
    return {
        **result,
        "steps": steps,
        "forwards": forwards,
        "weights": torch.cat([p.detach().flatten() for p in student.parameters()]),
    }


def ranks_of(num_ranks: int, folder, tokenizer, **settings) -> list[dict]:
    """The same run in one process (here) or several."""
    if num_ranks == 1:
        return [train(1, tokenizer, **settings)]
    return in_ranks(lambda rank: train(num_ranks, tokenizer, **settings), num_ranks, folder)


def assert_same_run(one: dict, several: list[dict]) -> None:
    for rank, result in enumerate(several):
        assert result["losses"] == pytest.approx(one["losses"][rank :: len(several)], rel=1e-4), rank
        assert torch.allclose(result["weights"], one["weights"], rtol=1e-4, atol=2e-6), rank
        assert torch.equal(result["weights"], several[0]["weights"])
        assert result["eval_losses"] == pytest.approx(one["eval_losses"], rel=1e-5)
        assert result["eval_losses"] == several[0]["eval_losses"]
        assert [step for step, _ in result["steps"]] == ([] if rank else [step for step, _ in one["steps"]])
    assert [loss for _, loss in several[0]["steps"]] == pytest.approx([loss for _, loss in one["steps"]], rel=1e-4)


def test_two_ranks_train_like_one_with_twice_the_accumulation(tokenizer, tmp_path):
    held_out = DataPipeline(texts(13, seed=9), tokenizer, batch_size=3, max_length=32)
    settings = {
        "data": DataPipeline(texts(20), tokenizer, batch_size=3, max_length=32),  # 7 batches: a filler at each end
        "learning_rate": 1e-3,
        "epochs": 3,
        "eval_every": 2,
        "call": {"shuffle": True, "eval_dataset": held_out},
    }
    one = train(1, tokenizer, grad_accumulation_steps=4, **settings)
    several = ranks_of(2, tmp_path, tokenizer, grad_accumulation_steps=2, **settings)
    assert [step for step, _ in one["steps"]] == [1, 2, 3, 4, 5, 6]
    assert sorted(one["eval_losses"]) == [2, 4, 6]
    assert_same_run(one, several)


@pytest.mark.ddp
@pytest.mark.parametrize("masking", ["token", "whole_word"])
def test_twenty_updates_on_one_two_and_four_ranks_are_the_same_run(tokenizer, tmp_path, masking):
    settings = {"learning_rate": 1e-3, "call": {"shuffle": True, "total_steps": 20}, "masking": masking}
    one = train(1, tokenizer, grad_accumulation_steps=4, **settings)
    assert [step for step, _ in one["steps"]] == list(range(1, 21))
    for num_ranks in (2, 4):
        several = ranks_of(num_ranks, tmp_path / str(num_ranks), tokenizer, grad_accumulation_steps=4 // num_ranks, **settings)
        assert_same_run(one, several)
        for rank, result in enumerate(several):  # rows and masks bit by bit
            assert result["forwards"] == one["forwards"][rank::num_ranks]
