"""Every command and every shipped config, through the real command line, in processes of their own."""

from __future__ import annotations

import copy
import csv
import io
import os
import re
import shutil
import signal
import sys
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoModel, AutoModelForMaskedLM, AutoTokenizer

from foundry_lightning import MLMLitModule, from_yaml
from foundry_lightning.commands import main
from tests.conftest import texts
from tests.several import Started

ROOT = Path(__file__).parents[1]
CONFIGS = ROOT / "configs"


def run(*args: str, folder: Path, kill_with: int | None = None, wait_for: Path | None = None) -> tuple[int, str]:
    """Runs a command in a fork of this process; its exit code and what it printed."""
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "log0"
    log.unlink(missing_ok=True)

    def command(rank: int) -> None:
        for name, number in (("stdout", 1), ("stderr", 2)):  # in the place of pytest's
            setattr(sys, name, io.TextIOWrapper(io.FileIO(number, "w", closefd=False), line_buffering=True))
        sys.exit(main(list(args)))

    started = Started(command, 1, folder)
    if kill_with is not None:
        import time

        while not wait_for.exists():
            time.sleep(0.02)
        os.kill(started.pids[0], kill_with)
    (code,) = started.wait(120)
    return code, log.read_text()


CONFIG = {
    "run_name": "tiny",
    "trainer": {"max_steps": 6, "accelerator": "cpu", "devices": 1, "log_every_n_steps": 2},
    "evaluate": {"every": 3},
    "checkpoint": {"every": 3},
    "model": {
        "class_path": "foundry_lightning.MLMLitModule",
        "init_args": {
            "student": {
                "class_path": "foundry_lightning.FromConfig",
                "init_args": {
                    "model_type": "bert",
                    "config": {
                        "hidden_size": 16,
                        "num_hidden_layers": 1,
                        "num_attention_heads": 2,
                        "intermediate_size": 32,
                        "max_position_embeddings": 64,
                    },
                },
            },
            "config": {"learning_rate": 1e-3},
        },
    },
    "data": {
        "class_path": "foundry_lightning.MLMDataModule",
        "init_args": {
            "train": "train.txt",
            "val": "val.txt",
            "tokenizer": {"train": {"vocab_size": 60, "min_frequency": 1}},
            "batch_size": 4,
            "max_length": 32,
        },
    },
}


@pytest.fixture
def project(tmp_path) -> Path:
    """A folder with a config and two text files; the working folder of the test."""
    Path("train.txt").write_text("\n".join(texts(40)), encoding="utf-8")
    Path("val.txt").write_text("\n".join(texts(9, seed=1, low=6)), encoding="utf-8")
    Path("tiny.yaml").write_text(yaml.safe_dump(CONFIG), encoding="utf-8")
    return tmp_path


