"""The documented configs, and the rules that their own fields keep. Standard library only."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from numbers import Integral, Real
from typing import Any, TypeGuard

from foundry_lightning.schedule import LR_SCHEDULERS

PRECISIONS = {"float32": "32-true", "bfloat16": "bf16-mixed", "float16": "16-mixed"}
DEVICES = ("auto", "cpu", "cuda", "mps")
LOG_BACKENDS = ("none", "wandb", "tensorboard")
OPTIMIZERS = ("adamw", "muon")
MASKING_STRATEGIES = ("token", "whole_word", "span")

_EXAMPLES = {"mask_prob": "it is the share of eligible tokens to mask", "temperature": "DistilBERT uses 2.0"}


def problems_to_error(problems: list[str], *, of: str) -> None:
    """Raises one ValueError that lists every problem, or returns when there is none."""
    if not problems:
        return
    lines = f"{len(problems)} problems:\n" + "\n".join(f"  - {p}" for p in problems)
    error = ValueError(f"{of}: {problems[0] if len(problems) == 1 else lines}")
    error.problems = problems  # type: ignore[attr-defined]
    raise error


@contextmanager
def gathered(problems: list[str]) -> Iterator[None]:
    """Adds to `problems` what a check raises as a ValueError, so that checks that do not need it can go on."""
    try:
        yield
    except ValueError as error:
        problems += getattr(error, "problems", [str(error)])


SEED_END = 2**63 - 1


class Checks:
    """Collects one sentence per broken rule of an object's fields: field, value received, rule, next action."""

    def __init__(self, config: object) -> None:
        self.config = config
        self.problems: list[str] = []

    def add(self, name: str, rule: str, action: str = "") -> None:
        """Adds the sentence of a broken rule."""
        hint = action or _EXAMPLES.get(name, "")
        got = getattr(self.config, name)
        self.problems.append(f"{name} must {rule}, got {got!r}" + (f"; {hint}." if hint else "."))

    def number(
        self, name: str, *, low: float, high: float = math.inf, low_open: bool = False, action: str = ""
    ) -> None:
        """A finite number of an interval."""
        value = getattr(self.config, name)
        interval = f"{'(' if low_open else '['}{low:g}, {'∞)' if high == math.inf else f'{high:g}]'}"
        inside = (
            isinstance(value, (int, float))
            and not isinstance(value, bool)
            and math.isfinite(value)
            and (low < value if low_open else low <= value)
            and value <= high
        )
        if not inside:
            self.add(name, f"lie in {interval}", action)

    def integer(
        self, name: str, *, low: int, high: int | None = None, optional: bool = False, action: str = ""
    ) -> None:
        """A whole number of an interval, or None where that is allowed."""
        value = getattr(self.config, name)
        if optional and value is None:
            return
        if not isinstance(value, int) or isinstance(value, bool) or value < low or (high is not None and value > high):
            end = "" if high is None else f" and at most {high}"
            self.add(name, f"be an integer of at least {low}{end}" + (" or None" if optional else ""), action)

    def token_ids(self, name: str) -> None:
        """Whole numbers of at least 0."""
        ids = getattr(self.config, name)
        if not isinstance(ids, (tuple, list, set, frozenset)) or not all(_is_integer(i) and i >= 0 for i in ids):
            self.add(name, "be a sequence of token ids")

    def replacement_shares(self) -> None:
        """`mask_replace_prob` and `random_replace_prob`, each and together."""
        names = ("mask_replace_prob", "random_replace_prob")
        for name in names:
            self.number(name, low=0, high=1)
        shares = [getattr(self.config, name) for name in names]
        if all(isinstance(share, (int, float)) for share in shares) and sum(shares) > 1 + 1e-9:
            self.problems.append(
                f"mask_replace_prob + random_replace_prob must not exceed 1, got {shares[0]} + {shares[1]}; "
                "the rest of the masked tokens stays as it is."
            )

    def choice(self, name: str, allowed: tuple[str, ...]) -> None:
        """One of the allowed words."""
        if getattr(self.config, name) not in allowed:
            self.add(name, "be one of " + ", ".join(map(repr, allowed)))

    def kind(self, name: str, kind: type | tuple[type, ...], description: str) -> None:
        """An object of a type."""
        if not isinstance(getattr(self.config, name), kind):
            self.add(name, f"be {description}")


