"""Scores at chosen positions of any masked language model, and a head that makes one of any encoder.

A model computes scores ``[B, S, V]``, a loss needs R of the B · S places. Two projections with one interface:
:class:`ScoredProjection` lets the model's own head see these R hidden states only and stops before the last product,
which the loss then computes in blocks; :class:`PlainProjection` takes rows of the finished scores.
:func:`find_projection` proves on the actual model which one may be used.
"""

import copy
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.modeling_outputs import MaskedLMOutput

from foundry_lightning.config import Checks, problems_to_error
from foundry_lightning.losses import IGNORED_LABEL, Scored

_WIDTH_NAMES = ("hidden_size", "dim", "d_model", "n_embd")
_INIT_STD = 0.02  # BERT's initializer_range
_SIZES = 64  # numbers of places that a head sees are multiples of it
_PROBE_SHAPE = (2, 6)
_PROBE_POSITIONS = (9, 1, 4, 3, 7)  # of 12 places: unordered, from both rows, fewer than all


class Projected(NamedTuple):
    """What a projection returns.

    Attributes:
        scored: the R chosen positions, in the order of ``positions``.
        hidden: the body's last hidden states ``[B, S, D]``, None where the model has no body of its own.
    """

    scored: Scored
    hidden: Tensor | None


class Projection(Protocol):
    """Scores of a model at chosen positions.

    Attributes:
        reason: for the start report: what this projection does, or why the plain one is used.
    """

    reason: str

    def __call__(self, model: nn.Module, inputs: dict[str, Tensor], *, positions: Tensor) -> Projected:
        """Run ``model(**inputs)`` and score the positions.

        Args:
            model: the model this projection was found for.
            inputs: its keyword arguments, without labels.
            positions: int64 ``[R]``, indices into the flattened B · S places; R may be 0.
        """
        ...


class ScoredProjection:
    """Run the model's head at the chosen positions only, without its last product.

    The call is ``model(**inputs)`` as a whole. For this call the body's output ``[B, S, D]`` is replaced by the chosen
    states ``[1, R, D]``, and the last Linear returns its input.
    """

    reason = "scored positions"

    def __init__(self, body: str, decoder: str) -> None:
        self.body, self.decoder = body, decoder  # names, so that a copied or wrapped model works too

    def __call__(self, model: nn.Module, inputs: dict[str, Tensor], *, positions: Tensor) -> Projected:
        """See :class:`Projection`."""
        decoder = model.get_submodule(self.decoder)
        # the head sees few sizes (the last place again up to a multiple): oneDNN keeps a kernel for each size it has
        # met, and those of all R would fragment the memory of a long run
        padded = torch.cat([positions, positions[-1:].expand(-len(positions) % _SIZES)])
        seen: list[Tensor] = []

        def choose(_: nn.Module, __: Any, output: Any) -> Any:
            seen.append(_first(output))
            return _with_first(output, seen[0].flatten(0, 1).index_select(0, padded).unsqueeze(0))

        with _forward_hook(model.get_submodule(self.body), choose), _returns_its_input(decoder):
            features = _logits(model(**inputs))
        weight, bias = decoder.weight, decoder.bias
        return Projected(Scored(features.flatten(0, 1)[: len(positions)], weight, bias), seen[0])  # type: ignore[arg-type]


class PlainProjection:
    """Run the plain forward and take the scores of the chosen positions."""

    def __init__(self, body: str | None, reason: str) -> None:
        self.body, self.reason = body, reason

    def __call__(self, model: nn.Module, inputs: dict[str, Tensor], *, positions: Tensor) -> Projected:
        """See :class:`Projection`."""
        logits, hidden = _plain_forward(model, inputs, self.body)
        return Projected(Scored(logits.flatten(0, 1).index_select(0, positions)), hidden)


