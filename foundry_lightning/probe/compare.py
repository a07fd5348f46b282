"""Models and their controls on one task, over several seeds, in one table."""

from __future__ import annotations

import importlib.util
import json
import os
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import chain, islice
from statistics import mean, stdev
from typing import Any

import numpy as np
import torch
from rich.table import Table
from transformers import AutoModel

from foundry_lightning.probe.encoders import Encoder, FineTuning
from foundry_lightning.probe.labelled import TASKS, Labelled, read_labelled

METRICS = {"ner": ("entity F1", "accuracy"), "pos": ("accuracy", "macro F1"), "classify": ("accuracy", "macro F1")}
HOW = ("linear", "finetune")
_FEW = 100  # scored examples below which the table says so


@dataclass
class Line:
    """One line of the table.

    Attributes:
        model: The model's folder or name, or the control's name.
        by: `linear`, `finetune`, or `no encoder`.
        scores: Name of a metric -> a figure for each seed.
        over_random: The first metric minus that of the same architecture with random weights, for each seed; None: a
            control.
    """

    model: str
    by: str
    scores: dict[str, list[float]]
    over_random: list[float] | None = None


@dataclass
class Comparison:
    """What `probe` found; `table()` shows it, `to_json()` keeps it."""

    task: str
    train: str
    test: str
    num_examples: tuple[int, int]
    seeds: list[int]
    lines: list[Line] = field(default_factory=list)

    def table(self) -> Table:
        """Mean ± standard deviation over the seeds in percent, the controls dim."""
        train, test = self.num_examples
        title = f"{self.task} on {self.train}: {train:,} examples to learn from, {test:,} scored ({self.test})"
        caption = f"percent; mean ± standard deviation of {len(self.seeds)} seeds"
        if test < _FEW:  # two standard errors of a share near a half
            caption += f"; {test:,} examples are few: differences below {100 / test**0.5:.0f} may be chance"
        table = Table(title=title, caption=caption)
        for name in ("model", "by", *METRICS[self.task], "over random weights"):
            table.add_column(name, justify="left" if name in ("model", "by") else "right", overflow="fold")
        for line in self.lines:
            figures = [_spread(line.scores[name]) for name in METRICS[self.task]]
            over = "" if line.over_random is None else _spread(line.over_random, sign="+")
            table.add_row(line.model, line.by, *figures, over, style="dim" if line.over_random is None else None)
        return table

    def to_json(self) -> str:
        """All figures, for each seed."""
        return json.dumps(asdict(self), indent=1)


def _spread(values: list[float], *, sign: str = "") -> str:
    figure = f"{100 * mean(values):{sign}.1f}"
    return f"{figure} ± {100 * stdev(values):.1f}" if len(values) > 1 else figure


def probe(
    models: str | Iterable[str],
    *,
    task: str,
    train: Any,
    test: Any = None,
    how: str = "linear",
    seeds: int = 3,
    max_length: int | None = None,
    columns: tuple[str, str] | None = None,
    fields: tuple[int, int] | None = None,
    fine_tuning: FineTuning | None = None,
    device: str = "auto",
) -> Comparison:
    """Compares encoders on labelled data: a linear probe on their frozen states, fine-tuning, or both.

    Controls stand beside them: the same architecture with random weights (drawn anew for each seed), and without an
    encoder a word's most frequent tag (`ner`, `pos`) or logistic regression over a bag of words (`classify`).

    Args:
        models: Folders or names that `AutoModel` and `AutoTokenizer` load.
        task: `ner` (scored in entities, by seqeval), `pos` (any tags, by words) or `classify` (texts).
        train: Labelled examples; see `read_labelled`.
        test: The same, scored; None: each seed holds out a fifth of `train` of its own.
        how: `linear`, `finetune` or `both`.
        seeds: Number of seeds: split, random weights, the new head and the order of fine-tuning.
        max_length: Tokens of a row; longer examples go on in the next row.
        columns: See `read_labelled`.
        fields: See `read_labelled`.
        fine_tuning: Epochs, batch size and rate of fine-tuning.
        device: `auto`, `cpu` or `cuda`.

    Raises:
        ModuleNotFoundError: the packages of the extra `probe` are missing; the message holds the install command.
        FileNotFoundError: no such file.
        ValueError: what does not fit, in one sentence.
    """
    if task not in TASKS:
        raise ValueError(f"task must be one of {', '.join(map(repr, TASKS))}, got {task!r}.")
    if how not in (*HOW, "both"):
        raise ValueError(f"how must be one of 'linear', 'finetune', 'both', got {how!r}.")
    if not isinstance(seeds, int) or isinstance(seeds, bool) or seeds < 1:
        raise ValueError(f"seeds must be a number of at least 1, got {seeds!r}; 3 show a spread.")
    if device not in ("auto", "cpu", "cuda") or (device == "cuda" and not torch.cuda.is_available()):
        raise ValueError(f"device must be 'auto', 'cpu' or a 'cuda' that is there, got {device!r}; leave it out.")
    names = [models] if isinstance(models, (str, os.PathLike)) else list(models)
    if not names:
        raise ValueError("models must name at least one model; give the folder of an export.")
    if missing := [p for p in ("sklearn", "seqeval") if importlib.util.find_spec(p) is None]:
        raise ModuleNotFoundError(f"probe needs the package {missing[0]}: pip install 'foundry-lightning[probe]'.")
    read = partial(read_labelled, task=task, columns=columns, fields=fields)
    examples = read(train)
    held_out = None if test is None else read(test)
    _check_labels(examples, held_out)
    where = torch.device("cuda" if device == "cuda" or (device == "auto" and torch.cuda.is_available()) else "cpu")
    encoders = [Encoder(os.fspath(name), max_length=max_length, device=where) for name in names]

    splits = [_split(examples, held_out, seed) for seed in range(seeds)]
    sizes = (len(splits[0].train), len(splits[0].test))
    found = Comparison(
        task, examples.source, "a fifth of it" if held_out is None else held_out.source, sizes, list(range(seeds))
    )
    without = "bag of words" if task == "classify" else "word lookup"
    found.lines.append(_line(without, "no encoder", [_score(task, s.test, _lookup(s)) for s in splits]))
    controls: dict[tuple[str, str], Line] = {}
    settings = fine_tuning or FineTuning()
    for encoder in encoders:
        for way in HOW if how == "both" else (how,):
            by = _linear if way == "linear" else partial(_fine_tuned, settings=settings)
            control = controls.get((encoder.architecture, way))
            if control is None:
                name = f"{encoder.model_type}, random weights"
                control = _line(name, way, [_score(task, s.test, by(encoder, s, random=True)) for s in splits])
                controls[encoder.architecture, way] = control
                found.lines.append(control)
            line = _line(encoder.path, way, [_score(task, s.test, by(encoder, s, random=False)) for s in splits])
            metric = METRICS[task][0]
            line.over_random = [a - b for a, b in zip(line.scores[metric], control.scores[metric], strict=True)]
            found.lines.append(line)
    return found