def _is_integer(value: object) -> TypeGuard[int]:
    return isinstance(value, Integral) and not isinstance(value, bool)


def plain(value: Any) -> Any:
    """Numbers of other kinds, such as numpy's, as Python's: a checkpoint with those could not be read again."""
    if isinstance(value, (list, tuple)):
        return type(value)(map(plain, value))
    if isinstance(value, bool) or not isinstance(value, Real):
        return value
    return int(value) if isinstance(value, Integral) else float(value)


@dataclass
class _MaskingFields:
    mask_prob: float = 0.15
    mask_token_id: int | None = None
    pad_token_id: int = 0
    vocab_size: int | None = None

    def _check_masking(self, checks: Checks) -> None:
        checks.number("mask_prob", low=0, high=1, low_open=True)
        checks.integer("mask_token_id", low=0, optional=True)
        checks.integer("pad_token_id", low=0)
        checks.integer("vocab_size", low=2, optional=True)


@dataclass
class _TrainingFields:
    learning_rate: float = 1e-4
    epochs: int = 1
    weight_decay: float = 0.01
    max_grad_norm: float = 1.0
    device: str = "auto"
    grad_accumulation_steps: int = 1
    torch_dtype: str = "float32"
    lr_scheduler: str = "cosine"
    warmup_steps: int = 0
    eval_every: int = 0
    save_every: int = 0
    save_dir: str = ""
    log_every: int = 50
    log_backend: str = "none"
    seed: int = 42
    optimizer: str = field(default="adamw", kw_only=True)
    decay_steps: int = field(default=0, kw_only=True)
    devices: int | str | list[int] = field(default=1, kw_only=True)
    num_nodes: int = field(default=1, kw_only=True)
    strategy: str = field(default="auto", kw_only=True)
    num_workers: int = field(default=0, kw_only=True)
    run_name: str = field(default="", kw_only=True)
    project: str = field(default="foundry-lightning", kw_only=True)
    progress_bar: bool = field(default=True, kw_only=True)
    gradient_checkpointing: bool = field(default=False, kw_only=True)
    compile: bool = field(default=False, kw_only=True)
    on_nonfinite: str = field(default="raise", kw_only=True)
    log_checkpoints: bool = field(default=False, kw_only=True)
    trainer_kwargs: dict[str, Any] = field(default_factory=dict, kw_only=True)

    def __post_init__(self) -> None:
        self.validate()

    def validate(self) -> None:
        """Raises one ValueError for all problems of the fields."""
        for name, value in vars(self).items():
            setattr(self, name, plain(value))
        checks = Checks(self)
        self._check(checks)
        problems_to_error(checks.problems, of=type(self).__name__)

    def _check(self, checks: Checks) -> None:
        checks.number("learning_rate", low=0)
        checks.integer("epochs", low=1, action="total_steps of train() shortens a run")
        checks.number("weight_decay", low=0)
        checks.number("max_grad_norm", low=0, action="0 switches clipping off")
        checks.choice("device", DEVICES)
        checks.integer("grad_accumulation_steps", low=1)
        checks.choice("torch_dtype", tuple(PRECISIONS))
        checks.choice("optimizer", OPTIMIZERS)
        checks.choice("lr_scheduler", LR_SCHEDULERS)
        checks.integer("warmup_steps", low=0)
        checks.integer("decay_steps", low=0, action="0 decays over the last fifth of the run")
        if self.decay_steps and self.lr_scheduler != "wsd":
            checks.add("decay_steps", f"be 0 where lr_scheduler is {self.lr_scheduler!r}", "only 'wsd' reads it")
        checks.integer("eval_every", low=0, action="0 switches evaluation during training off")
        checks.integer("save_every", low=0, action="0 switches saving during training off")
        checks.integer("log_every", low=1)
        checks.choice("log_backend", LOG_BACKENDS)
        checks.choice("on_nonfinite", ("raise", "skip"))
        checks.integer("seed", low=0, high=SEED_END)
        checks.integer("num_nodes", low=1)
        checks.integer("num_workers", low=0)
        for name in ("save_dir", "run_name", "project", "strategy"):
            checks.kind(name, str, "a string")
        for name in ("progress_bar", "gradient_checkpointing", "compile", "log_checkpoints"):
            checks.kind(name, bool, "True or False")
        checks.kind("trainer_kwargs", dict, "a dict of lightning.Trainer arguments")
        devices = self.devices
        if isinstance(devices, (list, tuple)):
            fits = bool(devices) and all(_is_integer(number) and number >= 0 for number in devices)
        else:
            fits = _is_integer(devices) and devices >= -1 and devices != 0
            fits = fits or (isinstance(devices, str) and devices != "")
        if not fits:
            checks.add("devices", "be 'auto', a number of devices of at least 1, -1 for all, or a list of numbers")
        if isinstance(self.save_every, int) and self.save_every > 0 and self.save_dir == "":
            checks.problems.append(
                f"save_every={self.save_every} needs a place to write to; set save_dir, or save_every=0."
            )
        if self.log_checkpoints is True and (self.log_backend != "wandb" or self.save_every == 0):
            checks.problems.append(
                "log_checkpoints=True gives each checkpoint to wandb; set log_backend='wandb' and save_every."
            )


