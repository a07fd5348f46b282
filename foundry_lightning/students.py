"""Students: recipes that a YAML can name, and warm starts from a teacher's layers.

A recipe is a plain class with typed arguments; creating one costs nothing, so a configuration can hold it before the
tokenizer is known. `recipe.build(tokenizer)` makes the model:

```yaml
student:
  class_path: foundry_lightning.students.FromConfig
  init_args: {model_type: bert, config: {hidden_size: 256, num_hidden_layers: 4}}
```

Every recipe builds on the CPU, so one seed gives the same weights whatever device the run uses, and leaves the global
state of the random number generators as it was.
"""

import copy
import difflib
import importlib
import inspect
import operator
import re
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_MASKED_LM_MAPPING,
    AutoModelForMaskedLM,
    DistilBertConfig,
    DistilBertForMaskedLM,
    PreTrainedModel,
)
from transformers import PreTrainedConfig as HFConfig

from foundry_lightning.tokenizer import how_to_make

TOKENIZER_IDS = ("pad_token_id", "cls_token_id", "sep_token_id", "bos_token_id", "eos_token_id", "mask_token_id")
PER_LAYER_FIELDS = ("layer_types", "mlp_layer_types", "attention_window")


class StudentRecipe(ABC):
    """A model that is built later, once the tokenizer is known."""

    @abstractmethod
    def build(self, tokenizer: Any = None) -> nn.Module:
        """Build the model.

        Args:
            tokenizer: A `PreTrainedTokenizerBase`, where one is known.

        Returns:
            A new model on the CPU.
        """