def find_projection(model: nn.Module) -> Projection:
    """Choose the projection of ``model`` by proof: a tiny forward both ways, with every bias of the head perturbed.

    The model is left as it was: parameters, buffers, modes, hooks, gradients and the global generators. Whatever a
    model does in the proof, an error included, leads to the plain projection, whose ``reason`` tells it.

    Args:
        model: any masked language model on its device, called as ``model(input_ids=…)``, that returns an object with
            ``.logits``, a tuple that begins with the logits, or the logits.
    """
    body = _body_name(model)
    if body is None:
        return PlainProjection(None, "plain scores: the model has no base_model beside its head")
    try:
        with _attends_anywhere(model), left_untouched(model):
            return _prove(model, body)
    except Exception as error:  # the forward is the user's code: what it raises is told, not hidden
        return PlainProjection(body, f"plain scores: the proof failed with {type(error).__name__}: {error}")


def output_vocab_size(model: nn.Module) -> int:
    """Measure V, the number of classes ``model`` scores, by a tiny forward that leaves the model as it was."""
    with _attends_anywhere(model), left_untouched(model):
        return _logits(model(**_probe_inputs(model))).shape[-1]


def require_inputs(model: nn.Module, *, name: str) -> None:
    """Refuse a model whose forward does not take what every batch holds.

    Raises:
        TypeError: it lacks ``input_ids`` or ``attention_mask``.
    """
    lacking = [argument for argument in ("input_ids", "attention_mask") if not accepts(model, argument)]
    if lacking:
        raise TypeError(
            f"{name} must take {' and '.join(lacking)} in its forward, got {type(model).__name__}; add the argument, "
            "or wrap an encoder as WithMLMHead(encoder)."
        )


def hidden_size(model: nn.Module) -> int:
    """Measure D, the width of the body's last hidden states, by a tiny forward that leaves the model as it was.

    Raises:
        ValueError: the model has no ``base_model`` that it calls.
    """
    with _attends_anywhere(model), left_untouched(model):
        hidden = _plain_forward(model, _probe_inputs(model), _body_name(model))[1]
    if hidden is None:
        raise ValueError(
            f"the model must call a base_model that returns hidden states, got {type(model).__name__} without one; "
            "build it as WithMLMHead(encoder) or turn off the terms that compare hidden states."
        )
    return hidden.shape[-1]


