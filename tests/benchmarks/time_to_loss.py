"""Wall time until the validation loss that `olaverse-foundry` ends with, on the rows of `python-docs`.

The model of configs/mlm.yaml (BERT 2 × 128, V = 8,000). The peer (`pip install --no-deps olaverse-foundry==0.3.0`)
trains on padded batches of 64 rows with the same peak rate and warm-up; its loss is then measured by
`MLMTrainer.evaluate`, as ours is. Ours trains on packed rows with a share of masked tokens that falls from 0.3 to 0.15,
and evaluates as it goes; the time counts these evaluations and ends with the first that is as low. Tokenising counts on
neither side.
"""

from __future__ import annotations

import time
from functools import partial
from typing import Any

from tests.benchmarks._rounds import Figures, in_turn, table, write

PEER_STEPS, STEPS, EVERY = 250, 240, 20
LENGTH, RATE, WARMUP = 128, 2e-3, 25


def prepared() -> tuple[Any, Any]:
    """The tokenizer and a fresh student."""
    import torch

    from foundry_lightning import FromConfig
    from foundry_lightning.tokenizer import train_tokenizer

    tokenizer = train_tokenizer("python-docs", vocab_size=8000)
    size = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 512}
    size |= {"max_position_embeddings": LENGTH, "initializer_range": 0.05}
    torch.manual_seed(0)
    student = FromConfig("bert", {**size, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}).build(
        tokenizer
    )
    return tokenizer, student


def held_out_loss(student: Any, tokenizer: Any) -> float:
    from foundry_lightning import DataPipeline, MLMConfig, MLMTrainer

    trainer = MLMTrainer(student, tokenizer, MLMConfig(device="cpu", progress_bar=False))
    return trainer.evaluate(DataPipeline("python-docs:val", tokenizer, batch_size=16, max_length=LENGTH, pack=True))[
        "mlm"
    ]


def peer() -> Figures:
    import numpy as np
    from foundry.training.mlm import MLMConfig, MLMTrainer

    from foundry_lightning import DataPipeline

    tokenizer, student = prepared()
    batches = []
    pipe = DataPipeline("python-docs", tokenizer, batch_size=64, max_length=LENGTH)
    order = pipe.order(seed=0, epoch=0, shuffle=True)
    for number in range(PEER_STEPS):
        batch = pipe.batch(number % (pipe.num_batches() - 1), order)
        pad = ((0, 0), (0, LENGTH - batch["input_ids"].shape[1]))
        batches.append({name: np.pad(batch[name].numpy(), pad) for name in ("input_ids", "attention_mask")})
    config = MLMConfig(device="cpu", learning_rate=RATE, warmup_steps=WARMUP)
    trainer = MLMTrainer(student, tokenizer, config)
    began = time.perf_counter()
    trainer.train(batches)
    return {"seconds": time.perf_counter() - began, "validation loss": held_out_loss(student, tokenizer)}


def ours(target: float) -> Figures:
    import lightning

    from foundry_lightning import DataPipeline, MLMConfig, MLMTrainer

    tokenizer, student = prepared()
    settings = {"batch_size": 16, "max_length": LENGTH, "pack": True}
    train, held_out = (DataPipeline(name, tokenizer, **settings) for name in ("python-docs", "python-docs:val"))
    for pipe in (train, held_out):
        pipe.prepare()
    curve: list[tuple[float, float]] = []

    class Watch(lightning.Callback):
        def on_validation_end(self, trainer, module):
            curve.append((time.perf_counter() - began, float(trainer.callback_metrics["val/loss"])))
            trainer.should_stop = curve[-1][1] <= target

    config = MLMConfig(
        learning_rate=RATE,
        warmup_steps=WARMUP,
        mask_prob=0.3,
        mask_prob_end=0.15,
        device="cpu",
        progress_bar=False,
        eval_every=EVERY,
        trainer_kwargs={"callbacks": [Watch()]},
    )
    began = time.perf_counter()
    MLMTrainer(student, tokenizer, config).train(train, held_out, shuffle=True, total_steps=STEPS)
    seconds, loss = curve[-1]
    if loss > target:
        raise RuntimeError(f"{STEPS} updates reached {loss:.3f}, the peer {target:.3f}")
    return {"seconds": seconds, "validation loss": loss}


def run(*, threads: int, rounds: int, out: str) -> None:
    """The peer, then ours until its loss, in each round."""
    found: dict[str, list[Figures]] = {"olaverse-foundry 0.3.0": [], "ours": []}
    for _ in range(rounds):
        found["olaverse-foundry 0.3.0"] += in_turn({"peer": peer}, threads=threads, rounds=1)["peer"]
        side = partial(ours, found["olaverse-foundry 0.3.0"][-1]["validation loss"])
        found["ours"] += in_turn({"ours": side}, threads=threads, rounds=1)["ours"]
    lines = table(found, ratio="seconds", of="ours", higher_is_better=False)
    write("time_to_loss", lines, found, out=out, bar="seconds")
