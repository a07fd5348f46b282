"""Everything text can come from, behind one interface: rows in a fixed order, counted from 0."""

import glob
import hashlib
import inspect
import json
import os
import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from foundry_lightning.data.corpus import CORPUS_NAMES, cache_dir, corpus_paragraphs
from foundry_lightning.data.files import json_object, lines, paragraphs, parquet_rows

Row = str | npt.NDArray[np.int64]
"""A text, or ready token ids `[S]`."""

_Placed = tuple[str, Any]
"""A value as it came, and where it stands, in words for an error."""

_SUFFIXES = (".txt", ".txt.gz", ".txt.zst", ".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet")
_BLOCK = 256  # rows fetched at once from Arrow tables: 1 row at a time is 8 times slower


class Source:
    """Rows of text, or of ready token ids, in a fixed order. Made by `open_source`.

    Attributes:
        description: What the source is, for reports and errors: `3 files of 'data/*.jsonl'`.
        is_stream: True where neither the number of rows nor the content is fixed before reading (an `IterableDataset`,
            a callable, an iterable without a length, an iterator).
        in_memory: True where the rows came as objects in memory (a list, an array).
        one_shot: True for an iterator, whose rows can be read only once.
    """

    is_stream = False
    in_memory = False
    one_shot = False

    def __init__(self, description: str, text_column: str):
        self.description = description
        self.text_column = text_column

    def __len__(self) -> int:
        """Return the number of rows, where it is known without reading.

        Raises:
            TypeError: If it is not known.
        """
        raise TypeError(
            f"{self.description} has no known length; count its rows by reading them, or give a list or Dataset."
        )

    def __bool__(self) -> bool:
        return True

    def fingerprint(self) -> str | None:
        """Return a hash that is equal in every process while the content is, or None for a stream."""
        if self.is_stream:
            return None
        digest = _digest(self.text_column)
        for row in self.rows():
            content = row.encode() if isinstance(row, str) else row.tobytes()
            digest.update(f"{type(row).__name__}{len(content)}:".encode())
            digest.update(content)
        return str(digest.hexdigest())

    def rows(self, start: int = 0) -> Iterator[Row]:
        """Return one pass over the rows in source order.

        Args:
            start: The row number to begin at; earlier rows are skipped as cheaply as the source allows, unchecked.

        Returns:
            An iterator over texts and int64 arrays of token ids `[S]`. Where a row has both a text column and
            `input_ids` the text counts; where it has `input_ids` and an `attention_mask`, the padding is cut off.

        Raises:
            ValueError: While reading: if the source is empty, or at the first row that is neither text nor token ids,
                naming its file and line or its row number. At once: if a one-shot iterator was read before.
        """
        return self._checked(self._values(start), start)

    def peek(self, count: int) -> Iterator[Row]:
        """Return the first `count` rows for a look at them; none where reading would take them from a later pass."""
        return iter(()) if self.one_shot else islice(self.rows(), count)

    def validate(self, sample: int = 1000) -> None:
        """Read the first `sample` rows, so that bad input is refused before anything is built on it.

        A one-shot iterator is left alone: its rows cannot be put back.

        Raises:
            ValueError: As `rows` does.
        """
        if not self.one_shot:
            for _ in islice(self.rows(), sample):
                pass

    def _values(self, start: int) -> Iterator[_Placed]:
        raise NotImplementedError

    def _checked(self, values: Iterator[_Placed], start: int) -> Iterator[Row]:
        empty, texts = start == 0, None
        for where, value in values:
            empty = False
            row = _row(value, self.text_column, where)
            texts = isinstance(row, str) if texts is None else texts
            if isinstance(row, str) != texts:
                before, found = ("text", "token ids") if texts else ("token ids", "text")
                raise ValueError(f"{where} must hold {before} as the rows before it do, got {found}; give one of them.")
            yield row
        if empty:
            raise ValueError(f"source is empty: {self.description} gave no row; {self._advice_if_empty()}")

    def _advice_if_empty(self) -> str:
        return "give at least one text."


