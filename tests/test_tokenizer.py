import json
import multiprocessing

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from foundry_lightning.tokenizer import check_tokenizer, load_tokenizer, tokenizer_fingerprint, train_tokenizer

KINDS = ["wordpiece", "bpe", "unigram"]
TEXTS = [
    "Größe und Straße, Übermut",
    "السَّلامُ عَلَيْكُمْ كِتَابٌ",
    "我爱北京天安门。",
    "cafe\u0301 naïve e\u0301t",
    "नमस्ते दुनिया",
    "😀 hello 👍🏽 world ❤️",
    "the cat sat on the mat, the dog ran.",
] * 5


def pieces(text):
    return "".join(text.split())


def ids_by_word(tokenizer, text):
    encoded = tokenizer(text, add_special_tokens=False)
    words = {}
    for token, word in zip(encoded["input_ids"], encoded.word_ids(), strict=True):
        words.setdefault(word, []).append(token)
    return [tokenizer.decode(ids).strip() for ids in words.values()]


@pytest.mark.parametrize("lowercase", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_seen_text_of_any_script_survives_a_round_trip(kind, lowercase):
    tokenizer = train_tokenizer(TEXTS, vocab_size=400, kind=kind, lowercase=lowercase)
    for text in TEXTS:
        ids = tokenizer(text)["input_ids"]
        expected = text.lower() if lowercase else text
        decoded = tokenizer.decode(ids, skip_special_tokens=True)
        assert tokenizer.unk_token_id not in ids
        assert pieces(decoded) == pieces(expected)
        if kind != "wordpiece":  # which keeps no record of spaces around punctuation
            assert decoded == expected


def test_bytes_know_every_text():
    tokenizer = train_tokenizer(["abc abc"], vocab_size=270, kind="bpe", lowercase=False)
    text = "Ünseen 字\n👨\u200d👩\u200d👧 \u0007"
    assert tokenizer.decode(tokenizer(text)["input_ids"], skip_special_tokens=True) == text


@pytest.mark.parametrize("kind", KINDS)
def test_accents_are_removed_only_when_asked(kind):
    tokenizer = train_tokenizer(TEXTS, vocab_size=400, kind=kind, strip_accents=True)
    decoded = tokenizer.decode(tokenizer("cafe\u0301 كِتَابٌ")["input_ids"], skip_special_tokens=True)
    assert decoded == "cafe كتاب"


@pytest.mark.parametrize("kind", KINDS)
def test_word_ids_are_words_and_punctuation(kind):
    tokenizer = train_tokenizer(TEXTS, vocab_size=400, kind=kind, min_frequency=1)
    assert ids_by_word(tokenizer, "the dogmat, hello.") == ["the", "dogmat", ",", "hello", "."]
    assert ids_by_word(tokenizer, "السَّلامُ كِتَابٌ cafe\u0301t") == ["السَّلامُ", "كِتَابٌ", "cafe\u0301t"]


@pytest.mark.parametrize("kind", KINDS)
def test_training_twice_gives_the_same_tokenizer_file(kind, tmp_path):
    texts = TEXTS + [f"{a}{b} {b}{a}{c}" for a in "abcdefgh" for b in "ijklmnop" for c in "qrstuv"]
    files = []
    for run in ("a", "b", "c"):
        tokenizer = train_tokenizer(texts, vocab_size=450, kind=kind)
        tokenizer.save_pretrained(tmp_path / run)
        files.append((tmp_path / run / "tokenizer.json").read_bytes())
    assert files[0] == files[1] == files[2]


@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_folder_loads_with_auto_tokenizer_and_means_the_same(kind, tmp_path):
    trained = train_tokenizer(TEXTS, vocab_size=400, kind=kind, model_max_length=8)
    assert isinstance(trained, PreTrainedTokenizerFast)
    trained.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    assert loaded.convert_tokens_to_ids(names) == [0, 1, 2, 3, 4]
    ids = [loaded.pad_token_id, loaded.unk_token_id, loaded.cls_token_id, loaded.sep_token_id, loaded.mask_token_id]
    assert ids == [0, 1, 2, 3, 4]
    assert list(loaded("the cat")) == ["input_ids", "attention_mask"]
    single, pair = loaded("the cat")["input_ids"], loaded("the", "cat")["input_ids"]
    assert (single[0], single[-1], single.count(3)) == (2, 3, 1)
    assert (pair[0], pair[-1], pair.count(3)) == (2, 3, 2)
    assert loaded("the [MASK] cat")["input_ids"].count(4) == 1
    assert len(loaded("the cat sat on the mat " * 9, truncation=True)["input_ids"]) == 8
    assert tokenizer_fingerprint(loaded) == tokenizer_fingerprint(trained)


@pytest.mark.parametrize("kind", KINDS)
def test_the_vocabulary_keeps_to_its_size(kind):
    texts = [f"{a}{b}{c} {c}{b}{a}" for a in "abcdefghijklm" for b in "nopqrst" for c in "uvwxyzäöü"] * 2
    texts += ["! ? ; : . , ( ) [ ] { } & % + = * # @"] * 9
    size = len(train_tokenizer(texts, vocab_size=300, kind=kind))
    assert size == 300 if kind != "unigram" else 100 < size <= 300  # unigram may run out of worthwhile pieces


@pytest.mark.parametrize("source", [iter(TEXTS), lambda: iter(TEXTS), [{"body": text} for text in TEXTS]])
def test_any_source_trains_the_same_tokenizer(source):
    trained = train_tokenizer(source, vocab_size=300, text_column="body")
    assert tokenizer_fingerprint(trained) == tokenizer_fingerprint(train_tokenizer(TEXTS, vocab_size=300))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"kind": "word"}, "kind must be one of wordpiece, bpe, unigram, got 'word'"),
        ({"vocab_size": 0}, "vocab_size must be a whole number of at least 6, got 0"),
        ({"vocab_size": True}, "vocab_size must be a whole number"),
        ({"min_frequency": -1}, "min_frequency must be a whole number"),
        ({"vocab_size": 100, "kind": "bpe"}, "5 special tokens and 256 byte values, got 100; give at least 261"),
        ({"vocab_size": 20, "kind": "unigram"}, r"5 special tokens and \d+ characters of the source, got 20"),
        ({"vocab_size": 20}, r"5 special tokens and \d+ characters of the source, got 20; give at least 1\d\d"),
        ({"source": []}, "source is empty"),
        ({"source": lambda: iter(())}, "source is empty"),
        ({"source": [[1, 2]]}, "source must hold texts"),
        ({"source": ["a", None]}, "row 1 must be text"),
    ],
)
def test_bad_arguments_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        train_tokenizer(**{"source": TEXTS, **arguments})


