"""Distillation: the documented numbers, the published formula, and a teacher that nothing changes."""

from __future__ import annotations

import copy
import math
from types import SimpleNamespace

import lightning
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback
from torch import nn
from transformers import (
    AutoModelForMaskedLM,
    AutoTokenizer,
    DistilBertConfig,
    DistilBertForMaskedLM,
    PreTrainedTokenizerFast,
)
from transformers.modeling_outputs import MaskedLMOutput

from foundry_lightning import DataPipeline, DistilMLMConfig, DistilMLMLitModule, DistilMLMTrainer, MLMDataModule
from foundry_lightning.students import FromPretrained
from tests.conftest import BiasStudent, texts, tiny_bert

QUIET = {"progress_bar": False, "device": "cpu"}
IDS = {"mask_token_id": 4, "vocab_size": 30, "special_token_ids": (0, 1, 2, 3), **QUIET}
EXACT = {"weight_decay": 0.0, "max_grad_norm": 0.0, "lr_scheduler": "constant", "learning_rate": 1e-3}


class Lookup(nn.Module):
    """A masked language model whose hidden states are a table's rows and whose scores are a product with them."""

    def __init__(self, hidden, weight, *, plain: bool = False) -> None:
        super().__init__()
        self.base_model = nn.Embedding.from_pretrained(torch.as_tensor(hidden).clone(), freeze=False)
        self.decoder = nn.Linear(*reversed(weight.shape), bias=False)
        self.decoder.weight = nn.Parameter(weight.clone())
        self.plain = plain

    def forward(self, input_ids, attention_mask=None):
        logits = self.decoder(self.base_model(input_ids))
        return MaskedLMOutput(logits=logits + 0 if self.plain else logits)  # a sum: the head is no last Linear


def measured(student, teacher, batches, **config) -> dict[str, float]:
    """All that an evaluation logs, without `val/`."""
    module = DistilMLMLitModule(student, teacher, config=DistilMLMConfig(**{**IDS, **config}))
    trainer = lightning.Trainer(accelerator="cpu", logger=False, enable_progress_bar=False, enable_checkpointing=False)
    trainer.validate(module, datamodule=MLMDataModule(train=None, val=batches), verbose=False)
    return {name.removeprefix("val/"): float(value) for name, value in trainer.callback_metrics.items()}


# ------------------------------------------------------------------ the documented numbers


def documented(num_padded: int = 0, *, plain: bool = False):
    """Student, teacher and batch of DESIGN section 7, with places of random content behind the one that counts."""
    noise = torch.Generator().manual_seed(5)
    models = []
    for state, column in (([1.0, 0.0], [0.0, 0.0]), ([0.0, 1.0], [2 * math.log(3), 0.0])):
        hidden, weight = torch.randn(2, 2, generator=noise), torch.randn(2, 2, generator=noise)
        hidden[1] = torch.tensor(state)
        weight[:, state.index(1.0)] = torch.tensor(column)
        models.append(Lookup(hidden, weight, plain=plain))
    padding = torch.randint(2, (1, num_padded), generator=noise)
    batch = {"input_ids": torch.cat([torch.tensor([[1]]), padding], 1)}
    batch["attention_mask"] = (torch.arange(num_padded + 1) == 0).long().unsqueeze(0)
    batch["labels"] = torch.where(batch["attention_mask"] == 1, 0, -100)
    return *models, batch


TWO_CLASSES = {
    "mask_token_id": 1,
    "vocab_size": 2,
    "special_token_ids": (),
    "random_replace_prob": 0.0,
    **QUIET,
    "mlm_weight": 2.0,
    "distill_weight": 5.0,
    "cosine_weight": 1.0,
    "temperature": 2.0,
}


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("num_padded", [0, 100])
def test_the_documented_numbers_hold_with_and_without_padding(num_padded, plain):
    student, teacher, batch = documented(num_padded, plain=plain)
    got = measured(student, teacher, [batch], **TWO_CLASSES)
    expected = {"mlm": 0.693147, "distill": 0.523248, "cosine": 1.0, "loss": 5.002535}
    assert {name: got[name] for name in expected} == pytest.approx(expected, abs=3e-6)
    trainer = DistilMLMTrainer(student, teacher, None, DistilMLMConfig(**TWO_CLASSES))
    assert trainer.evaluate([batch])["loss"] == pytest.approx(5.002535, abs=3e-6)
    assert trainer.train([batch])["losses"] == pytest.approx([5.002535], abs=3e-6)