class _Indexed(Source):
    """Lists, arrays, embedded corpora, and map-style data sets of torch."""

    def __init__(self, items: Any, description: str, text_column: str, *, in_memory: bool = True):
        super().__init__(description, text_column)
        self._items, self.in_memory = items, in_memory

    def __len__(self) -> int:
        return len(self._items)

    def _values(self, start: int) -> Iterator[_Placed]:
        return ((f"row {number}", self._items[number]) for number in range(start, len(self._items)))


def _content_hash(path: str) -> str:
    """A hash of a file's bytes; a large one's is kept in the cache while path, size, time and first bytes are."""
    status = os.stat(path)
    with open(path, "rb") as file:
        head = file.read(1 << 16)
        digest = hashlib.blake2b(head, digest_size=32)
        if status.st_size <= len(head):
            return digest.hexdigest()
        state = json.dumps([os.path.abspath(path), status.st_size, status.st_mtime_ns, digest.hexdigest()])
        kept = cache_dir() / "files" / hashlib.sha256(state.encode()).hexdigest()
        if kept.exists():
            return kept.read_text()
        while block := file.read(1 << 20):
            digest.update(block)
    kept.parent.mkdir(parents=True, exist_ok=True)
    partial = kept.with_suffix(f".{os.getpid()}.partial")
    partial.write_text(digest.hexdigest())
    os.replace(partial, kept)
    return digest.hexdigest()


class _Files(Source):
    """Text, JSON-lines and Parquet files, one after the other."""

    def __init__(self, paths: list[str], description: str, text_column: str, split_txt: str):
        super().__init__(description, text_column)
        self._paths = paths
        self._split_txt = split_txt

    def fingerprint(self) -> str:
        # folder and time are left out so that a run can be resumed where the data were copied to
        digest = _digest(self.text_column, self._split_txt)
        for path in self._paths:
            digest.update(json.dumps([os.path.basename(path), _content_hash(path)]).encode())
        return str(digest.hexdigest())

    def _values(self, start: int) -> Iterator[_Placed]:
        for path in self._paths:
            start = yield from self._file_values(path, start)

    def _file_values(self, path: str, skip: int) -> Generator[_Placed, None, int]:
        """Yield the rows of a file after the first `skip`; return how many are still to skip in the next file."""
        if path.lower().endswith(".parquet"):
            return (yield from parquet_rows(path, lambda names: _needed_columns(names, self.text_column, path), skip))
        is_json = ".jsonl" in os.path.basename(path).lower()
        read = paragraphs if self._split_txt == "paragraph" and not is_json else lines
        for number, text in read(path):
            if skip:
                skip -= 1
            else:
                where = f"line {number} of {path}"
                yield where, json_object(text, where) if is_json else text
        return skip

    def _advice_if_empty(self) -> str:
        return "every file is empty or blank; give files with text."


class _Dataset(Source):
    """A Hugging Face Dataset, in its own order."""

    def __init__(self, dataset: Any, text_column: str):
        super().__init__(f"Dataset of {len(dataset)} rows", text_column)
        self._dataset = dataset
        if dataset.format["type"] != "custom":  # a transform may need every column, and decides which it returns
            columns = _needed_columns(dataset.column_names, text_column, "the Dataset")
            self._dataset = dataset.select_columns(columns).with_format(None if text_column in columns else "numpy")

    def __len__(self) -> int:
        return len(self._dataset)

    def fingerprint(self) -> str:
        return str(_digest(self.text_column, self._dataset._fingerprint).hexdigest())

    def _values(self, start: int) -> Iterator[_Placed]:
        for first in range(start, len(self), _BLOCK):
            batch = self._dataset[first : min(first + _BLOCK, len(self))]
            for number, values in enumerate(zip(*batch.values(), strict=True), first):
                yield f"row {number}", dict(zip(batch, values, strict=True))


