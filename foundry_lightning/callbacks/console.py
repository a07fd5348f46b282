"""What a person at the terminal sees: what will be trained, how it goes, what the model can do at the end."""

from __future__ import annotations

import math
import time
from itertools import islice
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import Callback
from rich.console import Console
from rich.table import Table

from foundry_lightning.callbacks.after_update import AfterUpdate
from foundry_lightning.callbacks.start_report import StartReport
from foundry_lightning.data.pipeline import DataPipeline
from foundry_lightning.losses import vocabulary_loss
from foundry_lightning.masking import PIECE_SHIFT, permutation


def fill_blanks(module: Any, pipeline: DataPipeline, *, count: int, seed: int) -> list[tuple[str, str, str, float]]:
    """Blanks one word in each of some texts and lets the model fill it.

    Args:
        module: A module with a student, a projection and a tokenizer.
        pipeline: Where the texts come from; which ones, and which word, the seed decides.
        count: Number of texts.
        seed: The seed.

    Returns:
        (text around the blank, the word, the model's guess, its probability) of each.
    """
    tokenizer, found = module.tokenizer, []
    total = 1 + max(row_id & ((1 << PIECE_SHIFT) - 1) for row_id in pipeline.table["row_id"])
    for index in permutation(total, seed=seed, epoch=0).tolist():
        text = next(iter(pipeline.source.rows(index)))
        if not isinstance(text, str):
            break
        encoded = tokenizer(text, truncation=True, max_length=pipeline.max_length, return_tensors="pt")
        words = [w for w in encoded.word_ids(0) if w is not None]
        spans = {w: encoded.word_to_chars(0, w) for w in dict.fromkeys(words) if words.count(w) == 1}
        whole = [w for w, span in spans.items() if text[span.start : span.end].isalpha() and span.end - span.start > 3]
        if not whole:
            continue
        word = whole[int(permutation(len(whole), seed=seed, epoch=1, first=index)[0])]
        span = spans[word]
        place = encoded.word_ids(0).index(word)
        ids = encoded["input_ids"].to(module.device)
        ids[0, place] = tokenizer.mask_token_id
        inputs = {"input_ids": ids, "attention_mask": encoded["attention_mask"].to(module.device)}
        with torch.inference_mode():
            position = torch.tensor([place], device=module.device)
            scores = module.projection(module.student, inputs, positions=position).scored.scores()[0]
        probability, guess = scores[: module.masking.vocab_size].float().softmax(0).max(0)
        before, after = text[max(span.start - 50, 0) : span.start], text[span.end : span.end + 30]
        around = f"{before}____{after}".replace("\n", " ")
        found.append((around, text[span.start : span.end], tokenizer.decode([int(guess)]), float(probability)))
        if len(found) == count:
            break
    return found


def compare(module: Any, batches: Any) -> list[tuple[str, int, float, float]]:
    """Student and teacher on the same masked tokens.

    Args:
        module: A distillation module on its device.
        batches: Validation batches of our loader; at most 50 are taken.

    Returns:
        (name, parameters, mean cross-entropy in nats, attended tokens a second of the forward pass) of each.
    """
    models = [("student", module.student, module.projection), ("teacher", module.teacher, module.teacher_projection)]
    seconds, losses, tokens, masked_tokens = [0.0, 0.0], [0.0, 0.0], 0, 0
    with torch.no_grad():
        for batch in islice(batches, 50):
            batch = module.transfer_batch_to_device(batch, module.device, 0)
            masked = module.mask(batch)
            inputs = {**module.inputs(batch), "input_ids": masked.input_ids}
            tokens += batch["info"]["num_attended"]
            masked_tokens += batch["info"]["num_masked"]
            for n, (_, model, projection) in enumerate(models):
                began = time.perf_counter()
                scored = projection(model, inputs, positions=masked.positions).scored
                losses[n] += float(vocabulary_loss(scored, labels=masked.labels).ce_sum)
                seconds[n] += time.perf_counter() - began
    return [
        (name, sum(p.numel() for p in model.parameters()), losses[n] / max(masked_tokens, 1), tokens / seconds[n])
        for n, (name, model, _) in enumerate(models)
    ]