@pytest.mark.parametrize(
    ("weight", "expected"),
    [
        ("mlm_weight", 2 * math.log(2)),
        ("distill_weight", 5 * 4 * math.log(2) - 5 * 4 * (math.log(4) - 0.75 * math.log(3))),
        ("cosine_weight", 1.0),
    ],
)
def test_each_weight_alone_isolates_its_term(weight, expected):
    others = dict.fromkeys({"mlm_weight", "distill_weight", "cosine_weight"} - {weight}, 0.0)
    student, teacher, batch = documented(7)
    trainer = DistilMLMTrainer(student, teacher, None, DistilMLMConfig(**{**TWO_CLASSES, **others}))
    assert trainer.evaluate([batch])["loss"] == pytest.approx(expected, abs=3e-6)
    assert trainer.train([batch])["losses"] == pytest.approx([expected], abs=3e-6)


def test_swapping_student_and_teacher_changes_the_divergence():
    student, teacher, batch = documented()
    swapped = measured(teacher, student, [batch], **TWO_CLASSES)["distill"]
    # KL((1/2, 1/2) ‖ (3/4, 1/4)) · T²
    assert swapped == pytest.approx(4 * (0.5 * math.log(2 / 3) + 0.5 * math.log(2)), abs=1e-6)


def test_equal_scores_and_states_have_no_divergence_and_no_cosine():
    model = tiny_bert()
    got = measured(model, copy.deepcopy(model), ready(), distill_on="all")
    assert got["distill"] == pytest.approx(0, abs=1e-7)
    assert got["cosine"] == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("shifted", ["student", "teacher"])
def test_a_constant_added_to_a_row_of_scores_changes_nothing(shifted):
    models = {"student": tiny_bert(seed=1, **SHARP), "teacher": tiny_bert(seed=2, **SHARP)}
    before = measured(*models.values(), ready())
    with torch.no_grad():
        models[shifted].cls.predictions.bias += 3.0
    assert measured(*models.values(), ready()) == pytest.approx(before, abs=1e-5)


# ------------------------------------------------------------------ parity with the published formula


def ready(sizes=((3, 12), (2, 9)), *, seed: int = 3) -> list[dict[str, torch.Tensor]]:
    """Batches (rows, length) of random ordinary ids; the last row of each has padding."""
    generator = torch.Generator().manual_seed(seed)
    batches = []
    for rows, length in sizes:
        ids = torch.randint(5, 27, (rows, length), generator=generator)
        if rows > 1:
            ids[-1, -3:] = 0
        batches.append({"input_ids": ids, "attention_mask": (ids != 0).long()})
    return batches


SHARP = {"initializer_range": 0.3}  # scores far from uniform, so that every factor of a term shows


def distilbert(vocab_size: int = 30, dim: int = 16) -> DistilBertForMaskedLM:
    torch.manual_seed(4)
    settings = {"n_layers": 1, "n_heads": 2, "hidden_dim": 32, "max_position_embeddings": 64, **SHARP}
    return DistilBertForMaskedLM(
        DistilBertConfig(vocab_size=vocab_size, dim=dim, dropout=0.0, attention_dropout=0.0, **settings)
    )


