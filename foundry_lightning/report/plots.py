"""Draws the curves of runs: one panel per quantity, against updates, tokens or wall time."""

from __future__ import annotations

import io
import math
import re
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from foundry_lightning.report.runs import Run

AXES = {"steps": None, "tokens": "progress/tokens", "time": "progress/seconds"}
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#7f6000", "#56b4e9", "#e69f00", "#333333")
_NAMESPACES = 'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"'
_MOST = 1500  # points of a curve; more are drawn as means of neighbours, a panel has some 400 pixels
_SMOOTHED_FROM = 100  # points from which a running mean is drawn over the values
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "foundry-lightning",
    "text.parse_math": False,  # a run's name may hold dollar signs
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.edgecolor": "#888888",
    "grid.color": "#e4e4e4",
    "axes.titlelocation": "left",
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "legend.frameon": False,
    "legend.fontsize": 9,
}


@dataclass(frozen=True)
class Panel:
    """One quantity.

    Attributes:
        name: In ids and file names.
        title: Over the panel.
        unit: Beside its axis.
        train: The column of the training.
        val: The column of the evaluations.
        baseline: The unigram baseline as this quantity; None: it has none.
        smooth: Whether the running mean of many values is drawn over them.
        log_from: Largest ÷ smallest value from which the axis is logarithmic; inf: it begins at zero instead.
    """

    name: str
    title: str
    unit: str
    train: str = ""
    val: str = ""
    baseline: Any = None
    smooth: bool = True
    log_from: float = math.inf

    @property
    def columns(self) -> dict[str, str]:
        """`train` and `val` -> the column, where there is one."""
        return {kind: column for kind, column in (("train", self.train), ("val", self.val)) if column}


_PANELS = (
    Panel("loss", "Loss", "", "train/loss", "val/loss", log_from=20),
    Panel("mlm", "Masked-language-model loss", "nats per masked token", "train/mlm", "val/mlm", float, log_from=20),
    Panel("distill", "Distillation loss", "KL · T²", "train/distill", "val/distill", log_from=20),
    Panel("cosine", "Cosine loss", "1 − cos", "train/cosine", "val/cosine", log_from=20),
    Panel("perplexity", "Validation perplexity", "", val="val/perplexity", baseline=math.exp, log_from=5),
    Panel("accuracy", "Masked tokens guessed right (validation)", "share", val="val/masked_accuracy"),
    Panel("learning_rate", "Learning rate", "", "train/learning_rate", smooth=False),
    Panel("grad_norm", "Gradient norm", "", "train/grad_norm", log_from=10),
    Panel("throughput", "Throughput", "tokens per second", "train/tokens_per_second"),
)


def panels_of(runs: list[Run]) -> list[Panel]:
    """The panels that the runs have values for; a total that is the masked-language-model loss alone is left out."""
    found = [p for p in _PANELS if any(run.metrics.get(c) for run in runs for c in p.columns.values())]
    total = all(
        run.metrics.get(f"{part}/loss") == run.metrics.get(f"{part}/mlm") for run in runs for part in ("train", "val")
    )
    return [panel for panel in found if panel.name != "loss" or not total]


def axes_of(runs: list[Run]) -> list[str]:
    """The names of the axes that a run has values for."""
    return [name for name, column in AXES.items() if column is None or any(run.metrics.get(column) for run in runs)]


def colours(number: int) -> list[str]:
    """A colour for each run."""
    if number <= len(_COLOURS):
        return list(_COLOURS[:number])
    return [matplotlib.colors.to_hex(c) for c in matplotlib.colormaps["turbo"](np.linspace(0.05, 0.95, number))]


def svg(runs: list[Run], panel: Panel, axis: str) -> str:
    """A panel as an `<svg>` for a page that holds others; its curves are groups `curve-PANEL-AXIS-KIND-NUMBER`."""
    written = io.StringIO()
    with matplotlib.rc_context(_STYLE):
        _figure(runs, panel, axis, name_runs=False).savefig(written, format="svg", metadata={"Date": None})
    text = written.getvalue()
    size = re.search(r'viewBox="[^"]*"', text)
    assert size is not None
    inside = re.sub(r"<metadata>.*?</metadata>", "", text[text.index(">", size.end()) + 1 :], flags=re.DOTALL)
    # an id may stand in a page once; those of curves name panel and axis already
    inside = re.sub(r'(\bid="|href="#|url\(#)(?!curve-|baseline-)', rf"\g<1>{panel.name}-{axis}-", inside)
    names = ", ".join(run.name for run in runs if _has(run, panel, axis))
    label = escape(f"{panel.title} against {_unit(runs, axis)[1]}: {names}")
    return f'<svg {size[0]} role="img" aria-label="{label}" {_NAMESPACES}>{inside}'


