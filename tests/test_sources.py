import gzip
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
import zstandard
from datasets import Dataset, DatasetDict, IterableDataset

from foundry_lightning.data.corpus import cache_dir
from foundry_lightning.data.sources import open_source

TEXTS = ["eins", "zwei Größe", "كِتَابٌ", "我爱", "fünf"]
RECORDS = [{"text": text, "n": i} for i, text in enumerate(TEXTS)]


def rows(source, **options):
    return [row if isinstance(row, str) else row.tolist() for row in open_source(source, **options).rows()]


def jsonl(records):
    return "".join(json.dumps(record) + "\n" for record in records).encode()


class MapStyle(torch.utils.data.Dataset):
    def __len__(self):
        return len(TEXTS)

    def __getitem__(self, index):
        return TEXTS[index]


class Rereadable:
    def __iter__(self):
        return iter(TEXTS)


def generator():
    yield from TEXTS


def records():
    yield from RECORDS


def write_files(folder):
    text = "\n".join(TEXTS).encode() + b"\n"
    content = {"a.txt": text, "a.jsonl": jsonl(RECORDS)}
    for name, data in list(content.items()):
        content[name + ".gz"] = gzip.compress(data)
        content[name + ".zst"] = zstandard.compress(data[:20]) + zstandard.compress(data[20:])
    for name, data in content.items():
        (folder / name).write_bytes(data)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(RECORDS), folder / "a.parquet", row_group_size=2)
    return [*content, "a.parquet"]