@dataclass(frozen=True)
class _Split:
    train: Labelled
    test: Labelled
    seed: int


def _split(examples: Labelled, held_out: Labelled | None, seed: int) -> _Split:
    if held_out is not None:
        return _Split(examples, held_out, seed)
    order = np.random.default_rng(seed).permutation(len(examples)).tolist()
    fifth = len(examples) // 5
    return _Split(examples.take(order[fifth:]), examples.take(order[:fifth]), seed)


def _check_labels(examples: Labelled, held_out: Labelled | None) -> None:
    labels = set(examples.flat())
    if len(labels) < 2:
        raise ValueError(f"{examples.source} holds the label {labels.pop()!r} only; a probe needs two or more.")
    if held_out is None and len(examples) < 10:
        raise ValueError(
            f"{examples.source} holds {len(examples)} examples; give 10 or more, or test data of their own."
        )
    if held_out is not None and not labels & set(held_out.flat()):
        raise ValueError(f"{held_out.source} and {examples.source} share no label; give data of one task.")


def _line(model: str, by: str, scores: list[dict[str, float]]) -> Line:
    return Line(model, by, {name: [score[name] for score in scores] for name in scores[0]})


def _score(task: str, test: Labelled, predicted: list[str]) -> dict[str, float]:
    from seqeval.metrics import f1_score as entity_f1
    from sklearn.metrics import accuracy_score, f1_score

    true = test.flat()
    scores = {"accuracy": float(accuracy_score(true, predicted))}
    if task != "ner":
        return {**scores, "macro F1": float(f1_score(true, predicted, average="macro", zero_division=0))}
    tags = iter(predicted)
    sentences = [list(islice(tags, len(label))) for label in test.labels]
    return {**scores, "entity F1": float(entity_f1(test.labels, sentences, zero_division=0))}


def _lookup(split: _Split) -> list[str]:
    """Without an encoder: a word's most frequent tag (an unknown word's: the most frequent of all); a bag of words."""
    if not split.train.of_words:
        from sklearn.feature_extraction.text import TfidfVectorizer

        bag = TfidfVectorizer(sublinear_tf=True)
        return _fitted(bag.fit_transform(split.train.inputs), split.train.labels, bag.transform(split.test.inputs))
    tags: dict[str, Counter[str]] = {}
    for word, tag in zip(chain.from_iterable(split.train.inputs), split.train.flat(), strict=True):
        tags.setdefault(word, Counter())[tag] += 1
    usual = Counter(split.train.flat())
    return [tags.get(word, usual).most_common(1)[0][0] for word in chain.from_iterable(split.test.inputs)]


def _linear(encoder: Encoder, split: _Split, *, random: bool) -> list[str]:
    """Logistic regression on frozen states, each dimension scaled to unit variance."""
    from sklearn.preprocessing import StandardScaler

    with _seeded(split.seed):
        model = encoder.load(AutoModel, random=random)
    scaler = StandardScaler()
    train = scaler.fit_transform(encoder.states(model, split.train))
    return _fitted(train, split.train.flat(), scaler.transform(encoder.states(model, split.test)))


def _fitted(train: Any, labels: list[str], test: Any) -> list[str]:
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import LogisticRegression

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # 200 steps order models; the last digits do not matter
        return [str(label) for label in LogisticRegression(max_iter=200).fit(train, labels).predict(test)]


def _fine_tuned(encoder: Encoder, split: _Split, *, random: bool, settings: FineTuning) -> list[str]:
    with _seeded(split.seed):
        return encoder.fine_tuned(split.train, split.test, random=random, settings=settings)


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Torch's generators start at the seed inside, and are put back."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        yield