class FromConfig(StudentRecipe):
    """A masked language model with fresh weights, from a transformers architecture and its settings.

    With a tokenizer the vocabulary size and the pad, cls, sep, bos, eos and mask ids come from it, unless `config`
    names them. What `config` does not name keeps the architecture's default.

    Args:
        model_type: The architecture's name in transformers, for example `bert` or `modernbert`.
        config: Settings of the architecture's config class.
        pad_vocab_to_multiple_of: Round a vocabulary size that `config` does not name up to a multiple of this.
        seed: Seed of the weights.
    """

    def __init__(
        self,
        model_type: str = "bert",
        config: dict[str, Any] | None = None,
        pad_vocab_to_multiple_of: int = 1,
        seed: int = 42,
    ) -> None:
        if not isinstance(pad_vocab_to_multiple_of, int) or pad_vocab_to_multiple_of < 1:
            raise ValueError(
                f"pad_vocab_to_multiple_of must be at least 1, got {pad_vocab_to_multiple_of!r}; use 1 for no padding."
            )
        if config is not None and not isinstance(config, dict):
            raise TypeError(f"config must be a dict of the architecture's settings, got {type(config).__name__}.")
        self.model_type = model_type
        self.config = config
        self.pad_vocab_to_multiple_of = pad_vocab_to_multiple_of
        self.seed = seed

    def build(self, tokenizer: Any = None) -> nn.Module:
        """Build the model with weights drawn under `seed`.

        Args:
            tokenizer: Gives the vocabulary size and the special ids.

        Returns:
            The class that `AutoModelForMaskedLM` chooses, in train mode.

        Raises:
            ValueError: For an unknown `model_type`, one without a masked-LM class, an unknown or invalid setting, a
                vocabulary smaller than the tokenizer's, or a padding id outside the vocabulary.
        """
        config_class = _masked_lm_config_class(self.model_type)
        settings = copy.deepcopy(self.config or {})
        if settings.pop("model_type", self.model_type) != self.model_type:
            raise ValueError(
                f"config names model_type {(self.config or {})['model_type']!r}, but the recipe's model_type is "
                f"{self.model_type!r}; leave it out of config."
            )
        default = config_class()
        if not hasattr(default, "vocab_size"):
            raise ValueError(
                f"model_type {self.model_type!r} has no vocab_size of its own: it is not a plain text encoder; "
                "choose one such as 'bert' or 'modernbert', or use FromBuilder."
            )
        _refuse_unknown_settings(settings, default=default)

        if "vocab_size" not in settings:
            wanted = default.vocab_size if tokenizer is None else _vocab_size(tokenizer)
            settings["vocab_size"] = -(-wanted // self.pad_vocab_to_multiple_of) * self.pad_vocab_to_multiple_of
        elif tokenizer is not None and settings["vocab_size"] < _vocab_size(tokenizer):
            raise ValueError(
                f"config names vocab_size {settings['vocab_size']}, but the tokenizer has {_vocab_size(tokenizer)} "
                "ids; leave vocab_size out to take the tokenizer's."
            )
        if tokenizer is not None:
            for name in TOKENIZER_IDS:
                token_id = getattr(tokenizer, name, None)
                # A default such as ModernBERT's cls id 50281 means nothing to a tokenizer without a cls token. Padding
                # keeps it: models count positions and build embeddings by it.
                stale = name != "pad_token_id" and getattr(default, name, None) is not None
                if name not in settings and (token_id is not None or stale):
                    settings[name] = token_id
        try:
            config = config_class(**settings)
        except (StrictDataclassError, TypeError) as error:
            raise ValueError(f"config does not fit {config_class.__name__}: {' '.join(str(error).split())}.") from error
        pad_token_id = getattr(config, "pad_token_id", None)
        if pad_token_id is not None and not 0 <= pad_token_id < config.vocab_size:
            raise ValueError(
                f"pad_token_id must lie below vocab_size {config.vocab_size}, got {pad_token_id}; "
                "give a tokenizer that has a padding token, or name pad_token_id in config."
            )
        try:
            with _fresh_generator(self.seed):
                student: nn.Module = AutoModelForMaskedLM.from_config(config)
        except (ValueError, TypeError, RuntimeError, ArithmeticError, LookupError, AttributeError) as error:
            raise ValueError(f"config makes no model of type {self.model_type!r}: {error}; correct it.") from error
        return student


class FromPretrained(StudentRecipe):
    """A masked language model from a folder or the hub: continued pretraining, or a teacher.

    The model is taken as it is; its vocabulary is not changed to fit a tokenizer.

    Args:
        path: A folder written by `save_pretrained`, or a name on the hub.
        torch_dtype: Type of the loaded weights.
        seed: Seed of head weights that the folder does not hold.
    """

    def __init__(
        self, path: str, torch_dtype: Literal["float32", "bfloat16", "float16"] = "float32", seed: int = 42
    ) -> None:
        if torch_dtype not in ("float32", "bfloat16", "float16"):
            raise ValueError(
                f"torch_dtype must be float32, bfloat16 or float16, got {torch_dtype!r}; choose one of them."
            )
        self.path = path
        self.torch_dtype = torch_dtype
        self.seed = seed

    def build(self, tokenizer: Any = None) -> nn.Module:
        """Load the model; a head that the folder does not hold is new, and a warning says so.

        Args:
            tokenizer: Not used.

        Returns:
            The class that `AutoModelForMaskedLM` chooses, in eval mode.

        Raises:
            FileNotFoundError: If `path` looks like a path and is no folder, or the folder holds no `config.json`.
            ValueError: If it cannot be loaded as a masked language model, or weights of its encoder are missing.
        """
        folder = Path(self.path).expanduser()
        if not folder.is_dir() and _looks_like_path(self.path):
            raise FileNotFoundError(
                f"path {self.path!r} is not a folder that save_pretrained wrote, nor a hub name; "
                f"{how_to_make(self.path)}."
            )
        if folder.is_dir() and not (folder / "config.json").is_file():
            raise FileNotFoundError(
                f"path {self.path!r} holds no config.json; give a folder written by save_pretrained."
            )
        try:
            with _fresh_generator(self.seed):
                model, info = AutoModelForMaskedLM.from_pretrained(
                    str(folder) if folder.is_dir() else self.path,
                    dtype=getattr(torch, self.torch_dtype),
                    output_loading_info=True,
                )
        except (OSError, ValueError, RuntimeError, ImportError, StrictDataclassError, SafetensorError) as error:
            where = (
                "the folder" if folder.is_dir() else "it is no folder here and was not found on the hub or in its cache"
            )
            raise ValueError(
                f"path {self.path!r} could not be loaded as a masked language model ({where}): "
                f"{(str(error).strip() or type(error).__name__).splitlines()[0]}"
            ) from error
        missing = sorted(info["missing_keys"])
        of_encoder = [name for name in missing if name.startswith(f"{model.base_model_prefix}.")]
        if of_encoder:
            raise ValueError(
                f"path {self.path!r} lacks {len(of_encoder)} tensors of the encoder ({_some(of_encoder)}) that its "
                "config asks for; give a folder whose weights match its config.json."
            )
        if missing:
            warnings.warn(
                f"{self.path!r} holds no weights for {_some(missing)}: this part of the masked-LM head starts new.",
                stacklevel=2,
            )
        loaded: nn.Module = model
        return loaded


class FromBuilder(StudentRecipe):
    """Any model: the result of an importable function or class.

    Parameters called `tokenizer` and `vocab_size` that `kwargs` does not name are filled in from the tokenizer.

    Args:
        builder: `package.module:function` or `package.module.function`.
        kwargs: Its keyword arguments.
        seed: Seed of PyTorch's CPU generator while it runs.
    """

    def __init__(self, builder: str, kwargs: dict[str, Any] | None = None, seed: int = 42) -> None:
        self.builder = builder
        self.kwargs = kwargs
        self.seed = seed

    def build(self, tokenizer: Any = None) -> nn.Module:
        """Call the builder.

        Args:
            tokenizer: Fills the parameters `tokenizer` and `vocab_size`.

        Returns:
            What the builder returned.

        Raises:
            ValueError: If the builder cannot be imported or its arguments do not fit.
            TypeError: If it is not callable or does not return an `nn.Module`.
        """
        builder = _imported(self.builder)
        kwargs = copy.deepcopy(self.kwargs or {})
        signature = inspect.signature(builder)
        if tokenizer is not None:
            known = {"tokenizer": tokenizer, "vocab_size": _vocab_size(tokenizer)}
            kwargs = {name: value for name, value in known.items() if name in signature.parameters} | kwargs
        try:
            signature.bind(**kwargs)
        except TypeError as error:
            raise ValueError(
                f"kwargs {sorted(kwargs)} do not fit builder {self.builder!r}{signature}: {error}; name its "
                "arguments in kwargs (tokenizer and vocab_size are filled in where a tokenizer is given)."
            ) from error
        with _fresh_generator(self.seed):
            student = builder(**kwargs)
        if not isinstance(student, nn.Module):
            raise TypeError(
                f"builder {self.builder!r} must return a torch.nn.Module, got {type(student).__name__}; "
                "return the model."
            )
        return student


class WarmStart(StudentRecipe):
    """A student made of a teacher's layers, see `warm_start_student`.

    Args:
        teacher: A folder written by `save_pretrained`, or a name on the hub.
        num_layers: Number of layers, evenly spaced over the teacher's.
        layers: The teacher's layers to copy, instead of `num_layers`.
        student_type: `distilbert` makes a DistilBERT of a BERT teacher.
    """

    def __init__(
        self,
        teacher: str,
        num_layers: int | None = None,
        layers: list[int] | None = None,
        student_type: str | None = None,
    ) -> None:
        self.teacher = teacher
        self.num_layers = num_layers
        self.layers = layers
        self.student_type = student_type

    def build(self, tokenizer: Any = None) -> nn.Module:
        """Load the teacher in float32 and copy the chosen layers.

        Args:
            tokenizer: Not used; the student keeps the teacher's vocabulary.

        Returns:
            The student, in eval mode.

        Raises:
            FileNotFoundError: See `FromPretrained.build`.
            ValueError: See `FromPretrained.build` and `warm_start_student`.
        """
        teacher = FromPretrained(self.teacher).build(tokenizer)
        return warm_start_student(teacher, self.num_layers, self.layers, student_type=self.student_type)


def warm_start_student(
    teacher: nn.Module,
    num_layers: int | None = None,
    layers: list[int] | None = None,
    *,
    student_type: str | None = None,
) -> nn.Module:
    """Copy a teacher into a student of the same class with fewer layers: embeddings, head and chosen layers.

    `num_layers` of a teacher with N layers takes evenly spaced ones, the first and the last included: place i gets
    layer i·(N-1)/(num_layers-1), halves rounded up; one layer is the first. Of 12 layers: 6 are 0 2 4 7 9 11, 4 are
    0 4 7 11, 2 are 0 11, 1 is 0.

    The copies share no memory with the teacher, keep its types, devices and tied weights, and can be trained whether or
    not the teacher is frozen. Neither the teacher nor a random number generator changes.

    With `student_type="distilbert"` a `BertForMaskedLM` becomes a `DistilBertForMaskedLM`. DistilBERT knows no token
    types: the vector of type 0 is added to every position's. A student of the same depth then gives the scores the
    teacher gives for token type 0 (for the layer-norm epsilon 1e-12, the only one that DistilBERT has).

    Source: Sanh et al. 2019, DistilBERT (arXiv:1910.01108), section 3: a student initialised from the teacher's layers.

    Args:
        teacher: A transformers model.
        num_layers: The number of layers; give this or `layers`.
        layers: 0-based numbers of the teacher's layers, strictly increasing.
        student_type: The student's `model_type`: the teacher's (default) or, for a BERT teacher, `distilbert`.

    Returns:
        The student, in eval mode.

    Raises:
        TypeError: If the teacher is not a transformers model.
        ValueError: For a wrong choice of layers or `student_type`, or a teacher whose layers cannot be chosen: shared
            layers (ALBERT), encoder-decoders, or layers of unlike structure (ModernBERT's layer 0 must stay first).
    """
    if not isinstance(teacher, PreTrainedModel):
        raise TypeError(
            f"teacher must be a transformers PreTrainedModel, got {type(teacher).__name__}; a warm start reads the "
            "depth from its config and rebuilds its class (unwrap a compiled or wrapped model first)."
        )
    depth, lists = _layer_lists(teacher)
    chosen = _chosen_layers(depth, num_layers, layers)
    model_type = teacher.config.model_type
    if student_type == "distilbert" and model_type == "bert":
        return _distilbert_from_bert(teacher, chosen)
    if student_type not in (None, model_type):
        raise ValueError(
            f"student_type must be {model_type!r}, or 'distilbert' for a 'bert' teacher, got {student_type!r} for a "
            f"{model_type!r} teacher; leave it out for a student of the teacher's class."
        )

    config = copy.deepcopy(teacher.config)
    config.num_hidden_layers = len(chosen)
    for field in PER_LAYER_FIELDS:
        values = getattr(config, field, None)
        if isinstance(values, list) and len(values) == depth:
            setattr(config, field, [values[layer] for layer in chosen])
    with _fresh_generator(0):
        student = type(teacher)(config)
    lists = [name for name in lists if len(student.get_submodule(name)) == len(chosen)]
    places = {name: _name_in_student(name, lists=lists, chosen=chosen) for name, _ in _named_tensors(teacher)}
    tensors = {place: tensor for name, tensor in _named_tensors(teacher) if (place := places[name]) is not None}
    saved = {place for name in teacher.state_dict() if (place := places.get(name, name)) is not None}
    return _filled(student, tensors, saved=saved, chosen=chosen)


def _distilbert_from_bert(teacher: Any, chosen: list[int]) -> nn.Module:
    if not hasattr(teacher, "cls") or not hasattr(teacher.cls, "predictions"):
        raise ValueError(
            f"student_type 'distilbert' needs a teacher with BERT's masked-LM head, got {type(teacher).__name__}; "
            "load it with AutoModelForMaskedLM."
        )
    of = teacher.config
    config = DistilBertConfig(
        vocab_size=of.vocab_size,
        max_position_embeddings=of.max_position_embeddings,
        n_layers=len(chosen),
        n_heads=of.num_attention_heads,
        dim=of.hidden_size,
        hidden_dim=of.intermediate_size,
        dropout=of.hidden_dropout_prob,
        attention_dropout=of.attention_probs_dropout_prob,
        activation=of.hidden_act,
        initializer_range=of.initializer_range,
        tie_word_embeddings=of.tie_word_embeddings,
        **{name: getattr(of, name) for name in TOKENIZER_IDS if hasattr(of, name)},
    )
    config._attn_implementation = of._attn_implementation
    with _fresh_generator(0):
        student = DistilBertForMaskedLM(config)
    inside_layer = {
        "attention.q_lin": "attention.self.query",
        "attention.k_lin": "attention.self.key",
        "attention.v_lin": "attention.self.value",
        "attention.out_lin": "attention.output.dense",
        "sa_layer_norm": "attention.output.LayerNorm",
        "ffn.lin1": "intermediate.dense",
        "ffn.lin2": "output.dense",
        "output_layer_norm": "output.LayerNorm",
    }
    modules = {
        "distilbert.embeddings": "bert.embeddings",
        "distilbert.embeddings.word_embeddings": "bert.embeddings.word_embeddings",
        "distilbert.embeddings.LayerNorm": "bert.embeddings.LayerNorm",
        "vocab_transform": "cls.predictions.transform.dense",
        "vocab_layer_norm": "cls.predictions.transform.LayerNorm",
        "vocab_projector": "cls.predictions.decoder",
    }
    for place, layer in enumerate(chosen):
        for new, old in inside_layer.items():
            modules[f"distilbert.transformer.layer.{place}.{new}"] = f"bert.encoder.layer.{layer}.{old}"
    source = dict(_named_tensors(teacher))
    tensors = {}
    for name, _ in _named_tensors(student):
        module, _, leaf = name.rpartition(".")
        if module == "distilbert.embeddings.position_embeddings":
            positions = source["bert.embeddings.position_embeddings.weight"].detach()
            tensors[name] = positions + source["bert.embeddings.token_type_embeddings.weight"].detach()[0]
        else:
            tensors[name] = source[f"{modules[module]}.{leaf}"]
    return _filled(student, tensors, saved=set(student.state_dict()), chosen=chosen)


def _filled(student: nn.Module, tensors: dict[str, Tensor], *, saved: set[str], chosen: list[int]) -> nn.Module:
    """Give the student copies of the named tensors, one copy for each tensor, so that tied ones stay tied.

    Args:
        student: The new model.
        tensors: The teacher's tensors by their names in the student.
        saved: Those that belong to a state dict; they must be exactly the student's.
        chosen: The teacher's layers, for the error.
    """
    own = student.state_dict()
    unlike = sorted(own.keys() ^ saved) or sorted(name for name in saved if own[name].shape != tensors[name].shape)
    if unlike:
        raise ValueError(
            f"layers {chosen} do not make a {type(student).__name__} of {len(chosen)} layers: {_some(unlike)} would be "
            "missing, unknown or of another shape; choose layers of like structure, layer 0 first where it is special "
            "(ModernBERT's has no attn_norm), and a teacher whose weights match its config."
        )
    copies: dict[int, Tensor] = {}
    for name, old in list(_named_tensors(student)):
        tensor = tensors.get(name)
        if tensor is None:  # a computed buffer that the teacher does not keep
            continue
        if id(tensor) not in copies:
            copied = tensor.detach().clone()
            copies[id(tensor)] = nn.Parameter(copied, old.requires_grad) if isinstance(old, nn.Parameter) else copied
        module, _, leaf = name.rpartition(".")
        setattr(student.get_submodule(module), leaf, copies[id(tensor)])
    return student.eval()


def _named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    # Not the state dict: buffers that it leaves out (rotary frequencies, position ids) must follow type and device too.
    return chain(model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False))


