"""Bad input: a table of rules, each broken in several ways, each refused in one sentence of ours; nothing changes."""

from __future__ import annotations

import copy
import gzip
import os
import pickle
import re
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
import zstandard
from datasets import Dataset
from transformers import AutoTokenizer, RobertaConfig, RobertaForMaskedLM

import foundry_lightning
from foundry_lightning import (
    DataPipeline,
    DistilMLMConfig,
    DistilMLMTrainer,
    EncoderDistillConfig,
    EncoderDistillTrainer,
    FromConfig,
    FromPretrained,
    MLMConfig,
    MLMDataModule,
    MLMTrainer,
    WarmStart,
    WithMLMHead,
    from_yaml,
    mask_tokens,
    warm_start_student,
)
from foundry_lightning.export import export_onnx
from foundry_lightning.probe.labelled import read_labelled
from foundry_lightning.report import write_report
from tests.conftest import WORDS, BiasStudent, texts, tiny_bert
from tests.test_config import BROKEN
from tests.test_packing import Deaf

PACKAGE = Path(foundry_lightning.__file__).parent
QUIET = {"progress_bar": False, "device": "cpu"}
ROW = torch.tensor([[2, 6, 3]])


NOT_THERE = "cuda" if torch.backends.mps.is_available() else "mps"


class World:
    """What an example is made of; it remembers what must not change."""

    def __init__(self, tokenizer: Any, folder: Path) -> None:
        self.tokenizer, self.folder = tokenizer, folder
        self._weights: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._files: dict[str, bytes] = {}

    def student(self, vocab_size: int | None = None, **config: Any) -> Any:
        size = len(self.tokenizer) if vocab_size is None else vocab_size
        return self.keep(tiny_bert(size, **{"num_hidden_layers": 1, **config}))

    def keep(self, model: Any) -> Any:
        self._weights += [(p, p.detach().clone()) for p in model.parameters()]
        return model

    def trainer(self, student: Any = None, **config: Any) -> MLMTrainer:
        return MLMTrainer(student or self.student(), self.tokenizer, MLMConfig(**{**QUIET, **config}))

    def train(self, dataset: Any, *args: Any, config: dict[str, Any] | None = None, **arguments: Any) -> None:
        self.trainer(**{"save_dir": "run", "save_every": 1, **(config or {})}).train(dataset, *args, **arguments)

    def file(self, name: str, content: bytes | str) -> str:
        path = Path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return name

    def checkpoint(self, **changes: Any) -> Path:
        """A checkpoint of a fresh student, with keys of its own part, or of itself, changed or (None) left out."""
        path = self.trainer(self.student()).save_checkpoint("saved")
        content = torch.load(path, weights_only=True)
        for name, value in changes.items():
            where = content["foundry_lightning"] if name in content["foundry_lightning"] else content
            where.pop(name) if value is None else where.update({name: value})
        torch.save(content, path)
        return path

    def tokens(self, **changes: Any) -> Any:
        changed = copy.deepcopy(self.tokenizer)
        for name, value in changes.items():
            setattr(changed, name, value)
        return changed

    def note_files(self) -> None:
        self._files = self._content()

    def _content(self) -> dict[str, bytes]:
        """Every file below the working folder; the cache may keep its locks."""
        paths = [path for path in self.folder.rglob("*") if path.is_file() and path.suffix != ".lock"]
        return {str(path.relative_to(self.folder)): path.read_bytes() for path in paths}

    def assert_unchanged(self) -> None:
        assert all(torch.equal(now, before) for now, before in self._weights)
        assert self._content() == self._files


@dataclass(frozen=True)
class Rule:
    """A rule, and ways to break it.

    Attributes:
        area: What it is about.
        says: The rule as a sentence.
        message: Regular expression of the error's text.
        examples: name -> value that breaks it; a list names its values by themselves.
        act: What is done with a value. What it prepares (files, checkpoints) it does before `world.note_files()`.
    """

    area: str
    says: str
    message: str
    examples: Any
    act: Callable[[World, Any], Any]

    def cases(self) -> list[tuple[str, Any]]:
        if isinstance(self.examples, dict):
            return list(self.examples.items())
        return [(re.sub(r"\s+", " ", repr(value))[:40], value) for value in self.examples]


def train(world: World, dataset: Any) -> None:
    world.train(dataset)


def pipeline(**fixed: Any) -> Callable[[World, Any], Any]:
    """Makes a pipeline with these settings; a name for which `fixed` holds `...` gets the value."""
    return lambda world, value: DataPipeline(
        **{"source": ["the cat"], "tokenizer": world.tokenizer},
        **{name: value if given is ... else given for name, given in fixed.items()},
    )


def data_module(name: str) -> Callable[[World, Any], Any]:
    return lambda world, value: MLMDataModule(["the cat"], tokenizer=world.tokenizer, **{name: value})


def masked(name: str) -> Callable[[World, Any], Any]:
    arguments = {"input_ids": torch.full((2, 6), 7), "row_ids": torch.arange(2), "seed": 1, "epoch": 0}
    arguments |= {"mask_token_id": 4, "special_token_ids": (0, 1, 2, 3, 4), "vocab_size": 50}

    def act(world: World, value: Any) -> None:
        changes = value if isinstance(value, dict) else {name: value}
        mask_tokens(**{**arguments, **changes})

    return act


def config(kind: type, name: str) -> Callable[[World, Any], Any]:
    return lambda world, value: kind(**(value if isinstance(value, dict) else {name: value}))


def settings_of_trainer(world: World, value: dict[str, Any]) -> None:
    MLMTrainer(world.student(), world.tokenizer, MLMConfig(**{**QUIET, "save_dir": "run", **value})).train([ROW])


def batch(**entries: Any) -> list[dict[str, Any]]:
    return [{"input_ids": ROW}, {"input_ids": ROW, **entries}]


def file(name: str) -> Callable[[World, Any], Any]:
    """Trains on a file of this name and the example's content."""

    def act(world: World, content: Any) -> None:
        source = world.file(name, content)
        world.note_files()
        world.train(DataPipeline(source, world.tokenizer, max_length=32))

    return act


def path(prepare: Callable[[World], Any] | None = None) -> Callable[[World, Any], Any]:
    def act(world: World, value: Any) -> None:
        if prepare is not None:
            prepare(world)
        world.note_files()
        world.train(value)

    return act


def parquet(world: World, table: Any) -> None:
    pyarrow.parquet.write_table(pyarrow.table(table), "a.parquet")
    world.note_files()
    world.train(DataPipeline("a.parquet", world.tokenizer, max_length=32))


def resume(make: Callable[[World, Any], Any]) -> Callable[[World, Any], Any]:
    """Resumes from what `make` writes for the example."""

    def act(world: World, value: Any) -> None:
        file = make(world, value)
        world.note_files()
        world.trainer(world.student(seed=1)).resume_from_checkpoint(file)

    return act


def changed_checkpoint(world: World, changes: dict[str, Any]) -> Path:
    return world.checkpoint(**changes)


def damaged_checkpoint(world: World, damage: Callable[[bytes], bytes]) -> Path:
    path = world.checkpoint()
    path.write_bytes(damage(path.read_bytes()))
    return path


class Code:
    def __reduce__(self):
        return (Path.touch, (Path("executed"),))


def pickled(world: World, write: Callable[[Path], Any]) -> Path:
    write(Path("code.ckpt"))
    return Path("code.ckpt")


def writes(method: str) -> Callable[[World, Any], Any]:
    def act(world: World, value: Any) -> None:
        world.file("file", "kept")
        Path("folder.ckpt").mkdir()
        made = world.trainer()
        world.note_files()
        getattr(made, method)(value)

    return act


def report_on(world: World, files: dict[str, str], runs: Sequence[str] = ("runs/mlm",)) -> None:
    for name, content in files.items():
        world.file(name, content)
    world.note_files()
    write_report(runs)


def yaml_file(world: World, content: str) -> None:
    name = world.file("run.yaml", content)
    world.note_files()
    from_yaml(name)


