"""The frozen model that a student learns from, and the projection between their widths."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from foundry_lightning.compiling import compile_layers
from foundry_lightning.config import gathered, problems_to_error
from foundry_lightning.data.pipeline import DataPipeline
from foundry_lightning.models import max_positions, num_embeddings
from foundry_lightning.modules.base import EncoderModule
from foundry_lightning.students import StudentRecipe

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class WithTeacher(EncoderModule):
    """A module with a teacher: frozen, in eval mode always, in no parameter group and no checkpoint."""

    def set_teacher(self, teacher: nn.Module | StudentRecipe) -> None:
        """Takes the teacher, or a recipe (`FromPretrained`) that loads it later; called once, in `__init__`.

        Raises:
            TypeError: it is neither.
            ValueError: it is the student itself.
        """
        if not isinstance(teacher, (nn.Module, StudentRecipe)):
            raise TypeError(
                f"teacher must be a torch.nn.Module or a recipe such as FromPretrained, got {type(teacher).__name__}."
            )
        if teacher is self.student:
            raise ValueError("teacher and student must be two models, got the same one; copy it with copy.deepcopy.")
        if isinstance(teacher, nn.Module) and self.student is not None:
            students = {id(parameter): name for name, parameter in self.student.named_parameters()}
            shared = [students[id(parameter)] for parameter in teacher.parameters() if id(parameter) in students]
            if shared:  # freezing the teacher would freeze them
                raise ValueError(
                    f"teacher and student must not share weights, got {len(shared)} in both, such as {shared[0]}; "
                    "copy one of them with copy.deepcopy."
                )
        self.teacher: nn.Module | None = None
        self.projector: nn.Linear | None = None
        self._teacher_recipe = teacher if isinstance(teacher, StudentRecipe) else None
        if isinstance(teacher, nn.Module):
            self._take_teacher(teacher)

    def _take_teacher(self, teacher: nn.Module) -> None:
        dtype = _DTYPES[self.config.teacher_dtype]
        if any(p.is_floating_point() and p.dtype != dtype for p in teacher.parameters()):
            teacher = copy.deepcopy(teacher).to(dtype)  # the caller's own model keeps its type
        self.teacher = teacher.requires_grad_(False).eval()

    def build_teacher(self) -> nn.Module:
        """The teacher, loaded from its recipe at the first call."""
        if self.teacher is None:
            assert self._teacher_recipe is not None
            self._take_teacher(self._teacher_recipe.build(self.tokenizer))
        assert self.teacher is not None
        return self.teacher

    def frozen_teacher(self) -> nn.Module:
        """The teacher for a forward, in eval mode also where someone called `.train()` on the model or a part of it."""
        assert self.teacher is not None
        if any(module.training for module in self.teacher.modules()):
            self.teacher.eval()
        return self.teacher

    @property
    def needs_teacher(self) -> bool:
        """Whether a term of the loss has the teacher in it."""
        return True

    def connect_data(self, data: Any) -> None:
        """Also refuses rows that the teacher cannot read.

        Raises:
            ValueError: rows longer than the teacher's positions, or token ids that a model does not embed.
        """
        problems: list[str] = []
        with gathered(problems):
            super().connect_data(data)
        if self.needs_teacher:
            with gathered(problems):
                self._connect_teacher(data, problems)
        problems_to_error(problems, of="data")

    def _connect_teacher(self, data: Any, problems: list[str]) -> None:
        """Adds to the problems of data and student those of data and teacher."""
        teacher, fits = self.build_teacher(), not problems
        positions = max_positions(teacher)
        for name, batches in (("train", data.train), ("val", data.val)):
            if batches is None:
                continue
            if positions is not None and batches.max_length > positions:
                problems.append(
                    f"max_length of the {name} data is {batches.max_length}, the teacher has {positions} positions; "
                    f"set max_length={positions} or less."
                )
            if not fits:  # what the rows hold is known once they could be read
                continue
            largest = batches.largest_id()
            if largest is None and batches.tokenizer is not None:
                largest = max(batches.tokenizer.get_vocab().values())
            for role, model in (("student", self.build_student()), ("teacher", teacher)):
                embedded = num_embeddings(model)
                if isinstance(batches, DataPipeline) and embedded is not None:  # a stream is checked as it is read
                    batches.num_ids = min(embedded, batches.num_ids or embedded)
                if largest is not None and embedded is not None and largest >= embedded:
                    problems.append(
                        f"the {name} data go up to token id {largest}, the {role} embeds ids below {embedded}; "
                        "student, teacher and data must share the tokenizer."
                    )
        if any(getattr(batches, "pack", False) for batches in (data.train, data.val)):
            with gathered(problems):
                self.prove_packing("teacher")
        if not problems:
            self.prove_length("teacher", data)

    def on_train_start(self) -> None:
        """Also compiles the teacher's layers where the config says so; released at the run's end."""
        super().on_train_start()
        if self.config.teacher_compile and self.needs_teacher:
            self._compiled = self._compiled + compile_layers(self.frozen_teacher())

    def train(self, mode: bool = True) -> WithTeacher:
        """Sets the mode of all but the teacher, which stays in eval mode."""
        super().train(mode)
        if self.teacher is not None:
            self.teacher.eval()
        return self

    def build_projector(self, student_width: int, teacher_width: int) -> None:
        """`Linear(D, E, bias=False)` where the widths differ, drawn under the config's seed."""
        if student_width != teacher_width and self.projector is None:
            with torch.random.fork_rng(devices=[]):
                torch.default_generator.manual_seed(self.config.seed)
                self.projector = nn.Linear(student_width, teacher_width, bias=False, device="cpu")
            self.projector.to(next(self.build_student().parameters()))  # its device and type

    def project(self, hidden: Tensor) -> Tensor:
        """`[N, D]` -> `[N, E]`, the student's states in the teacher's width."""
        return hidden if self.projector is None else self.projector(hidden)

    def trained_modules(self) -> list[nn.Module]:
        """Student and projector."""
        return [*super().trained_modules(), *([] if self.projector is None else [self.projector])]


def differing_ids(tokenizer: Any, student: nn.Module, teacher: nn.Module) -> str | None:
    """How the teacher's own tokenizer, where its folder has one, disagrees with the student's; None: it does not.

    The student's is the given one, else that of its folder.
    """
    students = _own_tokenizer(student) if tokenizer is None else tokenizer
    teachers = _own_tokenizer(teacher)
    if students is None or teachers is None:
        return None
    own, others = students.get_vocab(), teachers.get_vocab()
    differing = sorted(token for token in own if others.get(token) != own[token])
    if not differing:
        return None
    token = differing[0]
    return (
        f"{len(differing)} of {len(own)} tokens have another id in the teacher's tokenizer, such as {token!r}: "
        f"{own[token]} here and {others.get(token, 'none')} there; distil with the teacher's tokenizer."
    )


def _own_tokenizer(model: nn.Module) -> Any:
    """The tokenizer in the folder that the model was loaded from; None: there is none."""
    folder = Path(str(getattr(getattr(model, "config", None), "_name_or_path", "") or ""))
    if not folder.name or not (folder / "tokenizer_config.json").is_file():
        return None
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)