def published(student, teacher, projector, masked, config) -> torch.Tensor:
    """The objective as olaverse-foundry 0.3.0 documents DistilBERT's, from whole scores and padded states."""
    inputs = {"input_ids": masked.input_ids, "attention_mask": masked.attention_mask, "output_hidden_states": True}
    ours = student(**inputs)
    with torch.no_grad():
        theirs = teacher(**inputs)
    attended, labels = masked.attention_mask.bool(), masked.dense_labels
    chosen = labels != -100 if config.distill_on == "masked" else attended
    width = ours.logits.dtype
    ce = F.cross_entropy(ours.logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
    kl = F.kl_div(
        F.log_softmax(ours.logits[chosen] / config.temperature, -1),
        F.softmax(theirs.logits[chosen].to(width) / config.temperature, -1),
        reduction="batchmean",
    )
    states, targets = ours.hidden_states[-1][attended], theirs.hidden_states[-1][attended].to(width)
    states = states if projector is None else states @ projector.weight.T
    cosine = 1 - F.cosine_similarity(states, targets, dim=-1).mean()
    return config.mlm_weight * ce + config.distill_weight * config.temperature**2 * kl + config.cosine_weight * cosine


class Reference(Callback):
    """Makes the first update beside the module, by the published formula, on the batch the module masks."""

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if trainer.global_step:
            return
        student, projector = copy.deepcopy(module.student), copy.deepcopy(module.projector)
        parameters = [*student.parameters(), *([] if projector is None else projector.parameters())]
        loss = published(student, copy.deepcopy(module.teacher), projector, module.mask(batch), module.config)
        loss.backward()
        self.loss = loss.item()
        self.gradients = [None if p.grad is None else p.grad.clone() for p in parameters]
        torch.optim.AdamW(parameters, lr=module.config.learning_rate, weight_decay=0.0).step()
        self.updated = [p.detach().clone() for p in parameters]

    def on_before_optimizer_step(self, trainer, module, optimizer):
        if not trainer.global_step:
            self.seen = [p.grad for p in trained(module)]


def trained(module) -> list[nn.Parameter]:
    return [p for part in module.trained_modules() for p in part.parameters()]


STUDENTS = {
    "equal widths": lambda: tiny_bert(dropout=0.0, num_hidden_layers=1, **SHARP),
    "narrower": lambda: tiny_bert(dropout=0.0, hidden_size=8, **SHARP),
    "wider": lambda: tiny_bert(dropout=0.0, hidden_size=24, **SHARP),
    "distilbert": distilbert,
    "narrower distilbert": lambda: distilbert(dim=8),
}


@pytest.mark.parametrize("distill_on", ["masked", "all"])
@pytest.mark.parametrize("student", STUDENTS)
def test_value_gradients_and_one_update_equal_the_published_formula(student, distill_on):
    # float64: AdamW's first update is the gradient's sign, which rounding decides where a gradient is zero
    student, teacher, reference = STUDENTS[student]().double(), tiny_bert(seed=9, **SHARP), Reference()
    config = DistilMLMConfig(
        **IDS, **EXACT, distill_on=distill_on, temperature=3.0, mask_prob=0.3, trainer_kwargs={"callbacks": [reference]}
    )
    trainer = DistilMLMTrainer(student, teacher, None, config)
    result = trainer.train(ready(((4, 14),)))
    assert result["losses"] == pytest.approx([reference.loss], abs=1e-5)
    assert (trainer.module.projector is None) == (student.config.hidden_size == 16)
    for seen, expected in zip(reference.seen, reference.gradients, strict=True):
        assert (seen is None) == (expected is None)
        assert seen is None or torch.allclose(seen, expected, atol=1e-5, rtol=1e-5)
    for parameter, expected in zip(trained(trainer.module), reference.updated, strict=True):
        assert torch.allclose(parameter, expected, atol=1e-5)


def gradient(batches, accumulation: int, **config) -> torch.Tensor:
    """The gradient of the first update, of student and projector."""
    seen = []

    class Watch(Callback):
        def on_before_optimizer_step(self, trainer, module, optimizer):
            seen.extend(p.grad.flatten() for p in trained(module) if p.grad is not None)

    settings = {**IDS, **EXACT, "mask_prob": 0.3, "grad_accumulation_steps": accumulation, **config}
    student = tiny_bert(dropout=0.0, hidden_size=8, **SHARP).double()
    kwargs = {"callbacks": [Watch()]}
    trainer = DistilMLMTrainer(
        student, tiny_bert(seed=9, **SHARP), None, DistilMLMConfig(**settings, trainer_kwargs=kwargs)
    )
    trainer.train(batches, total_steps=1)
    return torch.cat(seen)


@pytest.mark.parametrize(
    "weights", [(1, 0, 0), (0, 1, 0), (0, 0, 1), (2, 5, 1)], ids=["mlm", "distill", "cosine", "all three"]
)
@pytest.mark.parametrize("distill_on", ["masked", "all"])
def test_the_gradient_of_an_uneven_window_is_that_of_its_rows_as_one_batch(weights, distill_on):
    batches = ready(((1, 7), (3, 20), (2, 11)))
    whole = {
        name: torch.cat([F.pad(batch[name], (0, 20 - batch[name].shape[1])) for batch in batches])
        for name in ("input_ids", "attention_mask")
    }
    config = dict(zip(("mlm_weight", "distill_weight", "cosine_weight"), map(float, weights), strict=True))
    window = gradient(batches, 3, distill_on=distill_on, **config)
    one = gradient([whole], 1, distill_on=distill_on, **config)
    assert one.norm() > 0
    assert (window - one).norm() <= 1e-6 * one.norm()


# ------------------------------------------------------------------ the teacher


def bits(model) -> dict[str, bytes]:
    return {name: value.detach().numpy().tobytes() for name, value in model.state_dict().items()}


def weights(trainer) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in trained(trainer.module)])


