"""The documented numbers, and that each field of the config reaches its effect."""

from __future__ import annotations

import logging
import math
import warnings
from datetime import timedelta

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import SingleDeviceStrategy
from transformers import AutoModel, AutoModelForMaskedLM, AutoTokenizer

from foundry_lightning import DataPipeline, MLMConfig, MLMTrainer
from tests.conftest import BiasStudent, texts, tiny_bert
from tests.several import in_ranks

QUIET = {"progress_bar": False, "device": "cpu"}


def bias_trainer(bias, **config) -> MLMTrainer:
    settings = {"mask_prob": 1.0, "mask_token_id": 4, "vocab_size": 8, "max_grad_norm": 0.0, **QUIET, **config}
    return MLMTrainer(BiasStudent(torch.as_tensor(bias, dtype=torch.float32)), config=MLMConfig(**settings))


def gradients_of(trainer: MLMTrainer, batches, **kwargs) -> list[torch.Tensor]:
    """The gradient of the bias at each update, and the learning rates."""
    seen: list[torch.Tensor] = []
    rates: list[float] = []

    class Watch(Callback):
        def on_before_optimizer_step(self, trainer, module, optimizer):
            seen.append(module.student.bias.grad.clone())
            rates.append(optimizer.param_groups[0]["lr"])

    trainer.config.trainer_kwargs = {**trainer.config.trainer_kwargs, "callbacks": [Watch()]}
    trainer.train(batches, **kwargs)
    trainer.rates = rates
    return seen


UNEVEN = [torch.tensor([[5]]), torch.tensor([[6] * 9])]


def test_the_gradient_of_a_window_is_that_of_its_rows_as_one_batch():
    (gradient,) = gradients_of(bias_trainer(torch.zeros(8), grad_accumulation_steps=2), UNEVEN)
    expected = torch.full((8,), 0.125)
    expected[5], expected[6] = 0.025, -0.775
    assert torch.allclose(gradient, expected, atol=1e-6)


def test_a_window_is_exact_and_clipped_under_float16s_scaler():
    """The documented window of one and nine tokens; the scaler's own factor is gone before clipping and the update."""
    from lightning.pytorch.plugins import MixedPrecision

    norm = math.sqrt(0.025**2 + 0.775**2 + 6 * 0.125**2)
    for limit, factor in ((0.0, 1.0), (norm / 2, 0.5)):
        plugin = MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", init_scale=1024.0))
        trainer = bias_trainer(torch.zeros(8), grad_accumulation_steps=2, max_grad_norm=limit, learning_rate=0.0)
        seen = []

        def keep(optimizer, args, kwargs, module=trainer.module, seen=seen):
            seen.append(module.student.bias.grad.clone())

        class Watch(Callback):
            def on_train_start(self, trainer, module, keep=keep):
                trainer.optimizers[0].register_step_pre_hook(keep)

        trainer.config.trainer_kwargs = {"plugins": [plugin], "callbacks": [Watch()]}
        trainer.train(UNEVEN)
        expected = torch.full((8,), 0.125)
        expected[5], expected[6] = 0.025, -0.775
        torch.testing.assert_close(seen[-1], factor * expected, rtol=2e-3, atol=1e-5)


@pytest.mark.parametrize("stream", [False, True])
def test_a_window_that_limit_train_batches_cuts_is_the_mean_of_what_is_left(stream):
    """Three of four batches with accumulation 2: an update of two, one of one."""
    rows = [[5], [6] * 9, [7] * 3, [1] * 4]
    source = (lambda: iter(rows)) if stream else rows
    settings = {"grad_accumulation_steps": 2, "lr_scheduler": "constant", "learning_rate": 0.0}
    trainer = bias_trainer(torch.zeros(8), **settings, trainer_kwargs={"limit_train_batches": 3})
    gradients = gradients_of(trainer, DataPipeline(source, batch_size=1, max_length=9))
    expected = torch.full((2, 8), 0.125)
    expected[0, 5], expected[0, 6], expected[1, 7] = 0.025, -0.775, -0.875
    torch.testing.assert_close(torch.stack(gradients), expected)


def test_five_equal_batches_with_accumulation_two_give_three_updates_with_equal_gradients():
    batches = [torch.tensor([[5, 6, 7]])] * 5
    seen = gradients_of(bias_trainer(torch.zeros(8), grad_accumulation_steps=2, learning_rate=0.0), batches)
    assert len(seen) == 3
    assert all(torch.allclose(g, seen[0], atol=1e-7) for g in seen)


