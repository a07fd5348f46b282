"""A run that was stopped anywhere and resumed is, bit for bit, the run that was not."""

from __future__ import annotations

import json
import os
import pickle
import random
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path
from types import SimpleNamespace

import lightning
import pytest
import torch
from datasets import IterableDataset
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from transformers import AutoModelForMaskedLM

from foundry_lightning import (
    DataPipeline,
    DistilMLMConfig,
    DistilMLMTrainer,
    MLMConfig,
    MLMDataModule,
    MLMLitModule,
    MLMTrainer,
)
from foundry_lightning.checkpoint import AtomicCheckpointIO
from foundry_lightning.data.rows import TokenRows
from tests.conftest import BiasStudent, texts, tiny_bert

ROWS = texts(20)  # in batches of 4: 5 batches
SETTINGS = {"progress_bar": False, "device": "cpu", "log_every": 1, "learning_rate": 1e-3, "lr_scheduler": "linear"}


def student_of(tokenizer, **config):
    return tiny_bert(30, num_hidden_layers=1, **config)


def weights(student) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in student.parameters()])


class Watch(Callback):
    """Keeps what the student saw in each batch, the batch's loss and each update's rate.

    Saves in `folder` when `at` batches are done.
    """

    def __init__(self, folder: Path | None = None, at: tuple[int, ...] = ()) -> None:
        self.folder, self.at = folder, at
        self.seen: list[bytes] = []
        self.losses: list[float] = []
        self.rates: list[float] = []

    def on_train_start(self, trainer, module):
        module.student.register_forward_pre_hook(self._keep, with_kwargs=True)

    def _keep(self, student, args, inputs):
        if student.training and torch.is_grad_enabled():
            self.seen.append(inputs["input_ids"].numpy().tobytes() + inputs["attention_mask"].numpy().tobytes())

    def on_before_optimizer_step(self, trainer, module, optimizer):
        self.rates.append(optimizer.param_groups[0]["lr"])

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.losses.append(outputs["batch_loss"].item())
        if len(self.losses) in self.at:
            trainer.save_checkpoint(self.folder / f"{len(self.losses)}.ckpt")


def source_of(kind: str, tokenizer, tmp_path):
    """The same kind of data anew, as another process would make it."""
    settings = {"batch_size": 4, "max_length": 16}
    if kind == "ready":
        return [dict(batch) for batch in DataPipeline(ROWS, tokenizer, **settings)]
    if kind == "file":
        path = tmp_path / "rows.txt"
        if not path.exists():
            path.write_text("\n".join(ROWS))
        return DataPipeline(str(path), tokenizer, **settings)
    if kind == "packed":  # six rows of up to 40 tokens hold the twenty texts
        return DataPipeline(ROWS, tokenizer, batch_size=1, max_length=40, pack=True)
    if kind == "tokens":
        return DataPipeline(ROWS, tokenizer, max_length=16, group_by_length=True, batch_tokens=64)
    if kind == "stream":
        return DataPipeline(lambda: iter(ROWS), tokenizer, **settings)
    if kind == "blocks":
        return DataPipeline(lambda: iter(ROWS), tokenizer, shuffle_buffer=6, **settings)
    if kind == "dataset":
        rows = IterableDataset.from_generator(lambda: ({"text": text} for text in ROWS))
        return DataPipeline(rows, tokenizer, shuffle_buffer=6, **settings)
    if kind == "split":
        return DataPipeline(
            lambda: iter(ROWS[:10]), tokenizer, shuffle_buffer=6, long_rows="split", batch_size=4, max_length=6
        )
    return DataPipeline(ROWS, tokenizer, **settings)


def run(
    tokenizer,
    data,
    *,
    resume=None,
    folder=None,
    at=(),
    held_out=None,
    on_step=None,
    shuffle=False,
    total_steps=None,
    **config,
):
    """One call of a fresh facade, and all that was seen of it."""
    watch = Watch(folder, at)
    settings = {**SETTINGS, **config}
    settings["trainer_kwargs"] = {"callbacks": [watch], **settings.get("trainer_kwargs", {})}
    trainer = MLMTrainer(student_of(tokenizer), tokenizer, MLMConfig(**settings))
    if resume is not None:
        trainer.resume_from_checkpoint(resume)
    result = trainer.train(data, held_out, on_step, shuffle=shuffle, total_steps=total_steps)
    return SimpleNamespace(
        trainer=trainer,
        result=result,
        seen=watch.seen,
        losses=watch.losses,
        rates=watch.rates,
        weights=weights(trainer.student),
    )


def assert_same_from(whole, resumed, *, batches: int, updates: int) -> None:
    """`resumed` is `whole` from the given numbers of batches and updates on, to the bit."""
    assert resumed.seen == whole.seen[batches:]
    assert resumed.losses == whole.losses[batches:]
    assert resumed.rates == whole.rates[updates:]
    assert torch.equal(resumed.weights, whole.weights)


