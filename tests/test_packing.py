"""Packed rows: texts that share a row do not see each other, and full batches change nothing else."""

import copy
import inspect
from collections import defaultdict
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import nn

from foundry_lightning import DataPipeline, EncoderDistillTrainer, MLMConfig, MLMDataModule, MLMTrainer, WithMLMHead
from foundry_lightning.data.order import batches_of_tokens, packed_rows
from foundry_lightning.masking import Masking
from foundry_lightning.models import outputs_of
from foundry_lightning.packing import find_packing, text_starts
from foundry_lightning.projection import ScoredProjection, find_projection
from tests.conftest import texts, tiny_bert

VOCAB = 30
SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 40,
    "pad_token_id": 0,
}


def made(config_class: str, **settings: Any) -> nn.Module:
    torch.manual_seed(0)
    config = getattr(transformers, config_class)(**settings)
    return transformers.AutoModelForMaskedLM.from_config(config).eval()


def modernbert() -> nn.Module:
    ids = {"bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2}
    return made("ModernBertConfig", **SMALL, **ids, local_attention=4, global_attn_every_n_layers=2)


FAMILIES = {
    "bert": lambda: made("BertConfig", **SMALL),
    "roberta": lambda: made("RobertaConfig", **{**SMALL, "pad_token_id": 1}),
    "xlm-roberta": lambda: made("XLMRobertaConfig", **{**SMALL, "pad_token_id": 1}),
    "camembert": lambda: made("CamembertConfig", **{**SMALL, "pad_token_id": 1}),
    "distilbert": lambda: made("DistilBertConfig", vocab_size=VOCAB, dim=16, n_layers=2, n_heads=2, hidden_dim=24),
    "albert": lambda: made("AlbertConfig", **SMALL, embedding_size=8),
    "electra": lambda: made("ElectraConfig", **SMALL, embedding_size=8),
    "mpnet": lambda: made("MPNetConfig", **{**SMALL, "pad_token_id": 1}),
    "modernbert": modernbert,
    "WithMLMHead": lambda: WithMLMHead(
        transformers.BertModel(transformers.BertConfig(**SMALL), add_pooling_layer=False)
    ),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_texts_get_the_scores_of_rows_of_their_own(family):
    model = FAMILIES[family]().eval()
    lengths = [7, 12, 3, 10]
    rows = [torch.randint(5, VOCAB, (n,)) for n in lengths]
    batch = {
        "input_ids": torch.cat([*rows, torch.zeros(4, dtype=torch.int64)]).unsqueeze(0),
        "text_ids": torch.repeat_interleave(torch.arange(5), torch.tensor([*lengths, 4])).unsqueeze(0),
    }
    with torch.no_grad():
        packed = outputs_of(model, find_packing(model, name="student").inputs(batch))[0].split([*lengths, 4])
        for row, scores in zip(rows, packed, strict=False):
            ids = row.unsqueeze(0)
            own = outputs_of(model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)})[0]
            torch.testing.assert_close(scores, own, rtol=1e-5, atol=1e-6)


class Deaf(nn.Module):
    """A masked language model that does as if it heeded some of its arguments."""

    def __init__(self, *ignored: str) -> None:
        super().__init__()
        self.model, self.ignored = tiny_bert(VOCAB), ignored

    def forward(self, input_ids, attention_mask=None, position_ids=None):
        given = {"attention_mask": attention_mask, "position_ids": position_ids}
        # all of the row: without a mask transformers reads from the positions where a text starts
        unheard = {"attention_mask": torch.ones_like(input_ids), "position_ids": None}
        return self.model(input_ids, **{**given, **{name: unheard[name] for name in self.ignored}})


