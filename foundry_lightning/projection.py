"""Scores at chosen positions of any masked language model.

A model computes scores ``[B, S, V]``, a loss needs R of the B · S places. Two projections with one interface:
:class:`ScoredProjection` lets the model's own head see these R hidden states only and stops before the last product,
which the loss then computes in blocks; :class:`PlainProjection` takes rows of the finished scores.
:func:`find_projection` proves on the actual model which one may be used.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from foundry_lightning.losses import Scored
from foundry_lightning.models import attends_anywhere, first_hidden, left_untouched, logits_of, probe_inputs

_SIZES = 64  # numbers of places that a head sees are multiples of it
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
            seen.append(first_hidden(output))
            return _with_first(output, seen[0].flatten(0, 1).index_select(0, padded).unsqueeze(0))

        with _forward_hook(model.get_submodule(self.body), choose), _returns_its_input(decoder):
            features = logits_of(model(**inputs))
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
        with attends_anywhere(model), left_untouched(model):
            return _prove(model, body)
    except Exception as error:  # the forward is the user's code: what it raises is told, not hidden
        return PlainProjection(body, f"plain scores: the proof failed with {type(error).__name__}: {error}")


def output_vocab_size(model: nn.Module) -> int:
    """Measure V, the number of classes ``model`` scores, by a tiny forward that leaves the model as it was."""
    with attends_anywhere(model), left_untouched(model):
        return logits_of(model(**probe_inputs(model))).shape[-1]


def hidden_size(model: nn.Module) -> int:
    """Measure D, the width of the body's last hidden states, by a tiny forward that leaves the model as it was.

    Raises:
        ValueError: the model has no ``base_model`` that it calls.
    """
    with attends_anywhere(model), left_untouched(model):
        hidden = _plain_forward(model, probe_inputs(model), _body_name(model))[1]
    if hidden is None:
        raise ValueError(
            f"the model must call a base_model that returns hidden states, got {type(model).__name__} without one; "
            "build it as WithMLMHead(encoder) or turn off the terms that compare hidden states."
        )
    return hidden.shape[-1]


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
        return logits_of(model(**inputs)), None
    seen: list[Tensor] = []
    with _forward_hook(model.get_submodule(body), lambda _, __, output: seen.append(first_hidden(output))):
        logits = logits_of(model(**inputs))
    return logits, seen[-1] if seen else None


def _body_name(model: nn.Module) -> str | None:
    body = getattr(model, "base_model", None)
    if body is model:
        return None
    return next((name for name, module in model.named_modules() if module is body), None)


def _prove(model: nn.Module, body: str) -> Projection:
    """Compare both ways inside :func:`left_untouched`."""
    inputs = probe_inputs(model)
    in_body = {id(parameter) for parameter in model.get_submodule(body).parameters()}
    # Fresh models have zero biases: one that is added after the decoder would go unnoticed.
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        if parameter.dim() == 1 and id(parameter) not in in_body:
            parameter.add_(torch.randn(parameter.shape, generator=generator, device="cpu").to(parameter))

    outputs: list[tuple[str, Tensor]] = []
    handles = [
        module.register_forward_hook(lambda _, __, output, name=name: outputs.append((name, output)))
        for name, module in model.named_modules()
        if type(module) is nn.Linear and not name.startswith(f"{body}.")
    ]
    try:
        logits = logits_of(model(**inputs))
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
    allowed = tolerance(expected, expected.dtype, roundings=4)  # the perturbed biases move scores by about 1
    if scores.shape != expected.shape or (scores - expected).abs().max() > allowed:
        return PlainProjection(body, "plain scores: the head gives other scores when it sees the chosen positions only")
    nothing = projection(model, inputs, positions=positions[:0]).scored.scores()
    if nothing.shape != (0, logits.shape[-1]):
        return PlainProjection(body, "plain scores: the head cannot run on no position")
    return projection


def rounds_float32_products(device: torch.device) -> bool:
    """Whether products of float32 matrices are made in TF32 or bfloat16 there, however the user said so.

    `torch.get_float32_matmul_precision` raises where it was said of one backend.
    """
    backend = torch.backends.cuda if device.type == "cuda" else torch.backends.mkldnn
    return backend.matmul.fp32_precision not in ("ieee", "none")


def tolerance(scores: Tensor, dtype: torch.dtype, *, roundings: int) -> float:
    """Rounding of a few products in `dtype`, which TF32 makes coarser."""
    epsilon = max(roundings * torch.finfo(dtype).eps, 1e-5)
    if dtype == torch.float32 and rounds_float32_products(scores.device):
        epsilon = 1e-2
    return epsilon * max(1.0, float(scores.abs().max()))