def position(batch: int, *, num_batches: int, accumulation: int) -> tuple[int, int]:
    """(batches, updates) of the last finished update when `batch` batches of a run are done."""
    epoch, place = divmod(batch, num_batches)
    per_epoch = -(-num_batches // accumulation)
    return epoch * num_batches + place // accumulation * accumulation, epoch * per_epoch + place // accumulation


CASES = [
    # source, accumulation, workers, shuffle, total_steps (None: 2 epochs), stops, more stops in the slow variant
    ("texts", 1, 0, True, None, (4, 5), (1, 6, 10)),
    ("texts", 2, 0, True, None, (1, 5, 7), (2, 3, 6, 9)),
    ("texts", 3, 2, False, 5, (7,), (2, 5, 10, 11)),
    ("ready", 2, 0, True, 7, (3, 12), (5, 6, 10)),
    ("file", 3, 0, True, None, (4,), (3, 5, 8)),
    ("packed", 2, 2, True, None, (5,), (1, 6, 7)),
    ("tokens", 2, 0, True, None, (7,), (1, 6)),
    ("stream", 1, 0, False, None, (7,), (1, 5)),
    ("blocks", 2, 0, False, 8, (2, 7, 10), (1, 4, 5, 11)),
    ("dataset", 3, 2, False, 5, (4,), (1, 5, 8)),
    ("split", 2, 0, False, 7, (3, 8), (2, 7)),
]
CASES = [case[:-1] for case in CASES] + [pytest.param(*case[:-2], case[-1], marks=pytest.mark.slow) for case in CASES]


@pytest.mark.parametrize(("kind", "accumulation", "workers", "shuffle", "total_steps", "stops"), CASES)
def test_a_run_resumed_anywhere_is_the_unbroken_run(
    tokenizer, tmp_path, kind, accumulation, workers, shuffle, total_steps, stops
):
    settings = {
        "grad_accumulation_steps": accumulation,
        "num_workers": workers,
        "shuffle": shuffle,
        "total_steps": total_steps,
        "epochs": 2,
        "warmup_steps": 2,
    }
    if total_steps is None and kind == "stream":
        settings.update(lr_scheduler="constant")
    whole = run(tokenizer, source_of(kind, tokenizer, tmp_path), folder=tmp_path, at=stops, **settings)
    num_batches = sum(1 for _ in source_of(kind, tokenizer, tmp_path))
    assert len(whole.losses) > num_batches, "the case must reach a second epoch"
    for stop in stops:
        resumed = run(tokenizer, source_of(kind, tokenizer, tmp_path), resume=tmp_path / f"{stop}.ckpt", **settings)
        batches, updates = position(stop, num_batches=num_batches, accumulation=accumulation)
        assert_same_from(whole, resumed, batches=batches, updates=updates)
        assert resumed.result["losses"] == whole.result["losses"][batches:]


@pytest.mark.parametrize("kind", ["texts", "blocks"])
def test_a_run_whose_mask_share_falls_resumes_to_the_same_masks(tokenizer, tmp_path, kind):
    settings = {"mask_prob": 0.9, "mask_prob_end": 0.2, "grad_accumulation_steps": 2, "total_steps": 8}
    whole = run(tokenizer, source_of(kind, tokenizer, tmp_path), folder=tmp_path, at=(3, 7), **settings)
    for stop in (3, 7):  # within the first epoch's second window, within the second epoch's first
        resumed = run(tokenizer, source_of(kind, tokenizer, tmp_path), resume=tmp_path / f"{stop}.ckpt", **settings)
        batches, updates = position(stop, num_batches=5, accumulation=2)
        assert_same_from(whole, resumed, batches=batches, updates=updates)


def test_saving_does_not_change_a_run(tokenizer, tmp_path):
    saved = run(tokenizer, source_of("texts", tokenizer, tmp_path), folder=tmp_path, at=(1, 2, 3, 4, 5), shuffle=True)
    assert_same_from(saved, run(tokenizer, source_of("texts", tokenizer, tmp_path), shuffle=True), batches=0, updates=0)


def test_a_run_can_be_stopped_twice_in_one_epoch(tokenizer, tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    settings = {"shuffle": True, "grad_accumulation_steps": 2, "epochs": 2}
    whole = run(tokenizer, source_of("texts", tokenizer, tmp_path), folder=first, at=(7,), **settings)
    once = run(
        tokenizer, source_of("texts", tokenizer, tmp_path), resume=first / "7.ckpt", folder=second, at=(2,), **settings
    )
    assert_same_from(whole, once, batches=7, updates=4)
    twice = run(tokenizer, source_of("texts", tokenizer, tmp_path), resume=second / "2.ckpt", **settings)
    assert_same_from(whole, twice, batches=9, updates=5)


class SaveIn(Callback):
    """Saves once, from within the hook of this name, when so many updates are done."""

    def __init__(self, hook: str, path: Path, *, updates: int) -> None:
        self.path, self.updates = path, updates
        setattr(self, hook, self._save)

    def _save(self, trainer, *args, **kwargs):
        if trainer.global_step >= self.updates and not self.path.exists():
            trainer.save_checkpoint(self.path)


def in_three_epochs(tokenizer, **kwargs):
    held_out = DataPipeline(texts(5, seed=9), tokenizer, batch_size=3, max_length=16)
    settings = {"shuffle": True, "epochs": 3, "eval_every": 2, "held_out": held_out, **kwargs}
    return run(tokenizer, source_of("texts", tokenizer, None), **settings)


@pytest.fixture(scope="module")
def whole_runs(tokenizer):
    return {total_steps: in_three_epochs(tokenizer, total_steps=total_steps) for total_steps in (None, 12)}


@pytest.mark.parametrize(
    ("hook", "updates", "total_steps"),
    [
        pytest.param("on_train_start", 0, None, marks=pytest.mark.slow),
        pytest.param("on_train_epoch_start", 5, None, marks=pytest.mark.slow),
        ("on_train_epoch_start", 5, 12),
        pytest.param("on_train_batch_start", 5, 12, marks=pytest.mark.slow),
        ("on_train_batch_start", 3, None),
        pytest.param("on_before_zero_grad", 5, None, marks=pytest.mark.slow),
        ("on_before_optimizer_step", 3, 12),
        ("on_validation_batch_end", 4, None),
        pytest.param("on_validation_end", 4, 12, marks=pytest.mark.slow),
        pytest.param("on_train_epoch_end", 5, None, marks=pytest.mark.slow),
        ("on_train_end", 12, 12),
    ],
)
def test_a_checkpoint_from_any_hook_resumes_at_the_last_finished_update(
    tokenizer, tmp_path, whole_runs, hook, updates, total_steps
):
    path = tmp_path / "here.ckpt"
    in_three_epochs(
        tokenizer, total_steps=total_steps, trainer_kwargs={"callbacks": [SaveIn(hook, path, updates=updates)]}
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*not resumable.*")
        resumed = in_three_epochs(tokenizer, resume=path, total_steps=total_steps)
    whole = whole_runs[total_steps]
    assert torch.load(path, weights_only=True)["global_step"] == updates
    assert_same_from(whole, resumed, batches=updates, updates=updates)
    assert resumed.result["eval_losses"] == {k: v for k, v in whole.result["eval_losses"].items() if k > updates}


# ------------------------------------------------------------------ the facade


def test_the_facade_saves_before_within_and_after_train(tokenizer, tmp_path):
    pipe = source_of("texts", tokenizer, tmp_path)
    calls, paths = [], {}
    trainer = MLMTrainer(student_of(tokenizer), tokenizer, MLMConfig(**SETTINGS))
    paths[0] = trainer.save_checkpoint(tmp_path / "before")
    assert paths[0] == tmp_path / "before" / "checkpoint.ckpt"

    def on_step(step, loss):
        calls.append((step, loss))
        if step == 3:
            paths[3] = trainer.save_checkpoint(tmp_path / "within.ckpt")

    trainer.train(pipe, on_step=on_step)
    paths[5] = trainer.save_checkpoint(tmp_path / "after")
    for step, path in paths.items():
        seen = []
        again = MLMTrainer(student_of(tokenizer, seed=1), tokenizer, MLMConfig(**SETTINGS))
        again.resume_from_checkpoint(path if step else path.parent)
        saved = torch.load(path, weights_only=True)["state_dict"]
        assert all(torch.equal(v, saved[f"student.{k}"]) for k, v in again.student.state_dict().items())
        result = again.train(pipe, on_step=lambda step, loss, seen=seen: seen.append((step, loss)))
        assert seen == calls[step:]
        assert len(result["losses"]) == 5 - step
        assert torch.equal(weights(again.student), weights(trainer.student))
        assert torch.load(again.save_checkpoint(tmp_path / "end"), weights_only=True)["global_step"] == 5


def test_a_finished_run_with_nothing_left_does_nothing_and_loses_nothing(tokenizer, tmp_path):
    pipe = source_of("texts", tokenizer, tmp_path)
    whole = run(tokenizer, pipe, save_every=2, save_dir=str(tmp_path / "run"), total_steps=8)
    done = run(tokenizer, pipe, resume=tmp_path / "run", total_steps=8)
    assert done.result["losses"] == []
    assert torch.equal(done.weights, whole.weights)
    done.trainer.save_checkpoint(tmp_path / "again")
    extended = run(tokenizer, pipe, resume=tmp_path / "again", total_steps=10)
    assert_same_from(run(tokenizer, pipe, resume=tmp_path / "run", total_steps=10), extended, batches=0, updates=0)
    assert len(extended.losses) == 2


def test_a_checkpoint_saved_between_resume_and_train_is_the_one_resumed_from(tokenizer, tmp_path):
    pipe = source_of("texts", tokenizer, tmp_path)
    whole = run(tokenizer, pipe, folder=tmp_path, at=(2,))
    trainer = MLMTrainer(student_of(tokenizer), tokenizer, MLMConfig(**SETTINGS))
    trainer.resume_from_checkpoint(tmp_path / "2.ckpt")
    trainer.save_checkpoint(tmp_path / "copy")
    assert_same_from(whole, run(tokenizer, pipe, resume=tmp_path / "copy"), batches=2, updates=2)


def test_save_every_goes_on_in_a_folder_that_holds_another_run(tokenizer, tmp_path):
    pipe = source_of("texts", tokenizer, tmp_path)
    settings = {"save_every": 1, "save_dir": str(tmp_path / "run")}
    run(tokenizer, pipe, total_steps=9, **settings)
    run(tokenizer, pipe, total_steps=2, **settings)
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [
        "checkpoint.ckpt",
        "step=00000001.ckpt",
        "step=00000002.ckpt",
        "step=00000009.ckpt",
    ]
    assert torch.load(tmp_path / "run" / "checkpoint.ckpt", weights_only=True)["global_step"] == 2


# ------------------------------------------------------------------ Lightning's own Trainer


@pytest.mark.parametrize("validated", [False, True])
def test_a_plain_lightning_trainer_resumes_from_model_checkpoint(tokenizer, tmp_path, validated):
    held_out = DataPipeline(texts(5, seed=9), tokenizer, batch_size=3, max_length=16) if validated else None

    def fit(resume=None, folder=None):
        watch = Watch()
        callbacks: list[Callback] = [watch]
        if folder:
            callbacks.append(ModelCheckpoint(folder, "{step}", every_n_train_steps=1, save_top_k=-1))
        trainer = lightning.Trainer(
            plugins=[AtomicCheckpointIO()],
            callbacks=callbacks,
            max_epochs=2,
            accumulate_grad_batches=2,
            gradient_clip_val=1.0,
            accelerator="cpu",
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            enable_checkpointing=folder is not None,
            log_every_n_steps=1,
            **({"val_check_interval": 2} if validated else {}),
        )
        module = MLMLitModule(student_of(tokenizer), tokenizer=tokenizer)
        data = MLMDataModule(source_of("texts", tokenizer, None), val=held_out)
        trainer.fit(module, datamodule=data, ckpt_path=resume)
        metrics = {name: value for name, value in trainer.callback_metrics.items() if name != "train/tokens_per_second"}
        return SimpleNamespace(**vars(watch), weights=weights(module.student), metrics=metrics)

    whole = fit(folder=tmp_path)
    for step in (1, 2, 3, 5):
        resumed = fit(resume=tmp_path / f"step={step}.ckpt")
        batches = {1: 2, 2: 4, 3: 5, 5: 9}[step]
        assert_same_from(whole, resumed, batches=batches, updates=step)
        if step < 5:  # at 5 the last evaluation came between this checkpoint and the end
            assert resumed.metrics == whole.metrics


def test_a_module_loads_from_a_checkpoint_without_a_trainer(tokenizer, tmp_path):
    whole = run(tokenizer, source_of("texts", tokenizer, None), folder=tmp_path, at=(5,))
    module = MLMLitModule.load_from_checkpoint(
        tmp_path / "5.ckpt", student=student_of(tokenizer, seed=1), tokenizer=tokenizer, weights_only=True
    )
    assert torch.equal(weights(module.student), whole.weights)


# ------------------------------------------------------------------ what may change


def test_a_finished_run_is_extended_with_the_longer_schedule(tokenizer, tmp_path):
    pipe = source_of("texts", tokenizer, tmp_path)
    first = run(tokenizer, pipe, total_steps=4, learning_rate=1e-2)
    assert first.rates == pytest.approx([1e-2, 0.75e-2, 0.5e-2, 0.25e-2])
    first.trainer.save_checkpoint(tmp_path)
    extended = run(tokenizer, pipe, resume=tmp_path, total_steps=8, learning_rate=1e-2)
    assert extended.rates == pytest.approx([0.5e-2, 0.375e-2, 0.25e-2, 0.125e-2])


def test_an_extended_wsd_run_goes_on_at_the_peak_and_decays_at_its_new_end(tokenizer, tmp_path):
    pipe = source_of("texts", tokenizer, tmp_path)
    settings = {"learning_rate": 1e-2, "lr_scheduler": "wsd", "decay_steps": 2}
    first = run(tokenizer, pipe, total_steps=4, **settings)
    assert first.rates == pytest.approx([1e-2, 1e-2, 1e-2, 0.5e-2])
    first.trainer.save_checkpoint(tmp_path)
    extended = run(tokenizer, pipe, resume=tmp_path, total_steps=8, **{**settings, "decay_steps": 3})
    assert extended.rates == pytest.approx([1e-2, 1e-2, 2e-2 / 3, 1e-2 / 3])


def test_rate_schedule_decay_and_logging_may_change_at_a_resume(tokenizer, tmp_path):
    pipe = source_of("texts", tokenizer, tmp_path)
    run(tokenizer, pipe, total_steps=8, folder=tmp_path, at=(4,))
    steps, groups = [], []

    class Groups(Watch):
        def on_before_optimizer_step(self, trainer, module, optimizer):
            super().on_before_optimizer_step(trainer, module, optimizer)
            groups.append([group["weight_decay"] for group in optimizer.param_groups])

    watch = Groups()
    run(
        tokenizer,
        pipe,
        resume=tmp_path / "4.ckpt",
        total_steps=10,
        learning_rate=2e-2,
        lr_scheduler="constant",
        weight_decay=0.25,
        log_every=3,
        on_step=lambda step, loss: steps.append(step),
        trainer_kwargs={"callbacks": [watch]},
    )
    assert watch.rates == [2e-2] * 6
    assert groups == [[0.25, 0.0]] * 6
    assert steps == [6, 9, 10]


def test_an_epochs_run_goes_on_by_total_steps_and_back(tokenizer, tmp_path):
    pipe = source_of("texts", tokenizer, tmp_path)
    settings = {"shuffle": True, "grad_accumulation_steps": 2, "lr_scheduler": "constant"}
    whole = run(tokenizer, pipe, epochs=3, **settings)
    one = run(tokenizer, pipe, epochs=1, **settings)
    one.trainer.save_checkpoint(tmp_path / "one")
    two = run(tokenizer, pipe, resume=tmp_path / "one", total_steps=5, **settings)
    assert two.losses == whole.losses[5:9]
    two.trainer.save_checkpoint(tmp_path / "two")
    assert_same_from(whole, run(tokenizer, pipe, resume=tmp_path / "two", epochs=3, **settings), batches=9, updates=5)


def test_a_run_that_is_to_end_before_the_epochs_it_has_done_is_refused(tokenizer, tmp_path):
    pipe = source_of("texts", tokenizer, tmp_path)
    whole = run(tokenizer, pipe, epochs=2)
    whole.trainer.save_checkpoint(tmp_path / "done")
    with pytest.raises(ValueError, match="it has done 2 epochs, and the run is to end after 1"):
        run(tokenizer, pipe, resume=tmp_path / "done", epochs=1)


@pytest.fixture(scope="module")
def taken(tokenizer, tmp_path_factory):
    """A checkpoint after two windows of two batches."""
    folder = tmp_path_factory.mktemp("taken")
    run(tokenizer, source_of("texts", tokenizer, None), folder=folder, at=(4,), grad_accumulation_steps=2)
    return folder / "4.ckpt"


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"seed": 1}, "seed was 42 and is 1 now"),
        ({"mask_prob": 0.2}, "mask_prob was 0.15 and is 0.2 now"),
        ({"mask_prob_end": 0.1}, "mask_prob_end was None and is 0.1 now"),
        ({"masking": "span"}, "masking was 'token' and is 'span' now"),
        ({"random_replace_prob": 0.2}, "random_replace_prob was 0.1 and is 0.2 now"),
        ({"special_token_ids": (7,)}, "special token ids was [0, 1, 2, 3, 4] and is [0, 1, 2, 3, 4, 7] now"),
        ({"batch_size": 5}, "batch_size was 4 and is 5 now"),
        ({"max_length": 12}, "max_length was 16 and is 12 now"),
        ({"shuffle": True}, "shuffle was False and is True now"),
        ({"rows": texts(20, seed=5)}, "data was "),
        ({"grad_accumulation_steps": 3}, "a window had 2 batches"),
    ],
)
def test_what_decides_the_run_may_not_change_and_is_named(tokenizer, taken, change, named):
    pipe = {name: change[name] for name in ("batch_size", "max_length") if name in change}
    data = DataPipeline(change.get("rows", ROWS), tokenizer, **{"batch_size": 4, "max_length": 16, **pipe})
    config = {name: value for name, value in change.items() if name not in ("batch_size", "max_length", "rows")}
    student = student_of(tokenizer)
    shuffle = config.pop("shuffle", False)
    settings = {**SETTINGS, "grad_accumulation_steps": 2, **config}
    trainer = MLMTrainer(student, tokenizer, MLMConfig(**settings))
    trainer.resume_from_checkpoint(taken)
    before = weights(student)
    with pytest.raises(ValueError, match="does not fit") as error:
        trainer.train(data, shuffle=shuffle)
    assert named in str(error.value)
    assert torch.equal(before, weights(student))


