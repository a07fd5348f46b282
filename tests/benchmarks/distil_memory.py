"""Peak memory and time of a distillation step, ours against the plain formula.

V = 119,547, 16 × 128 tokens, teacher 12 × 768, student 4 × 312 (random weights: neither depends on their values). Each
side runs in processes of its own, in turn; the peak is the process's highest resident size above that with both models,
gradients and optimizer state in memory. The plain formula is the published one: full logits of both models, softened
KL at the masked places, cross-entropy with −100 elsewhere, cosine on `output_hidden_states`.
"""

from __future__ import annotations

import multiprocessing
import resource
import statistics
import time

ROUNDS, STEPS = 3, 2
VOCABULARY, BATCH, LENGTH = 119_547, 16, 128


def models():
    import torch
    from transformers import BertConfig, BertForMaskedLM

    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY, "max_position_embeddings": LENGTH}
    teacher = BertForMaskedLM(BertConfig(hidden_size=768, num_hidden_layers=12, **sizes))
    student = BertForMaskedLM(
        BertConfig(hidden_size=312, num_hidden_layers=4, num_attention_heads=12, intermediate_size=1200, **sizes)
    )
    return student, teacher


def batches(count: int):
    import torch

    generator = torch.Generator().manual_seed(1)
    return [torch.randint(10, VOCABULARY, (BATCH, LENGTH), generator=generator) for _ in range(count)]


def peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def ours(threads: int, queue) -> None:
    import lightning
    import torch

    from foundry_lightning import DistilMLMConfig, DistilMLMTrainer

    torch.set_num_threads(threads)
    student, teacher = models()
    seen = {}

    class Watch(lightning.Callback):
        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            if batch_idx == 0:
                hold_state(student)
                seen["before"] = peak_mib()
            seen.setdefault("began", time.perf_counter()) if batch_idx == 1 else None

        def on_train_batch_end(self, *args):
            seen["ended"] = time.perf_counter()

    config = DistilMLMConfig(mask_token_id=4, device="cpu", progress_bar=False, trainer_kwargs={"callbacks": [Watch()]})
    DistilMLMTrainer(student, teacher, config=config).train(batches(1 + STEPS))
    queue.put((peak_mib() - seen["before"], (seen["ended"] - seen["began"]) / STEPS))


def hold_state(student) -> None:
    """Touches as much memory as gradients and AdamW's moments will take, and frees it: both sides have them anyway."""
    import torch

    state = [torch.ones_like(p) for p in student.parameters() for _ in range(3)]
    del state


def plain(threads: int, queue) -> None:
    import torch
    import torch.nn.functional as F

    torch.set_num_threads(threads)
    student, teacher = models()
    student.train()
    teacher.eval()
    projector = torch.nn.Linear(312, 768, bias=False)
    optimizer = torch.optim.AdamW([*student.parameters(), *projector.parameters()], lr=5e-5)
    before = began = None
    for number, ids in enumerate(batches(1 + STEPS)):
        if number == 0:
            hold_state(student)
            before = peak_mib()
        if number == 1:
            began = time.perf_counter()
        attention = torch.ones_like(ids)
        masked = torch.rand(ids.shape, generator=torch.Generator().manual_seed(number)) < 0.15
        labels = ids.where(masked, -100)
        inputs = {"input_ids": ids.where(~masked, 4), "attention_mask": attention, "output_hidden_states": True}
        out = student(**inputs)
        with torch.no_grad():
            target = teacher(**inputs)
        mlm = F.cross_entropy(out.logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
        distill = 4 * F.kl_div(
            F.log_softmax(out.logits / 2, -1)[masked], F.softmax(target.logits / 2, -1)[masked], reduction="batchmean"
        )
        states = projector(out.hidden_states[-1]).flatten(0, 1)
        cosine = 1 - F.cosine_similarity(states, target.hidden_states[-1].flatten(0, 1)).mean()
        (2 * mlm + 5 * distill + cosine).backward()
        torch.nn.utils.clip_grad_norm_(student.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    queue.put((peak_mib() - before, (time.perf_counter() - began) / STEPS))


def run(*, threads: int, rounds: int = ROUNDS, out: str = "") -> None:
    """Runs both in turn and prints medians and ratios."""
    context = multiprocessing.get_context("spawn")
    found: dict[str, list[tuple[float, float]]] = {"ours": [], "plain": []}
    for _ in range(rounds):
        for name, side in (("ours", ours), ("plain", plain)):
            queue = context.Queue()
            process = context.Process(target=side, args=(threads, queue))
            process.start()
            found[name].append(queue.get())
            process.join()
    for index, unit in ((0, "MiB above models, gradients and optimizer state"), (1, "seconds a step")):
        values = {name: statistics.median(entry[index] for entry in entries) for name, entries in found.items()}
        ratios = [p[index] / o[index] for o, p in zip(found["ours"], found["plain"], strict=True)]
        print(
            f"{unit}: ours {values['ours']:,.1f}, plain formula {values['plain']:,.1f}, plain / ours median "
            f"{statistics.median(ratios):.2f} (from {min(ratios):.2f} to {max(ratios):.2f})",
            flush=True,
        )
