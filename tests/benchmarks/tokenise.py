"""Text to tokenised rows on disk: beside the tokenizer's own batch speed, and how long the next start takes.

A file of about 100 MB (the paragraphs of `python-docs`, numbered and repeated) is read, tokenised and written to the
Arrow cache, and a quarter of it too: the memory that the process holds for itself (pages of mapped files, which the
system takes back when it needs them, do not count) does not grow with the file. `raw` calls `encode_batch` on the same
texts, already in memory, and throws the result away: what no data path can beat that keeps it. The second start makes
a new pipeline over the same file, its order and its first batch.
"""

from __future__ import annotations

import itertools
import math
import os
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

from tests.benchmarks._rounds import Figures, held_mib, in_turn, peak_held, table, write

MEGABYTES, LENGTH = 100, 128
HELD = "peak MiB held above the start"


def tokenizer() -> Any:
    from foundry_lightning.tokenizer import train_tokenizer

    return train_tokenizer("python-docs", vocab_size=8000)


def corpus(folder: str, *, megabytes: int = MEGABYTES) -> str:
    """The path of a text file of this size, made on the first call."""
    from foundry_lightning.data.sources import open_source

    path = Path(folder) / f"corpus{megabytes}.txt"
    if not path.exists():
        paragraphs = [
            " ".join(text.split()) for text in open_source("python-docs", text_column="text", split_txt="line").rows()
        ]
        with path.open("w") as file:
            for number, text in enumerate(itertools.cycle(paragraphs)):
                file.write(f"{number} {text}\n")
                if number % 1000 == 0 and file.tell() > megabytes * 10**6:
                    break
    return str(path)


def raw(folder: str) -> Figures:
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    engine = tokenizer().backend_tokenizer
    engine.enable_truncation(LENGTH)
    texts = Path(corpus(folder)).read_text().splitlines()
    began = time.perf_counter()
    for first in range(0, len(texts), 1000):
        engine.encode_batch(texts[first : first + 1000])
    speed = MEGABYTES / (time.perf_counter() - began)
    return {"MB/s": speed, "seconds of the next start": math.nan, HELD: math.nan}  # it keeps nothing


def ours(folder: str, megabytes: int) -> Figures:
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    from foundry_lightning import DataPipeline

    own, path = tokenizer(), corpus(folder, megabytes=megabytes)
    with tempfile.TemporaryDirectory() as cache:
        os.environ["FOUNDRY_LIGHTNING_CACHE"] = cache
        before = held_mib()
        with peak_held() as peak:
            began = time.perf_counter()
            DataPipeline(path, own, max_length=LENGTH).prepare()
            seconds = time.perf_counter() - began
        began = time.perf_counter()
        pipe = DataPipeline(path, own, batch_size=64, max_length=LENGTH, pack=True)
        pipe.batch(0, pipe.order(seed=0, epoch=0, shuffle=True))
        return {
            "MB/s": megabytes / seconds,
            "seconds of the next start": time.perf_counter() - began,
            HELD: peak[0] - before,
        }


def run(*, threads: int, rounds: int, out: str) -> None:
    """Both in turn; the ratio is raw's time over ours."""
    with tempfile.TemporaryDirectory() as folder:
        for size in (MEGABYTES, MEGABYTES // 4):
            corpus(folder, megabytes=size)
        sides = {
            "ours, read, tokenised and written": partial(ours, folder, MEGABYTES),
            "ours, a quarter of the file": partial(ours, folder, MEGABYTES // 4),
            "raw encode_batch": partial(raw, folder),
        }
        found = in_turn(sides, threads=threads, rounds=rounds)
    lines = table(found, ratio="MB/s", of="ours, read, tokenised and written")
    write("tokenise", lines, found, out=out, bar="MB/s")