class _IterableDataset(Source):
    """A Hugging Face IterableDataset, read whole by every reader."""

    is_stream = True

    def __init__(self, dataset: Any, text_column: str):
        super().__init__("IterableDataset", text_column)
        self._dataset = dataset
        if dataset.column_names is not None:
            self._dataset = dataset.select_columns(
                _needed_columns(dataset.column_names, text_column, "the IterableDataset")
            )

    def _values(self, start: int) -> Iterator[_Placed]:
        # iter(dataset) inside a DataLoader worker gives that worker's shards only; .iter() gives all rows everywhere,
        # which the numbering of rows needs.
        number = start
        for batch in self._dataset.skip(start).iter(batch_size=_BLOCK):
            for values in zip(*batch.values(), strict=True):
                yield f"row {number}", dict(zip(batch, values, strict=True))
                number += 1


class _Iterable(Source):
    """Anything that can be iterated anew for every pass: an iterable, or a callable that returns an iterator."""

    def __init__(self, iterable: Any, description: str, text_column: str, *, is_callable: bool):
        super().__init__(description, text_column)
        self._iterable = iterable
        self._is_callable = is_callable
        self.is_stream = is_callable or not hasattr(iterable, "__len__")
        self.in_memory = not self.is_stream

    def __len__(self) -> int:
        return super().__len__() if self.is_stream else len(self._iterable)

    def peek(self, count: int) -> Iterator[Row]:
        if self._is_callable:  # one that hands out the same iterator each time serves one pass
            first, second = self._iterable(), self._iterable()
            if first is second and hasattr(first, "__next__"):
                return iter(())
        return super().peek(count)

    def _values(self, start: int) -> Iterator[_Placed]:
        values = self._iterable() if self._is_callable else self._iterable
        if not hasattr(values, "__iter__"):
            raise TypeError(
                f"{self.description} must return an iterator over rows, got {type(values).__name__}; yield the rows."
            )
        return ((f"row {number}", value) for number, value in enumerate(islice(values, start, None), start))

    def _advice_if_empty(self) -> str:
        return (
            "a callable must return a new iterator at every call." if self._is_callable else super()._advice_if_empty()
        )


class _OneShot(Source):
    """An iterator: one pass, once."""

    is_stream = True
    one_shot = True

    def __init__(self, iterator: Iterator[Any], text_column: str):
        super().__init__(f"iterator ({type(iterator).__name__})", text_column)
        self._iterator: Iterator[Any] | None = iterator

    def _values(self, start: int) -> Iterator[_Placed]:
        iterator, self._iterator = self._iterator, None
        if iterator is None:
            raise ValueError(
                f"{self.description} was read already and cannot be read again; pass a callable that returns a new "
                "iterator, such as a generator function without its parentheses."
            )
        return ((f"row {number}", value) for number, value in enumerate(islice(iterator, start, None), start))