def test_all_that_changed_is_in_one_error_and_the_resume_can_be_tried_again(tokenizer, taken, tmp_path):
    trainer = MLMTrainer(
        student_of(tokenizer), tokenizer, MLMConfig(**SETTINGS, grad_accumulation_steps=3, mask_prob=0.3)
    )
    trainer.resume_from_checkpoint(taken)
    pipe = DataPipeline(ROWS, tokenizer, batch_size=5, max_length=16)
    with pytest.raises(ValueError, match=r"mask_prob.*batch_size.*a window had 2"):
        trainer.train(pipe)
    copy = trainer.save_checkpoint(tmp_path / "kept")
    assert torch.load(copy, weights_only=True)["global_step"] == 2


@pytest.mark.parametrize("compiled", [(True, True), (True, False), (False, True)])
def test_a_compiled_student_and_a_plain_one_resume_from_each_other(tokenizer, tmp_path, compiled):
    def trainer_of(student, is_compiled):
        if is_compiled:
            student.bert = torch.compile(student.bert, backend="eager")
            student = torch.compile(student, backend="eager")
        return MLMTrainer(student, tokenizer, MLMConfig(**SETTINGS))

    first = trainer_of(student_of(tokenizer), compiled[0])
    first.train(source_of("sized", tokenizer, tmp_path), total_steps=2)
    second = trainer_of(student_of(tokenizer, seed=5), compiled[1])
    second.resume_from_checkpoint(first.save_checkpoint(tmp_path))
    assert torch.equal(weights(first.student), weights(second.student))
    assert len(second.train(source_of("sized", tokenizer, tmp_path), total_steps=3)["losses"]) == 1
    assert torch.equal(
        weights(second.student), weights(AutoModelForMaskedLM.from_pretrained(second.export(tmp_path / "export")))
    )