REFUSED = {
    "deberta-v2": (lambda: made("DebertaV2Config", **SMALL, relative_attention=True, pos_att_type=["p2c"]), "Deberta"),
    "convbert": (lambda: made("ConvBertConfig", **SMALL, embedding_size=16), "ConvBert"),
    "funnel": (
        lambda: made("FunnelConfig", vocab_size=VOCAB, d_model=16, n_head=2, d_head=8, block_sizes=[1]),
        "Funnel",
    ),
    "no mask": (lambda: Deaf("attention_mask"), "sees its neighbour"),
    "no positions": (lambda: Deaf("position_ids"), "other scores than in a row of its own"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_model_that_cannot_keep_texts_apart_is_refused_with_advice(case, tokenizer, tmp_path):
    build, words = REFUSED[case]
    trainer = MLMTrainer(build(), tokenizer, MLMConfig(progress_bar=False))
    before = copy.deepcopy(trainer.student.state_dict())
    with pytest.raises(ValueError, match=f"(?s)pack=True.*{words}.*group_by_length=True"):
        trainer.train(DataPipeline(texts(20), tokenizer, max_length=32, pack=True))
    assert all(torch.equal(value, before[name]) for name, value in trainer.student.state_dict().items())


def sets_of_rows(pipe: DataPipeline, *, epoch: int) -> list[list[int]]:
    """For each packed row of an epoch its row numbers."""
    order = pipe.order(seed=3, epoch=epoch, shuffle=True)
    batches = [pipe.batch(k, order) for k in range(pipe.num_batches())]
    return [
        row[attended != 0].unique_consecutive().tolist()
        for batch in batches
        for row, attended in zip(batch["row_ids"], batch["attention_mask"], strict=True)
    ]


def test_each_epoch_packs_each_text_once_in_as_many_batches_and_other_company(tokenizer):
    pipe = DataPipeline(texts(300, high=30), tokenizer, batch_size=4, max_length=64, pack=True)
    first, second = sets_of_rows(pipe, epoch=0), sets_of_rows(pipe, epoch=1)
    for epoch in (first, second):
        assert sorted(row for rows in epoch for row in rows) == list(range(300))
    assert len(first) == len(second)
    assert {frozenset(rows) for rows in first} != {frozenset(rows) for rows in second}
    assert sets_of_rows(pipe, epoch=1) == second


def test_packed_rows_of_mixed_text_are_98_percent_full():
    lengths = np.clip(np.exp(np.random.default_rng(0).normal(3.55, 0.75, 2000)), 5, 128).astype(int)
    plan = packed_rows(lengths, max_length=128)
    rows = plan.order(lengths, seed=0, epoch=0, shuffle=True)
    filled = [sum(lengths[row]) for row in rows.groups(0, len(rows.starts))]
    assert max(filled) <= 128
    assert sum(filled) == lengths.sum() >= 0.98 * 128 * len(filled)


def test_masks_do_not_depend_on_packing(tokenizer):
    masking = Masking(seed=1, mask_token_id=4, special_token_ids=(0, 1, 2, 3), vocab_size=len(tokenizer), mask_prob=0.3)

    def masked(**settings) -> dict[int, list[int]]:
        """Row number -> its ids after masking."""
        pipe = DataPipeline(texts(60), tokenizer, batch_size=60, max_length=32, **settings)
        batch = pipe.batch(0, pipe.order(seed=1, epoch=0, shuffle=True))
        ids = masking(**{name: batch[name] for name in batch}, epoch=2).input_ids
        row_ids = batch["row_ids"] if batch["row_ids"].dim() == 2 else batch["row_ids"].unsqueeze(1).expand_as(ids)
        attended = batch["attention_mask"] != 0
        return {row: ids[attended & (row_ids == row)].tolist() for row in range(60)}

    assert masked(pack=True) == masked()


@pytest.mark.parametrize("masking", ["token", "whole_word", "span"])
def test_a_packed_window_makes_the_update_of_its_texts_as_separate_rows(tokenizer, masking):
    weights = []
    for settings in ({"pack": True, "batch_size": 3}, {"batch_size": 7}):
        student = tiny_bert(len(tokenizer), dropout=0.0).double()
        config = MLMConfig(
            learning_rate=1e-2, masking=masking, grad_accumulation_steps=50, progress_bar=False, device="cpu"
        )
        pipe = DataPipeline(texts(40), tokenizer, max_length=32, **settings)
        MLMTrainer(student, tokenizer, config).train(pipe)
        weights.append(torch.cat([p.detach().flatten() for p in student.parameters()]))
    # AdamW's first update is lr · sign of the gradient: only a gradient of rounding alone can differ
    assert ((weights[0] - weights[1]).abs() > 1e-6).double().mean() < 0.02


def test_packed_evaluation_scores_the_same_tokens_to_the_same_loss(tokenizer):
    trainer = MLMTrainer(tiny_bert(len(tokenizer)), tokenizer, MLMConfig(progress_bar=False))
    packed = trainer.evaluate(DataPipeline(texts(50), tokenizer, max_length=32, pack=True))
    plain = trainer.evaluate(DataPipeline(texts(50), tokenizer, max_length=32))
    assert packed == pytest.approx(plain, rel=1e-5)


def test_distillation_and_hidden_states_learn_from_packed_rows(tokenizer):
    from foundry_lightning import DistilMLMConfig, DistilMLMTrainer, EncoderDistillConfig

    teacher, settings = tiny_bert(len(tokenizer), seed=1), {"progress_bar": False, "mask_token_id": 4}
    losses = {}
    for name in ("packed", "plain"):
        pipe = DataPipeline(texts(50), tokenizer, max_length=32, pack=name == "packed")
        distil = DistilMLMTrainer(tiny_bert(len(tokenizer)), teacher, tokenizer, DistilMLMConfig(**settings))
        states = EncoderDistillTrainer(
            tiny_bert(len(tokenizer)).bert, teacher.bert, EncoderDistillConfig(progress_bar=False)
        )
        losses[name] = [distil.evaluate(pipe)["loss"], states.evaluate(pipe)["loss"]]
        assert np.isfinite(distil.train(pipe)["losses"]).all()
    assert losses["packed"] == pytest.approx(losses["plain"], rel=1e-5)


def test_a_packed_run_is_the_same_with_workers_and_in_bfloat16_finite(tokenizer):
    losses = []
    for settings in ({}, {"num_workers": 2}, {"torch_dtype": "bfloat16"}):
        pipe = DataPipeline(texts(30), tokenizer, batch_size=2, max_length=32, pack=True)
        config = MLMConfig(learning_rate=1e-3, progress_bar=False, device="cpu", **settings)
        losses.append(MLMTrainer(tiny_bert(len(tokenizer)), tokenizer, config).train(pipe, shuffle=True)["losses"])
    assert losses[0] == losses[1]
    assert losses[2] == pytest.approx(losses[0], rel=0.05)


def test_batch_tokens_bounds_a_batch_in_places_and_keeps_each_row(tokenizer):
    pipe = DataPipeline(texts(300, high=30), tokenizer, max_length=32, group_by_length=True, batch_tokens=256)
    for epoch in (0, 1):
        order = pipe.order(seed=3, epoch=epoch, shuffle=True)
        batches = [pipe.batch(k, order) for k in range(pipe.num_batches())]
        assert max(batch["input_ids"].numel() for batch in batches) <= 256
        assert sorted(torch.cat([batch["row_ids"] for batch in batches]).tolist()) == list(range(300))
    packed = DataPipeline(texts(300, high=30), tokenizer, max_length=32, pack=True, batch_tokens=256)
    assert {tuple(b["input_ids"].shape) for b in list(packed)[:-1]} == {(8, 32)}


def test_a_batch_of_one_row_may_be_as_long_as_batch_tokens():
    plan = batches_of_tokens(np.array([256, 3, 250]), batch_tokens=256)
    assert plan.starts.tolist() == [0, 1, 2, 3]


def test_a_plain_trainer_keeps_texts_of_a_packed_pipeline_apart(tokenizer):
    import lightning
    from torch.utils.data import DataLoader

    from foundry_lightning import MLMLitModule

    pipe = DataPipeline(texts(30), tokenizer, batch_size=4, max_length=32, pack=True)
    module = MLMLitModule(tiny_bert(len(tokenizer)), tokenizer=tokenizer)
    trainer = lightning.Trainer(max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False)
    loader = DataLoader(list(pipe), batch_size=None)
    trainer.validate(module, loader, verbose=False)
    own = float(trainer.callback_metrics["val/loss"])
    data = MLMDataModule(texts(30), val=texts(30), tokenizer=tokenizer, max_length=32)
    trainer.validate(module, datamodule=data, verbose=False)
    assert own == pytest.approx(float(trainer.callback_metrics["val/loss"]), rel=1e-5)


class Kernel:
    """What flash_attn's `flash_attn_varlen_func` and `flash_attn_func` compute, on any device; counts its calls."""

    def __init__(self) -> None:
        self.calls: list[list[int]] = []
        self.mixes = False

    def varlen(
        self, q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None,
        causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False, block_table=None,
    ):  # fmt: skip
        starts = cu_seqlens_q.tolist()
        assert cu_seqlens_q.dtype == torch.int32
        assert torch.equal(cu_seqlens_q, cu_seqlens_k)
        assert starts[-1] == len(q)
        assert max(b - a for a, b in pairwise(starts)) <= max_seqlen_q == max_seqlen_k
        self.calls.append(starts)
        if self.mixes:
            starts = list(range(0, len(q) + 1, max_seqlen_q))
        texts = [slice(a, b) for a, b in pairwise(starts)]
        return torch.cat([self.plain(q[None, t], k[None, t], v[None, t], dropout_p, softmax_scale)[0] for t in texts])

    def plain(self, q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, **others):
        heads_first = (states.transpose(1, 2) for states in (q, k, v))
        return nn.functional.scaled_dot_product_attention(
            *heads_first, dropout_p=dropout_p, scale=softmax_scale
        ).transpose(1, 2)


@pytest.fixture
def kernel(monkeypatch):
    """transformers' way to flash attention, with a kernel that runs here."""
    from transformers import modeling_flash_attention_utils as flash

    stand_in = Kernel()
    arguments = dict.fromkeys(inspect.signature(stand_in.varlen).parameters, True)
    supported = defaultdict(bool, arguments | {"window_size": False})
    process = partial(flash._process_flash_attention_kwargs, supports_mapping=supported)
    functions = (stand_in.plain, stand_in.varlen, None, None, None)
    monkeypatch.setattr(flash, "lazy_import_flash_attention", lambda *_, **__: (functions, (process, None)))
    return stand_in


def flash_bert() -> nn.Module:
    model = tiny_bert(dropout=0.0)
    model.config._attn_implementation = "flash_attention_2"
    return model


def test_the_starts_of_texts_count_padding_as_a_text():
    assert text_starts(torch.tensor([[0, 0, 1, 2], [0, 1, 1, 1]])).tolist() == [0, 2, 3, 4, 5, 8]


def test_flash_attention_gets_the_texts_starts_in_the_place_of_a_mask(kernel):
    model = flash_bert().eval()
    packing = find_packing(model, name="student")
    proven = len(kernel.calls)
    assert proven
    batch = {
        "input_ids": torch.randint(5, 20, (2, 9)),
        "text_ids": torch.tensor([[0] * 4 + [1] * 5, [0] * 7 + [1] * 2]),
    }
    flash = outputs_of(model, packing.inputs(batch))
    assert kernel.calls[proven:] == [[0, 4, 9, 16, 18]] * model.config.num_hidden_layers
    model.config._attn_implementation = "sdpa"
    masked = outputs_of(model, find_packing(model, name="student").inputs(batch))
    torch.testing.assert_close(flash, masked)


def test_a_flash_attention_that_mixes_texts_is_refused(kernel):
    kernel.mixes = True
    with pytest.raises(ValueError, match="student, BertForMaskedLM: a text of a packed row sees its neighbour; use"):
        find_packing(flash_bert(), name="student")


def test_without_its_package_or_gpu_flash_attention_is_refused_at_the_first_step(tokenizer):
    pipe = DataPipeline(texts(40), tokenizer, batch_size=4, max_length=16, pack=True)
    trainer = MLMTrainer(flash_bert(), tokenizer, MLMConfig(device="cpu", progress_bar=False))
    with pytest.raises(ValueError, match="pack=True does not work with the student, .*: its forward fails"):
        trainer.train(pipe, total_steps=1)


def test_the_scored_positions_of_a_model_with_flash_attention_are_found_without_a_gpu():
    model = flash_bert()
    assert isinstance(find_projection(model), ScoredProjection)
    assert model.config._attn_implementation == "flash_attention_2"


def test_a_run_with_flash_attention_makes_the_updates_of_one_with_masks(kernel, tokenizer):
    trained = []
    for student in (tiny_bert(dropout=0.0), flash_bert()):
        pipe = DataPipeline(texts(40), tokenizer, batch_size=4, max_length=16, pack=True)
        trainer = MLMTrainer(student, tokenizer, MLMConfig(device="cpu", progress_bar=False, learning_rate=1e-3))
        trainer.train(pipe, total_steps=3)
        trained.append(dict(trainer.student.named_parameters()))
    assert kernel.calls
    for name, parameter in trained[0].items():
        torch.testing.assert_close(trained[1][name], parameter, msg=name)


def test_starts_are_found_before_the_batch_goes_to_the_device(kernel, tokenizer, monkeypatch):
    pipe = DataPipeline(texts(40), tokenizer, batch_size=4, max_length=16, pack=True)
    trainer = MLMTrainer(flash_bert(), tokenizer, MLMConfig(device="cpu", progress_bar=False))
    trainer.train(pipe, total_steps=1)  # proves
    monkeypatch.setattr("foundry_lightning.packing.text_starts", None)  # what a step would call
    trainer.train(pipe, total_steps=2)