@dataclass
class MLMConfig(_TrainingFields, _MaskingFields):
    """Settings of masked-language-model pretraining.

    Args:
        mask_prob: Share of the eligible tokens that is masked, in (0, 1].
        mask_prob_end: The share moves in a straight line from `mask_prob` in the first update to this one in the last;
            evaluations mask this share, so that they can be compared. None: `mask_prob` throughout.
        mask_token_id: Id written over masked tokens; taken from the tokenizer, required without one.
        pad_token_id: Padding id; taken from the tokenizer (0 counts as unset).
        vocab_size: Number of ids the tokenizer really has; None: the tokenizer's, else the student's input embeddings.
        learning_rate: Peak learning rate.
        epochs: Passes over the data; `total_steps` of `train()` ends a run before or after them.
        weight_decay: Decoupled weight decay, on matrices only.
        max_grad_norm: Clips the gradient's global norm; 0 switches clipping off.
        device: `auto`, `cpu`, `cuda` or `mps`.
        grad_accumulation_steps: Batches of one optimizer update on each rank.
        torch_dtype: `float32`, `bfloat16` or `float16` (the last two as mixed precision).
        lr_scheduler: `cosine`, `linear`, `constant` or `wsd` (stable, then linear decay), after the warm-up.
        warmup_steps: Updates over which the learning rate rises linearly.
        eval_every: Updates between two evaluations; 0 switches them off.
        save_every: Updates between two checkpoints in `save_dir`; 0 switches them off.
        save_dir: Folder of checkpoints and logs; empty: nothing is written.
        log_every: Updates between two log lines and calls of `on_step`.
        log_backend: `none`, `wandb` or `tensorboard`.
        seed: Seeds masks, order and dropout.
        special_token_ids: Ids never masked and never drawn, besides the tokenizer's special ids.
        masking: `token`, `whole_word` or `span`.
        mask_replace_prob: Share of masked tokens that becomes the mask token.
        random_replace_prob: Share of masked tokens that becomes a random ordinary token; the rest stays.
        optimizer: `adamw`, or `muon`: Muon for hidden matrices, scaled to AdamW's learning rate, AdamW for the rest.
        decay_steps: Last updates, over which `wsd` lowers the learning rate to 0; 0: a fifth of the run.
        devices: Lightning's `devices`.
        num_nodes: Lightning's `num_nodes`.
        strategy: Lightning's `strategy`.
        num_workers: Worker processes that read data.
        log_checkpoints: Whether wandb gets each checkpoint as a version of the artifact `model-RUN_ID`.
        run_name: Name of the run for the logger.
        project: Project of the wandb logger.
        progress_bar: Whether a progress bar is shown; without a terminal: lines.
        compile: Compile the student's layers and the vocabulary loss with `torch.compile` while it trains.
        gradient_checkpointing: Recompute activations in the backward pass to save memory.
        on_nonfinite: `raise` ends the run at an update whose loss or gradient is not finite, `skip` leaves it out
            (it counts as a step; 20 in a row end the run). No weight changes either way.
        trainer_kwargs: Reach `lightning.Trainer` as they are and win over what the other fields say.

    Raises:
        ValueError: One error that lists every problem of the fields.
    """

    mask_prob_end: float | None = field(default=None, kw_only=True)
    special_token_ids: tuple[int, ...] = field(default=(), kw_only=True)
    masking: str = field(default="token", kw_only=True)
    mask_replace_prob: float = field(default=0.8, kw_only=True)
    random_replace_prob: float = field(default=0.1, kw_only=True)

    def _check(self, checks: Checks) -> None:
        self._check_masking(checks)
        super()._check(checks)
        if self.mask_prob_end is not None:
            checks.number("mask_prob_end", low=0, high=1, low_open=True, action="None keeps mask_prob throughout")
        checks.choice("masking", MASKING_STRATEGIES)
        checks.replacement_shares()
        checks.token_ids("special_token_ids")


