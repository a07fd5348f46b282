"""Which tokens are masked, and what replaces them, by counter-based draws (`draws`): equal on every device.

Masks do not depend on batch size, order, workers, ranks, packing or resume. The 80/10/10 split is BERT's (Devlin et al.
2019, appendix C.2).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from foundry_lightning.config import MASKING_STRATEGIES, Checks, plain, problems_to_error
from foundry_lightning.draws import COUNT, CROSS, RANDOM, REPLACE, SELECT, SPAN, draw, draw32, row_keys, shift_right

PIECE_SHIFT = 40  # row number of piece p of a split text t: t + (p << PIECE_SHIFT)
_MEAN_SPAN = 3  # tokens; boundaries are drawn with probability 1 / _MEAN_SPAN


@dataclass(frozen=True)
class MaskedBatch:
    """A batch after masking.

    Attributes:
        input_ids: `[B, S]`, with masked tokens replaced.
        attention_mask: as given to the model; `[B, S]` of ones where none was given.
        positions: `[M]` int64, flat indices into `B·S` of the masked tokens, in reading order.
        labels: `[M]` int64, the original ids at `positions`.
        weight: 1 ÷ number of masked tokens of the window × the factors that undo Lightning's and DDP's averaging.
    """

    input_ids: Tensor
    attention_mask: Tensor
    positions: Tensor
    labels: Tensor
    weight: float = 1.0

    @property
    def dense_labels(self) -> Tensor:
        """`[B, S]` int64: the label where a token is masked, −100 elsewhere (Hugging Face's form)."""
        labels = self.input_ids.new_full((self.input_ids.numel(),), -100)
        labels[self.positions] = self.labels
        return labels.view_as(self.input_ids)


@dataclass(frozen=True)
class Masking:
    """The settings of masking, and its one implementation for host and device.

    Args:
        seed: Seed of all draws.
        mask_token_id: Written over masked tokens.
        special_token_ids: Never masked, never drawn.
        vocab_size: Number of ids the tokenizer has; random tokens are drawn below it.
        mask_prob: Expected share of the eligible tokens.
        strategy: `token`, `whole_word` or `span`.
        mask_replace_prob: Share of masked tokens that becomes the mask token.
        random_replace_prob: Share of masked tokens that becomes a random ordinary token.

    Raises:
        ValueError: a share outside its range, or no ordinary id left to draw from.
    """

    seed: int
    mask_token_id: int
    special_token_ids: tuple[int, ...]
    vocab_size: int
    mask_prob: float = 0.15
    strategy: str = "token"
    mask_replace_prob: float = 0.8
    random_replace_prob: float = 0.1

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            object.__setattr__(self, name, plain(value))
        checks = Checks(self)
        checks.integer("seed", low=0)
        checks.integer("mask_token_id", low=0)
        checks.token_ids("special_token_ids")
        checks.integer("vocab_size", low=1)
        checks.number("mask_prob", low=0, high=1, low_open=True)
        checks.choice("strategy", MASKING_STRATEGIES)
        checks.replacement_shares()
        problems_to_error(checks.problems, of="masking")
        special = tuple(sorted({int(i) for i in self.special_token_ids} | {int(self.mask_token_id)}))
        object.__setattr__(self, "special_token_ids", special)
        if self.random_replace_prob > 0 and self._num_ordinary < 1:
            raise ValueError(f"vocab_size={self.vocab_size} leaves no ordinary token beside the special ids {special}.")

    @property
    def _num_ordinary(self) -> int:
        return self.vocab_size - sum(i < self.vocab_size for i in self.special_token_ids)

    def eligible(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """`[B, S]` bool: attended and not a special id."""
        special = _on_device(self.special_token_ids, input_ids.device)
        place = torch.searchsorted(special, input_ids).clamp(max=len(special) - 1)  # torch.isin makes the host wait
        return attention_mask.bool() & (special[place] != input_ids)

    def select(
        self,
        input_ids: Tensor,
        *,
        attention_mask: Tensor,
        row_ids: Tensor,
        epoch: int,
        word_ids: Tensor | None = None,
        text_ids: Tensor | None = None,
    ) -> Tensor:
        """Chooses the masked tokens.

        A text of `n` eligible tokens gets `(P·n + r) >> 32` masked ones, `P = round(mask_prob · 2^32)`, `r` 32 bits
        drawn for the text: exactly `mask_prob · n` in expectation. Units (tokens, words, spans) are taken in the
        order of their hashes; the unit that would pass the count is taken with probability (tokens still wanted ÷
        its length). A batch in which no text drew any gets its first unit in hash order.

        Args:
            input_ids: `[B, S]` int64.
            attention_mask: `[B, S]`, non-zero where attended.
            row_ids: `[B]` row numbers, or `[B, S]` where a row packs several texts.
            epoch: Epoch number.
            word_ids: `[B, S]` word of each token (−1: none), for `whole_word`.
            text_ids: `[B, S]` number of the text within its packed row; None where a row is one text.

        Returns:
            `[B, S]` bool.
        """
        batch_size, length = input_ids.shape
        num_tokens = batch_size * length
        attended = attention_mask.bool()
        eligible = self.eligible(input_ids, attention_mask)
        if num_tokens == 0:
            return eligible
        if row_ids.dim() == 1:
            row_ids = row_ids.unsqueeze(1).expand(batch_size, length)
        text = torch.arange(batch_size, device=input_ids.device).unsqueeze(1).expand(batch_size, length)
        if text_ids is not None:
            text = text * length + text_ids
        text_starts = changes(text)
        position = positions_in_text(attended, text)
        keys = row_keys(row_ids, seed=self.seed, epoch=epoch)

        # units: where one starts, counted over eligible tokens
        if self.strategy == "token":
            unit_starts = torch.ones_like(eligible)
        elif self.strategy == "whole_word":
            if word_ids is None:
                raise ValueError(
                    "masking 'whole_word' needs word_ids; use a fast tokenizer, or masking='token' for ready ids."
                )
            unit_starts = changes(word_ids) | text_starts
        else:
            drawn = draw32(keys, position, SPAN) < (1 << 32) // _MEAN_SPAN
            broken = torch.nn.functional.pad(~eligible[:, :-1], (1, 0), value=True)
            unit_starts = drawn | broken | text_starts
        unit_position = _carry(position, unit_starts)
        unit_hash = shift_right(draw(keys, unit_position, SELECT), 1)
        unit = unit_starts.long().cumsum(1) + torch.arange(batch_size, device=unit_starts.device).unsqueeze(1) * length

        # order tokens by (text, eligible first, hash of the unit, place): stable sorts, last key first
        flat_eligible = eligible.flatten()
        order = unit_hash.flatten().argsort(stable=True)
        order = order[(~flat_eligible[order]).long().argsort(stable=True)]
        order = order[text.flatten()[order].argsort(stable=True)]
        text_sorted, unit_sorted, eligible_sorted = text.flatten()[order], unit.flatten()[order], flat_eligible[order]
        place = torch.arange(num_tokens, device=order.device)
        first_of_text, size_of_text = _runs(text_sorted, eligible_sorted)
        # ineligible tokens are last in their text; give each a unit of its own, so that runs hold eligible ones only
        unit_key = torch.where(eligible_sorted, unit_sorted, -1 - place)
        first_of_unit, size_of_unit = _runs(unit_key, eligible_sorted)

        sorted_keys = keys.flatten()[order]
        threshold = round(self.mask_prob * (1 << 32))
        wanted = (threshold * size_of_text + draw32(sorted_keys, 0, COUNT)) >> 32
        before_unit = first_of_unit - first_of_text
        cross = draw32(sorted_keys, unit_position.flatten()[order], CROSS)
        takes = (before_unit + size_of_unit <= wanted) | (
            (before_unit < wanted) & (cross * size_of_unit < (wanted - before_unit) << 32)
        )
        chosen_sorted = takes & eligible_sorted
        # the batch drew none: the eligible unit with the smallest hash
        unit_hash_sorted = torch.where(eligible_sorted, unit_hash.flatten()[order], torch.iinfo(torch.int64).max)
        first = unit_hash_sorted.argmin().view(1)  # an index without dimensions would be read by the host
        smallest = unit_key == unit_key.index_select(0, first)
        chosen_sorted = chosen_sorted | (smallest & eligible_sorted & ~chosen_sorted.any())
        chosen = torch.empty_like(chosen_sorted)
        chosen[order] = chosen_sorted
        return chosen.view(batch_size, length)

    def __call__(
        self,
        input_ids: Tensor,
        *,
        attention_mask: Tensor,
        row_ids: Tensor,
        epoch: int,
        num_masked: int | None = None,
        word_ids: Tensor | None = None,
        text_ids: Tensor | None = None,
        weight: float = 1.0,
        model_mask: Any = None,
    ) -> MaskedBatch:
        """Masks a batch on its own device.

        Args:
            input_ids: `[B, S]`.
            attention_mask: `[B, S]`, non-zero where attended.
            row_ids: `[B]` or `[B, S]` row numbers.
            epoch: Epoch number.
            num_masked: M, known to the host; None reads it from the device (a host sync).
            word_ids: see `select`.
            text_ids: see `select`.
            weight: Passed on to the result.
            model_mask: What the model gets as attention mask, where that differs (packed rows).

        Returns:
            The masked batch; inputs are not changed.
        """
        chosen = self.select(
            input_ids,
            attention_mask=attention_mask,
            row_ids=row_ids,
            epoch=epoch,
            word_ids=word_ids,
            text_ids=text_ids,
        )
        positions = masked_positions(chosen, num_masked)
        labels = input_ids.flatten()[positions]
        replaced = self._replacements(input_ids, chosen, attention_mask, row_ids, epoch, text_ids)
        return MaskedBatch(
            input_ids=replaced,
            attention_mask=attention_mask if model_mask is None else model_mask,
            positions=positions,
            labels=labels,
            weight=weight,
        )

    def _replacements(
        self,
        input_ids: Tensor,
        chosen: Tensor,
        attention_mask: Tensor,
        row_ids: Tensor,
        epoch: int,
        text_ids: Tensor | None,
    ) -> Tensor:
        keys = row_keys(row_ids if row_ids.dim() == 2 else row_ids.unsqueeze(1), seed=self.seed, epoch=epoch)
        text_ids = torch.zeros_like(input_ids) if text_ids is None else text_ids
        position = positions_in_text(attention_mask.bool(), text_ids)
        split = draw32(keys, position, REPLACE)
        mask_below = round(self.mask_replace_prob * (1 << 32))
        random_below = round((self.mask_replace_prob + self.random_replace_prob) * (1 << 32))
        # the k-th ordinary id: k plus the number of special ids at or below it
        drawn = (draw32(keys, position, RANDOM) * max(self._num_ordinary, 1)) >> 32
        gaps = _on_device(tuple(i - n for n, i in enumerate(self.special_token_ids)), input_ids.device)
        random_ids = drawn + torch.searchsorted(gaps, drawn, right=True)
        replaced = torch.where(split < mask_below, self.mask_token_id, random_ids.to(input_ids.dtype))
        return torch.where(chosen & (split < random_below), replaced, input_ids)

    def count(self, batch: Mapping[str, Any], *, epoch: int) -> int:
        """Number of tokens that this masking will choose in a batch that lies on the host."""
        return int(self.select(**_selection_inputs(batch), epoch=epoch).sum())


def _selection_inputs(batch: Mapping[str, Any]) -> dict[str, Any]:
    names = ("input_ids", "attention_mask", "row_ids", "word_ids", "text_ids")
    return {name: batch[name] for name in names if name in batch}


@lru_cache(maxsize=64)
def _on_device(values: tuple[int, ...], device: torch.device) -> Tensor:
    """`[n]` int64; kept, since a copy to the device in every step would make the host wait."""
    return torch.tensor(values, dtype=torch.int64, device=device)


def changes(values: Tensor) -> Tensor:
    """`[B, S]` bool: True where a value differs from the one before it in its row; True at the row's start."""
    return torch.nn.functional.pad(values[:, 1:] != values[:, :-1], (1, 0), value=True)


def _carry(values: Tensor, starts: Tensor) -> Tensor:
    """`[B, S]`: the value at the last start at or before each place."""
    place = torch.arange(values.shape[1], device=values.device).expand_as(values)
    last = torch.where(starts, place, 0).cummax(1).values
    return values.gather(1, last)


def positions_in_text(attended: Tensor, text_ids: Tensor) -> Tensor:
    """`[B, S]`: attended tokens of the text before each place, so that padding on either side changes nothing."""
    before = attended.long().cumsum(1) - attended.long()
    return before - _carry(before, changes(text_ids))


def _runs(keys: Tensor, counted: Tensor) -> tuple[Tensor, Tensor]:
    """For each place of a sequence sorted into runs of equal keys: the run's first place, and its counted places."""
    place = torch.arange(keys.numel(), device=keys.device)
    starts = torch.nn.functional.pad(keys[1:] != keys[:-1], (1, 0), value=True)
    first = torch.where(starts, place, 0).cummax(0).values
    run = starts.long().cumsum(0) - 1
    sizes = torch.zeros_like(place).scatter_add_(0, run, counted.long())
    return first, sizes[run]


def attention_from(input_ids: Tensor, pad_token_id: int) -> Tensor:
    """`[B, S]` int64, 1 where a token is no padding: the `attention_mask` of rows that come without one."""
    return (input_ids != pad_token_id).long()


def masked_positions(chosen: Tensor, num_masked: int | None = None) -> Tensor:
    """`[M]` flat indices of the chosen places; without `num_masked` the host has to wait for the device."""
    flat = chosen.flatten()
    if num_masked is None:
        return flat.nonzero().squeeze(1)
    return torch.nonzero_static(flat, size=num_masked).squeeze(1)


def _is_integral(values: Tensor) -> bool:
    return not (values.is_floating_point() or values.is_complex() or values.dtype == torch.bool)


def mask_tokens(
    input_ids: Tensor,
    *,
    attention_mask: Tensor | None = None,
    row_ids: Tensor | Sequence[int],
    seed: int,
    epoch: int,
    mask_prob: float = 0.15,
    mask_token_id: int,
    special_token_ids: Sequence[int],
    vocab_size: int,
    strategy: str = "token",
    mask_replace_prob: float = 0.8,
    random_replace_prob: float = 0.1,
    word_ids: Tensor | None = None,
) -> MaskedBatch:
    """Masks a batch for masked-language modeling (Devlin et al. 2019).

    Args:
        input_ids: `[B, S]` int64.
        attention_mask: `[B, S]`, non-zero where attended; None: everything is.
        row_ids: `[B]` row numbers; they, not the place in the batch, decide the mask.
        seed: Seed of all draws.
        epoch: Epoch number.
        mask_prob: Expected share of the eligible tokens, in (0, 1].
        mask_token_id: Written over masked tokens.
        special_token_ids: Never masked, never drawn.
        vocab_size: Random tokens are drawn below it.
        strategy: `token`, `whole_word` or `span`.
        mask_replace_prob: Share of masked tokens that becomes the mask token.
        random_replace_prob: Share that becomes a random ordinary token; the rest stays.
        word_ids: `[B, S]` word of each token (−1: none), for `whole_word`.

    Raises:
        TypeError: `input_ids` is no tensor of integers.
        ValueError: a setting outside its range, shapes that do not fit, `whole_word` without word ids.

    Returns:
        The masked batch.
    """
    if not isinstance(input_ids, Tensor) or not _is_integral(input_ids):
        got: Any = input_ids.dtype if isinstance(input_ids, Tensor) else type(input_ids).__name__
        raise TypeError(f"input_ids must be a tensor of integers, got {got}; give int64 [batch, sequence].")
    if input_ids.dim() != 2:
        raise ValueError(f"input_ids must have the shape [batch, sequence], got {list(input_ids.shape)}.")
    try:
        rows = torch.as_tensor(row_ids, device=input_ids.device)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise ValueError(f"row_ids must be whole numbers of 64 bits, one per row, got {row_ids!r}.") from error
    if rows.dim() not in (1, 2) or rows.shape[0] != input_ids.shape[0]:
        got = f"the shape {list(rows.shape)}" if rows.dim() else "a single number"
        raise ValueError(
            f"row_ids must be one number per row of input_ids, got {got} for {input_ids.shape[0]} rows; "
            f"give [{input_ids.shape[0]}]."
        )
    if rows.numel() and not _is_integral(rows):
        raise ValueError(f"row_ids must be whole numbers, one per row, got {rows.dtype}; give int64.")
    if attention_mask is None:
        attention_mask = torch.ones_like(input_ids)
    for name, value in (("attention_mask", attention_mask), ("word_ids", word_ids)):
        if value is not None and getattr(value, "shape", None) != input_ids.shape:
            got = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise ValueError(f"{name} must have the shape of input_ids, got {got} and {list(input_ids.shape)}.")
    epoch = plain(epoch)
    checks = Checks(SimpleNamespace(epoch=epoch))
    checks.integer("epoch", low=0)
    problems_to_error(checks.problems, of="masking")
    masking = Masking(
        seed=seed,
        mask_token_id=mask_token_id,
        special_token_ids=special_token_ids,  # type: ignore[arg-type]  # made a tuple where it is checked
        vocab_size=vocab_size,
        mask_prob=mask_prob,
        strategy=strategy,
        mask_replace_prob=mask_replace_prob,
        random_replace_prob=random_replace_prob,
    )
    return masking(input_ids, attention_mask=attention_mask, row_ids=rows.long(), epoch=epoch, word_ids=word_ids)
