"""A share of masked tokens that changes from update to update: what the host counts is what the device masks."""

from __future__ import annotations

import lightning
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch.utils.data import DataLoader

from foundry_lightning import DataPipeline, MLMConfig, MLMLitModule, MLMTrainer, mask_tokens
from tests.conftest import BiasStudent, texts

SHARES = [0.9, 0.8, 0.7, 0.6, 0.5, 0.4]  # of six updates from 0.9 to 0.4
FALLING = {"mask_prob": 0.9, "mask_prob_end": 0.4}


class Masks(Callback):
    """The masks of each batch, and the same batch masked from scratch with the share of its update."""

    def __init__(self, tokenizer) -> None:
        self.settings = {
            "mask_token_id": tokenizer.mask_token_id,
            "special_token_ids": tokenizer.all_special_ids,
            "vocab_size": len(tokenizer),
            "seed": 42,
        }
        self.updates: list[int] = []
        self.evaluated: list[int] = []

    def _compare(self, module, batch, share: float) -> None:
        names = ("input_ids", "attention_mask", "row_ids")
        found = module.mask(batch)
        strategy = module.config.masking
        expected = mask_tokens(
            **{name: batch[name] for name in names},
            epoch=batch["info"]["epoch"],
            mask_prob=share,
            strategy=strategy,
            **self.settings,
        )
        assert batch["info"]["num_masked"] == len(expected.positions)
        assert torch.equal(found.dense_labels, expected.dense_labels)
        assert torch.equal(found.input_ids, expected.input_ids)

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if not batch["info"]["filler"]:
            self.updates.append(trainer.global_step)
            self._compare(module, batch, SHARES[trainer.global_step])

    def on_validation_batch_start(self, trainer, module, batch, batch_idx, dataloader_idx=0):
        self.evaluated.append(batch["info"]["num_masked"])
        self._compare(module, batch, SHARES[-1])


@pytest.mark.parametrize(
    ("settings", "is_stream"),
    [
        ({}, False),
        ({"num_workers": 2}, False),
        ({"masking": "span"}, False),
        ({"num_workers": 2}, True),
    ],
)
def test_the_host_counts_what_each_update_masks_and_evaluations_mask_the_end_share(tokenizer, settings, is_stream):
    masks = Masks(tokenizer)
    rows = texts(20)
    train = DataPipeline((lambda: iter(rows)) if is_stream else rows, tokenizer, batch_size=4, max_length=16)
    held_out = DataPipeline(texts(6, seed=1), tokenizer, batch_size=4, max_length=16)
    config = MLMConfig(
        **{**FALLING, "device": "cpu", "progress_bar": False, "eval_every": 2, "grad_accumulation_steps": 2},
        trainer_kwargs={"callbacks": [masks]},
        **settings,
    )
    trainer = MLMTrainer(BiasStudent(torch.zeros(len(tokenizer))), tokenizer, config)
    trainer.train(train, held_out, shuffle=not is_stream, total_steps=6)
    assert masks.updates == [0, 0, 1, 1, 2, 3, 3, 4, 4, 5]  # five batches an epoch, two an update
    assert masks.evaluated == masks.evaluated[:2] * 3


def test_a_loader_of_the_users_own_has_the_share_of_each_update_too(tokenizer):
    masks = Masks(tokenizer)
    batches = list(DataPipeline(texts(24), tokenizer, batch_size=4, max_length=16))
    trainer = lightning.Trainer(
        max_epochs=1,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        callbacks=[masks],
    )
    module = MLMLitModule(BiasStudent(torch.zeros(len(tokenizer))), config=MLMConfig(**FALLING), tokenizer=tokenizer)
    trainer.fit(module, DataLoader(batches, batch_size=None))
    assert masks.updates == list(range(6))


def test_an_extended_run_has_the_shares_of_its_new_length(tokenizer, tmp_path):
    seen = []

    class Shares(Callback):
        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            seen.append(module.mask_share.apply(module.masking, batch["info"]).mask_prob)

    def train(total_steps: int, resume: bool) -> None:
        config = MLMConfig(**FALLING, device="cpu", progress_bar=False, trainer_kwargs={"callbacks": [Shares()]})
        trainer = MLMTrainer(BiasStudent(torch.zeros(len(tokenizer))), tokenizer, config)
        if resume:
            trainer.resume_from_checkpoint(tmp_path)
        trainer.train(DataPipeline(texts(20), tokenizer, batch_size=4, max_length=16), total_steps=total_steps)
        trainer.save_checkpoint(tmp_path)

    train(3, resume=False)
    train(6, resume=True)
    assert seen == pytest.approx([0.9, 0.65, 0.4, *SHARES[3:]])