def metrics(path: str) -> list[dict[str, str]]:
    with open(path, encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_fit_trains_evaluates_fills_blanks_and_exports(project):
    code, out = run("fit", "--config", "tiny.yaml", folder=project)
    assert code == 0, out
    assert "unigram baseline" in out
    assert "step      6/6 | loss" in out
    assert "validation at step 6: " in out
    assert "guesses" in out
    assert "exported: runs/tiny/1/export, also at runs/tiny/export" in out
    names = {path.name for path in Path("runs/tiny/1").iterdir()}
    assert {"config.yaml", "checkpoint.ckpt", "step=00000003.ckpt", "step=00000006.ckpt", "metrics.csv"} <= names
    assert "start_report.json" in names
    steps = [int(float(row["step"])) for row in metrics("runs/tiny/1/metrics.csv") if row["train/loss"]]
    assert steps == [2, 4, 6]
    for folder in ("runs/tiny/export", "runs/tiny/1/export"):
        model, info = AutoModelForMaskedLM.from_pretrained(folder, output_loading_info=True)
        assert not info["missing_keys"]
        assert not info["unexpected_keys"]
        assert AutoTokenizer.from_pretrained(folder).mask_token_id < model.config.vocab_size
    card = Path("runs/tiny/export/README.md").read_text()
    assert "val/loss" in card


def test_an_interval_of_validation_given_to_the_trainer_wins(project):
    code, out = run("fit", "--config", "tiny.yaml", "--trainer.val_check_interval", "2", folder=project)
    assert code == 0, out
    found = [int(row["step"]) for row in metrics("runs/tiny/1/metrics.csv") if row.get("val/loss")]
    assert found == [2, 4, 6]


def test_a_second_run_a_resume_and_the_saved_config_just_work(project):
    assert run("fit", "--config", "tiny.yaml", folder=project)[0] == 0
    code, out = run("fit", "--config", "tiny.yaml", "--model.init_args.config.learning_rate", "0.01", folder=project)
    assert code == 0, out
    assert Path("runs/tiny/2/checkpoint.ckpt").is_file()
    code, out = run("fit", "--config", "runs/tiny/1/config.yaml", "--trainer.max_steps", "2", folder=project)
    assert code == 0, out
    weights = [torch.load(f"runs/tiny/{n}/checkpoint.ckpt", weights_only=True) for n in (1, 2)]
    assert [w["global_step"] for w in weights] == [6, 6]
    code, out = run(
        "fit", "--config", "tiny.yaml", "--ckpt_path", "runs/tiny/1", "--trainer.max_steps", "9", folder=project
    )
    assert code == 0, out
    assert torch.load("runs/tiny/1/checkpoint.ckpt", weights_only=True)["global_step"] == 9
    assert sorted(path.name for path in Path("runs/tiny").iterdir()) == ["1", "2", "3", "export"]
    assert [float(row["step"]) for row in metrics("runs/tiny/1/metrics.part1.csv") if row["train/loss"]] == [2, 4, 6]
    assert [float(row["step"]) for row in metrics("runs/tiny/1/metrics.csv") if row["train/loss"]] == [8, 9]


def test_resume_goes_on_with_the_newest_run_to_the_bit_equal_end(project):
    assert run("fit", "--config", "tiny.yaml", "--run_name", "whole", folder=project)[0] == 0
    assert run("fit", "--config", "tiny.yaml", "--run_name", "cut", folder=project)[0] == 0
    shutil.copyfile("runs/cut/1/step=00000003.ckpt", "runs/cut/1/checkpoint.ckpt")
    code, out = run("fit", "--config", "tiny.yaml", "--run_name", "cut", "--resume", "true", folder=project)
    assert code == 0, out
    whole, cut = (
        torch.load(f"runs/{name}/1/checkpoint.ckpt", weights_only=True)["state_dict"] for name in ("whole", "cut")
    )
    assert whole.keys() == cut.keys()
    assert all(torch.equal(whole[name], cut[name]) for name in whole)


def test_validate_predict_and_export_use_the_newest_checkpoint(project):
    assert run("fit", "--config", "tiny.yaml", folder=project)[0] == 0
    code, out = run("validate", "--config", "tiny.yaml", folder=project)
    assert code == 0, out
    assert "perplexity" in out
    texts_to_fill = '["the [MASK] sat on a [MASK]", "no blank"]'
    code, out = run("predict", "--config", "tiny.yaml", "--data.init_args.predict", texts_to_fill, folder=project)
    assert code == 0, out
    assert out.count("blank 1:") == 1
    assert out.count("blank 2:") == 1
    assert "no blank in this text" in out
    code, out = run("export", "--ckpt", "runs/tiny/1", "--out", "mine", folder=project)
    assert code == 0, out
    ours, theirs = (
        AutoModelForMaskedLM.from_pretrained(folder).state_dict() for folder in ("mine", "runs/tiny/export")
    )
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_what_an_object_refuses_is_said_in_one_line(project):
    code, out = run("fit", "--config", "tiny.yaml", "--data.init_args.train", "none.txt", folder=project)
    assert code == 2
    (line,) = [line for line in out.splitlines() if line.startswith("foundry-lightning: ")]
    assert line.startswith("foundry-lightning: source must name an existing file")
    assert "Subtypes" not in out
    assert not Path("runs").exists()


def test_tokenizer_writes_a_folder_that_autotokenizer_loads(project):
    code, out = run(
        "tokenizer", "--source", "train.txt", "--vocab-size=60", "--min-frequency", "1", "--out", "tok", folder=project
    )
    assert code == 0, out
    tokenizer = AutoTokenizer.from_pretrained("tok")
    assert tokenizer.mask_token == "[MASK]"
    assert tokenizer.unk_token_id not in tokenizer("the cat sat")["input_ids"]


def test_sigterm_saves_and_ends_with_143_and_the_run_can_go_on(project):
    args = ("fit", "--config", "tiny.yaml", "--trainer.max_steps", "100000", "--evaluate.every", "0")
    first = Path("runs/tiny/1/step=00000003.ckpt")
    code, out = run(*args, folder=project, kill_with=signal.SIGTERM, wait_for=first)
    assert code == 143, out
    assert "stopped and saved in runs/" in out
    step = torch.load("runs/tiny/1/checkpoint.ckpt", weights_only=True)["global_step"]
    assert step >= 3
    code, out = run(*args[:-4], "--trainer.max_steps", str(step + 2), "--resume", "true", folder=project)
    assert code == 0, out
    assert torch.load("runs/tiny/1/checkpoint.ckpt", weights_only=True)["global_step"] == step + 2


def test_from_yaml_builds_what_the_command_line_would(project):
    trainer, module, data = from_yaml("tiny.yaml")
    assert isinstance(module, MLMLitModule)
    trainer.fit(module, datamodule=data)
    assert trainer.global_step == 6
    with pytest.raises(FileNotFoundError, match=r"config missing.yaml does not exist"):
        from_yaml("missing.yaml")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--data.init_args.train", "missing.txt"), "missing.txt"),
        (("--data.init_args.max_length", "500"), "max_length of the train data is 500, the student has 64 positions"),
        (("--model.init_args.config.mask_prob", "1.5"), "mask_prob must lie in (0, 1], got 1.5"),
        (("--ckpt_path", "nowhere"), "checkpoint nowhere/checkpoint.ckpt does not exist"),
        (("--resume", "true"), "runs/tiny holds no checkpoint to resume"),
        (("--model.init_args.student.init_args.config.hidden_sise", "8"), "hidden_size"),
        (("--model.init_args.config.warmup_steps", "50"), "warmup_steps must not exceed the run's 6 updates"),
        (("--data.init_args.tokenizer", "nowhere"), "nowhere"),
        (("--trainer.max_stepz", "3"), "did you mean --trainer.max_steps?"),
        (("--trainer.max_steps", "many"), "many"),
    ],
)
def test_bad_input_is_one_sentence_on_stderr_exit_code_2_and_nothing_written(project, args, message):
    code, out = run("fit", "--config", "tiny.yaml", *args, folder=project)
    assert code == 2, out
    assert message in out
    assert "Traceback" not in out
    assert not (project / "runs").exists()


