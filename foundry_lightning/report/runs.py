"""Reads run folders: metrics over all resumes, samples, start report and config."""

from __future__ import annotations

import csv
import json
import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import yaml

Guesses = list[tuple[str, float]]


@dataclass
class Run:
    """What a run folder holds.

    Attributes:
        name: Short, and different from the other runs'.
        metrics: Column -> step -> value.
        samples: Step -> the samples of that evaluation: `before`, `word`, `after`, `guesses`.
        facts: `start_report.json`; empty where it is missing.
        settings: `config.yaml`, flat; empty where it is missing.
        notes: What was left out, and why, in sentences.
    """

    folder: Path
    name: str = ""
    metrics: dict[str, dict[int, float]] = field(default_factory=dict)
    samples: dict[int, list[dict[str, Any]]] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def fact(self, part: str, name: str) -> Any:
        """A figure of the start report; None where it is missing."""
        found = self.facts.get(part)
        return found.get(name) if isinstance(found, dict) else None

    @property
    def baseline(self) -> float | None:
        """Unigram baseline of the validation data in nats."""
        value = self.facts.get("unigram_baseline")
        return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else None

    @property
    def last_step(self) -> int:
        """The last step of which anything is known."""
        return max(step for column in self.metrics.values() for step in column)

    def curve(self, column: str, along: str | None = None) -> tuple[np.ndarray, np.ndarray]:
        """The places and values of a column, both `[N]` in the order of steps; what is not finite is NaN.

        Args:
            column: The column.
            along: The column that gives the places; None: the steps themselves. Steps without a place are left out.
        """
        values = self.metrics.get(column, {})
        places = {step: float(step) for step in values} if along is None else self.metrics.get(along, {})
        steps = [step for step in sorted(values) if step in places]
        y = np.array([values[step] for step in steps])
        return np.array([places[step] for step in steps]), np.where(np.isfinite(y), y, np.nan)


def read_runs(places: Sequence[str | os.PathLike[str]]) -> list[Run]:
    """Reads run folders; one whose runs are numbered stands for its newest run.

    Raises:
        FileNotFoundError: no such folder, or no metrics in it.
        ValueError: no run, one that is named twice, or metrics without steps.
    """
    if not places:
        raise ValueError("report needs at least one run; give the folder of a run such as runs/mlm/1.")
    folders = [_run_folder(Path(place)) for place in places]
    for n, folder in enumerate(folders):
        if folder in folders[:n]:
            raise ValueError(f"run {folder} is named twice; name each run once.")
    return [_read_run(folder, name) for folder, name in zip(folders, _names(folders), strict=True)]


def _run_folder(place: Path) -> Path:
    if not place.exists():
        raise FileNotFoundError(f"run {place} does not exist; give the folder of a run such as runs/mlm/1.")
    if not place.is_dir():
        raise FileNotFoundError(f"run {place} is a file; give the folder of a run such as runs/mlm/1.")
    if _metrics_files(place):
        return place.resolve()
    numbers = [int(path.name) for path in place.iterdir() if path.is_dir() and path.name.isdigit()]
    begun = [number for number in numbers if _metrics_files(place / str(number))] or numbers  # not one that was refused
    newest = place / str(max(begun)) if begun else place
    if not _metrics_files(newest):
        raise FileNotFoundError(
            f"run {newest} holds no metrics.csv, which fit writes at its first logged step where the config names no "
            "other logger; wait for it, or name another run."
        )
    return newest.resolve()


def _metrics_files(folder: Path) -> list[Path]:
    """The metrics of the stretches before each resume in their order, then those of the last."""
    parts = {int(m[1]): p for p in folder.glob("metrics.part*.csv") if (m := re.search(r"part(\d+)\.csv$", p.name))}
    last = folder / "metrics.csv"
    return [*(parts[n] for n in sorted(parts)), *([last] if last.is_file() else [])]


