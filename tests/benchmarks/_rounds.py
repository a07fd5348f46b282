"""Runs sides in turn, each in a process of its own, and compares them round by round."""

from __future__ import annotations

import json
import multiprocessing
import statistics
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

Figures = dict[str, float]


def _measure(side: Callable[[], Figures], threads: int, queue: Any) -> None:
    import torch

    torch.set_num_threads(threads)
    queue.put(side())


def in_turn(sides: dict[str, Callable[[], Figures]], *, threads: int, rounds: int) -> dict[str, list[Figures]]:
    """Figures of each side in each round."""
    context = multiprocessing.get_context("spawn")
    found: dict[str, list[Figures]] = {name: [] for name in sides}
    for number in range(rounds):
        for name, side in sides.items():
            queue = context.Queue()
            process = context.Process(target=_measure, args=(side, threads, queue))
            process.start()
            found[name].append(queue.get(timeout=1800))
            process.join()
            print(f"round {number + 1}: {name}: {found[name][-1]}", flush=True)
    return found


def table(found: dict[str, list[Figures]], *, ratio: str, of: str, higher_is_better: bool = True) -> list[str]:
    """Markdown: medians of all figures, and how many times better the side `of` is in the figure `ratio`."""
    names = list(next(iter(found.values()))[0])
    lines = ["| | " + " | ".join(names) + f" | {of} is better by |", "| --- |" + " ---: |" * (len(names) + 1)]
    for side, rounds in found.items():
        medians = [statistics.median(figures[name] for figures in rounds) for name in names]
        pairs = [(a[ratio], b[ratio]) for a, b in zip(found[of], rounds, strict=True)]
        times = [a / b if higher_is_better else b / a for a, b in pairs]
        spread = f"{statistics.median(times):.2f} × ({min(times):.2f} to {max(times):.2f})"
        lines.append(f"| {side} | " + " | ".join(f"{value:,.4g}" for value in medians) + f" | {spread} |")
    return lines


def write(name: str, lines: list[str], found: dict[str, list[Figures]], *, out: str, bar: str) -> None:
    """Prints the table, and keeps it with all figures and a plot of one of them in the folder `out`."""
    print("\n".join(lines), flush=True)
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.md").write_text("\n".join(lines) + "\n")
    (folder / f"{name}.json").write_text(json.dumps(found, indent=1))
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        print("no plot: pip install matplotlib", flush=True)
        return
    figure, axis = pyplot.subplots(figsize=(7, 0.5 + 0.45 * len(found)), layout="constrained")
    sides = list(found)[::-1]
    axis.barh(sides, [statistics.median(figures[bar] for figures in found[side]) for side in sides], color="#4C72B0")
    axis.set_xlabel(bar)
    axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(folder / f"{name}.png", dpi=120)


def peak_mib() -> float:
    """Highest resident size of this process so far."""
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def held_mib() -> float:
    """What this process holds now without the pages of mapped files (Linux)."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("RssAnon:")[2].split()[0]) / 1024


@contextmanager
def peak_held() -> Iterator[list[float]]:
    """A list of one number: the largest `held_mib` inside, looked at 20 times a second."""
    peak, over = [held_mib()], threading.Event()

    def watch() -> None:
        while not over.wait(0.05):
            peak[0] = max(peak[0], held_mib())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield peak
    finally:
        over.set()
        watcher.join()


def hold_state(model: Any) -> None:
    """Touches as much memory as gradients and AdamW's moments will take, and frees it: all sides have them anyway."""
    import torch

    state = [torch.ones_like(p) for p in model.parameters() for _ in range(3)]
    del state


def matmul_rate() -> float:
    """FLOP/s of the machine's matrix products at the shapes of a BERT layer of width 384 over 2,048 tokens."""
    import time

    import torch

    shapes = [(2048, 384, 384), (2048, 384, 1152), (2048, 1152, 384), (384, 2048, 1152)]
    pairs = [(torch.randn(m, k), torch.randn(k, n)) for m, k, n in shapes]
    for a, b in pairs:
        a @ b
    done, began = 0, time.perf_counter()
    while time.perf_counter() - began < 1:
        for (m, k, n), (a, b) in zip(shapes, pairs, strict=True):
            a @ b
            done += 2 * m * k * n
    return done / (time.perf_counter() - began)
