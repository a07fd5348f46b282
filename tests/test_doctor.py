"""The doctor finds what is wrong with a fit before it starts, all problems at once, and leaves no trace."""

from __future__ import annotations

import copy
import json
import os
import random
import shutil
import sys
from collections import namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from foundry_lightning import MLMDataModule, doctor, facts
from foundry_lightning.commands import main
from tests.conftest import texts, tiny_bert
from tests.test_cli import CONFIG, run

Usage = namedtuple("Usage", "total used free")


class Broken(torch.nn.Module):
    """A student whose scores are not numbers."""

    def __new__(cls) -> Any:
        model = tiny_bert(64)
        with torch.no_grad():
            model.bert.embeddings.LayerNorm.weight.fill_(float("nan"))
        return model


class Idle(torch.nn.Module):
    """A student with a layer that no loss reaches."""

    def __new__(cls) -> Any:
        model = tiny_bert(64)
        model.spare = torch.nn.Linear(3, 4)
        return model


class Streamed(MLMDataModule):
    """Data of a user's own: texts without a known number."""

    def __init__(self, train: str, **settings: Any) -> None:
        super().__init__(train=lambda: iter(texts(40)), **settings)


@pytest.fixture(autouse=True)
def _project(tmp_path):
    """Two text files beside the config of `examine`, on which a fit would train."""
    Path("train.txt").write_text("\n".join(dict.fromkeys(texts(40))), encoding="utf-8")
    Path("val.txt").write_text("\n".join(texts(9, seed=1, low=6)), encoding="utf-8")


def changed(changes: dict[str, Any]) -> dict[str, Any]:
    """The config of test_cli with other values at dotted keys; None takes a key out."""
    config = copy.deepcopy(CONFIG)
    for key, value in changes.items():
        *path, last = (
            key.replace("data.", "data.init_args.", 1).replace("model.", "model.init_args.", 1).split(".")
            if key.startswith(("data.", "model."))
            else key.split(".")
        )
        place = config
        for name in path:
            place = place.setdefault(name, {})
        if value is None:
            place.pop(last)
        else:
            place[last] = value
    return config


@pytest.fixture
def examine(capsys):
    """Runs the doctor on a changed config: exit code, and (status, sentence) of each check."""

    def diagnosis(changes: dict[str, Any] | None = None, *options: str) -> tuple[int, dict[str, tuple[str, str]]]:
        Path("tiny.yaml").write_text(yaml.safe_dump(changed(changes or {})), encoding="utf-8")
        code = main(["doctor", "--config", "tiny.yaml", *options])
        out = capsys.readouterr().out
        found: dict[str, tuple[str, str]] = {}
        for line in out.splitlines()[:-1]:
            name, _, text = line[12:].partition(": ")
            found.setdefault(name, (line[:12].strip(), text))
            if line.startswith("problem"):
                found[name] = ("problem", text)
        assert out.splitlines()[-1].endswith("found."), out
        return code, found

    return diagnosis


def problems(found: dict[str, tuple[str, str]]) -> list[str]:
    return [name for name, (status, _) in found.items() if status == "problem"]


def listing() -> dict[str, bytes | None]:
    return {str(p): p.read_bytes() if p.is_file() else None for p in Path().rglob("*") if "cache" not in p.parts}


def test_a_good_config_has_no_problem_and_leaves_no_trace(examine):
    examine()  # fills the caches
    files, environment, argv = listing(), dict(os.environ), list(sys.argv)
    for seed in (torch.manual_seed, np.random.seed, random.seed):
        seed(12345)
    states = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    code, found = examine()
    assert code == 0
    assert {status for status, _ in found.values()} <= {"ok", "advice"}
    expected = ["config", "resume", "run folder", "logger", "device", "training data", "validation data", "settings"]
    expected += ["tokenizer", "student", "vocabulary", "projection", "lengths", "disk space", "start", "first batch"]
    assert list(found) == [*expected, "gradients", "validation batch", "memory", "report"]
    assert found["run folder"][1] == "runs/tiny/1 can be written."
    assert "6 updates" in found["start"][1]
    assert listing() == files
    assert not Path("runs").exists()
    assert dict(os.environ) == environment
    assert sys.argv == argv
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1:] == (np.random.get_state()[1].tolist(), random.getstate())


