"""Signals, numbers that are not finite, and workers that die: the run ends in order and says why."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from tqdm.std import TqdmDefaultWriteLock

from foundry_lightning import DataPipeline, MLMConfig, MLMLitModule, MLMTrainer
from foundry_lightning.data.loader import Deal, WindowLoader
from foundry_lightning.data.ready import ReadyBatches
from tests.conftest import texts, tiny_bert
from tests.several import Started, in_ranks, wait_for

QUIET = {"progress_bar": False, "device": "cpu", "log_every": 1}


def config(num_ranks: int = 1, **settings) -> MLMConfig:
    return MLMConfig(**{**QUIET, "devices": num_ranks, "strategy": "ddp" if num_ranks > 1 else "auto", **settings})


def rows(tokenizer, count: int = 36) -> DataPipeline:
    return DataPipeline(texts(count), tokenizer, batch_size=3, max_length=32)


def weights(student) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in student.parameters()]).clone()


# ------------------------------------------------------------------ signals

RUN = {"learning_rate": 1e-3, "epochs": 3}  # of 12 batches


def slow_run(num_ranks: int, tokenizer, folder, *, resume=False, pause=0.05, evaluate=False, **settings):
    """A run that writes its step to `folder/at<rank>` after each update."""

    def run(rank: int) -> torch.Tensor:
        from lightning.pytorch.callbacks import Callback

        class Watch(Callback):
            def on_train_batch_end(self, trainer, *_):
                (folder / f"at{rank}").write_text(str(trainer.global_step))
                time.sleep(pause)

        settings_ = {**RUN, "save_dir": str(folder / "saved"), "trainer_kwargs": {"callbacks": [Watch()]}, **settings}
        student = tiny_bert(len(tokenizer))
        trainer = MLMTrainer(student, tokenizer, config(num_ranks, **settings_))
        if resume:
            trainer.resume_from_checkpoint(folder / "saved")
        trainer.train(rows(tokenizer), rows(tokenizer) if evaluate else None, shuffle=True)
        return weights(student)

    return run


def at_step(folder, rank: int, step: int) -> bool:
    file = folder / f"at{rank}"
    return file.exists() and int(file.read_text() or 0) >= step


def steps_saved(folder) -> list[int]:
    return sorted(int(file.stem[5:]) for file in (folder / "saved").glob("step=*.ckpt"))


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_saves_ends_with_its_code_and_the_resumed_run_is_bit_equal(tokenizer, tmp_path, number, code):
    started = Started(slow_run(1, tokenizer, tmp_path), 1, tmp_path)
    wait_for(lambda: at_step(tmp_path, 0, 17), started)
    os.kill(started.pids[0], number)
    assert started.wait(10) == [code], started.logs()
    (step,) = steps_saved(tmp_path)
    assert step >= 17
    assert (tmp_path / "saved" / "checkpoint.ckpt").is_file()
    if number == signal.SIGTERM:
        unbroken = slow_run(1, tokenizer, tmp_path, pause=0)(0)
        assert torch.equal(slow_run(1, tokenizer, tmp_path, pause=0, resume=True)(0), unbroken)


@pytest.mark.parametrize("signalled", [0, 1])
def test_a_signal_to_one_rank_ends_all_with_the_same_code_and_a_checkpoint(tokenizer, tmp_path, signalled):
    started = Started(slow_run(2, tokenizer, tmp_path, save_every=1000), 2, tmp_path)
    wait_for(lambda: at_step(tmp_path, 0, 3) and at_step(tmp_path, 1, 3), started)
    os.kill(started.pids[signalled], signal.SIGTERM)
    assert started.wait(10) == [143, 143], started.logs()
    assert len(steps_saved(tmp_path)) == 1


@pytest.mark.ddp
def test_a_signal_to_all_processes_ends_a_run_with_workers_and_a_due_evaluation(tokenizer, tmp_path):
    run = slow_run(2, tokenizer, tmp_path, save_every=1000, num_workers=2, eval_every=1, evaluate=True)

    def in_own_group(rank: int):
        os.setpgid(0, 0)
        return run(rank)

    started = Started(in_own_group, 2, tmp_path)
    wait_for(lambda: at_step(tmp_path, 0, 3) and at_step(tmp_path, 1, 3), started, seconds=60)
    for pid in started.pids:
        os.killpg(pid, signal.SIGINT)
    assert started.wait(20) == [130, 130], started.logs()
    assert len(steps_saved(tmp_path)) == 1


def test_without_a_folder_a_signal_ends_the_run_and_writes_nothing(tokenizer, tmp_path):
    (tmp_path / "at").mkdir()
    started = Started(slow_run(1, tokenizer, tmp_path / "at", save_dir=""), 1, tmp_path)
    wait_for(lambda: at_step(tmp_path / "at", 0, 2), started)
    os.kill(started.pids[0], signal.SIGTERM)
    assert started.wait(10) == [143], started.logs()
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["at", "at0", "log0"]


def test_an_evaluation_due_at_the_update_of_a_signal_is_left_out_and_the_state_saved(tokenizer, tmp_path):
    from lightning.pytorch.callbacks import Callback

    class Kill(Callback):
        evaluated = 0

        def on_before_optimizer_step(self, trainer, *_):
            if trainer.global_step == 2:
                os.kill(os.getpid(), signal.SIGTERM)

        def on_validation_start(self, *_):
            self.evaluated += 1

    kill = Kill()
    settings = {"eval_every": 1, "save_every": 1000, "save_dir": str(tmp_path / "saved")}
    trainer = MLMTrainer(tiny_bert(len(tokenizer)), tokenizer, config(**settings, trainer_kwargs={"callbacks": [kill]}))
    with pytest.raises(SystemExit) as end:
        trainer.train(rows(tokenizer), rows(tokenizer))
    assert end.value.code == 143
    assert kill.evaluated == 2
    assert steps_saved(tmp_path) == [3]
    assert not trainer.student.training


def test_a_second_sigint_ends_the_process_at_once(tokenizer, tmp_path):
    started = Started(slow_run(1, tokenizer, tmp_path, pause=8), 1, tmp_path)
    wait_for(lambda: at_step(tmp_path, 0, 1), started)
    os.kill(started.pids[0], signal.SIGINT)
    wait_for(lambda: "Ctrl-C again" in started.logs(), started)
    os.kill(started.pids[0], signal.SIGINT)
    assert started.wait(3) == [-signal.SIGINT]


def test_the_handlers_of_before_are_back_after_a_run_and_after_a_failed_one(tokenizer):
    def own(number, frame):
        raise AssertionError("not called")

    before = {number: signal.signal(number, own) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        MLMTrainer(tiny_bert(len(tokenizer)), tokenizer, config()).train(rows(tokenizer, 6))
        assert all(signal.getsignal(number) is own for number in before)

        def fail(step, loss):
            assert signal.getsignal(signal.SIGTERM) is not own
            raise KeyError("mine")

        with pytest.raises(KeyError, match="mine"):
            MLMTrainer(tiny_bert(len(tokenizer)), tokenizer, config()).train(rows(tokenizer, 6), on_step=fail)
        assert all(signal.getsignal(number) is own for number in before)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_a_signal_after_the_last_update_reaches_the_handler_of_before(tokenizer):
    heard = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
    try:
        from lightning.pytorch.callbacks import Callback

        class Late(Callback):
            def on_train_end(self, *_):
                os.kill(os.getpid(), signal.SIGTERM)
                assert heard == []

        trainer = MLMTrainer(tiny_bert(len(tokenizer)), tokenizer, config(trainer_kwargs={"callbacks": [Late()]}))
        assert len(trainer.train(rows(tokenizer, 6))["losses"]) == 2
        assert heard == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)


def test_lightnings_slurm_requeueing_keeps_its_handlers(tokenizer, monkeypatch):
    from lightning.pytorch.callbacks import Callback
    from lightning.pytorch.plugins.environments import SLURMEnvironment

    handlers = []

    class Watch(Callback):
        def on_train_batch_end(self, *_):
            handlers.append({number: signal.getsignal(number) for number in (signal.SIGUSR1, signal.SIGTERM)})

    for name, value in {"SLURM_JOB_ID": "1", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "1"}.items():
        monkeypatch.setenv(name, value)
    kwargs = {"callbacks": [Watch()], "plugins": [SLURMEnvironment(auto_requeue=True)]}
    MLMTrainer(tiny_bert(len(tokenizer)), tokenizer, config(trainer_kwargs=kwargs)).train(rows(tokenizer, 3))
    assert all("lightning" in type(handler).__module__ for handler in handlers[0].values())


# ------------------------------------------------------------------ not finite


POISON = 29


class Poisoned(nn.Module):
    """Gives scores that are not finite for batches that hold the token `POISON`."""

    def __init__(self, student, how: str) -> None:
        super().__init__()
        self.student, self.how = student, how
        self.config = student.config

    @property
    def base_model(self):
        return self.student.base_model

    def get_input_embeddings(self):
        return self.student.get_input_embeddings()

    def forward(self, input_ids, attention_mask=None):
        output = self.student(input_ids=input_ids, attention_mask=attention_mask)
        if (input_ids == POISON).any():
            output.logits = output.logits * float(self.how)
        return output


class OnlyTheValue(torch.autograd.Function):
    """NaN, with the gradient of the identity."""

    @staticmethod
    def forward(ctx, x):
        return x * float("nan")

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class LossWithoutItsGradient(MLMLitModule):
    """The loss of a batch with the token `POISON` is NaN, its gradient an ordinary one."""

    def objective(self, batch, *, evaluating=False):
        found = super().objective(batch, evaluating=evaluating)
        if not (batch["input_ids"] == POISON).any():
            return found
        terms = {name: (total * float("nan"), *rest) for name, (total, *rest) in found.terms.items()}
        return found._replace(total=OnlyTheValue.apply(found.total), terms=terms)


def batches(poisoned: tuple[int, ...], count: int = 8) -> list[torch.Tensor]:
    """Ready batches of two rows; those numbered `poisoned` hold the token that poisons."""
    generator = torch.Generator().manual_seed(0)
    made = [torch.randint(5, 24, (2, 8), generator=generator) for _ in range(count)]
    for number in poisoned:
        made[number][1] = POISON
    return made


def poisoned_trainer(how: str, num_ranks: int = 1, **settings) -> MLMTrainer:
    # no [MASK] and no random token: the poison stays in the row
    fixed = {"mask_token_id": 4, "vocab_size": 30, "mask_replace_prob": 0.0, "random_replace_prob": 0.0}
    settings = {"learning_rate": 1e-2, "lr_scheduler": "constant", **fixed, **settings}
    trainer = MLMTrainer(
        tiny_bert(30) if how == "loss" else Poisoned(tiny_bert(30), how), config=config(num_ranks, **settings)
    )
    if how == "loss":
        trainer._start(LossWithoutItsGradient(trainer.student, config=trainer.config))
    return trainer


def watch_updates(trainer: MLMTrainer) -> list[tuple[torch.Tensor, list]]:
    """Weights and moments after each update."""
    from lightning.pytorch.callbacks import Callback

    seen = []

    class Watch(Callback):
        def on_train_batch_end(self, trainer, module, *_):
            moments = [
                tensor.clone() for state in trainer.optimizers[0].state.values() for _, tensor in sorted(state.items())
            ]
            seen.append((weights(module.student), moments))

    trainer.config.trainer_kwargs = {"callbacks": [Watch()]}
    return seen


@pytest.mark.parametrize("how", ["nan", "inf", "loss"])
@pytest.mark.parametrize("max_grad_norm", [0.0, 1.0])
def test_an_update_that_is_not_finite_is_refused_and_the_error_names_step_and_rows(tmp_path, how, max_grad_norm):
    trainer = poisoned_trainer(how, max_grad_norm=max_grad_norm, save_dir=str(tmp_path / "run"))
    seen = watch_updates(trainer)
    with pytest.raises(FloatingPointError, match=r"update 3 is not finite \(rows \[4, 5\]\); no weight was") as error:
        trainer.train(batches((2,)))
    assert len(seen) == 2
    assert torch.equal(weights(trainer.student), seen[-1][0])
    (file,) = (tmp_path / "run").glob("nonfinite*")
    assert str(file) in str(error.value)
    saved = load_file(file)
    assert torch.equal(saved["batch=2.input_ids"], batches((2,))[2])
    assert saved["batch=2.row_ids"].tolist() == [4, 5]


@pytest.mark.parametrize("how", ["nan", "loss"])
def test_skip_leaves_weights_and_moments_untouched_and_counts_a_step(how, recwarn):
    trainer = poisoned_trainer(how, on_nonfinite="skip")
    seen = watch_updates(trainer)
    steps = []
    trainer.train(batches((2, 5)), on_step=lambda step, loss: steps.append(step))
    assert steps == [1, 2, 3, 4, 5, 6, 7, 8]
    for n in range(1, 8):
        same_weights = torch.equal(seen[n][0], seen[n - 1][0])
        same_moments = all(torch.equal(a, b) for a, b in zip(seen[n][1], seen[n - 1][1], strict=True))
        assert (same_weights, same_moments) == ((True, True) if n in (2, 5) else (False, False)), n
    told = [str(w.message) for w in recwarn if "finite" in str(w.message)]
    assert len(told) == 2
    assert "update 3" in told[0]
    assert told[1].startswith("2 updates")


def test_a_window_names_the_rows_of_the_batch_that_is_not_finite_only():
    with pytest.raises(FloatingPointError, match=r"update 2 is not finite \(rows \[10, 11\]\)"):
        poisoned_trainer("nan", grad_accumulation_steps=4).train(batches((5,)))


def test_twenty_skips_in_a_row_end_the_run():
    trainer = poisoned_trainer("nan", on_nonfinite="skip")
    seen = watch_updates(trainer)
    with pytest.raises(FloatingPointError, match="update 22 is not finite .*, 20 times in a row"):
        trainer.train(batches((0, *range(2, 30)), count=30))
    assert len(seen) == 21


def test_a_rank_with_a_loss_that_is_not_finite_stops_all_ranks_alike(tmp_path):
    def run(rank: int) -> tuple:
        trainer = poisoned_trainer("loss", 2, save_dir=str(tmp_path / "run"))
        seen = watch_updates(trainer)
        with pytest.raises(FloatingPointError) as error:
            trainer.train(batches((5,)))  # rank 1's batch of the third update
        return str(error.value), torch.equal(weights(trainer.student), seen[-1][0]), len(seen)

    first, second = in_ranks(run, 2, tmp_path, seconds=30)
    assert first == second
    text, untouched, updates = first
    assert "update 3 is not finite (rows [10, 11])" in text
    assert "rank=1.safetensors" in text
    assert (untouched, updates) == (True, 2)
    assert [file.name for file in (tmp_path / "run").iterdir()] == ["nonfinite-step=00000003-rank=1.safetensors"]


@pytest.mark.ddp
def test_a_skip_on_one_rank_is_one_on_all(tmp_path):
    def run(rank: int) -> tuple:
        trainer = poisoned_trainer("loss", 2, on_nonfinite="skip")
        seen = watch_updates(trainer)
        trainer.train(batches((5,)))
        return [torch.equal(a[0], b[0]) for a, b in zip(seen, seen[1:], strict=False)], weights(trainer.student)

    first, second = in_ranks(run, 2, tmp_path, seconds=30)
    assert first[0] == second[0] == [False, True, False]
    assert torch.equal(first[1], second[1])


# ------------------------------------------------------------------ data that fails


def failing_stream(kind: str):
    main = os.getpid()

    def read():
        for n, text in enumerate(texts(60)):
            if n == 20 and kind == "raise":
                raise KeyError("torn page")
            if n == 20 and os.getpid() != main:
                os.kill(os.getpid(), signal.SIGKILL)
            yield text

    return read


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_source_that_raises_is_named_by_batch(tokenizer, num_workers):
    data = DataPipeline(failing_stream("raise"), tokenizer, batch_size=3, max_length=32)
    trainer = MLMTrainer(tiny_bert(len(tokenizer)), tokenizer, config(num_workers=num_workers))
    with pytest.raises(RuntimeError, match=r"batch 6 of epoch 0 could not be read \(KeyError\('torn page'\)\)"):
        trainer.train(data, total_steps=20)


def test_a_worker_that_is_killed_ends_the_run_with_the_batches_it_read(tokenizer, tmp_path):
    data = DataPipeline(failing_stream("kill"), tokenizer, batch_size=3, max_length=32)

    def run(rank: int) -> str:
        trainer = MLMTrainer(tiny_bert(len(tokenizer)), tokenizer, config(num_workers=1))
        with pytest.raises(RuntimeError, match="a data worker died") as error:
            trainer.train(data, total_steps=20)
        return str(error.value)

    (text,) = in_ranks(run, 1, tmp_path, seconds=30)
    assert "the batches 6 (rows 18, 19, 20) of epoch 0" in text


@pytest.mark.parametrize("settings", [{}, {"pack": True}, {"group_by_length": True}])
def test_the_rows_that_a_dead_worker_is_said_to_have_read_are_its_batchs(tokenizer, settings):
    order = {"seed": 7, "epoch": 2, "shuffle": True}
    pipe = DataPipeline(texts(20), tokenizer, batch_size=3, max_length=32, **settings)
    for data in (pipe, ReadyBatches([dict(batch) for batch in DataPipeline(texts(9), tokenizer, batch_size=3)])):
        batch = data.batch(1, data.order(**order))
        rows = batch["row_ids"] if batch["row_ids"].dim() == 1 else batch["row_ids"][batch["attention_mask"] != 0]
        assert sorted(set(data.row_numbers(1, **order))) == rows.unique().tolist()


def test_workers_outlive_a_signal_to_the_group_and_leave_the_rest_to_their_rank(tokenizer):
    main = os.getpid()

    def read():
        if os.getpid() != main:
            assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
            os.kill(os.getpid(), signal.SIGTERM)
            assert 0 < signal.alarm(0) <= 20  # it would end by itself if its rank had gone
        yield from texts(12)

    data = DataPipeline(read, tokenizer, batch_size=3, max_length=32)
    trainer = MLMTrainer(tiny_bert(len(tokenizer)), tokenizer, config(num_workers=1))
    assert len(trainer.train(data, total_steps=4)["losses"]) == 4


@pytest.mark.ddp
def test_a_rank_whose_source_fails_ends_the_others_too(tokenizer, tmp_path):
    def run(rank: int) -> None:
        read = failing_stream("raise") if rank == 1 else (lambda: iter(texts(60)))
        trainer = MLMTrainer(tiny_bert(len(tokenizer)), tokenizer, config(2))
        trainer.train(DataPipeline(read, tokenizer, batch_size=3, max_length=32), total_steps=20)

    started = Started(run, 2, tmp_path)
    assert all(started.wait(30))
    assert "could not be read" in started.logs()


def test_a_worker_that_dies_while_its_batch_is_taken_is_a_dead_worker_too(tokenizer):
    """Its pipe breaks then, and PyTorch raises what the pipe says."""

    def broken():
        raise ConnectionResetError(104, "Connection reset by peer")
        yield

    data = DataPipeline(texts(3), tokenizer)
    with pytest.raises(RuntimeError, match="DataLoader worker died"):
        WindowLoader(data, deal=Deal, num_workers=1)._window(broken(), Deal())
    with pytest.raises(ConnectionResetError):  # without workers it is the source's own
        WindowLoader(data, deal=Deal)._window(broken(), Deal())


@pytest.mark.parametrize("settings", [{}, {"pack": True}, {"group_by_length": True}, {"long_rows": "split"}])
def test_a_batch_is_read_without_a_lock_that_a_killed_process_could_keep(tokenizer, settings, monkeypatch):
    """The progress bars' lock is one for all forked processes; a worker killed while it held that would stop all."""
    pipe = DataPipeline(texts(20), tokenizer, batch_size=3, max_length=16, **settings)
    order = pipe.order(seed=7, epoch=2, shuffle=True)
    monkeypatch.setattr(TqdmDefaultWriteLock, "acquire", lambda *_, **__: pytest.fail("a shared lock was taken"))
    batches = [pipe.batch(n, order) for n in range(pipe.num_batches())]
    assert sum(int(batch["attention_mask"].sum()) for batch in batches) == pipe.lengths.sum()
