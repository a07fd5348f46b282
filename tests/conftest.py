"""Tiny models and data, made in process; nothing is read from a network."""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("WANDB_MODE", "offline")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # the models are tiny: threads would only wait for each other

import pytest
import torch
from torch import nn
from transformers import BertConfig, BertForMaskedLM, PreTrainedTokenizerFast


@pytest.fixture(autouse=True)
def _isolated(tmp_path, monkeypatch):
    """Each test has a folder of its own to run in and a cache of its own; global generators are put back."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FOUNDRY_LIGHTNING_CACHE", str(tmp_path / "cache"))
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    yield
    torch.set_rng_state(state)
    torch.set_num_threads(threads)


WORDS = ["the", "cat", "sat", "on", "a", "mat", "and", "saw", "two", "dogs", "run", "over", "green", "hills", "while"]
WORDS += ["rain", "fell", "from", "dark", "clouds", "all", "day"]


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    """A word-level tokenizer with the usual special tokens: ids 0 to 4, then `WORDS`."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    vocab = {word: n for n, word in enumerate([*special, *dict.fromkeys(WORDS)])}
    engine = Tokenizer(models.WordLevel(vocab, unk_token="[UNK]"))
    engine.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    engine.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", vocab["[CLS]"]), ("[SEP]", vocab["[SEP]"])]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=engine,
        unk_token="[UNK]",
        pad_token="[PAD]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
    )


def tiny_bert(vocab_size: int = 30, *, seed: int = 0, dropout: float = 0.1, **config) -> BertForMaskedLM:
    """A BERT of 2 layers and hidden size 16."""
    settings = {
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 32,
        "max_position_embeddings": 64,
        "hidden_dropout_prob": dropout,
        "attention_probs_dropout_prob": dropout,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return BertForMaskedLM(BertConfig(vocab_size=vocab_size, **{**settings, **config}))


class BiasStudent(nn.Module):
    """One parameter vector returned as the score at every place, so that masks do not matter."""

    def __init__(self, bias: torch.Tensor) -> None:
        super().__init__()
        self.bias = nn.Parameter(bias.clone())

    def forward(self, input_ids, attention_mask=None):
        from transformers.modeling_outputs import MaskedLMOutput

        return MaskedLMOutput(logits=self.bias.expand(*input_ids.shape, -1))


def texts(count: int, *, seed: int = 0, low: int = 3, high: int = 12) -> list[str]:
    """Sentences of random known words."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(low, high + 1, (count,), generator=generator).tolist()
    return [" ".join(WORDS[i] for i in torch.randint(len(WORDS), (n,), generator=generator).tolist()) for n in lengths]
