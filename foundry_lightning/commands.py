"""The commands: those of the loops go to `FoundryCLI`, the others are functions whose parameters are their options."""

from __future__ import annotations

import inspect
import json as jsonlib
import re
import sys
import traceback
from argparse import ArgumentError
from collections.abc import Callable
from contextlib import nullcontext
from itertools import takewhile
from pathlib import Path
from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException

from foundry_lightning.checkpoint import checkpoint_file, read_checkpoint
from foundry_lightning.cli import LOOPS, FoundryCLI, Help, from_yaml
from foundry_lightning.doctor import diagnose
from foundry_lightning.export import export_onnx, export_student, load_student_weights
from foundry_lightning.parsing import did_you_mean, explain
from foundry_lightning.quiet import quiet_lightning

_OVERVIEW = """\
foundry-lightning: pretrain your own encoder from raw text, or distil one from a teacher.

  foundry-lightning fit --config configs/mlm.yaml        train; writes runs/mlm/1/ and runs/mlm/export/
  foundry-lightning doctor --config configs/mlm.yaml     check all of a fit that needs no training
  foundry-lightning validate --config configs/mlm.yaml   evaluate the newest checkpoint of that run
  foundry-lightning test --config configs/mlm.yaml       the same
  foundry-lightning predict --config configs/mlm.yaml --data.init_args.predict '["a [MASK]"]'    fill blanks
  foundry-lightning tokenizer --source 'data/*.txt' --vocab-size 8000 --out my-tokenizer      train a tokenizer
  foundry-lightning export --ckpt runs/mlm/1 --out my-model              export a checkpoint
  foundry-lightning probe my-model --task ner --train ner.txt    compare encoders on labelled data
  foundry-lightning report runs/mlm/1 --out report.html          curves and samples of runs as one page

Each command has --help. --debug before a command shows the full traceback of an error.
"""


def train_tokenizer_command(
    source: str,
    out: str,
    vocab_size: int = 8000,
    kind: str = "wordpiece",
    lowercase: bool = True,
    min_frequency: int = 2,
    text_column: str = "text",
) -> None:
    """Trains a tokenizer on texts and writes a folder that AutoTokenizer loads.

    Example: foundry-lightning tokenizer --source 'data/*.txt' --vocab-size 8000 --out my-tokenizer

    Args:
        source: A file or glob (.txt, .jsonl, .gz, .zst, .parquet), or an embedded corpus (python-docs).
        out: The folder to write.
        vocab_size: Number of tokens, special ones included.
        kind: wordpiece, bpe or unigram.
        lowercase: Whether text is lower-cased.
        min_frequency: Least number of times a token must occur.
        text_column: Column of the text in .jsonl and .parquet.
    """
    from foundry_lightning.tokenizer import train_tokenizer

    tokenizer = train_tokenizer(
        source,
        vocab_size=vocab_size,
        kind=kind,
        lowercase=lowercase,
        min_frequency=min_frequency,
        text_column=text_column,
    )
    tokenizer.save_pretrained(out)
    print(f"{len(tokenizer)} tokens written to {out}")


def export_command(ckpt: str, out: str, config: str | None = None, onnx: bool = False) -> None:
    """Writes the student of a checkpoint as a folder that AutoModelForMaskedLM loads.

    Example: foundry-lightning export --ckpt runs/mlm/1 --out my-model

    Args:
        ckpt: A .ckpt file, or the folder of a run.
        out: The folder to write.
        config: The run's config; by default the config.yaml beside the checkpoint.
        onnx: Whether the base is written as model.onnx too (needs the extra `onnx`).
    """
    file = checkpoint_file(ckpt)
    state = read_checkpoint(file)
    config_file = Path(config) if config is not None else file.parent / "config.yaml"
    _, module, data = from_yaml(config_file)
    data.prepare_data()
    if module.tokenizer is None:
        module.tokenizer = data.tokenizer
    student = module.build_student()
    load_student_weights(student, state)
    facts = {"updates": state["global_step"]}
    print(f"exported: {export_student(student, out, tokenizer=module.tokenizer, facts=facts)}")
    if onnx:
        print(f"exported: {export_onnx(out)}")


def probe_command(
    models: list[str],
    task: str,
    train: str,
    test: str | None = None,
    how: str = "linear",
    seeds: int = 3,
    max_length: int | None = None,
    columns: tuple[str, str] | None = None,
    fields: tuple[int, int] | None = None,
    epochs: int = 10,
    batch_size: int = 32,
    learning_rate: float = 1e-4,
    device: str = "auto",
    json: str | None = None,
) -> None:
    """Compares encoders on labelled data, beside random weights and a word lookup or bag of words.

    Example: foundry-lightning probe my-model other-model --task ner --train train.txt --test test.txt --how both

    Args:
        models: Folders or names that AutoModel and AutoTokenizer load.
        task: ner (scored in entities), pos (any tags, by words) or classify (texts).
        train: A CoNLL file, a .jsonl file, or a folder of Dataset.save_to_disk.
        test: The same, scored; without it each seed holds out a fifth of train.
        how: linear (logistic regression on frozen states), finetune, or both.
        seeds: Number of seeds.
        max_length: Tokens of a row.
        columns: Names of input and label in .jsonl and datasets.
        fields: Numbers of word and tag in a line of a CoNLL file.
        epochs: Of fine-tuning.
        batch_size: Of fine-tuning.
        learning_rate: Peak rate of fine-tuning; small models (hidden size 128) want about 1e-3.
        device: auto, cpu or cuda.
        json: A file that gets all figures.
    """
    from rich.console import Console

    from foundry_lightning.probe import FineTuning, probe

    found = probe(
        models,
        task=task,
        train=train,
        test=test,
        how=how,
        seeds=seeds,
        max_length=max_length,
        columns=columns,
        fields=fields,
        fine_tuning=FineTuning(epochs=epochs, batch_size=batch_size, learning_rate=learning_rate),
        device=device,
    )
    Console().print(found.table())
    if json is not None:
        Path(json).write_text(found.to_json())