@pytest.mark.parametrize("kind", ["wordpiece", "unigram"])
def test_the_size_that_the_error_asks_for_is_enough(kind):
    with pytest.raises(ValueError, match="give at least") as caught:
        train_tokenizer(TEXTS, vocab_size=20, kind=kind)
    enough = int(str(caught.value).split("give at least ")[1].split(",")[0])
    assert len(train_tokenizer(TEXTS, vocab_size=enough, kind=kind)) <= enough
    with pytest.raises(ValueError, match=f"give at least {enough}"):
        train_tokenizer(TEXTS, vocab_size=enough - 1, kind=kind)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FOUNDRY_LIGHTNING_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "tokenizers"


def test_a_tokenizer_given_as_arguments_is_trained_once_for_the_same_data_and_arguments(cache):
    spec = {"train": {"vocab_size": 300}}
    first = load_tokenizer(spec, source=TEXTS)
    (folder,) = [path for path in cache.iterdir() if path.is_dir()]
    written = (folder / "tokenizer.json").stat().st_mtime_ns
    again = load_tokenizer({"train": {"vocab_size": 300, "kind": "wordpiece"}}, source=list(TEXTS))
    assert tokenizer_fingerprint(first) == tokenizer_fingerprint(again)
    assert (folder / "tokenizer.json").stat().st_mtime_ns == written
    load_tokenizer(spec, source=[*TEXTS, "more"])
    load_tokenizer({"train": {"vocab_size": 310}}, source=TEXTS)
    assert len([path for path in cache.iterdir() if path.is_dir()]) == 3


def _load_and_print(queue):
    queue.put(tokenizer_fingerprint(load_tokenizer({"train": {"vocab_size": 300}}, source=TEXTS)))


def test_processes_that_ask_at_the_same_time_share_one_training(cache):
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    processes = [context.Process(target=_load_and_print, args=(queue,)) for _ in range(3)]
    for process in processes:
        process.start()
    prints = {queue.get(timeout=60) for _ in processes}
    for process in processes:
        process.join()
    assert len(prints) == 1
    assert len([path for path in cache.iterdir() if path.is_dir()]) == 1


