"""A resumed run goes on in the same record, with every logged point in it."""

from __future__ import annotations

import csv
import struct
import time

import pytest
import yaml
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.loggers import CSVLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from foundry_lightning import DataPipeline, MLMConfig, MLMTrainer
from foundry_lightning.checkpoint import logged_as, read_checkpoint
from tests.conftest import texts, tiny_bert
from tests.test_cli import CONFIG, run


def train(tokenizer, folder, backend, *, steps, resume=False, **settings) -> MLMTrainer:
    config = MLMConfig(
        log_backend=backend,
        log_every=1,
        save_every=2,
        save_dir=str(folder),
        run_name="r",
        progress_bar=False,
        device="cpu",
        lr_scheduler="constant",
        **settings,
    )
    trainer = MLMTrainer(tiny_bert(len(tokenizer)), tokenizer, config)
    if resume:
        trainer.resume_from_checkpoint(folder)
    trainer.train(DataPipeline(texts(24), tokenizer, batch_size=4, max_length=32), total_steps=steps)
    return trainer


def steps_of(folder, tag: str = "train/loss") -> list[int]:
    (log,) = {file.parent for file in folder.rglob("events.*")}
    events = EventAccumulator(str(log)).Reload()
    return [event.step for event in events.Scalars(tag)]


def test_tensorboard_goes_on_in_the_same_version_without_a_gap(tokenizer, tmp_path):
    train(tokenizer, tmp_path, "tensorboard", steps=4)
    train(tokenizer, tmp_path, "tensorboard", steps=7, resume=True)
    assert steps_of(tmp_path) == [1, 2, 3, 4, 5, 6, 7]


def test_wandb_goes_on_with_the_same_run_offline(tokenizer, tmp_path):
    wandb = pytest.importorskip("wandb")
    first = train(tokenizer, tmp_path, "wandb", steps=4)._trainer.logger.version
    wandb.finish()
    time.sleep(1.1)  # wandb names the folder of an offline session by the second
    second = train(tokenizer, tmp_path, "wandb", steps=7, resume=True)._trainer.logger
    assert second.version == first
    assert second.experiment.settings.resume == "allow"
    wandb.finish()
    files = [file for file in tmp_path.rglob("*.wandb") if not file.is_symlink()]
    assert len({file.stem for file in files}) == 1
    assert len({file.parent.resolve() for file in files}) == 2  # each offline session's part of the one run


def test_the_command_line_goes_on_in_the_same_tensorboard_version(tmp_path):
    config = yaml.safe_load(yaml.safe_dump(CONFIG))
    logger = {"class_path": "lightning.pytorch.loggers.TensorBoardLogger", "init_args": {"save_dir": "logs"}}
    config["trainer"].update(logger=logger, log_every_n_steps=1)
    (tmp_path / "train.txt").write_text("\n".join(texts(40)))
    (tmp_path / "val.txt").write_text("\n".join(texts(9, seed=1)))
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(config))
    assert run("fit", "--config", "c.yaml", folder=tmp_path)[0] == 0
    more = ("--resume", "true", "--trainer.max_steps", "8")
    code, out = run("fit", "--config", "c.yaml", *more, folder=tmp_path)
    assert code == 0, out
    assert steps_of(tmp_path / "logs") == [1, 2, 3, 4, 5, 6, 7, 8]


def wandb_records(folder) -> list:
    """All records of an offline run: after a header of 7 bytes, blocks of 32 KiB in the log format of LevelDB."""
    from wandb.proto.wandb_internal_pb2 import Record

    (file,) = (file for file in folder.rglob("*.wandb") if not file.is_symlink())
    content, at, parts, records = file.read_bytes(), 7, b"", []
    while at + 7 <= len(content):
        if (left := 32768 - at % 32768) < 7:  # a header is never cut
            at += left
            continue
        length, kind = struct.unpack("<4xHB", content[at : at + 7])
        parts += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            records.append(Record.FromString(parts))
            parts = b""
    return records


def test_wandb_gets_settings_last_values_and_no_checkpoint_unasked(tokenizer, tmp_path):
    wandb = pytest.importorskip("wandb")
    train(tokenizer, tmp_path, "wandb", steps=3)
    wandb.finish()
    records = wandb_records(tmp_path)
    config = {item.key or item.nested_key[0] for record in records for item in record.config.update}
    assert {"learning_rate", "mask_prob", "seed", "student", "parameters", "order"} <= config
    summary = {item.key or item.nested_key[0] for record in records for item in record.summary.update}
    assert "train/loss" in summary
    assert not [record for record in records if record.HasField("artifact")]


def test_wandb_gets_each_checkpoint_as_a_version_where_asked(tokenizer, tmp_path):
    wandb = pytest.importorskip("wandb")
    train(tokenizer, tmp_path, "wandb", steps=4, log_checkpoints=True)
    wandb.finish()
    records = wandb_records(tmp_path)
    artifacts = [record.artifact for record in records if record.HasField("artifact")]
    assert [set(artifact.aliases) for artifact in artifacts] == [{"latest", "step-2"}, {"latest", "step-4"}]
    assert all(artifact.name.startswith("model-") for artifact in artifacts)


def test_tensorboard_shows_settings_and_how_the_run_ended(tokenizer, tmp_path):
    train(tokenizer, tmp_path, "tensorboard", steps=3)
    (log,) = {file.parent for file in tmp_path.rglob("events.*")}
    events = EventAccumulator(str(log)).Reload()
    plugin = events.summary_metadata
    assert {"_hparams_/experiment", "_hparams_/session_start_info"} <= set(plugin)
    (last,) = events.Scalars("final/train/loss")
    assert last.value == pytest.approx(events.Scalars("train/loss")[-1].value)
    assert b"learning_rate" in plugin["_hparams_/session_start_info"].plugin_data.content


def test_evaluate_leaves_the_users_logger_and_callbacks_alone(tokenizer, tmp_path):
    logger, stages = CSVLogger(tmp_path, name="", version=""), []
    watch = LambdaCallback(setup=lambda *_, stage: stages.append(stage))
    extra = {"logger": logger, "callbacks": [watch]}
    config = MLMConfig(device="cpu", progress_bar=False, log_every=2, eval_every=2, trainer_kwargs=extra)
    trainer = MLMTrainer(tiny_bert(len(tokenizer), max_position_embeddings=512), tokenizer, config)
    trainer.train(texts(16), texts(5, seed=1), total_steps=2)
    trainer.evaluate(texts(5, seed=2))
    logger.save()
    with (tmp_path / "metrics.csv").open() as file:
        assert [row["step"] for row in csv.DictReader(file) if row["val/loss"]] == ["2"]
    assert stages == ["fit"]


def test_a_checkpoint_saved_after_an_evaluation_still_names_the_loggers_record(tokenizer, tmp_path):
    trainer = train(tokenizer, tmp_path, "tensorboard", steps=4)
    trainer.evaluate(DataPipeline(texts(5, seed=1), tokenizer, max_length=32))
    assert logged_as(read_checkpoint(trainer.save_checkpoint(tmp_path / "after"))) == {"tensorboard": 0}
