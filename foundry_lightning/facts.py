"""What is known of a run before its first update: data, model, plan and memory, and what looks wrong with them."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy

from foundry_lightning.data.order import PAD_TO, grouped_order, packed_rows
from foundry_lightning.data.pipeline import DataPipeline
from foundry_lightning.data.ready import ReadyBatches
from foundry_lightning.draws import permutation
from foundry_lightning.projection import rounds_float32_products

_WHOLE = 200_000  # rows up to which all are looked at
_SAMPLE = 10_000  # rows that stand for a larger source, or for a stream
_MOST_TOKENS = 25_000_000  # more would take longer than the 5 s that a start may
_MOST_PARAMETERS = 200_000_000  # of a CPU model that takes a step on a few tokens in about 3 s
_BLOCK = 100  # rows that a sample takes from one place of the table
_READING = 1.5  # seconds in which texts are read and tokenised


def sample_rows(pipeline: DataPipeline) -> list[np.ndarray]:
    """Token ids `[S]` of all rows; of a stream or a source over 200,000 rows or 25 million tokens a sample of 10,000.

    A sized source gives blocks spread evenly over it, a stream its first rows; one that would lose them by that none.
    """
    if pipeline.is_stream:
        return [row["input_ids"] for row in pipeline.rows_of(_in_time(pipeline.source.peek(_SAMPLE)))]
    column = pipeline.table.data.column("input_ids")
    if len(column) > _WHOLE or (len(column) > _SAMPLE and sum(len(c.values) for c in column.chunks) > _MOST_TOKENS):
        starts = np.linspace(0, len(column) - _BLOCK, _SAMPLE // _BLOCK).astype(int).tolist()
        column = pa.chunked_array([chunk for s in starts for chunk in column.slice(s, _BLOCK).chunks])
    rows: list[np.ndarray] = []
    for chunk in column.chunks:
        offsets = chunk.offsets.to_numpy()
        values = chunk.values.to_numpy()
        rows += [values[a:b] for a, b in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)]
    return rows


def _in_time(items: Iterator[Any]) -> list[Any]:
    end, taken = time.monotonic() + _READING, []
    for item in items:
        taken.append(item)
        if time.monotonic() > end:
            break
    return taken


def data_facts(batches: DataPipeline | ReadyBatches, *, masking: Any, seed: int, shuffle: bool) -> dict[str, Any]:
    """Figures of the training data; shares lie in [0, 1].

    Args:
        batches: The training data.
        masking: The module's masking; None: no special, unknown and masked shares.
        seed: Seed of the order, in which the padding is counted.
        shuffle: Whether the rows are permuted.
    """
    if isinstance(batches, ReadyBatches):
        attended = [batch["attention_mask"] for batch in batches.batches]
        rows = [r[m != 0] for b in batches.batches for r, m in zip(b["input_ids"], b["attention_mask"], strict=True)]
        rows = [row.numpy() for row in rows]
        num_rows: int | None = len(rows)
        places = sum(mask.numel() for mask in attended)
    else:
        rows = sample_rows(batches)
        num_rows = None if batches.is_stream else len(batches.table)
        if not rows:
            return {"source": batches.source.description, "rows": None, "sampled_rows": 0}
        places = _places(np.array([len(row) for row in rows]), batches, seed=seed, shuffle=shuffle)
    lengths = np.array([len(row) for row in rows])
    flat, starts = np.concatenate(rows).astype(np.uint64), np.cumsum(lengths) - lengths
    facts: dict[str, Any] = {
        "source": batches.source.description if isinstance(batches, DataPipeline) else "ready batches",
        "rows": num_rows,
        "sampled_rows": len(rows),
        "tokens": int(lengths.sum()) if num_rows == len(rows) else None,
        "tokens_per_row": float(lengths.mean()),
        "padding_share": 1 - float(lengths.sum()) / max(places, 1),
        "duplicate_share": 1 - len(np.unique(_hashes(flat, lengths, starts))) / len(rows),
    }
    if num_rows is not None and facts["tokens"] is None:
        facts["tokens"] = round(facts["tokens_per_row"] * num_rows)
    if isinstance(batches, DataPipeline):
        facts |= _cut(batches)
    if masking is not None:
        special = np.isin(flat, np.array(masking.special_token_ids, dtype=np.uint64))
        facts["special_share"] = float(special.mean()) if len(flat) else 0.0
        facts["masked_share"] = masking.mask_prob * (1 - facts["special_share"])
        unknown = getattr(batches.tokenizer, "unk_token_id", None)
        if unknown is not None:
            is_unknown = flat == unknown
            ordinary = max(int((~special | is_unknown).sum()), 1)
            facts["unknown_share"] = float(is_unknown.sum()) / ordinary
    return facts


def _hashes(flat: np.ndarray, lengths: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """A 64-bit number per row, equal for equal rows (multilinear hashing with a fixed weight per position)."""
    longest = int(lengths.max()) + 1
    weights = _weights(longest)
    positions = np.arange(len(flat)) - np.repeat(starts, lengths)
    terms = (flat + np.uint64(1)) * weights[positions]
    sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum(terms, dtype=np.uint64)])
    found: np.ndarray = sums[starts + lengths] - sums[starts]
    return found


def _weights(size: int) -> np.ndarray:
    """`[size]` odd 64-bit numbers without a pattern, from a generator of their own."""
    return np.random.Generator(np.random.PCG64(0)).integers(0, 2**63, size, dtype=np.uint64) * 2 + 1


def _places(lengths: np.ndarray, pipeline: DataPipeline, *, seed: int, shuffle: bool) -> int:
    """Places of the batches, padding included, that rows of these lengths fill in the first epoch."""
    if pipeline.pack:
        sizes = np.diff(packed_rows(lengths, max_length=pipeline.max_length).starts)
        return len(sizes) * pipeline.max_length
    size = pipeline.batch_size
    if pipeline.batch_tokens is not None:
        size = max(pipeline.batch_tokens // max(int(lengths.mean()), 1), 1)
    if pipeline.group_by_length:
        order = grouped_order(lengths, seed=seed, epoch=0, shuffle=shuffle, batch_size=size, over=64).rows
        lengths = lengths[np.asarray(order)]
    elif shuffle and not pipeline.is_stream:
        lengths = lengths[permutation(len(lengths), seed=seed, epoch=0).numpy()]
    padded = np.concatenate([lengths, np.zeros(-len(lengths) % size, lengths.dtype)]).reshape(-1, size)
    widths = np.minimum(np.maximum(-(-padded.max(axis=1) // PAD_TO) * PAD_TO, PAD_TO), pipeline.max_length)
    counts = np.full(len(padded), size)
    counts[-1] -= -len(lengths) % size
    return int((widths * counts).sum())


def _cut(pipeline: DataPipeline) -> dict[str, float | int | None]:
    """Shares of the texts longer than `max_length` and of the tokens cut from them, and what would keep 95 % whole."""
    found: dict[str, float | int | None] = dict.fromkeys(("cut_share", "cut_token_share", "max_length_for_95_percent"))
    if pipeline.long_rows != "truncate":
        return {**found, "cut_share": 0.0, "cut_token_share": 0.0}
    whole = pipeline.untruncated_lengths(_in_time(pipeline.source.peek(_SAMPLE)))
    if whole is None or not len(whole):
        return found
    found["cut_share"] = float((whole > pipeline.max_length).mean())
    found["cut_token_share"] = float(np.maximum(whole - pipeline.max_length, 0).sum() / max(whole.sum(), 1))
    found["max_length_for_95_percent"] = int(-(-np.quantile(whole, 0.95) // PAD_TO) * PAD_TO)
    return found


def model_facts(module: Any) -> dict[str, Any]:
    """Parameters, and the way the vocabulary is projected."""
    parameters = list(module.student.parameters())
    facts: dict[str, Any] = {
        "student": type(module.student).__name__,
        "parameters": sum(p.numel() for p in parameters),
        "trainable_parameters": sum(p.numel() for p in parameters if p.requires_grad),
    }
    facts["frozen_parameters"] = facts["parameters"] - facts["trainable_parameters"]
    facts["unreached_parameters"] = _unreached(module)
    facts["idle_tensor_cores"] = (
        module.device.type == "cuda"
        and module.trainer.precision == "32-true"
        and not rounds_float32_products(module.device)
        and torch.cuda.get_device_capability(module.device) >= (8, 0)
    )
    if getattr(module, "projection", None) is not None:
        facts["projection"] = module.projection.reason
    if getattr(module, "teacher", None) is not None:
        facts["teacher"] = type(module.teacher).__name__
        facts["teacher_parameters"] = sum(p.numel() for p in module.teacher.parameters())
    return facts


def _unreached(module: Any) -> int | None:
    """Trainable parameters that no loss reaches; None where a step on a few tokens cannot tell."""
    if not isinstance(module.trainer.strategy, (SingleDeviceStrategy, DDPStrategy)):  # a forward gathers shards
        return None
    if module.device.type == "cpu" and sum(p.numel() for p in module.parameters()) > _MOST_PARAMETERS:
        return None
    try:
        return int(sum(p.numel() for p in module.parameters_without_gradient().values()))
    except Exception:  # the forward is the user's code, and may not take so short a row: the first step tells
        return None


def plan_facts(trainer: Any, data: dict[str, Any], *, num_batches: int | None, total: float) -> dict[str, Any]:
    """Updates, passes over the data and tokens of the whole run; None where nothing says how many."""
    window = trainer.accumulate_grad_batches * trainer.world_size
    facts: dict[str, Any] = {
        "updates": None if math.isinf(total) else int(total),
        "updates_done": trainer.global_step,
        "batches_per_update": window,
        "batches_per_epoch": num_batches,
        "epochs_planned": None,
        "tokens_planned": None,
    }
    if facts["updates"] is not None and num_batches:
        facts["epochs_planned"] = facts["updates"] / -(-num_batches // window)
        if data.get("tokens") is not None:
            facts["tokens_planned"] = round(data["tokens"] * facts["epochs_planned"])
    return facts


def memory_facts(module: Any, device: torch.device, *, optimizers: list[torch.optim.Optimizer]) -> dict[str, Any]:
    """Bytes that a run takes beside the activations of a batch, how many of them are still to come, and what is free.

    `memory_without_activations` are weights (a teacher's too), gradients and optimizer state.
    """
    weights = sum(p.numel() * p.element_size() for p in module.parameters())
    gradients = sum(p.numel() * p.element_size() for p in module.parameters() if p.requires_grad)
    state = held = 0
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            moments = 2 if "betas" in group else 1  # AdamW keeps two, Muon one
            state += moments * sum(p.numel() * p.element_size() for p in group["params"])
        values = [value for entry in optimizer.state.values() for value in entry.values()]
        held += sum(value.numel() * value.element_size() for value in values if torch.is_tensor(value))
    return {
        "memory_without_activations": weights + gradients + state,
        "memory_of_gradients": gradients,
        "memory_of_optimizer": state,
        "memory_to_come": gradients + max(state - held, 0),  # a resumed run holds its moments already
        "memory_free": free_memory(device),
    }


def free_memory(device: torch.device) -> int | None:
    """Bytes that a process can still have on a device; None where the system does not say."""
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + cached
    meminfo = Path("/proc/meminfo")
    if device.type != "cpu" or not meminfo.exists():
        return None
    found = re.search(r"MemAvailable:\s+(\d+) kB", meminfo.read_text())
    return None if found is None else int(found[1]) * 1024


def warnings_of(facts: dict[str, Any]) -> list[str]:
    """A sentence with advice for each figure that is bad."""
    data, plan, found = facts["data"], facts["plan"], []
    if data.get("duplicate_share", 0) > 0.10:
        found.append(f"{data['duplicate_share']:.0%} of the rows are copies of another; remove duplicates.")
    if data.get("unknown_share", 0) > 0.01:
        found.append(
            f"{data['unknown_share']:.1%} of the ordinary tokens are unknown to the tokenizer; train one on this text."
        )
    texts, tokens = (data.get(name) or 0 for name in ("cut_share", "cut_token_share"))
    if texts > 0.30 or tokens > 0.10:
        found.append(
            f"max_length cuts {texts:.1%} of the texts, and with them {tokens:.0%} of all tokens; long_rows='split' "
            f"keeps all, max_length={data['max_length_for_95_percent']} would keep 95 % of the texts whole."
        )
    if plan["batches_per_epoch"] and plan["batches_per_update"] > plan["batches_per_epoch"]:
        found.append(
            f"an update takes {plan['batches_per_update']} batches and an epoch has {plan['batches_per_epoch']}: each "
            "epoch is one short update; lower the accumulation or batch_size."
        )
    if facts.get("model", {}).get("idle_tensor_cores"):
        found.append(
            "products in float32 leave this GPU's tensor cores idle; set torch_dtype='bfloat16' (Trainer: "
            "precision='bf16-mixed'), or torch.set_float32_matmul_precision('high')."
        )
    memory = facts["memory"]
    if memory["memory_free"] is not None and memory["memory_to_come"] > memory["memory_free"]:
        found.append(
            f"gradients and optimizer state alone need {memory['memory_to_come'] / 2**20:,.0f} MiB more, and "
            f"{memory['memory_free'] / 2**20:,.0f} MiB are free; take a smaller model."
        )
    return found


def unigram_loss(
    train: DataPipeline, val: DataPipeline, *, special_token_ids: tuple[int, ...], vocab_size: int
) -> float | None:
    """Cross-entropy in nats of the validation tokens under the training tokens' frequencies (add-one smoothing).

    What a model that ignores the context reaches; special tokens count on neither side. None where a source cannot be
    looked at without losing its rows.
    """
    counts = [_token_counts(pipeline, special_token_ids, vocab_size) for pipeline in (train, val)]
    if not all(count.sum() for count in counts):
        return None
    log_shares = np.log((counts[0] + 1) / (counts[0] + 1).sum())
    return float(-(counts[1] * log_shares).sum() / counts[1].sum())


def _token_counts(pipeline: DataPipeline, special: tuple[int, ...], vocab_size: int) -> np.ndarray:
    rows = sample_rows(pipeline)
    counts = np.bincount(np.concatenate([np.zeros(0, np.int32), *rows]), minlength=vocab_size)
    counts[list(special)] = 0
    return counts


def facts_of(trainer: Any, module: Any) -> dict[str, Any]:
    """All facts of a run that is about to make its first update: plain numbers, text and None, grouped.

    Changes nothing: no generator is drawn from, and no row of an iterator that can be read once is taken.
    """
    data = trainer.datamodule
    train, val, masking = data.train, data.val, getattr(module, "masking", None)
    described = data_facts(train, masking=masking, seed=data.seed, shuffle=data.shuffle)
    end = getattr(getattr(module, "mask_share", None), "end", None)
    if end is not None and "special_share" in described:
        described["masked_at_end_share"] = end * (1 - described["special_share"])
    num_batches = None if train.is_stream else train.num_batches()
    facts: dict[str, Any] = {
        "data": described,
        "model": model_facts(module),
        "plan": plan_facts(trainer, described, num_batches=num_batches, total=module._num_updates()),
        "memory": memory_facts(module, trainer.strategy.root_device, optimizers=trainer.optimizers),
        "unigram_baseline": None,
    }
    if masking is not None and isinstance(train, DataPipeline) and isinstance(val, DataPipeline):
        facts["unigram_baseline"] = unigram_loss(
            train, val, special_token_ids=masking.special_token_ids, vocab_size=masking.vocab_size
        )
    return {**facts, "warnings": warnings_of(facts)}


__all__ = ["data_facts", "facts_of", "unigram_loss", "warnings_of"]