def _names(folders: list[Path]) -> list[str]:
    """`mlm/1` for `…/runs/mlm/1`; as many folders above as make the names differ."""
    depths = [2 if folder.name.isdigit() else 1 for folder in folders]
    while True:
        names = ["/".join(folder.parts[-depth:]) for folder, depth in zip(folders, depths, strict=True)]
        if len(set(names)) == len(names):
            return names
        depths = [depth + (names.count(name) > 1) for name, depth in zip(names, depths, strict=True)]


def _read_run(folder: Path, name: str) -> Run:
    run = Run(folder, name)
    for file in _metrics_files(folder):
        _add_metrics(run, file)
    if not run.metrics:
        raise ValueError(f"run {folder} has logged no step yet; wait for its first, or name another run.")
    for column, values in run.metrics.items():
        if wrong := [f"{step:,}" for step, value in sorted(values.items()) if not math.isfinite(value)]:
            shown = ", ".join(wrong[:5]) + (f" and {len(wrong) - 5:,} more" if len(wrong) > 5 else "")
            run.notes.append(f"{column} is not finite at step {shown}: the curve has a gap there.")
    _add_samples(run, folder / "samples.jsonl")
    run.facts = _mapping(run, folder / "start_report.json", json.loads)
    run.settings = _flat(_mapping(run, folder / "config.yaml", yaml.safe_load))
    return run


def _add_metrics(run: Run, file: Path) -> None:
    """Adds a stretch; it begins where its run was resumed, so what was logged beyond that step is no longer true."""
    lines = file.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
    header, *rows = lines or ["step\n"]
    columns = next(csv.reader([header.strip()]), [])
    if "step" not in columns:
        raise ValueError(f"{file} has no column 'step'; it must be a file that Lightning's CSVLogger wrote.")
    stretch = []
    for number, line in enumerate(rows, start=2):
        if (row := _row(columns, line)) is None:
            run.notes.append(f"line {number} of {file.name} is not whole and is left out.")
        else:
            stretch.append(row)
    first = min((int(row["step"]) for row in stretch), default=None)
    if first is not None:
        for name, column in run.metrics.items():
            run.metrics[name] = {step: value for step, value in column.items() if step <= first}
    for row in stretch:
        for name, value in row.items():
            if name not in ("step", "epoch"):
                run.metrics.setdefault(name, {})[int(row["step"])] = value
    run.metrics = {name: column for name, column in run.metrics.items() if column}


def _row(columns: list[str], line: str) -> dict[str, float] | None:
    """The values of a line; None for one that a kill has cut or that holds anything but numbers."""
    texts = line.strip().split(",")
    if not line.endswith("\n") or len(texts) != len(columns):
        return None
    try:
        row = {name: float(text) for name, text in zip(columns, texts, strict=True) if text}
        return row if float(row["step"]).is_integer() else None
    except (ValueError, KeyError):
        return None


def _add_samples(run: Run, file: Path) -> None:
    if not file.is_file():
        return
    for number, line in enumerate(file.read_text(encoding="utf-8", errors="replace").splitlines(), start=1):
        try:
            row = json.loads(line)
            run.samples[int(row["step"])] = [
                {
                    **{name: str(sample[name]) for name in ("before", "word", "after")},
                    "guesses": [(str(token), float(probability)) for token, probability in sample["guesses"]],
                }
                for sample in row["samples"]
            ]
        except (ValueError, KeyError, TypeError):
            run.notes.append(f"line {number} of {file.name} is not whole and is left out.")


def _mapping(run: Run, file: Path, parse: Any) -> dict[str, Any]:
    if not file.is_file():
        run.notes.append(f"{file.name} is missing: what it holds is not shown.")
        return {}
    try:
        found = parse(file.read_text(encoding="utf-8", errors="replace"))
    except (ValueError, yaml.YAMLError):
        found = None
    if not isinstance(found, dict):
        run.notes.append(f"{file.name} cannot be read: what it holds is not shown.")
        return {}
    return found


def _flat(settings: Any, before: str = "") -> dict[str, Any]:
    """`{"model.config.learning_rate": 0.001, …}`, as the command line takes them."""
    if not isinstance(settings, dict) or not settings:
        return {before.rstrip("."): settings} if before else {}
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        flat.update(_flat(value, before if name == "init_args" else f"{before}{name}."))
    return flat
