"""From texts to tokenised rows, one by one or as Arrow tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import chain, islice
from typing import Any

import numpy as np
import pyarrow as pa

from foundry_lightning.data.sources import Source
from foundry_lightning.masking import PIECE_SHIFT

Batch = dict[str, Any]
_CHUNK = 1000  # texts that are tokenised in one call


class TokenRows:
    """Tokenises texts into rows `[S]` of at most `max_length` ids, special tokens included.

    Args:
        tokenizer: A Hugging Face tokenizer; None where the source holds ids.
        max_length: Longest row.
        long_rows: `truncate` cuts a longer text, `split` makes several rows of it.
        word_ids: Whether rows carry the word of each token.
        num_ids: Ready ids must lie below it, where it is known.
    """

    def __init__(
        self, tokenizer: Any, *, max_length: int, long_rows: str, word_ids: bool, num_ids: int | None = None
    ) -> None:
        self.tokenizer, self.max_length, self.word_ids, self.num_ids = tokenizer, max_length, word_ids, num_ids
        self.splits = long_rows == "split"

    @cached_property
    def _backend(self) -> Any:
        """A copy of the fast tokenizer's engine that truncates; the user's own tokenizer is not changed."""
        from tokenizers import Tokenizer

        backend = Tokenizer.from_str(self.tokenizer.backend_tokenizer.to_str())
        backend.no_padding()
        side = "right" if self.splits else getattr(self.tokenizer, "truncation_side", "right")
        backend.enable_truncation(self.max_length, direction=side)
        return backend

    def __call__(self, items: Sequence[Any], row_ids: Sequence[int]) -> list[dict[str, Any]]:
        """Rows of the given texts (or ready ids) with these row numbers."""
        if items and not isinstance(items[0], str):
            return [row for ids, n in zip(items, row_ids, strict=True) for row in self._ready(ids, n)]
        if self.tokenizer is None:
            raise ValueError("DataPipeline: tokenizer must be given for a source of texts, got None; pass one.")
        self._require_room()
        if getattr(self.tokenizer, "is_fast", False):
            return [
                self._row(piece.ids, piece.word_ids if self.word_ids else None, n, 0)
                for n, piece in self._pieces(items, row_ids)
            ]
        if self.word_ids or self.splits:
            raise ValueError(
                f"{type(self.tokenizer).__name__} is not a fast tokenizer; masking='whole_word' and "
                "long_rows='split' need one, use masking='token' and long_rows='truncate'."
            )
        ids = self.tokenizer(list(items), truncation=True, max_length=self.max_length)["input_ids"]
        return [self._row(row, None, n, 0) for row, n in zip(ids, row_ids, strict=True)]

    def untruncated_lengths(self, items: Sequence[str]) -> np.ndarray:
        """`[items]` tokens of each text, special ones included, whatever `max_length`."""
        from tokenizers import Tokenizer

        backend = Tokenizer.from_str(self._backend.to_str())
        backend.no_truncation()
        return np.array([len(encoding) for encoding in backend.encode_batch_fast(list(items))])

    def _require_room(self) -> None:
        added = self.tokenizer.num_special_tokens_to_add()
        if self.max_length <= added:
            raise ValueError(
                f"max_length must leave room beside the {added} special tokens of a row, got {self.max_length}; "
                "raise it."
            )

    def _pieces(self, items: Sequence[str], row_ids: Sequence[int]) -> Iterator[tuple[int, Any]]:
        """(row number, encoding) of each row; what no one asks for, offsets in the text, is not computed."""
        encode = self._backend.encode_batch if self.word_ids else self._backend.encode_batch_fast
        for encoding, n in zip(encode(list(items)), row_ids, strict=True):
            yield n, encoding
            if self.splits:
                yield from ((n + (p << PIECE_SHIFT), piece) for p, piece in enumerate(encoding.overflowing, start=1))

    def _ready(self, ids: Any, row: int) -> Iterator[dict[str, Any]]:
        if self.word_ids:
            raise ValueError("masking='whole_word' needs texts and a fast tokenizer; ready ids have no words.")
        if self.num_ids is not None and len(ids) and ids.max() >= self.num_ids:
            raise ValueError(
                f"row {row} holds the token id {ids.max()}, the model embeds ids below {self.num_ids}; "
                "use the tokenizer that belongs to the model."
            )
        for piece, start in enumerate(range(0, max(len(ids), 1), self.max_length)):
            if piece == 0 or self.splits:
                yield self._row(ids[start : start + self.max_length], None, row, piece)

    def _row(self, ids: Any, words: Any, row: int, piece: int) -> dict[str, Any]:
        result = {"input_ids": np.asarray(ids, dtype=np.int32), "row_id": row + (piece << PIECE_SHIFT)}
        if words is not None:
            result["word_ids"] = np.asarray([-1 if w is None else w for w in words], dtype=np.int32)
        return result

    def chunks(self, source: Source) -> Iterator[list[dict[str, Any]]]:
        """All rows of a source, some at a time."""
        return (self(items, row_ids) for row_ids, items in _numbered(source))

    def tables(self, source: Source) -> Iterator[pa.Table]:
        """All rows of a source as Arrow tables with the columns `input_ids`, `row_id` and, for whole words, `word_ids`.

        A fast tokenizer's ids go from its encodings into one array, without an object for each row.
        """
        for row_ids, items in _numbered(source):
            if self.word_ids or not isinstance(items[0], str) or not getattr(self.tokenizer, "is_fast", False):
                yield _to_arrow(self(items, row_ids))
                continue
            self._require_room()
            numbers, encodings = zip(*self._pieces(items, row_ids), strict=True)
            ids = [encoding.ids for encoding in encodings]
            ends = np.cumsum(np.fromiter(map(len, ids), np.int64, len(ids)))
            values = np.fromiter(chain.from_iterable(ids), np.int32, int(ends[-1]))
            lists = pa.LargeListArray.from_arrays(np.concatenate([[0], ends]), pa.array(values))
            yield pa.table({"row_id": pa.array(numbers, pa.int64()), "input_ids": lists})


def _numbered(source: Source) -> Iterator[tuple[tuple[int, ...], tuple[Any, ...]]]:
    """(row numbers, rows) of a source, some at a time."""
    numbered = enumerate(source.rows())
    while chunk := list(islice(numbered, _CHUNK)):
        row_ids, items = zip(*chunk, strict=True)
        yield row_ids, items


def _to_arrow(rows: list[dict[str, Any]]) -> pa.Table:
    columns: dict[str, pa.Array] = {"row_id": pa.array([row["row_id"] for row in rows], pa.int64())}
    for name in rows[0]:
        if name != "row_id":
            values = np.concatenate([row[name] for row in rows])
            offsets = np.concatenate([[0], np.cumsum([len(row[name]) for row in rows])])
            columns[name] = pa.LargeListArray.from_arrays(offsets.astype(np.int64), pa.array(values, pa.int32()))
    return pa.table(columns)