class WithMLMHead(nn.Module):
    """Put a masked-language-model head on an encoder: dense, GELU, LayerNorm, Linear to the vocabulary.

    The head and its initialisation (normal, std 0.02, biases zero) are BERT's: Devlin et al. 2018, "BERT", appendix A.

    Args:
        encoder: a Hugging Face body (``AutoModel``) or any module that takes ``input_ids`` (and ``attention_mask``,
            where its forward accepts one) and returns ``[B, S, D]``, a tuple that begins with it, or an object with
            ``.last_hidden_state``.
        hidden_size: D; None reads the encoder's config (``hidden_size``, ``dim``, ``d_model``, ``n_embd``) or its
            attribute ``hidden_size``.
        vocab_size: V; None reads the encoder's config or its input embedding.
        tie_weights: use the input embedding ``[V, D]`` as the last Linear's weight.

    Raises:
        TypeError: the encoder is no module.
        ValueError: a size is not known or no size, or the weights cannot be tied.
    """

    def __init__(
        self,
        encoder: nn.Module,
        hidden_size: int | None = None,
        vocab_size: int | None = None,
        tie_weights: bool = False,
    ) -> None:
        super().__init__()
        if not isinstance(encoder, nn.Module):
            raise TypeError(f"encoder must be a torch.nn.Module, got {type(encoder).__name__}; give the model itself.")
        checks = Checks(SimpleNamespace(hidden_size=hidden_size, vocab_size=vocab_size))
        checks.integer("hidden_size", low=1, optional=True)
        checks.integer("vocab_size", low=2, optional=True)
        problems_to_error(checks.problems, of="WithMLMHead")
        self.encoder = encoder
        config = getattr(encoder, "config", None)
        if config is not None:
            self.config = config
        width = _encoder_width(encoder) if hidden_size is None else hidden_size
        classes = vocab_size
        if classes is None:
            classes = getattr(config, "vocab_size", None)
        embedding = _input_embedding(encoder, classes)
        if classes is None:
            if embedding is None:
                raise ValueError(
                    "vocab_size must be given, got None; the encoder shows no vocab_size and no single nn.Embedding."
                )
            classes = embedding.weight.shape[0]
        self.dense = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.decoder = nn.Linear(width, classes)
        for linear in (self.dense, self.decoder):
            nn.init.normal_(linear.weight, std=_INIT_STD)
            nn.init.zeros_(linear.bias)
        if tie_weights:
            shape = None if embedding is None else tuple(embedding.weight.shape)
            if embedding is None or shape != (classes, width):
                raise ValueError(
                    f"tie_weights needs an input embedding of shape ({classes}, {width}), got {shape}; set "
                    "tie_weights=False or give the encoder a get_input_embeddings() that returns such an nn.Embedding."
                )
            self.decoder.weight = embedding.weight
        self._takes_attention_mask = accepts(encoder, "attention_mask")

    @property
    def base_model(self) -> nn.Module:
        """The encoder."""
        return self.encoder

    def get_input_embeddings(self) -> nn.Embedding | None:
        """Return the encoder's token embedding, None where it is not known."""
        return _input_embedding(self.encoder, self.decoder.out_features)

    def get_output_embeddings(self) -> nn.Linear:
        """Return the last Linear, whose weight is ``[V, D]``."""
        return self.decoder

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, labels: Tensor | None = None, **kwargs: Any
    ) -> MaskedLMOutput:
        """Score every place.

        Args:
            input_ids: int64 ``[B, S]``.
            attention_mask: ``[B, S]`` or what the encoder takes; not passed on to an encoder that takes none.
            labels: int64 ``[B, S]``, −100 where nothing is predicted; adds ``.loss``, the mean cross-entropy in nats.
            kwargs: passed to the encoder.

        Returns:
            ``.logits`` of shape ``[B, S, V]`` and, with labels, ``.loss``.
        """
        if attention_mask is not None and self._takes_attention_mask:
            kwargs["attention_mask"] = attention_mask
        hidden = _first(self.encoder(input_ids, **kwargs))
        if hidden.shape[-1] != self.dense.in_features:
            raise ValueError(
                f"hidden_size must be the encoder's width {hidden.shape[-1]}, got {self.dense.in_features}; "
                "correct it in WithMLMHead(encoder, hidden_size)."
            )
        logits = self.decoder(self.norm(F.gelu(self.dense(hidden))))
        loss = None
        if labels is not None:
            loss = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=IGNORED_LABEL)
        return MaskedLMOutput(loss=loss, logits=logits)


def _encoder_width(encoder: nn.Module) -> int:
    config = getattr(encoder, "config", None)
    for owner, names in ((config, _WIDTH_NAMES), (encoder, ("hidden_size",))):
        for name in names:
            if isinstance(width := getattr(owner, name, None), int):
                return width
    raise ValueError(
        "hidden_size must be given, got None; the encoder has neither a config with it nor an attribute hidden_size."
    )


def _input_embedding(encoder: nn.Module, vocab_size: int | None) -> nn.Embedding | None:
    """The encoder's declared token embedding, else its only ``nn.Embedding`` (of ``vocab_size`` rows, where known)."""
    if callable(declared := getattr(encoder, "get_input_embeddings", None)):
        embedding = declared()
        return embedding if isinstance(embedding, nn.Embedding) else None
    found = [
        module
        for module in encoder.modules()
        if isinstance(module, nn.Embedding) and vocab_size in (None, module.num_embeddings)
    ]
    return found[0] if len(found) == 1 else None


def accepts(module: nn.Module, name: str) -> bool:
    """Whether the module's forward takes an argument of this name."""
    parameters = inspect.signature(module.forward).parameters
    return name in parameters or any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())


