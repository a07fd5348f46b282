"""Masked-language-model pretraining as a LightningModule."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torchmetrics import Metric

from foundry_lightning.config import MLMConfig, config_from, gathered, problems_to_error
from foundry_lightning.losses import vocabulary_loss
from foundry_lightning.masking import MaskedBatch, Masking, masked_positions
from foundry_lightning.models import num_embeddings, require_inputs
from foundry_lightning.modules.base import EncoderModule
from foundry_lightning.projection import find_projection, output_vocab_size
from foundry_lightning.schedule import mask_share
from foundry_lightning.students import StudentRecipe
from foundry_lightning.tokenizer import check_tokenizer, load_tokenizer


@dataclass
class MaskShare:
    """The share of masked tokens in each update, for the host that counts and the device that masks.

    Attributes:
        end: Share of the last update, and of evaluations; None: the masking's own share throughout.
        total_steps: Updates of the run; set before the first batch is read.
    """

    end: float | None = None
    total_steps: int = 0

    def apply(self, masking: Masking, info: Mapping[str, Any]) -> Masking:
        """The masking of a batch that says in its `info` which update it is part of; of an evaluation if it does not.

        Args:
            masking: Its share is that of the first update.
            info: The batch's numbers.
        """
        if self.end is None:
            return masking
        share = self.end
        if "update" in info:
            share = mask_share(info["update"], total_steps=self.total_steps, start=masking.mask_prob, end=self.end)
        return replace(masking, mask_prob=share)


@dataclass(frozen=True)
class Counter:
    """Counts, on the host, of what a batch's losses are divided by."""

    masking: Masking
    share: MaskShare

    def __call__(self, batch: Mapping[str, Any], info: Mapping[str, Any]) -> dict[str, int]:
        """`num_masked` and `num_attended` of a batch."""
        ready = batch.get("labels")
        if ready is None:
            masked = self.share.apply(self.masking, info).count(batch, epoch=info["epoch"])
        else:
            masked = int((ready != -100).sum())
        return {"num_masked": masked, "num_attended": int((batch["attention_mask"] != 0).sum())}


class TokenMean(Metric):
    """Means over tokens: sums and one division at the end, over all batches and ranks.

    Args:
        terms: term -> name of the count that divides its sum.
    """

    full_state_update = False

    def __init__(self, **terms: str) -> None:
        super().__init__()
        self.terms = terms
        for name in dict.fromkeys((*terms, *terms.values())):
            self.add_state(name, torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, counts: Mapping[str, Any], **sums: Tensor) -> None:
        """Adds the sums of a batch and the counts that go with them."""
        for name in set(self.terms.values()):
            setattr(self, name, getattr(self, name) + counts[name])
        for name, value in sums.items():
            setattr(self, name, getattr(self, name) + value)

    def _apply(self, fn: Any, *args: Any, **kwargs: Any) -> Any:
        """Moves the sums as Lightning moves the module, and leaves their type: half precision would lose tokens."""

        def move(tensor: Tensor) -> Tensor:
            device = fn(torch.zeros((), device=tensor.device)).device
            # MPS has no float64: the type changes on the other side
            return tensor.float().to(device) if device.type == "mps" else tensor.to(device).double()

        return super()._apply(move, *args, **kwargs)

    def compute(self) -> dict[str, Tensor]:
        """The means; 0 where nothing was counted."""
        return {name: getattr(self, name) / getattr(self, count).clamp(min=1) for name, count in self.terms.items()}


class Objective(NamedTuple):
    """A batch's loss and what it is made of.

    Attributes:
        total: Scalar, differentiable, each term already divided by its window's count.
        terms: name -> (sum over places, name of the count that divides it, weight in the total).
        num_correct: Masked tokens whose best guess is right; counted in evaluations only.
    """

    total: Tensor
    terms: dict[str, tuple[Tensor, str, float]]
    num_correct: Tensor