def run(tokenizer, *, data=None, train=None, student=None, teacher=None, resume=None, **config) -> SimpleNamespace:
    student = tiny_bert(len(tokenizer), hidden_size=8) if student is None else student
    teacher = tiny_bert(len(tokenizer), seed=9) if teacher is None else teacher
    settings = {**QUIET, "log_every": 1, "learning_rate": 1e-3, **config}
    trainer = DistilMLMTrainer(student, teacher, tokenizer, DistilMLMConfig(**settings))
    if resume is not None:
        trainer.resume_from_checkpoint(resume)
    pipe = DataPipeline(data or texts(24), tokenizer, batch_size=4, max_length=32)
    result = trainer.train(pipe, **(train or {}))
    return SimpleNamespace(trainer=trainer, result=result, weights=weights(trainer))


def test_nothing_in_a_run_changes_the_teacher(tokenizer):
    teacher = tiny_bert(len(tokenizer), seed=9).train()
    before, outputs, ids = bits(teacher), [], torch.randint(5, 20, (2, 9))
    trainer = DistilMLMTrainer(
        tiny_bert(len(tokenizer), hidden_size=8),
        teacher,
        tokenizer,
        DistilMLMConfig(**QUIET, weight_decay=0.5, learning_rate=1e-2, log_every=1, eval_every=2),
    )

    def on_step(step, loss):
        assert not any(module.training for module in teacher.modules())
        (trainer.module if step % 2 else teacher).train()  # neither may reach the teacher's next forward
        groups = trainer.module.optimizers().param_groups
        in_groups = {id(p) for group in groups for p in group["params"]}
        assert not in_groups & {id(p) for p in teacher.parameters()}
        assert in_groups >= {id(p) for p in trainer.module.projector.parameters()}
        outputs.append(trainer.module.frozen_teacher()(input_ids=ids).logits)

    teacher.bert.encoder.register_forward_pre_hook(lambda module, _: modes.append(module.training))
    modes: list[bool] = []
    pipe = DataPipeline(texts(24), tokenizer, batch_size=4, max_length=32)
    trainer.train(pipe, pipe, on_step)
    assert len(outputs) == 6
    assert all(torch.equal(output, outputs[0]) for output in outputs)
    assert len(modes) > 12
    assert not any(modes)
    assert bits(teacher) == before
    assert not any(p.requires_grad or p.grad is not None for p in teacher.parameters())
    assert not any(module.training for module in teacher.modules())


def test_the_student_runs_after_the_teacher_so_that_both_use_the_same_memory(tokenizer):
    student, teacher, order = tiny_bert(len(tokenizer), hidden_size=8), tiny_bert(len(tokenizer), seed=9), []
    trainer = DistilMLMTrainer(student, teacher, tokenizer, DistilMLMConfig(**QUIET))
    for name, model in (("student", student), ("teacher", teacher)):
        model.bert.encoder.register_forward_hook(lambda *_, name=name: order.append(name))
    pipe = DataPipeline(texts(8), tokenizer, batch_size=4, max_length=32)
    trainer.train(pipe)
    assert order[-4:] == ["teacher", "student"] * 2


