"""What any model takes and returns, and how one is tried out without a trace."""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

_PROBE_SHAPE = (2, 6)
_MOST_PRODUCTS = 10**11  # parameters × tokens of a forward that takes a second or two on a few cores


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


def accepts(module: nn.Module, name: str) -> bool:
    """Whether the module's forward takes an argument of this name."""
    parameters = inspect.signature(module.forward).parameters
    return name in parameters or any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())


def logits_of(output: Any) -> Tensor:
    """The scores in a masked language model's output.

    Raises:
        TypeError: there are none.
    """
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


def first_hidden(output: Any) -> Tensor:
    """The hidden states in a body's output.

    Raises:
        TypeError: there are none of shape ``[B, S, D]``.
    """
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


def outputs_of(model: nn.Module, inputs: dict[str, Any]) -> Tensor:
    """The scores ``[B, S, V]`` of a masked language model, the hidden states ``[B, S, D]`` of an encoder."""
    output = model(**inputs)
    return first_hidden(output) if hasattr(output, "last_hidden_state") else logits_of(output)


def weight_of(model: nn.Module) -> Tensor:
    """A weight that has the type and the device of the model's; an empty one on the CPU where there is none."""
    return next((p for p in model.parameters() if p.is_floating_point()), torch.zeros(0, device="cpu"))


def position_embedding(model: nn.Module) -> nn.Embedding | None:
    """The learned positions; None where a model has none."""
    for name, module in model.named_modules():
        if name.endswith("position_embeddings") and isinstance(module, nn.Embedding):
            return module
    return None


def first_position(model: nn.Module) -> int:
    """What the model calls the first position: RoBERTa's family counts from ``padding_idx + 1``."""
    embedding = position_embedding(model)
    return 0 if embedding is None or embedding.padding_idx is None else embedding.padding_idx + 1


def num_embeddings(model: nn.Module) -> int | None:
    """Rows of the input embedding; None where the model does not say."""
    getter = getattr(model, "get_input_embeddings", None)
    if getter is None:
        return None
    try:
        embedding = getter()
    except NotImplementedError:
        return None
    weight = getattr(embedding, "weight", None)
    return None if weight is None else int(weight.shape[0])


def max_positions(model: nn.Module) -> int | None:
    """Longest sequence the model's learned positions allow (RoBERTa counts from padding_idx + 1); None: no limit."""
    embedding = position_embedding(model)
    return None if embedding is None else embedding.num_embeddings - first_position(model)


def probe_ids(model: nn.Module, count: int) -> Tensor:
    """``[count]`` fixed ordinary ids on the model's device."""
    device = next((tensor.device for tensor in (*model.parameters(), *model.buffers())), torch.device("cpu"))
    first = next((module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding)), 2)
    declared = getattr(getattr(model, "config", None), "vocab_size", None)
    num_ids = declared if isinstance(declared, int) else first
    return (torch.arange(count, device=device) + num_ids // 2) % num_ids


def probe_inputs(model: nn.Module) -> dict[str, Tensor]:
    """A few fixed ordinary ids, all attended."""
    rows, length = _PROBE_SHAPE
    input_ids = probe_ids(model, rows * length).view(rows, length)
    inputs = {"input_ids": input_ids}
    if accepts(model, "attention_mask"):
        inputs["attention_mask"] = torch.ones_like(input_ids)
    return inputs


def fails_on(model: nn.Module, length: int) -> str | None:
    """What the body raises on a row of this many ids where it takes a few; None: nothing, or it would take seconds."""
    body: Any = getattr(model, "base_model", model)
    if sum(parameter.numel() for parameter in body.parameters()) * length > _MOST_PRODUCTS:
        return None
    with attends_anywhere(model), left_untouched(model):
        for size in (_PROBE_SHAPE[1], length):
            ids = probe_ids(model, size).unsqueeze(0)
            try:
                body(input_ids=ids, attention_mask=torch.ones_like(ids))
            except Exception as error:  # the forward is the user's code, and the first step tells what it always raises
                return f"{type(error).__name__}: {error}" if size == length else None
    return None


def uses_flash_attention(model: nn.Module) -> bool:
    """Whether the model was built with one of transformers' flash-attention kernels."""
    return "flash" in str(getattr(getattr(model, "config", None), "_attn_implementation", None))


@contextmanager
def attends_anywhere(model: nn.Module) -> Iterator[None]:
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
    """Evaluate without gradients, then restore modes, buffers, parameters of one dimension and generators.

    Also each module's attributes and parts: BigBird turns to full attention when it meets a row as short as a probe's.
    """
    modules = list(model.modules())
    before = [(dict(vars(m)), dict(m._buffers), dict(m._modules)) for m in modules]
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
            for module, (attributes, buffers, parts) in zip(modules, before, strict=True):
                vars(module).update(attributes)
                module._buffers.update(buffers)
                module._modules.update(parts)
            for tensor, value in zip(tensors, saved, strict=True):
                tensor.copy_(value)
