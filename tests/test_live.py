"""What a run says of itself while it goes on: rates, progress, samples; and that saying it changes nothing."""

from __future__ import annotations

import csv
import io
import json
import time
from pathlib import Path

import pytest
import rich
import torch
from lightning.pytorch.callbacks import TQDMProgressBar
from lightning.pytorch.loggers import CSVLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from foundry_lightning import DataPipeline, MLMConfig, MLMTrainer
from foundry_lightning.callbacks.console import ConsoleReport, _clock
from foundry_lightning.callbacks.samples import Samples, choose_blanks, fill_blanks
from foundry_lightning.modules.meter import Meter
from tests.conftest import texts, tiny_bert


def build(tokenizer, *, callbacks=(), logger=None, **settings) -> MLMTrainer:
    extra = {"callbacks": list(callbacks), **({} if logger is None else {"logger": logger})}
    defaults = {"device": "cpu", "progress_bar": False, "log_every": 2, "learning_rate": 1e-2, "eval_every": 3}
    config = MLMConfig(**{**defaults, **settings}, trainer_kwargs=extra)
    return MLMTrainer(tiny_bert(len(tokenizer)), tokenizer, config)


def data(tokenizer) -> tuple[DataPipeline, DataPipeline]:
    train = DataPipeline(texts(24), tokenizer, batch_size=4, max_length=32)
    return train, DataPipeline(texts(9, seed=1, low=6), tokenizer, batch_size=4, max_length=32)


