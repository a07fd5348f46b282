"""The same run on any number of ranks: real processes on gloo."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from transformers import BertModel

from foundry_lightning import (
    DataPipeline,
    DistilMLMConfig,
    DistilMLMTrainer,
    EncoderDistillConfig,
    EncoderDistillTrainer,
    MLMConfig,
    MLMTrainer,
    WithMLMHead,
)
from tests.conftest import BiasStudent, texts, tiny_bert
from tests.several import free_port, in_ranks

ROOT = Path(__file__).parents[1]
QUIET = {"progress_bar": False, "device": "cpu", "log_every": 1}


def config(num_ranks: int, **settings) -> MLMConfig:
    return MLMConfig(**{**QUIET, "devices": num_ranks, "strategy": "ddp" if num_ranks > 1 else "auto", **settings})


def train(num_ranks: int, tokenizer, *, data=None, student=None, call=None, resume=None, **settings) -> dict:
    """A facade's run in this rank: what it returns, what `on_step` got, and the trained weights."""
    student = student or tiny_bert(len(tokenizer))
    trainer = MLMTrainer(student, tokenizer, config(num_ranks, **settings))
    if resume is not None:
        trainer.resume_from_checkpoint(resume)
    steps: list[tuple[int, float]] = []
    forwards: list[float] = []
    student.register_forward_pre_hook(
        lambda m, a, k: forwards.append(k["input_ids"].sum().item()) if len(k["input_ids"]) == 3 else None,
        with_kwargs=True,
    )
    data = DataPipeline(texts(36), tokenizer, batch_size=3, max_length=32) if data is None else data
    result = trainer.train(data, on_step=lambda *pair: steps.append(pair), **(call or {}))
    return {
        **result,
        "steps": steps,
        "forwards": forwards,
        "weights": torch.cat([p.detach().flatten() for p in student.parameters()]),
    }


def ranks_of(num_ranks: int, folder, tokenizer, **settings) -> list[dict]:
    """The same run in one process (here) or several."""
    if num_ranks == 1:
        return [train(1, tokenizer, **settings)]
    return in_ranks(lambda rank: train(num_ranks, tokenizer, **settings), num_ranks, folder)


def dealt(values: list, rank: int, num_ranks: int, num_batches: int) -> list:
    """A rank's share of what one process did with its batches, epoch by epoch."""
    return [value for n, value in enumerate(values) if n % num_batches % num_ranks == rank]


def assert_same_run(one: dict, several: list[dict], *, num_batches: int) -> None:
    for rank, result in enumerate(several):
        share = dealt(one["losses"], rank, len(several), num_batches)
        assert result["losses"] == pytest.approx(share, rel=1e-4), rank
        assert torch.allclose(result["weights"], one["weights"], rtol=1e-4, atol=2e-6), rank
        assert torch.equal(result["weights"], several[0]["weights"])
        assert result["eval_losses"] == pytest.approx(one["eval_losses"], rel=1e-5)
        assert result["eval_losses"] == several[0]["eval_losses"]
        assert [step for step, _ in result["steps"]] == ([] if rank else [step for step, _ in one["steps"]])
    assert [loss for _, loss in several[0]["steps"]] == pytest.approx([loss for _, loss in one["steps"]], rel=1e-4)


def test_two_ranks_train_like_one_with_twice_the_accumulation(tokenizer, tmp_path):
    held_out = DataPipeline(texts(13, seed=9), tokenizer, batch_size=3, max_length=32)
    settings = {
        "data": DataPipeline(texts(20), tokenizer, batch_size=3, max_length=32),  # 7 batches: a filler at each end
        "learning_rate": 1e-3,
        "epochs": 3,
        "eval_every": 2,
        "call": {"shuffle": True, "eval_dataset": held_out},
    }
    one = train(1, tokenizer, grad_accumulation_steps=4, **settings)
    several = ranks_of(2, tmp_path, tokenizer, grad_accumulation_steps=2, **settings)
    assert [step for step, _ in one["steps"]] == [1, 2, 3, 4, 5, 6]
    assert sorted(one["eval_losses"]) == [2, 4, 6]
    assert_same_run(one, several, num_batches=7)


