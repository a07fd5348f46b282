"""Distillation: real tokens a second and peak memory, ours against the plain formula and `olaverse-foundry`.

V = 119,547, teacher 12 × 768, student 4 × 312 (random weights: nothing here depends on their values), 16 × 128 tokens,
float32: the sizes of configs/distil_bert_multilingual.yaml. Long rows are all 128 tokens; mixed ones have the lengths
of `throughput`, padded to 128 for the others and packed for ours. The plain formula is the published one: full scores
of both models, softened KL at the masked places, cross-entropy with −100 elsewhere, cosine on `output_hidden_states`.
Memory is the process's peak above both models, gradients and optimizer state. The peer: `pip install --no-deps
olaverse-foundry==0.3.0`.
"""

from __future__ import annotations

import importlib.util
from functools import partial
from typing import Any

from tests.benchmarks import throughput
from tests.benchmarks._rounds import Figures, in_turn, table, write

WARM, STEPS = 2, 4
VOCABULARY = 119_547
BATCH, LENGTH = throughput.BATCH, throughput.LENGTH


def models(vocab_size: int = VOCABULARY) -> tuple[Any, Any]:
    import torch
    from transformers import BertConfig, BertForMaskedLM

    torch.manual_seed(0)
    sizes = {"vocab_size": vocab_size, "max_position_embeddings": LENGTH}
    teacher = BertForMaskedLM(BertConfig(hidden_size=768, num_hidden_layers=12, **sizes))
    student = BertForMaskedLM(
        BertConfig(hidden_size=312, num_hidden_layers=4, num_attention_heads=12, intermediate_size=1200, **sizes)
    )
    return student, teacher


def rows(*, mixed: bool) -> list[list[int]]:
    import numpy as np

    if mixed:
        return throughput.rows()
    generator = np.random.default_rng(1)
    return [[101, *generator.integers(1000, VOCABULARY, LENGTH - 2).tolist(), 102] for _ in range(BATCH * 8)]


def ours(*, mixed: bool, vocab_size: int = VOCABULARY) -> Figures:
    from foundry_lightning import DataPipeline, DistilMLMConfig, DistilMLMTrainer

    student, teacher = models(vocab_size)
    clock = throughput.Clock(student, WARM)
    config = DistilMLMConfig(**throughput.OURS, trainer_kwargs={"callbacks": [clock.callback()]})
    pipe = DataPipeline(rows(mixed=mixed), batch_size=BATCH, max_length=LENGTH, pack=mixed)
    DistilMLMTrainer(student, teacher, config=config).train(pipe, total_steps=WARM + STEPS)
    return clock.figures()


def plain(*, mixed: bool) -> Figures:
    import torch
    import torch.nn.functional as F

    student, teacher = models()
    student.train()
    teacher.eval()
    projector = torch.nn.Linear(312, 768, bias=False)
    optimizer = torch.optim.AdamW([*student.parameters(), *projector.parameters()], lr=5e-5)
    clock = throughput.Clock(student, WARM)
    for number, batch in enumerate(throughput.padded(rows(mixed=mixed), number=WARM + STEPS)):
        ids, attended = (torch.from_numpy(batch[name]) for name in ("input_ids", "attention_mask"))
        chosen = torch.rand(ids.shape, generator=torch.Generator().manual_seed(number)) < 0.15
        masked = chosen & (attended != 0)
        labels = ids.where(masked, -100)
        inputs = {"input_ids": ids.where(~masked, 103), "attention_mask": attended, "output_hidden_states": True}
        out = student(**inputs)
        with torch.no_grad():
            target = teacher(**inputs)
        mlm = F.cross_entropy(out.logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
        distill = 4 * F.kl_div(
            F.log_softmax(out.logits / 2, -1)[masked], F.softmax(target.logits / 2, -1)[masked], reduction="batchmean"
        )
        states = projector(out.hidden_states[-1])[attended != 0]
        cosine = 1 - F.cosine_similarity(states, target.hidden_states[-1][attended != 0]).mean()
        (2 * mlm + 5 * distill + cosine).backward()
        torch.nn.utils.clip_grad_norm_(student.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        clock.step(int(attended.sum()))
    return clock.figures()


def olaverse_foundry(*, mixed: bool) -> Figures:
    from foundry.training.distil_mlm import DistilMLMConfig, DistilMLMTrainer

    student, teacher = models()
    batches = throughput.padded(rows(mixed=mixed), number=WARM + STEPS)
    clock, sizes = throughput.Clock(student, WARM), iter(int(batch["attention_mask"].sum()) for batch in batches)
    config = DistilMLMConfig(mask_token_id=103, vocab_size=VOCABULARY, device="cpu", log_every=1)
    trainer = DistilMLMTrainer(student, teacher, None, config)
    trainer.train(batches, on_step=lambda *_: clock.step(next(sizes)))
    return clock.figures()


def run(*, threads: int, rounds: int, out: str) -> None:
    """Runs all sides in turn and writes medians and ratios, for long rows and for mixed ones."""
    for mixed in (False, True):
        sides = {"ours": ours, "plain formula": plain}
        if importlib.util.find_spec("foundry"):
            sides["olaverse-foundry 0.3.0"] = olaverse_foundry
        found = in_turn(
            {name: partial(side, mixed=mixed) for name, side in sides.items()}, threads=threads, rounds=rounds
        )
        name = "distil_mixed" if mixed else "distil_long"
        lines = table(found, ratio="real tokens/s", of="ours")
        lines += ["", *table(found, ratio="MiB above models and optimizer", of="ours", higher_is_better=False)]
        write(name, lines, found, out=out, bar="real tokens/s")