@dataclass
class DistilMLMConfig(MLMConfig):
    """Settings of distillation with masked-language modeling (the DistilBERT objective).

    The fields of `MLMConfig`, with `learning_rate=5e-5`, and:

    Args:
        mlm_weight: Weight of the cross-entropy.
        distill_weight: Weight of T²·KL(teacher ‖ student).
        cosine_weight: Weight of 1 − cos of the final hidden states.
        temperature: T, softens both distributions.
        distill_on: `masked` scores the masked tokens, `all` every attended token.
        teacher_dtype: Floating-point type the teacher runs in: `float32`, `bfloat16` or `float16`.
        teacher_compile: Compile the teacher's layers with `torch.compile` while the student trains.
    """

    learning_rate: float = 5e-5
    mlm_weight: float = 2.0
    distill_weight: float = 5.0
    cosine_weight: float = 1.0
    temperature: float = 2.0
    distill_on: str = field(default="masked", kw_only=True)
    teacher_dtype: str = field(default="float32", kw_only=True)
    teacher_compile: bool = field(default=False, kw_only=True)

    def _check(self, checks: Checks) -> None:
        super()._check(checks)
        weights = ("mlm_weight", "distill_weight", "cosine_weight")
        for name in weights:
            checks.number(name, low=0)
        if all(getattr(self, name) == 0 for name in weights):
            checks.problems.append("mlm_weight, distill_weight and cosine_weight are all 0; nothing would be learned.")
        checks.number("temperature", low=0, low_open=True)
        checks.choice("distill_on", ("masked", "all"))
        checks.choice("teacher_dtype", tuple(PRECISIONS))
        checks.kind("teacher_compile", bool, "True or False")


@dataclass
class EncoderDistillConfig(_TrainingFields):
    """Settings of hidden-state distillation.

    The training fields of `MLMConfig`, with `learning_rate=5e-5`, and:

    Args:
        loss: `mse` or `cosine`, the distance between the states of student and teacher at each attended token.
        teacher_dtype: Floating-point type the teacher runs in.
        teacher_compile: Compile the teacher's layers with `torch.compile` while the student trains.
        pad_token_id: Padding id; taken from the tokenizer (0 counts as unset).
    """

    learning_rate: float = 5e-5
    loss: str = "mse"
    teacher_dtype: str = field(default="float32", kw_only=True)
    teacher_compile: bool = field(default=False, kw_only=True)
    pad_token_id: int = field(default=0, kw_only=True)

    def _check(self, checks: Checks) -> None:
        super()._check(checks)
        checks.choice("loss", ("mse", "cosine"))
        checks.choice("teacher_dtype", tuple(PRECISIONS))
        checks.kind("teacher_compile", bool, "True or False")
        checks.integer("pad_token_id", low=0)


def config_from(value: Any, kind: type) -> Any:
    """Returns `value` as a `kind`: None gives the defaults, a dict its fields, a config itself (validated again).

    Raises:
        TypeError: `value` is none of these.
        ValueError: an unknown field, or a broken rule.
    """
    if value is None:
        return kind()
    if isinstance(value, kind):
        value.validate()  # type: ignore[attr-defined]
        return value
    if isinstance(value, dict):
        known = [f.name for f in fields(kind)]
        unknown = [name for name in value if name not in known]
        if unknown:
            raise ValueError(f"{kind.__name__} has no field {unknown[0]!r}; its fields are: {', '.join(known)}.")
        return kind(**value)
    raise TypeError(f"config must be a {kind.__name__}, a dict of its fields or None, got {type(value).__name__}.")