def test_the_schedule_counts_updates_over_epochs_with_a_short_last_window():
    trainer = bias_trainer(
        torch.zeros(8), grad_accumulation_steps=2, learning_rate=1e-2, lr_scheduler="linear", epochs=2
    )
    gradients_of(trainer, [torch.tensor([[5, 6, 7]])] * 5)
    assert trainer.rates == pytest.approx([1e-2 * f for f in (1, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6)])


def test_evaluation_divides_once_at_the_end():
    bias = torch.zeros(8)
    bias[6] = math.log(7)
    result = bias_trainer(bias).evaluate(UNEVEN)
    assert result["loss"] == pytest.approx(0.887738, abs=1e-6)
    assert result["mlm"] == pytest.approx(0.887738, abs=1e-6)
    assert result["perplexity"] == pytest.approx(2.42963, abs=1e-5)
    assert result["masked_accuracy"] == pytest.approx(0.9)


def test_losses_are_the_token_means_of_the_batches_and_zero_where_nothing_is_masked():
    batches = [*UNEVEN, torch.tensor([[4, 4]])]
    result = bias_trainer(torch.zeros(8), learning_rate=0.0).train(batches)
    assert result["losses"] == pytest.approx([math.log(8), math.log(8), 0.0])
    assert result["device"] == "cpu"
    assert result["eval_losses"] == {}


def test_on_step_gets_the_windows_token_weighted_loss_at_multiples_of_log_every_and_at_the_end():
    calls = []
    bias = torch.zeros(8)
    bias[6] = math.log(7)
    trainer = bias_trainer(bias, grad_accumulation_steps=2, learning_rate=0.0, log_every=2, epochs=3)
    trainer.train([*UNEVEN], on_step=lambda step, loss: calls.append((step, loss)))
    assert [step for step, _ in calls] == [2, 3]
    assert calls[0][1] == pytest.approx(0.887738, abs=1e-6)


def test_a_window_without_a_masked_token_is_a_step_without_change():
    trainer = bias_trainer(torch.zeros(8), learning_rate=1.0, weight_decay=0.0)
    seen = gradients_of(trainer, [torch.tensor([[4, 4, 4]])])
    assert torch.equal(seen[0], torch.zeros(8))
    assert torch.equal(trainer.student.bias.detach(), torch.zeros(8))


# ------------------------------------------------------------------ a real student


def trained(tokenizer, *, data=None, train=None, student=None, **config):
    student = student or tiny_bert(len(tokenizer))
    pipe = DataPipeline(data or texts(24), tokenizer, batch_size=4, max_length=32)
    trainer = MLMTrainer(student, tokenizer, MLMConfig(**{**QUIET, "log_every": 1, **config}))
    result = trainer.train(pipe, **(train or {}))
    return trainer, result


def weights(trainer) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in trainer.student.parameters()])


def test_training_lowers_the_loss_and_the_export_loads(tokenizer, tmp_path):
    trainer, result = trained(tokenizer, learning_rate=3e-3, epochs=30, lr_scheduler="constant", seed=1)
    assert len(result["losses"]) == 30 * 6
    assert sum(result["losses"][-18:]) / 18 < sum(result["losses"][:18]) / 18 - 0.2
    folder = trainer.export(tmp_path / "out")
    model, info = AutoModelForMaskedLM.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    encoded = AutoTokenizer.from_pretrained(folder)("the cat sat", return_tensors="pt")
    inputs = {name: encoded[name] for name in ("input_ids", "attention_mask")}
    with torch.no_grad():
        assert torch.allclose(model.eval()(**inputs).logits, trainer.student(**inputs).logits, atol=1e-6)
    body = AutoModel.from_pretrained(folder, add_pooling_layer=False).eval()
    with torch.no_grad():
        states = body(**inputs).last_hidden_state
        assert torch.allclose(states, trainer.student.base_model(**inputs).last_hidden_state, atol=1e-6)
    embedding, decoder = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    assert embedding.data_ptr() == decoder.data_ptr()


def test_the_student_is_trained_in_train_mode_and_left_in_eval_mode(tokenizer):
    student = tiny_bert(len(tokenizer)).eval()
    modes = []
    student.bert.encoder.register_forward_hook(
        lambda module, *_: modes.append(module.training) if torch.is_grad_enabled() else None
    )
    trainer, _ = trained(tokenizer, student=student)
    assert modes
    assert all(modes)
    assert not any(module.training for module in trainer.student.modules())


