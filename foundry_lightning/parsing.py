"""What a command line or config does not say rightly, in one sentence with the closest known name."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import re
from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from lightning.pytorch import callbacks, loggers

# lines of jsonargparse's report that hold a rule of its own, or repeat what a line below them says better
_NOISE = re.compile(
    r"Does not validate against|Subtypes:|Errors:|Expected a <class 'NoneType'>|Given value type:|Given value:|"
    r"Subclass types expect one of|a class path \(str\)|a dict with|.*does not correspond to a subclass|$"
)


class WrongUsage(ValueError):
    """A command line that names what there is not, or nothing to do."""


def did_you_mean(name: str, known: Iterable[str], *, shown: str = "{}") -> str:
    """`; did you mean …?` with the closest known name; empty where none is close."""
    close = get_close_matches(name, list(known), n=1)
    return f"; did you mean {shown.format(close[0])}?" if close else ""


def explain(text: str, *, options: Iterable[str]) -> str:
    """Turns jsonargparse's report of an error into one sentence.

    Args:
        text: The report.
        options: All known options, `--trainer.max_steps` and the like.
    """
    options = list(options)
    if unknown := re.search(r"[Uu]nrecognized arguments: (--?[\w.-]+)", text):
        return f"unknown option {unknown[1]}" + (_option_meant(unknown[1], options) or "; see --help.")
    if stray := re.search(r"[Uu]nrecognized arguments: (.*)", text):
        return f"{stray[1]} belongs to no option; options are written --NAME VALUE, see --help."
    if absent := re.search(r"File does not exist: '(.+)'", text):
        path = Path(absent[1])
        close = did_you_mean(path.name, (found.name for found in path.parent.glob("*")))
        return f"config: {path} does not exist" + (close or "; give the path of a YAML file.")
    if one_line := re.fullmatch(r'Parser key "([^"]+)": *(.+)', text.strip()):
        return f"{one_line[1]}: {one_line[2]}"
    if unknown := re.search(r"(?:Subcommand|Group) '([\w.]+)' does not accept option '([\w.]+)'", text):
        return _unknown_setting(unknown[2] if unknown[0].startswith("Sub") else f"{unknown[1]}.{unknown[2]}", options)
    if (unknown := re.search(r"Option '([\w.]+)' is not accepted", text)) and "Problem with given" not in text:
        return _unknown_setting(unknown[1], options)
    if missing := re.fullmatch(r"the following arguments are required: (.*)", text.strip()):
        names = re.sub(r"\b(fit|validate|test|predict)\.", "", missing[1])
        return f"missing: {names}" + (
            "; give a config, such as --config configs/mlm.yaml." if re.search(r"\b(model|data)\b", names) else "."
        )
    return _of_tree(text) or _of_union(text) or text


def _option_meant(option: str, options: list[str]) -> str:
    """The closest known option; a setting of data or model by its full name, which is no option by itself."""
    name = option.rpartition(".")[2].lstrip("-")
    owners = {"--model.init_args.config.": "DistilMLMConfig", "--data.init_args.": "MLMDataModule"}
    for prefix, owner in owners.items() if any(known.startswith("--model") for known in options) else ():
        if name in inspect.signature(_imported(f"foundry_lightning.{owner}")).parameters:
            return f"; did you mean {prefix}{name}?"
    return did_you_mean(option, options)


def _unknown_setting(name: str, options: list[str]) -> str:
    known = [option.removeprefix("--") for option in options]
    return f"the config has an unknown setting {name}" + (did_you_mean(name, known) or "; see fit --help.")


def _of_union(text: str) -> str:
    """What an object said that could not be built, without the report around it; empty where there is none."""
    if not text.startswith("Does not validate against"):
        return ""
    lines = [line.strip().removeprefix("- ") for line in text.splitlines()]
    return " ".join(line for line in lines if not _NOISE.match(line))


def _of_tree(text: str) -> str:
    """The deepest problem of an indented report, with the key it is about; empty where there is no such report."""
    path: list[tuple[int, str, str]] = []  # (indentation, part of the key, class that is built there)
    found: list[tuple[str, str]] = []  # (key, sentence)
    values: list[str] = []
    for line in text.splitlines():
        plain = line.strip().removeprefix("- ")
        indent = len(line) - len(line.lstrip())
        if value := re.match(r"Given value: (.*)", plain):
            values.append(value[1])
        if _NOISE.match(plain):
            continue
        path = [entry for entry in path if entry[0] < indent or not indent]
        owner = next((owner for *_, owner in reversed(path) if owner), "")
        key = ".".join(part for _, part, _ in path if part)
        if parser_key := re.match(r'Parser key "([^"]+)"', plain):
            path.append((indent, parser_key[1], ""))
        elif class_path := re.match(r"Problem with given class_path '([^']+)'", plain):
            path.append(
                (indent, "" if dataclasses.is_dataclass(_imported(class_path[1])) else "init_args", class_path[1])
            )
        elif path:
            found.append(_sentence(key, owner, plain))
    if not found:
        return ""
    deepest = max(key.count(".") for key, _ in found)
    key, sentences = "", []
    for key, sentence in found:
        if key.count(".") == deepest and sentence not in sentences:
            sentences.append(sentence)
    key = next(key for key, _ in found if key.count(".") == deepest)
    complete = re.search("got |did you mean|its settings|needs", sentences[0])
    given = f", got {values[0]}" if values and len(values[0]) < 100 and not complete else ""
    keys = re.search(r"(\{.*\})", values[0]) if values else None
    return f"{key}: {' or '.join(sentences)}{given}" + (
        _class_path(keys[1]) if keys and "class_path of" in sentences[0] else ""
    )


def _sentence(key: str, owner: str, plain: str) -> tuple[str, str]:
    """(key, sentence) of a line of the report."""
    if option := re.match(r"Option '([\w.]+)' is not accepted", plain):
        known = list(inspect.signature(_imported(owner)).parameters)
        close = did_you_mean(option[1], known) or f"; its settings are {', '.join(known)}."
        return f"{key}.{option[1]}", f"{owner.rpartition('.')[2]} has no setting {option[1]!r}{close}"
    if attribute := re.match(r"module '([\w.]+)' has no attribute '(\w+)'", plain):
        known = dir(importlib.import_module(attribute[1]))
        close = did_you_mean(attribute[2], known, shown=attribute[1] + ".{}")
        return key.removesuffix(".init_args") + ".class_path", plain + (close or ".")
    if module := re.match(r"No module named '(\w+)", plain):
        return key.removesuffix(".init_args") + ".class_path", plain + did_you_mean(module[1], ["foundry_lightning"])
    if name := re.match(r"Expected a dot import path string: (\w+)$", plain):
        import foundry_lightning

        known = [*callbacks.__all__, *loggers.__all__, *foundry_lightning.__all__]
        return f"{key}.class_path", f"no class is named {name[1]!r}{did_you_mean(name[1], known)}"
    if missing := re.match(r"the following arguments are required: (.*)", plain):
        return key, f"{owner.rpartition('.')[2]} needs {missing[1]}"
    if "valid subclass of" in plain:
        return key, plain.replace("Not a valid", "must be a").replace("subclass of", "class_path of a")
    plain = re.sub(r"<class '(?:[\w.]+\.)?(\w+)'>", r"\1", plain)
    plain = re.sub(r"^Expected an? (.*?)\. Got value: (.*)", r"must be \1, got \2", plain)
    return key, re.sub(r"^Expected an? ", "must be ", plain.replace("typing.Literal", "one of "))


def _class_path(given: str) -> str:
    """What a dict lacks that should name a class."""
    try:
        keys = list(ast.literal_eval(given))
    except (ValueError, SyntaxError):
        keys = []
    close = get_close_matches("class_path", keys, n=1)
    return f"; did you mean class_path in the place of {close[0]}?" if close else "; give class_path and init_args."


def _imported(path: str) -> Any:
    """The object of a dotted path, None where there is none."""
    module, _, name = path.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name, None)
    except (ImportError, ValueError):
        return None
