from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest

from foundry_lightning import DistilMLMConfig, EncoderDistillConfig, MLMConfig
from foundry_lightning.config import config_from

DOCUMENTED = {
    "mask_prob": 0.15,
    "mask_token_id": None,
    "pad_token_id": 0,
    "vocab_size": None,
    "learning_rate": 1e-4,
    "epochs": 1,
    "weight_decay": 0.01,
    "max_grad_norm": 1.0,
    "device": "auto",
    "grad_accumulation_steps": 1,
    "torch_dtype": "float32",
    "lr_scheduler": "cosine",
    "warmup_steps": 0,
    "eval_every": 0,
    "save_every": 0,
    "save_dir": "",
    "log_every": 50,
    "log_backend": "none",
    "seed": 42,
}


def test_the_documented_fields_come_first_in_order_with_their_defaults():
    names = [f.name for f in fields(MLMConfig) if not f.kw_only]
    assert names == list(DOCUMENTED)
    config = MLMConfig()
    assert {name: getattr(config, name) for name in names} == DOCUMENTED


def test_distillation_has_the_same_fields_and_its_own():
    config = DistilMLMConfig()
    expected = {**DOCUMENTED, "learning_rate": 5e-5}
    assert {name: getattr(config, name) for name in expected} == expected
    own = ("mlm_weight", "distill_weight", "cosine_weight", "temperature")
    assert [getattr(config, name) for name in own] == [2.0, 5.0, 1.0, 2.0]


def test_encoder_distillation_has_the_training_fields():
    config = EncoderDistillConfig(loss="cosine")
    assert (config.learning_rate, config.loss, config.epochs) == (5e-5, "cosine", 1)
    assert not hasattr(config, "mask_prob")


def test_learning_rate_zero_and_seed_zero_are_legal():
    config = MLMConfig(learning_rate=0.0, seed=0, max_grad_norm=0, weight_decay=0)
    assert (config.learning_rate, config.seed) == (0.0, 0)


def test_numpys_numbers_are_taken_and_kept_as_pythons():
    whole = {"epochs": 2, "seed": 3, "warmup_steps": 4, "vocab_size": 30, "mask_token_id": 4, "devices": 1}
    parts = {"learning_rate": 0.5, "mask_prob": 0.25, "temperature": 2.0, "max_grad_norm": 0.0}
    given = {name: np.int64(value) for name, value in whole.items()}
    given |= {
        name: kind(value) for (name, value), kind in zip(parts.items(), (np.float32, np.float64) * 2, strict=True)
    }
    config = DistilMLMConfig(**given, special_token_ids=(np.int32(7),))
    for name, value in {**whole, **parts, "special_token_ids": (7,)}.items():
        assert getattr(config, name) == value, name
        assert type(getattr(config, name)) is type(value), name
    assert type(config.special_token_ids[0]) is int
    assert type(EncoderDistillConfig(log_every=np.int64(5)).log_every) is int
    with pytest.raises(ValueError, match=r"epochs must be an integer of at least 1, got 2\.5"):
        DistilMLMConfig(epochs=np.float32(2.5))