def test_without_a_tokenizer_the_configs_ids_are_written_drawn_and_taken_for_padding():
    student = tiny_bert(30)
    seen = []
    student.register_forward_pre_hook(lambda m, a, k: m.training and seen.append(k), with_kwargs=True)
    ids = torch.randint(10, 20, (64, 30), generator=torch.Generator().manual_seed(0))
    ids[:, 20:] = 9
    config = MLMConfig(mask_token_id=7, pad_token_id=9, vocab_size=25, mask_prob=1.0, **QUIET)
    MLMTrainer(student, config=config).train([ids])
    (inputs,) = seen
    assert torch.equal(inputs["attention_mask"], (ids != 9).long())
    assert torch.equal(inputs["input_ids"][:, 20:], ids[:, 20:])
    written = inputs["input_ids"][:, :20]
    changed = written != ids[:, :20]
    assert (written == 7).float().mean().item() == pytest.approx(0.8, abs=0.05)
    assert set(written[changed].tolist()) == set(range(25)) - {9}


def test_a_device_that_is_not_there_is_refused(tokenizer):
    missing = "cuda" if not torch.cuda.is_available() else "mps"
    with pytest.raises(ValueError, match=f"device='{missing}' is not there, torch finds none"):
        MLMTrainer(tiny_bert(len(tokenizer)), tokenizer, MLMConfig(device=missing))
    with pytest.raises(ValueError, match="torch_dtype='float16' needs a GPU"):
        MLMTrainer(tiny_bert(len(tokenizer)), tokenizer, MLMConfig(device="cpu", torch_dtype="float16"))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("mask_prob", 0.5),
        ("mask_prob_end", 0.5),
        ("learning_rate", 1e-2),
        ("optimizer", "muon"),
        ("weight_decay", 0.5),
        ("max_grad_norm", 1e-3),
        ("grad_accumulation_steps", 3),
        ("lr_scheduler", "constant"),
        ("lr_scheduler", "wsd"),
        ("warmup_steps", 4),
        ("epochs", 2),
        ("seed", 0),
        ("masking", "span"),
        ("mask_replace_prob", 0.1),
        ("random_replace_prob", 0.2),
        ("special_token_ids", (5, 6, 7)),
        ("torch_dtype", "bfloat16"),
    ],
)
def test_a_field_changes_the_trained_weights(tokenizer, field, value):
    base = weights(trained(tokenizer, learning_rate=1e-3)[0])
    settings = {"learning_rate": 1e-3, field: value}
    changed = weights(trained(tokenizer, **settings)[0])
    assert torch.equal(base, weights(trained(tokenizer, learning_rate=1e-3)[0]))
    assert not torch.equal(base, changed)


def test_gradient_checkpointing_changes_no_weight(tokenizer):
    plain = weights(trained(tokenizer, learning_rate=1e-3)[0])
    assert torch.equal(plain, weights(trained(tokenizer, learning_rate=1e-3, gradient_checkpointing=True)[0]))


def test_clipping_bounds_the_gradient_norm_and_zero_switches_it_off():
    def norm(max_grad_norm: float) -> float:
        batches = [torch.tensor([[5, 5, 5, 5]])]
        (gradient,) = norms_after_clipping(bias_trainer(torch.zeros(8), max_grad_norm=max_grad_norm), batches)
        return gradient

    full = norm(0.0)
    assert full == pytest.approx((0.875**2 + 7 * 0.125**2) ** 0.5)
    assert norm(0.1) == pytest.approx(0.1, rel=1e-4)


def norms_after_clipping(trainer, batches) -> list[float]:
    seen = []
    original = torch.optim.AdamW.step

    def step(self, closure=None):
        result = original(self, closure)
        seen.append(float(trainer.student.bias.grad.norm()))
        return result

    torch.optim.AdamW.step = step
    try:
        trainer.train(batches)
    finally:
        torch.optim.AdamW.step = original
    return seen


def test_weight_decay_spares_biases_and_norms_and_counts_tied_weights_once(tokenizer):
    student = tiny_bert(len(tokenizer))
    before = {name: p.detach().clone() for name, p in student.named_parameters()}
    for p in student.parameters():
        p.register_hook(torch.zeros_like)  # no gradient: only decay moves a weight
    trained(tokenizer, student=student, learning_rate=0.1, weight_decay=0.5, lr_scheduler="constant")
    for name, p in student.named_parameters():
        expected = before[name] * (1 - 0.1 * 0.5) ** 6 if p.ndim >= 2 else before[name]
        assert torch.allclose(p, expected, atol=1e-6), name


