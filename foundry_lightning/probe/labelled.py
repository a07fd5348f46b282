"""Labelled examples, read from CoNLL files, JSONL or datasets, and checked."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from datasets import Dataset, load_from_disk

from foundry_lightning.data.files import all_lines, json_object

TASKS = ("ner", "pos", "classify")
COLUMNS = {"ner": ("tokens", "tags"), "pos": ("tokens", "tags"), "classify": ("text", "label")}


@dataclass(frozen=True)
class Labelled:
    """Examples of a task.

    Attributes:
        source: Where they are from, for errors.
        inputs: A text (`classify`), or the words of a sentence.
        labels: A label, or a tag for each word.
    """

    source: str
    inputs: list[Any]
    labels: list[Any]

    def __len__(self) -> int:
        return len(self.inputs)

    @property
    def of_words(self) -> bool:
        """Whether each word has a tag."""
        return not isinstance(self.inputs[0], str)

    def take(self, numbers: list[int]) -> Labelled:
        """The examples of these numbers."""
        return Labelled(self.source, [self.inputs[n] for n in numbers], [self.labels[n] for n in numbers])

    def flat(self) -> list[str]:
        """All labels, one after the other."""
        return [tag for label in self.labels for tag in ([label] if isinstance(label, str) else label)]


def read_labelled(
    source: Any, *, task: str, columns: tuple[str, str] | None = None, fields: tuple[int, int] | None = None
) -> Labelled:
    """Reads labelled examples.

    Args:
        source: A CoNLL file (a word a line, fields cut at spaces or tabs, a blank line between sentences), a `.jsonl`
            file, a folder of `Dataset.save_to_disk`, a `Dataset` or a list of dicts.
        task: `ner`, `pos` or `classify`.
        columns: Names of input and label in JSONL and datasets; None: `tokens` and `tags`, or `text` and `label`.
        fields: Numbers of word and tag in a line of a CoNLL file; None: the first and the last (`.conllu`: FORM, UPOS).

    Raises:
        FileNotFoundError: no such file.
        TypeError: `source` is none of these.
        ValueError: what does not fit the task, with the place.
    """
    of_words = task != "classify"
    columns = columns or COLUMNS[task]
    name = os.fspath(source) if isinstance(source, (str, os.PathLike)) else type(source).__name__
    rows: Iterator[tuple[str, Any, Any]]
    if isinstance(source, (str, os.PathLike)):
        path = Path(source)
        if not path.exists():
            raise FileNotFoundError(
                f"labelled data {name} does not exist; give a CoNLL file, a .jsonl file or a folder."
            )
        if path.is_dir():
            rows = _dataset_rows(_from_disk(path), name, columns)
        elif ".jsonl" in path.suffixes:
            objects = ((f"{name}, line {n}", text) for n, text in all_lines(name) if text.strip())
            rows = (_row(json_object(text, where), where, columns) for where, text in objects)
        elif of_words:
            rows = _conll_rows(name, fields)
        else:
            raise ValueError(f"{name} cannot be read for task='classify'; give a .jsonl file or a saved Dataset.")
    elif isinstance(source, Dataset):
        rows = _dataset_rows(source, name, columns)
    elif isinstance(source, list):
        rows = (_row(value, f"{name}, row {n}", columns) for n, value in enumerate(source))
    else:
        raise TypeError(f"labelled data must be a file, a folder, a Dataset or a list of dicts, got {name}.")
    inputs, labels = [], []
    for where, given, label in rows:
        _check(where, given, label, task)
        if len(given):
            inputs.append(list(given) if of_words else given)
            labels.append(list(label) if of_words else label)
    if not inputs:
        raise ValueError(f"{name} holds no labelled example; give one with at least two labels.")
    return Labelled(name, inputs, labels)


def _check(where: str, given: Any, label: Any, task: str) -> None:
    if task == "classify":
        if not isinstance(given, str) or not isinstance(label, str):
            raise ValueError(f"{where}: classify needs a text and a label, got {given!r:.40} and {label!r:.40}.")
        return
    for values in (given, label):
        if not isinstance(values, (list, tuple)) or not all(isinstance(value, str) and value for value in values):
            raise ValueError(f"{where}: {task} needs a list of words and one of tags, all strings, got {values!r:.60}.")
    if len(given) != len(label):
        raise ValueError(f"{where} has {len(given)} words and {len(label)} tags; each word needs a tag.")
    if task == "ner":
        wrong = next((tag for tag in label if tag != "O" and not (tag[0] in "BIES" and tag[1:2] == "-")), None)
        if wrong is not None:
            raise ValueError(
                f"{where}: ner needs tags such as O, B-person and I-person, got {wrong!r}; task pos takes any."
            )


def _row(value: Any, where: str, columns: tuple[str, str]) -> tuple[str, Any, Any]:
    if not isinstance(value, Mapping):
        raise ValueError(f"{where} must be a dict with {columns[0]!r} and {columns[1]!r}, got {value!r:.40}.")
    for column in columns:
        if column not in value:
            raise ValueError(f"{where} has no {column!r}, it has {', '.join(map(repr, value))}; set columns.")
    given, label = (value[column] for column in columns)
    return where, given, str(label) if isinstance(label, int) else label


def _dataset_rows(dataset: Dataset, name: str, columns: tuple[str, str]) -> Iterator[tuple[str, Any, Any]]:
    feature = dataset.features.get(columns[1])
    feature = getattr(feature, "feature", feature)  # of a list: what it holds
    names = getattr(feature, "names", None)  # of a ClassLabel
    for n, value in enumerate(dataset):
        where, given, label = _row(value, f"{name}, row {n}", columns)
        if names is not None:
            label = [names[k] for k in label] if isinstance(label, list) else names[int(label)]
        yield where, given, label


def _from_disk(path: Path) -> Dataset:
    if not (path / "dataset_info.json").is_file():
        raise ValueError(f"{path} is no folder of Dataset.save_to_disk; give the folder of one split.")
    return load_from_disk(str(path))


def _conll_rows(name: str, fields: tuple[int, int] | None) -> Iterator[tuple[str, Any, Any]]:
    universal = ".conllu" in Path(name).suffixes
    fields = fields or ((1, 3) if universal else (0, -1))
    words: list[str] = []
    tags: list[str] = []
    start = 1
    for number, line in all_lines(name):
        parts = line.split("\t") if "\t" in line else line.split()
        if not line.strip() or parts[0].startswith("-DOCSTART-"):
            yield f"{name}, line {start}", words, tags
            words, tags, start = [], [], number + 1
            continue
        if universal and not parts[0].isdigit():  # a comment, a contraction beside its parts, an empty node
            continue
        try:
            word, tag = (parts[field].strip() for field in fields)
        except IndexError:
            word = tag = ""
        if not (word and tag) or len(parts) < 2:
            raise ValueError(
                f"{name}, line {number} must hold a word and a tag in the fields {fields[0]} and {fields[1]}, "
                f"got {line!r:.40}; "
                "a line is a word, its fields and its tag, a blank line ends a sentence."
            )
        words.append(word)
        tags.append(tag)
    yield f"{name}, line {start}", words, tags
