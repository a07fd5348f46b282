"""What data, tokenizer, trainer and module take from each other, and what is refused where they disagree."""

from __future__ import annotations

import lightning
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models
from torch.utils.data import DataLoader
from transformers import BertJapaneseTokenizer, PreTrainedTokenizerFast

from foundry_lightning import (
    DataPipeline,
    DistilMLMConfig,
    DistilMLMTrainer,
    EncoderDistillConfig,
    EncoderDistillTrainer,
    MLMConfig,
    MLMDataModule,
    MLMLitModule,
    MLMTrainer,
    WithMLMHead,
    mask_tokens,
)
from foundry_lightning.tokenizer import tokenizer_fingerprint
from foundry_lightning.trainers import _to_device, build_trainer
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


def test_numpys_numbers_are_taken_everywhere_and_a_checkpoint_with_them_can_be_read(tokenizer, tmp_path):
    size = np.int64(len(tokenizer))
    student = WithMLMHead(tiny_bert(len(tokenizer)).base_model, hidden_size=np.int64(16), vocab_size=size)
    config = MLMConfig(**QUIET, trainer_kwargs={"max_steps": np.int64(2)})
    trainer = MLMTrainer(student, tokenizer, config)
    numbers = {"batch_size": np.int64(2), "max_length": np.int32(16), "shuffle_buffer": np.uint8(0)}
    trainer.train(DataPipeline(texts(6), seed=np.int64(1), **numbers))
    MLMTrainer(student, tokenizer, config).resume_from_checkpoint(trainer.save_checkpoint(tmp_path))
    assert MLMDataModule(texts(2), num_workers=np.int64(0), seed=np.int64(3)).seed == 3
    ids = torch.tensor([[5, 6, 7, 8]])
    settings = {"seed": 0, "epoch": 0, "mask_token_id": 4, "vocab_size": 27}
    as_numpy = {name: np.int64(value) for name, value in settings.items()}
    masked = [
        mask_tokens(ids, row_ids=[0], special_token_ids=(), mask_prob=share, **given)
        for share, given in ((0.5, settings), (np.float64(0.5), as_numpy))
    ]
    assert torch.equal(masked[0].input_ids, masked[1].input_ids)


def test_a_process_that_forks_the_ranks_leaves_the_module_on_the_host(tokenizer, monkeypatch):
    module = MLMLitModule(tiny_bert(len(tokenizer)), config=MLMConfig(**QUIET), tokenizer=tokenizer)
    moved = []
    monkeypatch.setattr(module, "to", moved.append)
    for strategy in ("ddp_fork", "ddp"):
        config = MLMConfig(**QUIET, devices=2, strategy=strategy)
        _to_device(module, build_trainer(config, callbacks=[], total_steps=None, logger=False))
    assert moved == [torch.device("cpu")]  # with ddp this process is a rank itself


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


def test_a_tokenizer_in_the_pipeline_alone_is_the_modules_or_refused(tokenizer):
    """The trainer decided without it which ids are special."""
    pipe = DataPipeline(texts(8), tokenizer, max_length=16)
    trainer = MLMTrainer(tiny_bert(len(tokenizer)), None, MLMConfig(**QUIET, mask_token_id=tokenizer.mask_token_id))
    with pytest.raises(ValueError, match="got it in the pipeline alone; give it to the trainer"):
        trainer.train(pipe, total_steps=1)
    module = MLMLitModule(tiny_bert(len(tokenizer)), config=MLMConfig())
    plain = lightning.Trainer(
        accelerator="cpu", max_steps=1, logger=False, enable_checkpointing=False, enable_progress_bar=False
    )
    plain.fit(module, datamodule=MLMDataModule(pipe))
    assert set(module.masking.special_token_ids) == set(tokenizer.all_special_ids)


def test_whole_words_need_a_tokenizer_that_knows_words():
    letters = {token: n for n, token in enumerate(["[PAD]", "[UNK]", "[MASK]", *"abcdefgh"])}
    engine = Tokenizer(models.BPE(letters, [], unk_token="[UNK]"))  # no pre-tokenizer: a text is one word
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=engine, unk_token="[UNK]", pad_token="[PAD]", mask_token="[MASK]"
    )
    assert set(tokenizer("abc def")["input_ids"]) > {3, 4, 5}
    with pytest.raises(ValueError, match="masking='whole_word' needs a tokenizer that knows words"):
        MLMTrainer(tiny_bert(len(letters)), tokenizer, MLMConfig(**QUIET, masking="whole_word"))


def test_every_id_of_a_list_in_the_students_config_is_special():
    student = tiny_bert(30)
    student.config.eos_token_id, student.config.cls_token_id = [7, 8], 2
    trainer = MLMTrainer(student, None, MLMConfig(**QUIET, mask_token_id=4))
    assert trainer.module.masking.special_token_ids == (0, 2, 4, 7, 8)