def test_evaluation_twice_gives_equal_bits_and_training_is_the_same_with_and_without_it(tokenizer):
    held_out = DataPipeline(texts(10, seed=9), tokenizer, batch_size=3, max_length=32)
    without, first = trained(tokenizer, learning_rate=1e-3)
    evaluated, second = trained(tokenizer, learning_rate=1e-3, eval_every=2, train={"eval_dataset": held_out})
    assert torch.equal(weights(without), weights(evaluated))
    assert first["losses"] == second["losses"]
    assert sorted(second["eval_losses"]) == [2, 4, 6]
    assert evaluated.evaluate(held_out) == evaluated.evaluate(held_out)
    assert evaluated.evaluate(held_out)["loss"] == pytest.approx(second["eval_losses"][6], abs=0)


@pytest.mark.parametrize("eval_every", [0, 2])
def test_evaluating_within_on_step_changes_nothing_of_the_run(tokenizer, eval_every):
    pipe, held_out = (DataPipeline(texts(24, seed=seed), tokenizer, batch_size=4, max_length=32) for seed in range(2))

    def run(evaluates: bool) -> tuple:
        student = tiny_bert(len(tokenizer))
        student.bert.embeddings.dropout.eval()  # a part that is in eval mode stays so
        settings = {"log_every": 1, "eval_every": eval_every, "grad_accumulation_steps": 2, "learning_rate": 1e-2}
        trainer = MLMTrainer(student, tokenizer, MLMConfig(**QUIET, **settings))
        steps, found = [], []

        def on_step(step, loss):
            steps.append((step, loss))
            if evaluates:
                found.append(trainer.evaluate(pipe))
                with pytest.raises(ValueError, match="max_length"):
                    trainer.evaluate(texts(1))

        student.train()
        student.bert.embeddings.dropout.eval()
        result = trainer.train(pipe, held_out, on_step, total_steps=7)
        return result, steps, weights(trainer), found, trainer.evaluate(pipe)

    plain, evaluated = run(False), run(True)
    assert evaluated[:2] == plain[:2]
    assert torch.equal(evaluated[2], plain[2])
    assert len(evaluated[3]) == 7
    assert evaluated[3][-1] == evaluated[4] == plain[4]


def test_evaluating_within_a_run_of_several_ranks_is_refused(tokenizer, tmp_path):
    def run(rank: int) -> str:
        trainer = MLMTrainer(tiny_bert(len(tokenizer)), tokenizer, MLMConfig(**QUIET, strategy="ddp"))
        pipe = DataPipeline(texts(8), tokenizer, batch_size=4, max_length=32)
        with pytest.raises(ValueError, match="several ranks train.* eval_every") as error:
            trainer.train(pipe, on_step=lambda *_: trainer.evaluate(pipe))
        return str(error.value)

    assert in_ranks(run, 1, tmp_path)


def test_the_end_of_the_run_is_evaluated_and_saved_too(tokenizer, tmp_path):
    held_out = texts(5, seed=9)
    pipe = DataPipeline(held_out, tokenizer, batch_size=3, max_length=32)
    _, result = trained(
        tokenizer, eval_every=4, save_every=4, save_dir=str(tmp_path / "run"), train={"eval_dataset": pipe}
    )
    assert sorted(result["eval_losses"]) == [4, 6]
    names = sorted(path.name for path in (tmp_path / "run").iterdir())
    assert names == ["checkpoint.ckpt", "step=00000004.ckpt", "step=00000006.ckpt"]


def test_the_three_newest_checkpoints_are_kept(tokenizer, tmp_path):
    trained(tokenizer, save_every=1, save_dir=str(tmp_path / "run"))
    steps = sorted(path.name for path in (tmp_path / "run").glob("step=*"))
    assert steps == ["step=00000004.ckpt", "step=00000005.ckpt", "step=00000006.ckpt"]
    newest = (tmp_path / "run" / "checkpoint.ckpt").read_bytes()
    assert newest == (tmp_path / "run" / "step=00000006.ckpt").read_bytes()


