"""Lists of batches that the user made, in the place of a `DataPipeline`."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from foundry_lightning.data.rows import Batch
from foundry_lightning.draws import permutation
from foundry_lightning.masking import attention_from


class ReadyBatches:
    """A list of batches that the user made: dicts with `input_ids`, or arrays of ids, `(B, S)` or `(S,)`.

    Args:
        batches: numpy or torch arrays or (nested) lists; dicts may hold `attention_mask`, `labels`,
            `token_type_ids` and `position_ids` beside.

    Raises:
        ValueError: an empty list, or a batch of a shape, type or key that does not fit.
    """

    is_stream = False
    tokenizer = None

    def __init__(self, batches: Sequence[Any]) -> None:
        if len(batches) == 0:
            raise ValueError("dataset is an empty list of batches; give at least one batch.")
        self.batches = [_ready_batch(batch, n) for n, batch in enumerate(batches)]
        sizes = [len(batch["input_ids"]) for batch in self.batches]
        self._first_rows = np.concatenate([[0], np.cumsum(sizes)[:-1]])
        self.max_length = max(batch["input_ids"].shape[1] for batch in self.batches)
        self.num_rows = sum(sizes)

    def bind(self, *, tokenizer: Any, word_ids: bool, pad_token_id: int) -> None:
        """Derives missing attention masks from the padding id.

        Raises:
            ValueError: words are needed.
        """
        if word_ids:
            raise ValueError("masking='whole_word' needs texts and a fast tokenizer; ready batches have no words.")
        for batch in self.batches:
            if "attention_mask" not in batch:
                batch["attention_mask"] = attention_from(batch["input_ids"], pad_token_id)

    def prepare(self) -> None:
        """Nothing to do: the batches are here."""

    def fingerprint(self) -> str:
        """Stable name of the content."""
        digest = hashlib.sha256()
        for batch in self.batches:
            for name, values in batch.items():
                digest.update(f"{name}{tuple(values.shape)}".encode())
                digest.update(values.numpy().tobytes())
        return digest.hexdigest()

    def source_problems(self) -> list[str]:
        """Nothing: the batches were checked when they came."""
        return []

    def largest_id(self) -> int:
        """The largest token id."""
        return max(int(batch["input_ids"].max()) for batch in self.batches)

    def largest_label(self) -> int:
        """The largest id that can be scored: a label, or where a batch has none an attended token."""
        scored = (batch.get("labels", batch["input_ids"] * batch["attention_mask"]) for batch in self.batches)
        return max(int(values.max()) for values in scored)

    def num_batches(self) -> int:
        """Number of batches."""
        return len(self.batches)

    def order(self, *, seed: int, epoch: int, shuffle: bool) -> np.ndarray | None:
        """`[batches]` permutation of this epoch, or None for the list's order."""
        return permutation(len(self.batches), seed=seed, epoch=epoch).numpy() if shuffle else None

    def row_numbers(self, number: int, *, seed: int, epoch: int, shuffle: bool) -> list[int]:
        """Row numbers of a batch."""
        batch = self.batch(number, self.order(seed=seed, epoch=epoch, shuffle=shuffle))
        return [int(row) for row in batch["row_ids"]]

    def batch(self, number: int, order: np.ndarray | None) -> Batch:
        """The batch with this number, with `row_ids` `[B]`: rows of all earlier batches of the list plus the index."""
        index = number if order is None else int(order[number])
        batch = dict(self.batches[index])
        batch["row_ids"] = torch.arange(len(batch["input_ids"])) + int(self._first_rows[index])
        return batch


def looks_ready(item: Any) -> bool:
    """Whether this first item of a list is a batch, rather than a row."""
    if isinstance(item, Mapping):
        ids = item.get("input_ids")
        return ids is not None and (hasattr(ids, "shape") or _is_nested(ids))
    return hasattr(item, "shape") or _is_nested(item)


def _is_nested(item: Any) -> bool:
    return isinstance(item, (list, tuple)) and len(item) > 0 and isinstance(item[0], (list, tuple, int, np.integer))


def _ready_batch(batch: Any, number: int) -> Batch:
    where = f"dataset[{number}]"
    entries = dict(batch) if isinstance(batch, Mapping) else {"input_ids": batch}
    if entries.get("input_ids") is None:
        keys = sorted(str(name) for name, value in entries.items() if value is not None)
        raise ValueError(f"{where} must hold 'input_ids', got the keys {keys}; give token ids.")
    result: Batch = {}
    for name in ("input_ids", "attention_mask", "labels", "token_type_ids", "position_ids"):
        if entries.get(name) is None:
            continue
        try:
            tensor = torch.as_tensor(
                np.asarray(entries[name]) if not isinstance(entries[name], Tensor) else entries[name]
            )
        except (TypeError, ValueError) as error:
            raise ValueError(f"{where}[{name!r}] must be a rectangular array of integers ({error}).") from error
        if tensor.dim() == 1:
            tensor = tensor.unsqueeze(0)
        if tensor.dim() != 2 or tensor.numel() == 0:
            raise ValueError(f"{where}[{name!r}] must have the shape (B, S) or (S,), got {tuple(tensor.shape)}.")
        is_bool = tensor.dtype == torch.bool and name != "attention_mask"
        if tensor.dtype.is_floating_point or tensor.dtype.is_complex or is_bool:
            raise ValueError(f"{where}[{name!r}] must hold integers, got {tensor.dtype}.")
        result[name] = tensor.to(device="cpu", dtype=torch.int64).clone()
        if tensor.shape != result["input_ids"].shape:
            raise ValueError(
                f"{where}[{name!r}] must have the shape of input_ids, got {tuple(tensor.shape)} and "
                f"{tuple(result['input_ids'].shape)}."
            )
    if int(result["input_ids"].min()) < 0:
        raise ValueError(f"{where}['input_ids'] must not hold negative ids, got {int(result['input_ids'].min())}.")
    attended, labels = result.get("attention_mask"), result.get("labels")
    if attended is not None and not ((attended == 0) | (attended == 1)).all():
        wrong = attended[(attended != 0) & (attended != 1)][0]
        raise ValueError(f"{where}['attention_mask'] must hold 0 and 1, got {int(wrong)}; 1 is an attended token.")
    if labels is not None and ((labels < 0) & (labels != -100)).any():
        wrong = labels[(labels < 0) & (labels != -100)][0]
        raise ValueError(f"{where}['labels'] must hold token ids, or -100 where none is scored, got {int(wrong)}.")
    return result
