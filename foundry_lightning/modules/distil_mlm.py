"""Distillation while learning from the data: the DistilBERT objective as a LightningModule."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from foundry_lightning.config import DistilMLMConfig, gathered, problems_to_error
from foundry_lightning.data.ready import ReadyBatches
from foundry_lightning.losses import cosine_loss, vocabulary_loss
from foundry_lightning.masking import masked_positions
from foundry_lightning.models import require_inputs
from foundry_lightning.modules.mlm import MLMLitModule, Objective, TokenMean
from foundry_lightning.modules.teacher import WithTeacher, differing_ids
from foundry_lightning.projection import find_projection, hidden_size, output_vocab_size
from foundry_lightning.students import StudentRecipe


class DistilMLMLitModule(MLMLitModule, WithTeacher):
    """Trains a student on masked tokens and on what a teacher thinks of them (Sanh et al. 2019, section 3).

    L = mlm_weight · CE + distill_weight · T² · KL(teacher ‖ student, both softened by T)
      + cosine_weight · (1 − cos of the final hidden states)

    CE is a mean over masked tokens, KL over masked tokens (`distill_on="masked"`) or attended ones (`"all"`), cosine
    over attended tokens. Where widths differ the student's states pass a trained `Linear(D, E, bias=False)`.

    Args:
        student: A masked language model, or its recipe.
        teacher: A masked language model with the same vocabulary, or a recipe that loads it.
        config: A `DistilMLMConfig`, or a dict of its fields.
        tokenizer: The tokenizer of both.

    Raises:
        TypeError: student or teacher is no module.
        ValueError: problems of config, tokenizer, student and teacher.
    """

    config_class = DistilMLMConfig

    def __init__(
        self,
        student: nn.Module | StudentRecipe,
        teacher: nn.Module | StudentRecipe,
        *,
        config: DistilMLMConfig | None = None,
        tokenizer: Any = None,
    ) -> None:
        super().__init__(student, config=config, tokenizer=tokenizer)
        self.set_teacher(teacher)
        self.teacher_projection: Any = None
        self.val_metric = TokenMean(
            mlm="num_masked", masked_accuracy="num_masked", distill=self.distill_count, cosine="num_attended"
        )

    @property
    def distill_count(self) -> str:
        """Name of the count that divides KL."""
        return "num_masked" if self.config.distill_on == "masked" else "num_attended"

    @property
    def needs_teacher(self) -> bool:
        """Whether a term with the teacher in it has a weight."""
        return bool(self.config.distill_weight or self.config.cosine_weight)

    def prepare(self) -> None:
        """Checks the vocabularies of student and teacher, and builds the projector.

        Raises:
            ValueError: what does not fit, in one message.
        """
        problems: list[str] = []
        with gathered(problems):
            super().prepare()
        if self.teacher_projection is None and self.needs_teacher:
            student, teacher = self.build_student(), self.build_teacher()
            require_inputs(teacher, name="teacher")
            if self.config.distill_weight:
                problems += self._vocabulary_problems(student, teacher)
            if self.config.cosine_weight:
                with gathered(problems):
                    self.build_projector(hidden_size(student), hidden_size(teacher))
            problems_to_error(problems, of="distillation")
            self.teacher_projection = find_projection(teacher)
        problems_to_error(problems, of="distillation")

    def _vocabulary_problems(self, student: nn.Module, teacher: nn.Module) -> list[str]:
        scored, problems = output_vocab_size(teacher), []
        if self.vocab_size is None and self.num_classes not in (None, scored):
            problems.append(
                f"the student scores {self.num_classes} ids and the teacher {scored}; give the tokenizer "
                "(or vocab_size) that both share, or a student with the teacher's vocabulary."
            )
        if scored < (self.vocab_size or 0):
            problems.append(
                f"the teacher scores {scored} ids, the tokenizer has {self.vocab_size}; "
                "student and teacher must share the tokenizer."
            )
        differing = differing_ids(self.tokenizer, student, teacher)
        return problems + ([] if differing is None else [differing])

    def connect_data(self, data: Any) -> None:
        """Also refuses labels of ready batches where `distill_on="all"` scores nothing."""
        problems: list[str] = []
        with gathered(problems):
            super().connect_data(data)
        for name, batches in (("train", data.train), ("val", data.val)):
            if self.config.distill_on != "all" or not isinstance(batches, ReadyBatches):
                continue
            wrong = [
                n
                for n, batch in enumerate(batches.batches)
                if "labels" in batch and ((batch["labels"] != -100) & (batch["attention_mask"] == 0)).any()
            ]
            if wrong:
                problems.append(
                    "labels must be -100 at places without attention where distill_on='all', got another in batch "
                    f"{wrong[0]} of the {name} data; attend there, or set distill_on='masked'."
                )
        problems_to_error(problems, of="data")

    def objective(self, batch: Mapping[str, Any], *, evaluating: bool = False) -> Objective:
        """Mask once, both models on the same masked input, three terms."""
        config, masked = self.config, self.mask(batch)
        attended = masked_positions(batch["attention_mask"] != 0, batch["info"]["num_attended"])
        scored, labels = masked.positions, masked.labels
        if config.distill_on == "all":
            scored, labels = attended, masked.dense_labels.flatten()[attended]

        if self.needs_teacher:  # first: what its forward holds is free again for the student's activations
            with torch.no_grad():
                at = scored if config.distill_weight else scored[:0]  # the cosine needs no scores
                inputs = {**self.inputs(batch, of="teacher"), "input_ids": masked.input_ids}
                teacher = self.teacher_projection(self.frozen_teacher(), inputs, positions=at)
        inputs = {**self.inputs(batch), "input_ids": masked.input_ids}
        student = self.projection(self.student, inputs, positions=scored)
        loss = vocabulary_loss(
            student.scored,
            labels=labels,
            teacher=teacher.scored if config.distill_weight else None,
            mlm_weight=1.0 if evaluating else config.mlm_weight * masked.weight,
            distill_weight=config.distill_weight * (1.0 if evaluating else self.weight(batch, self.distill_count)),
            temperature=config.temperature,
            num_shared_classes=self._shared_classes(student, teacher) if config.distill_weight else None,
            with_accuracy=evaluating,
            compiled=self.compiles_loss and not evaluating,
        )
        total, terms = loss.total, {}
        if config.mlm_weight or evaluating:
            terms["mlm"] = (loss.ce_sum, "num_masked", config.mlm_weight)
        if config.distill_weight:
            terms["distill"] = (loss.kl_sum, self.distill_count, config.distill_weight)
        if config.cosine_weight:
            student_states = self.project(student.hidden.flatten(0, 1)[attended])
            cosine = cosine_loss(student_states, teacher.hidden.flatten(0, 1)[attended])
            total = total + config.cosine_weight * self.weight(batch, "num_attended") * cosine
            terms["cosine"] = (cosine, "num_attended", config.cosine_weight)
        return Objective(total, terms, loss.num_correct)

    def _shared_classes(self, student: Any, teacher: Any) -> int:
        """Columns that both vocabularies have: the tokenizer's, where it is known."""
        return self.vocab_size or min(student.scored.num_classes, teacher.scored.num_classes)

    def unchangeable(self) -> dict[str, Any]:
        """What masking may not change, and the terms of the loss."""
        names = ("mlm_weight", "distill_weight", "cosine_weight", "temperature", "distill_on")
        return {**super().unchangeable(), **{name: getattr(self.config, name) for name in names}}