def test_a_failed_training_leaves_no_folder(cache):
    with pytest.raises(ValueError, match="vocab_size must hold"):
        load_tokenizer({"train": {"vocab_size": 20}}, source=TEXTS)
    assert [path for path in cache.iterdir() if path.is_dir()] == []


def test_a_tokenizer_object_is_returned_as_it_is_and_a_folder_is_loaded(tmp_path):
    tokenizer = train_tokenizer(TEXTS, vocab_size=300)
    assert load_tokenizer(tokenizer) is tokenizer
    tokenizer.save_pretrained(tmp_path)
    for spec in (tmp_path, str(tmp_path)):
        assert tokenizer_fingerprint(load_tokenizer(spec)) == tokenizer_fingerprint(tokenizer)


@pytest.mark.parametrize(
    ("spec", "source", "error", "message"),
    [
        ("./nowhere", None, FileNotFoundError, "existing folder or a hub name, got './nowhere'"),
        ("no-such-tokenizer", None, FileNotFoundError, "a folder or a hub name, got 'no-such-tokenizer'"),
        (3, None, TypeError, "got int"),
        ({"vocab_size": 300}, TEXTS, ValueError, "must be {'train': {…}}"),
        ({"train": {"vocabulary": 300}}, TEXTS, ValueError, "takes vocab_size, kind, .* got 'vocabulary'"),
        ({"train": {}}, None, ValueError, "must have a source"),
        ({"train": {}}, iter(TEXTS), ValueError, "fixed content, got iterator"),
        ({"train": {}}, lambda: iter(TEXTS), ValueError, "fixed content, got callable"),
    ],
)
def test_a_bad_specification_is_refused(cache, spec, source, error, message):
    with pytest.raises(error, match=message):
        load_tokenizer(spec, source=source)


def test_a_folder_without_a_tokenizer_is_refused(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(FileNotFoundError, match="must hold tokenizer files"):
        load_tokenizer(tmp_path)


def test_the_fingerprint_ignores_padding_and_truncation_and_sees_vocabulary_and_special_tokens():
    tokenizer = train_tokenizer(TEXTS, vocab_size=300)
    before = tokenizer_fingerprint(tokenizer)
    tokenizer(["the", "the cat"], padding=True, truncation=True, max_length=4)
    assert tokenizer_fingerprint(tokenizer) == before
    assert tokenizer_fingerprint(train_tokenizer(TEXTS, vocab_size=200)) != before
    tokenizer.mask_token = "[UNK]"
    assert tokenizer_fingerprint(tokenizer) != before


def test_the_fingerprint_of_a_slow_tokenizer_is_that_of_its_vocabulary(tmp_path):
    from transformers import ByT5Tokenizer

    class Letters:
        def __init__(self, letters):
            self.letters = letters

        def get_vocab(self):
            return {letter: i for i, letter in enumerate(self.letters)}

    assert tokenizer_fingerprint(Letters("abc")) == tokenizer_fingerprint(Letters("abc"))
    assert tokenizer_fingerprint(Letters("abc")) != tokenizer_fingerprint(Letters("acb"))
    assert tokenizer_fingerprint(ByT5Tokenizer()) == tokenizer_fingerprint(ByT5Tokenizer())
    with pytest.raises(TypeError, match="add get_vocab"):
        tokenizer_fingerprint(print)


def test_a_tokenizer_without_a_mask_token_of_its_own_is_reported():
    tokenizer = train_tokenizer(TEXTS, vocab_size=300)
    assert check_tokenizer(tokenizer) == []
    backend = tokenizer.backend_tokenizer.to_str()
    without = PreTrainedTokenizerFast(
        tokenizer_object=type(tokenizer.backend_tokenizer).from_str(backend), unk_token="[UNK]"
    )
    assert len(check_tokenizer(without)) == 1
    assert "mask token, got none" in check_tokenizer(without)[0]
    without.mask_token = "[UNK]"
    assert "differ from its unknown token, got id 1" in check_tokenizer(without)[0]


def test_tokenizer_json_has_the_mask_token_without_lstrip(tmp_path):
    train_tokenizer(TEXTS, vocab_size=300).save_pretrained(tmp_path)
    added = json.loads((tmp_path / "tokenizer.json").read_text())["added_tokens"]
    assert [(token["content"], token["lstrip"], token["special"]) for token in added][-1] == ("[MASK]", False, True)