@pytest.mark.parametrize("distill_on", ["masked", "all"])
def test_a_label_without_attention_is_refused_where_such_places_are_not_scored(distill_on):
    batch = {"input_ids": [[5, 6, 9, 9]], "attention_mask": [[1, 1, 0, 0]], "labels": [[5, -100, 6, -100]]}
    config = DistilMLMConfig(**QUIET, mask_token_id=4, distill_on=distill_on)
    trainer = DistilMLMTrainer(tiny_bert(30), tiny_bert(30, seed=1), None, config)
    if distill_on == "masked":
        assert trainer.evaluate([batch])["mlm"] > 0
    else:
        with pytest.raises(ValueError, match="labels must be -100 at places without attention where distill_on='all'"):
            trainer.evaluate([batch])


def test_every_part_of_the_student_trains_and_none_of_the_teacher(tokenizer):
    student, teacher = tiny_bert(len(tokenizer)), tiny_bert(len(tokenizer), seed=1)
    trainer = DistilMLMTrainer(student, teacher, tokenizer, DistilMLMConfig(**QUIET, log_every=1))
    modes = []
    for model in (student, teacher):
        part = model.bert.encoder
        part.register_forward_hook(lambda module, *_: modes.append((module is student.bert.encoder, module.training)))

    def disturb():
        student.bert.encoder.eval()
        teacher.bert.encoder.train()
        modes.clear()

    trainer.train(
        DataPipeline(texts(24), tokenizer, max_length=16),
        total_steps=2,
        on_step=lambda step, loss: step == 1 and disturb(),
    )
    assert set(modes) == {(True, True), (False, False)}


@pytest.mark.parametrize(("accumulation", "limit", "steps"), [(2, 7, 6), (8, 7, 2), (2, 6, 9)])
def test_a_stream_that_ends_before_its_limit_within_a_window_is_an_error(tokenizer, accumulation, limit, steps):
    """Lightning takes the limit for the stream's length, and makes no update at its end."""
    settings = {"grad_accumulation_steps": accumulation, "trainer_kwargs": {"limit_train_batches": limit}}
    trainer = MLMTrainer(tiny_bert(len(tokenizer)), tokenizer, MLMConfig(**QUIET, **settings))
    five = DataPipeline(lambda: iter(texts(20)), tokenizer, batch_size=4, max_length=16)
    with pytest.raises(
        ValueError, match=f"ended after 5 batches, before limit_train_batches={limit} and within a window"
    ):
        trainer.train(five, total_steps=steps)


def test_several_validation_loaders_are_evaluated_together(tokenizer):
    module = MLMLitModule(tiny_bert(len(tokenizer)), config=MLMConfig(), tokenizer=tokenizer)
    loader = DataLoader([{"input_ids": torch.tensor([[5, 6, 7, 8]])}], batch_size=None)
    plain = lightning.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False)
    plain.validate(module, [loader, loader], verbose=False)
    assert plain.callback_metrics["val/loss"] > 0


@pytest.mark.parametrize(
    ("batch", "got"), [((torch.tensor([[5, 6]]),), "list"), ({"ids": torch.tensor([[5, 6]])}, r"the keys \['ids'\]")]
)
def test_a_batch_without_ids_is_refused_with_what_it_is(tokenizer, batch, got):
    module = MLMLitModule(tiny_bert(len(tokenizer)), config=MLMConfig(), tokenizer=tokenizer)
    plain = lightning.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False)
    with pytest.raises(TypeError, match=f"a batch must be a dict with input_ids .*, got {got}; change the loader"):
        plain.fit(module, DataLoader([batch], batch_size=None))


def test_another_padding_id_than_the_pipelines_tokenizers_is_refused(tokenizer):
    config = EncoderDistillConfig(device="cpu", pad_token_id=5)
    trainer = EncoderDistillTrainer(tiny_bert(30).bert, tiny_bert(30, seed=1).bert, config)
    with pytest.raises(ValueError, match="pad_token_id must be the tokenizer's, 0, got 5; leave it out"):
        trainer.train(DataPipeline(texts(8), tokenizer, max_length=16), total_steps=1)


class OwnPositions(torch.nn.Module):
    """An encoder that keeps its positions under a name of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = torch.nn.Embedding(30, 8), torch.nn.Embedding(32, 8)
        self.out = torch.nn.Linear(8, 30)

    def forward(self, input_ids, attention_mask):
        return self.out(self.words(input_ids) + self.places(torch.arange(input_ids.shape[1])))


@pytest.mark.parametrize("role", ["student", "teacher"])
def test_rows_on_which_a_model_fails_are_refused_before_the_first_update(tokenizer, role):
    models_ = {"student": tiny_bert(30), "teacher": tiny_bert(30, seed=1), role: OwnPositions()}
    config = DistilMLMConfig(**QUIET, cosine_weight=0.0)
    trainer = DistilMLMTrainer(models_["student"], models_["teacher"], tokenizer, config)
    with pytest.raises(
        ValueError, match=rf"max_length of the train data is 48, and the {role} fails on so long a row \(I"
    ):
        trainer.train(DataPipeline(["the cat"] * 8, tokenizer, max_length=48), total_steps=1)
    trainer.train(DataPipeline(["the cat"] * 8, tokenizer, max_length=32), total_steps=1)