def test_evaluations_by_epochs_may_be_asked_for_alone(project):
    epochs = ("--trainer.check_val_every_n_epoch", "1", "--trainer.max_epochs", "2", "--trainer.max_steps", "-1")
    code, out = run("fit", "--config", "tiny.yaml", *epochs, folder=project)
    assert code == 0, out
    rows = csv.DictReader((project / "runs" / "tiny" / "1" / "metrics.csv").open())
    steps = [int(row["step"]) for row in rows if row["val/loss"]]
    assert len(steps) == 2, out


def test_a_refused_run_takes_away_the_folders_it_made_and_no_other(project):
    (project / "mine").mkdir()
    too_long = ("--data.init_args.max_length", "500")
    code, out = run("fit", "--config", "tiny.yaml", "--runs_dir", "mine/a/b", *too_long, folder=project)
    assert code == 2, out
    assert list((project / "mine").iterdir()) == []


def test_a_resume_that_is_refused_names_the_runs_own_settings_and_leaves_them(project):
    assert run("fit", "--config", "tiny.yaml", "--trainer.max_steps", "2", folder=project)[0] == 0
    own = Path("runs/tiny/1/config.yaml").read_text()
    change = ("--model.init_args.student.init_args.config.intermediate_size", "8")
    for command in (("fit", "--resume", "true"), ("predict", "--data.init_args.predict", '["a [MASK]"]')):
        code, out = run(*command, "--config", "tiny.yaml", *change, folder=project)
        assert code == 2, out
        assert "settings of its run are in runs/tiny/1/config.yaml" in out
    assert Path("runs/tiny/1/config.yaml").read_text() == own
    assert run("fit", "--config", "runs/tiny/1/config.yaml", "--resume", "true", folder=project)[0] == 0


