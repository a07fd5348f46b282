"""Checkpoints: written atomically, read without running code, and what may change when a run resumes."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning
import torch
from lightning.pytorch.plugins.io import TorchCheckpointIO
from torch import nn
from transformers import PreTrainedConfig

from foundry_lightning.loggers import logger_records

if TYPE_CHECKING:
    from foundry_lightning.modules.base import EncoderModule

FORMAT = 1
_KEY = "foundry_lightning"
_KNOWN_BY_HASH = {
    "data": " (a hash: the texts, their order, or what makes rows of them)",
    "tokenizer": " (a hash: vocabulary, rules or special tokens)",
    "architecture": " (a hash: names or shapes of the student's parameters)",
}
# beginnings of what a config holds beside the function; the first are those of every config
_NO_FUNCTION = (*PreTrainedConfig().to_dict(), "_", "initializer_", "use_cache", "deterministic_flash_attn")


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes a temporary file in the target's folder, syncs it, and renames it over the target.

    Whatever happens meanwhile, the target is either the whole old or the whole new checkpoint. Files are read with
    `weights_only=True`: no code in them runs.
    """

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any = None
    ) -> None:
        """Writes `checkpoint` to `path`.

        Raises:
            ValueError: a file stands where a folder should, or a folder in the place of the file.
            OSError: the disk is full or not writable; an older checkpoint at `path` is kept.
        """
        target = Path(path)
        require_folder(target.parent, name="checkpoint path")
        if target.is_dir():
            raise ValueError(f"checkpoint path must name a file, and {target} is a folder; give a name in it.")
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_name(f".{target.name}.partial")  # what a kill leaves, the next save of this step removes
        try:
            with open(partial, "wb") as file:
                torch.save(checkpoint, file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(partial, target)
        except (OSError, RuntimeError) as error:
            raise OSError(
                f"checkpoint {target} could not be written ({error}); older checkpoints are kept, free some space."
            ) from error
        finally:
            partial.unlink(missing_ok=True)
        sync_folder(target.parent)

    def load_checkpoint(
        self, path: str | os.PathLike[str], map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Reads a checkpoint (see `read_checkpoint`), or the weights alone that forked ranks leave their parent."""
        content = _read(path)
        weights_alone = isinstance(content, dict) and "state_dict" not in content
        return content if weights_alone else _checked(content, path)


def sync_folder(folder: Path) -> None:
    """Makes a rename in `folder` last through a power cut, where the system can."""
    if hasattr(os, "O_DIRECTORY"):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def path_of(path: Any, *, name: str) -> Path:
    """`path` as a `Path`.

    Raises:
        TypeError: it is no path.
        ValueError: it is empty, which would mean the working folder.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"{name} must be a path, got {path!r}; give a string or a pathlib.Path.")
    if path == "":
        raise ValueError(f"{name} must be a path, got an empty string; give '.' for the working folder.")
    return Path(path)


def require_folder(folder: Path, *, name: str) -> None:
    """Refuses a folder that cannot be made.

    Raises:
        ValueError: it, or what it would lie in, is a file.
    """
    existing = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    if not existing.is_dir():
        raise ValueError(f"{name} must be a folder or lie in one, and {existing} is a file; give another.")


def checkpoint_file(path: str | os.PathLike[str]) -> Path:
    """A path not ending in `.ckpt` is a folder and means the `checkpoint.ckpt` in it.

    Raises:
        TypeError: it is no path.
        ValueError: it is empty.
    """
    path = path_of(path, name="checkpoint path")
    return path if path.suffix == ".ckpt" else path / "checkpoint.ckpt"


def read_checkpoint(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Reads a checkpoint of this package without running any code in it.

    Raises:
        FileNotFoundError: no such file.
        ValueError: truncated, holding pickled code, or not a checkpoint of this package.
    """
    return _checked(_read(path), path)


def _read(path: str | os.PathLike[str]) -> Any:
    if not Path(path).is_file():
        raise FileNotFoundError(f"checkpoint {path} does not exist; give a .ckpt file or the folder that holds one.")
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise ValueError(
            f"checkpoint {path} is damaged, or holds more than tensors and plain values, and was refused; nothing in "
            "it was run, use another one."
        ) from error
    except Exception as error:  # damaged bytes make the reader raise almost anything
        raise ValueError(f"checkpoint {path} is damaged or no checkpoint ({error}); use an older one.") from error


def _checked(checkpoint: Any, path: str | os.PathLike[str]) -> dict[str, Any]:
    content: dict[str, Any] = checkpoint if isinstance(checkpoint, dict) else {}
    own = content.get(_KEY)
    if not isinstance(own, dict) or "format" not in own:
        raise ValueError(f"checkpoint {path} was not written by foundry-lightning; give one of its .ckpt files.")
    if own["format"] != FORMAT:
        raise ValueError(
            f"checkpoint {path} has format {own['format']!r}, this version reads {FORMAT}; "
            "use the version that wrote it."
        )
    lacking = [name for name in ("state_dict", "loops") if not isinstance(content.get(name), dict)]
    lacking += [name for name in ("global_step",) if name not in content]
    lacking += [name for name in ("module", "settings", "accumulation", "num_ranks") if name not in own]
    if lacking:
        raise ValueError(f"checkpoint {path} lacks {', '.join(lacking)} and cannot be used; use another one.")
    return content


def architecture(model: nn.Module | None) -> dict[str, Any]:
    """What may not change in a model between two parts of a run, by the names an error uses.

    Returns:
        A hash of its parameters' names and shapes, its class and, for a model of transformers, what its config says
        of the function, dropout included. Not the parameters' types and the attention kernel, which precision and
        device decide, nor what every config has (labels, outputs, versions).
    """
    assert model is not None
    shapes = sorted((plain_name(name), list(p.shape)) for name, p in model.named_parameters())
    model = getattr(model, "_orig_mod", model)
    config = getattr(model, "config", None)
    settings = json.loads(config.to_json_string(use_diff=False)) if isinstance(config, PreTrainedConfig) else {}
    return {
        "architecture": hashlib.sha256(json.dumps(shapes).encode()).hexdigest()[:16],
        "student class": type(model).__name__,
        **{f"student {k}": v for k, v in settings.items() if not k.startswith(_NO_FUNCTION)},
    }


def plain_name(name: str) -> str:
    """A parameter's name without the prefix that torch.compile adds."""
    return name.replace("_orig_mod.", "")


def named_as(own: Iterable[str], weights: dict[str, Any]) -> dict[str, Any]:
    """A checkpoint's weights by the names that a module has for them, which torch.compile may have prefixed."""
    names = {plain_name(name): name for name in own}
    return {names.get(name, name): value for name, value in weights.items()}


def describe(module: EncoderModule, checkpoint: dict[str, Any]) -> None:
    """Completes a checkpoint on save: what a resume must know; no teacher, no compile prefix."""
    trainer = module.trainer
    checkpoint["state_dict"] = {
        plain_name(name): value for name, value in checkpoint["state_dict"].items() if not name.startswith("teacher.")
    }
    checkpoint[_KEY] = {
        "format": FORMAT,
        "module": type(module).__name__,
        "settings": module.unchangeable(),
        "accumulation": trainer.accumulate_grad_batches,
        "num_ranks": trainer.world_size,
        "loggers": logger_records(trainer),
        "progress": module.meter.progress(),
    }


def logged_as(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """The loggers' records that a checkpoint's run was writing."""
    return dict(checkpoint[_KEY].get("loggers", {}))


def misfit(what: str, problems: list[str], *, trainer: Any) -> ValueError:
    """The error of a checkpoint that cannot be gone on with here, and where its own settings are."""
    config = Path(trainer.ckpt_path).parent / "config.yaml" if trainer is not None and trainer.ckpt_path else None
    if config is not None and config.is_file():
        advice = f"The settings of its run are in {config}; give --config {config}."
    else:
        advice = "Restore these, or start a new run."
    return ValueError(f"{what}: {'; '.join(problems)}. {advice}")


def accept(module: EncoderModule, checkpoint: dict[str, Any]) -> None:
    """Checks a checkpoint against the module on load, and sets the loops to the last finished update.

    Raises:
        ValueError: another module, another setting that may not change, or another window.
    """
    saved = checkpoint.get(_KEY)
    if saved is None:
        raise ValueError("checkpoint was not written by foundry-lightning; give one of its .ckpt files.")
    problems = []
    if saved["module"] != type(module).__name__:
        problems.append(f"it is of {saved['module']}, this is {type(module).__name__}")
    fitting = module._trainer is not None and module.trainer.state.fn == "fit"
    current = module.unchangeable() if fitting else architecture(module.build_student())
    problems += changes(saved["settings"], current)
    data: Any = getattr(module.trainer, "datamodule", None) if fitting else None
    if hasattr(data, "order_settings"):
        problems += changes(checkpoint.get(type(data).__qualname__, {}), data.order_settings())
    if fitting and checkpoint["global_step"]:
        trainer = module.trainer
        before, now = saved["accumulation"] * saved["num_ranks"], trainer.accumulate_grad_batches * trainer.world_size
        if before != now:
            problems.append(
                f"a window had {before} batches (accumulation × ranks: {saved['accumulation']} × "
                f"{saved['num_ranks']}) and has {now} now"
            )
    if fitting:
        done, limit = (
            checkpoint["loops"]["fit_loop"]["epoch_progress"]["current"]["processed"],
            module.trainer.max_epochs,
        )
        if limit is not None and 0 <= limit < done:
            problems.append(f"it has done {done} epochs, and the run is to end after {limit}")
    if problems:
        raise misfit("checkpoint does not fit", problems, trainer=module._trainer)
    own = dict(module.state_dict())
    checkpoint["state_dict"] = named_as(own, checkpoint["state_dict"])
    checkpoint["state_dict"].update({name: own[name] for name in own if name.startswith("teacher.")})
    if fitting:
        module._progress = saved.get("progress", {})
        _rewind(checkpoint["loops"]["fit_loop"], saved, module.trainer.accumulate_grad_batches)


def changes(saved: dict[str, Any], current: dict[str, Any]) -> list[str]:
    """What is not as it was when a checkpoint was taken, in words; only what it recorded is compared."""
    return [
        f"{name} was {saved[name]!r} and is {value!r} now{_KNOWN_BY_HASH.get(name, '')}"
        for name, value in current.items()
        if name in saved and saved[name] != value
    ]


def _rewind(fit_loop: dict[str, Any], saved: dict[str, Any], accumulation: int) -> None:
    """Sets Lightning's saved progress to a state between two updates, from which every kind of restart is alike.

    Lightning saves from inside its hooks, when a batch is `started` but not `completed` and an epoch half closed, and
    has a path of its own for each. Between updates there are two states: inside an epoch with b places done, or at
    the beginning of the next.
    """
    batches, epochs = fit_loop["epoch_loop.batch_progress"], fit_loop["epoch_progress"]
    done, epoch = batches["current"]["processed"], epochs["current"]["processed"]
    ended = batches["is_last_batch"] and done == batches["current"]["ready"]
    if epochs["current"]["started"] > epoch:  # inside an epoch
        if ended:
            done, epoch = 0, epoch + 1
    elif done and not ended and epochs["current"]["ready"] == epoch:
        epoch -= 1  # max_steps ended the run within an epoch, which Lightning counts as processed
    else:
        done = 0
    finished = done // saved["accumulation"] * saved["accumulation"]
    places = done // saved["accumulation"] * accumulation  # updates done in the epoch, in places of today's ranks
    total = batches["total"]["processed"] - (done - finished)
    for progress, count in ((batches["current"], places), (batches["total"], total)):
        progress.update(dict.fromkeys(("ready", "started", "processed", "completed"), count))
    batches["is_last_batch"] = False
    for progress in (epochs["current"], epochs["total"]):
        progress.update(dict.fromkeys(("ready", "started", "processed", "completed"), epoch))
        if done:
            progress.update({"ready": epoch + 1, "started": epoch + 1})
    evaluated = fit_loop["epoch_loop.val_loop.batch_progress"]  # an evaluation cut short is not gone on with
    for progress in (evaluated["current"], evaluated["total"]):
        progress.update(dict.fromkeys(progress, 0))
    steps = fit_loop["epoch_loop.automatic_optimization.optim_progress"]["optimizer"]["step"]["total"]["completed"]
    fit_loop["epoch_loop.state_dict"]["_batches_that_stepped"] = steps


def use_current_settings(trainer: lightning.Trainer, groups: list[dict[str, Any]]) -> None:
    """After a resume, lets today's learning rate, schedule and decay rule; the moments stay the checkpoint's.

    Args:
        trainer: Its one optimizer and scheduler have been restored.
        groups: The parameter groups' settings as built from today's config.
    """
    optimizer = trainer.optimizers[0]
    scheduler: Any = trainer.lr_scheduler_configs[0].scheduler
    scheduler.base_lrs = [group["initial_lr"] for group in groups]
    for group, settings, factor in zip(optimizer.param_groups, groups, scheduler.lr_lambdas, strict=True):
        group.update(settings)
        group["lr"] = settings["initial_lr"] * factor(scheduler.last_epoch)
        for parameter in group["params"]:  # a fused update counts its steps on the device, any other on the host
            if torch.is_tensor(step := optimizer.state[parameter].get("step")):
                optimizer.state[parameter]["step"] = step.to(parameter.device if group.get("fused") else "cpu")
    scheduler._last_lr = [group["lr"] for group in optimizer.param_groups]
