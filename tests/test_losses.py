import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from foundry_lightning import block_losses, losses
from foundry_lightning.losses import Scored, VocabularyLoss, cosine_loss, mse_loss, vocabulary_loss


@pytest.fixture(params=["plain", "fused"], autouse=True)
def form(request, monkeypatch):
    """Every test sees both forms of a block's loss; `tests/test_compiling.py` has the fused one compiled."""
    if request.param == "fused":
        monkeypatch.setattr(block_losses, "_compiled", lambda function: function)
        monkeypatch.setattr(losses, "plain_block_loss", block_losses.fused_block_loss)


def make_scored(
    rows: int, width: int, classes: int, *, bias: bool = True, dtype=torch.float32, seed: int = 0
) -> Scored:
    generator = torch.Generator().manual_seed(seed)

    def leaf(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=dtype).requires_grad_()

    return Scored(leaf(rows, width), leaf(classes, width), leaf(classes) if bias else None)


def make_labels(rows: int, classes: int) -> Tensor:
    labels = torch.randint(classes, (rows,), generator=torch.Generator().manual_seed(1))
    labels[::3] = -100
    return labels


def plain_terms(
    student: Tensor, labels: Tensor, teacher: Tensor | None, temperature: float, shared: int
) -> tuple[Tensor, Tensor]:
    ce = F.cross_entropy(student, labels, reduction="sum", ignore_index=-100)
    if teacher is None:
        return ce, torch.zeros_like(ce)
    soft_student = F.log_softmax(student[:, :shared] / temperature, -1)
    soft_teacher = F.softmax(teacher[:, :shared] / temperature, -1)
    return ce, temperature**2 * F.kl_div(soft_student, soft_teacher, reduction="sum")


def leaves(scored: Scored) -> list[Tensor]:
    return [tensor for tensor in (scored.features, scored.weight, scored.bias) if tensor is not None]