def test_another_tokenizer_is_named(tokenizer, taken):
    import copy

    other = copy.deepcopy(tokenizer)
    other.add_tokens(["[NEW]"], special_tokens=True)
    trainer = MLMTrainer(student_of(tokenizer), other, MLMConfig(**SETTINGS, grad_accumulation_steps=2))
    trainer.resume_from_checkpoint(taken)
    with pytest.raises(ValueError, match="tokenizer was "):
        trainer.train(source_of("texts", other, None))


def test_another_batch_list_is_refused_also_where_only_its_labels_differ(tokenizer, tmp_path):
    labels = torch.tensor([[-100, 6, -100]])
    batches = [{"input_ids": torch.tensor([[5, 4, 7]]), "labels": labels}] * 3
    run(tokenizer, batches, folder=tmp_path, at=(1,))
    changed = [*batches[:2], {**batches[2], "labels": labels + 0 * labels + (labels == 6)}]
    with pytest.raises(ValueError, match="data was "):
        run(tokenizer, changed, resume=tmp_path / "1.ckpt")


def test_another_architecture_is_refused_at_once_and_named(tokenizer, taken):
    trainer = MLMTrainer(student_of(tokenizer, hidden_size=32), tokenizer, MLMConfig(**SETTINGS))
    with pytest.raises(ValueError, match=r"word_embeddings.weight has the shape \[\d+, 16\], the student \[\d+, 32\]"):
        trainer.resume_from_checkpoint(taken)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"num_attention_heads": 4}, "student num_attention_heads was 2 and is 4 now"),
        ({"hidden_act": "relu"}, "student hidden_act was 'gelu' and is 'relu' now"),
        ({"dropout": 0.5}, "student hidden_dropout_prob was 0.1 and is 0.5 now"),
    ],
)
def test_another_function_of_equal_shapes_is_refused_by_name(tokenizer, taken, change, named):
    student = student_of(tokenizer, **change)
    before = weights(student)
    with pytest.raises(ValueError, match=named):
        MLMTrainer(student, tokenizer, MLMConfig(**SETTINGS)).resume_from_checkpoint(taken)
    assert torch.equal(before, weights(student))
    with pytest.raises(ValueError, match=named):
        MLMLitModule.load_from_checkpoint(taken, student=student, tokenizer=tokenizer, weights_only=True)


