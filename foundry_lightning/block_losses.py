"""CE and KL of one block of scores ``[V, rows]`` and their gradient in its memory, in two forms of equal results.

``plain_block_loss`` goes operator by operator. ``fused_block_loss`` walks the block twice in compiled kernels: once for
each row's maxima and sums at the same time (Milakov and Gimelshein 2018, "Online normalizer calculation for softmax",
algorithm 3), once for the gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

_PART_BYTES = 4 * 2**20  # of a block, for what is computed class by class: two such temporaries, or a cache's worth


class Terms(NamedTuple):
    """The terms of a loss, and what of them is wanted.

    ``distill_weight`` is the factor of T² · Σ KL.
    """

    mlm_weight: float
    distill_weight: float
    temperature: float
    num_shared: int
    with_accuracy: bool
    block_bytes: int | None
    grad_enabled: bool
    compiled: bool

    @property
    def gradient_scale(self) -> float:
        """The larger weight of both terms in the scores' gradient: what is left inside the products is of order 1."""
        return max(abs(self.mlm_weight), abs(self.distill_weight) * self.temperature)


class Rows(NamedTuple):
    """What is known of each row, ``[rows]`` each.

    Attributes:
        label: int64; any class where it has none.
        counted: bool, whether it has a label: a row of CE.
        real: 1, or 0 for padding: a row of KL.
    """

    label: Tensor
    counted: Tensor
    real: Tensor


class BlockLoss(NamedTuple):
    """Σ CE, T² · Σ KL (0 for a term that has no weight), and the gradient of the scores over ``gradient_scale``."""

    ce: Tensor | float
    kl: Tensor | float
    gradient: Tensor | None


def plain_block_loss(
    scores: Tensor, teacher: Tensor | None, rows: Rows, terms: Terms, *, needs_gradient: bool
) -> BlockLoss:
    """Compute a block's losses operator by operator.

    Args:
        scores: the student's, ``[V, rows]``; overwritten, by the gradient where it is needed.
        teacher: the teacher's of the shared classes, ``[num_shared, rows]``; overwritten. None: no KL.
        rows: what is known of the rows.
        terms: the terms' weights.
        needs_gradient: whether to compute the gradient.
    """
    index, scale = rows.label.unsqueeze(0), terms.gradient_scale
    kl: Tensor | float = 0.0
    soft_gradient = None
    if teacher is not None:
        # Subtracting a row's maximum changes no softmax and keeps every exponential in range.
        scores.sub_(scores[: terms.num_shared].amax(0))
        weight = rows.real * (terms.distill_weight * terms.temperature / scale) if needs_gradient else None
        kl, soft_gradient = _block_kl(scores[: terms.num_shared], teacher, terms.temperature, rows.real, weight)
    if terms.mlm_weight == 0:
        if soft_gradient is None:
            return BlockLoss(0.0, kl, None)
        scores[: terms.num_shared].copy_(soft_gradient)
        scores[terms.num_shared :].zero_()
        return BlockLoss(0.0, kl, scores)

    if teacher is None or terms.num_shared < scores.shape[0]:  # else every row's maximum is 0 by now
        scores.sub_(scores.amax(0))
    at_label = scores.gather(0, index)[0]
    normalizer = scores.exp_().sum(0)
    ce = ((normalizer.log() - at_label) * rows.counted).sum()
    if not needs_gradient:
        return BlockLoss(ce, kl, None)
    factor = rows.counted * (terms.mlm_weight / scale)
    scores.mul_(factor / normalizer).scatter_add_(0, index, -factor.to(scores.dtype).unsqueeze(0))
    if soft_gradient is not None:
        scores[: terms.num_shared].add_(soft_gradient)
    return BlockLoss(ce, kl, scores)


