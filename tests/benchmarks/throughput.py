"""Real tokens a second of MLM pretraining, ours against the peers, on the same rows, model and machine.

BERT 6 × 384 (FFN 1152, V = 30,522), rows of 44 tokens on average cut at 128, batch 16, float32, AdamW with clipping.
Each side runs in a process of its own, in turn, for a number of rounds; padding is no token. Peers:
`olaverse-foundry` 0.3.0 (its `MLMTrainer` over ready batches; `pip install --no-deps olaverse-foundry==0.3.0`, left out
where it is missing) and the Hugging Face Trainer with `DataCollatorForLanguageModeling`, padded and in full blocks.
Needs `pip install accelerate` for the Hugging Face Trainer.
"""

from __future__ import annotations

import importlib.util
import multiprocessing
import statistics
import time

ROUNDS, WARM, STEPS = 3, 3, 12
VOCABULARY, BATCH, LENGTH = 30_522, 16, 128


def model():
    import torch
    from transformers import BertConfig, BertForMaskedLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 6, "intermediate_size": 1152}
    return BertForMaskedLM(BertConfig(vocab_size=VOCABULARY, max_position_embeddings=LENGTH, **sizes))


def rows() -> list[list[int]]:
    """Rows of ids with the lengths of short texts: log-normal, 44 on average, at most 128."""
    import numpy as np

    generator = np.random.default_rng(1)
    lengths = np.clip(np.exp(generator.normal(3.55, 0.75, BATCH * 200)), 5, LENGTH).astype(int)
    return [[101, *generator.integers(1000, VOCABULARY, n - 2).tolist(), 102] for n in lengths]


class Clock:
    """Tokens and seconds after the warm-up."""

    def __init__(self) -> None:
        self.steps = self.tokens = 0
        self.began = self.ended = 0.0

    def step(self, tokens: int) -> None:
        self.steps += 1
        if self.steps > WARM:
            self.tokens += tokens
        if self.steps == WARM:
            self.began = time.perf_counter()
        self.ended = time.perf_counter()

    @property
    def speed(self) -> float:
        return self.tokens / (self.ended - self.began)


def ours() -> float:
    import lightning

    from foundry_lightning import DataPipeline, MLMConfig, MLMTrainer

    clock = Clock()

    class Watch(lightning.Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            clock.step(batch["info"]["num_attended"])

    config = MLMConfig(
        mask_token_id=103,
        special_token_ids=(101, 102),
        device="cpu",
        progress_bar=False,
        trainer_kwargs={"callbacks": [Watch()]},
    )
    pipe = DataPipeline(rows(), batch_size=BATCH, max_length=LENGTH, group_by_length=True)
    MLMTrainer(model(), config=config).train(pipe, shuffle=True, total_steps=WARM + STEPS)
    return clock.speed


def padded_batches():
    import numpy as np

    all_rows = rows()
    for start in range(0, len(all_rows), BATCH):
        part = all_rows[start : start + BATCH]
        ids = np.zeros((len(part), LENGTH), dtype=np.int64)
        mask = np.zeros_like(ids)
        for n, row in enumerate(part):
            ids[n, : len(row)], mask[n, : len(row)] = row, 1
        yield {"input_ids": ids, "attention_mask": mask}


def olaverse_foundry() -> float:
    from foundry.training.mlm import MLMConfig, MLMTrainer

    batches = list(padded_batches())[: WARM + STEPS]
    clock, sizes = Clock(), iter(int(batch["attention_mask"].sum()) for batch in batches)
    config = MLMConfig(mask_token_id=103, vocab_size=VOCABULARY, device="cpu", log_every=1)
    MLMTrainer(model(), None, config).train(batches, on_step=lambda *_: clock.step(next(sizes)))
    return clock.speed


def hugging_face(blocks: bool) -> float:
    import tempfile

    from transformers import (
        DataCollatorForLanguageModeling,
        PreTrainedTokenizerFast,
        Trainer,
        TrainerCallback,
        TrainingArguments,
    )

    tokenizer = _tokenizer(PreTrainedTokenizerFast)
    data = rows()
    if blocks:
        flat = [i for row in data for i in row]
        data = [flat[n : n + LENGTH] for n in range(0, len(flat) - LENGTH, LENGTH)]
    clock, seen = Clock(), []
    collate = DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.15)

    def collator(features):
        seen.append(sum(len(feature["input_ids"]) for feature in features))
        return collate(features)

    class Watch(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            clock.step(seen[state.global_step - 1])

    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            per_device_train_batch_size=BATCH,
            max_steps=WARM + STEPS,
            use_cpu=True,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            remove_unused_columns=False,
        )
        features = [{"input_ids": row} for row in data]
        Trainer(model(), arguments, train_dataset=features, data_collator=collator, callbacks=[Watch()]).train()
    return clock.speed


def _tokenizer(kind):
    from tokenizers import Tokenizer, models

    special = {0: "[PAD]", 100: "[UNK]", 101: "[CLS]", 102: "[SEP]", 103: "[MASK]"}
    vocab = {special.get(i, f"t{i}"): i for i in range(VOCABULARY)}
    engine = Tokenizer(models.WordLevel(vocab, unk_token="[UNK]"))
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    return kind(tokenizer_object=engine, mask_token="[MASK]", **names)


def hugging_face_padded() -> float:
    return hugging_face(blocks=False)


def hugging_face_blocks() -> float:
    return hugging_face(blocks=True)


def measure(side, threads: int, queue) -> None:
    import torch

    torch.set_num_threads(threads)
    queue.put(side())


def run(threads: int) -> None:
    """Runs all sides in turn and prints medians, and ratios round by round."""
    sides = [ours]
    if importlib.util.find_spec("foundry"):
        sides.append(olaverse_foundry)
    if importlib.util.find_spec("accelerate"):
        sides += [hugging_face_padded, hugging_face_blocks]
    context = multiprocessing.get_context("spawn")
    found: dict[str, list[float]] = {side.__name__: [] for side in sides}
    for _ in range(ROUNDS):
        for side in sides:
            queue = context.Queue()
            process = context.Process(target=measure, args=(side, threads, queue))
            process.start()
            found[side.__name__].append(queue.get(timeout=600))
            process.join()
    for name, speeds in found.items():
        ratios = [own / other for own, other in zip(found["ours"], speeds, strict=True)]
        print(
            f"{name:>20}: {statistics.median(speeds):8,.0f} real tokens/s; ours is {statistics.median(ratios):.2f} × "
            f"({min(ratios):.2f} to {max(ratios):.2f})",
            flush=True,
        )
