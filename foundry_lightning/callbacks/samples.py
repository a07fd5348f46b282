"""The same few held-out sentences with a blank, and what the model puts into it, at each evaluation."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import lightning
import rich
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import TensorBoardLogger, WandbLogger
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from rich.markup import escape
from rich.table import Table
from torch import Tensor

from foundry_lightning.data.pipeline import DataPipeline
from foundry_lightning.draws import permutation
from foundry_lightning.masking import PIECE_SHIFT

_CHARACTERS = 40  # looked at for each token of a row
_LOOKED_AT = 200  # texts among which a word to blank is looked for
_GUESSES = 3


@dataclass
class Blank:
    """A text with one word taken out.

    Args:
        before: Text before the word.
        word: The word.
        after: Text after it.
        input_ids: `[S]`, the mask token in the word's place.
        place: That place.
        guesses: (token, probability), likeliest first.
    """

    before: str
    word: str
    after: str
    input_ids: Tensor
    place: int
    guesses: list[tuple[str, float]] = field(default_factory=list)

    def facts(self) -> dict[str, Any]:
        """What is kept of it: no tensor."""
        kept = {name: getattr(self, name) for name in ("before", "word", "after")}
        return {**kept, "guesses": [[token, round(probability, 4)] for token, probability in self.guesses]}


def choose_blanks(module: Any, pipeline: DataPipeline, *, count: int, seed: int) -> list[Blank]:
    """Takes one word out of each of some texts; which ones the seed decides.

    Args:
        module: A module with masking and a tokenizer that knows words (a fast one).
        pipeline: Where the texts come from; of a stream its first ones, of one that can be read once none.
        count: Number of texts.
        seed: The seed.
    """
    found: list[Blank] = []
    for index, text in islice(_texts(pipeline, seed), _LOOKED_AT):
        if len(found) == count:
            break
        if isinstance(text, str) and (blank := _blank(text, module.tokenizer, pipeline.max_length, seed, index)):
            found.append(blank)
    return found


def _texts(pipeline: DataPipeline, seed: int) -> Iterator[tuple[int, Any]]:
    if pipeline.is_stream:
        yield from enumerate(pipeline.source.peek(_LOOKED_AT))
        return
    total = 1 + max((row_id & ((1 << PIECE_SHIFT) - 1) for row_id in pipeline.table["row_id"]), default=-1)
    for index in permutation(total, seed=seed, epoch=0).tolist():
        yield index, next(iter(pipeline.source.rows(index)))


def _blank(text: str, tokenizer: Any, max_length: int, seed: int, index: int) -> Blank | None:
    """A blank in the place of a word of more than three letters that is one token; None where there is none."""
    text = text[: _CHARACTERS * max_length]  # a row may be a whole book
    encoded = tokenizer(text, truncation=True, max_length=max_length)
    words = [word for word in encoded.word_ids(0) if word is not None]
    spans = {word: encoded.word_to_chars(0, word) for word in dict.fromkeys(words) if words.count(word) == 1}
    whole = [w for w, span in spans.items() if text[span.start : span.end].isalpha() and span.end - span.start > 3]
    if not whole:
        return None
    word = whole[int(permutation(len(whole), seed=seed, epoch=1, first=index)[0])]
    span, place = spans[word], encoded.word_ids(0).index(word)
    input_ids = torch.tensor(encoded["input_ids"])
    input_ids[place] = tokenizer.mask_token_id
    before, after = text[max(span.start - 50, 0) : span.start], text[span.end : span.end + 30]
    if span.start > 50:
        before = "…" + (before.partition(" ")[2] or before)  # not from within a word
    if span.end + 30 < len(text):
        after = (after.rpartition(" ")[0] or after) + "…"
    return Blank(before.replace("\n", " "), text[span.start : span.end], after.replace("\n", " "), input_ids, place)


def fill_blanks(module: Any, blanks: list[Blank]) -> None:
    """Gives each blank the model's likeliest tokens, in one forward pass in the mode the student is in."""
    rows = [blank.input_ids for blank in blanks]
    padding = module.pad_token_id
    input_ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=padding).to(module.device)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
    width = input_ids.shape[1]
    positions = torch.tensor([n * width + blank.place for n, blank in enumerate(blanks)], device=module.device)
    inputs = {"input_ids": input_ids, "attention_mask": mask.to(module.device)}
    with torch.inference_mode():
        scores = module.projection(module.student, inputs, positions=positions).scored.scores()
        shares = scores[:, : module.masking.vocab_size].float().softmax(-1)
        probabilities, ids = shares.topk(min(_GUESSES, shares.shape[1]))
    for blank, row, guessed in zip(blanks, probabilities.tolist(), ids.tolist(), strict=True):
        tokens = [module.tokenizer.decode([token]).strip() for token in guessed]
        blank.guesses = list(zip(tokens, row, strict=True))


