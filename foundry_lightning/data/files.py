"""Text, JSON-lines and Parquet files, row by row, each with its place in words for an error."""

import gzip
import io
import json
import zlib
from collections.abc import Callable, Generator, Iterator, Mapping
from typing import Any

_ROWS_AT_ONCE = 256  # of a Parquet file


def lines(path: str) -> Iterator[tuple[int, str]]:
    """Yield number (from 1) and text of every line that is not blank."""
    for number, text in all_lines(path):
        if text and not text.isspace():
            yield number, text


def paragraphs(path: str) -> Iterator[tuple[int, str]]:
    """Yield the number of the first line (from 1) and the text of every run of lines that are not blank."""
    first, block = 0, list[str]()
    for number, text in all_lines(path):
        if text and not text.isspace():
            first = first if block else number
            block.append(text)
        elif block:
            yield first, "\n".join(block)
            block = []
    if block:
        yield first, "\n".join(block)


def all_lines(path: str) -> Iterator[tuple[int, str]]:
    """Yield number (from 1) and text of every line of a file, which may be compressed.

    Raises:
        ValueError: a line is no UTF-8, or a compressed file is cut.
    """
    number = 0
    with _open_binary(path) as file:
        try:
            for number, line in enumerate(file, 1):
                if number == 1:
                    line = line.removeprefix(b"\xef\xbb\xbf")  # the byte order mark that Windows editors write
                yield number, line.decode("utf-8").rstrip("\r\n")
        except UnicodeDecodeError as error:
            raise ValueError(
                f"line {number} of {path} must be UTF-8, got {error.reason} at byte {error.start}; re-encode the file."
            ) from None
        except (EOFError, OSError, zlib.error) as error:
            if not path.lower().endswith((".gz", ".zst")):
                raise
            raise ValueError(
                f"{path} must be a whole compressed file, got after line {number}: {error}; copy or pack it again."
            ) from error


def _open_binary(path: str) -> Any:
    if path.lower().endswith(".gz"):
        return gzip.open(path, "rb")
    if path.lower().endswith(".zst"):
        # pyarrow, not zstandard: its reader notices a truncated file, zstandard's ends as if nothing were missing.
        import pyarrow

        return io.BufferedReader(pyarrow.input_stream(path, compression="zstd"))
    return open(path, "rb")


def json_object(text: str, where: str) -> Mapping[str, Any]:
    """Parse a line's JSON object.

    Raises:
        ValueError: it is none; `where` names the line.
    """
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{where} must be JSON, got {error.msg} at character {error.pos}; give one object per line."
        ) from None
    except RecursionError:
        raise ValueError(f"{where} must be JSON, got too deep a nesting; give one object per line.") from None
    if not isinstance(value, dict):
        raise ValueError(f'{where} must be a JSON object, got {type(value).__name__}; write it as {{"text": …}}.')
    return value


def parquet_rows(
    path: str, choose: Callable[[list[str]], list[str]], skip: int
) -> Generator[tuple[str, dict[str, Any]], None, int]:
    """Yield place and row of a file after the first `skip`, with the columns that `choose` takes of all names.

    Returns how many rows are still to skip, where the file has fewer.
    """
    import pyarrow
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(path) as file:
            columns = choose(file.schema_arrow.names)
            sizes = [file.metadata.row_group(group).num_rows for group in range(file.num_row_groups)]
            number, group = 0, 0
            while group < len(sizes) and skip >= sizes[group]:  # whole groups need not be read
                number, skip, group = number + sizes[group], skip - sizes[group], group + 1
            # Arrow's thread pool does not survive the fork of a DataLoader worker.
            groups = range(group, len(sizes))
            for batch in file.iter_batches(_ROWS_AT_ONCE, row_groups=groups, columns=columns, use_threads=False):
                arrays = [batch.column(name).to_numpy(zero_copy_only=False) for name in columns]
                for values in zip(*arrays, strict=True):
                    if skip:
                        skip -= 1
                    else:
                        yield f"row {number} of {path}", dict(zip(columns, values, strict=True))
                    number += 1
    except (pyarrow.ArrowInvalid, OSError) as error:
        raise ValueError(f"{path} must be a whole Parquet file, got: {error}; write or copy it again.") from error
    return skip
