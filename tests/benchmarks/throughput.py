"""MLM pretraining: real tokens a second and peak memory, ours against the peers, on the same rows, model and machine.

BERT 6 × 384 (FFN 1152, V = 30,522), rows of 44 tokens on average cut at 128, batches of 16 rows, float32, AdamW with
clipping; padding is no token. Useful FLOP/s are those of the body on real tokens and of the projection at masked ones,
over the rate of plain matrix products of such shapes, measured in the same process. Peers: `olaverse-foundry` 0.3.0
(`pip install --no-deps olaverse-foundry==0.3.0`) and the Hugging Face Trainer with `DataCollatorForLanguageModeling`,
padded and in full blocks (`pip install accelerate`); each is left out where it is missing.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from tests.benchmarks._rounds import Figures, hold_state, in_turn, matmul_rate, peak_mib, table, write

WARM, STEPS = 2, 8
VOCABULARY, BATCH, LENGTH = 30_522, 16, 128
OURS = {"mask_token_id": 103, "special_token_ids": (101, 102), "device": "cpu", "progress_bar": False}
LAYERS, WIDTH, INNER, MASKED = 6, 384, 1152, 0.15


def model() -> Any:
    import torch
    from transformers import BertConfig, BertForMaskedLM

    torch.manual_seed(0)
    sizes = {"hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": 6, "intermediate_size": INNER}
    return BertForMaskedLM(BertConfig(vocab_size=VOCABULARY, max_position_embeddings=LENGTH, **sizes))


def rows() -> list[list[int]]:
    """Rows of ids with the lengths of short texts: log-normal, 44 on average, at most 128."""
    import numpy as np

    generator = np.random.default_rng(1)
    lengths = np.clip(np.exp(generator.normal(3.55, 0.75, BATCH * 200)), 5, LENGTH).astype(int)
    return [[101, *generator.integers(1000, VOCABULARY, n - 2).tolist(), 102] for n in lengths]


def padded(all_rows: list[list[int]], *, number: int) -> list[dict[str, Any]]:
    """The first batches of these rows, padded to `LENGTH`."""
    import numpy as np

    batches = []
    for start in range(0, BATCH * number, BATCH):
        ids = np.zeros((BATCH, LENGTH), dtype=np.int64)
        for n, row in enumerate(all_rows[start : start + BATCH]):
            ids[n, : len(row)] = row
        batches.append({"input_ids": ids, "attention_mask": (ids != 0).astype(np.int64)})
    return batches


def useful_flops_a_token() -> float:
    """Forward and backward: 6 for each weight a token meets, 12 · length · width for attention within its text."""
    lengths = [len(row) for row in rows()]
    neighbours = sum(n * n for n in lengths) / sum(lengths)
    layer = 6 * (4 * WIDTH**2 + 2 * WIDTH * INNER) + 12 * neighbours * WIDTH
    return LAYERS * layer + MASKED * 6 * (WIDTH**2 + VOCABULARY * WIDTH)


class Clock:
    """Tokens and seconds after the warm-up, and the peak of memory above what is there before it."""

    def __init__(self, student: Any, warm: int = WARM) -> None:
        hold_state(student)
        self.warm = warm
        self.steps = self.tokens = 0
        self.began = self.ended = 0.0
        self.before = peak_mib()

    def callback(self) -> Any:
        """Steps at each batch of a Lightning run of ours."""
        from lightning.pytorch.callbacks import LambdaCallback

        return LambdaCallback(on_train_batch_end=lambda *seen: self.step(seen[3]["info"]["num_attended"]))

    def step(self, tokens: int) -> None:
        self.steps += 1
        self.ended = time.perf_counter()
        if self.steps > self.warm:
            self.tokens += tokens
        if self.steps == self.warm:
            self.began = self.ended

    def figures(self) -> Figures:
        speed = self.tokens / (self.ended - self.began)
        return {"real tokens/s": speed, "MiB above models and optimizer": peak_mib() - self.before}

    def with_share(self) -> Figures:
        """Also the useful FLOP/s, in percent of the rate of plain matrix products."""
        figures = self.figures()
        share = 100 * figures["real tokens/s"] * useful_flops_a_token() / matmul_rate()
        return {**figures, "% of matrix products": share}


def ours(**settings: Any) -> Figures:
    from foundry_lightning import DataPipeline, MLMConfig, MLMTrainer

    student = model()
    clock = Clock(student)
    compiled = settings.pop("compile", False)
    config = MLMConfig(**OURS, compile=compiled, trainer_kwargs={"callbacks": [clock.callback()]})
    pipe = DataPipeline(rows(), batch_size=BATCH, max_length=LENGTH, **settings)
    MLMTrainer(student, config=config).train(pipe, shuffle=True, total_steps=WARM + STEPS)
    return clock.with_share()


def olaverse_foundry() -> Figures:
    from foundry.training.mlm import MLMConfig, MLMTrainer

    batches = padded(rows(), number=WARM + STEPS)
    student = model()
    clock, sizes = Clock(student), iter(int(batch["attention_mask"].sum()) for batch in batches)
    config = MLMConfig(mask_token_id=103, vocab_size=VOCABULARY, device="cpu", log_every=1)
    MLMTrainer(student, None, config).train(batches, on_step=lambda *_: clock.step(next(sizes)))
    return clock.with_share()


def hugging_face(*, blocks: bool) -> Figures:
    import tempfile

    from transformers import DataCollatorForLanguageModeling, Trainer, TrainerCallback, TrainingArguments

    data = rows()
    if blocks:
        flat = [i for row in data for i in row]
        data = [flat[n : n + LENGTH] for n in range(0, len(flat) - LENGTH, LENGTH)]
    student = model()
    clock, seen = Clock(student), []
    collate = DataCollatorForLanguageModeling(_tokenizer(), mlm_probability=MASKED)

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
        Trainer(student, arguments, train_dataset=features, data_collator=collator, callbacks=[Watch()]).train()
    return clock.with_share()


def _tokenizer() -> Any:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    special = {0: "[PAD]", 100: "[UNK]", 101: "[CLS]", 102: "[SEP]", 103: "[MASK]"}
    vocab = {special.get(i, f"t{i}"): i for i in range(VOCABULARY)}
    engine = Tokenizer(models.WordLevel(vocab, unk_token="[UNK]"))
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    return PreTrainedTokenizerFast(tokenizer_object=engine, mask_token="[MASK]", **names)


def run(*, threads: int, rounds: int, out: str) -> None:
    """Runs all sides in turn and writes medians and ratios."""
    sides: dict[str, Callable[[], Figures]] = {
        "ours, packed": partial(ours, pack=True),
        "ours, packed and compiled": partial(ours, pack=True, compile=True),
        "ours, grouped by length": partial(ours, group_by_length=True),
    }
    if importlib.util.find_spec("foundry"):
        sides["olaverse-foundry 0.3.0"] = olaverse_foundry
    if importlib.util.find_spec("accelerate"):
        sides["Hugging Face Trainer, padded"] = partial(hugging_face, blocks=False)
        sides["Hugging Face Trainer, in blocks"] = partial(hugging_face, blocks=True)
    found = in_turn(sides, threads=threads, rounds=rounds)
    lines = table(found, ratio="real tokens/s", of="ours, packed")
    write("throughput", lines, found, out=out, bar="real tokens/s")
