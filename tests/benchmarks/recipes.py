"""Validation loss against updates and wall time on `python-docs-wide`, for each recipe beside AdamW with a cosine.

The model of configs/mlm.yaml (BERT 2 × 128, V = 8,000) on packed rows, one seed and one peak rate for all; a recipe
changes one setting. What is held out is always scored with the same masks, 15 % of the tokens drawn one by one,
whatever a recipe trains with. The seconds are those of training alone: scoring and tokenising do not count.
"""

from __future__ import annotations

import math
import statistics
import time
from functools import partial
from pathlib import Path
from typing import Any

from tests.benchmarks._rounds import Figures, in_turn, write

STEPS, EVERY, SCORED_BATCHES = 400, 50, 16
CORPUS, BATCH, LENGTH, RATE, WARMUP = "python-docs-wide", 16, 128, 2e-3, 40
BASELINE = "adamw, cosine"
RECIPES: dict[str, dict[str, Any]] = {
    BASELINE: {},
    "wsd": {"lr_scheduler": "wsd"},
    "muon": {"optimizer": "muon"},
    "masked share 0.3 to 0.15": {"mask_prob": 0.3, "mask_prob_end": 0.15},
    "masked share 0.5 to 0.15": {"mask_prob": 0.5, "mask_prob_end": 0.15},
    "span": {"masking": "span"},
}


def curve(settings: dict[str, Any], *, steps: int, every: int) -> Figures:
    """`loss N` and `seconds N` after N updates."""
    import torch

    from foundry_lightning import DataPipeline, FromConfig, MLMConfig, MLMTrainer
    from foundry_lightning.losses import vocabulary_loss
    from foundry_lightning.masking import Masking
    from foundry_lightning.packing import find_packing
    from foundry_lightning.projection import find_projection
    from foundry_lightning.tokenizer import train_tokenizer

    tokenizer = train_tokenizer(CORPUS, vocab_size=8000)
    size = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 512}
    size |= {"max_position_embeddings": LENGTH, "initializer_range": 0.05}
    torch.manual_seed(0)
    student = FromConfig("bert", {**size, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}).build(
        tokenizer
    )
    train, held_out = (
        DataPipeline(name, tokenizer, batch_size=BATCH, max_length=LENGTH, pack=True)
        for name in (CORPUS, f"{CORPUS}:val")
    )
    order = held_out.order(seed=0, epoch=0, shuffle=True)
    batches = [held_out.batch(number, order) for number in range(SCORED_BATCHES)]
    packing, projection = find_packing(student, name="student"), find_projection(student)
    masking = Masking(
        seed=0,
        mask_token_id=tokenizer.mask_token_id,
        special_token_ids=tuple(tokenizer.all_special_ids),
        vocab_size=len(tokenizer),
    )

    @torch.no_grad()
    def held_out_loss() -> float:
        student.eval()
        total, count = 0.0, 0
        for batch in batches:
            masked = masking(**batch, epoch=0)
            inputs = {**packing.inputs(batch), "input_ids": masked.input_ids}
            scored = projection(student, inputs, positions=masked.positions).scored
            total += float(vocabulary_loss(scored, labels=masked.labels, mlm_weight=1.0).total)
            count += len(masked.labels)
        student.train()
        return total / count

    figures: Figures = {}
    scoring = 0.0

    def on_step(step: int, loss: float) -> None:
        nonlocal scoring
        now = time.perf_counter()
        figures[f"seconds {step}"] = now - began - scoring
        figures[f"loss {step}"] = held_out_loss()
        scoring += time.perf_counter() - now

    config = MLMConfig(
        **{"learning_rate": RATE, "warmup_steps": WARMUP, **settings}, log_every=every, device="cpu", progress_bar=False
    )
    train.prepare()
    began = time.perf_counter()
    MLMTrainer(student, tokenizer, config).train(train, on_step=on_step, shuffle=True, total_steps=steps)
    return figures


def reached(figures: Figures, target: float, *, steps: int, every: int) -> Figures:
    """The last loss, and when the first that is as low as `target` was scored (NaN: never)."""
    when = next((n for n in range(every, steps + 1, every) if figures[f"loss {n}"] <= target), None)
    return {
        "validation loss": figures[f"loss {steps}"],
        "updates to the baseline's loss": math.nan if when is None else when,
        "seconds to it": math.nan if when is None else figures[f"seconds {when}"],
        "seconds": figures[f"seconds {steps}"],
    }


def plot(found: dict[str, list[Figures]], path: Path, *, steps: int, every: int) -> None:
    """Median losses over updates and over seconds."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        return
    figure, axes = pyplot.subplots(1, 2, figsize=(9, 3.5), sharey=True, layout="constrained")
    places = range(every, steps + 1, every)
    for name, rounds in found.items():
        losses, seconds = (
            [statistics.median(f[f"{what} {n}"] for f in rounds) for n in places] for what in ("loss", "seconds")
        )
        axes[0].plot(places, losses, label=name)
        axes[1].plot(seconds, losses)
    axes[0].set(xlabel="updates", ylabel="validation loss (nats)")
    axes[1].set(xlabel="seconds of training")
    axes[0].legend(frameon=False)
    figure.savefig(path, dpi=120)


def run(*, threads: int, rounds: int, out: str) -> None:
    """Each recipe in turn; writes when it reached the baseline's last loss, and the curves."""
    size = {"steps": STEPS, "every": EVERY}
    sides = {name: partial(curve, settings, **size) for name, settings in RECIPES.items()}
    found = in_turn(sides, threads=threads, rounds=rounds)
    targets = [figures[f"loss {STEPS}"] for figures in found[BASELINE]]
    summary = {
        name: [reached(figures, target, **size) for figures, target in zip(curves, targets, strict=True)]
        for name, curves in found.items()
    }
    names = list(summary[BASELINE][0])
    lines = ["| | " + " | ".join(names) + " |", "| --- |" + " ---: |" * len(names)]
    for side, figures in summary.items():
        medians = [statistics.median(f[name] for f in figures) for name in names]
        lines.append(f"| {side} | " + " | ".join("never" if math.isnan(m) else f"{m:,.4g}" for m in medians) + " |")
    write("recipes", lines, found, out=out, bar=f"loss {STEPS}")
    plot(found, Path(out) / "recipes.png", **size)
