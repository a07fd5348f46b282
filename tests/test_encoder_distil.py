"""Distillation of hidden states: both distances over attended tokens only, whatever the widths."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback
from torch import nn
from transformers import BertModel
from transformers.modeling_outputs import BaseModelOutput

from foundry_lightning import DataPipeline, EncoderDistillConfig, EncoderDistillTrainer
from tests.conftest import texts, tiny_bert

QUIET = {"progress_bar": False, "device": "cpu", "log_every": 1}


def encoder(hidden_size: int = 16, *, seed: int = 0, dropout: float = 0.0, **config) -> BertModel:
    return tiny_bert(30, seed=seed, dropout=dropout, hidden_size=hidden_size, **config).bert


class Table(nn.Module):
    """An encoder whose hidden states are the rows of a table."""

    def __init__(self, hidden) -> None:
        super().__init__()
        self.states = nn.Embedding.from_pretrained(torch.as_tensor(hidden, dtype=torch.float32), freeze=False)

    def forward(self, input_ids, attention_mask=None):
        return BaseModelOutput(last_hidden_state=self.states(input_ids))


def trainer_of(student, teacher, **config) -> EncoderDistillTrainer:
    return EncoderDistillTrainer(student, teacher, EncoderDistillConfig(**{**QUIET, **config}))


def ready(sizes=((3, 12), (2, 9)), *, seed: int = 3) -> list[dict[str, torch.Tensor]]:
    """Batches (rows, length) of random ids; the last row of each has padding."""
    generator = torch.Generator().manual_seed(seed)
    batches = []
    for rows, length in sizes:
        ids = torch.randint(5, 27, (rows, length), generator=generator)
        if rows > 1:
            ids[-1, -3:] = 0
        batches.append({"input_ids": ids, "attention_mask": (ids != 0).long()})
    return batches


# student (3, 4) against (0, 2) and (4, 3): squares 9 + 4 and 1 + 1, cosines 8/10 and 24/25
HAND = {"mse": ((13 / 2) + (2 / 2)) / 2, "cosine": ((1 - 0.8) + (1 - 0.96)) / 2}


@pytest.mark.parametrize("loss", HAND)
@pytest.mark.parametrize("padding", [[], [2], [3, 3, 2, 1, 3]])
def test_the_distance_is_that_of_the_hand_over_attended_tokens_only(loss, padding):
    student = Table([[3.0, 4.0], [3.0, 4.0], [70.0, -9.0], [0.0, 0.0]])
    teacher = Table([[0.0, 2.0], [4.0, 3.0], [-5.0, 6.0], [1.0, 1.0]])
    ids = torch.tensor([[0, 1, *padding]])
    batch = {"input_ids": ids, "attention_mask": (torch.arange(ids.shape[1]) < 2).long().unsqueeze(0)}
    trainer = trainer_of(student, teacher, loss=loss)
    assert trainer.evaluate([batch]) == pytest.approx({"loss": HAND[loss]}, abs=1e-6)
    assert trainer.train([batch])["losses"] == pytest.approx([HAND[loss]], abs=1e-6)


def test_the_evaluation_divides_once_by_all_attended_tokens():
    student = Table([[0.0], [0.0]])
    teacher = Table([[1.0], [2.0]])
    trainer = trainer_of(student, teacher)
    batches = [{"input_ids": ids, "attention_mask": torch.ones_like(ids)} for ids in UNEVEN]
    assert trainer.evaluate(batches)["loss"] == pytest.approx((1 + 9 * 4) / 10)


UNEVEN = [torch.tensor([[0]]), torch.tensor([[1] * 9])]


def trained(trainer) -> list[nn.Parameter]:
    return [p for part in trainer.module.trained_modules() for p in part.parameters()]


class Gradients(Callback):
    """Keeps the gradients of the first update."""

    def on_before_optimizer_step(self, trainer, module, optimizer):
        if not trainer.global_step:
            parameters = [p for part in module.trained_modules() for p in part.parameters()]
            self.seen = [None if p.grad is None else p.grad.clone() for p in parameters]


@pytest.mark.parametrize("loss", ["mse", "cosine"])
@pytest.mark.parametrize("width", [8, 16, 24])
def test_value_and_gradients_equal_the_plain_formula(loss, width):
    student, teacher, watch = encoder(width), encoder(seed=9, dropout=0.1), Gradients()
    kwargs = {"callbacks": [watch]}
    trainer = trainer_of(student, teacher, loss=loss, max_grad_norm=0.0, learning_rate=0.0, trainer_kwargs=kwargs)
    projector = trainer.module.projector
    assert (projector is None) == (width == 16)
    (batch,) = ready(((4, 13),))
    (value,) = trainer.train([batch])["losses"]
    attended = batch["attention_mask"].bool()
    ours, theirs = student(**batch).last_hidden_state[attended], teacher(**batch).last_hidden_state[attended]
    ours = ours if projector is None else ours @ projector.weight.T
    expected = F.mse_loss(ours, theirs) if loss == "mse" else 1 - F.cosine_similarity(ours, theirs, dim=-1).mean()
    assert value == pytest.approx(expected.item(), rel=1e-5)
    gradients = torch.autograd.grad(expected, trained(trainer), allow_unused=True)
    for seen, wanted in zip(watch.seen, gradients, strict=True):
        assert (seen is None) == (wanted is None)
        assert seen is None or torch.allclose(seen, wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("loss", ["mse", "cosine"])
def test_the_gradient_of_an_uneven_window_is_that_of_its_rows_as_one_batch(loss):
    batches = ready(((1, 7), (3, 20), (2, 11)))
    whole = {
        name: torch.cat([F.pad(batch[name], (0, 20 - batch[name].shape[1])) for batch in batches])
        for name in ("input_ids", "attention_mask")
    }

    def gradient(data, accumulation: int) -> torch.Tensor:
        watch = Gradients()
        settings = {"max_grad_norm": 0.0, "grad_accumulation_steps": accumulation, "loss": loss}
        trainer = trainer_of(encoder(8).double(), encoder(seed=9), **settings, trainer_kwargs={"callbacks": [watch]})
        trainer.train(data)
        return torch.cat([gradient.flatten() for gradient in watch.seen if gradient is not None])

    window, one = gradient(batches, 3), gradient([whole], 1)
    assert one.norm() > 0
    assert (window - one).norm() <= 1e-6 * one.norm()


def run(tokenizer, *, resume=None, train=None, width: int = 8, teacher=None, **config) -> SimpleNamespace:
    teacher = encoder(seed=9, dropout=0.1) if teacher is None else teacher
    trainer = trainer_of(encoder(width, dropout=0.1), teacher, **{"learning_rate": 1e-3, **config})
    if resume is not None:
        trainer.resume_from_checkpoint(resume)
    result = trainer.train(DataPipeline(texts(24), tokenizer, batch_size=4, max_length=32), **(train or {}))
    weights = torch.cat([p.detach().flatten() for p in trained(trainer)])
    return SimpleNamespace(trainer=trainer, result=result, weights=weights)


def test_the_projector_is_trained_saved_and_restored(tokenizer, tmp_path):
    whole = run(tokenizer, epochs=2, lr_scheduler="constant")
    start = trainer_of(encoder(8), encoder(seed=9)).module.projector.weight
    assert not torch.equal(start, whole.trainer.module.projector.weight)
    partly = run(tokenizer, epochs=2, lr_scheduler="constant", train={"total_steps": 8})
    path = partly.trainer.save_checkpoint(tmp_path)
    state = torch.load(path, weights_only=True)["state_dict"]
    assert torch.equal(state["projector.weight"], partly.trainer.module.projector.weight)
    assert not [key for key in state if "teacher" in key]
    resumed = run(tokenizer, epochs=2, lr_scheduler="constant", resume=path)
    assert torch.equal(resumed.weights, whole.weights)
    assert resumed.result["losses"] == whole.result["losses"][8:]


def test_a_resumed_checkpoint_evaluates_alike(tokenizer, tmp_path):
    done = run(tokenizer)
    held_out = DataPipeline(texts(6, seed=7), tokenizer, batch_size=4, max_length=32)
    path = done.trainer.save_checkpoint(tmp_path)
    fresh = trainer_of(encoder(8, seed=5, dropout=0.1), encoder(seed=9), seed=1)
    fresh.resume_from_checkpoint(path)
    assert fresh.evaluate(held_out) == done.trainer.evaluate(held_out)


def test_the_student_is_trained_in_place_and_the_teacher_is_not(tokenizer):
    student, teacher = encoder(8, dropout=0.1), encoder(seed=9, dropout=0.1).train()
    before, modes = [p.clone() for p in teacher.parameters()], []
    teacher.encoder.register_forward_pre_hook(lambda module, _: modes.append(module.training))
    trainer = trainer_of(student, teacher, weight_decay=0.5, learning_rate=1e-2)
    start = [p.clone() for p in student.parameters()]
    pipe = DataPipeline(texts(24), tokenizer, batch_size=4, max_length=32)
    trainer.train(pipe, on_step=lambda step, loss: teacher.train())
    assert trainer.student is student
    assert not any(module.training for module in student.modules())
    assert any(not torch.equal(p, old) for p, old in zip(student.parameters(), start, strict=True))
    assert all(torch.equal(p, old) for p, old in zip(teacher.parameters(), before, strict=True))
    assert len(modes) >= 6
    assert not any(modes)


def test_training_brings_the_student_closer_on_held_out_texts(tokenizer):
    held_out = DataPipeline(texts(6, seed=7), tokenizer, batch_size=4, max_length=32)
    result = run(tokenizer, epochs=4, eval_every=12, learning_rate=1e-2, train={"eval_dataset": held_out}).result
    losses = list(result["eval_losses"].values())
    assert list(result["eval_losses"]) == [12, 24]
    first = run(tokenizer, learning_rate=0.0).trainer.evaluate(held_out)["loss"]
    assert losses[-1] < 0.8 * first


@pytest.mark.parametrize(("field", "value"), [("loss", "cosine"), ("seed", 0), ("teacher_dtype", "bfloat16")])
def test_a_field_changes_the_trained_weights(tokenizer, field, value):
    settings = {"train": {"total_steps": 2}}
    assert not torch.equal(run(tokenizer, **settings).weights, run(tokenizer, **settings, **{field: value}).weights)


@pytest.mark.parametrize("place", ["student", "teacher"])
def test_a_model_without_last_hidden_state_is_refused(place):
    models = {"student": encoder(), "teacher": encoder(seed=9), place: tiny_bert()}
    with pytest.raises(ValueError, match=rf"{place} must return \.last_hidden_state, got MaskedLMOutput"):
        EncoderDistillTrainer(models["student"], models["teacher"])


@pytest.mark.parametrize("place", ["student", "teacher"])
def test_what_is_no_module_is_a_type_error(place):
    models = {"student": encoder(), "teacher": encoder(seed=9), place: "bert-base-uncased"}
    with pytest.raises(TypeError, match=f"{place} must be .*got str"):
        EncoderDistillTrainer(models["student"], models["teacher"])


def test_the_student_as_its_own_teacher_is_refused():
    model = encoder()
    with pytest.raises(ValueError, match="two models"):
        EncoderDistillTrainer(model, model)


@pytest.mark.parametrize("place", ["student", "teacher"])
def test_a_model_that_cannot_embed_the_tokenizers_ids_is_refused_before_training(tokenizer, place):
    small = tiny_bert(20, hidden_size=16).bert
    models = {"student": encoder(), "teacher": encoder(seed=9), place: small}
    trainer = trainer_of(models["student"], models["teacher"])
    with pytest.raises(ValueError, match=rf"go up to token id 26, the {place} embeds ids below 20"):
        trainer.train(DataPipeline(texts(4), tokenizer, batch_size=4, max_length=32))


def test_a_teacher_without_parameters_is_a_teacher():
    class Constant(nn.Module):
        def forward(self, input_ids, attention_mask=None):
            return BaseModelOutput(last_hidden_state=torch.ones(*input_ids.shape, 16))

    assert len(trainer_of(encoder(), Constant()).train(ready())["losses"]) == 2
