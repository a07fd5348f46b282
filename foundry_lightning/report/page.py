"""The page: facts, curves, settings, samples and warnings of runs, in one file that loads nothing."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

import numpy as np

from foundry_lightning.report.plots import axes_of, colours, panels_of, short, svg
from foundry_lightning.report.runs import Run

_AXES = {"steps": "updates", "tokens": "tokens", "time": "wall time"}
_EVALUATIONS = 8  # of which samples are shown
_STYLE = """
:root { color-scheme: light; }
body { margin: 0 auto; padding: 1rem; max-width: 1500px; background: #fff; color: #1a1a1a;
  font: 15px/1.45 system-ui, "Segoe UI", Roboto, "DejaVu Sans", Verdana, sans-serif; }
h1 { font-size: 1.4rem; margin: 0 0 .8rem; }
h2 { font-size: 1.1rem; margin: 1.8rem 0 .5rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .8rem .25rem 0; text-align: left; vertical-align: top; border-bottom: 1px solid #e4e4e4; }
thead th { vertical-align: bottom; }
th { font-weight: 600; color: #555; }
.facts table { font-size: .9em; }
.facts td { white-space: nowrap; }
summary { margin: 1rem 0 .4rem; cursor: pointer; }
.number { text-align: right; }
td.number { white-space: nowrap; }
.run { white-space: nowrap; font-weight: 600; }
.run::before { content: ""; display: inline-block; width: .8em; height: .8em; margin-right: .45em; border-radius: 2px;
  background: var(--run); }
.axis { position: absolute; opacity: 0; }
.switch { display: flex; flex-wrap: wrap; align-items: center; gap: .3rem 1.2rem; position: sticky; top: 0; z-index: 1;
  padding: .5rem 0; background: #fff; }
.switch label { padding: .15rem .7rem; border: 1px solid #999; border-radius: 1rem; cursor: pointer; }
.curves { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(330px, 100%), 1fr)); gap: 1rem; }
.curves svg { display: none; width: 100%; height: auto; }
.samples { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(330px, 100%), 1fr)); gap: 1rem 2rem; }
.samples figure { margin: 0; }
.samples figcaption { margin-bottom: .3rem; overflow-wrap: anywhere; }
.samples table { font-size: .9em; }
.samples td { padding-left: .4rem; padding-right: .4rem; }
mark { background: #fff1b8; padding: 0 .25em; }
.right { background: #c9efd6; font-weight: 600; }
.warning { border-left: 4px solid #e69f00; padding: .2rem .7rem; margin: .4rem 0; background: #fff8e8; }
.note { color: #555; }
"""


def page(runs: list[Run]) -> str:
    """The whole HTML text of the report of some runs."""
    axes = axes_of(runs)
    title = f"{runs[0].name} – training report" if len(runs) == 1 else f"{len(runs)} runs – training report"
    shown = "".join(
        f"#axis-{axis}:checked ~ .curves .by-{axis} {{ display: block; }}\n"
        f"#axis-{axis}:checked ~ .switch [for=axis-{axis}] {{ background: #1a1a1a; color: #fff; }}\n"
        f"#axis-{axis}:focus-visible ~ .switch [for=axis-{axis}] {{ outline: 3px solid #56b4e9; }}\n"
        for axis in axes
    )
    parts = [
        f"<h1>{escape(title)}</h1>",
        _facts(runs),
        *_warnings(runs),
        "<h2>Curves</h2>",
        _curves(runs, axes),
        *_differences(runs),
        *_samples(runs),
        *_notes(runs),
    ]
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title>
<style>{_STYLE}{shown}</style>
</head>
<body>
{chr(10).join(parts)}
<script>
// the address keeps the axis: report.html#tokens
const chosen = document.getElementById("axis-" + location.hash.slice(1));
if (chosen) chosen.checked = true;
for (const axis of document.querySelectorAll(".axis"))
  axis.addEventListener("change", () => history.replaceState(null, "", "#" + axis.id.slice(5)));
</script>
</body>
</html>
"""


def _run_cell(run: Run, colour: str, tag: str = "td") -> str:
    return f'<{tag} class="run" style="--run:{colour}">{escape(run.name)}</{tag}>'


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of ready cells (`<td>…</td>`)."""
    lines = "".join(f"<tr>{''.join(row)}</tr>\n" for row in rows)
    return f'<div class="wide"><table><thead><tr>{"".join(head)}</tr></thead>\n<tbody>{lines}</tbody></table></div>'


def _cell(value: Any, *, tag: str = "td", kind: str = "") -> str:
    """A cell; None shows as a dash."""
    attribute = f' class="{kind}"' if kind else ""
    return f"<{tag}{attribute}>{'–' if value is None else escape(str(value))}</{tag}>"


def _facts(runs: list[Run]) -> str:
    rows, texts = [], ("student", "trained on")
    for run, colour in zip(runs, colours(len(runs)), strict=True):
        speed = run.curve("train/tokens_per_second")[1]
        validation = "val/mlm" if "val/mlm" in run.metrics else "val/loss"  # as the baseline is
        steps, losses = run.curve(validation)
        lowest = int(np.nanargmin(losses)) if np.isfinite(losses).any() else None
        planned, done = run.fact("plan", "updates"), f"{run.last_step:,}"
        facts = {
            "student": run.fact("model", "student"),
            "parameters": _large(run.fact("model", "parameters")),
            "trained on": run.fact("data", "source"),
            "updates": f"{done} of {planned:,}" if isinstance(planned, int) and planned != run.last_step else done,
            "tokens": _large(_last(run, "progress/tokens")),
            "wall time": _time(_last(run, "progress/seconds")),
            "median tokens/s": _number(np.nanmedian(speed), 0) if np.isfinite(speed).any() else None,
            "validation loss": _number(_last(run, validation), 4),
            "lowest": None if lowest is None else f"{losses[lowest]:.4f} at {steps[lowest]:,.0f}",
            "perplexity": _number(_last(run, "val/perplexity"), 2),
            "unigram baseline": _number(run.baseline, 4),
        }
        cells = (_cell(value, kind="" if name in texts else "number") for name, value in facts.items())
        rows.append([_run_cell(run, colour), *cells])
    head = (_cell(name, tag="th", kind="" if name in texts else "number") for name in facts)
    return f'<div class="facts">{_table(["<th>run</th>", *head], rows)}</div>'


def _last(run: Run, column: str) -> float | None:
    values = run.metrics.get(column)
    return values[max(values)] if values else None


def _large(value: Any) -> str | None:
    """A count in short: 1.45M."""
    return short(float(f"{value:.3g}")) if isinstance(value, (int, float)) and math.isfinite(value) else None


def _number(value: float | None, digits: int) -> str | None:
    return None if value is None else f"{value:,.{digits}f}"


def _time(seconds: float | None) -> str | None:
    if seconds is None or not math.isfinite(seconds):
        return None
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def _warnings(runs: list[Run]) -> list[str]:
    return [
        f'<p class="warning"><b>{escape(run.name)}</b>: {escape(str(sentence))}</p>'
        for run in runs
        for sentence in run.facts.get("warnings") or []
    ]


def _curves(runs: list[Run], axes: list[str]) -> str:
    inputs = "".join(
        f'<input class="axis" type="radio" name="axis" id="axis-{axis}"{" checked" if axis == axes[0] else ""}>'
        for axis in axes
    )
    switch = "".join(f'<label for="axis-{axis}">{_AXES[axis]}</label>' for axis in axes)
    names = "".join(_run_cell(run, colour, "span") for run, colour in zip(runs, colours(len(runs)), strict=True))
    drawn = "\n".join(
        svg(runs, panel, axis).replace("<svg ", f'<svg class="by-{axis}" ', 1)
        for panel in panels_of(runs)
        for axis in axes
    )
    return f'{inputs}\n<div class="switch"><span>against</span>{switch}{names}</div>\n<div class="curves">{drawn}</div>'


def _differences(runs: list[Run]) -> list[str]:
    """Settings that are not the same in all runs that have a config."""
    known = [(run, colour) for run, colour in zip(runs, colours(len(runs)), strict=True) if run.settings]
    names = dict.fromkeys(name for run, _ in known for name in run.settings)
    rows = []
    for name in names:
        values = [run.settings.get(name) for run, _ in known]
        if name not in ("run_name", "runs_dir", "resume", "ckpt_path") and any(v != values[0] for v in values):
            rows.append([_cell(name, tag="th"), *map(_cell, values)])
    if not rows:
        return ["<h2>Settings that differ</h2><p>None: the configs are the same.</p>"] if len(known) > 1 else []
    return ["<h2>Settings that differ</h2>", _table(["<th></th>", *(_run_cell(*k, "th") for k in known)], rows)]


def _samples(runs: list[Run]) -> list[str]:
    parts: list[str] = []
    for run, colour in zip(runs, colours(len(runs)), strict=True):
        if not run.samples:
            continue
        steps = sorted(run.samples)
        shown = [steps[i] for i in np.unique(np.linspace(0, len(steps) - 1, _EVALUATIONS).round().astype(int))]
        texts: dict[tuple[str, str, str], list[list[str]]] = {}
        for step in shown:
            for sample in run.samples[step]:
                guesses = [_guess(token, probability, sample["word"]) for token, probability in sample["guesses"]]
                texts.setdefault((sample["before"], sample["word"], sample["after"]), []).append(
                    [_cell(f"{step:,}", kind="number"), *guesses]
                )
        figures = [
            f"<figure><figcaption>{escape(before)}<mark>{escape(word)}</mark>{escape(after)}</figcaption>"
            + _table([_cell("update", tag="th", kind="number"), _cell("guesses", tag="th")], rows)
            + "</figure>"
            for (before, word, after), rows in texts.items()
        ]
        what = "" if len(shown) == len(steps) else f" (at {len(shown)} of {len(steps):,} evaluations)"
        opened = "" if parts else " open"
        parts.append(
            f"<details{opened}><summary>{_run_cell(run, colour, 'span')}{what}</summary>"
            f'<div class="samples">{"".join(figures)}</div></details>'
        )
    intro = "<p>The marked word was hidden; the guesses for it, with their probabilities, at evaluations.</p>"
    return ["<h2>Samples</h2>", intro, *parts] if parts else []


def _guess(token: str, probability: float, word: str) -> str:
    right = token.strip().casefold() == word.strip().casefold()
    return _cell(f"{token} {probability:.0%}", kind="right" if right else "")


def _notes(runs: list[Run]) -> list[str]:
    lacking = [
        f"{run.name}: without {column} it is not drawn against {_AXES[axis]}."
        for run in runs
        for axis, column in (("tokens", "progress/tokens"), ("time", "progress/seconds"))
        if not run.metrics.get(column)
    ]
    notes = [f"{run.name}: {note}" for run in runs for note in run.notes] + lacking
    items = "".join(f"<li>{escape(note)}</li>" for note in notes)
    return [f'<h2>Left out</h2><ul class="note">{items}</ul>'] if notes else []
