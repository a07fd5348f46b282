"""What our modules, data path and Lightning cost beside a bare PyTorch loop that does the same maths.

The model, rows and packed batches of `throughput`. The bare loop has its batches in a list and calls the same masking,
projection and loss, draws dropout alike, clips and steps a fused AdamW. Both alternate in one process, step times are
medians.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

from foundry_lightning.callbacks.dropout_draws import four_draws_a_number
from tests.benchmarks._rounds import write
from tests.benchmarks.throughput import BATCH, LENGTH, OURS, VOCABULARY, model, rows

WARM, STEPS = 2, 8


@four_draws_a_number()
def bare(student: Any, batches: list[dict[str, Any]]) -> list[float]:
    import torch

    from foundry_lightning.losses import vocabulary_loss
    from foundry_lightning.masking import Masking
    from foundry_lightning.packing import find_packing
    from foundry_lightning.projection import find_projection

    packing, projection = find_packing(student, name="student"), find_projection(student)
    masking = Masking(seed=42, mask_token_id=103, special_token_ids=(101, 102, 0), vocab_size=VOCABULARY)
    optimizer = torch.optim.AdamW(student.parameters(), lr=1e-4, fused=True)
    student.train()
    ends = []
    for batch in batches:
        masked = masking(**batch, epoch=0)
        inputs = {**packing.inputs(batch), "input_ids": masked.input_ids}
        scored = projection(student, inputs, positions=masked.positions).scored
        weight = 1 / len(masked.labels)
        vocabulary_loss(scored, labels=masked.labels, mlm_weight=weight).total.backward()
        torch.nn.utils.clip_grad_norm_(student.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        ends.append(time.perf_counter())
    return [b - a for a, b in zip(ends[WARM - 1 :], ends[WARM:], strict=False)]


def ours(student: Any) -> list[float]:
    import lightning

    from foundry_lightning import DataPipeline, MLMConfig, MLMTrainer

    ends = []

    class Watch(lightning.Callback):
        def on_train_batch_end(self, *args):
            ends.append(time.perf_counter())

    config = MLMConfig(**OURS, trainer_kwargs={"callbacks": [Watch()]})
    pipe = DataPipeline(rows(), batch_size=BATCH, max_length=LENGTH, pack=True)
    MLMTrainer(student, config=config).train(pipe, total_steps=WARM + STEPS)
    return [b - a for a, b in zip(ends[WARM - 1 :], ends[WARM:], strict=False)]


def run(*, threads: int, rounds: int, out: str) -> None:
    """Alternates both and writes the medians of their step times and of the rounds' ratios."""
    import torch

    from foundry_lightning import DataPipeline

    torch.set_num_threads(threads)
    student = model()
    pipe = DataPipeline(rows(), batch_size=BATCH, max_length=LENGTH, pack=True)
    order = pipe.order(seed=42, epoch=0, shuffle=False)
    batches = [pipe.batch(k, order) for k in range(WARM + STEPS)]
    found: dict[str, list[dict[str, float]]] = {"ours": [], "bare loop": []}
    for _ in range(rounds):
        for name, times in (("ours", ours(student)), ("bare loop", bare(student, batches))):
            found[name].append({"seconds a step": statistics.median(times)})
    own, bare_times = ([r["seconds a step"] for r in found[name]] for name in found)
    ratios = [a / b for a, b in zip(own, bare_times, strict=True)]
    lines = [
        f"seconds a step: ours {statistics.median(own):.3f}, bare loop {statistics.median(bare_times):.3f}, "
        f"ours / bare {statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"
    ]
    write("overhead", lines, found, out=out, bar="seconds a step")