def _logits(output: Any) -> Tensor:
    logits = output
    if hasattr(output, "logits"):
        logits = output.logits
    elif isinstance(output, (tuple, list)) and output:
        logits = output[0]
    if not isinstance(logits, Tensor):
        raise TypeError(
            "the model must return .logits, a tuple that begins with the logits, or a tensor, got "
            f"{type(output).__name__}; wrap a body without a head as WithMLMHead(encoder)."
        )
    return logits


def outputs_of(model: nn.Module, inputs: dict[str, Any]) -> Tensor:
    """The scores ``[B, S, V]`` of a masked language model, the hidden states ``[B, S, D]`` of an encoder."""
    output = model(**inputs)
    return _first(output) if hasattr(output, "last_hidden_state") else _logits(output)


def first_position(model: nn.Module) -> int:
    """What the model calls the first position: RoBERTa's family counts from ``padding_idx + 1``."""
    embedding = position_embedding(model)
    return 0 if embedding is None or embedding.padding_idx is None else embedding.padding_idx + 1


def position_embedding(model: nn.Module) -> nn.Embedding | None:
    """The learned positions; None where a model has none."""
    for name, module in model.named_modules():
        if name.endswith("position_embeddings") and isinstance(module, nn.Embedding):
            return module
    return None


def _first(output: Any) -> Tensor:
    """The hidden states in a body's output."""
    hidden = output
    if hasattr(output, "last_hidden_state"):
        hidden = output.last_hidden_state
    elif isinstance(output, (tuple, list)) and output:
        hidden = output[0]
    if not isinstance(hidden, Tensor) or hidden.dim() != 3:
        got = tuple(hidden.shape) if isinstance(hidden, Tensor) else type(output).__name__
        raise TypeError(
            "the encoder must return hidden states [B, S, D], a tuple that begins with them, or .last_hidden_state, "
            f"got {got}; wrap it in a module that does."
        )
    return hidden


def _with_first(output: Any, hidden: Tensor) -> Any:
    """The same output with other hidden states."""
    if isinstance(output, Tensor):
        return hidden
    if isinstance(output, (tuple, list)):
        return (hidden, *output[1:])
    replaced = copy.copy(output)
    replaced.last_hidden_state = hidden
    return replaced


@contextmanager
def _forward_hook(module: nn.Module, hook: Callable[[nn.Module, Any, Any], Any]) -> Iterator[None]:
    handle = module.register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def _returns_its_input(module: nn.Module) -> Iterator[None]:
    """Shadow the module's forward by the identity; hooks on the module still run."""
    attributes = vars(module)
    before = {name: attributes[name] for name in ("forward",) if name in attributes}
    attributes["forward"] = lambda features: features
    try:
        yield
    finally:
        del attributes["forward"]
        attributes.update(before)


def _plain_forward(model: nn.Module, inputs: dict[str, Tensor], body: str | None) -> tuple[Tensor, Tensor | None]:
    """Return the logits and, where there is a body that is called, its hidden states."""
    if body is None:
        return _logits(model(**inputs)), None
    seen: list[Tensor] = []
    with _forward_hook(model.get_submodule(body), lambda _, __, output: seen.append(_first(output))):
        logits = _logits(model(**inputs))
    return logits, seen[-1] if seen else None


def _body_name(model: nn.Module) -> str | None:
    body = getattr(model, "base_model", None)
    if body is model:
        return None
    return next((name for name, module in model.named_modules() if module is body), None)


