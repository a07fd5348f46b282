"""What happens to an update whose loss or gradient is not finite."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.utilities import rank_zero_warn
from safetensors.torch import save_file
from torch import Tensor

from foundry_lightning.callbacks.save_every import SaveEvery
from foundry_lightning.data.loader import host_group

_MOST_IN_A_ROW = 20
_KEPT = ("input_ids", "attention_mask", "labels", "row_ids")


class FiniteGuard:
    """Refuses updates before a weight changes, on all ranks alike, and says which rows they were.

    Args:
        skip: Whether the run goes on (20 refusals in a row end it), or ends at the first one.
    """

    def __init__(self, *, skip: bool) -> None:
        self.skip = skip
        self.num_refused = 0
        self._in_a_row = 0
        self._batches: list[tuple[dict[str, Any], Tensor, dict[str, Tensor]]] = []

    def begin_window(self) -> None:
        """Forgets the batches of the last window."""
        self._batches = []

    def keep(self, batch: Any, loss: Tensor) -> None:
        """Keeps a batch of the window, and its loss, until the update."""
        if not batch["info"]["filler"]:
            kept = {name: batch[name] for name in _KEPT if name in batch and batch[name].dim() <= 2}
            self._batches.append((batch["info"], loss, kept))

    def accept(self) -> None:
        """The update is fine."""
        self._in_a_row = 0

    def refuse(self, module: Any, optimizer: torch.optim.Optimizer) -> None:
        """Takes the gradients away, so that neither weights nor moments change. All ranks call it together.

        Raises:
            FloatingPointError: the run ends here; no weight has changed.
        """
        trainer = module.trainer
        self._in_a_row += 1
        self.num_refused += 1
        scaled = trainer.precision == "16-mixed"  # an overflow is how the scaler finds its scale
        ends = self._in_a_row >= _MOST_IN_A_ROW or not (self.skip or scaled)
        if ends or self.num_refused == 1:
            step = trainer.global_step + 1
            rows, files = self._offenders(module, step=step, write=ends or not scaled)
            shown = f"{rows[:20]}{'…' if len(rows) > 20 else ''}"
            text = f"loss or gradient of update {step} is not finite (rows {shown})"
            text += f", {self._in_a_row} times in a row" if self._in_a_row > 1 else ""
            text += "; no weight was changed"
            text += f"; the batches are in {', '.join(files)}" if files else ""
            if ends:
                raise FloatingPointError(text + "; lower learning_rate, or look at these rows.")
            rank_zero_warn(text + "; the run goes on, how many updates were left out is said at its end.")
        optimizer.zero_grad(set_to_none=True)

    def _offenders(self, module: Any, *, step: int, write: bool) -> tuple[list[int], list[str]]:
        """Rows, over all ranks, of the batches whose own loss is not finite (else of all), and their files."""
        trainer = module.trainer
        mine = [not bool(torch.isfinite(loss)) for _, loss, _ in self._batches]
        any_bad = any(entry for entries in _gather(mine) for entry in entries)
        chosen = [batch for batch, bad in zip(self._batches, mine, strict=True) if bad or not any_bad]
        rows = {row for _, _, kept in chosen for row in kept["row_ids"].flatten().tolist() if row >= 0}
        folder = next((c.folder(trainer) for c in trainer.callbacks if isinstance(c, SaveEvery)), None)
        if folder is None and module.by_facade and module.config.save_dir:
            folder = Path(module.config.save_dir)
        file = None
        if chosen and write and folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            file = str(folder / f"nonfinite-step={step:08d}-rank={trainer.global_rank}.safetensors")
            tensors = {
                f"batch={info['number']}.{name}": tensor.cpu().contiguous()
                for info, _, kept in chosen
                for name, tensor in kept.items()
            }
            save_file(tensors, file, metadata={"step": str(step), "epoch": str(chosen[0][0]["epoch"])})
        gathered = _gather((sorted(rows), file))
        return sorted({row for part, _ in gathered for row in part}), [name for _, name in gathered if name]


def _gather(value: Any) -> list[Any]:
    """The value of each rank."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return [value]
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value, group=host_group())
    return values