def open_source(source: Any, *, text_column: str = "text", split_txt: str = "line") -> Source:
    """Open anything that holds texts, or ready token ids.

    Args:
        source: The name of an embedded corpus (see `corpus.CORPUS_NAMES`); the path or glob of `.txt`, `.jsonl` (each
            plain, `.gz` or `.zst`) or `.parquet` files, read in the order of their names; a list of texts, dicts or
            sequences of token ids; a Hugging Face `Dataset` or `IterableDataset`; a callable without arguments that
            returns a new iterator; any other iterable or iterator; a `Source`, returned as it is. A list of strings is
            always a list of texts, never of paths.
        text_column: The key or column of the text in rows that have several. A row without it may have `input_ids`.
        split_txt: What a row of a `.txt` file is: a `line`, or a `paragraph` (lines up to a blank line, their line
            breaks kept). Blank lines are never rows.

    Raises:
        FileNotFoundError: If a path does not exist or a glob matches no file.
        TypeError: If `source` is of a kind that holds no rows, or is ambiguous.
        ValueError: If `source` is empty or lacks the text column, a file's kind is unknown, or `split_txt` is.
    """
    if not isinstance(text_column, str) or not text_column:
        raise ValueError(f"text_column must be a column's name, got {text_column!r}; 'text' is the usual one.")
    if split_txt not in ("line", "paragraph"):
        raise ValueError(f"split_txt must be 'line' or 'paragraph', got {split_txt!r}; choose one of them.")
    if isinstance(source, Source):
        return source
    if isinstance(source, str) and source in CORPUS_NAMES:
        return _Indexed(corpus_paragraphs(source), f"corpus {source!r}", text_column, in_memory=False)
    if isinstance(source, str | os.PathLike):
        return _open_files(os.fspath(source), text_column, split_txt)
    kind = type(source).__name__
    if isinstance(source, Mapping):
        raise TypeError(f"source must hold rows in an order, got {kind}; pick one split, or make it a list of dicts.")
    if kind == "DataFrame":  # iterating one gives its column names, which would pass for texts
        raise TypeError(
            f"source must hold rows, got a {kind}; give list(frame[{text_column!r}]) or Dataset.from_pandas(frame)."
        )
    if isinstance(source, set | frozenset):
        raise TypeError(f"source must have a fixed order, got {kind}; give sorted(source).")
    if isinstance(source, bytes | bytearray):
        raise TypeError(f"source must be text, got {kind}; decode it first.")
    if hasattr(source, "__len__") and len(source) == 0:
        raise ValueError(f"source is empty: a {kind} of 0 rows; give at least one text.")
    datasets = sys.modules.get("datasets")  # not imported: without the module nobody can have made its objects
    if datasets is not None and isinstance(source, datasets.Dataset):
        return _Dataset(source, text_column)
    if datasets is not None and isinstance(source, datasets.IterableDataset):
        return _IterableDataset(source, text_column)
    is_map_style = hasattr(source, "__getitem__") and hasattr(source, "__len__") and not hasattr(source, "__iter__")
    if isinstance(source, list | tuple | np.ndarray) or is_map_style:
        return _Indexed(source, f"{kind} of {len(source)} rows", text_column)
    if hasattr(source, "__next__"):
        return _OneShot(source, text_column)
    if hasattr(source, "__iter__"):
        return _Iterable(source, f"iterable ({kind})", text_column, is_callable=False)
    if callable(source):
        _refuse_arguments(source)
        name = getattr(source, "__name__", kind)
        return _Iterable(source, f"callable ({name})", text_column, is_callable=True)
    raise TypeError(
        "source must be a corpus name, a path or glob, a list, a Dataset or IterableDataset, an iterable or a callable "
        f"that returns an iterator, got {kind}; give one of these."
    )


def _open_files(pattern: str, text_column: str, split_txt: str) -> Source:
    expanded = os.path.expanduser(pattern)
    if os.path.isdir(expanded):
        raise ValueError(
            f"source must name files, got the folder {pattern!r}; give a glob such as {str(Path(pattern, '*.txt'))!r}."
        )
    # An existing file first: its name may contain glob characters.
    paths = (
        [expanded] if os.path.isfile(expanded) else sorted(filter(os.path.isfile, glob.glob(expanded, recursive=True)))
    )
    if not paths:
        shown = pattern if len(pattern) <= 200 else pattern[:200] + "…"
        rule = "must match a file" if glob.has_magic(pattern) else "must name an existing file"
        raise FileNotFoundError(
            f"source {rule} or an embedded corpus ({', '.join(CORPUS_NAMES)}), got {shown!r}; correct it, or give "
            "a text as [text]."
        )
    for path in paths:
        if not path.lower().endswith(_SUFFIXES):
            raise ValueError(
                f"source files must end in one of {', '.join(_SUFFIXES)}, got {path!r}; convert or leave out the file."
            )
    description = repr(pattern) if paths == [expanded] else f"{len(paths)} files of {pattern!r}"
    return _Files(paths, description, text_column, split_txt)


