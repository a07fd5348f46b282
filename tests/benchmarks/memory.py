"""How the memory of distillation grows with the vocabulary, from V = 30,000 to 240,000, all widths fixed.

The models and mixed rows of `distil`. Beyond both models, gradients and optimizer state, a step may hold two
temporaries of the size of the vocabulary matrix's gradient (V × 312 floats): what the last line takes off.
"""

from __future__ import annotations

import statistics
from functools import partial

from tests.benchmarks import distil
from tests.benchmarks._rounds import in_turn, write

SMALL, LARGE, WIDTH = 30_522, 240_000, 312
ABOVE = "MiB above models and optimizer"


def run(*, threads: int, rounds: int, out: str) -> None:
    """Both vocabularies in turn; writes the peaks, and the growth beside what it may be."""
    sides = {f"V = {size:,}": partial(distil.ours, mixed=True, vocab_size=size) for size in (SMALL, LARGE)}
    found = in_turn(sides, threads=threads, rounds=rounds)
    small, large = (statistics.median(figures[ABOVE] for figures in side) for side in found.values())
    temporaries = 2 * (LARGE - SMALL) * WIDTH * 4 / 2**20
    lines = [
        "| | MiB above models and optimizer |",
        "| --- | ---: |",
        f"| V = {SMALL:,} | {small:,.0f} |",
        f"| V = {LARGE:,} | {large:,.0f} |",
        f"| growth | {large - small:,.0f} |",
        f"| of it beyond two gradients ({temporaries:,.0f}) | {large - small - temporaries:,.0f} |",
    ]
    write("memory", lines, found, out=out, bar=ABOVE)
