"""The folder a run leaves: weights as safetensors, config, tokenizer and a model card."""

from __future__ import annotations

import copy
import importlib.util
import os
import shutil
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from transformers import AutoModel
from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

from foundry_lightning.checkpoint import (
    architecture,
    changes,
    named_as,
    path_of,
    plain_name,
    read_checkpoint,
    require_folder,
)
from foundry_lightning.models import max_positions
from foundry_lightning.quiet import no_progress_bar, quiet_loading, quiet_onnx

_CARD = """---
license: unknown  # yours to choose before the folder is pushed to a hub
{front}---

# {name}

{kind}, trained with foundry-lightning.{usage}

| | |
| --- | --- |
{rows}
"""
_USAGE = """

```python
from transformers import {auto_class}, AutoTokenizer

model = {auto_class}.from_pretrained("{folder}")
tokenizer = AutoTokenizer.from_pretrained("{folder}")
```"""


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
    student = cast(nn.Module, getattr(student, "_orig_mod", student))  # not torch.compile's wrapper
    folder = path_of(path, name="export path")
    require_folder(folder, name="export path")
    folder.mkdir(parents=True, exist_ok=True)
    if hasattr(student, "save_pretrained"):
        weights = {plain_name(name): value for name, value in student.state_dict().items()}
        with no_progress_bar():
            student.save_pretrained(folder, state_dict=weights)  # type: ignore[operator]
    else:
        from safetensors.torch import save_model

        save_model(student, str(folder / "model.safetensors"))
    if tokenizer is not None:
        limit = max_positions(student)
        if limit is not None and getattr(tokenizer, "model_max_length", 0) > limit:
            tokenizer = copy.copy(tokenizer)  # pipelines cut where it says, and a longer text would fail
            tokenizer.model_max_length = limit
        tokenizer.save_pretrained(folder)
    num_parameters = sum(p.numel() for p in student.parameters())
    lines = {"class": type(student).__name__, "parameters": f"{num_parameters:,}", **(facts or {})}
    rows = "\n".join(f"| {name} | {value} |" for name, value in lines.items())
    (folder / "README.md").write_text(
        _CARD.format(name=folder.name, rows=rows, **_kind(student, folder.name)), encoding="utf-8"
    )
    for file in folder.glob("*.safetensors"):
        shutil.copymode(folder / "README.md", file)  # safetensors lets no other user read them
    return folder


def _kind(student: nn.Module, folder: str) -> dict[str, str]:
    """What the card says of how the folder is loaded."""
    tags = "tags: [foundry-lightning{}]\n"
    if not hasattr(student, "save_pretrained"):
        return {"front": tags.format(""), "kind": "Weights of a custom class", "usage": ""}
    if type(student).__name__ in MODEL_FOR_MASKED_LM_MAPPING_NAMES.values():
        task, auto_class, kind = "fill-mask", "AutoModelForMaskedLM", "A masked language model"
    else:
        task, auto_class, kind = "feature-extraction", "AutoModel", "A text encoder"
    front = f"library_name: transformers\npipeline_tag: {task}\n" + tags.format(f", {task}")
    return {"front": front, "kind": kind, "usage": _USAGE.format(auto_class=auto_class, folder=folder)}


class _Base(nn.Module):
    """Exactly the two inputs and the one output of the ONNX file."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """Last hidden state `[B, S, D]`."""
        return cast(torch.Tensor, self.base(input_ids=input_ids, attention_mask=attention_mask)[0])


def export_onnx(folder: str | os.PathLike[str]) -> Path:
    """Writes the base (no head) of an exported model beside it as `model.onnx`.

    Inputs `input_ids` and `attention_mask`, int64 `[B, S]`; output `last_hidden_state`, float32 `[B, S, D]`, with `B`
    and `S` free.

    Args:
        folder: What `export_student` wrote.

    Raises:
        FileNotFoundError: no model in `folder`.
        ModuleNotFoundError: the packages of the extra `onnx` are missing; the message holds the install command.
    """
    folder = path_of(folder, name="model folder")
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(f"{folder} holds no config.json; give the folder of an exported Hugging Face model.")
    if importlib.util.find_spec("onnxscript") is None:
        raise ModuleNotFoundError("ONNX export needs onnx and onnxscript: pip install 'foundry-lightning[onnx]'.")
    with quiet_loading():
        base = _Base(AutoModel.from_pretrained(folder)).eval()
    # two rows, one padded: sizes of 1 would be taken as fixed, and a mask of ones be left out of the graph
    example, mask = torch.ones(2, 8, dtype=torch.long), torch.tensor([[1] * 8, [1] * 5 + [0] * 3])
    free = {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}
    file = folder / "model.onnx"
    with quiet_onnx():
        torch.onnx.export(
            base,
            (example, mask),
            file,
            input_names=["input_ids", "attention_mask"],
            output_names=["last_hidden_state"],
            dynamic_shapes=(free, free),
            external_data=False,
            dynamo=True,  # the default from torch 2.9 on
            verbose=False,
        )
    return file


def load_student_weights(student: nn.Module, checkpoint: str | os.PathLike[str] | dict[str, Any]) -> None:
    """Loads the student's weights of a checkpoint into `student`.

    Raises:
        FileNotFoundError: no such checkpoint.
        ValueError: a checkpoint of another model: the parameters, or settings of its config, that differ are named.
    """
    state = checkpoint if isinstance(checkpoint, dict) else read_checkpoint(checkpoint)
    prefix = "student."
    own = student.state_dict()
    weights = {k.removeprefix(prefix): v for k, v in state["state_dict"].items() if k.startswith(prefix)}
    weights = named_as(own, weights)
    problems = [f"{name} is missing" for name in own if name not in weights]
    problems += [f"{name} is unknown to the student" for name in weights if name not in own]
    problems += [
        f"{name} has the shape {list(getattr(weights[name], 'shape', []))}, the student {list(own[name].shape)}"
        for name in own
        if name in weights and getattr(weights[name], "shape", None) != own[name].shape
    ]
    problems = problems or changes(state["foundry_lightning"]["settings"], architecture(student))
    if problems:
        more = f" and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise ValueError(f"checkpoint does not fit the student: {'; '.join(problems[:5])}{more}.")
    with torch.no_grad():
        student.load_state_dict(weights)
