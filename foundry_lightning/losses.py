"""The losses of pretraining and distillation: sums over tokens or rows, in float32 or wider.

Every function returns a sum. The caller's weights already hold 1 / denominator, so that windows of any split add up to
the gradient of one batch.

Sources:
    * L = mlm · CE + distill · T² · KL + cosine · (1 − cos): Sanh et al. 2019, "DistilBERT", section 3.
    * The factor T², which keeps the soft targets' gradient on one scale for any T: Hinton, Vinyals and Dean 2015,
      "Distilling the Knowledge in a Neural Network", section 2.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from foundry_lightning.block_losses import Rows, Terms, fused_block_loss, plain_block_loss

IGNORED_LABEL = -100
_BLOCK_BYTES = 64 * 2**20
_ROW_MULTIPLE = 16  # float32 rows of a cache line; the products with 303 rows take a third longer than with 304
_SMALLEST_NORM_PRODUCT = 1e-8


@dataclass(frozen=True)
class Scored:
    """Vocabulary scores that are not computed yet: ``features @ weight.T + bias``.

    Attributes:
        features: ``[R, K]``, or the scores ``[R, V]`` themselves where ``weight`` is None.
        weight: ``[V, K]`` or None.
        bias: ``[V]`` or None.
    """

    features: Tensor
    weight: Tensor | None = None
    bias: Tensor | None = None

    @property
    def num_classes(self) -> int:
        """V, the number of columns of the scores."""
        return self.features.shape[1] if self.weight is None else self.weight.shape[0]

    def scores(self) -> Tensor:
        """Compute all scores ``[R, V]`` at once; for callers that need them whole, such as samples."""
        if self.weight is not None:
            return F.linear(self.features, self.weight, self.bias)
        return self.features if self.bias is None else self.features + self.bias


class VocabularyLoss(NamedTuple):
    """What :func:`vocabulary_loss` returns.

    Attributes:
        total: weighted sum of both terms, scalar, differentiable.
        ce_sum: Σ cross-entropy in nats, scalar, detached; 0 where ``mlm_weight`` is 0.
        kl_sum: T² · Σ KL in nats, scalar, detached; 0 where ``distill_weight`` is 0.
        num_correct: rows whose best score is at their label, int64 scalar; 0 where it was not asked for.
    """

    total: Tensor
    ce_sum: Tensor
    kl_sum: Tensor
    num_correct: Tensor


def vocabulary_loss(
    student: Scored,
    *,
    labels: Tensor,
    teacher: Scored | None = None,
    mlm_weight: float = 1.0,
    distill_weight: float = 0.0,
    temperature: float = 2.0,
    num_shared_classes: int | None = None,
    with_accuracy: bool = False,
    block_bytes: int | None = None,
    compiled: bool = False,
) -> VocabularyLoss:
    """Compute ``mlm_weight · Σ CE + distill_weight · T² · Σ KL(teacher ‖ student)`` in one pass over blocks of rows.

    The same pass computes the gradients. At most a block of scores per model exists at a time, and the student's last
    one waits for the backward. Nothing is differentiated with respect to the teacher. Under autocast the
    matrix products run in autocast's type, as in the plain model; softmaxes, sums and the small weights stay in float32
    (float64 where the scores are float64).

    Args:
        student: R rows of scores over V classes.
        labels: int64 ``[R]``; −100 marks a row that is no part of CE (it still is part of KL).
        teacher: the same R rows scored by the teacher; needed where ``distill_weight`` is not 0, else never touched.
        mlm_weight: factor of the cross-entropy, 1 / denominator included; 0 skips the term.
        distill_weight: factor of the KL term, 1 / denominator included; 0 skips the term.
        temperature: T > 0, divides both models' scores in the KL term.
        num_shared_classes: KL compares the first so many classes (columns that only pad a vocabulary are cut); None
            where both models have equally many.
        with_accuracy: also count the rows whose best class is the label.
        block_bytes: size of one block of float32 scores, in bytes; None means 64 MiB, or as much as the weight's
            gradient takes where that is needed and larger: fewer blocks save passes over it.
        compiled: compute softmaxes and their gradients in `torch.compile`'s kernels, in fewer passes over a block.

    Raises:
        ValueError: shapes do not fit, the teacher is missing, or ``temperature`` or ``num_shared_classes`` is out of
            range.
    """
    rows = student.features.shape[0]
    if labels.shape != (rows,):
        raise ValueError(f"labels must have shape ({rows},), got {tuple(labels.shape)}; give one label per scored row.")
    shared = student.num_classes
    if distill_weight == 0:
        teacher = None
    elif teacher is None:
        raise ValueError(
            f"teacher must be given where distill_weight is not 0, got None with {distill_weight}; pass its scores."
        )
    else:
        shared = _shared_classes(student, teacher, num_shared_classes)
        if not temperature > 0:
            raise ValueError(f"temperature must be above 0, got {temperature}; it divides the scores (2.0 is common).")
    grad_enabled = torch.is_grad_enabled()
    terms = Terms(mlm_weight, distill_weight, temperature, shared, with_accuracy, block_bytes, grad_enabled, compiled)
    none = Scored(student.features) if teacher is None else teacher
    return VocabularyLoss(
        *_BlockwiseLoss.apply(
            student.features, student.weight, student.bias, labels, none.features, none.weight, none.bias, terms
        )
    )


def cosine_loss(student_hidden: Tensor, teacher_hidden: Tensor) -> Tensor:
    """Sum 1 − cos over rows (DistilBERT's alignment of directions); scalar, float32 or wider.

    A row in which a vector is zero has no direction: it counts 1 and gets no gradient.

    Args:
        student_hidden: ``[N, E]``.
        teacher_hidden: ``[N, E]``.
    """
    student, teacher = _same_width(student_hidden, teacher_hidden)
    norms = torch.linalg.vector_norm(student, dim=-1) * torch.linalg.vector_norm(teacher, dim=-1)
    has_direction = norms > _SMALLEST_NORM_PRODUCT
    cosine = (student * teacher).sum(-1) / norms.where(has_direction, 1.0)
    loss: Tensor = (1 - cosine.where(has_direction, 0.0)).sum()
    return loss


def mse_loss(student_hidden: Tensor, teacher_hidden: Tensor) -> Tensor:
    """Sum over rows of the squared difference, averaged over the width; scalar, float32 or wider.

    Args:
        student_hidden: ``[N, E]``.
        teacher_hidden: ``[N, E]``.
    """
    student, teacher = _same_width(student_hidden, teacher_hidden)
    return (student - teacher).square().mean(-1).sum()


def _same_width(student: Tensor, teacher: Tensor) -> tuple[Tensor, Tensor]:
    if student.shape != teacher.shape:
        raise ValueError(
            f"student_hidden and teacher_hidden must have one shape, got {tuple(student.shape)} and "
            f"{tuple(teacher.shape)}; project the student to the teacher's width first."
        )
    dtype = _at_least_float32(torch.promote_types(student.dtype, teacher.dtype))
    return student.to(dtype), teacher.to(dtype)


def _at_least_float32(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _shared_classes(student: Scored, teacher: Scored, num_shared_classes: int | None) -> int:
    if teacher.features.shape[0] != student.features.shape[0]:
        raise ValueError(
            f"teacher must have as many rows as student ({student.features.shape[0]}), got "
            f"{teacher.features.shape[0]}; score both at the same positions."
        )
    fewest = min(student.num_classes, teacher.num_classes)
    if num_shared_classes is None:
        if student.num_classes != teacher.num_classes:
            raise ValueError(
                "num_shared_classes must be given where student and teacher have different vocabularies, got None with "
                f"{student.num_classes} and {teacher.num_classes}; pass how many leading ids mean the same in both."
            )
        return fewest
    if not 1 <= num_shared_classes <= fewest:
        raise ValueError(
            f"num_shared_classes must lie in [1, {fewest}], got {num_shared_classes}; it counts columns of both models."
        )
    return num_shared_classes


class _Scores:
    """One model's scores as ``[V, rows]`` blocks, all computed into one buffer.

    Classes first: the products are faster on CPU in this orientation, and a cut vocabulary is contiguous. The last
    block ends in `padding` rows whose features are 0.
    """

    def __init__(
        self, features: Tensor, weight: Tensor | None, bias: Tensor | None, num_classes: int, padding: int
    ) -> None:
        self.features = features
        if weight is not None:
            self.features = F.pad(features.to(_product_dtype(features)), (0, 0, 0, padding))
            weight = weight[:num_classes].to(self.features.dtype)
        self.weight = weight
        self.dtype = _at_least_float32(self.features.dtype)
        self.bias = None if bias is None else bias[:num_classes].to(self.dtype).unsqueeze(1)
        self.num_classes = num_classes
        self.buffer: Tensor | None = None

    def block(self, rows: slice) -> Tensor:
        """Compute the scores of some rows as ``[V, rows]``, valid until the next call."""
        columns = self.features[rows].t()
        size = self.num_classes * (rows.stop - rows.start)
        if self.buffer is None:  # the first block is the largest
            self.buffer = self.features.new_empty(size, dtype=self.dtype)
        scores = self.buffer[:size].view(self.num_classes, -1)
        if self.weight is None:
            scores[:, columns.shape[1] :].zero_()
            scores[:, : columns.shape[1]].copy_(columns[: self.num_classes])
        elif self.weight.dtype == self.dtype:
            torch.mm(self.weight, columns, out=scores)
        else:
            scores.copy_(self.weight @ columns)
        return scores if self.bias is None else scores.add_(self.bias)


def _product_dtype(features: Tensor) -> torch.dtype:
    """The type that F.linear would compute in: autocast's where it is on, else the features' own."""
    device_type = features.device.type
    if features.dtype != torch.float64 and torch.is_autocast_enabled(device_type):
        return torch.get_autocast_dtype(device_type)
    return features.dtype


class _BlockwiseLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        features: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        labels: Tensor,
        teacher_features: Tensor,
        teacher_weight: Tensor | None,
        teacher_bias: Tensor | None,
        terms: Terms,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        needs = [terms.grad_enabled and needed for needed in ctx.needs_input_grad[:3]]
        num_classes = features.shape[1] if weight is None else weight.shape[0]
        rows, dtype = features.shape[0], _at_least_float32(features.dtype)
        blocks = _blocks(features, weight, num_classes * dtype.itemsize, terms, needs_weight=needs[1])
        padding = blocks[-1].stop - rows if blocks else 0
        labels = F.pad(labels, (0, padding), value=IGNORED_LABEL)
        counted = labels != IGNORED_LABEL
        known = Rows(
            labels.where(counted, 0), counted, F.pad(torch.ones_like(labels[:rows], dtype=dtype), (0, padding))
        )
        student = _Scores(features, weight, bias, num_classes, padding)
        teacher = None
        if terms.distill_weight != 0:
            teacher = _Scores(teacher_features, teacher_weight, teacher_bias, terms.num_shared, padding)
        gradients = _Gradients(student, needs)
        ce_sum, kl_sum = (features.new_zeros((), dtype=student.dtype) for _ in range(2))
        num_correct = labels.new_zeros((), dtype=torch.int64)
        block_loss = fused_block_loss if terms.compiled else plain_block_loss
        with torch.autocast(features.device.type, enabled=False):
            for block in blocks:
                gradients.add_waiting()
                scores = student.block(block)
                if terms.with_accuracy:
                    num_correct = num_correct + (scores.argmax(0) == labels[block]).sum()
                loss = block_loss(
                    scores,
                    None if teacher is None else teacher.block(block),
                    Rows(*(each[block] for each in known)),
                    terms,
                    needs_gradient=any(needs),
                )
                ce_sum, kl_sum = ce_sum + loss.ce, kl_sum + loss.kl
                if loss.gradient is not None:
                    gradients.add(loss.gradient, block)
        grad_features = None if gradients.features is None else gradients.features[:rows]
        ctx.save_for_backward(
            grad_features, gradients.bias, gradients.weight, gradients.waiting, gradients.waiting_features
        )
        ctx.scale = terms.gradient_scale
        ctx.weight_like = torch.empty_like(weight, device="meta") if weight is not None and needs[1] else None
        ctx.dtypes = features.dtype, None if bias is None else bias.dtype
        ctx.mark_non_differentiable(ce_sum, kl_sum, num_correct)
        return terms.mlm_weight * ce_sum + terms.distill_weight * kl_sum, ce_sum, kl_sum, num_correct

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_total: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        features, bias, weight, waiting, waiting_features = ctx.saved_tensors
        factor = grad_total * ctx.scale
        features_dtype, bias_dtype = ctx.dtypes
        grad_weight = None
        if ctx.weight_like is not None:
            if waiting is None:
                grad_weight = torch.zeros_like(ctx.weight_like, device=factor.device)
            else:
                if waiting.dtype == factor.dtype:
                    grad_weight = waiting @ (waiting_features * factor)
                else:  # half types: the small factor comes after the product
                    grad_weight = (waiting @ waiting_features).to(factor.dtype).mul_(factor)
                if weight is not None:
                    grad_weight.addcmul_(weight, factor)
                grad_weight = grad_weight.to(ctx.weight_like.dtype)
        grad_features = None if features is None else (features * factor).to(features_dtype)
        grad_bias = None if bias is None else (bias * factor).to(bias_dtype)
        return grad_features, grad_weight, grad_bias, None, None, None, None, None


def _blocks(
    features: Tensor, weight: Tensor | None, row_bytes: int, terms: Terms, *, needs_weight: bool
) -> list[slice]:
    """Cut the rows into equal blocks; none where no term needs scores.

    Blocks of 16 rows or more of a product have a multiple of 16, the last one up to 15 more than there are.
    """
    rows, width = features.shape
    if rows == 0 or not (terms.mlm_weight or terms.distill_weight or terms.with_accuracy):
        return []
    if terms.block_bytes is None:
        largest = max(_BLOCK_BYTES // row_bytes, width if needs_weight else 1)
    else:
        largest = max(1, terms.block_bytes // row_bytes)
    multiple = _ROW_MULTIPLE if weight is not None and min(largest, rows) >= _ROW_MULTIPLE else 1
    largest -= largest % multiple
    size, end = (-(-number // multiple) * multiple for number in (-(-rows // -(-rows // largest)), rows))
    return [slice(begin, min(begin + size, end)) for begin in range(0, rows, size)]


class _Gradients:
    """Sums of the gradients over blocks, before the terms' common weight; ``None`` for what is not needed.

    The last block waits for the backward, which multiplies its few features by the incoming gradient: for one block,
    the common case, no further pass over a tensor as large as the vocabulary matrix is needed.
    """

    def __init__(self, student: _Scores, needs: list[bool]) -> None:
        self.student = student
        self.features = torch.zeros_like(student.features, dtype=student.dtype) if needs[0] else None
        self.needs_weight = needs[1]
        self.weight: Tensor | None = None
        self.waiting: Tensor | None = None
        self.waiting_features: Tensor | None = None
        self.bias = torch.zeros_like(student.bias[:, 0]) if student.bias is not None and needs[2] else None

    def add(self, gradient: Tensor, block: slice) -> None:
        """Add one block's gradient of the scores, ``[V, rows]``."""
        if self.bias is not None:
            self.bias.add_(gradient.sum(1))
        if self.student.weight is None:
            if self.features is not None:
                self.features[block] = gradient.t()
            return
        gradient = gradient.to(self.student.weight.dtype)
        if self.features is not None:
            self.features[block] = gradient.t() @ self.student.weight
        if self.needs_weight:
            self.waiting, self.waiting_features = gradient, self.student.features[block]

    def add_waiting(self) -> None:
        """Add the waiting block's product to the weight's gradient, before its scores are overwritten."""
        if self.waiting is None or self.waiting_features is None:
            return
        if self.weight is None:
            self.weight = (self.waiting @ self.waiting_features).to(self.student.dtype)
        elif self.weight.dtype == self.waiting.dtype:
            self.weight.addmm_(self.waiting, self.waiting_features)
        else:  # half types: a block's product is rounded once, the sum over blocks is float32
            self.weight.add_(self.waiting @ self.waiting_features)
        self.waiting = None
