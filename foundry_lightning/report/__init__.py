"""What runs have left in their folders, as one HTML page and as PNGs."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from pathlib import Path

from foundry_lightning.checkpoint import path_of, require_folder
from foundry_lightning.report.runs import read_runs


def write_report(
    runs: Sequence[str | os.PathLike[str]],
    *,
    out: str | os.PathLike[str] = "report.html",
    png: str | os.PathLike[str] | None = None,
) -> list[Path]:
    """Writes one page that needs nothing else, with the curves, facts and samples of the runs, and the curves as PNGs.

    Args:
        runs: Run folders (`runs/mlm/1`), or folders of numbered runs (`runs/mlm`: the newest that has begun).
        out: The page.
        png: A folder for the PNGs; None: no PNGs.

    Returns:
        The files written, the page first.

    Raises:
        ModuleNotFoundError: matplotlib is missing; the message holds the install command.
        FileNotFoundError: no such folder, or no metrics in it.
        ValueError: metrics that cannot be read, a run named twice, or a place that cannot be written.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise ModuleNotFoundError("report needs the package matplotlib: pip install 'foundry-lightning[report]'.")
    page_file = path_of(out, name="out")
    if page_file.is_dir():
        raise ValueError(f"out must name a file, and {page_file} is a folder; give a name in it.")
    require_folder(page_file.parent, name="out")
    if png is not None:
        require_folder(path_of(png, name="png"), name="png")
    found = read_runs(runs)

    from foundry_lightning.report.page import page
    from foundry_lightning.report.plots import write_pngs

    text = page(found)
    page_file.parent.mkdir(parents=True, exist_ok=True)
    page_file.write_text(text, encoding="utf-8")
    return [page_file, *(write_pngs(found, Path(png)) if png is not None else [])]
