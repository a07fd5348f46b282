"""The notebooks' code runs, in order; small sources and few updates in the place of theirs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.conftest import texts

NOTEBOOKS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_from_top_to_bottom(path, tmp_path):
    Path("texts.txt").write_text("\n".join(texts(60)))
    smaller = [('"python-docs:val"', '"texts.txt"'), ('"python-docs"', '"texts.txt"')]
    smaller += [
        ("total_steps=600", "total_steps=4"),
        ("eval_every=200", "eval_every=2"),
        ("warmup_steps=60", "warmup_steps=1"),
    ]
    names: dict[str, object] = {}
    for cell in json.loads(path.read_text())["cells"]:
        if cell["cell_type"] == "code":
            source = "".join(cell["source"])
            for theirs, ours in smaller:
                source = source.replace(theirs, ours)
            exec(compile(source, path.name, "exec"), names)
    assert (tmp_path / "my-encoder" / "model.safetensors").is_file()
    assert list(names["result"]["eval_losses"]) == [2, 4]


def test_there_are_notebooks():
    assert NOTEBOOKS
