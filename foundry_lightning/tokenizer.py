"""Tokenizers: train one from any source, load one, tell two apart."""

import hashlib
import inspect
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from itertools import chain, islice
from pathlib import Path
from typing import Any, cast

import tokenizers
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from foundry_lightning.data.corpus import cache_dir
from foundry_lightning.data.sources import Source, open_source

_SPECIAL_TOKENS = {"pad": "[PAD]", "unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"}
_SPECIALS = list(_SPECIAL_TOKENS.values())  # in the order of their ids, from 0

# How the names of the files begin that tokenizers of transformers are saved in.
_TOKENIZER_FILES = ("tokenizer", "vocab", "spiece", "sentencepiece", "spm", "merges", "tekken")

# Part of the cache key: raise it whenever training would give another tokenizer for the same arguments.
_RULES = 1

_SAMPLE = 500  # tokens whose text shows how a slow tokenizer cuts

# A private-use character: the BERT normaliser removes them from text, so it can mark where words begin in training.
_WORD_START = "\ue000"

# Words as GPT-2 cuts them, but marks (Arabic vowels, combining accents) and joiners stay in their word: with GPT-2's
# own pattern every vowel mark would end the word, and whole-word masking would mask single letters.
_WORDS = Regex(r" ?\p{L}[\p{L}\p{M}" "\u200c\u200d" r"]*| ?\p{N}[\p{N}\p{M}]*| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")


def train_tokenizer(
    source: Any,
    *,
    vocab_size: int = 8000,
    kind: str = "wordpiece",
    lowercase: bool = True,
    strip_accents: bool = False,
    min_frequency: int = 2,
    text_column: str = "text",
    model_max_length: int = 512,
) -> PreTrainedTokenizerFast:
    """Train a tokenizer in one pass over a source, never holding the source in memory.

    The same source gives the same vocabulary. The special tokens `[PAD] [UNK] [CLS] [SEP] [MASK]` are the ids 0 to 4,
    and a text becomes `[CLS] … [SEP]`. Save it with `save_pretrained`; `AutoTokenizer` loads it.

    Args:
        source: Anything `open_source` takes. A one-shot iterator is used up.
        vocab_size: The most entries, special tokens included; fewer where the source has fewer pieces.
        kind: `wordpiece` (BERT), `bpe` (over bytes: no text is unknown) or `unigram`. In each, `word_ids` of an
            encoding tell words and punctuation apart, for whole-word masking.
        lowercase: Whether upper and lower case are one.
        strip_accents: Whether to remove accents. They stay by default, also in lower case: the same rule would remove
            the vowel marks of Arabic and the combining marks of other scripts.
        min_frequency: How often a pair of pieces must occur to become one piece (`wordpiece`, `bpe`).
        text_column: The key or column of the text in rows that have several.
        model_max_length: The length in tokens that `truncation=True` cuts to.

    Raises:
        ValueError: If `kind` is unknown, a number is out of range, `vocab_size` is too small for the special tokens and
            the characters of the source, or the source is empty or holds token ids instead of texts.
    """
    builders = {"wordpiece": _train_wordpiece, "bpe": _train_bpe, "unigram": _train_unigram}
    if kind not in builders:
        raise ValueError(f"kind must be one of {', '.join(builders)}, got {kind!r}; choose one of them.")
    for name, value, least in (
        ("vocab_size", vocab_size, 6),
        ("min_frequency", min_frequency, 0),
        ("model_max_length", model_max_length, 3),
    ):
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ValueError(f"{name} must be a whole number of at least {least}, got {value!r}; choose a larger one.")
    texts = _Texts(open_source(source, text_column=text_column))
    trained = builders[kind](texts, vocab_size, min_frequency, lowercase, strip_accents)
    trained.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in _SPECIALS])
    trained.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", trained.token_to_id("[CLS]")), ("[SEP]", trained.token_to_id("[SEP]"))],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=trained,
        model_max_length=model_max_length,
        model_input_names=["input_ids", "attention_mask"],
        clean_up_tokenization_spaces=False,
        **{f"{name}_token": token for name, token in _SPECIAL_TOKENS.items()},
    )


