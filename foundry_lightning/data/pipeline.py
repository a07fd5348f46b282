"""From texts to batches of token ids: the embed-mode `DataPipeline`."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from datasets import Dataset
from datasets.arrow_writer import ArrowWriter
from datasets.fingerprint import Hasher
from filelock import FileLock
from torch import Tensor

from foundry_lightning.config import SEED_END, Checks, plain, problems_to_error
from foundry_lightning.data.corpus import cache_dir
from foundry_lightning.data.order import PAD_TO, Order, Plan, batches_of_tokens, grouped_order, packed_rows, plain_order
from foundry_lightning.data.rows import Batch, TokenRows
from foundry_lightning.data.sources import Source, open_source
from foundry_lightning.draws import permutation
from foundry_lightning.tokenizer import load_tokenizer, tokenizer_fingerprint

_GROUPED = 64  # batches over which rows of like lengths are gathered


class DataPipeline:
    """Batches of token ids from a source of texts (embed mode).

    Iterating gives dicts of `input_ids` and `attention_mask`, int64 `[B, S]` (with `pack` also `row_ids` and
    `text_ids`), padded to the longest row rounded up to a multiple of 8, never beyond `max_length`.

    Args:
        source: Texts: a list of strings or dicts, a Hugging Face `Dataset` or `IterableDataset`, a file or glob
            (`.txt`, `.jsonl`, `.gz`, `.zst`, `.parquet`), an embedded corpus (`python-docs`), a callable that returns
            an iterator, any iterable, or rows of ready token ids.
        tokenizer: A Hugging Face tokenizer, or its folder or hub name; None: the trainer's.
        batch_size: Rows of a batch.
        max_length: Longest row in tokens.
        mode: Only `embed`.
        shuffle_buffer: Streams: consecutive blocks of so many rows are permuted. Sized sources: any value above 0
            permutes all rows.
        text_column: Column of the text in dicts, data sets and files.
        long_rows: `truncate` cuts a text at `max_length`, `split` keeps all of it in several rows (a word that lies
            across two of them counts as a word in each).
        group_by_length: Batches hold rows of like lengths, so that little is padding; sized sources only. For models
            that cannot `pack`: rows of one length are texts of one kind, and learning from them alone is slower.
        pack: Several texts share a row of `max_length`, kept apart by the attention mask; sized sources only. Batches
            have `row_ids` and `text_ids` `[B, S]` then.
        batch_tokens: Places of a batch, padding included, in the place of `batch_size`; with `pack` or
            `group_by_length`.
        split_txt: `.txt` files give a text a `line` or a `paragraph` (separated by blank lines).
        pad_token_id: Padding id; None: the tokenizer's, else 0.
        seed: Seed of the order where the pipeline is iterated by itself.

    Raises:
        ValueError: a setting outside its rule, or a source that cannot be read.
        FileNotFoundError: a file that is not there.
    """

    def __init__(
        self,
        source: Any,
        tokenizer: Any = None,
        batch_size: int = 8,
        max_length: int = 512,
        mode: str = "embed",
        shuffle_buffer: int = 0,
        text_column: str = "text",
        *,
        long_rows: str = "truncate",
        group_by_length: bool = False,
        pack: bool = False,
        batch_tokens: int | None = None,
        split_txt: str = "line",
        pad_token_id: int | None = None,
        seed: int = 42,
    ) -> None:
        batch_size, max_length, shuffle_buffer = plain(batch_size), plain(max_length), plain(shuffle_buffer)
        batch_tokens, pad_token_id, seed = plain(batch_tokens), plain(pad_token_id), plain(seed)
        given = {"batch_size": batch_size, "max_length": max_length, "shuffle_buffer": shuffle_buffer, "seed": seed}
        given |= {"pad_token_id": pad_token_id, "group_by_length": group_by_length, "pack": pack}
        checks = Checks(SimpleNamespace(**given, batch_tokens=batch_tokens))
        checks.integer("batch_size", low=1)
        checks.integer("max_length", low=1)
        checks.integer("shuffle_buffer", low=0)
        checks.integer("pad_token_id", low=0, optional=True)
        checks.integer("seed", low=0, high=SEED_END)
        checks.kind("group_by_length", bool, "True or False")
        checks.kind("pack", bool, "True or False")
        checks.integer("batch_tokens", low=1, optional=True)
        if not checks.problems and pack and group_by_length:
            checks.problems.append("pack and group_by_length both fill batches, got both; leave one out.")
        if not checks.problems and batch_tokens is not None:
            if not (pack or group_by_length):
                checks.problems.append(
                    f"batch_tokens needs pack=True or group_by_length=True, got {batch_tokens} alone; set one, or "
                    "batch_size."
                )
            elif batch_tokens < -(-max_length // PAD_TO) * PAD_TO:
                checks.problems.append(
                    f"batch_tokens must hold a row of max_length={max_length}, padded to a multiple of {PAD_TO}, got "
                    f"{batch_tokens}; raise it."
                )
        if mode != "embed":
            checks.problems.append(
                f"mode must be 'embed' (input_ids and attention_mask), got {mode!r}; other modes do not exist here."
            )
        if long_rows not in ("truncate", "split"):
            checks.problems.append(f"long_rows must be 'truncate' or 'split', got {long_rows!r}.")
        problems_to_error(checks.problems, of="DataPipeline")
        self.source = (
            source if isinstance(source, Source) else open_source(source, text_column=text_column, split_txt=split_txt)
        )
        self.tokenizer = None if tokenizer is None else load_tokenizer(tokenizer, source=self.source)
        self._has_own_tokenizer = tokenizer is not None
        self.batch_size, self.max_length, self.shuffle_buffer = batch_size, max_length, shuffle_buffer
        self.long_rows, self.seed, self._pad, self._bound_pad = long_rows, seed, pad_token_id, 0
        self._check_padding()
        self.group_by_length, self.pack, self.batch_tokens = group_by_length, pack, batch_tokens
        for name in ("group_by_length", "pack"):
            if getattr(self, name) and self.is_stream:
                raise ValueError(
                    f"{name}=True needs the lengths of all rows, and {self.source.description} is a stream; "
                    "leave it out, or load the source as a Dataset."
                )
        self.word_ids = False
        self.num_ids: int | None = None  # of the model, once it is known
        self._table: Dataset | None = None
        self._made: tuple[Any, dict[str, Any], TokenRows] | None = None
        self._fingerprint: str | None = None

    @property
    def is_stream(self) -> bool:
        """Whether the number of rows is unknown until the source ends."""
        return self.source.is_stream

    @property
    def pad_token_id(self) -> int:
        """Id written over padding."""
        known = getattr(self.tokenizer, "pad_token_id", None) if self._pad is None else self._pad
        return self._bound_pad if known is None else int(known)

    def _check_padding(self) -> None:
        known = getattr(self.tokenizer, "pad_token_id", None)
        if None not in (self._pad, known) and self._pad != known:
            raise ValueError(
                f"DataPipeline.pad_token_id must be the tokenizer's, {known}, got {self._pad}; leave it out."
            )

    def bind(self, *, tokenizer: Any, word_ids: bool, pad_token_id: int) -> None:
        """Takes over what the module knows: its tokenizer, whether words are needed, the padding id.

        Raises:
            ValueError: the pipeline has a tokenizer of its own that differs.
        """
        if tokenizer is not None and self.tokenizer is None:
            self.tokenizer = tokenizer
        elif tokenizer is not None and tokenizer_fingerprint(tokenizer) != tokenizer_fingerprint(self.tokenizer):
            if self._has_own_tokenizer:
                raise ValueError(
                    "DataPipeline.tokenizer must be the trainer's tokenizer, got another one; leave it out of the "
                    "pipeline."
                )
            self.tokenizer, self._table = tokenizer, None  # another trainer's
        self._bound_pad = pad_token_id
        self._check_padding()
        if word_ids != self.word_ids:
            self.word_ids, self._table = word_ids, None
        self._fingerprint = None

    @property
    def _rows(self) -> TokenRows:
        """Made once for the present settings: copying the tokenizer's engine for each batch would be slow."""
        settings: dict[str, Any] = {
            "max_length": self.max_length,
            "long_rows": self.long_rows,
            "word_ids": self.word_ids,
            "num_ids": self.num_ids,
        }
        if self._made is None or self._made[0] is not self.tokenizer or self._made[1] != settings:
            self._made = (self.tokenizer, settings, TokenRows(self.tokenizer, **settings))
        return self._made[2]

    def fingerprint(self) -> str | None:
        """Stable name of the tokenised rows, computed once: each checkpoint holds it; None for streams."""
        if self._fingerprint is None and not self.is_stream:
            content = self.source.fingerprint()
            tokenizer = None if self.tokenizer is None else tokenizer_fingerprint(self.tokenizer)
            rows = [content, tokenizer, self.max_length, self.long_rows, self.word_ids, 1]
            self._fingerprint = str(Hasher.hash(rows))
        return self._fingerprint

    @property
    def table(self) -> Dataset:
        """The tokenised rows of a sized source: columns `input_ids`, `row_id` and, for whole words, `word_ids`.

        A source that came as a list stays in memory; others are written once to the cache folder and mapped.
        """
        if self._table is None:
            self._table = self._tokenise()
        return self._table

    def prepare(self) -> None:
        """Tokenises a sized source, once for all processes of this machine."""
        if not self.is_stream:
            _ = self.table

    def _tokenise(self) -> Dataset:
        if self.is_stream:
            raise TypeError(f"{self.source.description} is a stream and has no table of rows; give total_steps.")
        if self.source.in_memory:
            tables = list(self._rows.tables(self.source))
            if not tables:
                raise ValueError(f"{self.source.description} is empty; give at least one text.")
            return Dataset(pa.concat_tables(tables).combine_chunks())
        path = cache_dir() / "rows" / f"{self.fingerprint()}.arrow"
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{path}.lock"):
            if not path.exists():
                partial = Path(f"{path}.{os.getpid()}.partial")
                try:
                    with ArrowWriter(path=str(partial)) as writer:
                        for table in self._rows.tables(self.source):
                            writer.write_table(table)
                        num_rows, _ = writer.finalize()
                    if num_rows == 0:
                        raise ValueError(f"{self.source.description} is empty; give at least one text.")
                    os.replace(partial, path)
                finally:
                    partial.unlink(missing_ok=True)
        return Dataset.from_file(str(path))

    def rows_of(self, items: Sequence[Any]) -> list[dict[str, Any]]:
        """The tokenised rows of some texts (or ready ids)."""
        return self._rows(items, range(len(items)))

    def untruncated_lengths(self, items: Sequence[Any]) -> np.ndarray | None:
        """`[items]` tokens of each text as if `max_length` cut none; None where no fast tokenizer can count them."""
        if items and not isinstance(items[0], str):
            return np.array([len(ids) for ids in items])
        if not getattr(self.tokenizer, "is_fast", False):
            return None
        return self._rows.untruncated_lengths(items)

    def source_problems(self) -> list[str]:
        """What is wrong with the first rows of a sized source."""
        try:
            if not self.is_stream:
                self.source.validate()
        except ValueError as error:
            return [str(error)]
        return []

    def largest_id(self) -> int | None:
        """The largest token id of ready rows; None where a tokenizer makes the ids, or for a stream."""
        if self.is_stream or isinstance(next(self.source.rows()), str):
            return None
        values = self.table.data.column("input_ids").combine_chunks()
        return pc.max(pc.list_flatten(values)).as_py()  # type: ignore[no-any-return]

    def num_batches(self) -> int:
        """Batches of one epoch.

        Raises:
            TypeError: the source is a stream.
        """
        if self.is_stream:
            raise TypeError(
                f"{self.source.description} is a stream and has no length; give total_steps to train(), "
                "or load it as a Dataset."
            )
        groups = len(self.table) if self._plan is None else len(self._plan.starts) - 1
        return math.ceil(groups / self._groups_of_batch)

    def __len__(self) -> int:
        """Batches of one epoch."""
        return self.num_batches()

    def order(self, *, seed: int, epoch: int, shuffle: bool) -> Order:
        """The rows of this epoch, in the groups that `batch` reads."""
        settings: dict[str, Any] = {"seed": seed, "epoch": epoch, "shuffle": shuffle or self.shuffle_buffer > 0}
        if self._plan is not None:
            return self._plan.order(self.lengths, **settings)
        if self.group_by_length:
            return grouped_order(self.lengths, **settings, batch_size=self.batch_size, over=_GROUPED)
        return plain_order(len(self.table), **settings)

    @property
    def lengths(self) -> np.ndarray:
        """`[rows]` tokens of each row of the table."""
        return pc.list_value_length(self.table.data.column("input_ids")).to_numpy()  # type: ignore[no-any-return]

    @cached_property
    def _plan(self) -> Plan | None:
        """Which rows share a packed row (with `pack`) or a batch (with `batch_tokens` alone)."""
        if self.pack:
            return packed_rows(self.lengths, max_length=self.max_length)
        if self.batch_tokens is not None:
            return batches_of_tokens(self.lengths, batch_tokens=self.batch_tokens)
        return None

    @property
    def _groups_of_batch(self) -> int:
        if self.batch_tokens is None:
            return self.batch_size
        return self.batch_tokens // self.max_length if self.pack else 1

    def batch(self, number: int, order: Order) -> Batch:
        """The batch with this number, with `row_ids` `[B]` and, for whole words, `word_ids` `[B, S]`.

        Packed rows have `row_ids` `[B, S]` and `text_ids` `[B, S]`, the number of the text within its row.
        """
        groups = order.groups(number * self._groups_of_batch, (number + 1) * self._groups_of_batch)
        # arrow, not numpy: that format takes a lock shared by all workers, which a killed one never gives back
        table = self.table.with_format("arrow")[[row for group in groups for row in group]]
        columns = {name: table[name].to_numpy() for name in table.column_names}
        rows = iter([dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)])
        if self.pack:
            return self._collate([list(islice(rows, len(group))) for group in groups])
        return self._collate([[row] for row in rows])

    def row_numbers(self, number: int, *, seed: int, epoch: int, shuffle: bool) -> list[int]:
        """Row numbers of a batch; of a stream with `shuffle_buffer` those of the blocks that it is drawn from."""
        if self.is_stream:
            first, stop = number * self.batch_size, (number + 1) * self.batch_size
            block = self.shuffle_buffer or 1
            return list(range(first // block * block, -(-stop // block) * block))
        order = self.order(seed=seed, epoch=epoch, shuffle=shuffle)
        groups = order.groups(number * self._groups_of_batch, (number + 1) * self._groups_of_batch)
        return [int(self.table[row]["row_id"]) for group in groups for row in group]

    def stream(
        self, *, seed: int, epoch: int, numbers: range, num_ranks: int = 1
    ) -> Iterator[tuple[int, Batch | None]]:
        """The batches of a stream with these numbers, until it ends.

        Batch k holds rows kB … kB+B−1 of the order. The reader walks the raw stream, from the block in which its
        first batch begins, and tokenises only its own batches (with `long_rows="split"` all, to count the pieces).

        Args:
            seed: Seed of the order.
            epoch: Epoch number.
            numbers: Numbers of the wanted batches, ascending, without end.
            num_ranks: Batches n·ranks … n·ranks + ranks − 1 train together.

        Yields:
            (number, batch), and at the end (number, None) where other ranks have a batch for this place.

        Raises:
            ValueError: the source is empty.
        """
        size = self.batch_size
        wanted = iter(numbers)
        number = next(wanted)
        group: list[tuple[int, Any]] = []
        seen = 0
        # from the place's first batch on, so that a rank without a batch there sees that another has one
        first = number // num_ranks * num_ranks * size
        for place, entry in self._ordered(seed=seed, epoch=epoch, start=first):
            seen = place + 1
            if place >= number * size:
                group.append(entry)
            if len(group) == size:
                yield number, self._batch_of(group)
                number, group = next(wanted), []
        if group:
            yield number, self._batch_of(group)
            number = next(wanted)
        if not seen and numbers.start < num_ranks:
            raise ValueError(f"{self.source.description} is empty; give at least one text.")
        if number // num_ranks * num_ranks * size < seen:
            yield number, None

    def _ordered(self, *, seed: int, epoch: int, start: int) -> Iterator[tuple[int, tuple[int, Any]]]:
        """(place, (row number, text or row)) in this epoch's order, from the block in which place `start` lies."""
        block_size = self.shuffle_buffer or 1
        first = start // block_size * block_size
        entries: Iterator[tuple[int, Any]]
        if self.long_rows == "split":
            rows = (row for chunk in self._rows.chunks(self.source) for row in chunk)
            entries = islice(((row["row_id"], row) for row in rows), first, None)
        else:
            entries = enumerate(self.source.rows(first), first)
        while block := list(islice(entries, block_size)):
            order = range(1) if block_size == 1 else permutation(len(block), seed=seed, epoch=epoch, first=first)
            yield from ((first + n, block[int(index)]) for n, index in enumerate(order))
            first += len(block)

    def _batch_of(self, group: list[tuple[int, Any]]) -> Batch:
        if isinstance(group[0][1], dict):
            return self._collate([[row] for _, row in group])
        row_ids, items = zip(*group, strict=True)
        return self._collate([[row] for row in self._rows(items, row_ids)])

    def _collate(self, rows: list[list[dict[str, Any]]]) -> Batch:
        """A batch of rows, each of one text or, packed, of several."""
        longest = max(sum(len(text["input_ids"]) for text in row) for row in rows)
        width = min(max(-(-longest // PAD_TO), 1) * PAD_TO, self.max_length)
        input_ids = np.full((len(rows), width), self.pad_token_id, dtype=np.int64)
        attention_mask = np.zeros_like(input_ids)
        words = np.full_like(input_ids, -1) if "word_ids" in rows[0][0] else None
        text_ids = np.zeros_like(input_ids)
        row_ids = np.zeros_like(input_ids)
        for n, row in enumerate(rows):
            end = 0
            for number, text in enumerate(row):
                place = slice(end, end := end + len(text["input_ids"]))
                input_ids[n, place], attention_mask[n, place] = text["input_ids"], 1
                text_ids[n, place], row_ids[n, place] = number, text["row_id"]
                if words is not None:
                    words[n, place] = text["word_ids"]
            text_ids[n, end:] = len(row)  # padding keeps to itself
        batch = {"input_ids": torch.from_numpy(input_ids), "attention_mask": torch.from_numpy(attention_mask)}
        if self.pack:
            batch |= {"row_ids": torch.from_numpy(row_ids), "text_ids": torch.from_numpy(text_ids)}
        else:
            batch["row_ids"] = torch.tensor([int(row[0]["row_id"]) for row in rows])
        if words is not None:
            batch["word_ids"] = torch.from_numpy(words)
        return batch

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        """One pass: `input_ids` and `attention_mask`, int64 `[B, S]`; with `pack` also `row_ids` and `text_ids`."""
        if self.is_stream:
            stream = self.stream(seed=self.seed, epoch=0, numbers=range(sys.maxsize))
            batches = (batch for _, batch in stream if batch is not None)
        else:
            order = self.order(seed=self.seed, epoch=0, shuffle=False)
            batches = (self.batch(k, order) for k in range(self.num_batches()))
        for batch in batches:
            yield {
                name: batch[name] for name in ("input_ids", "attention_mask", *(("row_ids", "text_ids") * self.pack))
            }