FILES = ["a.txt", "a.txt.gz", "a.txt.zst", "a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "a.parquet"]
OBJECTS = {
    "list": (lambda: TEXTS, False, False),
    "dicts": (lambda: RECORDS, False, False),
    "array": (lambda: np.array(TEXTS), False, False),
    "map style": (MapStyle, False, False),
    "Dataset": (lambda: Dataset.from_list(RECORDS), False, False),
    "Dataset torch": (lambda: Dataset.from_list(RECORDS).with_format("torch"), False, False),
    "IterableDataset": (lambda: IterableDataset.from_generator(records), True, False),
    "sharded": (lambda: Dataset.from_list(RECORDS).to_iterable_dataset(num_shards=2), True, False),
    "callable": (lambda: generator, True, False),
    "iterable": (Rereadable, True, False),
    "iterator": (generator, True, True),
}


@pytest.mark.parametrize("name", FILES)
def test_every_kind_of_file_gives_its_rows_from_any_start(tmp_path, name):
    write_files(tmp_path)
    source = open_source(tmp_path / name)
    assert [list(source.rows(start)) for start in range(7)] == [TEXTS[start:] for start in range(7)]
    assert (source.is_stream, source.one_shot) == (False, False)


@pytest.mark.parametrize("kind", OBJECTS)
def test_every_kind_of_object_gives_its_rows_from_any_start(kind):
    make, is_stream, one_shot = OBJECTS[kind]
    assert [list(open_source(make()).rows(start)) for start in range(7)] == [TEXTS[start:] for start in range(7)]
    source = open_source(make())
    assert (source.is_stream, source.one_shot) == (is_stream, one_shot)
    assert (source.fingerprint() is None) == is_stream


@pytest.mark.parametrize("kind", OBJECTS)
def test_the_length_is_known_exactly_where_nothing_need_be_read(kind):
    make, is_stream, _ = OBJECTS[kind]
    source = open_source(make())
    if is_stream:
        with pytest.raises(TypeError, match="no known length"):
            len(source)
    else:
        assert len(source) == 5


def test_files_have_no_length_before_they_are_read(tmp_path):
    write_files(tmp_path)
    with pytest.raises(TypeError, match="no known length"):
        len(open_source(tmp_path / "a.txt"))


def test_a_glob_reads_its_files_in_the_order_of_their_names_and_skips_over_whole_files(tmp_path):
    for name in ("b", "c", "a"):
        pyarrow.parquet.write_table(pyarrow.table({"text": [name + "0", name + "1"]}), tmp_path / f"{name}.parquet")
        (tmp_path / f"{name}.txt").write_text(f"{name}0\n{name}1\n")
    for suffix in ("parquet", "txt"):
        source = open_source(str(tmp_path / f"*.{suffix}"))
        assert list(source.rows()) == ["a0", "a1", "b0", "b1", "c0", "c1"]
        assert list(source.rows(3)) == ["b1", "c0", "c1"]
        assert source.description.startswith("3 files of ")


def test_blank_lines_are_not_rows_and_line_ends_and_byte_order_marks_not_text(tmp_path):
    (tmp_path / "a.txt").write_bytes("\ufeffeins\r\n\r\n \u3000\n  zwei\ndrei".encode())
    assert rows(tmp_path / "a.txt") == ["eins", "  zwei", "drei"]


def test_paragraphs_of_a_text_file_end_at_blank_lines(tmp_path):
    (tmp_path / "a.txt").write_text("\none\ntwo\n \n\nthree\n")
    source = open_source(tmp_path / "a.txt", split_txt="paragraph")
    assert list(source.rows()) == ["one\ntwo", "three"]
    assert list(source.rows(1)) == ["three"]


def test_a_list_of_strings_is_a_list_of_texts_even_where_files_have_these_names(tmp_path):
    write_files(tmp_path)
    names = [str(tmp_path / name) for name in FILES]
    assert rows(names) == names


def test_ready_token_ids_come_as_int64_arrays_from_every_kind(tmp_path):
    ids = [[5, 6, 7], [8], [9, 10]]
    (tmp_path / "a.jsonl").write_bytes(jsonl([{"input_ids": row} for row in ids]))
    table = pyarrow.table({"input_ids": pyarrow.array(ids, pyarrow.list_(pyarrow.int32()))})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    dataset = Dataset.from_dict({"input_ids": ids})
    kinds = [ids, [tuple(row) for row in ids], [np.array(row, dtype=np.uint16) for row in ids]]
    kinds += [[torch.tensor(row) for row in ids], [{"input_ids": row} for row in ids], dataset]
    kinds += [dataset.to_iterable_dataset(), tmp_path / "a.jsonl", tmp_path / "a.parquet"]
    for kind in kinds:
        assert rows(kind) == ids
        assert all(row.dtype == np.int64 for row in open_source(kind).rows())


def test_padding_is_cut_off_by_the_attention_mask(tmp_path):
    padded = {"input_ids": [[5, 6, 0], [0, 7, 8]], "attention_mask": [[1, 1, 0], [0, 1, 1]]}
    dataset = Dataset.from_dict(padded)
    dataset.to_parquet(tmp_path / "a.parquet")
    for kind in (dataset, list(dataset), dataset.to_iterable_dataset(), tmp_path / "a.parquet"):
        assert rows(kind) == [[5, 6], [7, 8]]


def test_the_text_counts_where_a_row_has_text_and_ids():
    both = [{"body": "eins", "input_ids": [1]}]
    assert rows(both, text_column="body") == rows(Dataset.from_list(both), text_column="body") == ["eins"]
    assert rows(both) == [[1]]


def test_a_transform_of_a_dataset_is_applied():
    dataset = Dataset.from_dict({"raw": TEXTS}).with_transform(lambda batch: {"text": [t + "!" for t in batch["raw"]]})
    assert rows(dataset) == [text + "!" for text in TEXTS]


class WalkInWorkers(torch.utils.data.IterableDataset):
    def __init__(self, source):
        self.source = source

    def __iter__(self):
        yield list(self.source.rows(1))


@pytest.mark.parametrize("kind", ["sharded", "Dataset", "callable"])
def test_every_data_loader_worker_reads_all_rows(kind):
    loader = torch.utils.data.DataLoader(WalkInWorkers(open_source(OBJECTS[kind][0]())), batch_size=None, num_workers=2)
    assert list(loader) == [TEXTS[1:], TEXTS[1:]]


@pytest.mark.parametrize("kind", [kind for kind in OBJECTS if kind not in ("iterator", "map style", "iterable")])
def test_a_source_can_be_pickled_where_its_content_can(kind):
    assert list(pickle.loads(pickle.dumps(open_source(OBJECTS[kind][0]()))).rows()) == TEXTS


def test_an_iterator_is_read_once_and_then_refused_with_advice():
    source = open_source(generator())
    source.validate()
    assert list(source.rows()) == TEXTS
    with pytest.raises(ValueError, match="pass a callable that returns a new iterator"):
        source.rows()


def test_a_source_opens_as_itself():
    source = open_source(TEXTS)
    assert open_source(source) is source


def test_an_embedded_corpus_is_opened_by_name(tmp_path, monkeypatch):
    from foundry_lightning.data import corpus

    monkeypatch.setenv("FOUNDRY_LIGHTNING_CACHE", str(tmp_path))
    path = tmp_path / "corpus" / f"{corpus._cache_key('python-docs')}.txt"
    path.parent.mkdir()
    path.write_text("\n".join(f"paragraph {i}" for i in range(200)))
    train, val = open_source("python-docs"), open_source("python-docs:val")
    assert len(train) + len(val) == 200
    assert train.fingerprint() != val.fingerprint()


def test_fingerprints_are_equal_in_another_process_and_differ_by_content_and_reading(tmp_path):
    write_files(tmp_path)
    path = str(tmp_path / "a.txt")
    code = (
        "import sys; from datasets import Dataset; from foundry_lightning.data.sources import open_source\n"
        "for s in (['a', 'b'], [[1, 2], [3]], sys.argv[1], Dataset.from_dict({'text': ['a']})):\n"
        "    print(open_source(s).fingerprint())"
    )
    root = Path(__file__).parents[1]
    run = subprocess.run([sys.executable, "-c", code, path], capture_output=True, check=True, text=True, cwd=root)
    other = run.stdout.split()
    here = [["a", "b"], [[1, 2], [3]], path, Dataset.from_dict({"text": ["a"]})]
    assert [open_source(source).fingerprint() for source in here] == other
    variants = [*here, ["ab"], ["a", "c"], [[1], [2, 3]], str(tmp_path / "a.jsonl"), Dataset.from_dict({"text": ["b"]})]
    prints = {open_source(source).fingerprint() for source in variants}
    prints |= {open_source(path, split_txt="paragraph").fingerprint()}
    assert len(prints) == len(variants) + 1


def test_a_files_fingerprint_follows_its_content_not_its_folder(tmp_path):
    import shutil

    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
    (tmp_path / "a" / "x.txt").write_text("eins")
    shutil.copy2(tmp_path / "a" / "x.txt", tmp_path / "b" / "x.txt")
    first = open_source(tmp_path / "a" / "x.txt").fingerprint()
    assert open_source(tmp_path / "b" / "x.txt").fingerprint() == first
    os.utime(tmp_path / "b" / "x.txt", (1, 1))
    assert open_source(tmp_path / "b" / "x.txt").fingerprint() == first
    (tmp_path / "b" / "x.txt").write_text("zwei")
    assert open_source(tmp_path / "b" / "x.txt").fingerprint() != first


def test_a_large_files_end_counts_and_its_content_is_read_once(tmp_path, monkeypatch):
    path = tmp_path / "x.txt"
    path.write_text("eins\n" * 2**18 + "zwei")
    first = open_source(path).fingerprint()
    (kept,) = (cache_dir() / "files").iterdir()
    kept.write_text("what was kept")
    assert open_source(path).fingerprint() != first
    kept.unlink()
    assert open_source(path).fingerprint() == first
    path.write_text("eins\n" * 2**18 + "drei")
    assert open_source(path).fingerprint() != first


@pytest.mark.parametrize(
    ("source", "error", "message"),
    [
        ([], ValueError, "source is empty"),
        (Dataset.from_dict({"text": []}), ValueError, "source is empty"),
        (lambda: iter(()), ValueError, "source is empty.*new iterator"),
        (iter(()), ValueError, "source is empty"),
        (["a", b"b"], ValueError, r"row 1 must be text, got bytes; decode it"),
        (["a", None], ValueError, r"row 1 must be text, got NoneType"),
        (["a", [1, 2]], ValueError, r"row 1 must hold text as the rows before it do, got token ids"),
        (lambda: iter([[1, 2], "a"]), ValueError, r"row 1 must hold token ids as the rows before it do, got text"),
        (["a", 3.5], ValueError, r"row 1 must be text, got float"),
        (["a", "\ud83d"], ValueError, r"row 1 must be valid Unicode.*character 0"),
        (
            [{"text": "a"}, {"body": "b", "n": 1}],
            ValueError,
            r"'text' must be a column of row 1, which has 'body', 'n'",
        ),
        ([{"text": None}], ValueError, r"'text' in row 0 must be text, got NoneType"),
        ([{"text": [1, 2]}], ValueError, r"'text' in row 0 must be text, got list"),
        (Dataset.from_dict({"body": ["a"]}), ValueError, r"'text' must be a column of the Dataset, which has 'body'"),
        (Dataset.from_dict({"text": ["a", None]}), ValueError, r"'text' in row 1 must be text, got NoneType"),
        (Dataset.from_dict({"text": [1]}), ValueError, r"'text' in row 0 must be text, got int"),
        (
            Dataset.from_dict({"a": ["b"]}).to_iterable_dataset(),
            ValueError,
            r"column of the IterableDataset, which has 'a'",
        ),
        ([[1, 2], [3, -1]], ValueError, r"row 1 must hold token ids of at least 0, got -1"),
        ([[1, 2.5]], ValueError, r"row 0 .* integer token ids .* type float64"),
        ([[True, False]], ValueError, r"row 0 .* type bool"),
        ([["a", "b"]], ValueError, r"row 0 .* integer token ids"),
        ([[1, None]], ValueError, r"row 0 .* integer token ids"),
        ([[[1, 2], [3, 4]]], ValueError, r"row 0 .* shape \[2, 2\]"),
        ([[[1, 2], [3]]], ValueError, r"row 0 .* integer token ids"),
        ([{"input_ids": [1, 2], "attention_mask": [1]}], ValueError, r"attention_mask in row 0 must have the shape"),
        ({"text": ["a"]}, TypeError, "got dict"),
        (DatasetDict({"train": Dataset.from_dict({"text": ["a"]})}), TypeError, "pick one split"),
        (Dataset.from_dict({"text": ["a"]}).to_pandas(), TypeError, "DataFrame"),
        ({"a", "b"}, TypeError, "fixed order"),
        (b"text", TypeError, "decode"),
        (3, TypeError, "got int"),
        (lambda x: iter(x), TypeError, "missing a required argument: 'x'"),
        (lambda: 3, TypeError, "must return an iterator over rows, got int"),
    ],
)
def test_a_bad_object_is_refused_in_one_sentence(source, error, message):
    with pytest.raises(error, match=message):
        list(open_source(source).rows())


@pytest.mark.parametrize(
    ("name", "content", "error", "message"),
    [
        ("missing.txt", None, FileNotFoundError, r"existing file or an embedded corpus \(python-docs.*missing\.txt"),
        ("*.txt", None, FileNotFoundError, r"must match a file.*\*\.txt"),
        ("", None, ValueError, r"got the folder .*\*\.txt"),
        ("a.csv", b"a,b", ValueError, r"must end in one of \.txt.*a\.csv"),
        ("a.txt", b"", ValueError, "source is empty"),
        ("a.txt", b"\n \n", ValueError, "source is empty"),
        ("a.txt", "eins\nGröße".encode("latin-1"), ValueError, r"line 2 of .*a\.txt must be UTF-8.*byte 2"),
        ("a.jsonl", b'{"text": "a"}\n\n{"text": \n', ValueError, r"line 3 of .*a\.jsonl must be JSON"),
        ("a.jsonl", b'["a"]\n', ValueError, r"line 1 of .*a\.jsonl must be a JSON object, got list"),
        ("a.jsonl", b'{"body": "a"}\n', ValueError, r"column of line 1 of .*a\.jsonl, which has 'body'"),
        (
            "a.jsonl",
            b'{"input_ids": [5, 6]}\n{"text": "a"}\n',
            ValueError,
            r"line 2 of .*a\.jsonl must hold token ids as the rows before it do, got text",
        ),
        ("a.jsonl", b'{"text": 7}\n', ValueError, r"'text' in line 1 of .*a\.jsonl must be text, got int"),
        ("a.txt.gz", gzip.compress(b"eins\n" * 99)[:-9], ValueError, r"a\.txt\.gz must be a whole compressed file"),
        ("a.txt.gz", b"eins\n", ValueError, r"a\.txt\.gz must be a whole compressed file"),
        (
            "a.txt.zst",
            zstandard.compress(b"eins\n" * 99)[:-4],
            ValueError,
            r"a\.txt\.zst must be a whole compressed file",
        ),
        ("a.txt.zst", b"eins\n", ValueError, r"a\.txt\.zst must be a whole compressed file"),
        ("a.parquet", b"eins\n", ValueError, r"a\.parquet must be a whole Parquet file"),
    ],
)
def test_a_bad_file_is_refused_with_its_name_and_line(tmp_path, name, content, error, message):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(error, match=message):
        list(open_source(str(tmp_path / name)).rows())


def test_bad_parquet_columns_and_rows_are_named(tmp_path):
    pyarrow.parquet.write_table(pyarrow.table({"body": ["a", None]}), tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=r"column of .*a\.parquet, which has 'body'"):
        open_source(tmp_path / "a.parquet").validate()
    with pytest.raises(ValueError, match=r"'body' in row 1 of .*a\.parquet must be text, got NoneType"):
        open_source(tmp_path / "a.parquet", text_column="body").validate()


def test_validate_reads_only_a_sample_and_finds_a_bad_row_in_it():
    source = open_source(["a", "b", None])
    source.validate(sample=2)
    with pytest.raises(ValueError, match="row 2"):
        source.validate(sample=3)


def test_a_text_given_for_a_path_is_refused_with_the_advice_to_make_it_a_list():
    with pytest.raises(FileNotFoundError, match=r"give a text as \[text\]"):
        open_source("Once upon a time\nthere was a text. " * 500)


def test_an_unknown_split_is_refused():
    with pytest.raises(ValueError, match="split_txt must be 'line' or 'paragraph', got 'word'"):
        open_source(TEXTS, split_txt="word")