def load_tokenizer(spec: Any, *, source: Any = None) -> Any:
    """Turn what a user may give as a tokenizer into one.

    Args:
        spec: A tokenizer, returned as it is; a folder or the name of one on the Hugging Face hub; or `{"train": {…}}`
            with keyword arguments of `train_tokenizer`. The latter trains on `source` once and keeps the result in
            `cache_dir()/tokenizers`; processes that ask at the same time wait for the one that trains.
        source: What to train on: anything `open_source` takes whose content is fixed, so no stream.

    Raises:
        FileNotFoundError: If a folder is missing, or nothing can be loaded under a name.
        TypeError: If `spec` is none of these.
        ValueError: If a dict has an unknown key, or `source` is missing or a stream.
    """
    if isinstance(spec, Mapping) and not callable(spec):
        return _trained_once(spec, source)
    if callable(spec):
        if isinstance(spec, type) or not hasattr(spec, "get_vocab"):
            name = getattr(spec, "__name__", type(spec).__name__)
            raise TypeError(f"tokenizer must have a vocabulary (get_vocab), got {name}; give a Hugging Face tokenizer.")
        return spec
    if not isinstance(spec, str | os.PathLike):
        raise TypeError(
            f"tokenizer must be a tokenizer, a folder, a hub name or {{'train': {{…}}}}, got {type(spec).__name__}; "
            "wrap a bare tokenizers.Tokenizer as PreTrainedTokenizerFast(tokenizer_object=…)."
        )
    name = os.path.expanduser(os.fspath(spec))
    if os.path.isfile(name):
        raise ValueError(
            f"tokenizer must be a folder or a hub name, got the file {name!r}; give the folder it lies in."
        )
    if not os.path.isdir(name) and (
        isinstance(spec, os.PathLike) or name.startswith((".", os.sep)) or name.count("/") > 1
    ):
        raise FileNotFoundError(
            f"tokenizer must be an existing folder or a hub name, got {name!r}; {how_to_make(name)}."
        )
    if os.path.isdir(name) and not any(file.startswith(_TOKENIZER_FILES) for file in os.listdir(name)):
        raise FileNotFoundError(
            f"tokenizer folder {name!r} must hold tokenizer files, got none; save one there with save_pretrained."
        )
    try:
        return AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        first_line = str(error).strip().split("\n")[0]
        raise FileNotFoundError(
            f"tokenizer must be a folder or a hub name, got {name!r}, and loading it gave: {first_line} "
            "Correct the name, or download it once while online."
        ) from error