def report_command(runs: list[str], out: str = "report.html", png: str | None = None) -> None:
    """Writes curves, samples and facts of runs as one HTML page that needs nothing else, and the curves as PNGs.

    Example: foundry-lightning report runs/mlm/1 runs/mlm/2 --out report.html --png curves

    Args:
        runs: Folders of runs; one of numbered runs (runs/mlm) means the newest of them.
        out: The page to write.
        png: A folder that gets each curve as a PNG.
    """
    from foundry_lightning.report import write_report

    page, *images = write_report(runs, out=out, png=png)
    print(f"report written: {page}" + (f", and {len(images)} PNGs in {png}" if images else ""))


_COMMANDS: dict[str, Callable[..., None]] = {
    "tokenizer": train_tokenizer_command,
    "export": export_command,
    "probe": probe_command,
    "report": report_command,
}
_POSITIONAL = {"probe": "models", "report": "runs"}  # command -> the option that the words before all options mean

_SECTIONS_OF_COMMANDS = {
    "tokenizer": "text",
    "export": "runs-resume-export",
    "probe": "is-the-base-any-good",
    "report": "see-how-it-goes",
    "doctor": "see-how-it-goes",
}
_SECTIONS_OF_FILES = {
    "foundry_lightning/data/": "text",
    "foundry_lightning/tokenizer.py": "text",
    "foundry_lightning/modules/teacher.py": "distillation",
    "foundry_lightning/students.py": "what-to-use-when",
    "foundry_lightning/checkpoint.py": "runs-resume-export",
}


def _call(command: Callable[..., None], options: list[str], *, name: str) -> None:
    """Calls a function with the options of a command line.

    Raises:
        ValueError: an unknown option, with the closest known one, or one that is missing or does not fit.
    """
    from jsonargparse import auto_cli

    about = (inspect.getdoc(command) or "").partition("\n\nArgs:")[0]
    settings: dict[str, Any] = {"formatter_class": Help, "exit_on_error": False, "allow_abbrev": False}
    try:
        auto_cli(
            command, args=options, prog=f"foundry-lightning {name}", description=about, as_positional=False, **settings
        )
    except ArgumentError as error:
        known = [f"--{parameter.replace('_', '-')}" for parameter in inspect.signature(command).parameters]
        raise ValueError(f"{name}: {explain(str(error), options=known)}") from error


def _section(error: BaseException, *, command: str) -> str:
    """The README's section on what an error is about: that of the command, else of the innermost file it came from."""
    if command in _SECTIONS_OF_COMMANDS:
        return _SECTIONS_OF_COMMANDS[command]
    if command not in LOOPS:
        return "what-to-use-when"
    files: list[str] = []
    cause: BaseException | None = error
    while cause is not None:
        files += [Path(frame.filename).as_posix() for frame in traceback.extract_tb(cause.__traceback__)]
        cause = cause.__cause__ or cause.__context__
    found = (section for file in reversed(files) for part, section in _SECTIONS_OF_FILES.items() if part in file)
    return next(found, "settings")


def main(args: list[str] | None = None) -> int:
    """Runs a command; an error of the input is printed in a sentence, exit code 2."""
    args = list(sys.argv[1:] if args is None else args)
    debug = "--debug" in args
    args = [arg for arg in args if arg != "--debug"]
    if not args or args[0] in ("-h", "--help", "help"):
        print(_OVERVIEW)
        return 0
    try:
        with nullcontext() if debug else quiet_lightning():
            return _run(args)
    except (ValueError, TypeError, FileNotFoundError, ModuleNotFoundError, OSError, MisconfigurationException) as error:
        if debug:
            raise
        print(f"foundry-lightning: {error}\nsee README.md#{_section(error, command=args[0])}", file=sys.stderr)
        return 2


def _run(args: list[str]) -> int:
    """Calls the command, and gives its exit code.

    Raises:
        ValueError: an unknown command or option.
    """
    if args[0] in _COMMANDS:
        command = _COMMANDS[args[0]]
        options = [re.sub(r"^--[\w-]+", lambda name: "--" + name[0][2:].replace("-", "_"), arg) for arg in args[1:]]
        words = list(takewhile(lambda option: not option.startswith("-"), options))
        if args[0] in _POSITIONAL and words:
            options = [f"--{_POSITIONAL[args[0]]}={jsonlib.dumps(words)}", *options[len(words) :]]
        _call(command, options, name=args[0])
    elif args[0] == "doctor":
        if {"-h", "--help"} & set(args):
            print((inspect.getdoc(diagnose) or "").partition("\n\nArgs:")[0])
            raise SystemExit(0)
        return diagnose(args[1:])
    elif args[0] not in LOOPS:
        names = [*LOOPS, *_COMMANDS, "doctor"]
        close = did_you_mean(args[0], names) or f"; the commands are {', '.join(names)}."
        raise ValueError(f"unknown command {args[0]!r}{close}")
    else:
        sys.argv = ["foundry-lightning", *args]
        FoundryCLI()
    return 0


if __name__ == "__main__":
    sys.exit(main())