def _refuse_arguments(source: Callable[..., Any]) -> None:
    try:
        signature = inspect.signature(source)
    except ValueError:  # some builtins do not tell; calling them will
        return
    try:
        signature.bind()
    except TypeError as error:
        raise TypeError(
            f"a callable source is called without arguments, but {error}; wrap it in a function that gives them."
        ) from None


def _digest(*parts: str) -> Any:
    return hashlib.sha256(json.dumps(parts).encode())


def _needed_columns(columns: Iterable[str], text_column: str, where: str) -> list[str]:
    columns = list(columns)
    if text_column in columns:
        return [text_column]
    if "input_ids" in columns:
        return [name for name in ("input_ids", "attention_mask") if name in columns]
    raise ValueError(
        f"text_column {text_column!r} must be a column of {where}, which has "
        f"{', '.join(map(repr, columns)) or 'none'}; set text_column to one of them, or give token ids as 'input_ids'."
    )


def _row(value: Any, text_column: str, where: str) -> Row:
    if isinstance(value, Mapping):
        column, *mask = _needed_columns(map(str, value), text_column, where)
        if column == "input_ids":
            return _ids(value[column], where, *(value[name] for name in mask))
        value, where = value[column], f"{column!r} in {where}"
        if not isinstance(value, str):
            raise _not_text(value, where)
    if isinstance(value, str):
        if not value.isascii():
            try:
                value.encode()
            except UnicodeEncodeError as error:
                raise ValueError(
                    f"{where} must be valid Unicode, got {error.reason} at character {error.start}; repair the text."
                ) from None
        return value
    if isinstance(value, list | tuple) or hasattr(value, "__array__"):
        return _ids(value, where)
    raise _not_text(value, where)


def _not_text(value: Any, where: str) -> ValueError:
    advice = "decode it" if isinstance(value, bytes) else "leave the row out" if value is None else "convert it to text"
    return ValueError(f"{where} must be text, got {type(value).__name__}; {advice}.")


def _ids(value: Any, where: str, mask: Any = None) -> npt.NDArray[np.int64]:
    try:
        ids = np.asarray(value)
    except ValueError:  # nested lists of unequal lengths
        ids = np.asarray(value, dtype=object)
    if ids.size == 0 and ids.ndim == 1:
        ids = ids.astype(np.int64)
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        got = f"{type(value).__name__} of shape {list(ids.shape)} and type {ids.dtype}"
        raise ValueError(
            f"{where} must be text or one row of integer token ids [S], got {got}; give one sequence of whole numbers."
        )
    if ids.size and (ids.min() < 0 or ids.max() > np.iinfo(np.int32).max):
        rule, wrong = ("at least 0", ids.min()) if ids.min() < 0 else ("at most 2^31 - 1", ids.max())
        raise ValueError(
            f"{where} must hold token ids of {rule}, got {wrong}; give ids of the vocabulary (no -100 labels)."
        )
    checked = cast(npt.NDArray[np.int64], ids.astype(np.int64))
    if mask is None:
        return checked
    attended = np.asarray(mask)
    if attended.shape != ids.shape:
        got = f"{list(attended.shape)} and {list(ids.shape)}"
        raise ValueError(
            f"attention_mask in {where} must have the shape of input_ids, got {got}; give one value per token."
        )
    if not np.isin(attended, (0, 1)).all():
        got = attended[~np.isin(attended, (0, 1))][0]
        raise ValueError(f"attention_mask in {where} must hold 0 and 1, got {got!r}; 1 is an attended token.")
    return cast(npt.NDArray[np.int64], checked[attended.astype(bool)])