def test_another_class_of_equal_shapes_is_refused_by_name(tokenizer, tmp_path):
    class Other(BiasStudent):
        pass

    settings = MLMConfig(**SETTINGS, mask_token_id=4, vocab_size=30)
    path = MLMTrainer(BiasStudent(torch.zeros(30)), None, settings).save_checkpoint(tmp_path)
    with pytest.raises(ValueError, match="student class was 'BiasStudent' and is 'Other' now"):
        MLMTrainer(Other(torch.zeros(30)), None, settings).resume_from_checkpoint(path)


def test_labels_kernel_and_type_may_change_at_a_resume(tokenizer, taken):
    student = student_of(tokenizer, num_labels=5, initializer_range=0.5, attn_implementation="eager").to(torch.float64)
    MLMTrainer(student, tokenizer, MLMConfig(**SETTINGS)).resume_from_checkpoint(taken)
    assert student.dtype == torch.float64


# ------------------------------------------------------------------ seeking


def test_a_resume_reads_nothing_before_its_position_and_no_window_twice(tokenizer, tmp_path, monkeypatch):
    rows = texts(10_000)
    settings = {"mask_token_id": 4, "vocab_size": len(tokenizer), "grad_accumulation_steps": 5, "seed": 3, **SETTINGS}

    def train(resume=None, on_step=None):
        trainer = MLMTrainer(BiasStudent(torch.zeros(len(tokenizer))), tokenizer, MLMConfig(**settings))
        if resume:
            trainer.resume_from_checkpoint(resume)
        pipe = DataPipeline(rows, tokenizer, batch_size=100, max_length=16)
        trainer.train(pipe, on_step=lambda step, loss: step == 18 and trainer.save_checkpoint(tmp_path), shuffle=True)
        return trainer.student.bias.detach()

    read = []
    original = DataPipeline.batch
    monkeypatch.setattr(DataPipeline, "batch", lambda self, k, order: read.append(k) or original(self, k, order))
    whole = train()
    assert read == list(range(100))
    read.clear()
    assert torch.equal(train(resume=tmp_path), whole)
    assert read == list(range(90, 100))