class Recorder(TorchDispatchMode):
    """Counts matrix products and keeps the sizes of the tensors that take memory of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0
        self.made: list[int] = []
        self.products = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        given = {leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        self.products += func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.addmm_)
        for tensor in output if isinstance(output, (tuple, list)) else (output,):
            if isinstance(tensor, Tensor) and tensor.device.type != "meta":
                self.numel = max(self.numel, tensor.numel())
                if tensor.untyped_storage()._cdata not in given:
                    self.made.append(tensor.numel())
        return output


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0, 10.0])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("mlm_weight", "distill_weight"), [(0.02, 0.05), (0.02, 0.0), (0.0, 0.05), (0.0, 0.0)])
@pytest.mark.parametrize(("rows", "block_bytes"), [(11, None), (11, 4 * 37 * 4), (21, None), (37, 4 * 37 * 18)])
@pytest.mark.parametrize("shared", [33, 37])
def test_value_and_gradients_equal_the_plain_formula(
    temperature, bias, mlm_weight, distill_weight, rows, block_bytes, shared, monkeypatch
):
    if block_bytes is not None:  # then each block is also walked in parts of some classes
        monkeypatch.setattr(block_losses, "_PART_BYTES", 4 * 4 * 7)
    student = make_scored(rows, 8, 37, bias=bias)
    teacher = make_scored(rows, 12, 40, bias=bias, seed=5)
    labels = make_labels(rows, 37)
    loss = vocabulary_loss(
        student,
        labels=labels,
        teacher=teacher,
        mlm_weight=mlm_weight,
        distill_weight=distill_weight,
        temperature=temperature,
        num_shared_classes=shared,
        block_bytes=block_bytes,
    )
    ce, kl = plain_terms(student.scores(), labels, teacher.scores().detach(), temperature, shared)
    expected = mlm_weight * ce + distill_weight * kl
    torch.testing.assert_close(loss.total, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(loss.ce_sum, ce.detach() * (mlm_weight != 0), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(loss.kl_sum, kl.detach() * (distill_weight != 0), rtol=1e-5, atol=1e-4)
    got = torch.autograd.grad(3 * loss.total, leaves(student))
    wanted = torch.autograd.grad(3 * expected, leaves(student))
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("block_bytes", [None, 8 * 9 * 2])
def test_gradients_equal_finite_differences_in_float64(block_bytes):
    student = make_scored(5, 4, 9, dtype=torch.float64)
    teacher = make_scored(5, 3, 9, dtype=torch.float64, seed=5)

    def total(features: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return vocabulary_loss(
            Scored(features, weight, bias),
            labels=make_labels(5, 9),
            teacher=teacher,
            mlm_weight=0.7,
            distill_weight=0.4,
            temperature=1.7,
            num_shared_classes=7,
            block_bytes=block_bytes,
        ).total

    assert torch.autograd.gradcheck(total, leaves(student))


@pytest.mark.parametrize("rows", [7, 17])
def test_ready_scores_give_the_same_loss_and_gradient_as_their_factors(rows):
    student, teacher, labels = make_scored(rows, 4, 9), make_scored(rows, 6, 9, seed=5), make_labels(rows, 9)
    student_scores = student.scores().detach().requires_grad_()
    whole = vocabulary_loss(
        Scored(student_scores),
        labels=labels,
        teacher=Scored(teacher.scores()),
        distill_weight=0.5,
        block_bytes=4 * 9 * 2,
    )
    parts = vocabulary_loss(student, labels=labels, teacher=teacher, distill_weight=0.5)
    torch.testing.assert_close(whole.total, parts.total)
    mixed = vocabulary_loss(student, labels=labels, teacher=Scored(teacher.scores()), distill_weight=0.5)
    torch.testing.assert_close(mixed.total, parts.total)
    ce, kl = plain_terms(student_scores, labels, teacher.scores().detach(), 2.0, 9)
    wanted = torch.autograd.grad(ce + 0.5 * kl, student_scores)
    torch.testing.assert_close(torch.autograd.grad(whole.total, student_scores), wanted)


def test_a_weight_that_is_also_an_embedding_collects_both_gradients():
    weight = torch.randn(20, 6).requires_grad_()
    ids, labels = torch.tensor([3, 1, 3, 7]), torch.tensor([2, 3, -100, 3])
    ours = vocabulary_loss(Scored(F.embedding(ids, weight).tanh(), weight), labels=labels).total
    plain = F.cross_entropy(F.embedding(ids, weight).tanh() @ weight.t(), labels, reduction="sum")
    torch.testing.assert_close(
        torch.autograd.grad(ours, weight), torch.autograd.grad(plain, weight), atol=1e-5, rtol=1e-5
    )


def test_the_documented_example_of_two_classes_has_its_numbers():
    student, teacher = torch.zeros(1, 2), torch.tensor([[2 * math.log(3), 0.0]])
    loss = vocabulary_loss(
        Scored(student),
        labels=torch.tensor([0]),
        teacher=Scored(teacher),
        mlm_weight=2.0,
        distill_weight=5.0,
        temperature=2.0,
    )
    cosine = cosine_loss(torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 1.0]]))
    assert loss.ce_sum.item() == pytest.approx(0.693147, abs=1e-6)
    assert loss.kl_sum.item() == pytest.approx(0.523248, abs=1e-6)
    assert cosine.item() == pytest.approx(1.0)
    assert (loss.total + cosine).item() == pytest.approx(5.002535, abs=1e-5)


def test_swapping_student_and_teacher_changes_the_divergence():
    peaked, flat = Scored(torch.tensor([[2 * math.log(3), 0.0]])), Scored(torch.zeros(1, 2))
    labels = torch.tensor([0])
    forward = vocabulary_loss(flat, labels=labels, teacher=peaked, distill_weight=1.0).kl_sum
    swapped = vocabulary_loss(peaked, labels=labels, teacher=flat, distill_weight=1.0).kl_sum
    assert forward.item() == pytest.approx(0.523248, abs=1e-6)
    assert swapped.item() == pytest.approx(0.575364, abs=1e-6)  # 4 · (ln(2/3) + ln 2) / 2


@pytest.mark.parametrize("temperature", [1.0, 2.0, 3.0])
def test_equal_scores_have_no_divergence(temperature):
    student = make_scored(6, 4, 9)
    loss = vocabulary_loss(
        student, labels=make_labels(6, 9), teacher=student, mlm_weight=0.0, distill_weight=1.0, temperature=temperature
    )
    assert loss.kl_sum.item() == 0.0
    for gradient in torch.autograd.grad(loss.total, leaves(student)):
        assert gradient.abs().max() < 1e-6


@pytest.mark.parametrize("distill_weight", [0.0, 0.5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_rows_give_zero_loss_and_zero_gradients(distill_weight, dtype):
    student, teacher = make_scored(0, 4, 9, dtype=dtype), make_scored(0, 4, 9, dtype=dtype)
    labels = torch.empty(0, dtype=torch.int64)
    loss = vocabulary_loss(student, labels=labels, teacher=teacher, distill_weight=distill_weight)
    loss.total.backward()
    assert loss.total.item() == 0.0
    for leaf in leaves(student):
        assert leaf.grad is not None
        assert leaf.grad.dtype == dtype
        assert not leaf.grad.any()


def test_rows_without_label_give_no_cross_entropy():
    student = make_scored(3, 4, 9)
    loss = vocabulary_loss(student, labels=torch.full((3,), -100), with_accuracy=True)
    loss.total.backward()
    assert (loss.total.item(), loss.num_correct.item()) == (0.0, 0)
    assert all(not leaf.grad.any() for leaf in leaves(student))


def test_huge_scores_stay_finite_and_a_constant_changes_nothing():
    scores = torch.tensor([[1e4, -1e4, 0.0, 9999.0], [-1e4, -1e4, -1e4, 1e4]])
    teacher = torch.tensor([[0.0, 1e4, -1e4, 1.0], [-1e4, 0.0, 0.0, 0.0]])

    def run(constant: float) -> tuple[VocabularyLoss, Tensor]:
        student = (scores + constant).requires_grad_()
        loss = vocabulary_loss(
            Scored(student),
            labels=torch.tensor([1, 3]),
            teacher=Scored(teacher - constant),
            distill_weight=1.0,
            num_shared_classes=3,
        )
        return loss, torch.autograd.grad(loss.total, student)[0]

    (loss, gradient), (moved_loss, moved_gradient) = run(0.0), run(64.0)
    assert torch.isfinite(loss.total)
    assert torch.isfinite(gradient).all()
    torch.testing.assert_close(moved_loss.total, loss.total)
    torch.testing.assert_close(moved_gradient, gradient)
    ce, kl = plain_terms(scores, torch.tensor([1, 3]), teacher, 2.0, 3)
    torch.testing.assert_close(loss.total, ce + kl)


@pytest.mark.parametrize("part_bytes", [4 * 2**20, 16], ids=["one part", "class by class"])
@pytest.mark.parametrize("without", [[0, 1], [8, 9], [3]])
def test_a_class_that_the_teacher_rules_out_adds_nothing(monkeypatch, without, part_bytes):
    monkeypatch.setattr(block_losses, "_PART_BYTES", part_bytes)
    student, teacher = make_scored(6, 5, 10), make_scored(6, 5, 10, seed=2)
    teacher.bias.data[without] = -math.inf
    loss = vocabulary_loss(student, teacher=teacher, labels=make_labels(6, 10), distill_weight=1.0, temperature=2.0)
    loss.total.backward()
    ce, kl = plain_terms(student.scores(), make_labels(6, 10), teacher.scores().detach(), 2.0, 10)
    torch.testing.assert_close(loss.kl_sum, kl.detach())
    expected = torch.autograd.grad(ce + kl, leaves(student))
    for leaf, gradient in zip(leaves(student), expected, strict=True):
        torch.testing.assert_close(leaf.grad, gradient)


def test_accuracy_counts_labelled_rows_only_where_it_is_asked_for():
    scores = torch.tensor([[0.0, 1.0], [2.0, 1.0], [0.0, 3.0]])
    labels = torch.tensor([1, 1, -100])
    assert vocabulary_loss(Scored(scores), labels=labels, with_accuracy=True, mlm_weight=0.0).num_correct.item() == 1
    assert vocabulary_loss(Scored(scores), labels=labels).num_correct.item() == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("block_bytes", [None, 4 * 50 * 4])
def test_half_precision_keeps_tiny_weights_and_float32_gradients(dtype, block_bytes):
    student, teacher, labels = make_scored(12, 8, 50), make_scored(12, 8, 50, seed=5), make_labels(12, 50)
    weights = {"mlm_weight": 1e-9, "distill_weight": 1e-9}  # far below float16's smallest number
    with torch.autocast("cpu", dtype=dtype):
        loss = vocabulary_loss(student, labels=labels, teacher=teacher, block_bytes=block_bytes, **weights)
    got = [1e9 * gradient for gradient in torch.autograd.grad(loss.total, leaves(student))]
    ce, kl = plain_terms(student.scores(), labels, teacher.scores().detach(), 2.0, 50)
    wanted = torch.autograd.grad(ce + kl, leaves(student))
    assert loss.total.dtype == torch.float32
    for ours, reference in zip(got, wanted, strict=True):
        assert ours.dtype == torch.float32
        assert (ours - reference).norm() < 0.03 * reference.norm()


def test_half_features_with_float32_weights_return_each_its_own_type():
    student = make_scored(6, 8, 20)
    half = student.features.detach().to(torch.float16).requires_grad_()
    gradients = torch.autograd.grad(
        vocabulary_loss(Scored(half, student.weight, student.bias), labels=make_labels(6, 20)).total,
        (half, student.weight, student.bias),
    )
    assert [gradient.dtype for gradient in gradients] == [torch.float16, torch.float32, torch.float32]


def test_the_teacher_is_not_touched_without_its_weight():
    poisoned = Scored(torch.full((2, 3), math.nan), torch.full((5, 3), math.nan))
    student = make_scored(2, 3, 9)
    loss = vocabulary_loss(student, labels=torch.tensor([1, 2]), teacher=poisoned, distill_weight=0.0)
    assert torch.isfinite(loss.total)


def test_nothing_is_differentiated_that_nobody_asked_for():
    student, teacher = make_scored(4, 3, 9), make_scored(4, 3, 9, seed=5)
    frozen = Scored(student.features, student.weight.detach(), student.bias.detach())
    loss = vocabulary_loss(frozen, labels=make_labels(4, 9), teacher=teacher, distill_weight=1.0)
    loss.total.backward()
    assert student.features.grad.abs().sum() > 0
    assert student.weight.grad is None
    assert all(leaf.grad is None for leaf in leaves(teacher))


def test_evaluation_computes_scores_only():
    student = make_scored(4, 3, 9)
    with torch.no_grad(), Recorder() as recorded:
        loss = vocabulary_loss(student, labels=make_labels(4, 9))
    assert not loss.total.requires_grad
    assert recorded.products == 1


def test_no_tensor_is_larger_than_a_block_or_the_weight():
    rows, width, classes = 256, 4, 100
    student, teacher = make_scored(rows, width, classes), make_scored(rows, width, classes, seed=5)
    with Recorder() as recorded:
        vocabulary_loss(
            student,
            labels=make_labels(rows, classes),
            teacher=teacher,
            distill_weight=1.0,
            block_bytes=4 * classes * 16,
        ).total.backward()
    assert recorded.numel == classes * 16


def test_without_a_size_a_block_takes_64_mib_at_most():
    student = make_scored(100, 2, 200_000)  # 76 MiB of scores
    with Recorder() as recorded:
        vocabulary_loss(student, labels=make_labels(100, 200_000), teacher=student, distill_weight=1.0)
    assert recorded.numel == 64 * 200_000  # 49 MiB: more rows than half of them for a multiple of 16


@pytest.mark.parametrize(("rows", "blocks"), [(9, 9), (16, 16), (33, 48)])
def test_products_have_a_multiple_of_16_rows_where_there_are_as_many(rows, blocks):
    with Recorder() as recorded:
        vocabulary_loss(make_scored(rows, 2, 1000), labels=make_labels(rows, 1000)).total.backward()
    assert recorded.numel == blocks * 1000


def test_padding_never_makes_a_block_larger_than_its_size():
    student = make_scored(100, 2, 50)
    with Recorder() as recorded:  # 100 rows in four blocks are 25 each: 32 would be too many
        vocabulary_loss(student, labels=make_labels(100, 50), block_bytes=4 * 50 * 31)
    assert recorded.numel == 16 * 50


def test_distilling_holds_one_block_of_scores_for_each_model(monkeypatch):
    rows, classes = 64, 1000
    monkeypatch.setattr(block_losses, "_PART_BYTES", 4 * rows * 10)
    student, teacher = make_scored(rows, 2, classes), make_scored(rows, 2, classes, seed=5)
    with Recorder() as recorded:
        vocabulary_loss(student, labels=make_labels(rows, classes), teacher=teacher, distill_weight=1.0)
    assert recorded.made.count(rows * classes) == 2


def test_a_second_backward_gives_the_same_gradient():
    student = make_scored(4, 3, 9)
    loss = vocabulary_loss(student, labels=make_labels(4, 9), block_bytes=4 * 9)
    first = torch.autograd.grad(loss.total, leaves(student), retain_graph=True)
    torch.testing.assert_close(torch.autograd.grad(loss.total, leaves(student)), first, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"labels": torch.zeros(3, dtype=torch.int64)}, "labels"),
        ({"teacher": None}, "teacher"),
        ({"temperature": 0.0}, "temperature"),
        ({"num_shared_classes": 10}, "num_shared_classes"),
        ({"num_shared_classes": None, "teacher": make_scored(4, 3, 11)}, "num_shared_classes"),
        ({"teacher": make_scored(5, 3, 9)}, "teacher"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(change, named):
    arguments = {
        "labels": make_labels(4, 9),
        "teacher": make_scored(4, 3, 9),
        "distill_weight": 1.0,
        "num_shared_classes": 9,
    }
    with pytest.raises(ValueError, match=f"^{named} must"):
        vocabulary_loss(make_scored(4, 3, 9), **(arguments | change))


def test_cosine_loss_ignores_length_and_equals_the_reference():
    student, teacher = torch.randn(5, 7), torch.randn(5, 7)
    expected = (1 - F.cosine_similarity(student, teacher)).sum()
    torch.testing.assert_close(cosine_loss(3 * student, 0.1 * teacher), expected)
    assert cosine_loss(student.bfloat16(), teacher.bfloat16()).dtype == torch.float32


def test_a_zero_vector_counts_one_and_gets_a_finite_gradient():
    student = torch.zeros(2, 4, requires_grad=True)
    loss = cosine_loss(student, torch.stack([torch.ones(4), torch.zeros(4)]))
    loss.backward()
    assert loss.item() == 2.0
    assert torch.isfinite(student.grad).all()


def test_mse_loss_is_the_mean_over_the_width_and_the_sum_over_rows():
    assert mse_loss(torch.tensor([[1.0, 3.0], [0.0, 0.0]]), torch.tensor([[0.0, 0.0], [2.0, 0.0]])).item() == 7.0
    assert mse_loss(torch.zeros(0, 3), torch.zeros(0, 3)).item() == 0.0


def test_hidden_states_of_two_widths_are_refused():
    with pytest.raises(ValueError, match="project the student"):
        mse_loss(torch.zeros(2, 3), torch.zeros(2, 4))
