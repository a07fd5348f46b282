"""From a text file to the first update, on the first start, on the next, and when a run goes on from a checkpoint.

A file of 20 MB, the model of configs/mlm.yaml (BERT 2 × 128, V = 8,000), batches of 16 rows; imports do not count. Each
side makes its trainer anew, three times: without a cache, with it, and from a checkpoint of update 200. The losses of
the 20 updates after it are held against those of the run that was not interrupted. The Hugging Face side reads the file
as its MLM example does (`load_dataset`, `map`, line by line); `olaverse-foundry` keeps no place in the data and no
schedule in its checkpoints, and begins with the first row again. Both are left out where they are missing.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from tests.benchmarks._rounds import Figures, in_turn, table, write
from tests.benchmarks.time_to_loss import prepared
from tests.benchmarks.tokenise import corpus

MEGABYTES, BATCH, LENGTH, SAVED, STEPS = 20, 16, 128, 200, 220
FIRST, NEXT, RESUMED = "seconds to the first update", "on the next start", "from update 200"

Start = Callable[[int, bool], tuple[float, list[float]]]
"""`start(updates, resumed)` makes a trainer, trains, and gives the seconds to its first update and all losses."""


class _EnoughError(Exception):
    """Ends a loop that has no other end."""


def figures(start: Start) -> Figures:
    """What a side's starts take, and how far its losses are from those of the uninterrupted run."""
    prepared()  # trains the tokenizer: no side's own work
    first, _ = start(1, False)
    _, whole = start(STEPS, False)
    following, _ = start(1, False)
    resumed, losses = start(STEPS, True)
    missed = max(abs(a - b) for a, b in zip(whole[SAVED:], losses[: STEPS - SAVED], strict=True))
    return {FIRST: first, NEXT: following, RESUMED: resumed, "largest miss of a loss": missed}


def ours(path: str) -> Figures:
    from foundry_lightning import DataPipeline, MLMConfig, MLMTrainer

    def start(updates: int, resumed: bool) -> tuple[float, list[float]]:
        seen: list[float] = []
        tokenizer, student = prepared()
        began = time.perf_counter()
        saving = {"save_dir": folder, "save_every": SAVED} if updates == STEPS and not resumed else {}
        config = MLMConfig(device="cpu", progress_bar=False, lr_scheduler="constant", log_every=1, **saving)
        trainer = MLMTrainer(student, tokenizer, config)
        if resumed:
            trainer.resume_from_checkpoint(Path(folder) / f"step={SAVED:08}.ckpt")
        pipe = DataPipeline(path, tokenizer, batch_size=BATCH, max_length=LENGTH)
        losses = trainer.train(
            pipe, on_step=lambda *_: seen.append(time.perf_counter()), shuffle=True, total_steps=updates
        )["losses"]
        return seen[0] - began, losses

    with tempfile.TemporaryDirectory() as folder:
        os.environ["FOUNDRY_LIGHTNING_CACHE"] = str(Path(folder) / "cache")
        return figures(start)


def hugging_face(path: str) -> Figures:
    from datasets import load_dataset
    from transformers import DataCollatorForLanguageModeling, Trainer, TrainerCallback, TrainingArguments

    def start(updates: int, resumed: bool) -> tuple[float, list[float]]:
        seen: list[float] = []

        class Watch(TrainerCallback):
            def on_step_end(self, *args, **kwargs):
                seen.append(time.perf_counter())

        def encoded(rows):
            return tokenizer(rows["text"], truncation=True, max_length=LENGTH, return_special_tokens_mask=True)

        tokenizer, student = prepared()
        began = time.perf_counter()
        texts = load_dataset("text", data_files=path, split="train", cache_dir=folder)
        rows = texts.map(encoded, batched=True, remove_columns=["text"])
        arguments = TrainingArguments(
            folder,
            per_device_train_batch_size=BATCH,
            max_steps=updates,
            save_strategy="steps" if updates == STEPS else "no",
            save_steps=SAVED,
            logging_steps=1,
            lr_scheduler_type="constant",
            use_cpu=True,
            report_to=[],
            disable_tqdm=True,
        )
        collate = DataCollatorForLanguageModeling(tokenizer)
        trainer = Trainer(student, arguments, train_dataset=rows, data_collator=collate, callbacks=[Watch()])
        trainer.train(resume_from_checkpoint=str(Path(folder) / f"checkpoint-{SAVED}") if resumed else None)
        logged = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        return seen[0] - began, logged[SAVED:] if resumed else logged

    with tempfile.TemporaryDirectory() as folder:
        return figures(start)


def olaverse_foundry(path: str) -> Figures:
    from foundry.data.pipeline import DataPipeline
    from foundry.training.mlm import MLMConfig, MLMTrainer

    def start(updates: int, resumed: bool) -> tuple[float, list[float]]:
        seen: list[float] = []
        losses: list[float] = []

        def on_step(step: int, loss: float) -> None:
            seen.append(time.perf_counter())
            losses.append(loss)
            if len(losses) == SAVED and not resumed:
                trainer.save_checkpoint(folder)
            if len(losses) == updates:
                raise _EnoughError

        tokenizer, student = prepared()
        began = time.perf_counter()
        config = MLMConfig(device="cpu", lr_scheduler="constant", log_every=1)
        trainer = MLMTrainer(student, tokenizer, config)
        if resumed:
            trainer.resume_from_checkpoint(folder)
        rows = Path(path).read_text().splitlines()
        pipe = DataPipeline(rows, tokenizer, batch_size=BATCH, max_length=LENGTH, mode="embed")
        with contextlib.suppress(_EnoughError):
            trainer.train(pipe, on_step=on_step)
        return seen[0] - began, losses

    with tempfile.TemporaryDirectory() as folder:
        return figures(start)


def run(*, threads: int, rounds: int, out: str) -> None:
    """All sides in turn; the ratio is that of the next start."""
    with tempfile.TemporaryDirectory() as folder:
        path = corpus(folder, megabytes=MEGABYTES)
        sides: dict[str, Callable[[], Figures]] = {"ours": partial(ours, path)}
        if importlib.util.find_spec("accelerate"):
            sides["Hugging Face Trainer"] = partial(hugging_face, path)
        if importlib.util.find_spec("foundry"):
            sides["olaverse-foundry 0.3.0"] = partial(olaverse_foundry, path)
        found = in_turn(sides, threads=threads, rounds=rounds)
    lines = table(found, ratio=NEXT, of="ours", higher_is_better=False)
    write("start_up", lines, found, out=out, bar=NEXT)
