"""What student, tokenizer, config and data show together: one clear error before the first update."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from transformers import RobertaConfig, RobertaForMaskedLM

from foundry_lightning import DataPipeline, MLMConfig, MLMTrainer
from tests.conftest import BiasStudent, texts, tiny_bert

QUIET = {"progress_bar": False, "device": "cpu"}


def trainer(tokenizer, student=None, **config) -> MLMTrainer:
    return MLMTrainer(student or tiny_bert(len(tokenizer)), tokenizer, MLMConfig(**QUIET, **config))


def with_tokens(tokenizer, **tokens):
    import copy

    changed = copy.deepcopy(tokenizer)
    for name, value in tokens.items():
        setattr(changed, name, value)
    return changed


def test_a_tokenizer_without_a_mask_token_is_refused(tokenizer):
    with pytest.raises(ValueError, match="mask token"):
        trainer(with_tokens(tokenizer, mask_token=None))


def test_a_mask_token_equal_to_the_unknown_token_is_refused(tokenizer):
    with pytest.raises(ValueError, match="unknown"):
        trainer(with_tokens(tokenizer, mask_token="[UNK]"))


def test_a_tokenizer_larger_than_the_embedding_is_refused_with_both_numbers(tokenizer):
    with pytest.raises(ValueError, match=rf"the tokenizer has {len(tokenizer)} ids, the student embeds 20"):
        trainer(tokenizer, tiny_bert(20))


@pytest.mark.parametrize(
    ("field", "value", "own"), [("mask_token_id", 7, 4), ("pad_token_id", 3, 0), ("vocab_size", 500, None)]
)
def test_an_explicit_id_that_disagrees_with_the_tokenizer_is_refused_with_both(tokenizer, field, value, own):
    own = len(tokenizer) if own is None else own
    with pytest.raises(ValueError, match=f"{field} must be the tokenizer's, got {value} and the tokenizer has {own}"):
        trainer(tokenizer, **{field: value})


def test_agreeing_ids_and_pad_zero_are_fine(tokenizer):
    trainer(tokenizer, mask_token_id=4, pad_token_id=0, vocab_size=len(tokenizer))


def test_several_problems_come_in_one_message(tokenizer):
    with pytest.raises(ValueError, match="3 problems") as error:
        trainer(tokenizer, tiny_bert(20), mask_token_id=7, vocab_size=500)
    for part in ("mask_token_id", "vocab_size", "the student embeds 20"):
        assert part in str(error.value)


def test_without_a_tokenizer_the_mask_token_id_is_required_and_named():
    with pytest.raises(ValueError, match="mask_token_id must be given without a tokenizer"):
        MLMTrainer(tiny_bert(), config=MLMConfig(**QUIET))


def test_without_embeddings_to_ask_the_vocab_size_is_required_and_named():
    with pytest.raises(ValueError, match="vocab_size must be given without a tokenizer"):
        MLMTrainer(BiasStudent(torch.zeros(8)), config=MLMConfig(mask_token_id=4, **QUIET))


@pytest.mark.parametrize("student", [None, "bert", 3, dict, torch.nn.Module])
def test_a_student_that_is_no_module_is_refused(tokenizer, student):
    with pytest.raises(TypeError, match=r"student must be a torch.nn.Module or a recipe"):
        MLMTrainer(student, tokenizer)


def test_a_folder_without_a_tokenizer_is_refused(tmp_path):
    with pytest.raises((ValueError, FileNotFoundError), match="nowhere"):
        MLMTrainer(tiny_bert(), str(tmp_path / "nowhere"))


def test_rows_longer_than_the_positions_are_refused_before_a_step(tokenizer):
    with pytest.raises(ValueError, match=r"max_length of the train data is 512, the student has 64 positions"):
        trainer(tokenizer).train(DataPipeline(texts(4), tokenizer))


def test_robertas_offset_of_two_positions_is_counted(tokenizer):
    config = RobertaConfig(
        vocab_size=len(tokenizer), hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
    )
    config.max_position_embeddings = 34
    student = RobertaForMaskedLM(config)
    with pytest.raises(ValueError, match="is 33, the student has 32 positions; set max_length=32"):
        trainer(tokenizer, student).train(DataPipeline(texts(4), tokenizer, max_length=33))
    trainer(tokenizer, student).train(DataPipeline([" ".join(["cat"] * 60)], tokenizer, max_length=32))


def test_a_pipeline_with_another_tokenizer_is_refused(tokenizer):
    from foundry_lightning.tokenizer import train_tokenizer

    other = train_tokenizer(texts(20), vocab_size=60, min_frequency=1)
    with pytest.raises(ValueError, match=r"DataPipeline.tokenizer must be the trainer's tokenizer"):
        trainer(tokenizer).train(DataPipeline(texts(4), other, max_length=32))


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        ([], "empty"),
        ([""] * 0, "empty"),
        ([{"input_ids": torch.zeros(2, 3)}], "must hold integers"),
        ([torch.zeros(2, 2, 2, dtype=torch.long)], r"shape \(B, S\) or \(S,\)"),
        ([np.zeros((0, 4), dtype=np.int64)], r"shape \(B, S\) or \(S,\)"),
        ([{"input_ids": [[1, 2], [3]]}], "rectangular"),
        ([{"input_ids": torch.tensor([[2, 6, 3]]), "attention_mask": torch.ones(1, 2, dtype=torch.long)}], "shape of"),
        ([{"ids": torch.tensor([[2, 6, 3]])}], "text"),
        ([torch.tensor([[2, -6, 3]])], "negative"),
        ([torch.tensor([[2, 600, 3]])], "token id 600, the student embeds ids below 27"),
        ([torch.full((1, 65), 6)], "max_length of the train data is 65, the student has 64 positions"),
        ([1, 2, 3], ""),
        ([None], ""),
        ([{"body": "text"}], "body"),
        (["text", 3], "row 1 must be text, got int"),
        (b"bytes", ""),
        (7, ""),
        ("no-such-file.txt", "no-such-file.txt"),
        (r"*.nothing", "nothing"),
    ],
)
def test_bad_data_is_refused_before_an_update_and_nothing_changes(tokenizer, tmp_path, dataset, message):
    made = trainer(tokenizer, save_dir=str(tmp_path / "run"), save_every=1)
    before = [p.detach().clone() for p in made.student.parameters()]
    with pytest.raises((ValueError, TypeError, FileNotFoundError)) as error:
        made.train(dataset)
    assert re.search(message, str(error.value))
    assert all(torch.equal(a, b) for a, b in zip(before, made.student.parameters(), strict=True))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("total_steps", [0, -1, 1.5, "10", True])
def test_a_bad_number_of_steps_is_refused(tokenizer, total_steps):
    with pytest.raises(ValueError, match="total_steps must be an integer of at least 1 or None"):
        trainer(tokenizer).train([torch.tensor([[2, 6, 3]])], total_steps=total_steps)


def test_contradictory_step_limits_are_refused(tokenizer):
    made = trainer(tokenizer, trainer_kwargs={"max_steps": 5})
    with pytest.raises(ValueError, match=r"total_steps=7 and trainer_kwargs\['max_steps'\]=5 both end the run"):
        made.train([torch.tensor([[2, 6, 3]])], total_steps=7)


def test_a_warm_up_longer_than_the_run_is_refused(tokenizer):
    with pytest.raises(ValueError, match="warmup_steps must not exceed the run's 1 updates, got 5"):
        trainer(tokenizer, warmup_steps=5).train([torch.tensor([[2, 6, 3]])])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"batch_size": 0}, "batch_size must be an integer of at least 1, got 0"),
        ({"batch_size": 2.5}, "batch_size"),
        ({"max_length": 0}, "max_length"),
        ({"max_length": None}, "max_length"),
        ({"shuffle_buffer": -1}, "shuffle_buffer"),
        ({"mode": "lm"}, "mode must be 'embed'"),
        ({"mode": "contrastive"}, "mode must be 'embed'"),
        ({"long_rows": "drop"}, "long_rows must be 'truncate' or 'split'"),
        ({"split_txt": "page"}, "split_txt"),
        ({"group_by_length": True, "source": lambda: iter(["a"])}, "group_by_length"),
    ],
)
def test_a_bad_setting_of_the_pipeline_is_refused(tokenizer, settings, message):
    settings = {"source": ["the cat"], **settings}
    with pytest.raises(ValueError, match=message):
        DataPipeline(tokenizer=tokenizer, **settings)


def test_a_stream_has_no_length_and_says_what_to_do(tokenizer):
    with pytest.raises(TypeError, match="give total_steps"):
        len(DataPipeline(lambda: iter(texts(3)), tokenizer))


def test_a_text_source_without_any_tokenizer_is_refused():
    made = MLMTrainer(tiny_bert(), config=MLMConfig(mask_token_id=4, **QUIET))
    with pytest.raises(ValueError, match="tokenizer must be given"):
        made.train(DataPipeline(["the cat"], max_length=32))


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
