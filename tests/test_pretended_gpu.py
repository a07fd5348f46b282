"""Whole runs on a device that is not the CPU, with the CPU's numbers: nothing lies on the wrong side, nobody waits.

They run in one other process, which knows the device of `pretended_gpu.py`; that is written for one torch.
"""

from __future__ import annotations

import copy
import multiprocessing
import os
import re
import shutil
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from torch import nn
from torch.utils import cpp_extension

from foundry_lightning import (
    DataPipeline,
    DistilMLMConfig,
    DistilMLMLitModule,
    DistilMLMTrainer,
    EncoderDistillConfig,
    EncoderDistillTrainer,
    MLMConfig,
    MLMDataModule,
    MLMTrainer,
    mask_tokens,
)
from foundry_lightning.callbacks.console import CompareWithTeacher
from foundry_lightning.callbacks.samples import Samples
from tests.conftest import tiny_bert
from tests.pretended_gpu import Waits, build, plug_in, trainer_settings
from tests.test_device import rows
from tests.test_packing import FAMILIES

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="it is linked as on Linux"),
    pytest.mark.skipif(not torch.__version__.startswith("2.13."), reason="its C++ is written for torch 2.13"),
    pytest.mark.skipif(shutil.which(cpp_extension.get_cxx_compiler()) is None, reason="no C++ compiler"),
]
SETTINGS = {"device": "cpu", "progress_bar": False, "learning_rate": 1e-3}  # the Trainer's own settings win


@pytest.fixture(scope="module")
def device_process(tmp_path_factory):
    folder = tmp_path_factory.mktemp("device")
    context = multiprocessing.get_context("spawn")  # a process that went backward before knows its devices for good
    with ProcessPoolExecutor(1, mp_context=context, initializer=plug_in, initargs=(build(folder),)) as pool:
        yield pool


@pytest.fixture
def on_device(device_process, tmp_path):
    """Calls a function in the process that has the device, in this test's folder."""

    def call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return device_process.submit(_in_folder, tmp_path, function, *args, **kwargs).result(timeout=120)

    return call


def _in_folder(folder, function, *args, **kwargs):
    os.chdir(folder)
    os.environ["FOUNDRY_LIGHTNING_CACHE"] = str(folder / "cache")
    return function(*args, **kwargs)


def facade(kind: str, tokenizer, *, there: bool, callbacks=(), plugins=None, **config: Any) -> Any:
    """A facade on the device or the CPU; without dropout, for which attention on each has draws of its own."""
    student, teacher = tiny_bert(len(tokenizer), dropout=0.0), tiny_bert(len(tokenizer), seed=1, hidden_size=32)
    own = trainer_settings(*callbacks, plugins=plugins) if there else {}
    settings = {**SETTINGS, "trainer_kwargs": own, **config}
    if kind == "mlm":
        return MLMTrainer(student, tokenizer, MLMConfig(**settings))
    if kind == "distil":
        return DistilMLMTrainer(student, teacher, tokenizer, DistilMLMConfig(**settings))
    return EncoderDistillTrainer(student.bert, teacher.bert, EncoderDistillConfig(**settings))


def trained(kind, tokenizer, *, batches, precision=None, resume=None, steps=3, **settings) -> tuple[list[float], Any]:
    """Losses and evaluations of a run, and what made the host wait in its batches."""
    waits = Waits()
    if precision is not None:
        scaler = torch.amp.GradScaler("gpu", init_scale=2.0**10) if precision == "16-mixed" else None
        settings["plugins"] = MixedPrecision(precision, "gpu", scaler)
    trainer, pipe = facade(kind, tokenizer, callbacks=[waits], **settings), rows(tokenizer, **batches)
    if resume is not None:
        trainer.resume_from_checkpoint(resume)
    found = trainer.train(pipe, pipe, total_steps=steps)
    return [*found["losses"], *found["eval_losses"].values(), *trainer.evaluate(pipe).values()], waits.seen


