"""The LightningDataModule: training, validation and prediction data of a run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import lightning
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities import rank_zero_warn
from torch.utils.data import DataLoader

from foundry_lightning.checkpoint import changes, misfit
from foundry_lightning.config import SEED_END, Checks, gathered, plain, problems_to_error
from foundry_lightning.data.loader import Deal, WindowLoader
from foundry_lightning.data.pipeline import DataPipeline
from foundry_lightning.data.ready import ReadyBatches, looks_ready
from foundry_lightning.data.rows import Batch
from foundry_lightning.tokenizer import load_tokenizer, tokenizer_fingerprint


class MLMDataModule(lightning.LightningDataModule):
    """Training and validation data for the modules of this package (or any module that takes its batches).

    Args:
        train: A `DataPipeline`, a list of ready batches, or a source that `DataPipeline` takes.
        val: The same for validation; `python-docs` as `train` brings its held-out part by itself.
        predict: Texts whose blanks (mask tokens) `predict` fills.
        tokenizer: A tokenizer, its folder or hub name, or `{"train": {"vocab_size": …}}` to train one on `train` at
            first use.
        batch_size: Rows of a batch.
        max_length: Longest row in tokens.
        num_workers: Worker processes.
        shuffle: Whether rows (ready batches: batches) are permuted in each epoch.
        shuffle_buffer: For streams: rows of a block that is permuted.
        long_rows: `truncate` or `split`.
        group_by_length: Batches hold rows of like lengths.
        pack: Several texts share a row of `max_length`.
        batch_tokens: Places of a batch in the place of `batch_size`, with `pack` or `group_by_length`.
        text_column: Column of the text.
        split_txt: `.txt` files give a text a `line` or a `paragraph`.
        seed: Seed of the order; None: the module's.

    Raises:
        ValueError: a setting outside its rule.
    """

    def __init__(
        self,
        train: Any,
        *,
        val: Any = None,
        predict: list[str] | None = None,
        tokenizer: Any = None,
        batch_size: int = 8,
        max_length: int = 512,
        num_workers: int = 0,
        shuffle: bool = True,
        shuffle_buffer: int = 0,
        long_rows: str = "truncate",
        group_by_length: bool = False,
        pack: bool = False,
        batch_tokens: int | None = None,
        text_column: str = "text",
        split_txt: str = "line",
        seed: int | None = None,
    ) -> None:
        super().__init__()
        num_workers, seed = plain(num_workers), plain(seed)
        checks = Checks(SimpleNamespace(num_workers=num_workers, shuffle=shuffle, seed=seed))
        checks.integer("num_workers", low=0)
        checks.kind("shuffle", bool, "True or False")
        checks.integer("seed", low=0, high=SEED_END, optional=True)
        if predict is not None and not (isinstance(predict, list) and all(isinstance(text, str) for text in predict)):
            checks.problems.append(f"predict must be a list of texts, got {predict!r}.")
        problems_to_error(checks.problems, of="MLMDataModule")
        self._settings = {
            "batch_size": batch_size,
            "max_length": max_length,
            "long_rows": long_rows,
            "group_by_length": group_by_length,
            "pack": pack,
            "batch_tokens": batch_tokens,
            "text_column": text_column,
            "split_txt": split_txt,
        }
        self.train = None if train is None else _as_batches(train, shuffle_buffer=shuffle_buffer, **self._settings)
        if val is None and isinstance(train, str) and train in ("python-docs", "python-docs-wide"):
            val = f"{train}:val"
        self.val = None if val is None else _as_batches(val, **self._settings)
        self.predict = predict
        self._tokenizer_spec = tokenizer
        self.tokenizer: Any = None
        self.num_workers, self.shuffle, self._seed = num_workers, shuffle, seed
        self._told_of_restart = False
        self._loaders: dict[bool, WindowLoader] = {}

    def prepare_data(self) -> None:
        """Trains a tokenizer where the settings ask for one (one process of a node; the others read it)."""
        self._load_tokenizer()

    def _load_tokenizer(self) -> None:
        if self.tokenizer is None and self._tokenizer_spec is not None:
            source = self.train.source if isinstance(self.train, DataPipeline) else None
            self.tokenizer = load_tokenizer(self._tokenizer_spec, source=source)

    def setup(self, stage: str) -> None:
        """Loads the tokenizer; what needs the module's settings waits for `connect`."""
        self._load_tokenizer()

    def connect(
        self,
        *,
        tokenizer: Any,
        word_ids: bool,
        pad_token_id: int,
        max_positions: int | None,
        num_ids: int | None,
        num_classes: int | None = None,
    ) -> None:
        """Takes over what the module knows, tokenises, and checks data and model against each other.

        Args:
            tokenizer: The module's tokenizer, or None.
            word_ids: Whether masking needs the words.
            pad_token_id: Padding id.
            max_positions: Longest row the model takes, or None.
            num_ids: Ids the student can embed, or None.
            num_classes: Ids the student scores, or None.

        Raises:
            ValueError: rows too long for the model, ids beyond its embedding, another tokenizer, an empty source.
        """
        problems: list[str] = []
        for name, batches in (("train", self.train), ("val", self.val)):
            if batches is None:
                continue
            with gathered(problems):
                batches.bind(tokenizer=tokenizer, word_ids=word_ids, pad_token_id=pad_token_id)
            if isinstance(batches, DataPipeline):
                batches.num_ids = min((n for n in (num_ids, num_classes) if n is not None), default=None)
            if max_positions is not None and batches.max_length > max_positions:
                problems.append(
                    f"max_length of the {name} data is {batches.max_length}, the student has {max_positions} "
                    f"positions; set max_length={max_positions} or less."
                )
            problems += batches.source_problems()
        with gathered(problems):
            self._check_stream()
        if self.val is not None and getattr(getattr(self.val, "source", None), "one_shot", False):
            problems.append(
                "the validation source can be iterated once only, and every evaluation reads it; "
                "pass a callable that returns a new iterator."
            )
        problems_to_error(problems, of="data")  # before texts are tokenised
        for name, batches in (("train", self.train), ("val", self.val)):
            if batches is None:
                continue
            with gathered(problems):
                problems += _ids_beyond(batches, name=name, num_ids=num_ids, num_classes=num_classes)
        problems_to_error(problems, of="data")

    def _check_stream(self) -> None:
        """Refuses an iterator where it would be read twice, and says where shuffling has no effect."""
        trainer, train = self.trainer, self.train
        if trainer is None or trainer.state.fn != "fit" or not isinstance(train, DataPipeline) or not train.is_stream:
            return
        if self.shuffle and not train.shuffle_buffer:
            rank_zero_warn("shuffle=True has no effect on a stream; set shuffle_buffer to permute blocks of rows.")
        again = f"num_workers={self.num_workers}" if self.num_workers else ""
        if trainer.max_steps == -1 and trainer.max_epochs != 1:
            again = f"epochs={trainer.max_epochs}"
        if train.source.one_shot and again:
            raise ValueError(
                f"the training source, {train.source.description}, can be read once and in one process only, got "
                f"{again}; pass a callable that returns a new iterator."
            )

    @property
    def seed(self) -> int:
        """Seed of the order."""
        if self._seed is not None:
            return self._seed
        config = getattr(getattr(self.trainer, "lightning_module", None), "config", None)
        return int(getattr(config, "seed", 42))

    def _deal(self) -> Deal:
        trainer = self.trainer
        if trainer is None:
            return Deal()
        places = trainer.num_training_batches  # of Trainer(limit_train_batches=…), or the loader's length
        limit = None if places == float("inf") else int(places)
        return Deal(trainer.global_rank, trainer.world_size, trainer.accumulate_grad_batches, limit)

    def _position(self) -> tuple[int, int]:
        """Where the run stands, by Lightning's own progress (the loader's count would run ahead)."""
        trainer = self.trainer
        assert trainer is not None
        epoch, place = trainer.current_epoch, trainer.fit_loop.epoch_loop.batch_progress.current.ready
        is_again = epoch > 0 and place == 0 and trainer.max_steps != -1 and getattr(self.train, "is_stream", False)
        if is_again and not self._told_of_restart:
            self._told_of_restart = True
            rank_zero_warn(
                f"the stream ended after {trainer.global_step} updates, before the run's {trainer.max_steps}: "
                f"epoch {epoch} reads it again."
            )
        return epoch, place

    def _updates_done(self) -> int:
        assert self.trainer is not None
        return self.trainer.global_step

    def _loader(self, batches: DataPipeline | ReadyBatches | None, *, training: bool) -> WindowLoader:
        if batches is None:
            raise MisconfigurationException("MLMDataModule has no data for this stage; give train= or val=.")
        module = None if self.trainer is None else self.trainer.lightning_module
        on_gpu = self.trainer is not None and self.trainer.strategy.root_device.type == "cuda"
        loader = WindowLoader(
            batches,
            deal=self._deal if training else lambda: Deal(*(lambda d: (d.rank, d.num_ranks))(self._deal())),
            position=self._position if training else lambda: (0, 0),
            updates_done=self._updates_done if training else None,
            shuffle=training and self.shuffle,
            seed=self.seed,
            count=getattr(module, "counter", None),
            filler_id=getattr(module, "filler_id", 0),
            num_workers=self.num_workers,
            pin_memory=on_gpu,
        )
        self._loaders[training] = loader
        return loader

    def on_exception(self, exception: BaseException) -> None:
        """Names the batches that were being read when a data worker died: PyTorch raises that anywhere in the run."""
        for loader in self._loaders.values():
            loader.explain(exception)

    def train_dataloader(self) -> WindowLoader:
        """Training batches of this rank; a new order in each epoch where `shuffle` is set."""
        return self._loader(self.train, training=True)

    def val_dataloader(self) -> WindowLoader | list[Any]:
        """Validation batches of this rank, always in the source's order."""
        return [] if self.val is None else self._loader(self.val, training=False)

    def test_dataloader(self) -> WindowLoader:
        """The validation batches."""
        return self._loader(self.val, training=False)

    def predict_dataloader(self) -> DataLoader[str]:
        """The texts to fill, one a batch."""
        if not self.predict:
            raise MisconfigurationException("MLMDataModule has no texts to fill; give predict=[…].")
        return DataLoader(self.predict, batch_size=1, collate_fn=list)  # type: ignore[arg-type]

    def state_dict(self) -> dict[str, Any]:
        """What decides the order of the rows; checked when a run resumes."""
        return self.order_settings()

    def order_settings(self) -> dict[str, Any]:
        """What decides the order of the rows, by the name an error uses; empty without training data."""
        train = self.train
        if train is None:
            return {}
        tokenizer = train.tokenizer if self.tokenizer is None else self.tokenizer
        return {
            "data": train.fingerprint(),
            "tokenizer": None if tokenizer is None else tokenizer_fingerprint(tokenizer),
            "batch_size": getattr(train, "batch_size", None),
            "max_length": train.max_length,
            "long_rows": getattr(train, "long_rows", None),
            "shuffle": self.shuffle,
            "group_by_length": getattr(train, "group_by_length", None),
            "pack": getattr(train, "pack", None),
            "batch_tokens": getattr(train, "batch_tokens", None),
            "shuffle_buffer": getattr(train, "shuffle_buffer", None),
            "order seed": self.seed,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Refuses data that would not go on where the checkpoint was taken.

        Raises:
            ValueError: a setting of the order differs, named with both values.
        """
        changed = changes(state_dict, self.order_settings())
        if changed and self.trainer is not None and self.trainer.state.fn == "fit":
            raise misfit("checkpoint does not fit the data", changed, trainer=self.trainer)


def _ids_beyond(
    batches: DataPipeline | ReadyBatches, *, name: str, num_ids: int | None, num_classes: int | None
) -> list[str]:
    """Ids and labels that the student does not know."""
    problems = []
    largest = batches.largest_id()
    if largest is not None and num_ids is not None and largest >= num_ids:
        problems.append(
            f"the {name} data hold the token id {largest}, the student embeds ids below {num_ids}; "
            "use the tokenizer that belongs to the student."
        )
    label = batches.largest_label() if isinstance(batches, ReadyBatches) else largest
    if label is not None and num_classes is not None and label >= num_classes and not problems:
        problems.append(
            f"the {name} data hold the label {label}, the student scores ids below {num_classes}; "
            "labels are token ids, or -100 where none is scored."
        )
    return problems


def _as_batches(data: Any, **pipeline_settings: Any) -> DataPipeline | ReadyBatches:
    """A pipeline as it is; a list of ready batches; anything else as the source of a `DataPipeline`."""
    if isinstance(data, (DataPipeline, ReadyBatches)):
        return data
    if isinstance(data, (list, tuple)) and data and looks_ready(data[0]):
        return ReadyBatches(data)
    return DataPipeline(data, **pipeline_settings)


__all__ = ["Batch", "MLMDataModule"]