BROKEN = [
    ("mask_prob", [0.0, 1.5, -0.1, float("nan"), "0.15", None, True]),
    ("mask_prob_end", [0.0, 1.5, float("nan"), "0.15", True]),
    ("mask_token_id", [-1, 1.5, "4"]),
    ("pad_token_id", [-1, None, 0.5]),
    ("vocab_size", [0, 1, -5, 2.5]),
    ("learning_rate", [-1e-4, float("inf"), "1e-4", None]),
    ("epochs", [0, -1, 1.5, None]),
    ("weight_decay", [-0.1, float("nan"), "0"]),
    ("max_grad_norm", [-1.0, float("inf"), None]),
    ("device", ["gpu", "tpu", "cuda:0", None, 0]),
    ("grad_accumulation_steps", [0, -1, 2.0, None]),
    ("torch_dtype", ["fp16", "half", "float64", None]),
    ("lr_scheduler", ["step", "COSINE", None]),
    ("warmup_steps", [-1, 0.1, None]),
    ("decay_steps", [-1, 0.1, None, 5]),
    ("eval_every", [-1, 0.5, None]),
    ("save_every", [-1, 0.5, None]),
    ("save_dir", [None, 3]),
    ("log_every", [0, -1, None]),
    ("log_backend", ["mlflow", "", None]),
    ("seed", [-1, 0.5, None, True]),
    ("special_token_ids", [(-1,), ("a",), 3, (1.5,)]),
    ("masking", ["words", None]),
    ("mask_replace_prob", [-0.1, 1.1, None]),
    ("random_replace_prob", [-0.1, 1.1, None]),
    ("num_workers", [-1, 1.5]),
    ("num_nodes", [0, -1]),
    ("strategy", [None, 1]),
    ("progress_bar", [1, None]),
    ("gradient_checkpointing", [1, "yes"]),
    ("compile", [1, "yes", None]),
    ("optimizer", ["sgd", None, 1]),
    ("trainer_kwargs", [None, [("a", 1)]]),
]


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in BROKEN for value in values])
def test_a_broken_field_is_named_with_the_value_it_got(name, value):
    with pytest.raises(ValueError, match=rf"MLMConfig: (.|\n)*{name} must .*") as error:
        MLMConfig(**{name: value})
    assert repr(value) in str(error.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [("mlm_weight", -1), ("distill_weight", "5"), ("cosine_weight", float("inf")), ("temperature", 0)]
    + [("temperature", -2.0), ("distill_on", "some"), ("teacher_dtype", "int8"), ("teacher_compile", 1)],
)
def test_a_broken_field_of_distillation_is_named(name, value):
    with pytest.raises(ValueError, match=f"DistilMLMConfig: {name} must "):
        DistilMLMConfig(**{name: value})


def test_distillation_with_all_weights_zero_is_refused():
    with pytest.raises(ValueError, match="are all 0; nothing would be learned"):
        DistilMLMConfig(mlm_weight=0, distill_weight=0, cosine_weight=0)


def test_an_unknown_distance_is_refused():
    with pytest.raises(ValueError, match="loss must be one of 'mse', 'cosine', got 'l1'"):
        EncoderDistillConfig(loss="l1")


def test_all_problems_come_in_one_message():
    with pytest.raises(ValueError, match="3 problems") as error:
        MLMConfig(mask_prob=2, epochs=0, torch_dtype="half")
    assert all(name in str(error.value) for name in ("mask_prob", "epochs", "torch_dtype"))


def test_the_split_of_replacements_must_not_exceed_one():
    with pytest.raises(ValueError, match=r"must not exceed 1, got 0.9 \+ 0.2"):
        MLMConfig(mask_replace_prob=0.9, random_replace_prob=0.2)


def test_saving_needs_a_folder():
    with pytest.raises(ValueError, match="save_every=10 needs a place to write to; set save_dir"):
        MLMConfig(save_every=10)


def test_a_config_may_be_a_dict_and_an_unknown_field_is_refused():
    assert config_from({"mask_prob": 0.3}, MLMConfig).mask_prob == 0.3
    assert config_from(None, MLMConfig) == MLMConfig()
    with pytest.raises(ValueError, match="MLMConfig has no field 'mask_probability'; its fields are: mask_prob"):
        config_from({"mask_probability": 0.3}, MLMConfig)
    with pytest.raises(TypeError, match="config must be a MLMConfig, a dict of its fields or None, got list"):
        config_from([], MLMConfig)


def test_a_config_changed_after_it_was_made_is_checked_again():
    config = MLMConfig()
    config.mask_prob = 7
    with pytest.raises(ValueError, match="mask_prob must lie in"):
        config_from(config, MLMConfig)
