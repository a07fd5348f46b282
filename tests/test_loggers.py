"""A resumed run goes on in the same record, with every logged point in it."""

from __future__ import annotations

import pytest
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from foundry_lightning import DataPipeline, MLMConfig, MLMTrainer
from tests.conftest import texts, tiny_bert
from tests.test_cli import CONFIG, run


def train(tokenizer, folder, backend, *, steps, resume=False) -> MLMTrainer:
    config = MLMConfig(
        log_backend=backend,
        log_every=1,
        save_every=2,
        save_dir=str(folder),
        run_name="r",
        progress_bar=False,
        device="cpu",
        lr_scheduler="constant",
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