class Samples(Callback):
    """Fills the blanks of the same held-out texts at each evaluation and at the end of a run.

    They are printed, appended to `samples.jsonl`, and given to wandb and tensorboard as tables.

    Args:
        count: Number of texts; 0: none.
        folder: Where the file goes; None: the Trainer's `default_root_dir`, an empty string: nowhere.
        show: Whether they are printed.
    """

    def __init__(self, count: int = 3, *, folder: str | None = None, show: bool = True) -> None:
        self.count, self.folder, self.show = count, folder, show
        self._blanks: list[Blank] = []
        self._done = -1

    def on_train_start(self, trainer: lightning.Trainer, pl_module: Any) -> None:
        """Chooses the texts."""
        self._blanks, self._done = [], -1
        val = getattr(trainer.datamodule, "val", None)  # type: ignore[attr-defined]
        works = isinstance(val, DataPipeline) and getattr(pl_module, "masking", None) is not None
        whole = isinstance(trainer.strategy, (SingleDeviceStrategy, DDPStrategy))  # this rank has all weights
        fast = getattr(pl_module.tokenizer, "is_fast", False)
        if self.count and works and whole and fast and trainer.is_global_zero:
            self._blanks = choose_blanks(pl_module, val, count=self.count, seed=pl_module.config.seed)  # type: ignore[arg-type]

    def on_validation_end(self, trainer: lightning.Trainer, pl_module: Any) -> None:
        """Fills the blanks."""
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            self._fill(trainer, pl_module, trainer.fit_loop.epoch_loop.global_step)

    def on_train_end(self, trainer: lightning.Trainer, pl_module: Any) -> None:
        """Fills them where no evaluation did at this update."""
        if self._done != trainer.global_step:
            training = pl_module.student.training
            pl_module.student.eval()
            self._fill(trainer, pl_module, trainer.global_step)
            pl_module.student.train(training)

    def _fill(self, trainer: lightning.Trainer, module: Any, step: int) -> None:
        if not self._blanks:
            return
        self._done = step
        with trainer.precision_plugin.val_step_context():
            fill_blanks(module, self._blanks)
        folder = trainer.default_root_dir if self.folder is None else self.folder
        if folder:
            Path(folder).mkdir(parents=True, exist_ok=True)
            line = {"step": step, "samples": [blank.facts() for blank in self._blanks]}
            with (Path(folder) / "samples.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps(line, ensure_ascii=False) + "\n")
        rows = [
            [f"{b.before}____{b.after}", b.word, ", ".join(f"{token} {p:.2f}" for token, p in b.guesses)]
            for b in self._blanks
        ]
        if self.show:
            table = Table("held-out text", "truth", "guesses")
            for row in rows:
                table.add_row(*map(escape, row))
            rich.print(table)
        columns = ["text", "truth", "guesses"]
        for logger in trainer.loggers:
            if isinstance(logger, WandbLogger):
                logger.log_table("samples", columns=columns, data=rows, step=step)
            elif isinstance(logger, TensorBoardLogger):
                cells = [columns, ["---"] * 3, *rows]
                text = "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in cells)
                logger.experiment.add_text("samples", text, step)
