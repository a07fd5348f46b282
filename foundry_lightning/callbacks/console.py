"""What a person at the terminal sees: how the run goes, student beside teacher at the end, guesses of `predict`."""

from __future__ import annotations

import math
import statistics
import time
from itertools import islice
from typing import Any, Literal, get_args

import lightning
import rich
import torch
from lightning.pytorch.callbacks import Callback
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from foundry_lightning.callbacks.after_update import AfterUpdate
from foundry_lightning.callbacks.start_report import StartReport
from foundry_lightning.losses import vocabulary_loss

Mode = Literal["auto", "bar", "plain", "quiet"]
_REFRESH = 0.1  # seconds between two drawings of the bar


def compare(module: Any, batches: Any) -> list[tuple[str, int, float, float]]:
    """Student and teacher on the same masked tokens.

    Args:
        module: A distillation module on its device.
        batches: Validation batches of our loader; at most 50 are taken.

    Returns:
        (name, parameters, mean cross-entropy in nats over all ranks, attended tokens a second of this rank's forward
        pass) of each; the first batch warms up, and the median of the others' rates counts.
    """
    models = [("student", module.student, module.projection), ("teacher", module.teacher, module.teacher_projection)]
    rates: list[list[float]] = [[], []]
    losses, masked_tokens = [0.0, 0.0], 0
    with torch.no_grad(), module.trainer.precision_plugin.val_step_context():
        for batch in islice(batches, 50):
            batch = module.transfer_batch_to_device(batch, module.device, 0)
            masked = module.mask(batch)
            masked_tokens += batch["info"]["num_masked"]
            for n, (name, model, projection) in enumerate(models):
                inputs = {**module.inputs(batch, of=name), "input_ids": masked.input_ids}
                began = time.perf_counter()
                scored = projection(model, inputs, positions=masked.positions).scored
                losses[n] += float(vocabulary_loss(scored, labels=masked.labels).ce_sum)
                if not batch["info"]["filler"]:
                    rates[n].append(batch["info"]["num_attended"] / (time.perf_counter() - began))
    sums = torch.tensor([*losses, masked_tokens], device=module.device)
    *losses, masked_tokens = module.trainer.strategy.reduce(sums, reduce_op="sum").tolist()
    return [
        (
            name,
            sum(p.numel() for p in model.parameters()),
            losses[n] / max(masked_tokens, 1),
            statistics.median(rates[n][1:] or rates[n] or [0.0]),
        )
        for n, (name, model, _) in enumerate(models)
    ]