def count_forwards(model) -> list[int]:
    calls: list[int] = []
    model.register_forward_hook(lambda *_: calls.append(1))
    return calls


@pytest.mark.parametrize("as_recipe", [False, True])
def test_without_a_weight_on_it_the_teacher_never_runs(tokenizer, tmp_path, as_recipe):
    teacher = tiny_bert(len(tokenizer), seed=9)
    calls = count_forwards(teacher)
    if as_recipe:  # not even loaded: there is no such folder
        teacher = FromPretrained(str(tmp_path / "nowhere"))
    done = run(tokenizer, teacher=teacher, distill_weight=0.0, cosine_weight=0.0)
    held_out = DataPipeline(texts(4), tokenizer, batch_size=4, max_length=32)
    done.trainer.evaluate(held_out)
    assert calls == []
    assert len(done.result["losses"]) == 6


def test_without_a_weight_on_the_divergence_the_teacher_scores_nothing(tokenizer):
    teacher, places = tiny_bert(len(tokenizer), seed=9), []
    trainer = DistilMLMTrainer(tiny_bert(27), teacher, tokenizer, DistilMLMConfig(**QUIET, distill_weight=0.0))
    hook = teacher.cls.predictions.transform.register_forward_hook(lambda _, __, out: places.append(out.shape[-2]))
    trainer.train(DataPipeline(texts(8), tokenizer, batch_size=4, max_length=32))
    hook.remove()
    assert places[-2:] == [0, 0]


def test_without_the_cosine_there_is_no_projector(tokenizer, tmp_path):
    trainer = run(tokenizer, cosine_weight=0.0).trainer
    assert trainer.module.projector is None
    keys = torch.load(trainer.save_checkpoint(tmp_path), weights_only=True)["state_dict"]
    assert all(key.startswith("student.") for key in keys)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_teacher_in_half_precision_is_a_copy(tokenizer, dtype):
    teacher = tiny_bert(len(tokenizer), seed=9)
    before = bits(teacher)
    done = run(tokenizer, teacher=teacher, teacher_dtype=dtype)
    used = done.trainer.module.teacher
    assert {p.dtype for p in used.parameters()} == {getattr(torch, dtype)}
    assert {p.dtype for p in teacher.parameters()} == {torch.float32}
    assert bits(teacher) == before
    assert all(p.requires_grad for p in teacher.parameters())
    full = run(tokenizer, teacher=teacher).result["losses"]
    assert done.result["losses"] == pytest.approx(full, rel=1e-2)
    assert done.result["losses"] != full


def test_a_checkpoint_holds_no_teacher_and_a_resumed_run_is_the_unbroken_one(tokenizer, tmp_path):
    whole = run(tokenizer, epochs=2)
    saved = {}

    def save(step, loss):
        if step == 5:
            saved["path"] = whole_trainer.save_checkpoint(tmp_path / "at5")

    student = tiny_bert(len(tokenizer), hidden_size=8)
    settings = {**QUIET, "log_every": 1, "learning_rate": 1e-3, "epochs": 2}
    whole_trainer = DistilMLMTrainer(student, tiny_bert(len(tokenizer), seed=9), tokenizer, DistilMLMConfig(**settings))
    whole_trainer.train(DataPipeline(texts(24), tokenizer, batch_size=4, max_length=32), on_step=save)
    state = torch.load(saved["path"], weights_only=True)["state_dict"]
    assert not [key for key in state if "teacher" in key]
    assert "projector.weight" in state
    resumed = run(tokenizer, epochs=2, resume=saved["path"])
    assert torch.equal(resumed.weights, whole.weights)
    assert torch.equal(resumed.trainer.module.projector.weight, whole.trainer.module.projector.weight)
    assert resumed.result["losses"] == whole.result["losses"][5:]