CASES: dict[str, tuple[dict[str, Any], str, str, list[str]]] = {
    # changes, the check, a part of its sentence, checks that still ran
    "a data file that is not there": ({"data.train": "none.txt"}, "training data", "none.txt", ["validation data"]),
    "a held-out file that is not there": ({"data.val": "none.txt"}, "validation data", "none.txt", ["first batch"]),
    "a column that is not there": (
        {"data.train": "rows.jsonl", "data.text_column": "words"},
        "training data",
        "words",
        ["settings", "validation data"],
    ),
    "rows longer than the positions": ({"data.max_length": 65}, "lengths", "64", ["student", "disk space"]),
    "a setting that is not there": ({"model.config.lerning_rate": 1.0}, "config", "learning_rate", []),
    "a value of the wrong kind": ({"data.batch_size": "many"}, "config", "batch_size", []),
    "a value out of its range": ({"model.config.mask_prob": 2.0}, "settings", "mask_prob", ["training data"]),
    "a warmup longer than the run": ({"model.config.warmup_steps": 99}, "start", "warmup_steps", ["disk space"]),
    "a run folder that is a file": ({"runs_dir": "val.txt"}, "run folder", "val.txt", ["first batch"]),
    "a checkpoint folder that is a file": ({"checkpoint.folder": "val.txt"}, "run folder", "val.txt", ["first batch"]),
    "checkpoints that are not kept": ({"checkpoint.keep": 0}, "run folder", "keep of the", ["first batch"]),
    "a run to resume that is not there": ({"resume": True}, "resume", "holds no checkpoint", ["first batch"]),
    "a tokenizer that is not there": ({"data.tokenizer": "nowhere"}, "tokenizer", "nowhere", ["training data"]),
    "a device that is not there": ({"trainer.accelerator": "tpu"}, "device", "--trainer.devices 1", ["gradients"]),
    "a strategy that is not there": ({"trainer.strategy": "ddpp"}, "device", "--trainer.strategy auto", ["gradients"]),
    "a duration that is none": ({"trainer.max_time": "x"}, "device", "correct this setting", ["disk space"]),
    "a run without an update": ({"trainer.max_steps": 0}, "start", "raise --trainer.max_steps", ["disk space"]),
    "a batch of no row": ({"data.batch_size": 0}, "training data", "batch_size", ["settings"]),
    "an empty file": ({"data.train": "empty.txt"}, "training data", "every file is empty", ["validation data"]),
    "weights that are not numbers": (
        {"model.student": {"class_path": "tests.test_doctor.Broken"}},
        "first batch",
        "the loss of the first batch",
        ["validation data", "disk space"],
    ),
}


@pytest.mark.parametrize(("changes", "name", "part", "others"), CASES.values(), ids=CASES)
def test_a_problem_is_one_clear_line_and_the_other_checks_still_run(examine, changes, name, part, others):
    Path("rows.jsonl").write_text("\n".join(json.dumps({"text": t}) for t in texts(20)), encoding="utf-8")
    Path("empty.txt").touch()
    before = listing()
    code, found = examine(changes)
    assert code == 1
    status, text = found[name]
    assert status == "problem", found
    assert part in text
    assert "Subtypes" not in text
    assert "Error:" not in text
    assert [p for p in problems(found) if p != name] in ([], ["validation batch"])
    assert all(found[other][0] in ("ok", "advice") for other in others), found
    assert {k: v for k, v in listing().items() if k != "tiny.yaml"} == before


def test_a_run_that_would_be_resumed_is_left_as_it_is(examine, tmp_path):
    Path("tiny.yaml").write_text(yaml.safe_dump(CONFIG))
    assert run("fit", "--config", "tiny.yaml", folder=tmp_path)[0] == 0
    examine({"resume": True, "trainer.max_steps": 9})
    before = listing()
    code, found = examine({"resume": True, "trainer.max_steps": 9})
    assert code == 0, found
    assert found["resume"][1] == "goes on from runs/tiny/1/checkpoint.ckpt."
    assert found["run folder"][1] == "runs/tiny/1 can be written."
    assert listing() == before
    code, found = examine({"resume": True})
    assert (code, problems(found)) == (1, ["start"])


def test_all_problems_come_together(examine, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(1, 1, 0))
    code, found = examine({"data.max_length": 65, "runs_dir": "val.txt", "trainer.accelerator": "tpu"})
    assert code == 1
    assert problems(found) == ["run folder", "device", "lengths"]
    assert found["disk space"] == ("not checked", "it needs run folder.")
    assert found["first batch"] == ("not checked", "it needs lengths.")


def test_a_teacher_of_another_vocabulary_is_a_problem(examine):
    tiny_bert(40).save_pretrained("teacher")
    config = changed(
        {"model.teacher": {"class_path": "foundry_lightning.FromPretrained", "init_args": {"path": "teacher"}}}
    )
    config["model"]["class_path"] = "foundry_lightning.DistilMLMLitModule"
    Path("distil.yaml").write_text(yaml.safe_dump(config))
    code, found = examine(None, "--config", "distil.yaml")
    assert code == 1
    assert problems(found) == ["vocabulary"]
    assert "the teacher scores 40 ids, the tokenizer has 60" in found["vocabulary"][1]
    assert found["teacher"][0] == found["disk space"][0] == "ok"


def test_a_run_folder_that_may_not_be_written_is_a_problem(examine, monkeypatch):
    def refuse(*args, **settings):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(doctor.tempfile, "TemporaryFile", refuse)
    code, found = examine()
    assert (code, problems(found)) == (1, ["run folder"])
    assert "must be writable for runs/tiny/1 (Permission denied)" in found["run folder"][1]
    assert found["gradients"][0] == "ok"