def how_to_make(folder: str) -> str:
    """What to do about a folder that is not there; `runs/NAME/export` is what the run NAME leaves."""
    path = Path(folder)
    run = path.parent.parent if path.parent.name.isdigit() else path.parent
    config = Path("configs", f"{run.name}.yaml")
    if path.name == "export" and config.is_file():
        return f"the run {run.name!r} makes it: foundry-lightning fit --config {config} first"
    return "correct the path, or make it first"


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """Return a hash that two tokenizers share exactly when they turn text into the same ids with the same special ids.

    Padding and truncation, which calls switch on and off, do not count, but for the side that is cut. Of a slow
    tokenizer, whose rules lie in its code, the ids of a sample count beside the vocabulary.

    Raises:
        TypeError: If the tokenizer is neither a fast one nor has `get_vocab`.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        content = json.loads(backend.to_str())
        del content["padding"], content["truncation"]
    elif hasattr(tokenizer, "get_vocab"):
        content = {"class": type(tokenizer).__qualname__, "vocab": tokenizer.get_vocab()}
        if callable(tokenizer):
            sample = " ".join(sorted(content["vocab"])[:_SAMPLE])
            content["ids"] = [list(tokenizer(text)["input_ids"]) for text in (sample, sample.upper(), sample.lower())]
    else:
        raise TypeError(
            f"tokenizer must have get_vocab() or be a fast tokenizer, got {type(tokenizer).__name__}; add get_vocab()."
        )
    if (side := getattr(tokenizer, "truncation_side", "right")) != "right":
        content["truncation_side"] = side
    special = {name: str(token) for name, token in dict(getattr(tokenizer, "special_tokens_map", {})).items()}
    return hashlib.sha256(json.dumps([content, special], sort_keys=True).encode()).hexdigest()


def check_tokenizer(tokenizer: Any) -> list[str]:
    """Return what keeps a tokenizer from serving masked-language modelling, one sentence each; empty if fit."""
    mask_id = getattr(tokenizer, "mask_token_id", None)
    if mask_id is None:
        return [
            "tokenizer must have a mask token, got none; add one with "
            "tokenizer.add_special_tokens({'mask_token': '[MASK]'})."
        ]
    if mask_id == getattr(tokenizer, "unk_token_id", None):
        return [
            f"tokenizer's mask token must differ from its unknown token, got id {mask_id} for both; "
            f"add {tokenizer.mask_token!r} to the vocabulary."
        ]
    return []


class _Texts:
    """The texts of a source in batches, remembering the characters that occurred."""

    def __init__(self, source: Source):
        self._source = source
        self.characters: set[str] = set()

    def __iter__(self) -> Iterator[list[str]]:
        rows = self._source.rows()
        while batch := list(islice(rows, 256)):
            for row in batch:
                if not isinstance(row, str):
                    raise ValueError(
                        f"source must hold texts to train a tokenizer, got ids: {self._source.description}; give texts."
                    )
                self.characters.update(row)
            yield cast(list[str], batch)


def _train_wordpiece(
    texts: _Texts, vocab_size: int, min_frequency: int, lowercase: bool, strip_accents: bool
) -> Tokenizer:
    """Build the WordPiece vocabulary from a BPE one.

    The library's WordPiece trainer numbers the pieces inside words in the order of a randomly seeded hash map and
    breaks ties by these numbers, so that no two of its runs agree. Its BPE trainer sorts. Here it runs on words with a
    marked beginning, from which follows which pieces begin a word and which (`##`) continue one.
    """
    normalizer = normalizers.BertNormalizer(lowercase=lowercase, strip_accents=strip_accents)
    words = pre_tokenizers.BertPreTokenizer()
    bpe = Tokenizer(models.BPE())
    bpe.normalizer = normalizer
    mark = pre_tokenizers.Metaspace(replacement=_WORD_START, prepend_scheme="always", split=False)
    bpe.pre_tokenizer = pre_tokenizers.Sequence([words, mark])
    # More pieces than are kept: the mark joined to one character is in the alphabet already.
    trainer = trainers.BpeTrainer(vocab_size=2 * vocab_size, min_frequency=min_frequency, show_progress=False)
    bpe.train_from_iterator(texts, trainer)
    vocabulary = bpe.get_vocab()
    pieces = sorted(vocabulary, key=vocabulary.__getitem__)
    alphabet = [piece for piece in pieces if len(piece) == 1 and piece != _WORD_START]
    # Punctuation and Chinese characters are words of their own and never continue one.
    inside = [c for c in alphabet if len(words.pre_tokenize_str(normalizer.normalize_str("a" + c))) == 1]
    merged = [piece[1:] if piece[0] == _WORD_START else "##" + piece for piece in pieces if len(piece) > 1]
    required = list(chain(_SPECIALS, alphabet, ("##" + c for c in inside)))
    _check_room(vocab_size, len(required), "wordpiece")
    kept = list(dict.fromkeys(chain(required, merged)))[:vocab_size]
    trained = Tokenizer(models.WordPiece({piece: i for i, piece in enumerate(kept)}, unk_token="[UNK]"))
    trained.normalizer, trained.pre_tokenizer = normalizer, words
    trained.decoder = decoders.WordPiece(prefix="##", cleanup=True)
    return trained


def _train_bpe(texts: _Texts, vocab_size: int, min_frequency: int, lowercase: bool, strip_accents: bool) -> Tokenizer:
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    _check_room(vocab_size, len(_SPECIALS) + len(alphabet), "bpe")
    trained = Tokenizer(models.BPE())
    _set_normalizer(trained, lowercase, strip_accents)
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    trained.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(_WORDS, "isolated"), to_bytes])
    trained.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=min_frequency,
        special_tokens=_SPECIALS,
        initial_alphabet=sorted(alphabet),
        show_progress=False,
    )
    trained.train_from_iterator(texts, trainer)
    return trained


def _train_unigram(
    texts: _Texts, vocab_size: int, min_frequency: int, lowercase: bool, strip_accents: bool
) -> Tokenizer:
    trained = Tokenizer(models.Unigram())
    _set_normalizer(trained, lowercase, strip_accents)
    # Without the cut at punctuation a word and its full stop would be one word.
    trained.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Metaspace(), pre_tokenizers.Punctuation()])
    trained.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=vocab_size, special_tokens=_SPECIALS, unk_token="[UNK]", show_progress=False
    )
    try:
        trained.train_from_iterator(texts, trainer)
    except Exception as error:  # the library's own type for everything
        if "not large enough" not in str(error):
            raise
        characters = "".join(sorted(texts.characters))
        seen = set(trained.normalizer.normalize_str(characters) if trained.normalizer else characters) - {" "} | {"▁"}
        _check_room(vocab_size, len(_SPECIALS) + len(seen), "unigram")
        raise
    # The trainer sums in the order of a randomly seeded hash map: from run to run scores differ by about 1e-11, and
    # equal ones change places. Rounded and sorted they do not. Characters first: all must stay, and where there is room
    # for hardly more than them the trainer exceeds the size.
    scored = [(piece, round(score, 3)) for piece, score in json.loads(trained.to_str())["model"]["vocab"]]
    ordinary = sorted(scored[len(_SPECIALS) :], key=lambda item: (len(item[0]) > 1, -item[1], item[0]))
    _check_room(vocab_size, len(_SPECIALS) + sum(len(piece) == 1 for piece, _ in ordinary), "unigram")
    trained.model = models.Unigram([*scored[: len(_SPECIALS)], *ordinary][:vocab_size], unk_id=_SPECIALS.index("[UNK]"))
    return trained


def _set_normalizer(tokenizer: Tokenizer, lowercase: bool, strip_accents: bool) -> None:
    steps = [normalizers.NFD(), normalizers.StripAccents(), normalizers.NFC()] if strip_accents else []
    steps += [normalizers.Lowercase()] if lowercase else []
    if steps:
        tokenizer.normalizer = normalizers.Sequence(steps)


def _check_room(vocab_size: int, required: int, kind: str) -> None:
    if vocab_size < required:
        characters = "byte values" if kind == "bpe" else "characters of the source"
        raise ValueError(
            f"vocab_size must hold {len(_SPECIALS)} special tokens and {required - len(_SPECIALS)} {characters}, "
            f"got {vocab_size}; give at least {required}"
            + ("." if kind == "bpe" else ", or kind='bpe', which needs 261 for any text.")
        )


def _trained_once(spec: Mapping[str, Any], source: Any) -> Any:
    known = [name for name in inspect.signature(train_tokenizer).parameters if name != "source"]
    arguments = spec.get("train")
    if set(spec) != {"train"} or not isinstance(arguments, Mapping):
        raise ValueError(
            f"a tokenizer given as a dict must be {{'train': {{…}}}} and nothing else, got {dict(spec)!r}; correct it."
        )
    unknown = [name for name in arguments if name not in known]
    if unknown:
        raise ValueError(
            f"tokenizer 'train' takes {', '.join(known)}, got {', '.join(map(repr, unknown))}; correct or remove it."
        )
    if source is None:
        raise ValueError("tokenizer={'train': …} must have a source to train on, got none; give the training data.")
    opened = open_source(source, text_column=arguments.get("text_column", "text"))
    content = opened.fingerprint() if not opened.is_stream else None
    if content is None:
        raise ValueError(
            f"tokenizer={{'train': …}} must be trained on data with a fixed content, got {opened.description}; train "
            "it once with train_tokenizer(…).save_pretrained(folder) and give the folder."
        )
    bound = inspect.signature(train_tokenizer).bind(content, **arguments)
    bound.apply_defaults()
    key = json.dumps([_RULES, tokenizers.__version__, bound.arguments], sort_keys=True, default=str)
    folder = cache_dir() / "tokenizers" / hashlib.sha256(key.encode()).hexdigest()[:32]
    if not folder.is_dir():
        _train_into(folder, opened, arguments)
    return AutoTokenizer.from_pretrained(folder)


def _train_into(folder: Path, source: Source, arguments: Mapping[str, Any]) -> None:
    from filelock import FileLock

    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):
        if folder.is_dir():  # another process trained while this one waited
            return
        temporary = tempfile.mkdtemp(dir=folder.parent, prefix=".training-")
        try:
            train_tokenizer(source, **arguments).save_pretrained(temporary)
            os.replace(temporary, folder)
        except BaseException:
            shutil.rmtree(temporary)
            raise
