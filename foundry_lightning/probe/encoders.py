"""What is asked of an encoder: its frozen states at words and texts, and its tags and labels after fine-tuning."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import lightning
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification, AutoModelForTokenClassification

from foundry_lightning.models import max_positions
from foundry_lightning.optim import optimizer_with_schedule
from foundry_lightning.probe.labelled import Labelled
from foundry_lightning.quiet import quiet_lightning, quiet_loading
from foundry_lightning.tokenizer import load_tokenizer, tokenizer_fingerprint

_IGNORED = -100  # what the models' own losses leave out


@dataclass(frozen=True)
class FineTuning:
    """How all weights are trained: epochs, rows of a batch, peak learning rate (small models want about 1e-3)."""

    epochs: int = 10
    batch_size: int = 32
    learning_rate: float = 1e-4


@dataclass(frozen=True)
class Rows:
    """Tokenised examples; a long one goes on in the next row, so that no word is left out.

    Attributes:
        ids: Token ids of each row.
        example: Number of the example that each row is a part of.
        places: (row, column) of each word's first token, over all examples; row −1: a word without a token.
    """

    ids: list[list[int]]
    example: list[int]
    places: list[tuple[int, int]]


class Encoder:
    """A model folder, or the same architecture with random weights (the control).

    Args:
        path: A folder or hub name that `AutoModel` and `AutoTokenizer` load.
        max_length: Tokens of a row; None: what the tokenizer says, at most 512.
        device: Where states are computed.

    Raises:
        FileNotFoundError: a folder without a model.
        ValueError: a model without a fast tokenizer, or with fewer positions than `max_length`.
    """

    def __init__(self, path: str, *, max_length: int | None, device: torch.device) -> None:
        self.path, self.device = path, device
        if Path(path).is_dir() and not (Path(path) / "config.json").is_file():
            inner = Path(path) / "export"
            advice = f"give {inner}" if inner.is_dir() else "give the folder of an export"
            raise FileNotFoundError(f"model folder {path} must hold a config.json, got none; {advice}.")
        self.tokenizer = load_tokenizer(path)
        if not getattr(self.tokenizer, "is_fast", False):
            raise ValueError(f"model {path} needs a fast tokenizer, which finds the words' tokens; got a slow one.")
        config = self._config()
        with quiet_loading(), torch.device("meta"):
            positions = max_positions(AutoModel.from_config(config))
        if max_length is not None and positions is not None and max_length > positions:
            raise ValueError(f"max_length is {max_length}, model {path} has {positions} positions; set at most that.")
        self.max_length = max_length or min(self.tokenizer.model_max_length, positions or 512, 512)
        self.model_type = str(config.model_type)
        self.architecture = f"{config.to_json_string()} {tokenizer_fingerprint(self.tokenizer)}"

    def _config(self, **changes: Any) -> Any:
        try:
            return AutoConfig.from_pretrained(self.path, **changes)
        except (OSError, ValueError) as error:
            raise FileNotFoundError(f"model {self.path} cannot be loaded: {error}") from error

    def load(self, auto_class: Any, *, random: bool, **config: Any) -> nn.Module:
        """The model of a class, in eval mode on the CPU; with `random` the weights are drawn by torch's generator."""
        with quiet_loading():
            if random:
                model = auto_class.from_config(self._config(**config))
            else:
                model = auto_class.from_pretrained(self.path, **config)
        return cast(nn.Module, model.eval())

    def tokenise(self, data: Labelled) -> Rows:
        """Tokenises texts as they are, sentences as their words with a space between."""
        texts = [" ".join(given) if data.of_words else given for given in data.inputs]
        encoded = self.tokenizer(texts, truncation=True, max_length=self.max_length, return_overflowing_tokens=True)
        example = [int(number) for number in encoded["overflow_to_sample_mapping"]]
        rows_of: dict[int, list[int]] = {}
        for row, number in enumerate(example):
            rows_of.setdefault(number, []).append(row)
        places = []
        for number, words in enumerate(data.inputs if data.of_words else []):
            start = 0
            for word in words:
                places.append(_first_token(encoded, rows_of[number], start, start + len(word)))
                start += len(word) + 1
        return Rows(encoded["input_ids"], example, places)

    def states(self, model: nn.Module, data: Labelled) -> npt.NDArray[np.float32]:
        """Last hidden states of a frozen encoder.

        Returns:
            `[words, D]`, each word's first token (zeros without one); for texts `[texts, D]`, the mean over tokens.
        """
        rows = self.tokenise(data)
        hidden = self._outputs(model, rows)
        width = hidden[0].shape[-1]
        if data.of_words:
            none = np.zeros(width, dtype=np.float32)
            return np.stack([none if row < 0 else hidden[row][column] for row, column in rows.places])
        sums = np.zeros((len(data), width), dtype=np.float32)
        np.add.at(sums, rows.example, np.stack([states.sum(0) for states in hidden]))
        counts = np.bincount(rows.example, weights=[len(states) for states in hidden]).astype(np.float32)
        return cast("npt.NDArray[np.float32]", sums / counts[:, None])

    @quiet_lightning()
    def fine_tuned(self, train: Labelled, test: Labelled, *, random: bool, settings: FineTuning) -> list[str]:
        """Labels of `test` after all weights were trained on `train`; a text is read up to `max_length`."""
        names = sorted(set(train.flat()))
        auto_class = AutoModelForTokenClassification if train.of_words else AutoModelForSequenceClassification
        module = _Tuned(self.load(auto_class, random=random, num_labels=len(names)), settings)
        trainer = lightning.Trainer(
            accelerator="cpu" if self.device.type == "cpu" else "auto",
            devices=1,
            max_epochs=settings.epochs,
            gradient_clip_val=1.0,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        examples = self._examples(train, names)
        loader: DataLoader[Any] = DataLoader(
            cast(Any, examples), settings.batch_size, shuffle=True, collate_fn=self._padded
        )
        trainer.fit(module, loader)
        rows = self.tokenise(test)
        scores = self._outputs(module.model, rows)
        if not test.of_words:
            first = [rows.example.index(number) for number in range(len(test))]
            return [names[int(scores[row].argmax())] for row in first]
        usual = Counter(train.flat()).most_common(1)[0][0]
        return [usual if row < 0 else names[int(scores[row][column].argmax())] for row, column in rows.places]

    def _examples(self, data: Labelled, names: list[str]) -> list[tuple[list[int], Any]]:
        """Rows with their labels: a tag's number at a word's first token; a text's first row and its label's number."""
        rows, numbers = self.tokenise(data), {name: number for number, name in enumerate(names)}
        if not data.of_words:
            return [(rows.ids[rows.example.index(n)], numbers[label]) for n, label in enumerate(data.labels)]
        labels = [[_IGNORED] * len(row) for row in rows.ids]
        for (row, column), tag in zip(rows.places, data.flat(), strict=True):
            if row >= 0:
                labels[row][column] = numbers[tag]
        return list(zip(rows.ids, labels, strict=True))

    def _padded(self, examples: list[tuple[list[int], Any]]) -> dict[str, Tensor]:
        """A batch `[B, S]` of rows, with labels `[B, S]` or `[B]`."""
        length = max(len(ids) for ids, _ in examples)
        pad = self.tokenizer.pad_token_id or 0
        labels = [label if isinstance(label, int) else _filled(label, length, _IGNORED) for _, label in examples]
        return {
            "input_ids": torch.tensor([_filled(ids, length, pad) for ids, _ in examples]),
            "attention_mask": torch.tensor([_filled([1] * len(ids), length, 0) for ids, _ in examples]),
            "labels": torch.tensor(labels),
        }

    @torch.no_grad()
    def _outputs(self, model: nn.Module, rows: Rows) -> list[npt.NDArray[np.float32]]:
        """The model's first output for each row, without padding: states or scores `[S, …]`, or a text's scores."""
        model = model.eval().to(self.device)
        found: dict[int, npt.NDArray[np.float32]] = {}
        by_length = sorted(range(len(rows.ids)), key=lambda row: len(rows.ids[row]))
        for start in range(0, len(by_length), 64):
            numbers = by_length[start : start + 64]
            batch = self._padded([(rows.ids[n], 0) for n in numbers])
            del batch["labels"]
            outputs = model(**{name: values.to(self.device) for name, values in batch.items()})[0].float().cpu().numpy()
            for n, output in zip(numbers, outputs, strict=True):
                found[n] = output[: len(rows.ids[n])] if outputs.ndim == 3 else output
        return [found[n] for n in range(len(rows.ids))]


class _Tuned(lightning.LightningModule):
    """A classifier of transformers in training, by its own loss."""

    def __init__(self, model: nn.Module, settings: FineTuning) -> None:
        super().__init__()
        self.model, self.settings = model, settings

    def on_train_start(self) -> None:
        """The model came in eval mode."""
        self.model.train()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """Mean cross-entropy over labels."""
        return cast(Tensor, self.model(**batch).loss)

    def configure_optimizers(self) -> Any:
        """AdamW with a linear rate, a tenth of it warm-up."""
        total = int(self.trainer.estimated_stepping_batches)
        return optimizer_with_schedule(
            [self.model],
            learning_rate=self.settings.learning_rate,
            weight_decay=0.01,
            schedule="linear",
            warmup_steps=total // 10,
            total_steps=total,
            fused=False,
        )


def _filled(values: list[int], length: int, value: int) -> list[int]:
    return values + [value] * (length - len(values))


def _first_token(encoded: Any, rows: list[int], start: int, end: int) -> tuple[int, int]:
    """Where the first token of the characters `start` to `end` stands; (−1, 0) where there is none."""
    for row in rows:
        for character in range(start, end):
            token = encoded.char_to_token(row, character)
            if token is not None:
                return row, token
    return -1, 0