def write_pngs(runs: list[Run], folder: Path) -> list[Path]:
    """Writes each panel against each axis as `PANEL.AXIS.png`."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for panel in panels_of(runs):
        for axis in axes_of(runs):
            written.append(folder / f"{panel.name}.{axis}.png")
            with matplotlib.rc_context(_STYLE):
                _figure(runs, panel, axis, name_runs=True).savefig(written[-1], dpi=160)
    return written


def _has(run: Run, panel: Panel, axis: str) -> bool:
    return any(len(run.curve(column, AXES[axis])[0]) for column in panel.columns.values())


def _figure(runs: list[Run], panel: Panel, axis: str, *, name_runs: bool) -> Figure:
    """One panel.

    Args:
        runs: All runs, so that a run keeps its colour.
        panel: What is drawn.
        axis: A name of `AXES`.
        name_runs: Whether the legend names the runs, as it must where nothing else does.
    """
    figure = Figure(figsize=(4.8, 3.1), layout="constrained")
    axes = figure.add_subplot(title=panel.title, ylabel=panel.unit)
    divisor, label = _unit(runs, axis)
    seen: list[float] = []
    kinds: dict[str, Line2D] = {}
    named: list[tuple[Run, str]] = []
    for number, (run, colour) in enumerate(zip(runs, colours(len(runs)), strict=True)):
        if not _has(run, panel, axis):
            continue
        named.append((run, colour))
        shown = colour if len(runs) == 1 else "#555555"
        for kind, column in panel.columns.items():
            x, y = run.curve(column, AXES[axis])
            if len(x):
                seen += y[np.isfinite(y)].tolist()
                gid = f"curve-{panel.name}-{axis}-{kind}-{number}"
                if kind == "val":
                    _draw_evaluations(axes, x / divisor, y, colour, gid=gid)
                else:
                    _draw_training(axes, x / divisor, y, colour, gid=gid, panel=panel)
                style = {"marker": "o", "markersize": 4} if kind == "val" else {"alpha": 0.6, "linewidth": 1.2}
                kinds[{"val": "validation", "train": "training"}[kind]] = Line2D([], [], color=shown, **style)
        if panel.baseline is not None and run.baseline is not None:
            seen.append(panel.baseline(run.baseline))
            its_own = len(runs) > 1 and [other.baseline for other in runs].count(run.baseline) == 1
            line = axes.axhline(seen[-1], color=colour if its_own else "#555555", linewidth=1.2, linestyle=(0, (4, 3)))
            line.set_gid(f"baseline-{panel.name}-{axis}-{number}")
            kinds["unigram baseline"] = Line2D([], [], color="#555555", linewidth=1.2, linestyle=(0, (4, 3)))
    _scale(axes, panel, seen)
    axes.set_xlabel(label)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: short(value)))
    axes.xaxis.get_major_locator().set_params(nbins=6)  # type: ignore[call-arg]
    handles = list(kinds.values()) if len(kinds) > 1 else []
    labels = list(kinds) if len(kinds) > 1 else []
    if name_runs:
        handles = [Line2D([], [], color=colour, linewidth=2.5) for _, colour in named] + handles
        labels = [_legible(run.name) for run, _ in named] + labels
    if handles:
        figure.legend(handles, labels, loc="outside lower center", ncols=min(len(labels), 3))
    return figure


def _draw_evaluations(axes: Axes, x: np.ndarray, y: np.ndarray, colour: str, *, gid: str) -> None:
    """Dots on a line; without dots where they would touch."""
    size = 4 if len(x) <= 40 else 2 if len(x) <= 200 else 0
    axes.plot(x, y, color=colour, linewidth=1.8, marker="o", markersize=size, zorder=4, gid=gid)


def _draw_training(axes: Axes, x: np.ndarray, y: np.ndarray, colour: str, *, gid: str, panel: Panel) -> None:
    """The values, thin beside evaluations, and their running mean over them where they are many."""
    group = -(-len(x) // _MOST)
    if group > 1:
        x, y = (_mean_of(values, group) for values in (x, y))
    smoothed = panel.smooth and len(x) >= _SMOOTHED_FROM
    width, alpha = (0.8, 0.3) if smoothed else (1.2, 0.6) if panel.val else (1.6, 1.0)
    marker = "o" if len(x) == 1 else ""
    axes.plot(x, y, color=colour, linewidth=width, alpha=alpha, marker=marker, markersize=4, gid=gid)
    if smoothed:
        weights, there = np.ones(2 * (len(x) // 60) + 1), np.isfinite(y)
        mean = np.convolve(np.where(there, y, 0), weights, "same") / np.convolve(there, weights, "same").clip(1)
        axes.plot(x, np.where(there, mean, np.nan), color=colour, linewidth=1.4, zorder=3, gid=f"{gid}-mean")


def _mean_of(values: np.ndarray, group: int) -> np.ndarray:
    """Means of `group` neighbours `[ceil(N / group)]`, of the finite ones among them."""
    padded = np.append(values, np.full(-len(values) % group, np.nan)).reshape(-1, group)
    there = np.isfinite(padded)
    means: np.ndarray = np.where(there, padded, 0).sum(1) / np.where(there.any(1), there.sum(1), np.nan)
    return means


def _scale(axes: Axes, panel: Panel, seen: list[float]) -> None:
    if seen and min(seen) > 0 and max(seen) > panel.log_from * min(seen):
        axes.set_yscale("log")
        decades = math.log10(max(seen) / min(seen))
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if decades < 2.5 else (1,)))
        axes.yaxis.set_minor_locator(NullLocator())
    elif math.isinf(panel.log_from):
        axes.set_ylim(0, 1.06 * max(seen, default=1) or 1)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: short(value)))


def _unit(runs: list[Run], axis: str) -> tuple[float, str]:
    """What the places of an axis are divided by, and the name of what that gives."""
    if axis != "time":
        return 1, {"steps": "updates", "tokens": "tokens"}[axis]
    seconds = (value for run in runs for value in run.metrics.get("progress/seconds", {}).values())
    last = max(filter(math.isfinite, seconds), default=0)
    units = ((1, "s"), (60, "min"), (3600, "h"), (86400, "days"))
    divisor, name = next(
        (u for u, following in zip(units, units[1:], strict=False) if last < 2 * following[0]), units[-1]
    )
    return divisor, f"wall time ({name})"


def short(value: float) -> str:
    """A figure in a few characters: 1.5k, 20M, 0.002."""
    for size, letter in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.4g}{letter}"
    return f"{value:.4g}"


def _legible(name: str) -> str:
    """A run's name, short enough for a legend, and not beginning as the legend's own placeholders do."""
    name = name if len(name) <= 32 else f"{name[:14]}…{name[-17:]}"
    return f" {name}" if name.startswith("_") else name