class ConsoleReport(AfterUpdate):
    """Prints a line at each log, each evaluation, and at the end some blanks filled.

    Args:
        blanks: Held-out texts in which the model fills a blank at the end.
    """

    def __init__(self, blanks: int = 3) -> None:
        self.blanks = blanks
        self.console = Console(highlight=False)
        self.baseline: float | None = None
        self._tokens, self._since = 0, 0.0

    def on_train_start(self, trainer: lightning.Trainer, pl_module: Any) -> None:
        """Takes the baseline from the start report, which stands before this callback."""
        super().on_train_start(trainer, pl_module)
        self._tokens, self._since = 0, time.monotonic()
        reports = [c for c in trainer.callbacks if isinstance(c, StartReport)]  # type: ignore[attr-defined]
        self.baseline = reports[0].facts.get("unigram_baseline") if reports else None

    def on_train_batch_end(
        self, trainer: lightning.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Counts tokens."""
        self._tokens += batch["info"].get("num_attended", 0)
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)

    def after_update(self, trainer: lightning.Trainer, module: Any) -> None:
        """Prints a line where a log is due."""
        step = trainer.global_step
        if step % module.log_every and not module.is_last_update():
            return
        metrics = module.window_metrics()
        if not trainer.is_global_zero:
            return
        seconds = max(time.monotonic() - self._since, 1e-9)
        total = trainer.estimated_stepping_batches
        parts = [f"step {step:>6}" + ("" if math.isinf(total) else f"/{int(total)}"), f"loss {metrics['loss']:.3f}"]
        if self.baseline is not None and "mlm" in metrics:
            parts.append(f"{metrics['mlm'] - self.baseline:+.3f} to the unigram baseline")
        parts.append(f"{self._tokens * trainer.world_size / seconds:,.0f} tokens/s")
        self.console.print(" | ".join(parts), soft_wrap=True)

    def on_validation_end(self, trainer: lightning.Trainer, pl_module: Any) -> None:
        """Prints the evaluation."""
        metrics = trainer.callback_metrics
        if trainer.is_global_zero and not trainer.sanity_checking and "val/loss" in metrics:
            shown = {name.removeprefix("val/"): float(metrics[name]) for name in metrics if name.startswith("val/")}
            if shown.get("mlm") == shown["loss"]:
                del shown["mlm"]
            text = ", ".join(f"{name.replace('_', ' ')} {value:.4g}" for name, value in shown.items())
            if self.baseline is not None:
                text += f" (unigram baseline {self.baseline:.4g})"
            self.console.print(f"validation: {text}", soft_wrap=True)
        super().on_validation_end(trainer, pl_module)

    def on_fit_end(self, trainer: lightning.Trainer, pl_module: Any) -> None:
        """Compares student and teacher, and fills blanks of held-out texts."""
        data = trainer.datamodule  # type: ignore[attr-defined]
        val = getattr(data, "val", None)
        if not (trainer.is_global_zero and isinstance(val, DataPipeline) and getattr(pl_module, "masking", None)):
            return
        pl_module.student.eval()
        if getattr(pl_module, "teacher", None) is not None:
            table = Table("", "parameters", "validation loss", "forward pass")
            for name, parameters, loss, speed in compare(pl_module, data.val_dataloader()):
                table.add_row(name, f"{parameters:,}", f"{loss:.3f}", f"{speed:,.0f} tokens/s")
            self.console.print(table)
        if not self.blanks or val.is_stream:
            return
        table = Table("held-out text", "truth", "guess", "probability")
        seed = pl_module.config.seed
        for text, truth, guess, probability in fill_blanks(pl_module, val, count=self.blanks, seed=seed):
            table.add_row(text, truth, guess, f"{probability:.2f}")
        if table.row_count:
            self.console.print(table)


class PrintGuesses(Callback):
    """Prints the guesses of `predict`."""

    def on_predict_batch_end(
        self,
        trainer: lightning.Trainer,
        pl_module: lightning.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """One line a text, one a blank."""
        console = Console(highlight=False)
        for text, blanks in zip(batch, outputs, strict=True):
            console.print(text, markup=False)
            for number, guesses in enumerate(blanks, 1):
                shown = ", ".join(f"{token.strip()} {probability:.2f}" for token, probability in guesses)
                console.print(f"  blank {number}: {shown}", markup=False)
            if not blanks:
                console.print("  no blank in this text; write the tokenizer's mask token where one should be.")