def test_a_checkpoint_evaluates_as_the_model_it_was_taken_of(tokenizer, tmp_path):
    done = run(tokenizer)
    pipe = DataPipeline(texts(6, seed=7), tokenizer, batch_size=4, max_length=32)
    expected = done.trainer.evaluate(pipe)
    path = done.trainer.save_checkpoint(tmp_path)
    models = tiny_bert(len(tokenizer), hidden_size=8, seed=5), tiny_bert(len(tokenizer), seed=9)
    trainer = DistilMLMTrainer(*models, tokenizer, DistilMLMConfig(**QUIET))
    trainer.resume_from_checkpoint(path)
    assert trainer.evaluate(pipe) == expected
    models = {"student": tiny_bert(len(tokenizer), hidden_size=8, seed=5), "teacher": tiny_bert(30, seed=9)}
    module = DistilMLMLitModule.load_from_checkpoint(path, **models, tokenizer=tokenizer)
    assert torch.equal(module.projector.weight, done.trainer.module.projector.weight)
    assert bits(module.teacher) == bits(models["teacher"])


@pytest.mark.parametrize("key", ["student.bert.encoder.layer.0.output.dense.weight", "projector.weight"])
def test_a_checkpoint_without_a_key_is_refused_by_name(tokenizer, tmp_path, key):
    path = run(tokenizer).trainer.save_checkpoint(tmp_path)
    state = torch.load(path, weights_only=True)
    del state["state_dict"][key]
    torch.save(state, path)
    with pytest.raises((RuntimeError, ValueError), match=key.removeprefix("student.").replace(".", r"\.")):
        run(tokenizer, resume=path)
    module = DistilMLMLitModule(tiny_bert(27, hidden_size=8), tiny_bert(27), tokenizer=tokenizer)
    trainer = lightning.Trainer(accelerator="cpu", logger=False, enable_progress_bar=False, enable_checkpointing=False)
    with pytest.raises(RuntimeError, match=key.replace(".", r"\.")):
        trainer.validate(
            module,
            datamodule=MLMDataModule(None, val=texts(4), max_length=32),
            ckpt_path=path,
            weights_only=True,
            verbose=False,
        )


# ------------------------------------------------------------------ what is logged