def test_a_resumed_stream_tokenises_nothing_before_its_block(tokenizer, tmp_path, monkeypatch):
    rows = texts(200)

    def pipe():
        return DataPipeline(lambda: iter(rows), tokenizer, batch_size=4, max_length=16, shuffle_buffer=10)

    settings = {"total_steps": 20, "grad_accumulation_steps": 2}
    tokenised = []
    original = TokenRows.__call__

    def counted(self, items, row_ids):
        tokenised.extend(row_ids)
        return original(self, items, row_ids)

    monkeypatch.setattr(TokenRows, "__call__", counted)
    whole = run(tokenizer, pipe(), folder=tmp_path, at=(37,), **settings)
    assert sorted(tokenised) == sorted(set(tokenised))
    tokenised.clear()
    resumed = run(tokenizer, pipe(), resume=tmp_path / "37.ckpt", **settings)
    assert sorted(tokenised)[0] >= 36 * 4 // 10 * 10
    assert len(tokenised) == (40 - 36 + 2) * 4  # Lightning fetches one batch, here its window, ahead
    assert_same_from(whole, resumed, batches=36, updates=18)


# ------------------------------------------------------------------ the file


def test_a_checkpoint_holds_the_student_and_its_moments_and_nothing_that_runs(tokenizer, tmp_path):
    student = tiny_bert(8000, num_hidden_layers=1, hidden_size=128, intermediate_size=256)
    size = sum(p.numel() for p in student.parameters()) * 4
    assert size > 4_000_000
    trainer = MLMTrainer(student, tokenizer, MLMConfig(**SETTINGS))
    trainer.train(source_of("texts", tokenizer, None), total_steps=2)
    path = trainer.save_checkpoint(tmp_path)
    checkpoint = torch.load(path, weights_only=True)
    assert path.stat().st_size < 3.2 * size
    assert all(name.startswith("student.") for name in checkpoint["state_dict"])
    assert len(checkpoint["optimizer_states"][0]["state"]) == len(list(student.parameters()))


