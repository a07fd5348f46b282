"""The folder a run leaves: weights as safetensors, config, tokenizer and a model card."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.utils import logging as transformers_logging

from foundry_lightning.checkpoint import path_of, read_checkpoint, require_folder

_CARD = """---
library_name: transformers
pipeline_tag: fill-mask
tags: [masked-language-modeling, foundry-lightning]
---

# {name}

A masked language model, trained with foundry-lightning.

```python
from transformers import AutoModelForMaskedLM, AutoTokenizer

model = AutoModelForMaskedLM.from_pretrained("{folder}")
tokenizer = AutoTokenizer.from_pretrained("{folder}")
```

| | |
| --- | --- |
{rows}
"""


def export_student(
    student: nn.Module, path: str | os.PathLike[str], *, tokenizer: Any = None, facts: dict[str, Any] | None = None
) -> Path:
    """Writes a student as a folder that `AutoModelForMaskedLM` and `AutoTokenizer` load.

    A custom student (no `save_pretrained`) is written as `model.safetensors`, to be loaded by its own class.

    Args:
        student: The model.
        path: The folder, made where it is missing.
        tokenizer: Saved beside it.
        facts: Lines of the model card's table: settings and validation figures.

    Raises:
        TypeError: `path` is no path.
        ValueError: `path` is empty, or a file stands in its way.
    """
    folder = path_of(path, name="export path")
    require_folder(folder, name="export path")
    folder.mkdir(parents=True, exist_ok=True)
    if hasattr(student, "save_pretrained"):
        with _no_progress_bar():
            student.save_pretrained(folder)  # type: ignore[operator]
    else:
        from safetensors.torch import save_model

        save_model(student, str(folder / "model.safetensors"))
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    num_parameters = sum(p.numel() for p in student.parameters())
    lines = {"class": type(student).__name__, "parameters": f"{num_parameters:,}", **(facts or {})}
    rows = "\n".join(f"| {name} | {value} |" for name, value in lines.items())
    (folder / "README.md").write_text(_CARD.format(name=folder.name, folder=folder.name, rows=rows), encoding="utf-8")
    return folder


@contextmanager
def _no_progress_bar() -> Iterator[None]:
    """A model of this size is written at once; transformers would draw a bar on stderr."""
    was_on = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_on:
            transformers_logging.enable_progress_bar()


def load_student_weights(student: nn.Module, checkpoint: str | os.PathLike[str] | dict[str, Any]) -> None:
    """Loads the student's weights of a checkpoint into `student`.

    Raises:
        FileNotFoundError: no such checkpoint.
        ValueError: a checkpoint of another model: the parameters that do not fit are named.
    """
    state = checkpoint if isinstance(checkpoint, dict) else read_checkpoint(checkpoint)
    prefix = "student."
    weights = {k.removeprefix(prefix): v for k, v in state["state_dict"].items() if k.startswith(prefix)}
    own = student.state_dict()
    problems = [f"{name} is missing" for name in own if name not in weights]
    problems += [f"{name} is unknown to the student" for name in weights if name not in own]
    problems += [
        f"{name} has the shape {list(getattr(weights[name], 'shape', []))}, the student {list(own[name].shape)}"
        for name in own
        if name in weights and getattr(weights[name], "shape", None) != own[name].shape
    ]
    if problems:
        more = f" and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise ValueError(f"checkpoint does not fit the student: {'; '.join(problems[:5])}{more}.")
    with torch.no_grad():
        student.load_state_dict(weights)