def refused(args: list[str], monkeypatch, capsys) -> str:
    """What a command that is used wrongly says, in this process."""
    monkeypatch.setattr(sys, "argv", sys.argv[:1])
    assert main(args) == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ("fti", "unknown command 'fti'; did you mean fit?\nsee README.md#what-to-use-when"),
        ("fit --confg tiny.yaml", "unknown option --confg; did you mean --config?"),
        ("fit --config tiny.yaml --config.warmup_steps 3", "did you mean --model.init_args.config.warmup_steps?"),
        ("fit --config tiny.yaml --batch_size 3", "did you mean --data.init_args.batch_size?"),
        ("fit --config tiny.yml", "tiny.yml does not exist; did you mean tiny.yaml?"),
        ("fit --config there/own.yaml", "there/own.yaml does not exist; give the path of a YAML file."),
        ("fit --config tiny.yaml --config.init_arg 3", "unknown option --config.init_arg; did you mean --config?"),
        ("fit --config tiny.yaml --data.init_args.trian x", "has no setting 'trian'; did you mean train?"),
        (
            "fit --config tiny.yaml --trainer.max_step 3",
            "unknown option --trainer.max_step; did you mean --trainer.max_s",
        ),
        (
            "fit --config tiny.yaml --model.init_args.config.mask_prop 1",
            "has no setting 'mask_prop'; did you mean mask_p",
        ),
        ("validate --config tiny.yaml --cpkt_path x", "unknown option --cpkt_path; did you mean --ckpt_path?"),
        ("fit --config tiny.yaml stray", "stray belongs to no option"),
        ("fit", "missing: data, model; give a config, such as --config configs/mlm.yaml"),
        ("tokenizer --sorce train.txt --out x", "tokenizer: unknown option --sorce; did you mean --source?"),
        ("tokenizer --source train.txt --out x --vocab-siz 9", "did you mean --vocab-size?"),
        ("tokenizer --source train.txt", "tokenizer: missing: out."),
        ("export --ckpt a --oot b", "export: unknown option --oot; did you mean --out?"),
        ("probe a --tsk ner", "probe: unknown option --tsk; did you mean --task?"),
        ("report runs/tiny --uot a.html", "report: unknown option --uot; did you mean --out?"),
        ("report", "report: missing: runs."),
    ],
)
def test_a_wrong_command_or_option_suggests_the_right_one(project, monkeypatch, capsys, args, said):
    assert said in refused(args.split(), monkeypatch, capsys)


