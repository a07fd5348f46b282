"""What a `DataPipeline` takes from its tokenizer and its trainer, and the batches that come of it."""

from __future__ import annotations

import pytest
import torch
from transformers import BertJapaneseTokenizer

from foundry_lightning import DataPipeline, MLMConfig, MLMTrainer
from foundry_lightning.tokenizer import tokenizer_fingerprint
from tests.conftest import texts, tiny_bert

QUIET = {"device": "cpu", "progress_bar": False}


def slow(folder, *, lower: bool) -> BertJapaneseTokenizer:
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "cat", "Cat", "dog", "Dog"]
    (folder / "vocab.txt").write_text("\n".join(words))
    settings = {"word_tokenizer_type": "basic", "subword_tokenizer_type": "wordpiece"}
    return BertJapaneseTokenizer(str(folder / "vocab.txt"), do_lower_case=lower, **settings)


def test_rows_of_a_tokenizer_with_other_rules_are_not_taken_from_the_cache(tmp_path):
    cased, lower = slow(tmp_path, lower=False), slow(tmp_path, lower=True)
    assert tokenizer_fingerprint(cased) != tokenizer_fingerprint(lower)
    assert tokenizer_fingerprint(cased) == tokenizer_fingerprint(slow(tmp_path, lower=False))
    (tmp_path / "x.txt").write_text("Cat dog\n")
    rows = [next(iter(DataPipeline(tmp_path / "x.txt", t)))["input_ids"][0].tolist()[:4] for t in (cased, lower)]
    assert rows == [[2, 6, 7, 3], [2, 5, 7, 3]]


def test_the_tokenizers_own_side_is_cut(tokenizer):
    text = "the cat sat on the mat"
    expected = {}
    for side in ("right", "left"):
        tokenizer.truncation_side = side
        expected[side] = tokenizer(text, truncation=True, max_length=4)["input_ids"]
        rows = next(iter(DataPipeline([text], tokenizer, max_length=4)))["input_ids"]
        assert rows.tolist() == [expected[side]]
    assert expected["left"] != expected["right"]
    left = tokenizer_fingerprint(tokenizer)
    tokenizer.truncation_side = "right"
    assert tokenizer_fingerprint(tokenizer) != left


def test_no_batch_is_wider_than_max_length_not_even_an_empty_one():
    rows = DataPipeline([[], []], max_length=4)
    assert next(iter(rows))["input_ids"].shape == (2, 4)


def test_a_padding_id_other_than_the_tokenizers_is_refused_with_both(tokenizer):
    with pytest.raises(ValueError, match=r"pad_token_id must be the tokenizer's, 0, got 9; leave it out"):
        DataPipeline(texts(2), tokenizer, pad_token_id=9)
    with pytest.raises(ValueError, match=r"pad_token_id must be the tokenizer's, 0, got 9; leave it out"):
        MLMTrainer(tiny_bert(len(tokenizer)), tokenizer, MLMConfig(**QUIET)).train(
            DataPipeline(texts(2), pad_token_id=9)
        )


def test_a_pipeline_without_a_tokenizer_takes_that_of_each_trainer(tokenizer, tmp_path):
    import copy

    other = copy.deepcopy(tokenizer)
    other.add_tokens(["zebra"])
    pipe = DataPipeline(["the zebra"] * 4, batch_size=4, max_length=16)
    seen = []
    for own in (tokenizer, other):
        MLMTrainer(tiny_bert(len(own)), own, MLMConfig(**QUIET)).train(pipe, total_steps=1)
        seen.append(pipe.batch(0, pipe.order(seed=0, epoch=0, shuffle=False))["input_ids"][0].tolist())
    assert [len(tokenizer), len(other)] == [seen[1][2], seen[1][2] + 1]
    assert seen[0][2] == tokenizer.unk_token_id


def test_ready_batches_keep_token_types_for_a_model_that_takes_them(tokenizer):
    losses = []
    for kind in (0, 1):
        batch = {"input_ids": torch.tensor([[5, 6, 7, 8]]), "token_type_ids": torch.full((1, 4), kind)}
        trainer = MLMTrainer(tiny_bert(len(tokenizer), dropout=0.0), tokenizer, MLMConfig(**QUIET, mask_prob=0.5))
        losses.append(trainer.train([batch], total_steps=1)["losses"])
    assert losses[0] != losses[1]
