"""What a run leaves is read by the field's other tools: pipelines, sentence-transformers, the hub's card, ONNX."""

from __future__ import annotations

import importlib

import numpy as np
import pytest
import torch
from huggingface_hub import ModelCard
from transformers import AutoModel, AutoModelForMaskedLM, AutoTokenizer, pipeline

from foundry_lightning import EncoderDistillTrainer, FromConfig, MLMTrainer, WithMLMHead
from foundry_lightning.export import export_onnx, export_student
from foundry_lightning.tokenizer import train_tokenizer
from tests.conftest import texts, tiny_bert
from tests.test_cli import CONFIG, run
from tests.test_encoder_distil import encoder

SIZE = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
FAMILIES = {
    "bert": ("wordpiece", {**SIZE, "max_position_embeddings": 24}),
    "roberta": ("bpe", {**SIZE, "max_position_embeddings": 26}),
    "modernbert": ("unigram", {**SIZE, "max_position_embeddings": 24}),
    "distilbert": ("wordpiece", {"dim": 16, "n_layers": 1, "n_heads": 2, "hidden_dim": 32}),
}
LONG = " ".join(texts(40))


@pytest.fixture(scope="module")
def exported(tmp_path_factory) -> dict:
    """A folder per family, as a trainer's `export` writes it."""
    folders = {}
    for family, (kind, config) in FAMILIES.items():
        size = 300 if kind == "bpe" else 50
        tokenizer = train_tokenizer(texts(60), vocab_size=size, kind=kind, min_frequency=1)
        student = FromConfig(family, config).build(tokenizer)
        folders[family] = MLMTrainer(student, tokenizer).export(tmp_path_factory.mktemp("exports") / family)
    return folders


@pytest.mark.parametrize("family", FAMILIES)
def test_the_fill_mask_pipeline_fills_a_blank_and_takes_a_long_text(exported, family):
    fill = pipeline("fill-mask", str(exported[family]), tokenizer_kwargs={"truncation": True})
    blank = fill.tokenizer.mask_token
    guesses = fill(f"the {blank} sat on a mat")
    assert len(guesses) == 5
    assert 0 < guesses[0]["score"] < 1
    assert len(fill(f"{blank} {LONG}")) == 5


@pytest.mark.parametrize("family", FAMILIES)
def test_automodel_loads_the_base_with_the_states_of_the_whole_model(exported, family):
    ids = torch.tensor([[2, 6, 7, 8, 3]])
    base = AutoModel.from_pretrained(exported[family]).eval()
    whole = AutoModelForMaskedLM.from_pretrained(exported[family]).eval()
    with torch.no_grad():
        assert torch.equal(base(ids)[0], whole.base_model(ids)[0])


@pytest.mark.parametrize("family", FAMILIES)
def test_sentence_transformers_embeds_short_and_long_texts(exported, family):
    sentence_transformers = pytest.importorskip("sentence_transformers")
    models = importlib.import_module("sentence_transformers.models")
    modules = [models.Transformer(str(exported[family])), models.Pooling(16)]
    embedded = sentence_transformers.SentenceTransformer(modules=modules).encode(["the cat", LONG])
    assert embedded.shape == (2, 16)
    assert np.isfinite(embedded).all()


def test_the_tokenizer_of_an_export_cuts_at_the_models_positions(exported):
    assert len(AutoTokenizer.from_pretrained(exported["bert"])(LONG, truncation=True)["input_ids"]) == 24
    assert len(AutoTokenizer.from_pretrained(exported["roberta"])(LONG, truncation=True)["input_ids"]) == 25


def test_exporting_leaves_the_tokenizer_as_it_was(tokenizer):
    before = tokenizer.model_max_length
    export_student(tiny_bert(27), "there", tokenizer=tokenizer)
    assert tokenizer.model_max_length == before > 64


def card(folder) -> dict:
    return ModelCard.load(folder / "README.md").data.to_dict()


def test_the_card_of_a_masked_model_says_what_the_hub_asks(exported):
    said = card(exported["bert"])
    assert said["library_name"] == "transformers"
    assert said["pipeline_tag"] == "fill-mask"
    assert said["tags"] == ["foundry-lightning", "fill-mask"]
    assert said["license"] == "unknown"


def test_the_card_of_an_encoder_names_its_own_task_and_class(tmp_path):
    folder = EncoderDistillTrainer(encoder(seed=0), encoder(seed=1)).export(tmp_path / "encoder")
    assert card(folder)["pipeline_tag"] == "feature-extraction"
    assert "AutoModelForMaskedLM" not in (folder / "README.md").read_text()
    assert isinstance(AutoModel.from_pretrained(folder), type(encoder()))


def test_the_card_of_a_custom_class_does_not_promise_transformers(tokenizer, tmp_path):
    student = WithMLMHead(tiny_bert(27).bert, 16, 27)
    folder = MLMTrainer(student, tokenizer).export(tmp_path / "custom")
    assert "library_name" not in card(folder)
    assert "from_pretrained" not in (folder / "README.md").read_text()


def onnx_states(folder, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    onnxruntime = pytest.importorskip("onnxruntime")
    session = onnxruntime.InferenceSession(str(folder / "model.onnx"), providers=["CPUExecutionProvider"])
    (states,) = session.run(["last_hidden_state"], {"input_ids": ids.numpy(), "attention_mask": mask.numpy()})
    return torch.from_numpy(states)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_onnxruntime_gives_torchs_states_at_any_batch_size_and_length(exported, family):
    pytest.importorskip("onnxscript")
    export_onnx(exported[family])
    base = AutoModel.from_pretrained(exported[family]).eval()
    for rows, length in ((1, 3), (2, 8), (5, 21)):
        ids = torch.randint(5, 27, (rows, length), generator=torch.Generator().manual_seed(length))
        mask = torch.ones_like(ids)
        mask[-1, length - 1 :] = 0
        with torch.no_grad():
            expected = base(input_ids=ids, attention_mask=mask)[0]
        shown = onnx_states(exported[family], ids, mask)
        torch.testing.assert_close(shown[mask.bool()], expected[mask.bool()], atol=1e-4, rtol=0)


@pytest.mark.slow
def test_the_export_command_writes_onnx_where_asked(tmp_path):
    import yaml

    (tmp_path / "train.txt").write_text("\n".join(texts(40)))
    (tmp_path / "c.yaml").write_text(yaml.safe_dump({**CONFIG, "evaluate": {"every": 0}}))
    args = ("--data.init_args.val", "null", "--trainer.max_steps", "1")
    assert run("fit", "--config", "c.yaml", *args, folder=tmp_path)[0] == 0
    code, out = run("export", "--ckpt", "runs/tiny/1", "--out", "mine", "--onnx", "true", folder=tmp_path)
    assert code == 0, out
    assert all(line.startswith("exported: ") for line in out.splitlines()), out
    ids = torch.tensor([[2, 6, 7, 3]])
    assert onnx_states(tmp_path / "mine", ids, torch.ones_like(ids)).shape == (1, 4, 16)


def test_the_weights_of_an_export_are_as_readable_as_its_other_files(exported):
    for folder in exported.values():
        assert len({(folder / name).stat().st_mode & 0o777 for name in ("model.safetensors", "README.md")}) == 1