def what_the_device_does(device="gpu:0"):
    matrix = torch.arange(12.0).view(3, 4).to(device)
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        matrix + torch.ones(4)
    waits = []
    for ask in (
        lambda: float(matrix.sum()),
        lambda: matrix[matrix > 3],
        lambda: matrix.nonzero(),
        lambda: matrix.cpu(),
        lambda: torch.tensor([1, 2], device=device),
        lambda: matrix[torch.zeros(1, dtype=torch.int64, device=device)],
        lambda: matrix.to("cpu", non_blocking=True),
    ):
        torch.ops.pretended_gpu.forget()
        ask()
        waits.append(bool(torch.ops.pretended_gpu.waits()))
    with torch.autocast("gpu", dtype=torch.bfloat16):
        return waits, [(matrix @ matrix.t()).dtype, matrix.bfloat16().softmax(-1).dtype]


def test_the_device_refuses_what_a_gpu_refuses_and_counts_what_makes_the_host_wait(on_device):
    assert on_device(what_the_device_does) == ([True] * 5 + [False] * 2, [torch.bfloat16, torch.float32])


RUNS = {
    "mlm": ("mlm", {"eval_every": 2, "save_every": 2}),
    "whole words": ("mlm", {"masking": "whole_word", "gradient_checkpointing": True}),
    "spans, fewer and fewer": ("mlm", {"masking": "span", "mask_prob_end": 0.1}),
    "distil": ("distil", {"grad_accumulation_steps": 2}),
    "distil everywhere": ("distil", {"distill_on": "all", "max_grad_norm": 0.0}),
    "encoder": ("encoder", {}),
}


@pytest.mark.parametrize("batches", [{"pack": True}, {"group_by_length": True}], ids=["packed", "padded"])
@pytest.mark.parametrize("case", RUNS)
def test_a_run_on_a_device_is_that_of_the_cpu_and_the_host_waits_once_an_update(case, batches, tokenizer, on_device):
    kind, config = RUNS[case]
    expected, _ = on_device(trained, kind, tokenizer, batches=batches, there=False, save_dir="cpu", **config)
    found, waits = on_device(trained, kind, tokenizer, batches=batches, there=True, save_dir="device", **config)
    assert found == pytest.approx(expected, rel=1e-5)
    assert len(waits) >= 3
    assert all(batch["loss"] == batch["gradients"] == [] for batch in waits[1:])  # the first takes constants there
    assert [batch["update"] for batch in waits if batch["update"]] == [["item"]] * 3  # the gradient's norm


def family_trained(family: str, ids: list[list[int]]) -> list[list[float]]:
    losses, model = [], without_dropout(FAMILIES[family]())
    for there in ({}, trainer_settings()):
        config = MLMConfig(**SETTINGS, mask_token_id=4, special_token_ids=(0, 1, 2, 3), trainer_kwargs=there)
        pipe = DataPipeline(ids, batch_size=4, max_length=16, pack=True)
        losses.append(MLMTrainer(copy.deepcopy(model), None, config).train(pipe, total_steps=3)["losses"])
    return losses