YAML = """
model:
  class_path: foundry_lightning.MLMLitModule
  init_args:
    student: {class_path: foundry_lightning.FromConfig, init_args: {model_type: bert}}
    config: {mask_prob: %s}
data:
  class_path: foundry_lightning.MLMDataModule
  init_args: {train: [the cat], batch_size: %s}
trainer: {accelerator: cpu, %s: 3}
"""


def distil(world: World, student: Any, teacher: Any, **settings: Any) -> DistilMLMTrainer:
    world.keep(student)
    return DistilMLMTrainer(student, teacher, world.tokenizer, DistilMLMConfig(**QUIET, **settings))


def roberta(world: World, positions: int) -> Any:
    settings = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    made = RobertaConfig(vocab_size=len(world.tokenizer), max_position_embeddings=positions + 2, **settings)
    return world.keep(RobertaForMaskedLM(made))


def slow_tokenizer(world: World) -> Any:
    from transformers import EsmTokenizer

    world.file("vocab.txt", "\n".join(["<cls>", "<pad>", "<eos>", "<unk>", "<mask>", *WORDS]))
    world.note_files()
    return EsmTokenizer("vocab.txt")


class Blind(torch.nn.Module):
    """A model that takes no attention mask."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(27, 27)

    def forward(self, input_ids):
        return self.embed(input_ids)


class NoRows:
    """A kind of object that holds no rows."""


class Body(torch.nn.Module):
    """An encoder without a config."""

    def __init__(self, width: int = 8, result: Any = None) -> None:
        super().__init__()
        self.embed, self.result = torch.nn.Embedding(27, width), result

    def forward(self, input_ids, attention_mask=None):
        return self.embed(input_ids) if self.result is None else self.result


NAN = float("nan")
LONG = 2**31
# fmt: off
RULES = [
    # ---------------------------------------------------------------- configs
    Rule("config", "devices is 'auto', a number of devices, -1 for all, or a list of them", "MLMConfig: devices must",
         [0, -2, 1.5, None, True, [], [0.5], ""], config(MLMConfig, "devices")),
    Rule("config", "a seed fits 63 bits", "MLMConfig: seed must", [2**63, 10**30], config(MLMConfig, "seed")),
    Rule("config", "each share of replacement, and both together, lie in [0, 1]", "replace_prob",
         {"together": {"mask_replace_prob": 0.9, "random_replace_prob": 0.2}, "nan": {"random_replace_prob": NAN},
          "negative": {"mask_replace_prob": -0.5}}, config(MLMConfig, "")),
    Rule("config", "decay_steps belong to wsd", "decay_steps must be 0 where lr_scheduler is",
         [{"decay_steps": 5}, {"decay_steps": 5, "lr_scheduler": "linear"}], config(MLMConfig, "")),
    Rule("config", "saving needs a folder", "save_every=10 needs a place to write to; set save_dir",
         [{"save_every": 10}, {"save_every": 10, "save_dir": ""}], config(MLMConfig, "")),
    Rule("config", "checkpoints are logged where there are some, to wandb", "log_checkpoints(=True| must)",
         [{"log_checkpoints": True}, {"log_checkpoints": True, "log_backend": "wandb"}, {"log_checkpoints": "all"},
          {"log_checkpoints": True, "log_backend": "tensorboard", "save_every": 1, "save_dir": "run"}],
         config(MLMConfig, "")),
    Rule("config", "the weights of distillation are not negative, and not all zero", "(weight must lie in|are all 0)",
         [{"mlm_weight": 0, "distill_weight": 0, "cosine_weight": 0}, {"mlm_weight": -1}, {"distill_weight": "5"},
          {"cosine_weight": float("inf")}, {"cosine_weight": NAN}, {"mlm_weight": None}],
         config(DistilMLMConfig, "")),
    Rule("config", "the temperature is above 0", "DistilMLMConfig: temperature must lie in",
         [0, -2.0, NAN, "2", None], config(DistilMLMConfig, "temperature")),
    Rule("config", "distill_on is a known set of places", "distill_on must be one of 'masked', 'all'",
         ["some", None, True], config(DistilMLMConfig, "distill_on")),
    Rule("config", "the teacher's type is a known one", "teacher_dtype must be one of 'float32'",
         ["int8", None, torch.float32], config(DistilMLMConfig, "teacher_dtype")),
    Rule("config", "the distance of encoder distillation is a known one", "loss must be one of 'mse', 'cosine'",
         ["l1", None, "MSE"], config(EncoderDistillConfig, "loss")),
    Rule("config", "encoder distillation keeps the training fields' rules", "EncoderDistillConfig: ",
         [{"epochs": 0}, {"pad_token_id": -1}, {"learning_rate": NAN}, {"teacher_dtype": "int4"}],
         config(EncoderDistillConfig, "")),
    Rule("config", "a config is a config, a dict of its fields or None", "config (must be a|has no field)|has no field",
         ["mask_prob=0.1", 3, [], {"mask_probability": 0.3}, EncoderDistillConfig()],
         lambda world, value: MLMTrainer(world.student(), world.tokenizer, value)),
    Rule("config", "trainer_kwargs are arguments that lightning.Trainer takes", "trainer_kwargs",
         [{"trainer_kwargs": {"max_stepz": 3}}, {"trainer_kwargs": {"callbacks": 3}},
          {"trainer_kwargs": {"callbacks": ["early"]}}, {"trainer_kwargs": {"plugins": 3}},
          {"trainer_kwargs": {"precision": "8-bit"}}, {"trainer_kwargs": {"accelerator": "abacus"}},
          {"trainer_kwargs": {"max_epochs": "two"}}, {"trainer_kwargs": {"limit_train_batches": -3}},
          {"trainer_kwargs": {"gradient_clip_algorithm": "none"}}], settings_of_trainer),
    Rule("config", "the device, the devices and the strategy are at hand", "(lightning.Trainer refuses|is not there)",
         [{"device": "mps"}, {"device": "cuda", "devices": 99}, {"strategy": "telepathy"}, {"devices": "many"},
          {"strategy": ""}, {"strategy": "ddp", "devices": [0, 0]}], settings_of_trainer),
    Rule("config", "save_dir can be a folder", "save_dir must be a folder",
         [{"save_dir": "file", "save_every": 1}, {"save_dir": "file/below", "save_every": 1}, {"save_dir": "file"}],
         lambda world, value: (world.file("file", "kept"), world.note_files(), settings_of_trainer(world, value))),
    # ---------------------------------------------------------------- masking
    Rule("mask_tokens", "input_ids is an integer tensor [B, S]", "input_ids must",
         {"list": [[5, 6]], "1-D": torch.arange(4), "3-D": torch.ones(1, 2, 3, dtype=torch.long),
          "float": torch.ones(2, 6), "none": None, "bool": torch.ones(2, 6, dtype=torch.bool)},
         masked("input_ids")),
    Rule("mask_tokens", "attention_mask has the shape of input_ids", "attention_mask must",
         {"shape": torch.ones(2, 5), "1-D": torch.ones(6), "list": [[1] * 6] * 2, "number": 1},
         masked("attention_mask")),
    Rule("mask_tokens", "row_ids are whole numbers, one per row", "row_ids must",
         {"too many": torch.arange(3), "float": torch.tensor([0.5, 1.5]), "text": "ab", "number": 3, "none": None,
          "floats": [0.5, 1.0], "nan": [NAN, 1.0], "ragged": [[1], [1, 2]], "too large": [2**70, 1]},
         masked("row_ids")),
    Rule("mask_tokens", "mask_prob lies in (0, 1]", r"mask_prob must lie in \(0, 1\]",
         [0, 0.0, -0.1, 1.5, NAN, None, "0.15", True], masked("mask_prob")),
    Rule("mask_tokens", "the shares of replacement lie in [0, 1] together", "replace_prob",
         [{"mask_replace_prob": 0.9, "random_replace_prob": 0.2}, {"mask_replace_prob": -0.1},
          {"random_replace_prob": NAN}, {"mask_replace_prob": "0.8"}, {"random_replace_prob": None}], masked("")),
    Rule("mask_tokens", "the strategy is a known one and has what it needs", "(strategy must be one of|needs word_ids)",
         ["sentence", None, "TOKEN", "whole_word"], masked("strategy")),
    Rule("mask_tokens", "word_ids have the shape of input_ids", "word_ids must",
         [{"strategy": "whole_word", "word_ids": torch.zeros(2, 5)}, {"strategy": "whole_word", "word_ids": [[0] * 6]}],
         masked("")),
    Rule("mask_tokens", "the mask token is an id", "mask_token_id must", [None, -1, 1.5, "4", True],
         masked("mask_token_id")),
    Rule("mask_tokens", "special_token_ids are ids", "special_token_ids must", [None, 3, ("a",), (1.5,), (-1,), "01"],
         masked("special_token_ids")),
    Rule("mask_tokens", "vocab_size leaves an ordinary token", "vocab_size", [5, 0, None, 50.0, -1],
         masked("vocab_size")),
    Rule("mask_tokens", "seed and epoch are whole numbers", "(seed|epoch) must be an integer",
         [{"seed": None}, {"seed": 1.5}, {"seed": "1"}, {"epoch": None}, {"epoch": -1}, {"epoch": 0.5}], masked("")),
    # ---------------------------------------------------------------- student, tokenizer and config together
    Rule("together", "the student is a module or a recipe", "student must be a torch.nn.Module or a recipe",
         [None, "bert", 3, dict, torch.nn.Module], lambda world, value: MLMTrainer(value, world.tokenizer)),
    Rule("together", "the tokenizer is one, or where one lies", "tokenizer",
         ["./nowhere", Path("nowhere"), "file", "empty", "no/such/name", 3, ["a"], {"train": 3}, {"fit": {}},
          {"train": {"vocab": 3}}, {"train": {}}],
         lambda world, value: (world.file("file", ""), Path("empty").mkdir(), world.note_files(),
                               MLMTrainer(world.student(), value))),
    Rule("together", "a tokenizer has a vocabulary", "tokenizer must",
         {"function": str.split, "lambda": lambda texts, **_: texts, "class": type("Tokens", (), {}), "AutoTokenizer":
          AutoTokenizer}, lambda world, value: MLMTrainer(world.student(), value)),
    Rule("together", "the tokenizer has a mask token that is not its unknown token", "mask token",
         [{"mask_token": None}, {"mask_token": "[UNK]"}],
         lambda world, value: MLMTrainer(world.student(), world.tokens(**value))),
    Rule("together", "the tokenizer fits the student's embedding", "the tokenizer has 27 ids, the student embeds",
         [20, 26, 2], lambda world, size: world.trainer(world.student(size))),
    Rule("together", "the student scores every id of the tokenizer", "the student scores .* ids",
         [20, 26], lambda world, size: world.trainer(world.keep(WithMLMHead(world.student().base_model, 16, size)))),
    Rule("together", "an id given beside a tokenizer is the tokenizer's", "must be the tokenizer's, got .* has",
         [{"mask_token_id": 7}, {"pad_token_id": 3}, {"vocab_size": 500}, {"vocab_size": 26}, {"mask_token_id": 0}],
         lambda world, value: world.trainer(**value)),
    Rule("together", "without a tokenizer mask_token_id is required, below the vocabulary", "mask_token_id must be",
         [{}, {"vocab_size": 20}, {"mask_token_id": 30}, {"mask_token_id": 9, "vocab_size": 9}],
         lambda world, value: MLMTrainer(world.student(30), config=MLMConfig(**QUIET, **value))),
    Rule("together", "without embeddings to ask vocab_size is required", "vocab_size must be given without a tokenizer",
         [torch.zeros(8), torch.ones(3)],
         lambda world, bias: MLMTrainer(world.keep(BiasStudent(bias)), None, MLMConfig(mask_token_id=2, **QUIET))),
    Rule("together", "special_token_ids leave an ordinary token", "leaves no ordinary token",
         [tuple(range(27)), range(5, 27)],
         lambda world, ids: world.trainer(special_token_ids=tuple(ids))),
    Rule("together", "whole words need a fast tokenizer and texts", "whole_word' needs",
         {"slow": slow_tokenizer, "batches": lambda world: [ROW],
          "ids": lambda world: DataPipeline([[5, 6]], max_length=32)},
         lambda world, make: (
             MLMTrainer(world.student(30), make(world), MLMConfig(masking="whole_word", **QUIET))
             if make is slow_tokenizer else world.train(make(world), config={"masking": "whole_word"}))),
    Rule("together", "splitting texts needs a fast tokenizer", "long_rows='split' need one",
         ["the cat", "cat"], lambda world, text: MLMTrainer(world.student(30), slow_tokenizer(world)).train(
             DataPipeline([text], max_length=32, long_rows="split"))),
    Rule("together", "a student in training has a trainable parameter", "no trainable parameter",
         {"frozen": lambda world: world.student().requires_grad_(False),
          "no parameter": lambda world: type("Constant", (torch.nn.Module,), {
              "forward": lambda self, input_ids, attention_mask: torch.zeros(*input_ids.shape, 27)})()},
         lambda world, make: world.trainer(make(world)).train([ROW])),
    Rule("together", "the student returns scores", "the model must return .logits",
         {"body": lambda world: world.keep(world.student().base_model), "nothing": lambda world: Body(result="scores")},
         lambda world, make: world.trainer(make(world)).train([ROW])),
    Rule("together", "student and teacher take an attention mask", "(student|teacher) must take attention_mask",
         {"student": lambda world: world.trainer(Blind()),
          "teacher": lambda world: distil(world, world.student(), Blind()),
          "encoder": lambda world: EncoderDistillTrainer(world.student().base_model, Blind())},
         lambda world, act: act(world)),
    Rule("together", "gradient_checkpointing needs a Hugging Face model", "gradient_checkpointing=True needs",
         [torch.zeros(27), torch.ones(30)],
         lambda world, bias: world.trainer(world.keep(BiasStudent(bias)), gradient_checkpointing=True).train([ROW])),
    # ---------------------------------------------------------------- teachers
    Rule("teacher", "the teacher is a module or a recipe", "teacher must be a torch.nn.Module or a recipe",
         [None, "bert", 3, dict], lambda world, value: distil(world, world.student(), value)),
    Rule("teacher", "teacher and student are two models that share no weight", "teacher and student must",
         {"same": lambda world: [world.student()] * 2, "shared body": lambda world: (
             lambda teacher: (WithMLMHead(teacher.base_model), teacher))(world.student())},
         lambda world, make: distil(world, *make(world))),
    Rule("teacher", "student and teacher score the tokenizer's ids", "(scores|embeds) .*ids",
         [20, 26, 5], lambda world, size: distil(world, world.student(), tiny_bert(size))),
    Rule("teacher", "the rows fit the teacher's positions", "the teacher has 16 positions; set max_length=16",
         [17, 33, 64], lambda world, length: distil(
             world, world.student(), tiny_bert(27, max_position_embeddings=16)).train([torch.full((1, length), 6)])),
    Rule("teacher", "comparing hidden states needs hidden states", "must call a base_model that returns hidden states",
         {"student": lambda world: (BiasStudent(torch.zeros(27)), world.student()),
          "teacher": lambda world: (world.student(), BiasStudent(torch.zeros(27)))},
         lambda world, make: distil(world, *make(world))),
    Rule("teacher", "encoder distillation compares last_hidden_state", "must return .last_hidden_state",
         {"student": lambda world: (world.student(), world.student().base_model),
          "teacher": lambda world: (world.student().base_model, world.student()),
          "neither": lambda world: (BiasStudent(torch.zeros(3)), BiasStudent(torch.zeros(3)))},
         lambda world, make: EncoderDistillTrainer(*make(world), EncoderDistillConfig(**QUIET))),
    Rule("teacher", "both encoders embed the data's ids", "the (student|teacher) embeds ids below",
         {"teacher": (27, 6), "student": (6, 27), "both": (6, 6)},
         lambda world, sizes: EncoderDistillTrainer(
             *(world.keep(tiny_bert(size).base_model) for size in sizes), EncoderDistillConfig(**QUIET)).train([ROW])),
    Rule("teacher", "both embed the ids of a stream", "row 1 holds the token id 25, the model embeds ids below 20",
         {"mlm": lambda world, data: MLMTrainer(world.student(20), None, MLMConfig(mask_token_id=4, **QUIET)).train(
             data, total_steps=1),
          "teacher": lambda world, data: EncoderDistillTrainer(
              world.student().base_model, tiny_bert(20).base_model, EncoderDistillConfig(**QUIET)).train(
                  data, total_steps=1)},
         lambda world, act: act(world, DataPipeline(lambda: iter([[5, 6], [5, 25]]), max_length=32))),
    # ---------------------------------------------------------------- pipeline and data module
    Rule("data", "batch_size is a whole number of at least 1", "batch_size must be an integer",
         [0, -1, 2.5, None, "8", True], pipeline(batch_size=...)),
    Rule("data", "max_length is a whole number of at least 1", "max_length must be an integer",
         [0, -1, None, 1e3, "512"], pipeline(max_length=...)),
    Rule("data", "max_length leaves room for the special tokens", "max_length must", [1, 2],
         lambda world, length: world.train(DataPipeline(["the cat"], world.tokenizer, max_length=length))),
    Rule("data", "shuffle_buffer is a whole number", "shuffle_buffer must be an integer", [-1, 1.5, None, "all"],
         pipeline(shuffle_buffer=...)),
    Rule("data", "the mode is embed", "mode must be 'embed'", ["lm", "contrastive", None, ""], pipeline(mode=...)),
    Rule("data", "long rows are truncated or split", "long_rows must be 'truncate' or 'split'", ["drop", None, True],
         pipeline(long_rows=...)),
    Rule("data", "a .txt file is read by lines or paragraphs", "split_txt must be 'line' or 'paragraph'",
         ["page", None, ""], pipeline(split_txt=...)),
    Rule("data", "text_column is a name", "text_column must be", [None, 3, ["text"], ""], pipeline(text_column=...)),
    Rule("data", "group_by_length is True or False, and needs lengths", "group_by_length",
         {"text": {"group_by_length": "yes"}, "none": {"group_by_length": None},
          "stream": {"group_by_length": True, "source": lambda: iter(["a"])},
          "iterator": {"group_by_length": True, "source": iter(["a"])}},
         lambda world, value: DataPipeline(**{"source": ["a"], "tokenizer": world.tokenizer, **value})),
    Rule("data", "pack is True or False, alone, and needs lengths", "pack",
         {"text": {"pack": "yes"}, "none": {"pack": None}, "both": {"pack": True, "group_by_length": True},
          "stream": {"pack": True, "source": lambda: iter(["a"])}, "iterator": {"pack": True, "source": iter(["a"])}},
         lambda world, value: DataPipeline(**{"source": ["a"], "tokenizer": world.tokenizer, **value})),
    Rule("data", "batch_tokens holds a longest row, with pack or group_by_length", "batch_tokens (must|needs)",
         {"alone": {"batch_tokens": 4096}, "zero": {"batch_tokens": 0, "pack": True},
          "text": {"batch_tokens": "big", "pack": True}, "small": {"batch_tokens": 511, "pack": True},
          "padded": {"batch_tokens": 34, "max_length": 33, "group_by_length": True}},
         lambda world, value: DataPipeline(["a"], world.tokenizer, **value)),
    Rule("data", "packing needs a model that keeps texts apart", "pack=True",
         {"no position_ids": lambda world: BiasStudent(torch.zeros(len(world.tokenizer))),
          "no mask": lambda world: Deaf("attention_mask"), "no positions": lambda world: Deaf("position_ids")},
         lambda world, value: world.trainer(world.keep(value(world))).train(
             DataPipeline(["the cat"], world.tokenizer, max_length=32, pack=True))),
    Rule("probe", "labelled data fit their task", "(does not exist|must be a (file|dict)|has no|words and|needs|holds)",
         {"absent": "absent.txt", "number": 7, "column": [{"words": ["a"]}], "empty": [],
          "lengths": [{"tokens": ["a", "b"], "tags": ["O"]}], "no iob": [{"tokens": ["a"], "tags": ["noun"]}],
          "no list": [{"tokens": "a", "tags": "O"}], "no dict": ["a"]},
         lambda world, value: read_labelled(value, task="ner")),
    Rule("probe", "a CoNLL line holds a word and a tag", "line 2 must hold a word and a tag",
         ["a O\nb\n", "a O\n\tO\n"],
         lambda world, value: (
             world.file("ner.txt", value), world.note_files(), read_labelled("ner.txt", task="ner"))),
    Rule("data", "pad_token_id and seed are whole numbers", "(pad_token_id|seed) must be an integer",
         [{"pad_token_id": -1}, {"pad_token_id": "0"}, {"pad_token_id": 0.5}, {"seed": None}, {"seed": -1},
          {"seed": 2**63}],
         lambda world, value: DataPipeline(["a"], world.tokenizer, **value)),
    Rule("data", "num_workers is a whole number", "num_workers must be an integer", [-1, 1.5, None, "2"],
         data_module("num_workers")),
    Rule("data", "shuffle is True or False", "shuffle must be True or False", ["yes", None, 1], data_module("shuffle")),
    Rule("data", "train's shuffle is True or False", "shuffle must be True or False", ["yes", None, 3],
         lambda world, value: world.train([ROW], shuffle=value)),
    Rule("data", "the seed of the order is a whole number", "seed must be an integer", [-1, 0.5, "1"],
         data_module("seed")),
    Rule("data", "texts to fill are a list of texts", "predict must be a list of texts", ["the [MASK]", 3, [3], [None]],
         data_module("predict")),
    Rule("data", "a stream has no length", "is a stream and has no length; give total_steps",
         {"callable": lambda: lambda: iter(["a"]), "iterator": lambda: iter(["a"])},
         lambda world, make: len(DataPipeline(make(), world.tokenizer))),
    Rule("data", "the pipeline's tokenizer is the trainer's", "DataPipeline.tokenizer must be the trainer's tokenizer",
         [{"mask_token": "[CLS]"}, {"pad_token": "[SEP]"}], lambda world, value: world.train(
             DataPipeline(["the cat"], world.tokens(**value), max_length=32))),
    Rule("data", "texts need a tokenizer", "tokenizer must be given for a source of texts",
         {"list": ["the cat"], "dicts": [{"text": "the cat"}], "stream": lambda: iter(["the cat"])},
         lambda world, source: MLMTrainer(world.student(), config=MLMConfig(mask_token_id=4, **QUIET)).train(
             DataPipeline(source, max_length=32), total_steps=2)),
    Rule("data", "a row is not longer than the student's positions",
         r"max_length of the train data is \d+, the student has 64 positions; set max_length=64",
         {"texts": None, "one more": 65},
         lambda world, length: world.train(
             DataPipeline(texts(4), world.tokenizer, **({} if length is None else {"max_length": length})))),
    Rule("data", "RoBERTa's positions begin two later", "is 33, the student has 32 positions; set max_length=32",
         {"texts": lambda world: DataPipeline(texts(4), world.tokenizer, max_length=33),
          "batches": lambda world: [torch.full((1, 33), 6)]},
         lambda world, make: world.trainer(roberta(world, 32)).train(make(world))),
    # ---------------------------------------------------------------- ready batches
    Rule("batches", "a list of batches is not empty", "empty", [[], (), np.zeros((0, 4), dtype=np.int64)], train),
    Rule("batches", "a batch is a rectangle of whole numbers",
         r"dataset\[\d\].* must (be a rectangular array|hold integers)",
         {"ragged": [{"input_ids": [[1, 2], [3]]}], "none inside": [[[5, None]]],
          "text": [ROW, "the cat"], "nested none": [[[5, 6], None]], "texts": [[["the", "cat"]]],
          "floats": [{"input_ids": torch.zeros(2, 3)}], "nan": [torch.full((1, 3), NAN)],
          "numpy nan": [np.full((1, 3), NAN)], "infinite": [ROW, [[1.0, float("inf")]]],
          "complex": [torch.zeros(1, 3, dtype=torch.complex64)], "bool": [torch.ones(1, 3, dtype=torch.bool)],
          "object": [ROW, np.array([[object()]])], "bytes": [ROW, b"ab"], "far too large": [ROW, [[2**70]]]}, train),
    Rule("batches", "a batch has the shape (B, S) or (S,)", r"dataset\[\d\].* must have the shape \(B, S\) or \(S,\)",
         {"3-D": [torch.zeros(2, 2, 2, dtype=torch.long)], "no rows": [np.zeros((0, 4), dtype=np.int64)],
          "no places": [torch.zeros(2, 0, dtype=torch.long)], "number": [ROW, 7], "nothing": [ROW, []],
          "0-D": [torch.tensor(3)]}, train),
    Rule("batches", "a dict of a batch holds input_ids", r"dataset\[1\] must hold 'input_ids'",
         [batch()[:1] + [{"ids": ROW}], batch()[:1] + [{}], batch()[:1] + [{"input_ids": None}],
          batch()[:1] + [{"labels": ROW}], [ROW, None]], train),
    Rule("batches", "ids are not negative", r"dataset\[\d\]\['input_ids'\] must not hold negative ids",
         [[torch.tensor([[2, -6, 3]])], [ROW, [[-100, 5]]], [ROW, np.array([[2**63 + 1]], dtype=np.uint64)]], train),
    Rule("batches", "ids lie below the student's embedding", "token id [0-9]+, the student embeds ids below 27",
         [[torch.tensor([[2, 600, 3]])], [ROW, torch.tensor([[27]])], [{"input_ids": [[2, 2**40]]}]], train),
    Rule("batches", "a batch's attention_mask has the shape of input_ids", r"\['attention_mask'\] must have the shape",
         [batch(attention_mask=torch.ones(1, 2, dtype=torch.long)), batch(attention_mask=[1]),
          batch(attention_mask=torch.ones(2, 3, dtype=torch.long))], train),
    Rule("batches", "attention_mask holds 0 and 1", r"dataset\[1\]\['attention_mask'\] must",
         [batch(attention_mask=[[1, 2, 1]]), batch(attention_mask=[[1, -1, 0]]), batch(attention_mask=ROW),
          batch(attention_mask=torch.ones(1, 3)), batch(attention_mask=[[0.0, NAN, 1.0]]),
          batch(attention_mask="110"), batch(attention_mask=[[1, None, 1]])], train),
    Rule("batches", "labels have the shape of input_ids", r"\['labels'\] must have the shape",
         [batch(labels=[[1, 2]]), batch(labels=[6]), batch(labels=torch.zeros(1, 3, 27, dtype=torch.long)),
          batch(labels=3)], train),
    Rule("batches", "labels are whole numbers", r"dataset\[1\]\['labels'\] must (be a rect|hold integers)",
         [batch(labels=torch.full((1, 3), NAN)), batch(labels=[[6.0, 6.0, 6.0]]), batch(labels=[["a", "b", "c"]]),
          batch(labels=[[True, False, True]]), batch(labels=[[None, 6, 6]])], train),
    Rule("batches", "a label is an id of the student, or -100", r"labels?.* (-100|ids below)",
         [batch(labels=[[-1, 6, -100]]), batch(labels=[[-100, 6, -101]]), batch(labels=[[27, -100, -100]]),
          batch(labels=[[2**40, 6, 6]])], train),
    # ---------------------------------------------------------------- rows of ids
    Rule("ids", "a row of ids is whole numbers [S]", r"row \d.* integer token ids",
         [[[1, 2.5]], [[True, False]], [["a", "b"]], [[1, None]], [[[1, 2], [3]]], [[NAN]]],
         lambda world, rows: world.train(DataPipeline(rows, max_length=32))),
    Rule("ids", "an id of a row lies between 0 and 2^31 - 1", r"row \d.* must hold token ids",
         [[[1, 2], [3, -1]], [[LONG]], [[5], [2**40 + 6]], [{"input_ids": [-100]}]],
         lambda world, rows: world.train(DataPipeline(rows, max_length=32))),
    Rule("ids", "an id of a row lies below the student's embedding",
         "token id [0-9]+, the (student|model) embeds ids below 27",
         {"list": [[5, 27]], "dicts": [{"input_ids": [5, 600]}], "Dataset": Dataset.from_dict({"input_ids": [[27]]}),
          "stream": lambda: iter([[5, 6], [5, 600]]),
          "IterableDataset": Dataset.from_dict({"input_ids": [[5], [600]]}).to_iterable_dataset()},
         lambda world, rows: world.trainer().train(DataPipeline(rows, max_length=32), total_steps=1)),
    Rule("ids", "a row's attention_mask has its shape", "attention_mask in row 0 must have the shape",
         [[{"input_ids": [1, 2], "attention_mask": [1]}], [{"input_ids": [1, 2], "attention_mask": [[1, 1]]}]],
         lambda world, rows: world.train(DataPipeline(rows, max_length=32))),
    Rule("ids", "a row's attention_mask holds 0 and 1", "attention_mask in row 0 must hold",
         [[{"input_ids": [1, 2], "attention_mask": [1, 2]}], [{"input_ids": [1, 2], "attention_mask": [NAN, 1.0]}],
          [{"input_ids": [1, 2], "attention_mask": ["1", "0"]}], [{"input_ids": [1, 2], "attention_mask": [None, 1]}]],
         lambda world, rows: world.train(DataPipeline(rows, max_length=32))),
    # ---------------------------------------------------------------- texts
    Rule("texts", "a text is a string", r"row \d must be text",
         [["text", 3], ["text", b"bytes"], ["text", None], ["text", 3.5], ["text", {1}]],
         lambda world, rows: world.train(DataPipeline(rows, world.tokenizer, max_length=32))),
    Rule("texts", "a text is valid Unicode", "row 1 must be valid Unicode", [["a", "\ud83d"], ["a", "b\udc80"]],
         lambda world, rows: world.train(DataPipeline(rows, world.tokenizer, max_length=32))),
    Rule("texts", "a dict holds a text under text_column", "'text'.* (must be a column of|must be text)",
         [[{"body": "a"}], [{"text": "a"}, {"body": "b"}], [{"text": None}], [{"text": [1, 2]}], [{"text": 3}], [{}]],
         lambda world, rows: world.train(DataPipeline(rows, world.tokenizer, max_length=32))),
    Rule("texts", "a data set has the column, and text in it", "'text'.* (must be a column of|must be text)",
         {"no column": Dataset.from_dict({"body": ["a"]}), "none": Dataset.from_dict({"text": ["a", None]}),
          "numbers": Dataset.from_dict({"text": [1]}), "lists": Dataset.from_dict({"text": [["a"]]}),
          "iterable": Dataset.from_dict({"body": ["a"]}).to_iterable_dataset(),
          "numbers, iterable": Dataset.from_dict({"text": [1]}).to_iterable_dataset()},
         lambda world, data: world.trainer().train(DataPipeline(data, world.tokenizer, max_length=32), total_steps=1)),
    Rule("texts", "a source has a row", "empty",
         {"list": [], "Dataset": Dataset.from_dict({"text": []}), "stream": lambda: iter(()), "iterator": iter(())},
         lambda world, data: world.trainer().train(DataPipeline(data, world.tokenizer, max_length=32), total_steps=1)),
    Rule("texts", "a source is of a kind that holds rows in an order", "(source|dataset) must|a callable source",
         {"dict": {"text": ["a"]}, "frame": Dataset.from_dict({"text": ["a"]}).to_pandas(), "set": {"a", "b"},
          "bytes": b"text", "number": 3, "argument": lambda x: iter(x),
          "none": None, "object": NoRows(), "data module": MLMDataModule(["a"])},
         lambda world, data: world.train(data)),
    Rule("texts", "a callable returns an iterator", "must return an iterator over rows, got",
         {"number": lambda: 3, "none": lambda: None, "class": NoRows},
         lambda world, data: world.trainer().train(DataPipeline(data, world.tokenizer, max_length=32), total_steps=1)),
    # ---------------------------------------------------------------- files
    Rule("files", "a path names a file", r"(must name an existing file|must match a file)",
         ["no-such-file.txt", "", "*.nothing", "a/b/c.jsonl", "x.txt\x00", "pipe.txt", "dangling.txt", "s" * 5000],
         path(lambda world: (os.mkfifo("pipe.txt"), Path("dangling.txt").symlink_to("nowhere")))),
    Rule("files", "a path is not a folder", r"must name files, got the folder .*\*\.txt", [".", "./", "folder", "~"],
         path(lambda world: Path("folder").mkdir())),
    Rule("files", "a file's suffix is known", r"must end in one of \.txt", ["a.csv", "a.json", "a", "a.txt.bz2", "*"],
         path(lambda world: [world.file(name, "x") for name in ("a.csv", "a.json", "a", "a.txt.bz2")])),
    Rule("files", "a file has a row", "empty", {"nothing": b"", "blank": b"\n \n", "mark": b"\xef\xbb\xbf"},
         file("a.txt")),
    Rule("files", "a .txt file is UTF-8", r"line \d+ of a\.txt must be UTF-8",
         {"latin": "eins\nGröße".encode("latin-1"), "utf-16": "ab".encode("utf-16"), "cut": b"eins\n\xc3",
          "binary": bytes(range(128, 256)), "late": b"the cat\n" * 1500 + b"\xff"}, file("a.txt")),
    Rule("files", "a .jsonl line is an object", r"line \d of a\.jsonl must be (JSON|a JSON object)",
         {"cut": '{"text": "a"}\n\n{"text": \n', "list": '["a"]', "number": "3", "python": "{'text': 'a'}",
          "nested": "[" * 100_000, "two": '{"text": "a"} {"text": "b"}'}, file("a.jsonl")),
    Rule("files", "a .jsonl line has the text", r"line 1 of a\.jsonl",
         {"other": '{"body": "a"}', "number": '{"text": 7}', "null": '{"text": null}', "half": '{"text": "\\ud83d"}',
          "nan": '{"text": NaN}', "ids": '{"input_ids": [1.5]}', "empty": "{}"}, file("a.jsonl")),
    Rule("files", "a .gz file is whole", r"a\.txt\.gz must be a whole compressed file",
         {"cut": gzip.compress(b"eins\n" * 99)[:-9], "plain": b"eins\n", "flipped": gzip.compress(b"eins\n" * 99)[:20]
          + b"\xff" * 20, "head": b"\x1f\x8b"}, file("a.txt.gz")),
    Rule("files", "a .zst file is whole", r"a\.jsonl\.zst must be a whole compressed file",
         {"cut": zstandard.compress(b'{"text": "a"}\n' * 99)[:-4], "plain": b"eins\n", "flipped":
          zstandard.compress(b'{"text": "a"}\n' * 99)[:-9] + b"\xff" * 9}, file("a.jsonl.zst")),
    Rule("files", "a .parquet file is whole", r"a\.parquet must be a whole Parquet file",
         {"text": b"eins\n", "nothing": b"", "head": b"PAR1", "marks": b"PAR1" * 4}, file("a.parquet")),
    Rule("files", "a .parquet file has the text", r"(column of a\.parquet|row \d of a\.parquet must be text)",
         {"no column": {"body": ["a"]}, "none": {"text": ["a", None]}, "numbers": {"text": [1]},
          "lists": {"text": [["a"]]}, "bytes": {"text": [b"a"]}}, parquet),
    # ---------------------------------------------------------------- train and evaluate
    Rule("train", "total_steps is a whole number of at least 1", "total_steps must be an integer of at least 1 or None",
         [0, -1, 1.5, "10", True, NAN], lambda world, value: world.train([ROW], total_steps=value)),
    Rule("train", "total_steps and the Trainer's limits agree", "both end the run; give one",
         [{"max_steps": 5}, {"max_steps": 8}],
         lambda world, value: world.train([ROW], total_steps=7, config={"trainer_kwargs": value})),
    Rule("train", "the warm-up is not longer than the run", "warmup_steps must not exceed the run's 1 updates", [2, 5],
         lambda world, steps: world.train([ROW], config={"warmup_steps": steps})),
    Rule("train", "warm-up and decay fit into the run", "decay_steps and warmup_steps together must not exceed the run",
         [{"decay_steps": 4}, {"decay_steps": 3, "warmup_steps": 1}], lambda world, value: world.train(
             [ROW] * 3, config={"lr_scheduler": "wsd", **value})),
    Rule("train", "muon has hidden matrices", "optimizer='muon' needs hidden matrices", {"vectors alone": BiasStudent},
         lambda world, kind: world.trainer(kind(torch.zeros(27)), optimizer="muon").train([ROW])),
    Rule("train", "on_step takes (global_step, loss)", "on_step must be a function of",
         {"text": "print", "number": 3, "no argument": lambda: None, "one": lambda step: None,
          "three": lambda step, loss, more: None, "keyword": lambda step, loss, *, more: None},
         lambda world, value: world.train([ROW], on_step=value)),
    Rule("train", "a schedule needs the length of the run", "has no length; give total_steps",
         ["cosine", "linear", "wsd"], lambda world, schedule: world.train(
             DataPipeline(lambda: iter(["a"]), max_length=32), config={"lr_scheduler": schedule})),
    Rule("train", "a changing mask share needs the length of the run", "mask_prob_end=.* needs the number of updates",
         [0.1, 0.5], lambda world, share: world.train(
             DataPipeline(lambda: iter(["a"]), max_length=32), config={
                 "lr_scheduler": "constant", "mask_prob_end": share})),
    Rule("train", "an iterator serves one epoch, in one process", "read once .* pass a callable",
         [{"epochs": 2}, {"num_workers": 1}, {"epochs": 3, "num_workers": 2}],
         lambda world, value: world.train(
             DataPipeline(iter(["a"]), max_length=32), config={"lr_scheduler": "constant", **value})),
    Rule("train", "evaluation data can be read again", "pass a callable that returns a new iterator",
         {"in a run": lambda world, data: world.train([ROW], data, config={"eval_every": 1}),
          "at the end": lambda world, data: world.train([ROW], data),
          "alone": lambda world, data: world.trainer().evaluate(data)},
         lambda world, act: act(world, DataPipeline(iter(["a"]), max_length=32))),
    Rule("train", "evaluation data keep the rules of training data", "val data|dataset|source",
         {"id": [torch.tensor([[600]])], "length": [torch.full((1, 65), 6)], "empty": [], "float": [torch.ones(1, 2)],
          "kind": 3, "file": "missing.txt", "label": batch(labels=[[600, 6, 6]])},
         lambda world, data: world.train([ROW], data)),
    Rule("train", "evaluate needs data that keep the rules", "val data|dataset|source",
         {"none": None, "id": [torch.tensor([[600]])], "length": [torch.full((1, 65), 6)], "empty": [],
          "float": [torch.ones(1, 2)], "kind": 3, "file": "missing.txt", "label": batch(labels=[[600, 6, 6]])},
         lambda world, data: world.trainer().evaluate(data)),
    # ---------------------------------------------------------------- checkpoints and exports
    Rule("checkpoints", "a checkpoint exists", "does not exist", ["none", "none.ckpt", "saved/other.ckpt", ".",
         "folder.ckpt"], lambda world, value: (world.checkpoint(), Path("folder.ckpt").mkdir(), resume(
             lambda world, value: value)(world, value))),
    Rule("checkpoints", "a path of a checkpoint is a path", "checkpoint path must be", [None, 3, "", ["a"], b"a"],
         lambda world, value: world.trainer().resume_from_checkpoint(value)),
    Rule("checkpoints", "a checkpoint is whole", "saved.checkpoint.ckpt is (damaged|no checkpoint)",
         {"cut": lambda content: content[: len(content) // 2], "empty": lambda content: b"",
          "text": lambda content: b"hello", "head": lambda content: content[:100],
          "tail": lambda content: content[100:], "zip": lambda content: b"PK\x03\x04" + b"\0" * 30,
          "flipped": lambda content: content[:1000] + b"\xff" * 500 + content[1500:]}, resume(damaged_checkpoint)),
    Rule("checkpoints", "a checkpoint runs no code", "code.ckpt .*nothing in it was run",
         {"pickle": lambda path: path.write_bytes(pickle.dumps(Code())), "saved": lambda path: torch.save(Code(), path),
          "inside": lambda path: torch.save({"state_dict": {}, "extra": Code()}, path)}, resume(pickled)),
    Rule("checkpoints", "a checkpoint is this package's", "was not written by foundry-lightning",
         {"dict": {"state_dict": {}}, "list": [1], "tensor": torch.ones(3), "part": {"foundry_lightning": "x"},
          "none": {"foundry_lightning": None}, "parts": {"foundry_lightning": {}, "state_dict": {}}},
         resume(lambda world, value: pickled(world, lambda path: torch.save(value, path)))),
    Rule("checkpoints", "a checkpoint has this version's format", "has format .*, this version reads 1",
         [{"format": 2}, {"format": 0}, {"format": "1"}, {"format": 10**9}], resume(changed_checkpoint)),
    Rule("checkpoints", "a checkpoint has all its parts", "was not written by foundry-lightning|lacks",
         [{"state_dict": None}, {"format": None}, {"loops": None}, {"global_step": None}, {"module": None},
          {"settings": None}, {"state_dict": [1]}], resume(changed_checkpoint)),
    Rule("checkpoints", "a checkpoint's weights are the student's", "does not fit the student",
         {"none": {"state_dict": {}}, "other": {"state_dict": {"student.bias": torch.ones(3)}},
          "number": {"state_dict": {"student.bias": 3}}, "wide": 32, "deep": 3},
         resume(lambda world, value: world.checkpoint(**value) if isinstance(value, dict) else world.trainer(
             world.student(**{"hidden_size" if value == 32 else "num_hidden_layers": value})).save_checkpoint("w"))),
    Rule("checkpoints", "save_checkpoint can write there", "checkpoint path must",
         [None, 3, "", "folder.ckpt", "file/below", "file/below.ckpt", "file"], writes("save_checkpoint")),
    Rule("checkpoints", "what becomes ONNX is an exported model", "(holds no config.json|model folder must)",
         ["nowhere", "file", ".", None, 3], lambda world, value: export_onnx(value)),
    Rule("checkpoints", "export can write there", "export path", [None, 3, "", "file", "file/below"],
         writes("export")),
    # ---------------------------------------------------------------- students
    Rule("students", "a warm start has a transformers teacher", "teacher must be a transformers PreTrainedModel",
         {"name": "bert", "none": None, "module": torch.nn.Linear(2, 2)},
         lambda world, teacher: warm_start_student(teacher, 1)),
    Rule("students", "num_layers lies between 1 and the teacher's", "num_layers must", [0, -1, 3, 1.5, "1", True, [1]],
         lambda world, value: warm_start_student(tiny_bert(), value)),
    Rule("students", "layers are increasing numbers of the teacher's layers", "layers must",
         [[], [2], [-1], [1, 0], [0, 0], ["a"], [0.5], 1, "01", [None], [True]],
         lambda world, value: warm_start_student(tiny_bert(), layers=value)),
    Rule("students", "num_layers or layers is given", "give num_layers or layers, and not both",
         [{}, {"num_layers": 1, "layers": [0]}], lambda world, value: warm_start_student(tiny_bert(), **value)),
    Rule("students", "student_type is the teacher's, or distilbert for BERT", "student_type must be",
         ["roberta", "", 3], lambda world, value: warm_start_student(tiny_bert(), 1, student_type=value)),
    Rule("students", "WithMLMHead takes a module", "encoder must be", ["bert", None, 3, torch.nn.Linear],
         lambda world, value: WithMLMHead(value, 8, 27)),
    Rule("students", "WithMLMHead knows its sizes", "(hidden_size|vocab_size) must be",
         [{}, {"hidden_size": 0}, {"hidden_size": -8}, {"hidden_size": "8"}, {"hidden_size": 8.0},
          {"hidden_size": 8, "vocab_size": 0}, {"hidden_size": 8, "vocab_size": "27"},
          {"hidden_size": 8, "vocab_size": 1.5}], lambda world, value: WithMLMHead(Body(), **value)),
    Rule("students", "WithMLMHead ties weights of one shape", "tie_weights needs an input embedding of shape",
         [{"vocab_size": 9}, {"hidden_size": 16}],
         lambda world, value: WithMLMHead(Body(), **{"hidden_size": 8, **value}, tie_weights=True)),
    Rule("students", "WithMLMHead's width is the encoder's", "hidden_size", [4, 16],
         lambda world, width: WithMLMHead(Body(), width)(ROW)),
    Rule("students", "WithMLMHead's encoder returns hidden states", "the encoder must return hidden states",
         {"text": "states", "2-D": torch.ones(2, 3), "tuple": ("a",), "none": 3, "nothing": ()},
         lambda world, result: WithMLMHead(Body(result=result), 8)(ROW)),
    Rule("students", "a recipe's settings are known", "(model_type|config|pad_vocab|torch_dtype)",
         {"type": lambda: FromConfig("bret").build(), "none": lambda: FromConfig(None).build(),
          "decoder": lambda: FromConfig("gpt2").build(), "setting": lambda: FromConfig("bert", {"hidden": 3}).build(),
          "value": lambda: FromConfig("bert", {"hidden_size": "wide"}).build(),
          "heads": lambda: FromConfig("bert", {"hidden_size": 10, "num_attention_heads": 3}).build(),
          "list": lambda: FromConfig("bert", [1]).build(), "multiple": lambda: FromConfig(pad_vocab_to_multiple_of=0),
          "multiple text": lambda: FromConfig(pad_vocab_to_multiple_of="8"),
          "dtype": lambda: FromPretrained("folder", "int8")}, lambda world, act: act()),
    Rule("students", "a recipe's folder exists and holds a model", "path .*(is not a folder|holds no config|be loaded)",
         {"missing": lambda: FromPretrained("./nowhere").build(), "empty": lambda: FromPretrained(".").build(),
          "warm": lambda: WarmStart("./nowhere", 1).build()}, lambda world, act: act()),
    # ---------------------------------------------------------------- the report
    Rule("report", "a run is a folder with metrics", "run .*(does not exist|is a file|holds no metrics.csv)",
         {"missing": {}, "file": {"runs/mlm": "step\n1\n"}, "no metrics": {"runs/mlm/config.yaml": ""},
          "none has begun": {"runs/mlm/1/config.yaml": "", "runs/mlm/2/config.yaml": ""}},
         report_on),
    Rule("report", "metrics have steps and values", "(no column 'step'|has logged no step yet)",
         {"no step": {"runs/mlm/metrics.csv": "epoch,loss\n1,2\n"}, "binary": {"runs/mlm/metrics.csv": "\0\1\n"},
          "empty": {"runs/mlm/metrics.csv": ""}, "header": {"runs/mlm/metrics.csv": "step,train/loss\n"},
          "cut": {"runs/mlm/metrics.csv": "step,train/loss\n1,"}}, report_on),
    Rule("report", "a run is named once, and there is one", "(is named twice|needs at least one run)",
         {"none": [], "twice": ["runs/mlm", "runs/mlm/1"], "other spelling": ["runs/mlm/1", "runs/../runs/mlm/1/"]},
         lambda world, runs: report_on(world, {"runs/mlm/1/metrics.csv": "step,train/loss\n1,2\n"}, runs)),
    Rule("report", "what is written has a place", "(out|png) must",
         {"folder": lambda: write_report(["runs"], out="."), "empty": lambda: write_report(["runs"], out=""),
          "number": lambda: write_report(["runs"], out=3), "png number": lambda: write_report(["runs"], png=3)},
         lambda world, act: act()),
    # ---------------------------------------------------------------- YAML
    Rule("yaml", "the config exists", "config .* (does not exist|must be)", ["missing.yaml", ".", "", None, 3],
         lambda world, value: from_yaml(value)),
    Rule("yaml", "the config is YAML of known settings", "config run.yaml",
         {"broken": "model: [", "list": "- 1", "text": "hello", "tabs": "model:\n\tclass_path: x",
          "value": YAML % (1.5, 8, "max_steps"), "type": YAML % ("much", 8, "max_steps"),
          "data": YAML % (0.15, 0, "max_steps"), "key": YAML % (0.15, 8, "max_stepz"),
          "class": (YAML % (0.15, 8, "max_steps")).replace("MLMLitModule", "MLMModule"),
          "binary": b"\x00\xff", "empty": ""}, yaml_file),
]

# fmt: on

CASES = [(rule, name, value) for rule in RULES for name, value in rule.cases()]


def test_the_table_has_many_rules_and_cases():
    assert len({(rule.area, rule.says) for rule in RULES}) == len(RULES) >= 40
    assert len(CASES) + sum(len(values) for _, values in BROKEN) >= 300


@pytest.mark.parametrize(
    ("rule", "value"), [pytest.param(r, value, id=f"{r.area}: {r.says} [{name}]") for r, name, value in CASES]
)
def test_bad_input_is_refused_in_a_sentence_of_ours_and_nothing_changes(tokenizer, tmp_path, rule, value):
    world = World(tokenizer, tmp_path)
    world.note_files()
    with pytest.raises((ValueError, TypeError, FileNotFoundError), match=rule.message) as error:
        rule.act(world, value)
    raised_in = Path(traceback.extract_tb(error.value.__traceback__)[-1].filename)
    assert PACKAGE in raised_in.parents, f"raised in {raised_in}"
    world.assert_unchanged()


@pytest.mark.parametrize(
    ("make", "parts"),
    [
        (lambda world: MLMConfig(mask_prob=2, epochs=0, devices=0), ("mask_prob", "epochs", "devices")),
        (
            lambda world: world.trainer(world.student(20), mask_token_id=7, vocab_size=500),
            ("mask_token_id", "vocab_size", "the student embeds 20"),
        ),
        (
            lambda world: world.trainer(mask_token_id=7, vocab_size=500, device=NOT_THERE),
            ("mask_token_id", "vocab_size", f"device='{NOT_THERE}'"),
        ),
        (
            lambda world: world.trainer(mask_token_id=7, device=NOT_THERE),
            ("mask_token_id", f"device='{NOT_THERE}'"),
        ),
        (
            lambda world: world.train([torch.full((1, 65), 6)], [torch.full((1, 70), 6)]),
            ("max_length of the train data is 65", "max_length of the val data is 70"),
        ),
        (
            lambda world: DistilMLMTrainer(
                WithMLMHead(world.student().base_model),
                world.student(20),
                world.tokenizer,
                DistilMLMConfig(mask_token_id=7, gradient_checkpointing=True, **{**QUIET, "device": NOT_THERE}),
            ),
            ("mask_token_id", "the teacher scores 20 ids", "gradient_checkpointing", f"device='{NOT_THERE}'"),
        ),
        (
            lambda world: DistilMLMTrainer(
                world.student(max_position_embeddings=8),
                world.student(max_position_embeddings=16),
                world.tokenizer,
                DistilMLMConfig(pad_token_id=0, **QUIET),
            ).train(DataPipeline(["the cat"], max_length=32, pad_token_id=9), iter(["the cat"])),
            (
                "pad_token_id must be the tokenizer's",
                "train data is 32, the student has 8 positions",
                "val data is 512, the student has 8 positions",
                "validation source can be iterated once only",
                "train data is 32, the teacher has 16 positions",
                "val data is 512, the teacher has 16 positions",
            ),
        ),
        (
            lambda world: world.train(
                DataPipeline(lambda: iter(["the cat"]), max_length=32), config={"mask_prob_end": 0.1}
            ),
            ("lr_scheduler='cosine' needs the number of updates", "mask_prob_end=0.1 needs the number of updates"),
        ),
        (
            lambda world: DataPipeline(["a"], batch_size=0, max_length=0, mode="lm", long_rows="drop"),
            ("batch_size", "max_length", "mode", "long_rows"),
        ),
    ],
)
def test_problems_that_show_together_come_in_one_message(tokenizer, tmp_path, make, parts):
    with pytest.raises(ValueError, match=f"{len(parts)} problems") as error:
        make(World(tokenizer, tmp_path))
    assert all(part in str(error.value) for part in parts)


def test_a_refused_run_can_be_put_right_and_tried_again(tokenizer, tmp_path):
    made = World(tokenizer, tmp_path).trainer(save_dir="run", save_every=1)
    with pytest.raises(ValueError, match="token id 600"):
        made.train([torch.tensor([[600]])])
    assert len(made.train([ROW, ROW])["losses"]) == 2
    assert (tmp_path / "run" / "checkpoint.ckpt").exists()


# ------------------------------------------------------------------ what looks odd and is fine


def test_agreeing_ids_and_pad_zero_are_fine(tokenizer, tmp_path):
    World(tokenizer, tmp_path).trainer(mask_token_id=4, pad_token_id=0, vocab_size=len(tokenizer))


def test_rows_as_long_as_robertas_positions_train(tokenizer, tmp_path):
    world = World(tokenizer, tmp_path)
    data = DataPipeline([" ".join(["cat"] * 60)], tokenizer, max_length=32)
    assert np.isfinite(world.trainer(roberta(world, 32)).train(data)["losses"]).all()


@pytest.mark.parametrize(
    "entries",
    [
        {"input_ids": [[5, 6, 7], [0, 0, 0]], "attention_mask": [[True, True, True], [False, False, False]]},
        {"input_ids": [[5, 6, 7], [8, 9, 10]], "attention_mask": [[0, 0, 0], [0, 0, 0]]},
        {"input_ids": [[5, 6, 7]], "labels": [[-100, -100, -100]]},
        {"input_ids": np.array([[2, 3, 0]], dtype=np.uint8)},
    ],
)
def test_rows_of_padding_only_and_batches_without_a_label_give_finite_losses(tokenizer, tmp_path, entries):
    made = World(tokenizer, tmp_path).trainer(max_grad_norm=0.0)
    assert np.isfinite(made.train([entries, ROW])["losses"]).all()
    assert all(torch.isfinite(p).all() for p in made.student.parameters())


def test_an_empty_text_is_a_row_and_a_text_of_unknown_words_trains(tokenizer, tmp_path):
    made = World(tokenizer, tmp_path).trainer()
    losses = made.train(DataPipeline(["", "xyzzy", "the cat"], tokenizer, batch_size=1, max_length=32))["losses"]
    assert len(losses) == 3
    assert np.isfinite(losses).all()


def test_group_by_length_keeps_every_row_once_and_pads_less(tokenizer):
    def pads(grouped: bool) -> tuple[int, list]:
        pipe = DataPipeline(texts(300, high=30), tokenizer, batch_size=8, max_length=64, group_by_length=grouped)
        order = pipe.order(seed=1, epoch=0, shuffle=True)
        batches = [pipe.batch(k, order) for k in range(pipe.num_batches())]
        rows = sorted(torch.cat([b["row_ids"] for b in batches]).tolist())
        return sum(int((b["attention_mask"] == 0).sum()) for b in batches), rows

    plain, grouped = pads(False), pads(True)
    assert plain[1] == grouped[1] == list(range(300))
    assert grouped[0] < plain[0] / 2