def probe_ids(model: nn.Module, count: int) -> Tensor:
    """``[count]`` fixed ordinary ids on the model's device."""
    device = next((tensor.device for tensor in (*model.parameters(), *model.buffers())), torch.device("cpu"))
    first = next((module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding)), 2)
    declared = getattr(getattr(model, "config", None), "vocab_size", None)
    num_ids = declared if isinstance(declared, int) else first
    return (torch.arange(count, device=device) + num_ids // 2) % num_ids


def _probe_inputs(model: nn.Module) -> dict[str, Tensor]:
    """A few fixed ordinary ids, all attended."""
    rows, length = _PROBE_SHAPE
    input_ids = probe_ids(model, rows * length).view(rows, length)
    inputs = {"input_ids": input_ids}
    if accepts(model, "attention_mask"):
        inputs["attention_mask"] = torch.ones_like(input_ids)
    return inputs


def uses_flash_attention(model: nn.Module) -> bool:
    """Whether the model was built with one of transformers' flash-attention kernels."""
    return "flash" in str(getattr(getattr(model, "config", None), "_attn_implementation", None))


@contextmanager
def _attends_anywhere(model: nn.Module) -> Iterator[None]:
    """Flash attention, which needs a GPU and half precision, is replaced by torch's own; the rest is the same."""
    if not uses_flash_attention(model):
        yield
        return
    config: Any = model.config
    chosen, config._attn_implementation = config._attn_implementation, "sdpa"
    try:
        yield
    finally:
        config._attn_implementation = chosen


@contextmanager
def left_untouched(model: nn.Module) -> Iterator[None]:
    """Evaluate without gradients, then restore modes, buffers, parameters of one dimension and generators."""
    modules = list(model.modules())
    modes = [module.training for module in modules]
    buffers = [dict(module._buffers) for module in modules]
    # 1-D parameters are all that the proof perturbs.
    tensors = [parameter for parameter in model.parameters() if parameter.dim() == 1] + list(model.buffers())
    saved = [tensor.detach().clone() for tensor in tensors]
    device = next((tensor.device for tensor in (*model.parameters(), *model.buffers())), torch.device("cpu"))
    cuda = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(cuda), torch.no_grad(), torch.autocast(device.type, enabled=False):
        try:
            for module in modules:
                module.training = False  # not .eval(): a model may override it with effects of its own
            yield
        finally:
            for module, mode, owned in zip(modules, modes, buffers, strict=True):
                module.training = mode
                module._buffers.update(owned)
            for tensor, value in zip(tensors, saved, strict=True):
                tensor.copy_(value)


def _prove(model: nn.Module, body: str) -> Projection:
    """Compare both ways inside :func:`left_untouched`."""
    inputs = _probe_inputs(model)
    in_body = {id(parameter) for parameter in model.get_submodule(body).parameters()}
    # Fresh models have zero biases: one that is added after the decoder would go unnoticed.
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        if parameter.dim() == 1 and id(parameter) not in in_body:
            parameter.add_(torch.randn(parameter.shape, generator=generator).to(parameter))

    outputs: list[tuple[str, Tensor]] = []
    handles = [
        module.register_forward_hook(lambda _, __, output, name=name: outputs.append((name, output)))
        for name, module in model.named_modules()
        if type(module) is nn.Linear and not name.startswith(f"{body}.")
    ]
    try:
        logits = _logits(model(**inputs))
    finally:
        for handle in handles:
            handle.remove()
    decoder = next((name for name, output in outputs if output is logits), None)
    if decoder is None:
        return PlainProjection(body, "plain scores: no nn.Linear of the head returns the logits themselves")

    projection = ScoredProjection(body, decoder)
    positions = torch.tensor(_PROBE_POSITIONS, device=logits.device)
    expected = logits.flatten(0, 1)[positions]
    scores = projection(model, inputs, positions=positions).scored.scores()
    if scores.shape != expected.shape or (scores - expected).abs().max() > _tolerance(expected):
        return PlainProjection(body, "plain scores: the head gives other scores when it sees the chosen positions only")
    nothing = projection(model, inputs, positions=positions[:0]).scored.scores()
    if nothing.shape != (0, logits.shape[-1]):
        return PlainProjection(body, "plain scores: the head cannot run on no position")
    return projection


def _tolerance(scores: Tensor) -> float:
    """Rounding of a few products; the perturbed biases move scores by about 1."""
    epsilon = max(4 * torch.finfo(scores.dtype).eps, 1e-5)
    if scores.dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest":
        epsilon = 1e-2
    return epsilon * max(1.0, float(scores.abs().max()))