def test_on_step_comes_after_the_update_and_a_due_evaluation(tokenizer):
    order = []
    held_out = DataPipeline(texts(5, seed=9), tokenizer, batch_size=3, max_length=32)
    student = tiny_bert(len(tokenizer))
    first = weights_of(student)
    trainer = MLMTrainer(student, tokenizer, MLMConfig(**QUIET, log_every=3, eval_every=3))
    student.register_forward_hook(lambda m, *_: order.append("train" if m.training else "eval"))

    def on_step(step, loss):
        order.append(step)
        assert not torch.equal(first, weights_of(student))

    trainer.train(DataPipeline(texts(24), tokenizer, batch_size=4, max_length=32), held_out, on_step)
    assert order == ["train"] * 3 + ["eval"] * 2 + [3] + ["train"] * 3 + ["eval"] * 2 + [6]


@pytest.mark.parametrize(
    ("hook", "batches", "last"),
    [
        ("on_train_batch_end", 4, 2),
        ("on_train_batch_end", 5, 2),
        ("on_validation_end", 4, 2),
        ("on_train_epoch_end", 6, 3),
    ],
)
def test_a_run_that_a_callback_ends_tells_and_saves_its_last_update(tokenizer, tmp_path, hook, batches, last):
    class End(Callback):
        pass

    def end(self, trainer, *_):
        trainer.should_stop = trainer.fit_loop.total_batch_idx + 1 == batches

    setattr(End, hook, end)
    settings = {**QUIET, "grad_accumulation_steps": 2, "epochs": 2}
    pipe = DataPipeline(texts(24), tokenizer, batch_size=4, max_length=32)
    held_out = DataPipeline(texts(5, seed=9), tokenizer, batch_size=3, max_length=32)

    def run(resume=False, **more) -> tuple:
        trainer = MLMTrainer(tiny_bert(len(tokenizer)), tokenizer, MLMConfig(**settings, **more))
        if resume:
            trainer.resume_from_checkpoint(tmp_path)
        told = []
        result = trainer.train(pipe, held_out, lambda *pair: told.append(pair))
        return told, result["losses"], weights(trainer)

    told, losses, whole = run(log_every=1)
    saved = {"save_every": 50, "save_dir": str(tmp_path)}
    ended = run(eval_every=2 * (hook == "on_validation_end"), trainer_kwargs={"callbacks": [End()]}, **saved)
    assert ended[:2] == ([told[last - 1]], losses[:batches])
    assert [file.name for file in tmp_path.glob("step=*")] == [f"step={last:08d}.ckpt"]
    resumed = run(resume=True, log_every=1)
    assert resumed[:2] == (told[last:], losses[2 * last :])
    assert torch.equal(resumed[2], whole)


def weights_of(student) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in student.parameters()])


def test_total_steps_alone_ends_the_run_over_as_many_epochs_as_it_takes(tokenizer):
    _, result = trained(tokenizer, epochs=1, train={"total_steps": 15})
    assert len(result["losses"]) == 15
    _, result = trained(tokenizer, epochs=100, train={"total_steps": np.int64(4)})
    assert len(result["losses"]) == 4


def test_shuffle_gives_each_epoch_an_order_of_its_own(tokenizer):
    orders = []
    for shuffle in (False, True):
        student = tiny_bert(len(tokenizer))
        seen = []
        student.register_forward_pre_hook(
            lambda m, a, k, seen=seen: m.training and seen.append(k["attention_mask"].sum().item()), with_kwargs=True
        )
        trained(tokenizer, student=student, epochs=2, train={"shuffle": shuffle})
        orders.append(seen)
    plain, shuffled = orders
    assert plain[:6] == plain[6:]
    assert shuffled[:6] != shuffled[6:]
    assert sum(shuffled[:6]) == sum(plain[:6]) == sum(shuffled[6:])


def test_a_second_train_starts_at_step_zero_from_the_present_weights(tokenizer):
    trainer, first = trained(tokenizer, learning_rate=1e-3)
    after = weights(trainer)
    steps = []
    pipe = DataPipeline(texts(24), tokenizer, batch_size=4, max_length=32)
    second = trainer.train(pipe, on_step=lambda step, loss: steps.append(step))
    assert steps == [1, 2, 3, 4, 5, 6]
    assert not torch.equal(after, weights(trainer))
    assert second["losses"] != first["losses"]


