"""The notebooks' code runs, in order; small sources and few updates in the place of theirs."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib
import pytest

from tests.conftest import texts

matplotlib.use("Agg")
ROOT = Path(__file__).parents[1]
NOTEBOOKS = {path.stem: path for path in (ROOT / "notebooks").glob("*.ipynb")}
SMALLER = [
    ('"python-docs:val"', '"texts.txt"'),
    ('"python-docs"', '"texts.txt"'),
    ("total_steps=600", "total_steps=4"),
    ("total_steps=300", "total_steps=2"),
    ("eval_every=200", "eval_every=2"),
    ("warmup_steps=60", "warmup_steps=1"),
    ('"warmup_steps": 60', '"warmup_steps": 1'),
    ('"../configs/mlm.yaml"', repr(str(ROOT / "configs" / "mlm.yaml"))),
    # of these test's few words only some are in its tokenizer
    (
        '"list tuple dict set string integer float raises returns returned raised file directory path open close"',
        '"cat mat"',
    ),
]


def executed(name: str) -> dict[str, Any]:
    """What a notebook's cells leave, run in order."""
    marked = [f"{first}, {second}." for first, second in pairwise(texts(20))]
    Path("texts.txt").write_text("\n".join(texts(60) + marked))
    names: dict[str, Any] = {}
    for cell in json.loads(NOTEBOOKS[name].read_text())["cells"]:
        if cell["cell_type"] == "code":
            source = "".join(cell["source"])
            for theirs, ours in SMALLER:
                source = source.replace(theirs, ours)
            exec(compile(source, name, "exec"), names)
    return names


def test_pretraining_runs_from_top_to_bottom():
    names = executed("01_pretrain")
    assert Path("my-encoder/model.safetensors").is_file()
    assert list(names["result"]["eval_losses"]) == [2, 4]


def test_distilling_runs_from_top_to_bottom(capsys):
    names = executed("02_distil")
    assert Path("my-student/model.safetensors").is_file()
    said = [line.split()[:1] for line in capsys.readouterr().out.splitlines()]
    assert said[said.index(["teacher"]) :][:3] == [["teacher"], ["student"], ["alone"]]
    assert [line.model for line in names["compared"].lines if line.over_random] == [
        str(folder) for folder in names["folders"]
    ]
    assert names["student"].config.num_hidden_layers == 1


@pytest.mark.slow
def test_many_gpus_runs_from_top_to_bottom():
    """Its own assertions are the claims: the same losses on two processes, the same bytes after a kill."""
    assert executed("03_many_gpus")["same"]


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_is_readable_without_running(name):
    cells = [cell for cell in json.loads(NOTEBOOKS[name].read_text())["cells"] if cell["cell_type"] == "code"]
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert outputs
    assert all(output["output_type"] != "error" for output in outputs)
    assert len(json.dumps(outputs)) < 50_000