class ConsoleReport(AfterUpdate):
    """Shows how a run goes: loss, its distance to the unigram baseline, rates, time left for the whole run.

    Args:
        mode: `bar` keeps one line that moves, `plain` prints a line at each log, `quiet` prints nothing; `auto` is a
            bar on a terminal and plain elsewhere (files, pipes, notebooks).

    Raises:
        ValueError: an unknown mode.
    """

    def __init__(self, mode: Mode = "auto") -> None:
        if mode not in get_args(Mode):
            raise ValueError(f"mode must be one of {', '.join(map(repr, get_args(Mode)))}, got {mode!r}.")
        self.mode = mode
        self._total: int | None = None
        self._bar: Progress | None = None
        self._began, self._drawn = 0.0, 0.0
        self._first_step = 0

    def on_train_start(self, trainer: lightning.Trainer, pl_module: Any) -> None:
        """Starts the clock, and the bar where one is shown."""
        super().on_train_start(trainer, pl_module)
        self._began, self._first_step = time.monotonic(), trainer.global_step
        total = pl_module._num_updates()
        self._total = None if math.isinf(total) else int(total)
        console = rich.get_console()
        moves = console.is_terminal and not console.is_jupyter and not console.is_dumb_terminal
        if trainer.is_global_zero and (self.mode == "bar" or (self.mode == "auto" and moves)):
            columns = (BarColumn(bar_width=None), MofNCompleteColumn(), TextColumn("{task.description}"))
            # drawn by this thread alone: a lock that another held while a data worker is forked would stay locked there
            self._bar = Progress(
                *columns, expand=True, auto_refresh=False, redirect_stdout=False, redirect_stderr=False, transient=True
            )
            self._bar.add_task("", total=self._total, completed=trainer.global_step)
            self._bar.start()
        elif trainer.is_global_zero and self.mode != "quiet":
            every = pl_module.log_every
            text = f"training on {pl_module.device}; a line follows every {every} updates"
            console.print(text if every > 1 else f"training on {pl_module.device}", soft_wrap=True, highlight=False)

    def on_train_batch_end(
        self, trainer: lightning.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Moves the bar."""
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        if self._bar is not None and time.monotonic() - self._drawn > _REFRESH:
            self._drawn = time.monotonic()
            self._bar.update(self._bar.task_ids[0], completed=trainer.global_step)
            self._bar.refresh()

    def after_update(self, trainer: lightning.Trainer, module: Any) -> None:
        """Shows the figures."""
        metrics = module.window_metrics()
        if not trainer.is_global_zero or self.mode == "quiet":
            return
        parts = self._figures(trainer, metrics)
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], description=" ".join(parts), completed=trainer.global_step)
            self._bar.refresh()
            return
        parts.insert(0, f"step {trainer.global_step:>6}" + ("" if self._total is None else f"/{self._total}"))
        rich.get_console().print(" | ".join(parts), soft_wrap=True, highlight=False)

    def _figures(self, trainer: lightning.Trainer, metrics: dict[str, float]) -> list[str]:
        parts = [f"loss {metrics['loss']:.3f}"]
        baseline = _baseline(trainer)
        if "mlm" in metrics:
            if metrics["mlm"] != metrics["loss"]:
                parts.append(f"mlm {metrics['mlm']:.3f}")
            if baseline is not None:
                to = "to baseline" if self._bar is not None else "to the unigram baseline"
                parts.append(f"{metrics['mlm'] - baseline:+.3f} {to}")
            parts.append(f"perplexity {math.exp(min(metrics['mlm'], 700)):,.4g}")
        parts += [f"lr {metrics['learning_rate']:.2e}", f"{metrics['tokens_per_second']:,.0f} tokens/s"]
        done = trainer.global_step - self._first_step
        if self._total is not None and done:
            left = (time.monotonic() - self._began) / done * (self._total - trainer.global_step)
            parts.append(f"{_clock(left)} left")
        return parts

    def on_validation_end(self, trainer: lightning.Trainer, pl_module: Any) -> None:
        """Prints the evaluation, after the update it follows."""
        super().on_validation_end(trainer, pl_module)
        metrics = trainer.callback_metrics
        shows = trainer.is_global_zero and not trainer.sanity_checking and self.mode != "quiet"
        if shows and "val/loss" in metrics:
            shown = {name.removeprefix("val/"): float(metrics[name]) for name in metrics if name.startswith("val/")}
            if shown.get("mlm") == shown["loss"]:
                del shown["mlm"]
            text = ", ".join(f"{name.replace('_', ' ')} {value:.4g}" for name, value in shown.items())
            baseline = _baseline(trainer)
            if baseline is not None:
                text += f" (unigram baseline {baseline:.4g})"
            step = f" at step {trainer.fit_loop.epoch_loop.global_step}" if trainer.state.fn == "fit" else ""
            rich.get_console().print(f"validation{step}: {text}", soft_wrap=True, highlight=False)

    def on_train_end(self, trainer: lightning.Trainer, pl_module: Any) -> None:
        """Takes the bar away, and says how long it took."""
        super().on_train_end(trainer, pl_module)
        self._stop()
        if trainer.is_global_zero and self.mode != "quiet":
            done, tokens = trainer.global_step - self._first_step, pl_module.meter.tokens_of_session
            text = f"{done:,} updates, {tokens:,} tokens in {_clock(time.monotonic() - self._began)}"
            rich.get_console().print(text, soft_wrap=True, highlight=False)

    def on_exception(self, trainer: lightning.Trainer, pl_module: Any, exception: BaseException) -> None:
        """Takes the bar away."""
        self._stop()

    def _stop(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def _baseline(trainer: lightning.Trainer) -> float | None:
    """The unigram baseline that the start report found."""
    reports = [c for c in trainer.callbacks if isinstance(c, StartReport)]  # type: ignore[attr-defined]
    found: float | None = reports[0].facts.get("unigram_baseline") if reports else None
    return found


def _clock(seconds: float) -> str:
    minutes, rest = divmod(max(round(seconds), 0), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


class CompareWithTeacher(Callback):
    """Prints at the end student and teacher on the validation data: size, loss, speed."""

    def on_train_end(self, trainer: lightning.Trainer, pl_module: Any) -> None:
        """Compares them where there are both, on all ranks: the loader's totals are collective."""
        data = trainer.datamodule  # type: ignore[attr-defined]
        distils = getattr(pl_module, "teacher", None) is not None and getattr(pl_module, "masking", None) is not None
        if not distils or getattr(data, "val", None) is None:
            return
        pl_module.student.eval()
        found = compare(pl_module, data.val_dataloader())
        pl_module.student.train()
        if not trainer.is_global_zero:
            return
        table = Table("", "parameters", "validation loss", "forward pass")
        for name, parameters, loss, speed in found:
            table.add_row(name, f"{parameters:,}", f"{loss:.3f}", f"{speed:,.0f} tokens/s")
        rich.print(table)


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
        console = rich.get_console()
        for text, blanks in zip(batch, outputs, strict=True):
            console.print(text, markup=False, highlight=False)
            for number, guesses in enumerate(blanks, 1):
                shown = ", ".join(f"{token.strip()} {probability:.2f}" for token, probability in guesses)
                console.print(f"  blank {number}: {shown}", markup=False, highlight=False)
            if not blanks:
                console.print(
                    "  no blank in this text; write the tokenizer's mask token where one should be.", highlight=False
                )