def _name_in_student(name: str, *, lists: list[str], chosen: list[int]) -> str | None:
    for prefix in lists:
        if name.startswith(f"{prefix}."):
            layer, _, rest = name[len(prefix) + 1 :].partition(".")
            return f"{prefix}.{chosen.index(int(layer))}.{rest}" if int(layer) in chosen else None
    return name


def _layer_lists(teacher: Any) -> tuple[int, list[str]]:
    """The depth, and the names of the outermost `nn.ModuleList`s of that length (XLM keeps a layer's parts in four)."""
    name, config = type(teacher).__name__, teacher.config
    if getattr(config, "num_hidden_groups", None) is not None:
        raise ValueError(
            f"{name} cannot be a warm-start teacher: its {config.num_hidden_layers} layers share the weights of "
            f"{config.num_hidden_groups} group(s), so none can be left out; "
            "use FromConfig with fewer num_hidden_layers."
        )
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(
            f"{name} cannot be a warm-start teacher: it has an encoder and a decoder; use an encoder-only one."
        )
    if getattr(config, "is_heterogeneous", False):
        raise ValueError(
            f"{name} cannot be a warm-start teacher: its config sets single layers apart (per_layer_config); use "
            "FromConfig for a smaller model of its type."
        )
    depth = getattr(config, "num_hidden_layers", None)
    lists: list[str] = []
    for path, module in teacher.named_modules():
        nested = any(path.startswith(f"{outer}.") for outer in lists)
        if isinstance(module, nn.ModuleList) and len(module) == depth and not nested:
            lists.append(path)
    if depth is None or not lists:
        raise ValueError(
            f"{name} cannot be a warm-start teacher: it keeps no list of its {depth} layers "
            "(layers in blocks or shared ones cannot be chosen); use FromConfig for a smaller model of its type."
        )
    return depth, lists