def test_a_distillation_resumes_without_its_teacher_in_the_checkpoint(tokenizer, tmp_path):
    def fit(resume=None):
        watch = Watch(tmp_path, (3,))
        config = DistilMLMConfig(**SETTINGS, grad_accumulation_steps=2, trainer_kwargs={"callbacks": [watch]})
        trainer = DistilMLMTrainer(student_of(tokenizer), tiny_bert(30, seed=7, hidden_size=32), tokenizer, config)
        if resume:
            trainer.resume_from_checkpoint(resume)
        trainer.train(source_of("texts", tokenizer, None), shuffle=True, total_steps=5)
        return SimpleNamespace(**vars(watch), weights=weights(trainer.student))

    whole = fit()
    saved = torch.load(tmp_path / "3.ckpt", weights_only=True)["state_dict"]
    assert not [name for name in saved if "teacher" in name]
    assert [name for name in saved if not name.startswith("student.")], "the projector is saved"
    assert_same_from(whole, fit(resume=tmp_path / "3.ckpt"), batches=2, updates=1)


@pytest.mark.parametrize("failing", ["os.replace", "torch.save"])
def test_a_failed_write_keeps_the_older_checkpoint_and_leaves_no_temporary_file(
    tokenizer, tmp_path, monkeypatch, failing
):
    trainer = MLMTrainer(student_of(tokenizer), tokenizer, MLMConfig(**SETTINGS))
    path = trainer.save_checkpoint(tmp_path / "run")
    before = path.read_bytes()
    trainer.train(source_of("texts", tokenizer, None))

    def fail(value, target, *args, **kwargs):
        if failing == "torch.save":
            target.write(b"half")
        raise OSError(28, "No space left on device")

    module, name = failing.split(".")
    monkeypatch.setattr({"os": os, "torch": torch}[module], name, fail)
    with pytest.raises(OSError, match=r"checkpoint .*checkpoint.ckpt could not be written .*No space left"):
        trainer.save_checkpoint(tmp_path / "run")
    monkeypatch.undo()
    assert path.read_bytes() == before
    assert [file.name for file in path.parent.iterdir()] == ["checkpoint.ckpt"]


def test_a_file_that_is_no_checkpoint_gives_one_clear_error_and_runs_nothing(tokenizer, taken, tmp_path):
    class Malicious:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "executed",))

    whole = taken.read_bytes()
    (tmp_path / "truncated.ckpt").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "empty.ckpt").write_bytes(b"")
    (tmp_path / "text.ckpt").write_text("hello")
    (tmp_path / "pickle.ckpt").write_bytes(pickle.dumps(Malicious()))
    torch.save({"state_dict": {}, "extra": Malicious()}, tmp_path / "malicious.ckpt")
    torch.save({"state_dict": {}}, tmp_path / "foreign.ckpt")
    trainer = MLMTrainer(student_of(tokenizer), tokenizer, MLMConfig(**SETTINGS))
    for name, message in (
        ("truncated", "is damaged"),
        ("empty", "is damaged"),
        ("text", "is damaged"),
        ("pickle", "nothing in it was run"),
        ("malicious", "nothing in it was run"),
        ("foreign", "was not written by foundry-lightning"),
    ):
        with pytest.raises(ValueError, match=f"checkpoint .*{name}.ckpt .*{message}"):
            trainer.resume_from_checkpoint(tmp_path / f"{name}.ckpt")
    with pytest.raises(FileNotFoundError, match=r"none.checkpoint\.ckpt does not exist"):
        trainer.resume_from_checkpoint(tmp_path / "none")
    assert not (tmp_path / "executed").exists()