def test_each_term_is_logged_and_they_add_up(tokenizer):
    logged = {}

    class Keep(Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            logged.update({name: float(v) for name, v in trainer.callback_metrics.items()})

        def on_validation_end(self, trainer, module):
            logged.update({name: float(v) for name, v in trainer.callback_metrics.items()})

    pipe = DataPipeline(texts(6, seed=7), tokenizer, batch_size=4, max_length=32)
    done = run(tokenizer, eval_every=6, train={"eval_dataset": pipe}, trainer_kwargs={"callbacks": [Keep()]})
    for stage in ("train", "val"):
        terms = [logged[f"{stage}/{name}"] for name in ("mlm", "distill", "cosine")]
        assert min(terms) > 0
        assert logged[f"{stage}/loss"] == pytest.approx(2 * terms[0] + 5 * terms[1] + terms[2], rel=1e-5)
    assert done.result["eval_losses"] == {6: logged["val/loss"]}
    assert logged["val/perplexity"] == pytest.approx(math.exp(logged["val/mlm"]), rel=1e-5)
    assert logged["train/loss"] == pytest.approx(done.result["losses"][-1], rel=1e-5)


def test_a_term_without_weight_is_not_logged_as_zero(tokenizer):
    logged = {}

    class Keep(Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            logged.update(trainer.callback_metrics)

    run(tokenizer, mlm_weight=0.0, cosine_weight=0.0, trainer_kwargs={"callbacks": [Keep()]})
    rates = {"train/learning_rate", "train/grad_norm", "train/tokens_per_second"}
    assert {name for name in logged if name.startswith("train/")} - rates == {"train/loss", "train/distill"}


# ------------------------------------------------------------------ vocabularies


def test_different_vocabularies_without_tokenizer_are_refused_with_both_sizes():
    config = DistilMLMConfig(mask_token_id=4, **QUIET)
    with pytest.raises(ValueError, match=r"64.*40"):
        DistilMLMTrainer(tiny_bert(64), tiny_bert(40), None, config)


@pytest.mark.parametrize("with_tokenizer", [True, False])
def test_columns_that_only_pad_a_vocabulary_are_cut_for_the_divergence(tokenizer, with_tokenizer):
    size = len(tokenizer)
    student, teacher = tiny_bert(64, dropout=0.0, **SHARP), tiny_bert(40, seed=9, **SHARP)
    ids = {} if with_tokenizer else {"mask_token_id": 4, "vocab_size": size}
    config = DistilMLMConfig(**QUIET, **ids, learning_rate=0.0)
    trainer = DistilMLMTrainer(student, teacher, tokenizer if with_tokenizer else None, config)
    (batch,) = ready(((4, 14),))
    batch["labels"] = torch.where(torch.rand(4, 14) < 0.4, batch["input_ids"], -100).where(batch["input_ids"] > 4, -100)
    (loss,) = trainer.train([batch])["losses"]
    chosen, attended = batch["labels"] != -100, batch["attention_mask"].bool()
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    with torch.no_grad():
        ours = student(**inputs, output_hidden_states=True)
        theirs = teacher(**inputs, output_hidden_states=True)
    ce = F.cross_entropy(ours.logits[chosen], batch["labels"][chosen])  # over all 64 columns
    cut = [model.logits[chosen][:, :size] / 2 for model in (ours, theirs)]
    kl = 4 * F.kl_div(F.log_softmax(cut[0], -1), F.softmax(cut[1], -1), reduction="batchmean")
    cosine = 1 - F.cosine_similarity(ours.hidden_states[-1][attended], theirs.hidden_states[-1][attended], -1).mean()
    assert loss == pytest.approx((2 * ce + 5 * kl + cosine).item(), rel=1e-5)


def test_a_teacher_smaller_than_the_tokenizer_is_refused(tokenizer):
    size = len(tokenizer)
    with pytest.raises(ValueError, match=f"teacher scores {size - 1} ids, the tokenizer has {size}"):
        DistilMLMTrainer(tiny_bert(size), tiny_bert(size - 1), tokenizer, DistilMLMConfig(**QUIET))


def renumbered(tokenizer) -> PreTrainedTokenizerFast:
    """The same tokens, two of them with each other's id."""
    text = tokenizer.backend_tokenizer.to_str()
    vocab = tokenizer.get_vocab()
    swapped = text.replace(f'"cat":{vocab["cat"]}', f'"cat":{vocab["sat"]}')
    swapped = swapped.replace(f'"sat":{vocab["sat"]}', f'"sat":{vocab["cat"]}')
    from tokenizers import Tokenizer

    names = ("unk_token", "pad_token", "cls_token", "sep_token", "mask_token")
    special = {name: getattr(tokenizer, name) for name in names}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(swapped), **special)


@pytest.mark.parametrize("as_recipe", [False, True])
def test_a_teacher_whose_ids_mean_other_tokens_is_refused_by_token(tokenizer, tmp_path, as_recipe):
    other, vocab = renumbered(tokenizer), tokenizer.get_vocab()
    assert other.get_vocab()["cat"] == vocab["sat"]
    tiny_bert(len(tokenizer), seed=9).save_pretrained(tmp_path)
    other.save_pretrained(tmp_path)
    teacher = FromPretrained(str(tmp_path)) if as_recipe else AutoModelForMaskedLM.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match=rf"'cat': {vocab['cat']} here and {vocab['sat']} there"):
        DistilMLMTrainer(tiny_bert(len(tokenizer)), teacher, tokenizer, DistilMLMConfig(**QUIET))


def test_the_folders_of_both_models_tell_their_ids_where_no_tokenizer_is_given(tokenizer, tmp_path):
    models = []
    for name, own in (("student", tokenizer), ("teacher", renumbered(tokenizer))):
        tiny_bert(len(tokenizer)).save_pretrained(tmp_path / name)
        own.save_pretrained(tmp_path / name)
        models.append(AutoModelForMaskedLM.from_pretrained(tmp_path / name))
    config = DistilMLMConfig(**QUIET, mask_token_id=tokenizer.mask_token_id)
    with pytest.raises(ValueError, match=r"'cat': \d+ here and \d+ there"):
        DistilMLMTrainer(*models, None, config)