class MLMLitModule(EncoderModule):
    """Pretrains a student by masked-language modeling (Devlin et al. 2019, section 3.1, task 1).

    Works with `MLMDataModule` (exact windows and resume) and with any loader of `{"input_ids", "attention_mask"}`
    batches.

    Args:
        student: A masked language model: returns an object with `.logits` `[B, S, V]`; or a recipe that builds one.
        config: An `MLMConfig`, or a dict of its fields.
        tokenizer: The student's tokenizer, its folder or hub name; None: the data module's.

    Raises:
        TypeError: the student is no module.
        ValueError: problems of config, tokenizer and student, all in one message.
    """

    config_class = MLMConfig

    def __init__(
        self, student: nn.Module | StudentRecipe, *, config: MLMConfig | None = None, tokenizer: Any = None
    ) -> None:
        config = config_from(config, self.config_class)
        super().__init__(student, config=config, tokenizer=None if tokenizer is None else load_tokenizer(tokenizer))
        self.masking: Masking | None = None
        self.vocab_size: int | None = None  # the tokenizer's, else the config's, where either says
        self.mask_share = MaskShare(config.mask_prob_end)
        self.projection: Any = None
        self.val_metric = TokenMean(mlm="num_masked", masked_accuracy="num_masked")
        self._weights: dict[str, float] = {}

    def prepare(self) -> None:
        """Finds the ids of masking and the projection of the scored positions.

        Raises:
            ValueError: what student, tokenizer and config show together, all in one message.
        """
        if self.masking is not None:
            return
        problems: list[str] = []
        student = self.build_student()
        self.vocab_size = self.config.vocab_size
        if self.tokenizer is not None:
            self.vocab_size = max(self.tokenizer.get_vocab().values()) + 1
        with gathered(problems):
            super().prepare()
        with gathered(problems):
            self.num_classes = self._count_classes(student)
        with gathered(problems):
            masking = resolve_masking(self.config, self.tokenizer, student)
        problems_to_error(problems, of="MLM")
        self.projection = find_projection(student)
        self.masking, self.filler_id = masking, masking.mask_token_id
        self.counter = Counter(masking, self.mask_share)

    def know_length(self, total_steps: int) -> None:
        """Sets the length of the mask share's way."""
        self.mask_share.total_steps = total_steps

    def _count_classes(self, student: nn.Module) -> int | None:
        """Ids the student scores; None where a forward on a few ids fails, which the run's own may not.

        Raises:
            TypeError: its forward takes no attention mask.
            ValueError: it does not score every id of the tokenizer (or of `vocab_size`).
        """
        require_inputs(student, name="student")
        try:
            num_classes = output_vocab_size(student)
        except Exception:  # the forward is the user's code: the first step tells what it raises
            return None
        embeds_all = (num_embeddings(student) or math.inf) >= (self.vocab_size or 0)  # else that is the problem
        if self.vocab_size is not None and num_classes < self.vocab_size and embeds_all:
            raise ValueError(
                f"the student scores {num_classes} ids, the tokenizer has {self.vocab_size}; "
                f"give its head {self.vocab_size} outputs, or use the student's own tokenizer."
            )
        return num_classes

    def mask(self, batch: Mapping[str, Any]) -> MaskedBatch:
        """Masks a batch on its device; a batch with ready `labels` is used as given."""
        info = batch["info"]
        weight = self.weight(batch, "num_masked")
        if "labels" in batch:
            positions = masked_positions(batch["labels"] != -100, info["num_masked"])
            labels = batch["labels"].flatten()[positions]
            return MaskedBatch(batch["input_ids"], batch["attention_mask"], positions, labels, weight)
        assert self.masking is not None
        return self.mask_share.apply(self.masking, info)(
            batch["input_ids"],
            attention_mask=batch["attention_mask"],
            row_ids=batch["row_ids"],
            word_ids=batch.get("word_ids"),
            text_ids=batch.get("text_ids"),
            epoch=info["epoch"],
            num_masked=info["num_masked"],
            weight=weight,
        )

    def objective(self, batch: Mapping[str, Any], *, evaluating: bool = False) -> Objective:
        """Mask, score the masked tokens, take the cross-entropy."""
        masked = self.mask(batch)
        inputs = {**self.inputs(batch), "input_ids": masked.input_ids}
        student = self.projection(self.student, inputs, positions=masked.positions)
        loss = vocabulary_loss(
            student.scored,
            labels=masked.labels,
            mlm_weight=masked.weight,
            with_accuracy=evaluating,
            compiled=self.compiles_loss and not evaluating,
        )
        return Objective(loss.total, {"mlm": (loss.ce_sum, "num_masked", 1.0)}, loss.num_correct)

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        """The objective of a batch; its sums join those of the window."""
        loss = self.objective(batch)
        return self.record(batch, loss.total, loss.terms)

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Sums over the same tokens at every evaluation."""
        loss = self.objective(batch, evaluating=True)
        self._weights = {name: weight for name, (_, _, weight) in loss.terms.items()}
        sums = {name: total for name, (total, _, _) in loss.terms.items()}
        self.val_metric.update(batch["info"], masked_accuracy=loss.num_correct, **sums)

    def on_validation_epoch_end(self) -> None:
        """`val/loss` (the weighted total), its terms, `val/perplexity`, `val/masked_accuracy`."""
        means = self.val_metric.compute()
        self.val_metric.reset()
        weights = {"mlm": 1.0} if not self._weights else self._weights
        kept = {name: value for name, value in means.items() if name in (*weights, "masked_accuracy")}
        total = torch.stack([weight * means[name] for name, weight in weights.items()]).sum()
        self.log_validation({"loss": total, **kept})

    def predict_step(self, batch: Any, batch_idx: int, top_k: int = 5) -> list[list[list[tuple[str, float]]]]:
        """Fills the blanks of texts: for each text and each mask token in it, the likeliest tokens.

        Args:
            batch: Texts.
            batch_idx: Unused.
            top_k: Guesses for each blank.

        Returns:
            text -> blank -> (token, probability), best first.
        """
        assert self.masking is not None
        guesses = []
        for text in batch:
            encoded = self.tokenizer(text, return_tensors="pt").to(self.device)
            positions = (encoded["input_ids"].flatten() == self.masking.mask_token_id).nonzero().squeeze(1)
            inputs = {name: encoded[name] for name in ("input_ids", "attention_mask")}
            scores = self.projection(self.student, inputs, positions=positions).scored.scores()
            probabilities, ids = scores[:, : self.masking.vocab_size].float().softmax(-1).topk(top_k)
            guesses.append(
                [
                    [(self.tokenizer.decode([i]), p) for i, p in zip(row_ids, row, strict=True)]
                    for row_ids, row in zip(ids.tolist(), probabilities.tolist(), strict=True)
                ]
            )
        return guesses

    def unchangeable(self) -> dict[str, Any]:
        """Seed, architecture and the settings of masking."""
        assert self.masking is not None
        names = ("mask_prob", "mask_replace_prob", "random_replace_prob", "mask_token_id", "vocab_size")
        return {
            **super().unchangeable(),
            **{name: getattr(self.masking, name) for name in names},
            "mask_prob_end": self.config.mask_prob_end,
            "masking": self.masking.strategy,  # in the config `strategy` is the Trainer's
            "special token ids": sorted(self.masking.special_token_ids),
        }


def _knows_no_words(tokenizer: Any) -> bool:
    """Whether tokens of words with a space between them count as those of one word."""
    tokens = [token for token in tokenizer.get_vocab() if token.isalnum()] or ["a"]
    words = tokenizer(f"{tokens[0]} {tokens[-1]}", add_special_tokens=False).word_ids()
    return len(words) > 1 and len(set(words)) == 1


def resolve_masking(config: MLMConfig, tokenizer: Any, student: nn.Module) -> Masking:
    """The ids of masking, from the tokenizer where there is one, else from config and student.

    Raises:
        ValueError: all that does not fit together, in one message.
    """
    problems: list[str] = []
    embeddings = num_embeddings(student)
    special = {int(i) for i in config.special_token_ids}
    mask_id, pad_id, vocab_size = config.mask_token_id, config.pad_token_id, config.vocab_size
    if tokenizer is not None:
        ids = set(tokenizer.get_vocab().values())
        size = max(ids) + 1
        if tokenizer.mask_token_id is None and mask_id is None or tokenizer.mask_token_id is not None:
            problems += check_tokenizer(tokenizer)
        pairs = [("mask_token_id", mask_id, tokenizer.mask_token_id), ("vocab_size", vocab_size, size)]
        pairs.append(("pad_token_id", pad_id or None, tokenizer.pad_token_id))  # 0 counts as unset
        problems += [
            f"{name} must be the tokenizer's, got {given} and the tokenizer has {own}; leave it out."
            for name, given, own in pairs
            if given is not None and own is not None and given != own
        ]
        mask_id = mask_id if tokenizer.mask_token_id is None else tokenizer.mask_token_id
        vocab_size = size
        special |= set(tokenizer.all_special_ids) | (set(range(size)) - ids)
        if config.masking == "whole_word" and not getattr(tokenizer, "is_fast", False):
            problems.append(
                f"masking='whole_word' needs a fast tokenizer, got {type(tokenizer).__name__}; use masking='token'."
            )
        elif config.masking == "whole_word" and _knows_no_words(tokenizer):
            problems.append(
                f"masking='whole_word' needs a tokenizer that knows words, and {type(tokenizer).__name__} takes two "
                "for one; use masking='token' or 'span'."
            )
    else:
        if mask_id is None:
            problems.append("mask_token_id must be given without a tokenizer, got None; set it or pass the tokenizer.")
        if vocab_size is None:
            vocab_size = embeddings
        if vocab_size is None:
            problems.append(
                "vocab_size must be given without a tokenizer, got None, and the student has no input embeddings "
                "to ask; set it."
            )
        student_config = getattr(student, "config", None)
        names = ("cls_token_id", "sep_token_id", "bos_token_id", "eos_token_id")
        known = [getattr(student_config, name, None) for name in names]
        lists = (ids if isinstance(ids, (list, tuple)) else [ids] for ids in known if ids is not None)
        special |= {pad_id, *chain.from_iterable(lists)}
    if embeddings is not None and vocab_size is not None and vocab_size > embeddings:
        problems.append(
            f"the tokenizer has {vocab_size} ids, the student embeds {embeddings}; "
            f"call student.resize_token_embeddings({vocab_size}), or use the student's own tokenizer."
        )
    if mask_id is not None and vocab_size is not None and mask_id >= vocab_size:
        problems.append(f"mask_token_id must be below vocab_size={vocab_size}, got {mask_id}.")
    problems_to_error(problems, of="MLM")
    assert mask_id is not None
    assert vocab_size is not None
    return Masking(
        seed=config.seed,
        mask_token_id=mask_id,
        special_token_ids=tuple(special),
        vocab_size=vocab_size,
        mask_prob=config.mask_prob,
        strategy=config.masking,
        mask_replace_prob=config.mask_replace_prob,
        random_replace_prob=config.random_replace_prob,
    )
