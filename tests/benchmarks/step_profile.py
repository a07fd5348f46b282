"""Where the time of a packed step goes: shares of the operators' own CPU time, by torch's profiler.

The bare loop of `overhead` (the model, rows and packed batches of `throughput`), four steps after a warm-up.
"""

from __future__ import annotations

import statistics
from collections import Counter

from tests.benchmarks._rounds import Figures, write
from tests.benchmarks.overhead import bare
from tests.benchmarks.throughput import BATCH, LENGTH, model, rows

STEPS = 4
GROUPS = {"aten::mm": "matrix products", "aten::addmm": "matrix products", "aten::bmm": "matrix products"}
GROUPS |= {"aten::bernoulli_": "draws of dropout", "aten::random_": "draws of dropout"}  # torch's; four a number


def shares() -> Figures:
    """Percent of the time that each operator takes, the matrix products together."""
    from torch.profiler import ProfilerActivity, profile

    from foundry_lightning import DataPipeline

    student = model()
    pipe = DataPipeline(rows(), batch_size=BATCH, max_length=LENGTH, pack=True)
    order = pipe.order(seed=42, epoch=0, shuffle=False)
    batches = [pipe.batch(k, order) for k in range(STEPS)]
    bare(student, batches)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        bare(student, batches)
    times: Counter[str] = Counter()
    for entry in profiler.key_averages():
        times[GROUPS.get(entry.key, entry.key)] += entry.self_cpu_time_total
    return {name: 100 * time / times.total() for name, time in times.items()}


def run(*, threads: int, rounds: int, out: str) -> None:
    """Medians of the rounds' shares, of what takes 1 % or more."""
    import torch

    torch.set_num_threads(threads)
    found = [shares() for _ in range(rounds)]
    medians = {name: statistics.median(figures.get(name, 0.0) for figures in found) for name in found[0]}
    medians = {name: value for name, value in sorted(medians.items(), key=lambda item: -item[1]) if value >= 1}
    lines = ["| | % of the step |", "| --- | ---: |", *(f"| {name} | {value:.1f} |" for name, value in medians.items())]
    write("step_profile", lines, {name: [{"%": value}] for name, value in medians.items()}, out=out, bar="%")