def test_a_facade_without_folder_and_logger_writes_nothing(tokenizer, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    held_out = DataPipeline(texts(5, seed=9), tokenizer, batch_size=3, max_length=32)
    trainer, _ = trained(tokenizer, eval_every=2, train={"eval_dataset": held_out})
    trainer.evaluate(held_out)
    assert list(tmp_path.rglob("*")) == []


def test_one_strategy_object_serves_every_train_and_evaluate(tokenizer):
    strategy = SingleDeviceStrategy("cpu")
    trainer, _ = trained(tokenizer, trainer_kwargs={"strategy": strategy})
    held_out = DataPipeline(texts(5, seed=9), tokenizer, batch_size=3, max_length=32)
    assert trainer.evaluate(held_out) == trainer.evaluate(held_out)
    assert len(trainer.train(held_out, total_steps=1)["losses"]) == 1


def test_num_workers_changes_nothing(tokenizer):
    zero = weights(trained(tokenizer, learning_rate=1e-3, train={"shuffle": True})[0])
    two = weights(trained(tokenizer, learning_rate=1e-3, num_workers=2, train={"shuffle": True})[0])
    assert torch.equal(zero, two)


def test_trainer_kwargs_win_over_translated_settings(tokenizer):
    _, result = trained(tokenizer, epochs=3, trainer_kwargs={"max_epochs": 1, "limit_train_batches": 2})
    assert len(result["losses"]) == 2


@pytest.mark.parametrize(
    ("extra", "steps"),
    [
        ({"val_check_interval": 4}, [2, 5]),  # batches of an epoch of 6, as Lightning counts
        ({"val_check_interval": 4, "check_val_every_n_epoch": None}, [2, 4, 6]),
        ({"val_check_interval": 0.5}, [1, 3, 4, 6]),  # in the middle of a window, too
        ({"check_val_every_n_epoch": 2}, [6]),
        ({"val_check_interval": timedelta(0)}, [0, 1, 2, 3, 4, 5, 6]),
    ],
)
def test_an_interval_of_validation_among_trainer_kwargs_wins(tokenizer, extra, steps):
    held_out = DataPipeline(texts(5, seed=9), tokenizer, batch_size=3, max_length=32)
    settings = {"grad_accumulation_steps": 2, "epochs": 2}
    without, _ = trained(tokenizer, **settings)
    trainer, result = trained(
        tokenizer, **settings, eval_every=5, trainer_kwargs=extra, train={"eval_dataset": held_out}
    )
    assert sorted(result["eval_losses"]) == steps
    assert torch.equal(weights(trainer), weights(without))


def test_tensorboard_logs_train_and_validation_at_the_updates_done(tokenizer, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    held_out = DataPipeline(texts(5, seed=9), tokenizer, batch_size=3, max_length=32)
    trained(
        tokenizer,
        log_backend="tensorboard",
        log_every=2,
        eval_every=4,
        grad_accumulation_steps=2,
        epochs=2,
        save_dir=str(tmp_path / "logs"),
        train={"eval_dataset": held_out},
    )
    (file,) = (tmp_path / "logs").rglob("events.*")
    events = EventAccumulator(str(file.parent)).Reload()
    assert [e.step for e in events.Scalars("train/loss")] == [2, 4, 6]
    assert [e.step for e in events.Scalars("val/loss")] == [4, 6]


def test_wandb_logs_offline(tokenizer, tmp_path):
    wandb = pytest.importorskip("wandb")
    trained(tokenizer, log_backend="wandb", project="p", run_name="r", save_dir=str(tmp_path / "logs"))
    wandb.finish()  # else the next logger goes on with this run
    assert list((tmp_path / "logs").rglob("*.wandb"))


def test_a_missing_logger_package_raises_with_the_install_command(tokenizer, monkeypatch):
    import importlib.util

    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "wandb" else find(name, *a))
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'foundry-lightning\[wandb\]'"):
        MLMTrainer(tiny_bert(len(tokenizer)), tokenizer, MLMConfig(log_backend="wandb"))


def test_lightning_is_quiet_around_a_facade_and_as_it_was_after_it(tokenizer, caplog, recwarn):
    logger = logging.getLogger("lightning.pytorch")
    assert logger.level == logging.INFO
    before = list(warnings.filters)
    trainer = MLMTrainer(tiny_bert(len(tokenizer)), tokenizer, MLMConfig(device="cpu", progress_bar=False))
    pipe = DataPipeline(texts(8), tokenizer, batch_size=4, max_length=16)
    trainer.train(pipe, total_steps=2)
    trainer.evaluate(pipe)
    trainer.save_checkpoint("here")
    assert not caplog.records
    assert not [w for w in recwarn if "LeafSpec" in str(w.message) or "on_before_batch_transfer" in str(w.message)]
    assert (logger.level, list(warnings.filters)) == (logging.INFO, before)
