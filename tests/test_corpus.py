import importlib.metadata
import subprocess
import sys

import pytest

from foundry_lightning.data import corpus
from foundry_lightning.data.corpus import CORPUS_NAMES, cache_dir, corpus_paragraphs


@pytest.fixture(scope="module")
def extracted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FOUNDRY_LIGHTNING_CACHE", str(folder))
        corpus_paragraphs("python-docs")
    return folder


@pytest.fixture
def cache(extracted, monkeypatch):
    monkeypatch.setenv("FOUNDRY_LIGHTNING_CACHE", str(extracted))
    return extracted


def test_the_corpus_has_thousands_of_distinct_paragraphs_of_prose(cache):
    paragraphs = corpus_paragraphs("python-docs")
    assert 4_000 < len(paragraphs) < 20_000
    assert len(set(paragraphs)) == len(paragraphs)
    assert all(len(p) >= 40 and p == " ".join(p.split()) and ">>>" not in p for p in paragraphs)


def test_the_held_out_part_is_about_five_percent_and_shares_nothing_with_the_training_part(cache):
    train, val = corpus_paragraphs("python-docs:train"), corpus_paragraphs("python-docs:val")
    assert train == corpus_paragraphs("python-docs")
    assert not set(train) & set(val)
    assert 0.04 < len(val) / (len(train) + len(val)) < 0.06


def test_two_extractions_in_different_processes_are_equal(cache, tmp_path):
    command = (
        "import runpy, sys; extract = runpy.run_path(sys.argv[1])['_extract']\n"
        "sys.stdout.reconfigure(encoding='utf-8', newline='\\n'); sys.stdout.write('\\n'.join(extract('python-docs')))"
    )
    run = subprocess.run([sys.executable, "-c", command, corpus.__file__], capture_output=True, check=True)
    stored = (cache / "corpus").glob("python-docs-rules*.txt")
    assert [path.read_text(encoding="utf-8") for path in stored] == [run.stdout.decode("utf-8")]


def test_the_second_call_reads_the_cache_file(cache, tmp_path, monkeypatch):
    (stored,) = (cache / "corpus").iterdir()
    monkeypatch.setenv("FOUNDRY_LIGHTNING_CACHE", str(tmp_path))
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / stored.name).write_text("one\ntwo", encoding="utf-8")
    assert sorted(corpus_paragraphs("python-docs") + corpus_paragraphs("python-docs:val")) == ["one", "two"]


def test_an_unknown_name_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match=r"python-docs, .*python-docs-wide:val, got 'python-doc'"):
        corpus_paragraphs("python-doc")


def test_the_cache_key_names_the_versions_of_python_and_of_the_packages():
    assert sys.version.split()[0] in corpus._cache_key("python-docs")
    assert f"torch{importlib.metadata.version('torch')}" in corpus._cache_key("python-docs-wide")


def test_a_failed_write_leaves_no_file(tmp_path):
    with pytest.raises(UnicodeEncodeError):
        corpus._write_atomically(tmp_path / "a.txt", "\ud800")
    assert list(tmp_path.iterdir()) == []


def test_docstrings_come_in_source_order_and_code_is_left_out(tmp_path):
    (tmp_path / "m.py").write_text(
        '"""First."""\nclass A:\n    """Second."""\n    if True:\n        def f(self):\n            "Third."\n'
        'async def g():\n    """Fourth."""\n    x = "no docstring"\n'
    )
    assert list(corpus._docstrings(tmp_path / "m.py")) == ["First.", "Second.", "Third.", "Fourth."]
    assert corpus._is_prose("Return the list of all the elements that have this name.")
    assert not corpus._is_prose("for x in self.items(): return x[0] + y(x, z=3) if x == 1 else None.")
    assert not corpus._is_prose("Return this name.")


def test_the_cache_folder_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("FOUNDRY_LIGHTNING_CACHE", str(tmp_path))
    assert cache_dir() == tmp_path
    monkeypatch.delenv("FOUNDRY_LIGHTNING_CACHE")
    assert cache_dir().parts[-2:] == (".cache", "foundry-lightning")


@pytest.mark.slow
def test_the_wide_corpus_holds_the_narrow_one_and_imports_nothing(tmp_path):
    assert set(CORPUS_NAMES) > {"python-docs-wide", "python-docs-wide:val"}
    wide = corpus._extract("python-docs-wide")
    narrow = corpus._extract("python-docs")
    assert wide[: len(narrow)] == narrow
    assert len(wide) > 3 * len(narrow)
