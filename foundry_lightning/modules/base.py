"""What the training modules share: the student, the counts of a batch, seeding, the optimizer, the checkpoint."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import fields
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, SingleDeviceStrategy
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn

from foundry_lightning import checkpoint as ckpt
from foundry_lightning.callbacks.dropout_draws import DropoutDraws
from foundry_lightning.callbacks.finite_guard import FiniteGuard
from foundry_lightning.compiling import compile_layers, release, require_compiler
from foundry_lightning.config import _TrainingFields, gathered, problems_to_error
from foundry_lightning.draws import batch_seed
from foundry_lightning.masking import attention_from
from foundry_lightning.models import (
    accepts,
    attends_anywhere,
    fails_on,
    max_positions,
    num_embeddings,
    uses_flash_attention,
    weight_of,
)
from foundry_lightning.modules.meter import Meter
from foundry_lightning.optim import optimizer_with_schedule
from foundry_lightning.packing import Packing, answers_late, find_packing, find_padding, text_starts
from foundry_lightning.projection import PlainProjection, ScoredProjection
from foundry_lightning.students import StudentRecipe

_MODEL_INPUTS = ("input_ids", "attention_mask", "token_type_ids", "position_ids")
# settings of the config that a Trainer owns; only the facades translate them
_TRAINER_FIELDS = {field.name for field in fields(_TrainingFields)} - {
    *("optimizer", "learning_rate", "weight_decay", "lr_scheduler", "warmup_steps", "decay_steps", "seed"),
    *("gradient_checkpointing", "compile", "on_nonfinite"),
}


class EncoderModule(lightning.LightningModule):
    """Trains a student encoder; the subclasses say with which loss.

    A subclass gives `counter` (what a batch's losses are divided by), `prepare` (checks, projection) and the steps.

    Args:
        student: The model, or a recipe that builds it once the tokenizer is known.
        config: The settings.
        tokenizer: The student's tokenizer; None: the data module's.
    """

    counter: Any = None
    filler_id: int = 0
    num_classes: int | None = None  # ids the student scores, where it is known and matters

    def __init__(self, student: nn.Module | StudentRecipe, *, config: Any, tokenizer: Any) -> None:
        super().__init__()
        if not isinstance(student, (nn.Module, StudentRecipe)):
            raise TypeError(
                f"student must be a torch.nn.Module or a recipe such as FromConfig, got {type(student).__name__}."
            )
        self.config = config
        self.tokenizer = tokenizer
        self.student: nn.Module | None = student if isinstance(student, nn.Module) else None  # type: ignore[assignment]
        self._recipe = student if isinstance(student, StudentRecipe) else None
        self.by_facade = False
        self._window: dict[str, Any] = {"step": -1, "sums": {}, "tokens": 0}
        self.meter = Meter()
        self._progress: dict[str, float] = {}  # of the checkpoint that is resumed
        self._guard = FiniteGuard(skip=config.on_nonfinite == "skip")
        self._unreached: list[nn.Parameter] = []
        self._metrics: tuple[int, dict[str, float]] | None = None
        self._built_groups: list[dict[str, Any]] | None = None
        self._told: set[str] = set()
        self._packings: dict[str, Packing] = {}
        self._paddings: dict[str, Packing | None] = {}
        self._compiled: list[nn.Module] = []

    # ------------------------------------------------------------------ start

    def configure_model(self) -> None:
        """Builds the student where it is a recipe, checks everything together, and connects the data."""
        with torch.device("cpu"):  # Lightning's is the GPU by now, where a model's tensors without a device would lie
            self._configure()

    def _configure(self) -> None:
        data = getattr(self._trainer, "datamodule", None)  # load_from_checkpoint calls this without a trainer
        if self.tokenizer is None:
            owners = (data, getattr(data, "train", None), getattr(data, "val", None))
            found = (getattr(owner, "tokenizer", None) for owner in owners)
            self.tokenizer = next((tokenizer for tokenizer in found if tokenizer is not None), None)
            decided = getattr(self, "masking", None) is not None  # which ids are special
            if self.tokenizer is not None and decided:
                raise ValueError(
                    "tokenizer must be the trainer's too where the pipeline has one, got it in the pipeline alone; "
                    "give it to the trainer."
                )
        self.prepare()
        if self._trainer is not None and answers_late(self.trainer.strategy.root_device):
            self._paddings = {name: find_padding(model) for name, model in self.named_children()}
        if hasattr(data, "connect"):
            self.connect_data(data)
        if not self.by_facade:
            self._say_what_the_trainer_owns()
        self._fit_to_strategy()
        if self.config.gradient_checkpointing:
            self.build_student().gradient_checkpointing_enable()  # type: ignore[operator]
        for name in ("compile", "teacher_compile"):
            if getattr(self.config, name, False) and self._trainer is not None and self.trainer.state.fn == "fit":
                require_compiler(self.trainer.strategy.root_device, named=name)

    def _fit_to_strategy(self) -> None:
        """Leaves out of DDP what no loss reaches, and projects plainly where a strategy shards the weights.

        Raises:
            ValueError: a checkpoint is to be gone on with under a strategy that may shard them.
        """
        if self._trainer is None:
            return
        strategy = self.trainer.strategy
        if not isinstance(strategy, (SingleDeviceStrategy, DDPStrategy)):
            for name, value in list(vars(self).items()):
                if isinstance(value, ScoredProjection):
                    setattr(self, name, PlainProjection(value.body, f"plain scores: {type(strategy).__name__}"))
            if self.trainer.ckpt_path and self.trainer.state.fn == "fit":
                raise ValueError(
                    f"a checkpoint cannot be gone on with under {type(strategy).__name__}, which may shard weights and "
                    "optimizer; set strategy='ddp'."
                )
            self.say_once(
                f"{type(strategy).__name__} may shard weights: all places are scored, not the masked ones only, and "
                "a checkpoint of this run cannot be gone on with; set strategy='ddp' where a GPU holds the model."
            )
        elif self.trainer.world_size > 1 and self.trainer.state.fn == "fit":
            if isinstance(strategy, DDPStrategy) and strategy._ddp_kwargs.get("find_unused_parameters"):
                return
            unreached = self.parameters_without_gradient()
            # DDP waits for the gradient of every parameter it finds trainable when it wraps the model
            self._unreached = list(unreached.values())
            for parameter in self._unreached:
                parameter.requires_grad_(False)
            if unreached:
                self.say_once(f"no loss reaches these parameters, they stay as they are: {', '.join(unreached)}.")

    def parameters_without_gradient(self) -> dict[str, nn.Parameter]:
        """Trainable parameters that a step on a few ordinary tokens gives no gradient; changes nothing."""
        assert self.student is not None
        named = {name: p for name, p in self.named_parameters() if p.requires_grad}
        masking = getattr(self, "masking", None)
        special = set(getattr(masking, "special_token_ids", ()))
        num_ids = getattr(masking, "vocab_size", None) or num_embeddings(self.student) or 2
        device = next(iter(named.values())).device if named else torch.device("cpu")
        ids = [i for i in range(num_ids) if i not in special][: min(8, max_positions(self.student) or 8)]
        input_ids = torch.tensor([ids])
        batch: dict[str, Any] = {
            "input_ids": input_ids,
            "attention_mask": torch.ones_like(input_ids),
            "row_ids": torch.zeros(1, dtype=torch.int64),
            "word_ids": torch.arange(len(ids)).unsqueeze(0),
        }
        info = {"epoch": 0, "number": 0, "filler": False}
        counts = self.counter(batch, info)
        batch = {name: value.to(device) for name, value in batch.items()}
        batch["info"] = {**info, **counts}
        modes = {module: module.training for module in self.modules()}
        buffers = [(buffer, buffer.clone()) for buffer in self.buffers()]
        devices = [device.index or 0] if device.type == "cuda" else []
        try:
            with ExitStack() as within:
                within.enter_context(torch.random.fork_rng(devices=devices))
                within.enter_context(torch.enable_grad())
                for model in self.children():
                    within.enter_context(attends_anywhere(model))
                self.student.train()
                output: Any = self.training_step(batch, 0)
                gradients = torch.autograd.grad(output["loss"], list(named.values()), allow_unused=True)
        finally:
            for module, mode in modes.items():
                module.training = mode
            with torch.no_grad():
                for buffer, value in buffers:
                    buffer.copy_(value)
            self._window = {"step": -1, "sums": {}, "tokens": 0}
            self._guard.begin_window()
        return {name: p for (name, p), g in zip(named.items(), gradients, strict=True) if g is None}

    def configure_callbacks(self) -> list[Callback]:
        """What every fit has, whoever made the Trainer."""
        return [DropoutDraws()]

    def prepare(self) -> None:
        """Checks student, tokenizer and config together; idempotent.

        Raises:
            ValueError: all that does not fit, in one message.
        """
        if self.config.gradient_checkpointing and not hasattr(self.build_student(), "gradient_checkpointing_enable"):
            raise ValueError(
                f"gradient_checkpointing=True needs a Hugging Face model, got {type(self.student).__name__}; "
                "leave it out."
            )

    def build_student(self) -> nn.Module:
        """The student, built from its recipe at the first call."""
        if self.student is None:
            assert self._recipe is not None
            self.student = self._recipe.build(self.tokenizer)
        return self.student

    def connect_data(self, data: Any) -> None:
        """Gives the data module what the student and its tokenizer decide, and proves the student on such rows.

        Raises:
            ValueError: all that data and student show together to be wrong, in one message.
        """
        student, problems = self.build_student(), []
        known = getattr(self.tokenizer, "pad_token_id", None)
        if known is not None and self.config.pad_token_id not in (0, known):  # 0 counts as unset
            problems.append(
                f"pad_token_id must be the tokenizer's, {known}, got {self.config.pad_token_id}; leave it out."
            )
        with gathered(problems):
            data.connect(
                tokenizer=self.tokenizer,
                word_ids=getattr(self.config, "masking", "token") == "whole_word",
                pad_token_id=self.pad_token_id,
                max_positions=max_positions(student),
                num_ids=num_embeddings(student),
                num_classes=self.num_classes,
            )
        if any(getattr(batches, "pack", False) for batches in (data.train, data.val)):
            with gathered(problems):
                self.prove_packing("student")
        if not problems:
            self.prove_length("student", data)
        problems_to_error(problems, of="data")

    @property
    def pad_token_id(self) -> int:
        """The tokenizer's padding id, else the config's."""
        known = getattr(self.tokenizer, "pad_token_id", None)
        return int(self.config.pad_token_id if known is None else known)

    def _say_what_the_trainer_owns(self) -> None:
        defaults = type(self.config)()
        changed = [
            field.name
            for field in fields(self.config)
            if field.name in _TRAINER_FIELDS and getattr(self.config, field.name) != getattr(defaults, field.name)
        ]
        if changed:
            self.say_once(
                f"config sets {', '.join(changed)}, which the Trainer owns and only MLMTrainer translates; "
                "set the Trainer's own arguments."
            )

    def say_once(self, sentence: str) -> None:
        """Warns on rank 0, the first time."""
        if sentence not in self._told:
            self._told.add(sentence)
            rank_zero_warn(sentence)

    # ------------------------------------------------------------------ batches

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Gives a batch of a user's own loader what our loader attaches: row numbers and counts.

        Where a model attends with flash attention, the starts of packed texts are found while they lie on the host.
        """
        if isinstance(batch, Mapping) and "text_ids" in batch and any(map(uses_flash_attention, self.children())):
            batch = {**batch, "text_starts": text_starts(batch["text_ids"])}
        if self.trainer.predicting or (isinstance(batch, Mapping) and "info" in batch):
            return batch
        entries: dict[str, Any] = dict(batch) if isinstance(batch, Mapping) else {"input_ids": batch}
        if not torch.is_tensor(entries.get("input_ids")):
            got = f"the keys {list(entries)}" if isinstance(batch, Mapping) else type(batch).__name__
            raise TypeError(
                f"a batch must be a dict with input_ids [B, S], or these ids, got {got}; change the loader."
            )
        input_ids = entries["input_ids"]
        if "attention_mask" not in entries:
            entries["attention_mask"] = attention_from(input_ids, self.pad_token_id)
        place = self._loop().batch_progress.current.ready
        number = place * self.trainer.world_size + self.trainer.global_rank
        if "row_ids" not in entries:
            rows = torch.arange(len(input_ids), device=input_ids.device)
            entries["row_ids"] = number * 2**20 + rows
        info = {"epoch": 0, "number": number, "filler": False}
        if self.trainer.training:
            info |= {"epoch": self.current_epoch, "update": self.trainer.global_step}
            self.say_once(
                "this loader knows no window totals: each batch counts as its own mean; "
                "MLMDataModule gives exact windows."
            )
        return {**entries, "info": {**info, **self.counter(entries, info)}}

    def _loop(self) -> Any:
        trainer = self.trainer
        if trainer.sanity_checking or trainer.validating:
            return trainer.fit_loop.epoch_loop.val_loop if trainer.state.fn == "fit" else trainer.validate_loop
        return trainer.test_loop if trainer.testing else trainer.fit_loop.epoch_loop

    @property
    def compiles_loss(self) -> bool:
        """Whether `compile` is on and the updates have begun: checks before them run as the model is."""
        return bool(self.config.compile and self._compiled)

    def inputs(self, batch: Mapping[str, Any], *, of: str = "student") -> dict[str, Any]:
        """What a model, the student or the teacher, takes of a batch."""
        model = getattr(self, of)
        dtype = weight_of(model).dtype
        if "text_ids" in batch:
            return self.packing(of).inputs(batch, dtype=dtype)
        inputs = {name: batch[name] for name in _MODEL_INPUTS if name in batch and accepts(model, name)}
        if padding := self._paddings.get(of):
            inputs["attention_mask"] = padding.padding(batch, dtype=dtype)
        return inputs

    def prove_length(self, of: str, data: Any) -> None:
        """Refuses rows on which a model fails, for what it does not say of its positions.

        Raises:
            ValueError: it does.
        """
        lengths = {
            name: getattr(batches, "max_length", 0) for name, batches in (("train", data.train), ("val", data.val))
        }
        name = max(lengths, key=lambda name: lengths[name])
        problem = fails_on(getattr(self, of), lengths[name]) if lengths[name] else None
        if problem is not None:
            raise ValueError(
                f"max_length of the {name} data is {lengths[name]}, and the {of} fails on so long a row ({problem}); "
                "set a smaller max_length."
            )

    def prove_packing(self, of: str) -> None:
        """Proves a model's packing; flash attention, which runs on a GPU alone, is proven by the first step.

        Raises:
            ValueError: see `packing`.
        """
        if not uses_flash_attention(getattr(self, of)):
            self.packing(of)

    def packing(self, of: str) -> Packing:
        """How the student or the teacher is told of packed texts, proven at the first call.

        Raises:
            ValueError: that model cannot keep them apart.
        """
        if of not in self._packings:
            self._packings[of] = find_packing(getattr(self, of), name=of)
        return self._packings[of]

    def weight(self, batch: Mapping[str, Any], name: str) -> float:
        """1 ÷ the window's count × the factor that undoes Lightning's and DDP's averaging; 0 where there is none.

        Without window totals (a user's own loader): 1 ÷ the batch's count.
        """
        info = batch["info"]
        total = info["window"][name] if "window" in info else info[name]
        return info.get("undo", 1) / total if total and not info["filler"] else 0.0

    # ------------------------------------------------------------------ training

    def on_train_start(self) -> None:
        """Puts the student into train mode and lets today's rate and decay rule after a resume."""
        assert self.student is not None
        self.student.train()
        self._compiled = compile_layers(self.student) if self.config.compile else []
        self._window, self._metrics = {"step": -1, "sums": {}, "tokens": 0}, None
        self.meter, self._progress = Meter(**self._progress), {}  # type: ignore[arg-type]
        self.meter.start()
        self._guard = FiniteGuard(skip=self.config.on_nonfinite == "skip")
        if self._built_groups is not None:
            ckpt.use_current_settings(self.trainer, self._built_groups)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Seeds the generators in use from (seed, epoch, number of the batch), never from rank or step.

        Frees the last window's gradients first: Lightning would hold them through this one's first forward.
        """
        if batch_idx % self.trainer.accumulate_grad_batches == 0:
            for module in self.trained_modules():
                module.zero_grad()
        info = batch["info"]
        seed = batch_seed(info["number"], seed=self.config.seed, epoch=info["epoch"])
        torch.default_generator.manual_seed(seed)
        if self.device.type == "cuda":
            torch.cuda.default_generators[self.device.index or 0].manual_seed(seed)
        elif self.device.type == "mps":
            torch.mps.manual_seed(seed)
        if self.student is not None and not all(module.training for module in self.student.modules()):
            self.student.train()

    def record(
        self, batch: Mapping[str, Any], loss: Tensor, terms: dict[str, tuple[Tensor, str, float]]
    ) -> dict[str, Tensor]:
        """Adds a batch's sums to those of its window, and returns what Lightning wants of a step.

        Args:
            batch: The batch.
            loss: The weighted loss, differentiated by Lightning.
            terms: name -> (sum over places, name of the count that divides it, weight in the total).
        """
        info, window = batch["info"], self._window
        if window["step"] != self.trainer.global_step:
            window.update(step=self.trainer.global_step, sums={}, tokens=0)
            self._guard.begin_window()
        if "window" in info:
            window["tokens"] = info["window"]["num_attended"]
        else:
            window["tokens"] += info["num_attended"] * self.trainer.world_size
        # without window totals each batch is one of equal shares
        share = 1.0 / (self.trainer.accumulate_grad_batches * self.trainer.world_size)
        batch_loss = torch.zeros((), device=loss.device)
        for name, (total, count, weight) in terms.items():
            mean = total.detach() / max(info[count], 1)
            part = total.detach() / max(info["window"][count], 1) if "window" in info else mean * share
            window["sums"][name] = window["sums"].get(name, 0) + part
            window["sums"]["loss"] = window["sums"].get("loss", 0) + weight * part
            batch_loss = batch_loss + weight * mean
        self._guard.keep(batch, batch_loss)
        # times one: a loss that is not finite makes its gradient so, on every rank, and the guard reads the gradient
        return {"loss": loss * (1 + 0 * loss.detach()), "batch_loss": batch_loss}

    def window_metrics(self) -> dict[str, float]:
        """Means of the last finished window over all ranks, learning rate, gradient norm and tokens a second.

        A collective call; the host waits for the device.
        """
        step = self.trainer.global_step
        if self._metrics is None or self._metrics[0] != step:
            names = sorted(self._window["sums"])
            values = torch.stack([self._window["sums"][name].float() for name in names])
            if self.trainer.world_size > 1:
                values = self.trainer.strategy.reduce(values, reduce_op="sum")
            self._metrics = (step, {**dict(zip(names, values.tolist(), strict=True)), **self.meter.rates()})
        return self._metrics[1]

    @property
    def log_every(self) -> int:
        """Updates between two logs, as the Trainer says."""
        return int(self.trainer.log_every_n_steps)  # type: ignore[attr-defined]

    def is_last_update(self) -> bool:
        """Whether the update just made ends the run."""
        trainer = self.trainer
        if 0 <= trainer.max_steps <= trainer.global_step:
            return True
        last_epoch = trainer.max_epochs not in (None, -1) and trainer.current_epoch + 1 >= trainer.max_epochs
        return bool(last_epoch and trainer.is_last_batch) or trainer.should_stop

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Logs the window's means where a log is due, with `step` = updates done."""
        step = self.trainer.global_step
        if step == self._window["step"] or not (step % self.log_every == 0 or self.is_last_update()):
            return
        metrics = {f"train/{name}": value for name, value in self.window_metrics().items()}
        self.log_dict(metrics, on_step=True, on_epoch=False, logger=False)
        self._to_loggers(metrics, step)
        self.log("loss", metrics["train/loss"], prog_bar=True, logger=False, on_step=True, on_epoch=False)

    def on_train_end(self) -> None:
        """Says how many updates were left out; the student runs uncompiled again."""
        release(self._compiled)
        self._compiled = []
        self.meter.stop()
        if self._guard.num_refused:
            rank_zero_warn(
                f"{self._guard.num_refused} updates of this run were left out: loss or gradient was not finite."
            )

    def log_validation(self, means: dict[str, Tensor]) -> None:
        """Logs the means of an evaluation and the perplexity, exp(mlm)."""
        if "mlm" in means:
            means = {**means, "perplexity": means["mlm"].exp()}
        values = {f"val/{name}": value.float() for name, value in means.items()}
        self.log_dict(values, logger=False)
        if not self.trainer.sanity_checking:
            self._to_loggers(values, self.trainer.fit_loop.epoch_loop.global_step)

    def on_validation_start(self) -> None:
        """Stops the clock of the rates."""
        self.meter.pause()

    def on_validation_end(self) -> None:
        """Starts the clock of the rates again."""
        self.meter.go_on()

    def _to_loggers(self, metrics: dict[str, Any], step: int) -> None:
        """Logs at this many updates; Lightning would at one less, and a logged `step` would name checkpoint files."""
        if self.trainer.state.fn == "fit":
            metrics = {**metrics, **{f"progress/{name}": value for name, value in self.meter.progress().items()}}
        self.trainer._logger_connector.log_metrics(metrics, step=step)

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """The same as `validation_step`."""
        self.validation_step(batch, batch_idx)

    def on_test_epoch_end(self) -> None:
        """The same as after validation."""
        self.on_validation_epoch_end()

    def configure_gradient_clipping(
        self,
        optimizer: torch.optim.Optimizer,
        gradient_clip_val: int | float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clips by the global norm as the Trainer asks, and refuses an update whose gradient is not finite.

        Raises:
            FloatingPointError: the norm is NaN or infinite (20 times in a row where `on_nonfinite` is `skip`, or under
                float16); no weight has changed.
        """
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        sharded = not isinstance(self.trainer.strategy, (SingleDeviceStrategy, DDPStrategy))
        if sharded:
            norm = self.trainer.strategy.reduce(norm**2, reduce_op="sum").sqrt()
        if gradient_clip_val and sharded:
            self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)
        elif gradient_clip_val:  # not by Lightning's precision plugin, which refuses a fused optimizer under autocast
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            if gradient_clip_algorithm == "value":
                torch.nn.utils.clip_grad_value_(parameters, float(gradient_clip_val))
            else:
                torch.nn.utils.clip_grads_with_norm_(parameters, float(gradient_clip_val), norm)
        grad_norm = float(norm)  # the one host read of an update
        rate = float(optimizer.param_groups[0]["lr"])
        self.meter.count(self._window["tokens"], learning_rate=rate, grad_norm=grad_norm)
        if math.isfinite(grad_norm):
            self._guard.accept()
        else:
            self._guard.refuse(self, optimizer)

    def configure_optimizers(self) -> Any:
        """The optimizer and the schedule over the run's updates."""
        total = self._num_updates()
        problems_to_error(self._problems_of_length(total), of="run")
        total = 0 if total == float("inf") else int(total)
        for parameter in self._unreached:  # DDP has wrapped the model; the optimizer's groups are those of one rank
            parameter.requires_grad_(True)
        self._unreached = []
        self.know_length(total)
        assert self.student is not None
        built = optimizer_with_schedule(
            self.trained_modules(),
            name=self.config.optimizer,
            num_ids=self.num_classes or num_embeddings(self.student),
            learning_rate=self.config.learning_rate,
            weight_decay=self.config.weight_decay,
            schedule=self.config.lr_scheduler,
            warmup_steps=self.config.warmup_steps,
            total_steps=total,
            decay_steps=self.config.decay_steps,
            fused=self.trainer.precision != "16-mixed",  # Lightning can't clip between unscaling and a fused step
        )
        self._built_groups = [
            {name: value for name, value in group.items() if name != "params"}
            for group in built["optimizer"].param_groups
        ]
        return built

    def _problems_of_length(self, total: float) -> list[str]:
        """What the strategy and the number of updates (infinite where unknown) show to be wrong."""
        config, strategy, problems = self.config, self.trainer.strategy, []
        if config.optimizer == "muon" and not isinstance(strategy, (SingleDeviceStrategy, DDPStrategy)):
            problems.append(
                f"optimizer='muon' needs whole matrices, and {type(strategy).__name__} may shard them; "
                "set optimizer='adamw' or strategy='ddp'."
            )
        if isinstance(strategy, FSDPStrategy) and self.trainer.gradient_clip_val:
            problems.append(
                f"max_grad_norm (Trainer: gradient_clip_val) is {self.trainer.gradient_clip_val}, and Lightning clips "
                "no gradients of FSDP; set max_grad_norm=0 (gradient_clip_val: null), or strategy='ddp'."
            )
        if total == float("inf"):
            if config.lr_scheduler != "constant":
                problems.append(
                    f"lr_scheduler={config.lr_scheduler!r} needs the number of updates, and a stream has no "
                    "length; give total_steps (Trainer: max_steps), or lr_scheduler='constant'."
                )
            if getattr(config, "mask_prob_end", None) is not None:
                problems.append(
                    f"mask_prob_end={config.mask_prob_end} needs the number of updates, and a stream has no "
                    "length; give total_steps (Trainer: max_steps), or leave it out."
                )
        elif config.lr_scheduler != "constant" and config.warmup_steps + config.decay_steps > total:
            names, got = "warmup_steps", str(config.warmup_steps)
            if config.decay_steps:
                names, got = "decay_steps and warmup_steps together", f"{config.decay_steps} + {got}"
            problems.append(
                f"{names} must not exceed the run's {int(total)} updates, got {got}; lower them or train longer."
            )
        return problems

    def know_length(self, total_steps: int) -> None:
        """Called before the first batch is read, with the updates of the run (0: unknown)."""

    def _num_updates(self) -> float:
        """Updates of the run; infinite where nothing says how many."""
        trainer = self.trainer
        train = getattr(getattr(trainer, "datamodule", None), "train", None)
        if getattr(train, "is_stream", False):  # Lightning's estimate would read it, before a resume sets the position
            return float("inf") if trainer.max_steps == -1 else trainer.max_steps
        total = trainer.estimated_stepping_batches
        return float("inf") if total < 0 else total

    def trained_modules(self) -> list[nn.Module]:
        """The modules whose parameters the optimizer updates."""
        assert self.student is not None
        return [self.student]

    # ------------------------------------------------------------------ checkpoint

    def unchangeable(self) -> dict[str, Any]:
        """Settings that may not change in a run, by the name an error uses."""
        return {
            "seed": self.config.seed,
            **ckpt.architecture(self.student),
            "optimizer": self.config.optimizer,
        }

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Adds what a resume checks; leaves out what does not belong to the student."""
        ckpt.describe(self, checkpoint)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Refuses a checkpoint of another run, and sets the loops to its last finished update."""
        ckpt.accept(self, checkpoint)
