"""The first batch of a fit: forward, backward, one evaluation step, and what they take; then the fit is ended."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import Callback

from foundry_lightning.data.order import PAD_TO
from foundry_lightning.data.pipeline import DataPipeline
from foundry_lightning.facts import facts_of
from foundry_lightning.models import left_untouched

MIB = 2**20


class Advice(str):
    """A sentence of a check that found no problem, but something to look at."""


class Enough(Exception):
    """Ends a fit before its first update."""


class FirstBatch(Callback):
    """Looks at a fit until its first batch is there."""

    trainer: Any
    module: Any
    batch: Any
    facts: Mapping[str, Any]

    def __init__(self, look: Callable[[FirstBatch], None]) -> None:
        self.look = look
        self.grown: int | None = None

    def on_train_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """What the start report would tell."""
        self.facts = facts_of(trainer, pl_module)

    def on_train_batch_start(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Checks, and ends the fit."""
        self.trainer, self.module, self.batch = trainer, pl_module, batch
        buffers = [(buffer, buffer.clone()) for buffer in pl_module.buffers()]
        self.look(self)
        pl_module.zero_grad()
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)
        raise Enough

    def plan(self) -> str:
        """How long the run is."""
        plan = self.facts["plan"]
        window, of_epoch = plan["batches_per_update"], plan["batches_per_epoch"]
        if plan["updates"] is None:
            return "the run ends when it is stopped."
        text = f"{plan['updates']:,} updates of {window} batch{'es' * (window > 1)}"
        if not of_epoch:
            return f"{text} of a stream."
        epochs = plan["epochs_planned"]
        text += f", {epochs:.3g} pass{'es' * (epochs != 1)} over {of_epoch:,} batches"
        if epochs < 1:
            return Advice(f"{text}: the rest of the data is never seen; raise --trainer.max_steps to see all of it.")
        return f"{text}."

    def forward(self) -> str:
        """Forward and backward of the first batch as the fit would do them."""
        self.module.on_train_batch_start(self.batch, 0)
        with _grown_memory(self.module.device) as grown:
            output = self.trainer.strategy.training_step(self.batch, 0)
            self.trainer.strategy.backward(output["loss"], self.trainer.optimizers[0])
        self.grown = grown[0] if grown else None
        loss, info = float(output["batch_loss"]), self.batch["info"]
        rows, width = self.batch["input_ids"].shape
        what = f"{rows} × {width} tokens" + (f", {info['num_masked']:,} masked" if "num_masked" in info else "")
        if not torch.isfinite(output["batch_loss"]):
            raise ValueError(
                f"the loss of the first batch ({what}) is {loss}; look at the student's weights and at these rows."
            )
        if not sum(value for name, value in info.items() if name.startswith("num_")):
            return Advice(f"{what}: it teaches nothing; look at the texts, they hold special tokens only.")
        return f"{what}, loss {loss:.4f}."

    def gradients(self) -> str:
        """Whether each parameter has a finite gradient."""
        parameters = [p for p in self.module.parameters() if p.requires_grad]
        norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        scaled = self.trainer.precision == "16-mixed"  # an overflow is how the scaler finds its scale
        if not scaled and not torch.isfinite(norm):
            raise ValueError(
                f"the gradient's norm is {float(norm)} though the loss is finite; look at the student's layers."
            )
        idle = sum(p.numel() for p in parameters if p.grad is None)
        if idle:
            return Advice(f"no loss reaches {idle:,} of the trainable parameters; they stay as they are.")
        return "finite." if scaled else f"finite, norm {float(norm):.3g}."

    def validation(self) -> str:
        """One evaluation step."""
        data, module = self.trainer.datamodule, self.module
        batches = iter(data.val_dataloader())
        batch = next(batches)
        batches.close()
        batch = module.transfer_batch_to_device(batch, module.device, 0)
        with left_untouched(module.student), self.trainer.precision_plugin.val_step_context():
            module.validation_step(batch, 0)
        means = module.val_metric.compute()
        module.val_metric.reset()
        wrong = [name for name, value in means.items() if not torch.isfinite(value)]
        if wrong:
            raise ValueError(f"{', '.join(wrong)} of the first validation batch is not finite; look at its rows.")
        return ", ".join(f"{name.replace('_', ' ')} {float(value):.4f}" for name, value in means.items()) + "."

    def memory(self) -> str:
        """What the run takes at its largest batch, beside what is free."""
        memory, rows = self.facts["memory"], self.batch["input_ids"].numel()
        device, free = self.module.device, memory["memory_free"]
        if self.grown is None:
            known = f"{memory['memory_without_activations'] / MIB:,.0f} MiB for weights, gradients and optimizer state"
            return Advice(f"{known}; activations cannot be measured on {device.type}.")
        largest = max(_largest_batch(self.trainer.datamodule.train), rows)
        activations = max(self.grown - memory["memory_of_gradients"], 0) * largest / rows
        needed = memory["memory_to_come"] + activations
        text = (
            f"{memory['memory_without_activations'] / MIB:,.0f} MiB for weights, gradients and optimizer state, about "
            f"{activations / MIB:,.0f} MiB for a batch of {largest:,} places (measured with {rows:,})"
        )
        if free is None:
            return Advice(f"{text}; this system does not say how much is free.")
        if needed > free:
            raise ValueError(
                f"{text}, {needed / MIB:,.0f} MiB of it still to come, and {free / MIB:,.0f} MiB are free; lower "
                "batch_size (and raise accumulate_grad_batches), or set gradient_checkpointing=True."
            )
        return f"{text}; {free / MIB:,.0f} MiB are free."


def _largest_batch(batches: Any) -> int:
    """Places of the largest batch, padding included."""
    if not isinstance(batches, DataPipeline):
        return max(int(batch["input_ids"].numel()) for batch in batches.batches)
    if batches.batch_tokens is not None:
        return batches.batch_tokens
    longest = batches.max_length
    if not (batches.pack or batches.is_stream):
        longest = min(-(-int(batches.lengths.max()) // PAD_TO) * PAD_TO, longest)
    return batches.batch_size * longest


@contextmanager
def _grown_memory(device: torch.device) -> Iterator[list[int]]:
    """Leaves in the list by how many bytes the memory in use grew at most; nothing where that cannot be measured."""
    grown: list[int] = []
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        yield grown
        grown.append(torch.cuda.max_memory_allocated(device) - before)
        return
    status, reset = Path("/proc/self/status"), Path("/proc/self/clear_refs")
    if device.type != "cpu" or not os.access(reset, os.W_OK):
        yield grown
        return

    def resident(name: str) -> int:
        found = re.search(rf"{name}:\s+(\d+) kB", status.read_text())
        assert found is not None
        return int(found[1]) * 1024

    reset.write_text("5")  # the peak begins anew
    before = resident("VmRSS")
    yield grown
    grown.append(resident("VmHWM") - before)