@pytest.mark.ddp
@pytest.mark.parametrize("masking", ["token", "whole_word"])
def test_twenty_updates_on_one_two_and_four_ranks_are_the_same_run(tokenizer, tmp_path, masking):
    settings = {"learning_rate": 1e-3, "call": {"shuffle": True, "total_steps": 20}, "masking": masking}
    one = train(1, tokenizer, grad_accumulation_steps=4, **settings)
    assert [step for step, _ in one["steps"]] == list(range(1, 21))
    for num_ranks in (2, 4):
        folder = tmp_path / str(num_ranks)
        several = ranks_of(num_ranks, folder, tokenizer, grad_accumulation_steps=4 // num_ranks, **settings)
        assert_same_run(one, several, num_batches=12)
        for rank, result in enumerate(several):  # rows and masks bit by bit
            assert result["forwards"] == one["forwards"][rank::num_ranks]


def stream_of(rows: list[str]):
    return lambda: iter(rows)


UNEVEN = {
    "7 batches": lambda tokenizer: DataPipeline(texts(20), tokenizer, batch_size=3, max_length=32),
    "9 batches": lambda tokenizer: DataPipeline(texts(27), tokenizer, batch_size=3, max_length=32),
    "an epoch shorter than the window": lambda tokenizer: DataPipeline(
        texts(8), tokenizer, batch_size=3, max_length=32
    ),
    "ranks without a batch": lambda tokenizer: DataPipeline(texts(3), tokenizer, batch_size=3, max_length=32),
    "a stream that ends early": lambda tokenizer: DataPipeline(
        stream_of(texts(14)), tokenizer, batch_size=3, max_length=32
    ),
}


@pytest.mark.ddp
@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("case", list(UNEVEN))
def test_uneven_ends_take_the_same_number_of_steps_on_all_ranks(tokenizer, tmp_path, case, num_ranks):
    data = UNEVEN[case](tokenizer)
    num_batches = 5 if data.is_stream else data.num_batches()
    call = {"total_steps": 7} if data.is_stream else {}
    settings = {"data": data, "learning_rate": 1e-3, "epochs": 3, "call": call, "masking": "whole_word"}
    one = train(1, tokenizer, grad_accumulation_steps=4, **settings)
    start = time.monotonic()
    several = ranks_of(num_ranks, tmp_path, tokenizer, grad_accumulation_steps=4 // num_ranks, **settings)
    assert time.monotonic() - start < 20
    assert_same_run(one, several, num_batches=num_batches)


@pytest.mark.ddp
def test_a_stream_read_by_workers_ends_on_all_ranks(tokenizer, tmp_path):
    data = DataPipeline(stream_of(texts(14)), tokenizer, batch_size=3, max_length=32)
    settings = {"data": data, "learning_rate": 1e-3, "lr_scheduler": "constant", "epochs": 2}
    one = train(1, tokenizer, grad_accumulation_steps=4, **settings)
    several = ranks_of(2, tmp_path, tokenizer, grad_accumulation_steps=2, num_workers=2, **settings)
    assert_same_run(one, several, num_batches=5)


@pytest.mark.ddp
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_an_evaluation_is_exact_and_equal_on_all_ranks(tokenizer, tmp_path, num_ranks):
    student = tiny_bert(len(tokenizer))
    for rows in (5, 17):
        data = DataPipeline(texts(rows, seed=4), tokenizer, batch_size=3, max_length=32)
        one = MLMTrainer(student, tokenizer, config(1)).evaluate(data)
        several = in_ranks(
            lambda rank, data=data: MLMTrainer(student, tokenizer, config(num_ranks)).evaluate(data),
            num_ranks,
            tmp_path / str(rows),
        )
        assert all(result == several[0] for result in several)
        assert several[0] == pytest.approx(one, rel=1e-6)


def bias_gradients(num_ranks: int, batches, **settings) -> list[torch.Tensor]:
    from lightning.pytorch.callbacks import Callback

    seen: list[torch.Tensor] = []

    class Watch(Callback):
        def on_before_optimizer_step(self, trainer, module, optimizer):
            seen.append(module.student.bias.grad.clone())

    student = BiasStudent(torch.linspace(-1, 1, 8, dtype=torch.float64))
    settings = {"mask_prob": 1.0, "mask_token_id": 4, "vocab_size": 8, "max_grad_norm": 0.0, **settings}
    settings["trainer_kwargs"] = {"callbacks": [Watch()]}
    MLMTrainer(student, config=config(num_ranks, learning_rate=0.0, **settings)).train(batches)
    return seen


BATCHES = [torch.randint(5, 8, (1 + n % 3, 2 + n), generator=torch.Generator().manual_seed(n)) for n in range(11)]


def expected_gradients(window: int) -> list[torch.Tensor]:
    """Softmax minus the mean of the labels' one-hot vectors, over the tokens of each window."""
    softmax = torch.linspace(-1, 1, 8, dtype=torch.float64).softmax(0)
    windows = [BATCHES[i : i + window] for i in range(0, len(BATCHES), window)]
    return [
        softmax
        - torch.cat([b.flatten() for b in batches]).bincount(minlength=8).double() / sum(b.numel() for b in batches)
        for batches in windows
    ]


@pytest.mark.parametrize("accumulation", [1, 2, 3, 5, 8])
def test_a_windows_gradient_is_exact_in_float64_for_any_accumulation(accumulation):
    seen = bias_gradients(1, BATCHES, grad_accumulation_steps=accumulation)
    expected = expected_gradients(accumulation)
    assert len(seen) == len(expected)
    for gradient, value in zip(seen, expected, strict=True):
        assert torch.allclose(gradient, value, rtol=1e-9, atol=1e-12)


def test_a_windows_gradient_is_exact_in_float64_on_two_ranks(tmp_path):
    for accumulation in (1, 3):
        folder = tmp_path / str(accumulation)
        several = in_ranks(lambda _, a=accumulation: bias_gradients(2, BATCHES, grad_accumulation_steps=a), 2, folder)
        expected = expected_gradients(2 * accumulation)
        for seen in several:
            assert len(seen) == len(expected)
            for gradient, value in zip(seen, expected, strict=True):
                assert torch.allclose(gradient, value, rtol=1e-9, atol=1e-12)


@pytest.mark.ddp
@pytest.mark.parametrize("first", [2, 1])
@pytest.mark.parametrize("stop", [2, 5])
def test_a_run_goes_on_with_another_number_of_ranks(tokenizer, tmp_path, first, stop):
    settings = {"learning_rate": 1e-3, "epochs": 3, "call": {"shuffle": True}}  # 3 updates an epoch
    unbroken = train(1, tokenizer, grad_accumulation_steps=4, **settings)
    saved = tmp_path / "saved.ckpt"

    def broken(rank: int) -> None:
        student = tiny_bert(len(tokenizer))
        trainer = MLMTrainer(
            student, tokenizer, config(first, learning_rate=1e-3, epochs=3, grad_accumulation_steps=4 // first)
        )
        data = DataPipeline(texts(36), tokenizer, batch_size=3, max_length=32)

        from lightning.pytorch.callbacks import Callback

        class Save(Callback):
            def on_train_batch_end(self, trainer, *_):
                if trainer.global_step == stop and not saved.exists():
                    trainer.save_checkpoint(saved)
                    trainer.should_stop = True

        trainer.config.trainer_kwargs = {"callbacks": [Save()]}
        trainer.train(data, shuffle=True)

    in_ranks(broken, first, tmp_path / "first")
    for second in (1, 2, 4):
        results = in_ranks(
            lambda rank, second=second: train(
                second, tokenizer, resume=saved, grad_accumulation_steps=4 // second, **settings
            ),
            second,
            tmp_path / str(second),
        )
        for result in results:
            assert torch.allclose(result["weights"], unbroken["weights"], rtol=1e-4, atol=2e-6), second
        assert [step for step, _ in results[0]["steps"]] == list(range(stop + 1, 10))


@pytest.mark.ddp
def test_another_window_is_refused_on_every_rank(tokenizer, tmp_path):
    trainer = MLMTrainer(tiny_bert(len(tokenizer)), tokenizer, config(1, grad_accumulation_steps=4))
    saved = tmp_path / "saved.ckpt"
    trainer.train(DataPipeline(texts(36), tokenizer, batch_size=3, max_length=32))
    trainer.save_checkpoint(saved)

    def refused(rank: int) -> str:
        with pytest.raises(ValueError, match="a window had 4 batches") as error:
            train(2, tokenizer, resume=saved, grad_accumulation_steps=4, epochs=2)
        return str(error.value)

    in_ranks(refused, 2, tmp_path / "two")


def encoder_with_pooler(tokenizer):
    return WithMLMHead(BertModel(tiny_bert(len(tokenizer)).config))


@pytest.mark.ddp
def test_parameters_no_loss_reaches_stay_as_they_are_and_are_named(tokenizer, tmp_path):
    torch.manual_seed(0)
    student = encoder_with_pooler(tokenizer)
    before = {name: p.detach().clone() for name, p in student.named_parameters()}

    def run(num_ranks: int) -> dict:
        import warnings

        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            state = torch.get_rng_state()
            result = train(
                num_ranks, tokenizer, student=student, learning_rate=1e-3, grad_accumulation_steps=2 // num_ranks
            )
        assert state is not None
        result["told"] = [str(w.message) for w in caught if "no loss reaches" in str(w.message)]
        result["state"] = {name: p.detach().clone() for name, p in student.named_parameters()}
        result["trainable"] = all(p.requires_grad for p in student.parameters())
        return result

    several = in_ranks(lambda rank: run(2), 2, tmp_path)
    (told,) = several[0]["told"]
    assert told.count("pooler.dense.weight") == told.count("pooler.dense.bias") == 1
    assert told.count(",") == 2
    assert not several[1]["told"]
    assert several[0]["trainable"]
    for name, value in several[0]["state"].items():
        assert torch.equal(value, before[name]) == ("pooler" in name), name
    assert_same_run(run(1), several, num_batches=12)


@pytest.mark.ddp
def test_gradient_checkpointing_and_clipping_by_value_work_on_two_ranks(tokenizer, tmp_path):
    settings = {"learning_rate": 1e-3, "max_grad_norm": 0.01, "trainer_kwargs": {"gradient_clip_algorithm": "value"}}
    one = train(1, tokenizer, grad_accumulation_steps=2, **settings)
    several = ranks_of(2, tmp_path, tokenizer, gradient_checkpointing=True, **settings)
    assert_same_run(one, several, num_batches=12)


# ------------------------------------------------------------------ Lightning's own launchers

SCRIPT = """
import os, sys, time
import torch
torch.set_num_threads(1)
from transformers import BertConfig, BertForMaskedLM
from foundry_lightning import MLMConfig, MLMTrainer

out, pause, settings = sys.argv[1], float(sys.argv[2]), eval(sys.argv[3])
torch.manual_seed(0)
student = BertForMaskedLM(BertConfig(vocab_size=30, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
                                     intermediate_size=32, max_position_embeddings=64))
generator = torch.Generator().manual_seed(1)
batches = [torch.randint(5, 30, (3, 10), generator=generator) for _ in range(7)]
config = MLMConfig(mask_token_id=4, device="cpu", progress_bar=False, log_every=1, learning_rate=1e-3, **settings)
trainer = MLMTrainer(student, config=config)
steps = []

def on_step(step, loss):
    steps.append(step)
    open(out + ".at", "w").write(str(step))
    time.sleep(pause)

result = trainer.train(batches, batches, on_step=on_step, total_steps=6)
rank = os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0"))
torch.save({**result, "weights": torch.cat([p.detach().flatten() for p in student.parameters()])}, out + "." + rank)
"""


def start_script(folder, settings: dict, *, launcher=(), pause: float = 0.0, name: str = "out") -> subprocess.Popen:
    (folder / "script.py").write_text(SCRIPT)
    clean = {k: v for k, v in os.environ.items() if k not in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT")}
    command = [sys.executable, *launcher, "script.py", name, str(pause), repr(settings)]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    with open(folder / f"{name}.log", "wb") as log:
        return subprocess.Popen(
            command, cwd=folder, env={**clean, "PYTHONPATH": path}, stdout=log, stderr=log, start_new_session=True
        )


def end_of(process: subprocess.Popen, folder, *, seconds: float = 90) -> int:
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        logs = "\n".join(log.read_text()[-3000:] for log in folder.glob("*.log"))
        raise AssertionError(f"the script still ran after {seconds} s\n{logs}") from None


def run_script(folder, settings: dict, **options) -> None:
    code = end_of(start_script(folder, settings, **options), folder)
    assert code == 0, (folder / f"{options.get('name', 'out')}.log").read_text()[-3000:]


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> dict:
    """The script's run in one process."""
    folder = tmp_path_factory.mktemp("alone")
    run_script(folder, {"grad_accumulation_steps": 2, "eval_every": 2})
    return torch.load(folder / "out.0", weights_only=True)


def assert_like_alone(result: dict, alone: dict, *, rank: int = 0) -> None:
    assert torch.allclose(result["weights"], alone["weights"], rtol=1e-4, atol=2e-6)
    assert result["losses"] == pytest.approx(dealt(alone["losses"], rank, 2, 7), rel=1e-4)
    assert result["eval_losses"] == pytest.approx(alone["eval_losses"], rel=1e-5)


@pytest.mark.slow
@pytest.mark.ddp
def test_lightning_starts_the_ranks_of_a_script(tmp_path, alone):
    run_script(tmp_path, {"devices": 2, "strategy": "ddp", "eval_every": 2})
    for rank in (0, 1):
        assert_like_alone(torch.load(tmp_path / f"out.{rank}", weights_only=True), alone, rank=rank)


@pytest.mark.slow
@pytest.mark.ddp
def test_forked_ranks_hand_their_results_to_the_process_that_started_them(tmp_path, alone):
    run_script(tmp_path, {"devices": 2, "strategy": "ddp_fork", "eval_every": 2})
    assert_like_alone(torch.load(tmp_path / "out.0", weights_only=True), alone)


@pytest.mark.slow
@pytest.mark.ddp
def test_torchrun_starts_two_nodes(tmp_path, alone):
    port = free_port()
    nodes = []
    for node in (0, 1):
        launcher = ["-m", "torch.distributed.run", "--nnodes=2", f"--node_rank={node}", "--nproc_per_node=1"]
        launcher += ["--master_addr=127.0.0.1", f"--master_port={port}"]
        settings = {"devices": 1, "num_nodes": 2, "strategy": "ddp", "eval_every": 2}
        nodes.append(start_script(tmp_path, settings, launcher=launcher, name=f"node{node}"))
    assert [end_of(node, tmp_path) for node in nodes] == [0, 0]
    for rank in (0, 1):
        assert_like_alone(torch.load(tmp_path / f"node{rank}.{rank}", weights_only=True), alone, rank=rank)


@pytest.mark.slow
@pytest.mark.ddp
@pytest.mark.parametrize("strategy", ["auto", "ddp", "ddp_fork"])
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_script_ends_with_the_code_of_its_signal(tmp_path, strategy, number, code):
    settings = {"devices": 1 if strategy == "auto" else 2, "strategy": strategy, "save_dir": str(tmp_path / "saved")}
    process = start_script(tmp_path, settings, pause=1.0)
    end = time.monotonic() + 60
    while not (tmp_path / "out.at").exists():
        assert time.monotonic() < end
        time.sleep(0.1)
    if strategy == "ddp_fork" and number == signal.SIGINT:
        os.killpg(process.pid, number)  # as a terminal does
    else:
        os.kill(process.pid, number)
    ended = end_of(process, tmp_path, seconds=20)
    if strategy == "ddp_fork":  # the starting process runs no training of its own
        assert ended != 0
    else:
        assert ended == code
    end = time.monotonic() + 10
    while not (tmp_path / "saved" / "checkpoint.ckpt").is_file():
        assert time.monotonic() < end, (tmp_path / "out.log").read_text()[-3000:]
        time.sleep(0.1)


# ------------------------------------------------------------------ distillation


@pytest.mark.ddp
@pytest.mark.parametrize("kind", ["distil_mlm", "encoder_distil"])
def test_distillation_on_two_ranks_is_the_run_of_one(tokenizer, tmp_path, kind):
    from transformers import BertConfig

    def run(num_ranks: int) -> dict:
        torch.manual_seed(3)  # the projector between the widths
        student = tiny_bert(len(tokenizer))
        teacher = tiny_bert(len(tokenizer), seed=1, hidden_size=32)
        settings = {**QUIET, "devices": num_ranks, "strategy": "ddp" if num_ranks > 1 else "auto"}
        settings |= {"learning_rate": 1e-3, "grad_accumulation_steps": 2 // num_ranks, "epochs": 2}
        if kind == "distil_mlm":
            trainer = DistilMLMTrainer(student, teacher, tokenizer, DistilMLMConfig(**settings))
        else:
            student = BertModel(BertConfig(**student.config.to_dict()))  # its pooler gets no gradient
            trainer = EncoderDistillTrainer(student, teacher.bert, EncoderDistillConfig(**settings))
        steps: list[tuple[int, float]] = []
        data = DataPipeline(texts(20), tokenizer, batch_size=3, max_length=32)
        result = trainer.train(data, data, on_step=lambda *pair: steps.append(pair))
        weights = torch.cat([p.detach().flatten() for p in trainer.module.parameters()])
        return {**result, "steps": steps, "weights": weights}

    assert_same_run(run(1), in_ranks(lambda rank: run(2), 2, tmp_path), num_batches=7)