# ------------------------------------------------------------------ other processes


def long_run(tokenizer, folder: Path, *, on_step=None, total_steps: int):
    trainer = MLMTrainer(
        student_of(tokenizer),
        tokenizer,
        MLMConfig(**SETTINGS, grad_accumulation_steps=2, save_every=1, save_dir=str(folder)),
    )
    if (folder / "checkpoint.ckpt").exists():
        trainer.resume_from_checkpoint(folder)
    pipe = DataPipeline(ROWS, tokenizer, batch_size=4, max_length=16)
    trainer.train(pipe, on_step=on_step, shuffle=True, total_steps=total_steps)
    return trainer


def test_a_new_process_goes_on_to_the_same_bits(tokenizer, tmp_path):
    whole = long_run(tokenizer, tmp_path / "whole", total_steps=8)
    part = MLMTrainer(student_of(tokenizer), tokenizer, MLMConfig(**SETTINGS, grad_accumulation_steps=2))
    pipe = DataPipeline(ROWS, tokenizer, batch_size=4, max_length=16)
    part.train(
        pipe,
        on_step=lambda step, loss: step == 4 and part.save_checkpoint(tmp_path / "part"),
        shuffle=True,
        total_steps=8,
    )
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    code = (
        "import sys; from pathlib import Path; from transformers import AutoTokenizer\n"
        "from tests.test_resume import long_run\n"
        "folder = Path(sys.argv[1])\n"
        "long_run(AutoTokenizer.from_pretrained(folder / 'tokenizer'), folder / 'part', total_steps=8)"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1]), "PYTHONHASHSEED": "7"}
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, env=environment, capture_output=True)
    checkpoint = torch.load(tmp_path / "part" / "checkpoint.ckpt", weights_only=True)
    assert checkpoint["global_step"] == 8
    assert sorted(path.name for path in (tmp_path / "part").glob("step*"))[0] == "step=00000006.ckpt"
    for name, value in whole.student.state_dict().items():
        assert torch.equal(value, checkpoint["state_dict"][f"student.{name}"]), name


def killed_run(tokenizer, folder: Path, *, kills: int, total_steps: int) -> None:
    """Trains in forked children that are killed at random moments until one comes to the end."""
    moments = random.Random(kills)
    landed = 0
    while True:
        child = os.fork()
        if child == 0:  # never returns into pytest
            status = 1
            try:
                torch.set_num_threads(1)
                with open(folder / "losses.jsonl", "a", buffering=1) as log:
                    long_run(
                        tokenizer,
                        folder / "run",
                        on_step=lambda *call, log=log: log.write(json.dumps(call) + "\n"),
                        total_steps=total_steps,
                    )
                status = 0
            finally:
                os._exit(status)
        before, status = newest(folder), None
        while landed < kills and newest(folder) == before and not (status := os.waitpid(child, os.WNOHANG)[0]):
            time.sleep(0.002)
        if landed < kills and not status:
            time.sleep(moments.uniform(0, 0.05))
            os.kill(child, signal.SIGKILL)
            landed += 1
            os.waitpid(child, 0)
            continue
        assert landed == kills, "the run ended before all kills"
        assert os.waitpid(child, 0)[1] == 0
        return


def newest(folder: Path) -> int:
    try:
        return (folder / "run" / "checkpoint.ckpt").stat().st_mtime_ns
    except FileNotFoundError:
        return 0


@pytest.mark.parametrize("kills", [5, pytest.param(30, marks=pytest.mark.slow)])
def test_a_run_killed_at_any_moment_comes_to_the_same_end(tokenizer, tmp_path, kills):
    total_steps = 8 * kills
    torch.set_num_threads(1)
    losses = {}
    whole = long_run(tokenizer, tmp_path / "whole", on_step=losses.__setitem__, total_steps=total_steps)
    killed_run(tokenizer, tmp_path, kills=kills, total_steps=total_steps)
    checkpoint = torch.load(tmp_path / "run" / "checkpoint.ckpt", weights_only=True)
    for name, value in whole.student.state_dict().items():
        assert torch.equal(value, checkpoint["state_dict"][f"student.{name}"]), name
    logged = [json.loads(line) for line in (tmp_path / "losses.jsonl").read_text().splitlines()]
    assert {step for step, _ in logged} >= set(range(1, total_steps + 1))
    assert all(loss == losses[step] for step, loss in logged)
    assert len(list((tmp_path / "run").iterdir())) == 4