def rows(folder: Path) -> list[dict[str, str]]:
    with (folder / "metrics.csv").open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def tokens_of(train: DataPipeline, batches: int) -> int:
    found = [int(batch["attention_mask"].sum()) for batch in train]
    return sum((found * (batches // len(found) + 1))[:batches])


def test_each_logged_update_has_its_rate_its_norm_and_the_tokens_so_far(tokenizer, tmp_path):
    trainer = build(tokenizer, logger=CSVLogger(tmp_path, name="", version=""), lr_scheduler="linear", epochs=1)
    train, val = data(tokenizer)
    trainer.train(train, val)
    logged = [row for row in rows(tmp_path) if row["train/loss"]]
    assert [int(row["step"]) for row in logged] == [2, 4, 6]
    assert [float(row["train/learning_rate"]) for row in logged] == pytest.approx([1e-2 * k / 6 for k in (5, 3, 1)])
    assert [int(row["progress/tokens"]) for row in logged] == [tokens_of(train, n) for n in (2, 4, 6)]
    assert all(float(row["train/grad_norm"]) > 0 and float(row["train/tokens_per_second"]) > 0 for row in logged)
    seconds = [float(row["progress/seconds"]) for row in rows(tmp_path)]
    assert seconds == sorted(seconds)
    evaluated = [row for row in rows(tmp_path) if row["val/loss"]]
    assert [(int(row["step"]), int(row["progress/tokens"])) for row in evaluated] == [
        (3, tokens_of(train, 3)),
        (6, tokens_of(train, 6)),
    ]


def test_the_logged_norm_is_that_of_the_gradient_before_clipping(tokenizer, tmp_path):
    norms = []
    for limit in (0, 1e-3):
        trainer = build(tokenizer, logger=CSVLogger(tmp_path / str(limit), name="", version=""), max_grad_norm=limit)
        trainer.train(data(tokenizer)[0], total_steps=1)
        norms.append(float(rows(tmp_path / str(limit))[0]["train/grad_norm"]))
    assert norms[0] == norms[1] > 1e-3


def test_tokens_and_seconds_go_on_after_a_resume(tokenizer, tmp_path):
    train, _ = data(tokenizer)
    first = build(tokenizer)
    first.train(train, total_steps=4)
    first.save_checkpoint(tmp_path)
    before = first.module.meter.seconds
    second = build(tokenizer, lr_scheduler="constant")
    second.resume_from_checkpoint(tmp_path)
    second.train(train, total_steps=7)
    assert second.module.meter.tokens == tokens_of(train, 7)
    assert second.module.meter.seconds > before
    assert second.module.meter.tokens_of_session == tokens_of(train, 7) - tokens_of(train, 4)
    second.train(train, total_steps=2)  # a new run
    assert second.module.meter.tokens == tokens_of(train, 2)


def test_an_accumulated_window_counts_its_tokens_once(tokenizer):
    train, _ = data(tokenizer)
    trainer = build(tokenizer, grad_accumulation_steps=4)
    trainer.train(train)
    assert trainer.module.meter.tokens == tokens_of(train, 6)


def test_the_rate_leaves_out_the_time_of_evaluations(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    meter = Meter(tokens=1000, seconds=50.0)
    now[0] += 7  # before training begins
    meter.start()
    meter.count(300, learning_rate=0.5, grad_norm=2.0)
    now[0] += 2
    meter.pause()
    now[0] += 10
    meter.go_on()
    now[0] += 1
    assert meter.rates() == {"learning_rate": 0.5, "grad_norm": 2.0, "tokens_per_second": 100.0}
    assert meter.progress() == {"tokens": 1300, "seconds": 63.0}
    meter.count(50, learning_rate=0.25, grad_norm=1.0)
    now[0] += 1
    assert meter.rates()["tokens_per_second"] == 50.0
    meter.stop()
    now[0] += 99
    assert meter.seconds == 64.0


# ------------------------------------------------------------------ the terminal


@pytest.fixture
def terminal():
    """Rich's console, writing into a string as if it were a terminal of 150 columns."""
    before = dict(rich.get_console().__dict__)
    out = io.StringIO()
    rich.reconfigure(file=out, force_terminal=True, width=150, legacy_windows=False)
    yield out
    rich.get_console().__dict__.update(before)


@pytest.fixture
def pipe():
    """The same, as if it were a file."""
    before = dict(rich.get_console().__dict__)
    out = io.StringIO()
    rich.reconfigure(file=out, force_terminal=False, width=150)
    yield out
    rich.get_console().__dict__.update(before)


def test_a_line_shows_loss_baseline_perplexity_rate_speed_and_time_left(tokenizer, pipe):
    train, val = data(tokenizer)
    build(tokenizer, progress_bar=True, eval_every=4).train(train, val, total_steps=6)
    lines = pipe.getvalue().splitlines()
    (line,) = [line for line in lines if line.startswith("step      4/6")]
    for part in (
        "loss ",
        " to the unigram baseline",
        "perplexity ",
        "lr 5.00e-03",
        " tokens/s",
        " left",
    ):
        assert part in line, line
    places = [
        next(n for n, line in enumerate(lines) if text in line) for text in ("step      4/6", "validation at step 4")
    ]
    assert places == sorted(places)
    assert any(line.startswith(f"6 updates, {tokens_of(train, 6)} tokens in 0:0") for line in lines)
    assert "unigram baseline" in pipe.getvalue()
    assert "held-out text" in pipe.getvalue()


def test_a_pipe_is_told_that_training_begins_and_no_bar_is_drawn_there(tokenizer, pipe, capfd):
    train, val = data(tokenizer)
    trainer = build(tokenizer, progress_bar=True)
    trainer.train(train, total_steps=4)
    assert "training on cpu; a line follows every 2 updates" in pipe.getvalue()
    trainer.evaluate(val)
    shown = capfd.readouterr()
    assert not shown.out + shown.err, shown


def test_a_terminal_gets_a_bar_that_goes_away_at_the_end(tokenizer, terminal):
    train, val = data(tokenizer)
    build(tokenizer, progress_bar=True).train(train, val, total_steps=6)
    text = terminal.getvalue()
    assert "6/6" in text
    assert "\x1b[2K" in text  # the line is erased
    assert "step      4/6" not in text
    assert "validation at step 3" in text


def test_the_bar_goes_away_when_the_run_fails(tokenizer, terminal):
    class Fails(Samples):
        def on_validation_end(self, trainer, pl_module):
            raise RuntimeError("in the middle")

    report = ConsoleReport("bar")
    with pytest.raises(RuntimeError, match="in the middle"):
        build(tokenizer, callbacks=[report, Fails()]).train(*data(tokenizer), total_steps=6)
    assert report._bar is None
    assert terminal.getvalue().endswith("\x1b[2K")


def test_quiet_prints_nothing(tokenizer, pipe):
    build(tokenizer, callbacks=[ConsoleReport("quiet")]).train(*data(tokenizer), total_steps=6)
    build(tokenizer).train(*data(tokenizer), total_steps=6)
    assert pipe.getvalue() == ""


def test_lightnings_own_bar_is_left_alone_where_it_is_asked_for(tokenizer, pipe, capsys):
    build(tokenizer, progress_bar=True, callbacks=[TQDMProgressBar()]).train(data(tokenizer)[0], total_steps=2)
    assert pipe.getvalue() == ""
    trainer = build(tokenizer, progress_bar=True)
    trainer.config.trainer_kwargs["enable_progress_bar"] = False
    trainer.train(data(tokenizer)[0], total_steps=2)
    assert pipe.getvalue() == ""


def test_an_unknown_mode_is_refused():
    with pytest.raises(ValueError, match="mode must be one of 'auto', 'bar', 'plain', 'quiet', got 'loud'"):
        ConsoleReport("loud")


def test_a_facade_without_save_dir_writes_no_file_though_it_shows_all(tokenizer, tmp_path, pipe):
    build(tokenizer, progress_bar=True).train(*data(tokenizer), total_steps=3)
    assert "held-out text" in pipe.getvalue()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("seconds", "text"), [(0, "0:00"), (61.4, "1:01"), (3599.6, "1:00:00"), (90061, "25:01:01")])
def test_a_clock_reads(seconds, text):
    assert _clock(seconds) == text


# ------------------------------------------------------------------ samples


def samples(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "samples.jsonl").read_text(encoding="utf-8").splitlines()]


def test_the_same_texts_are_filled_at_each_evaluation_and_after_a_resume(tokenizer, tmp_path):
    train, val = data(tokenizer)
    folder = str(tmp_path / "run")
    trainer = build(tokenizer, callbacks=[Samples(2, folder=folder, show=False)])
    trainer.train(train, val, total_steps=4)  # evaluated at 3 and 4
    trainer.save_checkpoint(tmp_path)
    again = build(tokenizer, callbacks=[Samples(2, folder=folder, show=False)])
    again.resume_from_checkpoint(tmp_path)
    again.train(train, val, total_steps=6)
    found = samples(tmp_path / "run")
    assert [line["step"] for line in found] == [3, 4, 6]
    kept = [[(s["before"], s["word"], s["after"]) for s in line["samples"]] for line in found]
    assert kept[0] == kept[1] == kept[2]
    held_out = set(texts(9, seed=1, low=6))
    for sample in found[0]["samples"]:
        assert len(sample["word"]) > 3
        shown = f"{sample['before']}{sample['word']}{sample['after']}".strip("…")
        assert any(shown in text for text in held_out)
        shares = [share for _, share in sample["guesses"]]
        assert len(shares) == 3
        assert shares == sorted(shares, reverse=True)


def test_a_guess_is_what_the_model_finds_likeliest_in_the_words_place(tokenizer):
    module = build(tokenizer).module
    module.student.eval()
    blanks = choose_blanks(module, data(tokenizer)[1], count=3, seed=0)
    assert len({len(blank.input_ids) for blank in blanks}) > 1  # they are padded beside each other
    fill_blanks(module, blanks)
    for blank in blanks:
        assert blank.input_ids[blank.place] == tokenizer.mask_token_id
        with torch.no_grad():
            scores = module.student(input_ids=blank.input_ids[None]).logits[0, blank.place].softmax(0)
        best = int(scores.argmax())
        assert blank.guesses[0][0] == tokenizer.decode([best])
        assert blank.guesses[0][1] == pytest.approx(float(scores[best]), rel=1e-4)


def test_samples_without_an_evaluation_come_at_the_end(tokenizer, tmp_path):
    train, val = data(tokenizer)
    build(tokenizer, eval_every=0, callbacks=[Samples(1, folder=str(tmp_path), show=False)]).train(
        train, val, total_steps=2
    )
    assert [line["step"] for line in samples(tmp_path)] == [2]


def test_a_stream_gives_samples_and_an_iterator_that_serves_one_pass_none(tokenizer):
    module = build(tokenizer).module
    held_out = texts(9, seed=1, low=6)
    stream = DataPipeline(lambda: iter(held_out), tokenizer, max_length=32)
    assert len(choose_blanks(module, stream, count=3, seed=0)) == 3
    assert choose_blanks(module, DataPipeline(iter(held_out), tokenizer, max_length=32), count=3, seed=0) == []


def test_texts_without_a_word_to_blank_give_none(tokenizer):
    module = build(tokenizer).module
    assert choose_blanks(module, DataPipeline(["a cat", "1234 5678 ????"], tokenizer), count=3, seed=0) == []


def test_a_long_text_is_shown_around_the_blank_in_whole_words(tokenizer):
    words = ["a", "cat", "sat", "on", "a", "mat", "and"] * 4
    text = " ".join([*words, "hills", *words])
    (blank,) = choose_blanks(build(tokenizer).module, DataPipeline([text], tokenizer), count=1, seed=0)
    assert blank.word == "hills"
    assert blank.before[0] == blank.after[-1] == "…"
    assert f" {blank.before[1:]}hills{blank.after[:-1]} " in text
    assert 40 < len(blank.before) <= 51
    assert 20 < len(blank.after) <= 31


def test_watching_a_run_changes_nothing_of_it(tokenizer, tmp_path, pipe):
    results = []
    for watched in (True, False):
        trainer = build(tokenizer, progress_bar=watched, log_every=1)
        result = trainer.train(*data(tokenizer), total_steps=6)
        results.append((result["losses"], result["eval_losses"], trainer.student.state_dict()))
    assert results[0][:2] == results[1][:2]
    assert all(torch.equal(results[0][2][name], results[1][2][name]) for name in results[0][2])


def test_tensorboard_gets_the_samples_as_a_table(tokenizer, tmp_path):
    settings = {"log_backend": "tensorboard", "save_dir": str(tmp_path), "run_name": "r"}
    build(tokenizer, callbacks=[Samples(1, folder="", show=False)], **settings).train(*data(tokenizer), total_steps=3)
    (log,) = {file.parent for file in tmp_path.rglob("events.*")}
    (event,) = EventAccumulator(str(log)).Reload().Tensors("samples/text_summary")
    text = event.tensor_proto.string_val[0].decode()
    assert event.step == 3
    assert text.startswith("| text | truth | guesses |\n| --- | --- | --- |\n")
    assert "____" in text


def test_wandb_gets_the_samples_as_a_table(tokenizer, tmp_path):
    wandb = pytest.importorskip("wandb")
    settings = {"log_backend": "wandb", "save_dir": str(tmp_path)}
    build(tokenizer, callbacks=[Samples(1, folder="", show=False)], **settings).train(*data(tokenizer), total_steps=3)
    (table,) = tmp_path.rglob("samples_3_*.table.json")
    wandb.finish()
    content = json.loads(table.read_text(encoding="utf-8"))
    assert content["columns"] == ["text", "truth", "guesses"]
    assert len(content["data"]) == 1
