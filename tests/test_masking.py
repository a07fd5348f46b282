from __future__ import annotations

import pytest
import torch

from foundry_lightning.draws import batch_seed, permutation
from foundry_lightning.masking import Masking, mask_tokens

SPECIAL = (0, 1, 2, 3, 4)
SETTINGS = {"mask_token_id": 4, "special_token_ids": SPECIAL, "vocab_size": 50}


def rows(count: int, length: int, *, seed: int = 0, vocab: int = 50) -> torch.Tensor:
    ids = torch.randint(5, vocab, (count, length), generator=torch.Generator().manual_seed(seed))
    ids[:, 0], ids[:, -1] = 2, 3
    return ids


def mask(ids, *, row_ids=None, epoch=0, seed=1, **settings):
    row_ids = torch.arange(len(ids)) if row_ids is None else row_ids
    return mask_tokens(ids, row_ids=row_ids, seed=seed, epoch=epoch, **{**SETTINGS, **settings})


def chosen(ids, **kwargs) -> torch.Tensor:
    return mask(ids, **kwargs).dense_labels != -100


@pytest.mark.parametrize("length", [3, 4, 7, 20, 128, 512])
@pytest.mark.parametrize("strategy", ["token", "whole_word", "span"])
def test_the_expected_share_is_mask_prob_for_rows_of_any_length(length, strategy):
    count = max(200_000 // length, 4000)
    ids = rows(count, length)
    words = torch.arange(length).expand(count, -1) // 3  # words of three tokens
    labels = chosen(ids, strategy=strategy, word_ids=words)
    eligible = count * (length - 2)
    assert abs(labels.sum().item() / eligible - 0.15) < 0.002 + 0.15 / count**0.5 * (length < 10)


def test_every_row_gets_the_floor_or_the_ceiling_of_its_share():
    ids = rows(2000, 22)  # 20 eligible tokens × 0.12 = 2.4
    counts = chosen(ids, mask_prob=0.12).sum(1)
    assert set(counts.tolist()) == {2, 3}
    assert abs(counts.float().mean().item() - 2.4) < 0.03


def test_all_eligible_tokens_are_masked_at_mask_prob_one():
    ids = rows(8, 12)
    assert torch.equal(chosen(ids, mask_prob=1.0), ids >= 5)


def test_masked_tokens_split_80_10_10():
    ids = rows(3000, 500, vocab=5000)
    masked = mask(ids, vocab_size=5000)
    written, labels = masked.input_ids.flatten()[masked.positions], masked.labels
    assert len(labels) > 200_000
    assert abs((written == 4).float().mean().item() - 0.8) < 0.005
    assert abs((written == labels).float().mean().item() - 0.1) < 0.005
    assert abs(((written != 4) & (written != labels)).float().mean().item() - 0.1) < 0.005


def test_the_split_is_a_setting():
    ids = rows(50, 100)
    masked = mask(ids, mask_replace_prob=0.0, random_replace_prob=0.0)
    assert torch.equal(masked.input_ids, ids)
    assert len(masked.positions) > 0
    masked = mask(ids, mask_replace_prob=1.0, random_replace_prob=0.0)
    assert set(masked.input_ids.flatten()[masked.positions].tolist()) == {4}


def test_only_ordinary_ids_of_the_tokenizer_are_drawn_and_each_of_them():
    ids = rows(4000, 60)
    special = (0, 1, 2, 3, 4, 17, 49, 30)
    masked = mask(ids, special_token_ids=special, vocab_size=50, mask_replace_prob=0.0, random_replace_prob=1.0)
    written = masked.input_ids.flatten()[masked.positions]
    assert set(written.tolist()) == set(range(50)) - set(special)
    assert not set(masked.labels.tolist()) & set(special)
    shares = torch.bincount(written, minlength=50)[5] / len(written)
    assert abs(shares.item() - 1 / 42) < 0.003


def test_special_tokens_and_padding_are_never_masked_and_never_changed():
    ids = rows(500, 40)
    attention = torch.ones_like(ids)
    attention[:, 30:] = 0
    masked = mask(ids, attention_mask=attention, mask_prob=1.0)
    untouched = (ids < 5) | (attention == 0)
    assert torch.equal(masked.input_ids[untouched], ids[untouched])
    assert not (masked.dense_labels != -100)[untouched].any()


def test_masks_do_not_depend_on_batch_order_or_padding():
    ids, row_ids = rows(64, 30), torch.arange(64) * 7 + 3
    whole = mask(ids, row_ids=row_ids)
    order = torch.randperm(64, generator=torch.Generator().manual_seed(0))
    shuffled = mask(ids[order], row_ids=row_ids[order])
    assert torch.equal(shuffled.input_ids, whole.input_ids[order])
    for n in range(0, 64, 9):
        padded = torch.nn.functional.pad(ids[n : n + 1], (5, 11))  # padding on both sides
        attention = torch.nn.functional.pad(torch.ones(1, 30, dtype=torch.long), (5, 11))
        alone = mask(padded, row_ids=row_ids[n : n + 1], attention_mask=attention)
        assert torch.equal(alone.input_ids[:, 5:35], whole.input_ids[n : n + 1])


def test_masks_of_packed_texts_equal_those_of_the_texts_alone():
    ids = rows(6, 10)
    settings = Masking(seed=1, mask_token_id=4, special_token_ids=SPECIAL, vocab_size=50)
    alone = settings(ids, attention_mask=torch.ones_like(ids), row_ids=torch.arange(6), epoch=2)
    packed = settings(
        ids.view(2, 30),
        attention_mask=torch.ones(2, 30),
        row_ids=torch.arange(6).repeat_interleave(10).view(2, 30),
        text_ids=torch.arange(3).repeat_interleave(10).expand(2, -1),
        epoch=2,
    )
    assert torch.equal(packed.input_ids.view(6, 10), alone.input_ids)
    assert torch.equal(packed.positions, alone.positions)


def test_masks_differ_between_epochs_seeds_and_rows():
    ids = rows(1, 200).expand(2, -1)
    first = chosen(ids)
    assert not torch.equal(first, chosen(ids, epoch=1))
    assert not torch.equal(first, chosen(ids, seed=2))
    assert not torch.equal(first, chosen(ids, seed=0))
    assert not torch.equal(first[0], first[1])


def test_the_draws_are_fixed_for_all_time():
    masked = mask(rows(2, 24), row_ids=torch.tensor([0, 2**41 + 5]), seed=42, epoch=3)
    assert masked.positions.tolist() == FIXED_POSITIONS
    assert permutation(8, seed=42, epoch=1).tolist() == FIXED_ORDER
    assert batch_seed(7, seed=42, epoch=1) == FIXED_SEED


def test_a_batch_that_drew_nothing_gets_its_eligible_token_with_the_smallest_hash():
    ids = rows(1, 3)  # one eligible token
    counts = [int(chosen(ids, mask_prob=0.01, row_ids=torch.tensor([n])).sum()) for n in range(50)]
    assert set(counts) == {1}
    ids = rows(3, 6)
    for n in range(30):
        assert chosen(ids, mask_prob=1e-6, row_ids=torch.arange(3) + 3 * n).sum() == 1


def test_a_batch_without_an_eligible_token_masks_nothing():
    masked = mask(torch.tensor([[2, 3, 0], [2, 1, 3]]), mask_prob=1.0)
    assert masked.positions.numel() == 0
    assert masked.input_ids.tolist() == [[2, 3, 0], [2, 1, 3]]


def test_a_word_is_masked_wholly_or_not_at_all():
    ids = rows(400, 62)
    words = torch.cat([torch.full((1,), -1), torch.arange(60) // 4, torch.full((1,), -1)]).expand(400, -1)
    words = words + (words >= 0) * torch.randint(0, 2, (400, 1), generator=torch.Generator().manual_seed(0))
    labels = chosen(ids, strategy="whole_word", word_ids=words)
    inner = labels[:, 1:61].view(400, 15, 4)
    assert torch.equal(inner.any(2), inner.all(2))
    assert 0.13 < labels.sum().item() / (400 * 60) < 0.17


def test_spans_mask_neighbours_more_often_than_single_tokens():
    ids = rows(2000, 102)
    neighbours = {
        strategy: (lambda c: (c[:, 1:] & c[:, :-1]).sum().item() / c.sum().item())(chosen(ids, strategy=strategy))
        for strategy in ("token", "span")
    }
    assert neighbours["token"] < 0.2
    assert neighbours["span"] > 0.55


def test_the_host_count_equals_the_device_selection():
    settings = Masking(seed=3, mask_token_id=4, special_token_ids=SPECIAL, vocab_size=50)
    ids = rows(16, 33)
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "row_ids": torch.arange(16)}
    count = settings.count(batch, epoch=5)
    known = settings(**batch, epoch=5, num_masked=count)
    assert torch.equal(known.positions, settings(**batch, epoch=5).positions)
    assert len(known.positions) == count


def test_the_inputs_are_not_changed():
    ids = rows(4, 20)
    before = ids.clone()
    mask(ids, mask_prob=1.0)
    assert torch.equal(ids, before)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mask_prob": 0.0}, r"mask_prob must lie in \(0, 1\], got 0.0"),
        ({"mask_prob": 1.5}, r"mask_prob must lie in \(0, 1\], got 1.5"),
        ({"mask_replace_prob": 0.9, "random_replace_prob": 0.2}, "must not exceed 1, got 0.9"),
        ({"strategy": "sentence"}, "strategy must be one of"),
        ({"strategy": "whole_word"}, "needs word_ids"),
        ({"vocab_size": 5}, "leaves no ordinary token"),
        ({"row_ids": torch.arange(3)}, "one number per row"),
        ({"attention_mask": torch.ones(2, 5)}, "must have the shape of input_ids"),
    ],
)
def test_bad_settings_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        mask(rows(2, 8), **settings)


FIXED_POSITIONS = [3, 10, 13, 26, 29, 38]
FIXED_ORDER = [7, 4, 2, 5, 0, 1, 6, 3]
FIXED_SEED = 5548503103417394125