@pytest.mark.parametrize(
    ("where", "name", "value", "said"),
    [
        ("", "trainr", {"max_steps": 3}, "unknown setting trainr.max_steps; did you mean trainer.max_steps?"),
        ("evaluate", "evry", 3, "unknown setting evaluate.evry; did you mean evaluate.every?"),
        ("trainer", "max_step", 3, "unknown setting trainer.max_step; did you mean trainer.max_steps?"),
        (
            "trainer",
            "logger",
            {"class_path": "WandbLoger"},
            "trainer.logger.class_path: no class is named 'WandbLoger'; did",
        ),
        ("trainer", "max_steps", "many", "trainer.max_steps: must be int, got many"),
        ("model", "class_path", "foundry_lightning.MLMLitModul", "did you mean foundry_lightning.MLMLitModule?"),
        (
            "model",
            "class_path",
            "foundry_lightnin.MLMLitModule",
            "model.class_path: No module named 'foundry_lightnin'; did",
        ),
        (
            "model.init_args",
            "studnt",
            3,
            "model.init_args.studnt: MLMLitModule has no setting 'studnt'; did you mean student?",
        ),
        (
            "model.init_args.config",
            "mask_prop",
            0.2,
            "model.init_args.config.mask_prop: MLMConfig has no setting 'mask_prop'; d",
        ),
        ("model.init_args.config", "mask_prob", "much", "model.init_args.config.mask_prob: must be float, got much"),
        (
            "model.init_args.student.init_args",
            "model_typ",
            "bert",
            "FromConfig has no setting 'model_typ'; did you mean model_type?",
        ),
        ("model.init_args.student.init_args.config", "hidden_sise", 8, "(closest: 'hidden_size')"),
        (
            "data.init_args",
            "trian",
            "x",
            "data.init_args.trian: MLMDataModule has no setting 'trian'; did you mean train?",
        ),
        ("data.init_args.tokenizer.train", "vocab_siz", 8, "'train' takes vocab_size"),
    ],
)
def test_a_typo_in_a_config_is_one_line_with_the_right_name(project, monkeypatch, capsys, where, name, value, said):
    config = copy.deepcopy(CONFIG)
    place = config
    for key in where.split(".") if where else []:
        place = place[key]
    place[name] = value
    Path("typo.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    shown = refused(["fit", "--config", "typo.yaml"], monkeypatch, capsys)
    assert said in shown
    assert shown.count("\n") == 2  # the second links to the README
    if "tokenizer" not in where and not where.endswith("student.init_args.config"):  # these are read later
        with pytest.raises(ValueError, match="config typo.yaml does not fit: ") as error:
            from_yaml("typo.yaml")
        assert said in str(error.value)


def test_help_lists_the_commands_with_examples(capsys):
    assert main([]) == 0
    shown = capsys.readouterr().out
    for command in COMMANDS:
        assert f"foundry-lightning {command} " in shown


COMMANDS = ["fit", "validate", "test", "predict", "tokenizer", "export", "probe", "report"]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_a_help_with_an_example_on_one_line(monkeypatch, capsys, command):
    monkeypatch.setattr(sys, "argv", sys.argv[:1])
    with pytest.raises(SystemExit) as end:
        main([command, "--help"])
    assert end.value.code == 0
    assert re.search(rf"^Example: foundry-lightning {command} \S+", capsys.readouterr().out, re.MULTILINE)


def test_help_of_a_setting_names_the_classes_of_this_package_alone(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", sys.argv[:1])
    for args in (["fit", "--help"], ["fit", "--model.help", "MLMLitModule"]):
        with pytest.raises(SystemExit):
            main(args)
        shown = "".join(capsys.readouterr().out.split())
        assert "foundry_lightning.MLMLitModule" in shown
        assert not re.search(r"knownsubclasses|torch\.nn|:paramref:|lightning\.pytorch\.loggers", shown)
    assert "foundry_lightning.FromConfig" in shown


def test_a_missing_export_names_the_run_that_makes_it(project, capsys):
    Path("configs").mkdir(exist_ok=True)
    Path("configs/mlm.yaml").write_text("run_name: mlm\n")
    assert main(["fit", "--config", str(CONFIGS / "distil_mlm.yaml")]) == 2
    assert "the run 'mlm' makes it: foundry-lightning fit --config configs/mlm.yaml first" in capsys.readouterr().err


TINY = {
    "bert": {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32},
    "modernbert": {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32},
}


@pytest.mark.parametrize("name", ["mlm", "mlm_bert_small", "mlm_modernbert"])
def test_a_shipped_config_trains_with_a_tiny_student(project, name):
    config = yaml.safe_load((CONFIGS / f"{name}.yaml").read_text())
    student = config["model"]["init_args"]["student"]["init_args"]
    args = [f"--model.init_args.student.init_args.config.{k}={v}" for k, v in TINY[student["model_type"]].items()]
    kind = config["data"]["init_args"]["tokenizer"]["train"].get("kind", "wordpiece")
    vocab_size = 600 if kind == "bpe" else 60
    code, out = run(
        "fit",
        *("--config", str(CONFIGS / f"{name}.yaml"), "--config", str(CONFIGS / "trainer" / "cpu.yaml"), *args),
        *("--data.init_args.train=train.txt", "--data.init_args.val=val.txt", "--data.init_args.num_workers=0"),
        f'--data.init_args.tokenizer={{"train": {{"vocab_size": {vocab_size}, "kind": "{kind}"}}}}',
        *("--trainer.max_steps=2", "--model.init_args.config.warmup_steps=1", "--evaluate.every=2"),
        folder=project,
    )
    assert code == 0, out
    assert Path(f"runs/{config['run_name']}/export/model.safetensors").is_file()


@pytest.mark.parametrize("name", ["distil_mlm", "distil_bert_multilingual"])
def test_a_shipped_distillation_config_trains_and_compares(project, name):
    assert run("fit", "--config", "tiny.yaml", "--run_name", "mlm", folder=project)[0] == 0
    config = yaml.safe_load((CONFIGS / f"{name}.yaml").read_text())
    args = []
    if name != "distil_mlm":
        parts = config["model"]["init_args"]
        assert parts["teacher"]["init_args"]["path"] == "google-bert/bert-base-multilingual-cased"
        size = parts["student"]["init_args"]["config"]
        assert (size["num_hidden_layers"], size["hidden_size"]) == (4, 312)
        student = {**TINY["bert"], "max_position_embeddings": 64}
        args = [f"--model.init_args.student.init_args.config.{k}={v}" for k, v in student.items()]
        args += ["--model.init_args.teacher.init_args.path=runs/mlm/export"]
        args += ["--model.init_args.tokenizer=runs/mlm/export", "--data.init_args.tokenizer=runs/mlm/export"]
    code, out = run(
        "fit",
        *("--config", str(CONFIGS / f"{name}.yaml"), "--config", str(CONFIGS / "trainer" / "cpu.yaml"), *args),
        *("--data.init_args.train=train.txt", "--data.init_args.val=val.txt", "--data.init_args.num_workers=0"),
        *("--data.init_args.max_length=32", "--trainer.max_steps=2", "--model.init_args.config.warmup_steps=1"),
        "--evaluate.every=2",
        folder=project,
    )
    assert code == 0, out
    assert "teacher" in out
    assert "tokens/s" in out
    state = torch.load(f"runs/{config['run_name']}/1/checkpoint.ckpt", weights_only=True)
    assert not [key for key in state["state_dict"] if key.startswith("teacher")]
    assert Path(f"runs/{config['run_name']}/export/model.safetensors").is_file()


def test_a_config_distils_the_hidden_states_of_an_encoder(project):
    assert run("fit", "--config", "tiny.yaml", "--run_name", "mlm", folder=project)[0] == 0
    build = {"builder": "transformers:AutoModel.from_pretrained"}
    where = {"pretrained_model_name_or_path": "runs/mlm/export", "add_pooling_layer": False}
    config = copy.deepcopy(CONFIG)
    config["run_name"] = "encoder"
    config["model"] = {
        "class_path": "foundry_lightning.EncoderDistillLitModule",
        "init_args": {
            name: {"class_path": "foundry_lightning.FromBuilder", "init_args": {**build, "kwargs": kwargs}}
            for name, kwargs in (("student", {**where, "num_hidden_layers": 0}), ("teacher", where))
        },
    }
    config["model"]["init_args"]["config"] = {"learning_rate": 1e-4, "loss": "cosine"}
    config["data"]["init_args"]["tokenizer"] = "runs/mlm/export"
    Path("encoder.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    code, out = run("fit", "--config", "encoder.yaml", folder=project)
    assert code == 0, out
    losses = [float(row["val/loss"]) for row in metrics("runs/encoder/1/metrics.csv") if row.get("val/loss")]
    assert len(losses) == 2
    assert losses[1] < losses[0] < 1
    student = AutoModel.from_pretrained("runs/encoder/export")
    assert len(student.encoder.layer) == 0
    state = torch.load("runs/encoder/1/checkpoint.ckpt", weights_only=True)
    assert not [key for key in state["state_dict"] if key.startswith("teacher")]


@pytest.mark.parametrize(
    ("args", "section"),
    [
        (["fit", "--config", "tiny.yaml", "--data.init_args.train", "missing.txt"], "### Text"),
        (["fit", "--config", "tiny.yaml", "--model.init_args.config.mask_prob", "2"], "## Settings"),
        (["fit", "--config", "tiny.yaml", "--ckpt_path", "missing.ckpt"], "## Runs, resume, export"),
        (["export", "--ckpt", "missing"], "## Runs, resume, export"),
        (["probe", "missing", "--task", "ner", "--train", "missing"], "## Is the base any good?"),
        (["report", "missing"], "## See how it goes"),
        (["tokenizer", "--source", "missing.txt", "--vocab-size", "90", "--out", "t"], "### Text"),
    ],
)
def test_an_error_links_to_the_section_of_the_readme(project, args, section):
    code, out = run(*args, folder=project)
    assert code == 2
    link = re.search(r"see README.md#(\S+)", out)[1]
    headings = re.findall(r"^##+ .*$", (ROOT / "README.md").read_text(), flags=re.MULTILINE)
    anchors = {re.sub(r"[^\w -]", "", h.lstrip("# ").lower()).replace(" ", "-"): h for h in headings}
    assert anchors[link] == section


def test_every_shipped_config_is_covered():
    names = {path.stem for path in CONFIGS.glob("*.yaml")}
    assert names == {"mlm", "mlm_bert_small", "mlm_modernbert", "distil_mlm", "distil_bert_multilingual"}
    for overlay in (CONFIGS / "trainer").glob("*.yaml"):
        assert set(yaml.safe_load(overlay.read_text())) == {"trainer"}