def _block_kl(
    student: Tensor, teacher: Tensor, temperature: float, real: Tensor, gradient_weight: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """T² · Σ KL(teacher ‖ student) of real ``[n, rows]``, and ``gradient_weight · (softmax(s/T) − softmax(t/T))``.

    ``student`` has column maxima of 0 and is not changed; ``teacher`` is overwritten and holds the returned gradient.
    """
    teacher.sub_(teacher.amax(0))
    part_bytes = _PART_BYTES * (1 if teacher.device.type == "cpu" else 16)  # a GPU wants few and large operators
    size = max(1, part_bytes // (teacher.dtype.itemsize * max(1, teacher.shape[1])))
    parts = list(zip(student.split(size), teacher.split(size), strict=True))
    cross, normalizer, target_normalizer = (teacher.new_zeros(teacher.shape[1]) for _ in range(3))
    for student_part, teacher_part in parts:
        teacher_part.clamp_(min=_lowest(teacher))  # a class of probability 0 adds 0, not 0 · ∞
        difference = torch.sub(teacher_part, student_part)
        target = teacher_part.mul_(1 / temperature).exp_()
        target_normalizer += target.sum(0)
        cross += difference.mul_(target).sum(0)
        normalizer += torch.mul(student_part, 1 / temperature, out=difference).exp_().sum(0)
    # KL = Σ p_t (t − s) / T + log Z_s − log Z_t: exactly 0 for equal scores.
    cross /= target_normalizer * temperature
    kl = temperature**2 * ((cross + normalizer.log() - target_normalizer.log()) * real).sum()
    if gradient_weight is None:
        return kl, None
    for student_part, target in parts:
        soft = torch.mul(student_part, 1 / temperature).exp_().mul_(gradient_weight / normalizer)
        torch.sub(soft, target.mul_(gradient_weight / target_normalizer), out=target)
    return kl, teacher


class _Softmax(NamedTuple):
    """Of rows of scores x over temperature T, ``[rows]`` each: a maximum and Σ exp((x − maximum) / T).

    In the second walk a factor is in the sum's place: ``factor · exp((x − maximum) / T)``, a weight times the softmax.
    """

    maximum: Tensor
    total: Tensor

    @classmethod
    def of(cls, scores: Tensor) -> _Softmax:
        """An empty sum, with the maxima of some classes' scores ``[classes, rows]``."""
        return cls(scores.amax(0).clamp(min=_lowest(scores)), torch.zeros_like(scores[0]))

    def weighted(self, weight: Tensor) -> _Softmax:
        """For the second walk."""
        return _Softmax(self.maximum, weight / self.total)


def _lowest(scores: Tensor) -> float:
    """A score whose class has probability 0, and from which another can be taken."""
    return torch.finfo(scores.dtype).min / 4


def fused_block_loss(
    scores: Tensor, teacher: Tensor | None, rows: Rows, terms: Terms, *, needs_gradient: bool
) -> BlockLoss:
    """Compute what :func:`plain_block_loss` does, in compiled kernels; leaves the teacher's scores as they are."""
    temperature, scale, size = terms.temperature, terms.gradient_scale, scores.shape[0]
    if scores.device.type == "cpu":  # what a walk reads again is then in the cache
        size = max(1, _PART_BYTES // (scores.dtype.itemsize * scores.shape[1] * (1 if teacher is None else 2)))
    shared, rest = [], scores
    if teacher is not None:
        shared = list(zip(scores[: terms.num_shared].split(size), teacher.split(size), strict=True))
        rest = scores[terms.num_shared :]
    alone = rest.split(size) if len(rest) else ()

    kl: Tensor | float = 0.0
    ce: Tensor | float = 0.0
    hard = _Softmax.of(scores[:size]) if terms.mlm_weight else None
    if teacher is not None:
        soft, target = (_Softmax.of(part) for part in shared[0])
        cross = torch.zeros_like(soft.total)
        for part in shared:
            hard, soft, target, cross = _compiled(_add_shared)(*part, temperature, hard, soft, target, cross)
        # KL = Σ p_t (t − s) / T + log Z_s − log Z_t: exactly 0 for equal scores.
        cross = cross / (target.total * temperature)
        kl = temperature**2 * ((cross + soft.total.log() - target.total.log()) * rows.real).sum()
    if hard is not None:
        for part in alone:
            hard = _compiled(_add)(part, 1.0, hard)
        at_label = scores.gather(0, rows.label.unsqueeze(0))[0] - hard.maximum
        ce = ((hard.total.log() - at_label) * rows.counted).sum()
    if not needs_gradient or (hard is None and teacher is None):
        return BlockLoss(ce, kl, None)

    weight = rows.counted * (terms.mlm_weight / scale)
    hard = None if hard is None else hard.weighted(weight)
    if teacher is not None:
        soft, target = (
            softmax.weighted(rows.real * (terms.distill_weight * temperature / scale)) for softmax in (soft, target)
        )
        for part in shared:
            _compiled(_write_shared)(*part, temperature, hard, soft, target)
    if hard is None:
        rest.zero_()
    else:
        for part in alone:
            _compiled(_write)(part, hard)
        scores.scatter_add_(0, rows.label.unsqueeze(0), -weight.to(scores.dtype).unsqueeze(0))
    return BlockLoss(ce, kl, scores)


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, dynamic=True)


# What is compiled: each function takes some classes' scores, ``[classes, rows]``.


def _add(scores: Tensor, temperature: float, before: _Softmax) -> _Softmax:
    maximum = torch.maximum(before.maximum, scores.amax(0))
    moved = ((before.maximum - maximum) / temperature).exp()
    return _Softmax(maximum, before.total * moved + ((scores - maximum) / temperature).exp().sum(0))


def _add_shared(
    student: Tensor,
    teacher: Tensor,
    temperature: float,
    hard: _Softmax | None,
    soft: _Softmax,
    target: _Softmax,
    cross: Tensor,
) -> tuple[_Softmax | None, _Softmax, _Softmax, Tensor]:
    """``cross`` is Σ exp((t − max t) / T) · ((t − max t) − (s − max s))."""
    teacher = teacher.clamp(min=_lowest(teacher))  # a class of probability 0 adds 0, not 0 · ∞
    new_soft, new_target = _add(student, temperature, soft), _add(teacher, temperature, target)
    moved, target_moved = soft.maximum - new_soft.maximum, target.maximum - new_target.maximum
    cross = (cross + target.total * (target_moved - moved)) * (target_moved / temperature).exp()
    below, target_below = student - new_soft.maximum, teacher - new_target.maximum
    cross = cross + ((target_below / temperature).exp() * (target_below - below)).sum(0)
    return None if hard is None else _add(student, 1.0, hard), new_soft, new_target, cross


def _write(scores: Tensor, softmax: _Softmax) -> None:
    scores.copy_(_exponentials(scores, 1.0, softmax))


def _write_shared(
    student: Tensor, teacher: Tensor, temperature: float, hard: _Softmax | None, soft: _Softmax, target: _Softmax
) -> None:
    gradient = _exponentials(student, temperature, soft) - _exponentials(teacher, temperature, target)
    student.copy_(gradient if hard is None else gradient + _exponentials(student, 1.0, hard))


def _exponentials(scores: Tensor, temperature: float, softmax: _Softmax) -> Tensor:
    return ((scores - softmax.maximum) / temperature).exp() * softmax.total
