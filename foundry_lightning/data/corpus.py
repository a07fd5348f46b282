"""The embedded corpora: English prose that every Python installation already carries."""

import ast
import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import re
import sysconfig
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path

_PACKAGES: dict[str, tuple[str, ...]] = {"python-docs": (), "python-docs-wide": ("torch", "transformers", "lightning")}

CORPUS_NAMES: tuple[str, ...] = tuple(name + part for name in _PACKAGES for part in ("", ":train", ":val"))

# Part of the cache key: raise it whenever the rules below change, so that old cache files are not read.
_RULES = 1

# Besides tests: what distributions of the same Python version install or leave out as they like (Debian splits off
# tkinter, idlelib, distutils and lib2to3), so that the corpus is the same on every machine.
_SKIPPED_FOLDERS = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "testing", "idlelib", "lib2to3", "tkinter", "turtledemo"}
    | {"distutils", "ensurepip", "__pycache__"}
)
_SENTENCE_END = re.compile(r"[.!?:][\"')\]`*]*$")


def cache_dir() -> Path:
    """Return the folder for everything that is computed once and kept: corpora, tokenizers, token caches.

    Returns:
        The folder named by the environment variable `FOUNDRY_LIGHTNING_CACHE`, else `~/.cache/foundry-lightning`. It
        need not exist yet.
    """
    return Path(os.environ.get("FOUNDRY_LIGHTNING_CACHE") or "~/.cache/foundry-lightning").expanduser()


def corpus_paragraphs(name: str) -> list[str]:
    """Return the paragraphs of an embedded corpus, in a fixed order and without duplicates.

    The first call for a Python version extracts the text (seconds; about a minute for the wide corpus) and keeps it in
    `cache_dir()`; later calls read that file.

    Args:
        name: `python-docs` (the prose of `pydoc_data.topics` and the docstrings of the standard library) or
            `python-docs-wide` (also the docstrings of torch, transformers and lightning). The plain name and
            `<name>:train` are the training part; `<name>:val` is the held-out part, about 5 % of the paragraphs, chosen
            by a hash of the paragraph alone: what is held out of one corpus is held out of the other.

    Raises:
        ValueError: If there is no corpus of that name.
    """
    if name not in CORPUS_NAMES:
        raise ValueError(f"corpus name must be one of {', '.join(CORPUS_NAMES)}, got {name!r}; choose one of them.")
    corpus, _, part = name.partition(":")
    path = cache_dir() / "corpus" / f"{_cache_key(corpus)}.txt"
    if not path.exists():
        _write_atomically(path, "\n".join(_extract(corpus)))
    paragraphs = path.read_text(encoding="utf-8").split("\n")
    return [paragraph for paragraph in paragraphs if _is_held_out(paragraph) == (part == "val")]


def _cache_key(corpus: str) -> str:
    versions = [f"{package}{importlib.metadata.version(package)}" for package in _PACKAGES[corpus]]
    python = f"{platform.python_implementation().lower()}{platform.python_version()}"
    return "-".join([corpus, f"rules{_RULES}", python, *versions])


def _is_held_out(paragraph: str) -> bool:
    digest = hashlib.sha256(paragraph.encode()).digest()
    return int.from_bytes(digest[:8], "big") % 20 == 0


def _write_atomically(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with open(handle, "w", encoding="utf-8", newline="\n") as file:
            file.write(text)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def _extract(corpus: str) -> list[str]:
    """Return all paragraphs of a corpus: the language topics, then module by module in path order."""
    from pydoc_data import topics  # 700 kB of strings: only worth loading when there is no cache file

    documents = [topics.topics[title] for title in sorted(topics.topics)]
    roots = [Path(sysconfig.get_path("stdlib")), *(_package_folder(package) for package in _PACKAGES[corpus])]
    for root in roots:
        for path in _python_files(root):
            documents.extend(_docstrings(path))
    blocks = (block for document in documents for block in re.split(r"\n[ \t]*\n", document))
    paragraphs = (" ".join(block.split()) for block in blocks if not _has_doctest(block))
    return list(dict.fromkeys(paragraph for paragraph in paragraphs if _is_prose(paragraph)))


def _package_folder(package: str) -> Path:
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError(
            f"the corpus python-docs-wide reads {package}, which is not installed here; install it."
        )
    return Path(spec.submodule_search_locations[0])


def _python_files(root: Path) -> list[Path]:
    found = []
    for folder, subfolders, files in os.walk(root):
        # config-* and _sysconfigdata* are generated for each machine.
        subfolders[:] = [name for name in subfolders if name not in _SKIPPED_FOLDERS and not name.startswith("config-")]
        found += [
            Path(folder, f) for f in files if f.endswith(".py") and not f.startswith(("_sysconfigdata", "turtle"))
        ]
    return sorted(found, key=lambda path: path.relative_to(root).as_posix())


def _docstrings(path: Path) -> Iterator[str]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in other people's files are not our user's business
            module = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):
        return  # packages ship templates named .py that are not Python: they have no docstrings
    yield from _docstrings_below(module)


def _docstrings_below(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        docstring = ast.get_docstring(node)
        if docstring:
            yield docstring
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt | ast.excepthandler):  # definitions never sit inside expressions
            yield from _docstrings_below(child)


def _has_doctest(block: str) -> bool:
    return ">>>" in block or "::=" in block


def _is_prose(paragraph: str) -> bool:
    """Tell sentences from signatures, tables, code and lists of arguments, by their letters and their end."""
    letters = sum(character.isalpha() or character == " " for character in paragraph)
    return (
        len(paragraph) >= 40
        and paragraph.count(" ") >= 5
        and letters >= 0.87 * len(paragraph)
        and _SENTENCE_END.search(paragraph) is not None
        and paragraph.isprintable()  # also refuses lone surrogates, which UTF-8 cannot hold
    )