def _chosen_layers(depth: int, num_layers: int | None, layers: list[int] | None) -> list[int]:
    if (num_layers is None) == (layers is None):
        raise ValueError(f"give num_layers or layers, and not both, got num_layers={num_layers} and layers={layers}.")
    if layers is not None:
        chosen = list(layers) if isinstance(layers, (list, tuple, range)) else [layers]
        numbered = not isinstance(layers, int) and all(type(layer) is int for layer in chosen)
        increasing = numbered and all(left < right for left, right in zip(chosen, chosen[1:], strict=False))
        if not chosen or not increasing or chosen[0] < 0 or chosen[-1] >= depth:
            raise ValueError(
                f"layers must be strictly increasing numbers from 0 to {depth - 1} (the teacher has {depth} layers), "
                f"at least one and none twice, got {chosen}; list the teacher's layers to keep, in order."
            )
        return chosen
    assert num_layers is not None
    if type(num_layers) is not int or not 1 <= num_layers <= depth:
        raise ValueError(
            f"num_layers must lie from 1 to {depth}, the teacher's number of layers, got {num_layers!r}; correct it."
        )
    gaps = max(num_layers - 1, 1)
    return [(2 * place * (depth - 1) + gaps) // (2 * gaps) for place in range(num_layers)]


def _masked_lm_config_class(model_type: str) -> Any:
    if not isinstance(model_type, str):
        raise TypeError(f"model_type must be an architecture's name such as 'bert', got {model_type!r}.")
    if model_type not in CONFIG_MAPPING:
        raise ValueError(
            f"model_type {model_type!r} is not known to transformers{_closest(model_type, list(CONFIG_MAPPING))}; "
            "for a model of your own use FromBuilder."
        )
    config_class = CONFIG_MAPPING[model_type]
    if config_class not in MODEL_FOR_MASKED_LM_MAPPING:
        raise ValueError(
            f"model_type {model_type!r} has no masked-LM class in transformers; choose an encoder such as 'bert' or "
            "'modernbert', or put WithMLMHead on it in a function named by FromBuilder."
        )
    return config_class


def _refuse_unknown_settings(settings: dict[str, Any], *, default: Any) -> None:
    # Some settings are no fields: DeBERTa-v2's modeling code reads conv_kernel_size, ModernBERT's config takes
    # global_attn_every_n_layers. So what the code of either reads by name is known too.
    known = {name for name in vars(default) if not name.startswith("_")} | set(default.attribute_map)
    model_class = MODEL_FOR_MASKED_LM_MAPPING[type(default)]
    model_class = model_class[0] if isinstance(model_class, tuple) else model_class
    code: list[Any] = [base for base in type(default).__mro__ if issubclass(base, HFConfig)]
    code.append(inspect.getmodule(model_class))
    for key in settings:
        is_property = hasattr(default, key) and not callable(getattr(default, key))
        if key in known or key in TOKENIZER_IDS or is_property:
            continue
        read = re.compile(rf"""config\.{re.escape(key)}\b|\((?:\w*config, )?["']{re.escape(key)}["']""")
        if not any(read.search(_source(part)) for part in code):
            raise ValueError(
                f"config names {key!r}, which {type(default).__name__} does not know"
                f"{_closest(key, sorted(known))}; correct or remove it."
            )


def _source(part: Any) -> str:
    try:
        return inspect.getsource(part)
    except (OSError, TypeError):  # a class typed into a session has no source: only its fields are known
        return ""


def _imported(path: str) -> Callable[..., Any]:
    module_name, _, attribute = path.partition(":") if ":" in path else path.rpartition(".")
    if not module_name or not attribute:
        raise ValueError(
            f"builder must read package.module:function or package.module.function, got {path!r}; name both."
        )
    try:
        found = operator.attrgetter(attribute)(importlib.import_module(module_name))
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"builder {path!r} cannot be imported: {error}; give package.module:function of an installed package or of "
            "a folder on PYTHONPATH."
        ) from error
    if not callable(found):
        raise TypeError(f"builder {path!r} must be callable, got {type(found).__name__}; name a function or class.")
    return found  # type: ignore[no-any-return]


def _vocab_size(tokenizer: Any) -> int:
    """The number of rows an embedding needs: ids may have holes, so the largest counts as well."""
    return int(max(len(tokenizer), 1 + max(tokenizer.get_vocab().values())))


def _looks_like_path(path: str) -> bool:
    # A hub name has one slash at most.
    return path.startswith((".", "/", "~")) or path.endswith("/") or path.count("/") > 1 or "\\" in path


def _closest(name: str, known: list[str]) -> str:
    matches = difflib.get_close_matches(name, known, n=1)
    return f" (closest: {matches[0]!r})" if matches else ""


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


@contextmanager
def _fresh_generator(seed: int) -> Iterator[None]:
    """Build on the CPU under a seed and put the generator back.

    The device is set because Lightning calls `configure_model` within its own device, where another generator would
    draw the weights and `from_pretrained` would ask for accelerate. Not `torch.manual_seed`: it also seeds CUDA.
    """
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.default_generator.manual_seed(seed)
        yield