def test_a_teacher_with_the_same_ids_is_accepted(tokenizer, tmp_path):
    tiny_bert(len(tokenizer), seed=9).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    teacher = AutoModelForMaskedLM.from_pretrained(tmp_path)
    done = run(tokenizer, teacher=teacher)
    assert len(done.result["losses"]) == 6


def test_a_teacher_with_fewer_positions_than_the_rows_is_refused_before_training(tokenizer):
    teacher = tiny_bert(len(tokenizer), max_position_embeddings=16)
    with pytest.raises(ValueError, match=r"max_length of the train data is 32, the teacher has 16 positions"):
        run(tokenizer, teacher=teacher)


# ------------------------------------------------------------------ the surface


def test_the_student_as_its_own_teacher_is_refused():
    model = tiny_bert()
    with pytest.raises(ValueError, match="two models"):
        DistilMLMTrainer(model, model, None, DistilMLMConfig(**IDS))


@pytest.mark.parametrize("place", ["student", "teacher"])
def test_what_is_no_module_is_a_type_error(place):
    models = {"student": tiny_bert(), "teacher": tiny_bert(seed=1), place: "bert-base-uncased"}
    with pytest.raises(TypeError, match=f"{place} must be .*got str"):
        DistilMLMTrainer(models["student"], models["teacher"], None, DistilMLMConfig(**IDS))


def test_a_teacher_without_hidden_states_is_refused_where_the_cosine_needs_them():
    with pytest.raises(ValueError, match="BiasStudent"):
        DistilMLMTrainer(tiny_bert(), BiasStudent(torch.zeros(30)), None, DistilMLMConfig(**IDS))
    config = DistilMLMConfig(**IDS, cosine_weight=0.0)
    trainer = DistilMLMTrainer(tiny_bert(), BiasStudent(torch.zeros(30)), None, config)
    assert len(trainer.train(ready())["losses"]) == 2


def test_the_student_is_trained_in_place_and_left_in_eval_mode(tokenizer, tmp_path):
    student = tiny_bert(len(tokenizer), hidden_size=8)
    before = bits(student)
    done = run(tokenizer, student=student)
    assert done.trainer.student is student
    assert bits(student) != before
    assert not any(module.training for module in student.modules())
    pipe = DataPipeline(texts(6, seed=7), tokenizer, batch_size=4, max_length=32)
    assert set(done.trainer.evaluate(pipe)) == {"loss", "mlm", "perplexity", "masked_accuracy"}
    folder = done.trainer.export(tmp_path / "out")
    assert bits(AutoModelForMaskedLM.from_pretrained(folder)) == bits(student)
    assert AutoTokenizer.from_pretrained(folder).get_vocab() == tokenizer.get_vocab()


def test_distillation_brings_the_student_closer_to_the_teacher(tokenizer):
    teacher = tiny_bert(len(tokenizer), seed=9, initializer_range=0.5)
    pipe = DataPipeline(texts(6, seed=7), tokenizer, batch_size=4, max_length=32)
    untrained, done = (
        run(tokenizer, teacher=teacher, mlm_weight=0.0, epochs=epochs, learning_rate=learning_rate).trainer
        for epochs, learning_rate in ((1, 0.0), (4, 3e-2))
    )
    assert done.evaluate(pipe)["loss"] < 0.5 * untrained.evaluate(pipe)["loss"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("mlm_weight", 0.5),
        ("distill_weight", 1.0),
        ("cosine_weight", 3.0),
        ("temperature", 5.0),
        ("distill_on", "all"),
        ("seed", 0),
    ],
)
def test_a_field_changes_the_trained_weights(tokenizer, field, value):
    settings = {"train": {"total_steps": 2}}
    base = run(tokenizer, **settings).weights
    assert not torch.equal(base, run(tokenizer, **settings, **{field: value}).weights)


def test_the_default_config_is_the_documented_one():
    config = DistilMLMConfig()
    got = [getattr(config, name) for name in ("mlm_weight", "distill_weight", "cosine_weight", "temperature")]
    assert got == [2.0, 5.0, 1.0, 2.0]
    assert config.learning_rate == 5e-5
