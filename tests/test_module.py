"""The module with a plain Trainer and loaders of the user's own; one update equals Hugging Face's plain one."""

from __future__ import annotations

import copy

import lightning
import pytest
import torch
import torch.nn.functional as F
import transformers
from torch.utils.data import DataLoader

from foundry_lightning import DataPipeline, MLMConfig, MLMDataModule, MLMLitModule, MLMTrainer, WithMLMHead
from tests.conftest import texts, tiny_bert

SMALL = {
    "vocab_size": 40,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 40,
    "pad_token_id": 1,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}


def plain_trainer(**settings) -> lightning.Trainer:
    defaults = {
        "accelerator": "cpu",
        "max_epochs": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return lightning.Trainer(**{**defaults, **settings})


class Encoder(torch.nn.Module):
    """A custom encoder: an embedding and a recurrent layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(40, 16)
        self.layer = torch.nn.GRU(16, 8, batch_first=True, bidirectional=True)

    def forward(self, input_ids, attention_mask=None):
        return self.layer(self.embedding(input_ids))[0]


def build(family: str) -> torch.nn.Module:
    torch.manual_seed(0)
    if family.startswith("custom"):
        return WithMLMHead(Encoder(), hidden_size=16, vocab_size=40, tie_weights=family.endswith("tied"))
    extra = {
        "distilbert": {
            "dim": 16,
            "n_layers": 2,
            "n_heads": 2,
            "hidden_dim": 32,
            "dropout": 0.0,
            "attention_dropout": 0,
        },
        "albert": {"embedding_size": 8},
        "electra": {"embedding_size": 8},
        "modernbert": {"embedding_dropout": 0.0, "mlp_dropout": 0.0, "attention_dropout": 0.0},
        "deberta-v2": {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_biased_input": False},
        "untied": {"tie_word_embeddings": False},
    }.get(family, {})
    config = transformers.AutoConfig.for_model("bert" if family == "untied" else family, **{**SMALL, **extra})
    return transformers.AutoModelForMaskedLM.from_config(config)


FAMILIES = ["bert", "untied", "roberta", "distilbert", "albert", "electra", "deberta-v2", "xlm-roberta", "mpnet"]
FAMILIES += ["modernbert", "custom", "custom tied"]


@pytest.mark.parametrize("family", FAMILIES)
def test_one_update_equals_that_of_the_plain_forward(family):
    student = build(family)
    reference = copy.deepcopy(student).train()
    ids = torch.randint(5, 40, (4, 20), generator=torch.Generator().manual_seed(1))
    attention = torch.ones_like(ids)
    attention[1, 12:] = 0
    ids[1, 12:] = 1
    settings = {"mask_token_id": 4, "pad_token_id": 1, "learning_rate": 1e-2, "lr_scheduler": "constant"}
    config = MLMConfig(**settings, max_grad_norm=0.0, progress_bar=False, device="cpu")
    trainer = MLMTrainer(student, config=config)
    assert trainer.module.projection.reason == "scored positions"
    batch = {"input_ids": ids, "attention_mask": attention}
    masked = trainer.module.masking(**batch, row_ids=torch.arange(4), epoch=0)

    logits = reference(input_ids=masked.input_ids, attention_mask=attention).logits
    loss = F.cross_entropy(logits.flatten(0, 1), masked.dense_labels.flatten(), ignore_index=-100)
    loss.backward()
    matrices = [p for p in reference.parameters() if p.ndim >= 2]
    vectors = [p for p in reference.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.01}, {"params": vectors, "weight_decay": 0.0}]
    torch.optim.AdamW(groups, lr=1e-2).step()

    result = trainer.train([batch])
    assert result["losses"][0] == pytest.approx(loss.item(), abs=1e-5)
    for (name, own), theirs in zip(student.named_parameters(), reference.parameters(), strict=True):
        if theirs.grad is not None:  # Adam turns a gradient of rounding noise into a full step
            clear = theirs.grad.abs() > 1e-6
            assert torch.allclose(own[clear], theirs[clear], atol=2e-5), name


def test_a_plain_trainer_and_a_users_own_loader_of_dicts_train(tokenizer):
    rows = [tokenizer(text, padding="max_length", max_length=16, return_tensors="pt") for text in texts(12)]
    rows = [{name: row[name][0] for name in ("input_ids", "attention_mask")} for row in rows]
    module = MLMLitModule(tiny_bert(len(tokenizer)), tokenizer=tokenizer, config=MLMConfig(learning_rate=1e-2))
    before = module.student.cls.predictions.bias.detach().clone()
    with pytest.warns(UserWarning, match="this loader knows no window totals: each batch counts as its own mean"):
        plain_trainer().fit(module, DataLoader(rows, batch_size=4), DataLoader(rows, batch_size=4))
    assert not torch.equal(before, module.student.cls.predictions.bias)


def test_a_users_own_loader_trains_on_the_mean_of_batch_means():
    """Two batches of one and nine tokens: the mean of both means, as the user's loader says nothing of windows."""
    from tests.conftest import BiasStudent

    module = MLMLitModule(BiasStudent(torch.zeros(8)), config=MLMConfig(mask_prob=1.0, mask_token_id=4, vocab_size=8))
    seen = []
    module.student.bias.register_hook(lambda g: seen.append(g.clone()))
    batches = [{"input_ids": torch.tensor([[5]])}, {"input_ids": torch.tensor([[6] * 9])}]
    plain_trainer(accumulate_grad_batches=2).fit(module, DataLoader(batches, batch_size=None))
    total = torch.stack(seen).sum(0)
    assert total[5].item() == pytest.approx(0.125 - 0.5)
    assert total[6].item() == pytest.approx(0.125 - 0.5)


def test_no_gradient_of_the_last_window_is_held_through_a_windows_first_forward(tokenizer):
    student, held, after = tiny_bert(len(tokenizer)), [], []
    student.bert.register_forward_pre_hook(
        lambda *_: held.append(any(p.grad is not None for p in student.parameters()))
    )

    class Watch(lightning.Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            after.append(any(p.grad is not None for p in student.parameters()))

    config = MLMConfig(
        device="cpu", progress_bar=False, grad_accumulation_steps=2, trainer_kwargs={"callbacks": [Watch()]}
    )
    trainer = MLMTrainer(student, tokenizer, config)
    pipe = DataPipeline(texts(24), tokenizer, batch_size=4, max_length=32)
    trainer.train(pipe)
    assert held[-6:] == [False, True] * 3
    assert after == [True] * 6  # an observer of the update finds it


def test_a_batch_with_ready_labels_is_used_as_given(tokenizer):
    student = tiny_bert(len(tokenizer), dropout=0.0)
    ids = torch.tensor([[2, 4, 6, 7, 3]])
    labels = torch.tensor([[-100, 9, -100, -100, -100]])
    inputs = []
    student.register_forward_pre_hook(lambda m, a, k: inputs.append(k["input_ids"].clone()), with_kwargs=True)
    expected = F.cross_entropy(student(input_ids=ids).logits[0, 1:2], torch.tensor([9])).item()
    trainer = MLMTrainer(student, tokenizer, MLMConfig(progress_bar=False, device="cpu"))
    result = trainer.train([{"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}])
    assert torch.equal(inputs[-1], ids)
    assert result["losses"] == pytest.approx([expected], abs=1e-5)


def test_without_an_attention_mask_padding_is_found_by_its_id(tokenizer):
    student = tiny_bert(len(tokenizer))
    seen = []
    student.register_forward_pre_hook(lambda m, a, k: seen.append(k["attention_mask"].tolist()), with_kwargs=True)
    trainer = MLMTrainer(student, tokenizer, MLMConfig(progress_bar=False, device="cpu"))
    trainer.train([torch.tensor([[2, 6, 7, 3, 0, 0]])])
    assert seen[-1] == [[1, 1, 1, 1, 0, 0]]


def test_the_module_and_the_data_module_work_with_a_plain_trainer(tokenizer):
    def fit(**data):
        module = MLMLitModule(tiny_bert(len(tokenizer)), tokenizer=tokenizer, config={"learning_rate": 1e-3})
        data = MLMDataModule(texts(20), val=texts(6, seed=5), batch_size=4, max_length=32, **data)
        trainer = plain_trainer(max_epochs=2)
        trainer.fit(module, datamodule=data)
        return trainer, torch.cat([p.detach().flatten() for p in module.student.parameters()])

    trainer, weights = fit()
    assert trainer.global_step == 10
    assert {"val/loss", "val/mlm", "val/perplexity", "val/masked_accuracy"} <= set(trainer.callback_metrics)
    assert torch.equal(weights, fit()[1])


def test_fields_that_a_plain_trainer_owns_are_named_once(tokenizer):
    module = MLMLitModule(tiny_bert(len(tokenizer)), tokenizer=tokenizer, config=MLMConfig(epochs=3, log_every=7))
    with pytest.warns(UserWarning, match="config sets epochs, log_every, which the Trainer owns"):
        plain_trainer(limit_train_batches=1).fit(module, datamodule=MLMDataModule(texts(4), max_length=32))


def test_a_padded_vocabulary_is_never_drawn_or_labelled(tokenizer):
    student = tiny_bert(64)  # the tokenizer has fewer ids
    seen = []
    student.register_forward_pre_hook(
        lambda m, a, k: m.training and seen.append(k["input_ids"].flatten()), with_kwargs=True
    )
    config = MLMConfig(
        mask_prob=1.0, mask_replace_prob=0.0, random_replace_prob=1.0, progress_bar=False, device="cpu", epochs=8
    )
    MLMTrainer(student, tokenizer, config).train(DataPipeline(texts(64), tokenizer, batch_size=16, max_length=32))
    written = torch.cat(seen)
    assert written.max() == len(tokenizer) - 1
    assert tokenizer.unk_token_id not in written
    assert tokenizer.mask_token_id not in written


def test_whole_word_masking_masks_all_pieces_of_a_word():
    from foundry_lightning.tokenizer import train_tokenizer

    sentences = ["unbelievable understanding of misunderstandings", "believable standing under the stands"] * 20
    tokenizer = train_tokenizer(sentences, vocab_size=45, min_frequency=1)
    student = tiny_bert(len(tokenizer), max_position_embeddings=128)
    batches = []

    class Watch(lightning.Callback):
        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            batches.append((batch["word_ids"], module.mask(batch).dense_labels != -100))

    config = MLMConfig(
        masking="whole_word", mask_prob=0.3, progress_bar=False, device="cpu", trainer_kwargs={"callbacks": [Watch()]}
    )
    MLMTrainer(student, tokenizer, config).train(DataPipeline(sentences, tokenizer, batch_size=8, max_length=64))
    pieces = 0
    for words, chosen in batches:
        for row_words, row_chosen in zip(words, chosen, strict=True):
            for word in set(row_words[row_words >= 0].tolist()):
                of_word = row_chosen[row_words == word]
                pieces += len(of_word) > 1
                assert of_word.all() or not of_word.any()
    assert pieces > 50


LANGUAGES = {
    "Arabic with vowel marks": ["الْكِتَابُ عَلَى الطَّاوِلَةِ", "ذَهَبَ الْوَلَدُ إِلَى الْمَدْرَسَةِ", "السَّمَاءُ صَافِيَةٌ الْيَوْمَ"],
    "Chinese": ["今天天气很好", "我们去学校读书", "他在图书馆看书"],
    "German": ["Der Fluß fließt über die Brücke", "Öl und Übermut sind ungesund", "Straßen, Gärten, Häuser"],
    "Hebrew": ["הספר על השולחן", "הילד הלך לבית הספר", "השמים בהירים היום"],
    "combining characters": [
        "cafe\u0301 re\u0301sume\u0301 nai\u0308ve",
        "a\u030angstro\u0308m e\u0301tude",
        "o\u0302 e\u0300",
    ],
}


@pytest.mark.parametrize("language", LANGUAGES)
@pytest.mark.parametrize("masking", ["token", "whole_word"])
def test_other_languages_survive_tokenizer_masking_training_and_prediction(language, masking):
    from foundry_lightning.tokenizer import train_tokenizer

    source = LANGUAGES[language] * 8
    tokenizer = train_tokenizer(source, vocab_size=120, min_frequency=1, lowercase=False)
    student = tiny_bert(len(tokenizer), max_position_embeddings=128)
    config = MLMConfig(masking=masking, learning_rate=1e-3, progress_bar=False, device="cpu")
    trainer = MLMTrainer(student, tokenizer, config)
    result = trainer.train(DataPipeline(source, tokenizer, batch_size=4, max_length=64))
    assert all(0 < loss < 20 for loss in result["losses"])
    ids = tokenizer(source[0])["input_ids"]
    assert tokenizer.unk_token_id not in ids
    words = source[0].split() if " " in source[0] else list(source[0])
    blanked = " ".join([*words[:1], tokenizer.mask_token, *words[2:]])
    data = MLMDataModule(None, predict=[blanked])
    (guesses,) = plain_trainer().predict(trainer.module, datamodule=data)
    assert len(guesses[0]) == 1
    assert sum(probability for _, probability in guesses[0][0]) <= 1.0 + 1e-6
    assert all(isinstance(token, str) for token, _ in guesses[0][0])


@pytest.mark.slow
def test_two_layers_beat_the_unigram_baseline_of_held_out_text_and_not_with_shuffled_labels():
    """600 steps on `python-docs`: over 0.2 nats below the baseline; with labels torn from their places, above it."""
    from foundry_lightning import FromConfig
    from foundry_lightning.facts import unigram_loss
    from foundry_lightning.tokenizer import train_tokenizer

    tokenizer = train_tokenizer("python-docs", vocab_size=8000)
    size = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 512}
    size |= {"max_position_embeddings": 128, "initializer_range": 0.05, "hidden_dropout_prob": 0.0}

    def difference(shuffled: bool) -> float:
        student = FromConfig("bert", size).build(tokenizer)
        train = DataPipeline("python-docs", tokenizer, batch_size=64, max_length=128, group_by_length=True)
        held_out = DataPipeline("python-docs:val", tokenizer, batch_size=64, max_length=128, group_by_length=True)
        config = MLMConfig(learning_rate=2e-3, warmup_steps=60, mask_prob=0.25, progress_bar=False)
        trainer = MLMTrainer(student, tokenizer, config)
        masking = trainer.module.masking
        if shuffled:
            trainer.module.masking = ShuffledLabels(**vars(masking))
        trainer.train(train, shuffle=True, total_steps=600)
        trainer.module.masking = masking
        baseline = unigram_loss(
            train, held_out, special_token_ids=masking.special_token_ids, vocab_size=masking.vocab_size
        )
        return trainer.evaluate(held_out)["mlm"] - baseline

    from foundry_lightning.masking import Masking

    class ShuffledLabels(Masking):
        def __call__(self, *args, **kwargs):
            masked = super().__call__(*args, **kwargs)
            order = torch.randperm(len(masked.labels), generator=torch.Generator().manual_seed(len(masked.labels)))
            return type(masked)(**{**vars(masked), "labels": masked.labels[order]})

    assert difference(shuffled=False) < -0.2
    assert difference(shuffled=True) > -0.05