def test_a_full_disk_is_a_problem(examine, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10, 10, 1000))
    code, found = examine()
    assert (code, problems(found)) == (1, ["disk space"])
    assert "--checkpoint.keep" in found["disk space"][1]
    assert found["first batch"][0] == "ok"


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="this system measures no peak")
def test_too_little_memory_is_a_problem(examine, monkeypatch):
    monkeypatch.setattr(facts, "free_memory", lambda device: 1000)
    code, found = examine()
    assert (code, problems(found)) == (1, ["memory"])
    assert "lower batch_size" in found["memory"][1]
    assert found["report"][0] == "advice"


LOGGERS = "lightning.pytorch.loggers."


def test_a_logger_whose_package_is_missing_is_a_problem(examine, monkeypatch):
    def refuse(backend):
        raise ModuleNotFoundError(f"{backend} is not installed; run pip install {backend}.")

    monkeypatch.setattr(doctor, "require_logger", refuse)
    code, found = examine({"trainer.logger": {"class_path": LOGGERS + "WandbLogger"}})
    assert (code, problems(found)) == (1, ["logger"])
    assert "pip install wandb" in found["logger"][1]
    assert found["first batch"][0] == "ok"


@pytest.mark.parametrize(
    ("environment", "status", "part"),
    [
        ({}, "advice", "run `wandb login`"),
        ({"WANDB_MODE": "offline"}, "ok", "offline"),
        ({"WANDB_API_KEY": "x"}, "ok", "with a login"),
    ],
)
def test_a_missing_login_of_wandb_is_advice(examine, monkeypatch, environment, status, part):
    pytest.importorskip("wandb")
    for name in ("WANDB_MODE", "WANDB_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", "nothing")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    code, found = examine({"trainer.logger": {"class_path": LOGGERS + "WandbLogger"}})
    assert code == 0
    assert found["logger"][0] == status
    assert part in found["logger"][1]
    assert set(listing()) == {"tiny.yaml", "train.txt", "val.txt"}


def test_a_login_in_the_netrc_file_is_found(monkeypatch):
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", "netrc")
    assert not doctor.wandb_login()
    Path("netrc").write_text("machine api.wandb.ai login user password x\n")
    assert doctor.wandb_login()
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.example.org")
    assert not doctor.wandb_login()
    Path("netrc").write_text("machine\n")
    assert not doctor.wandb_login()


def test_copies_of_rows_and_a_part_that_no_loss_reaches_are_advice(examine):
    Path("train.txt").write_text("\n".join(["the cat sat on a mat"] * 30 + texts(20)))
    code, found = examine({"model.student": {"class_path": "tests.test_doctor.Idle"}})
    assert code == 0
    assert found["report"][0] == "advice"
    assert "of the rows are copies" in found["report"][1]
    assert found["gradients"] == (
        "advice",
        "no loss reaches 16 of the trainable parameters; they stay as they are.",
    )


def test_a_run_without_held_out_data_is_advice(examine):
    code, found = examine({"data.val": None})
    assert (code, found["validation data"][0]) == (0, "advice")
    assert "validation batch" not in found


def test_packed_rows_are_examined_too(examine):
    code, found = examine({"data.pack": True})
    assert code == 0
    assert found["packing"] == ("ok", "proven: texts of a row do not see each other.")


def test_packing_that_flash_attention_has_yet_to_prove_is_advice(examine, monkeypatch):
    monkeypatch.setattr("foundry_lightning.doctor.uses_flash_attention", lambda _: True)
    found = examine({"data.pack": True})[1]
    assert found["packing"] == ("advice", "flash attention's packing is proven by the first step, on a GPU.")


def test_a_stream_is_examined_too(examine, tokenizer):
    tokenizer.save_pretrained("tok")
    config = changed({"data.tokenizer": "tok"})
    config["data"]["class_path"] = "tests.test_doctor.Streamed"
    Path("stream.yaml").write_text(yaml.safe_dump(config))
    code, found = examine({"data.tokenizer": "tok"}, "--config", "stream.yaml")
    assert code == 0, found
    assert found["start"][1] == "6 updates of 1 batch of a stream."


@pytest.mark.parametrize("option", ["--trainer.max_stepz", "--data.batch_sise", "--nothing"])
def test_an_option_that_is_not_there_is_wrong_usage(capsys, option):
    Path("tiny.yaml").write_text(yaml.safe_dump(CONFIG))
    assert main(["doctor", "--config", "tiny.yaml", option, "1"]) == 2
    printed = capsys.readouterr()
    assert option.rpartition(".")[2].strip("-") in printed.err
    assert len(printed.err.splitlines()) == 2  # the second links to the README
    assert not printed.out


def test_no_config_is_wrong_usage(capsys):
    assert main(["doctor"]) == 2
    assert "give a config" in capsys.readouterr().err


def test_help_shows_an_example_and_the_overview_names_the_command(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["doctor", "--help"])
    assert ended.value.code == 0
    assert "foundry-lightning doctor --config" in capsys.readouterr().out
    main([])
    assert "foundry-lightning doctor" in capsys.readouterr().out


def test_a_config_file_that_is_not_there_is_a_problem(capsys):
    assert main(["doctor", "--config", "none.yaml"]) == 1
    assert "none.yaml" in capsys.readouterr().out