def without_dropout(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        config = getattr(module, "config", None)
        for name in [name for name in vars(config) if "drop" in name] if config is not None else ():
            setattr(config, name, 0.0)  # attention that is no module of its own asks there
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_rows_of_each_family_train_on_a_device_as_on_the_cpu(family, on_device):
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(3, 14, (24,), generator=generator).tolist()
    ids = [torch.randint(5, 30, (length,), generator=generator).tolist() for length in lengths]
    expected, found = on_device(family_trained, family, ids)
    assert found == pytest.approx(expected, rel=1e-5)


def test_checkpoints_go_between_device_and_cpu(tokenizer, on_device):
    def run(**settings):
        return on_device(trained, "distil", tokenizer, batches={"pack": True}, steps=4, **settings)[0]

    whole = {there: run(there=there, save_every=2, save_dir=str(there)) for there in (False, True)}
    for saved in (False, True):
        for there in (False, True):
            found, expected = run(there=there, resume=f"{saved}/step=00000002.ckpt"), whole[there][2:]
            assert found == (expected if saved == there else pytest.approx(expected, rel=1e-5))


@pytest.mark.parametrize("kind", ["mlm", "distil"])
@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
def test_half_precision_follows_float32(kind, precision, tokenizer, on_device):
    expected, _ = on_device(trained, kind, tokenizer, batches={"pack": True}, there=False)
    found, waits = on_device(trained, kind, tokenizer, batches={"pack": True}, there=True, precision=precision)
    assert found != expected
    assert found == pytest.approx(expected, rel=1e-2)
    assert all(batch["loss"] == batch["gradients"] == [] for batch in waits[1:])


def overflown(tokenizer) -> tuple[bool, float]:
    scaler = torch.amp.GradScaler("gpu", init_scale=2.0**40)
    trainer = facade("mlm", tokenizer, there=True, plugins=MixedPrecision("16-mixed", "gpu", scaler))
    before = {name: value.clone() for name, value in trainer.student.state_dict().items()}
    trainer.train(rows(tokenizer), total_steps=2)
    after = trainer.student.state_dict()
    return all(torch.equal(after[name].cpu(), value) for name, value in before.items()), scaler.get_scale()


def test_an_overflow_under_float16_leaves_the_weights_and_the_run_goes_on(tokenizer, on_device):
    assert on_device(overflown, tokenizer) == (True, 2.0**38)


def masked(place: str, strategy: str, ids: torch.Tensor) -> list[list]:
    """Ids after masking and the masked places, as lists."""
    batch = mask_tokens(
        ids.to(place),
        row_ids=torch.arange(len(ids), device=place),
        word_ids=torch.arange(ids.shape[1], device=place).expand_as(ids) // 3,
        strategy=strategy,
        seed=3,
        epoch=1,
        mask_token_id=4,
        special_token_ids=(0, 1, 2),
        vocab_size=30,
    )
    return [batch.input_ids.tolist(), batch.positions.tolist()]


@pytest.mark.parametrize("strategy", ["token", "whole_word", "span"])
def test_masks_on_a_device_are_those_of_the_host(strategy, on_device):
    ids = torch.randint(5, 30, (8, 40))
    assert on_device(masked, "gpu:0", strategy, ids) == masked("cpu", strategy, ids)


def shown_and_predicted(tokenizer) -> tuple[int, int]:
    module = DistilMLMLitModule(
        tiny_bert(len(tokenizer)), tiny_bert(len(tokenizer), seed=1), config=DistilMLMConfig(), tokenizer=tokenizer
    )
    trainer = lightning.Trainer(
        **trainer_settings(Samples(2, folder="."), CompareWithTeacher()),
        devices=1,
        max_steps=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    pipes = {name: rows(tokenizer, pack=True) for name in ("train", "val")}
    data = MLMDataModule(**pipes, predict=["the cat [MASK]", "a [MASK] sat"], tokenizer=tokenizer)
    trainer.fit(module, datamodule=data)
    return Path("samples.jsonl").read_text().count("\n"), len(trainer.predict(module, datamodule=data))


def test_guesses_comparison_and_prediction_run_on_a_device(tokenizer, on_device):
    shown, predicted = on_device(shown_and_predicted, tokenizer)
    assert shown > 0
    assert predicted == 2


def with_a_weight_that_is_no_number(tokenizer) -> str:
    trainer = facade("mlm", tokenizer, there=True, save_dir="runs")
    with torch.no_grad():
        trainer.student.bert.embeddings.word_embeddings.weight[7] = float("nan")
    with pytest.raises(FloatingPointError) as raised:
        trainer.train(rows(tokenizer), total_steps=3)
    return str(raised.value)


def test_a_loss_that_is_not_finite_is_found_on_a_device(tokenizer, on_device):
    message = on_device(with_a_weight_that_is_no_number, tokenizer)
    assert re.match(r"loss or gradient of update 1 is not finite \(rows .*nonfinite-step=00000001", message)
