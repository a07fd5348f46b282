"""Distillation of hidden states, token by token, as a LightningModule."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from foundry_lightning.config import EncoderDistillConfig, config_from
from foundry_lightning.losses import cosine_loss, mse_loss
from foundry_lightning.masking import masked_positions
from foundry_lightning.models import attends_anywhere, left_untouched, probe_inputs, require_inputs
from foundry_lightning.modules.mlm import TokenMean
from foundry_lightning.modules.teacher import WithTeacher
from foundry_lightning.students import StudentRecipe
from foundry_lightning.tokenizer import load_tokenizer


@dataclass(frozen=True)
class AttendedCounter:
    """Counts the attended tokens of a batch, on the host."""

    def __call__(self, batch: Mapping[str, Any], info: Mapping[str, Any]) -> dict[str, int]:
        """`num_attended` of a batch."""
        return {"num_attended": int((batch["attention_mask"] != 0).sum())}


class EncoderDistillLitModule(WithTeacher):
    """Trains a student's final hidden states towards the teacher's, at every attended token.

    The distance is the mean squared difference over the width (as in TinyBERT's hidden-state loss, Jiao et al. 2020,
    equation 8) or 1 − cos; where widths differ the student's states pass a trained `Linear(D, E, bias=False)`.

    Args:
        student: An encoder that returns `.last_hidden_state` `[B, S, D]`, or its recipe.
        teacher: An encoder that returns `.last_hidden_state` `[B, S, E]`, or a recipe that loads it.
        config: An `EncoderDistillConfig`, or a dict of its fields.
        tokenizer: The tokenizer of both, for the data module and the padding id.

    Raises:
        TypeError: student or teacher is no module.
        ValueError: problems of the config, or a model without `.last_hidden_state`.
    """

    config_class = EncoderDistillConfig

    def __init__(
        self,
        student: nn.Module | StudentRecipe,
        teacher: nn.Module | StudentRecipe,
        *,
        config: EncoderDistillConfig | None = None,
        tokenizer: Any = None,
    ) -> None:
        super().__init__(
            student,
            config=config_from(config, self.config_class),
            tokenizer=None if tokenizer is None else load_tokenizer(tokenizer),
        )
        self.set_teacher(teacher)
        self.counter = AttendedCounter()
        self.val_metric = TokenMean(loss="num_attended")
        self._prepared = False

    def prepare(self) -> None:
        """Measures both widths and builds the projector.

        Raises:
            ValueError: a model does not return `.last_hidden_state`.
        """
        if self._prepared:
            return
        widths = [_width(self.build_student(), "student"), _width(self.build_teacher(), "teacher")]
        self.build_projector(*widths)
        self._prepared = True

    def distance(self, batch: Mapping[str, Any]) -> Tensor:
        """Sum over attended tokens of the distance between the states of student and teacher."""
        attended = masked_positions(batch["attention_mask"] != 0, batch["info"]["num_attended"])
        assert self.student is not None
        student = self.student(**self.inputs(batch)).last_hidden_state.flatten(0, 1)[attended]
        with torch.no_grad():
            teacher = self.frozen_teacher()(**self.inputs(batch, of="teacher")).last_hidden_state.flatten(0, 1)[
                attended
            ]
        measure = mse_loss if self.config.loss == "mse" else cosine_loss
        return measure(self.project(student), teacher)

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        """The mean distance over attended tokens."""
        distance = self.distance(batch)
        loss = self.weight(batch, "num_attended") * distance
        return self.record(batch, loss, {self.config.loss: (distance, "num_attended", 1.0)})

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Sums over the attended tokens."""
        self.val_metric.update(batch["info"], loss=self.distance(batch))

    def on_validation_epoch_end(self) -> None:
        """`val/loss`."""
        means = self.val_metric.compute()
        self.val_metric.reset()
        self.log_validation(means)

    def unchangeable(self) -> dict[str, Any]:
        """Seed, architecture and the distance."""
        return {**super().unchangeable(), "loss": self.config.loss}


def _width(model: nn.Module, name: str) -> int:
    """Width of `.last_hidden_state`, measured on a few tokens by a forward that leaves the model as it was."""
    require_inputs(model, name=name)
    with attends_anywhere(model), left_untouched(model):
        output = model(**probe_inputs(model))
    if not hasattr(output, "last_hidden_state"):
        raise ValueError(
            f"{name} must return .last_hidden_state, got {type(output).__name__} from {type(model).__name__}; "
            "pass an encoder (AutoModel), such as model.base_model."
        )
    return int(output.last_hidden_state.shape[-1])
