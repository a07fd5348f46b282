"""Several texts in one row: attention stays within a text, positions count from its start.

Packed texts must not see each other (Krell et al. 2021, arXiv:2107.02027, section 4). A model gets an additive
float mask ``[B, 1, S, S]`` (a boolean one leaks in MPNet), or one for each kind of layer where its
``config.layer_types`` says that it has several, and ``position_ids``; a flash-attention kernel gets the places where
texts start in the place of a mask. :func:`find_packing` proves on the actual model that both are heeded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from foundry_lightning.masking import changes, positions_in_text
from foundry_lightning.models import (
    accepts,
    first_position,
    left_untouched,
    outputs_of,
    probe_ids,
    uses_flash_attention,
    weight_of,
)
from foundry_lightning.projection import tolerance

_LENGTHS = (4, 5)  # of the texts that are packed for the proof
_PADDING = 3


@dataclass(frozen=True)
class Packing:
    """How a model is told of packed texts.

    Attributes:
        first_position: What it calls the first position (RoBERTa counts from ``padding_idx + 1``).
        windows: Kind of layer -> how far its attention reaches, None for all of a row.
        flash: Whether it attends with a flash-attention kernel.
    """

    first_position: int
    windows: Mapping[str, int | None]
    flash: bool

    def inputs(self, batch: Mapping[str, Tensor], *, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
        """What the model takes of a packed batch.

        Args:
            batch: ``input_ids`` and ``text_ids``, the number of each token's text within its row, ``[B, S]``; with
                ``text_starts`` (see :func:`text_starts`) flash attention needs no word from the device.
            dtype: Of the mask: that of the model's weights, which a Trainer's `precision` may change. Under autocast
                autocast's.
        """
        text_ids = batch["text_ids"]
        positions = positions_in_text(torch.ones_like(text_ids, dtype=torch.bool), text_ids) + self.first_position
        inputs = {"input_ids": batch["input_ids"], "position_ids": positions}
        if self.flash:
            starts, longest = batch.get("text_starts"), text_ids.shape[1]
            starts = text_starts(text_ids) if starts is None else starts
            return {
                **inputs,
                **{f"cu_seq_lens_{side}": starts for side in "qk"},
                **{f"max_length_{side}": longest for side in "qk"},
            }
        return {**inputs, "attention_mask": self.mask(text_ids, dtype=dtype)}

    def mask(self, text_ids: Tensor, *, dtype: torch.dtype) -> Tensor | dict[str, Tensor]:
        """Additive masks ``[B, 1, S, S]`` by which places of one text in a row see each other; one for each kind."""
        apart = text_ids.unsqueeze(2) != text_ids.unsqueeze(1)
        place = torch.arange(text_ids.shape[1], device=text_ids.device)
        distance = (place.unsqueeze(1) - place).abs()
        masks = {
            kind: _additive_mask(apart if reach is None else apart | (distance > reach), dtype)
            for kind, reach in self.windows.items()
        }
        return masks if len(masks) > 1 else next(iter(masks.values()))

    def padding(self, batch: Mapping[str, Any], *, dtype: torch.dtype) -> Any:
        """The attention mask of a batch of rows with padding, see :func:`find_padding`: None for no padding."""
        attended: Tensor = batch["attention_mask"]
        if batch["info"]["num_attended"] == attended.numel():
            return None
        return self.mask((attended == 0).to(torch.int8), dtype=dtype)


def _additive_mask(apart: Tensor, dtype: torch.dtype) -> Tensor:
    """`[B, 1, S, S]`: 0 where a place is seen, the type's lowest number where it is not."""
    kind = apart.device.type
    if torch.is_autocast_enabled(kind):  # which would make, and keep, a copy for each layer
        dtype = torch.get_autocast_dtype(kind)
    mask = torch.zeros(apart.shape, dtype=dtype, device=apart.device)
    return mask.masked_fill_(apart, torch.finfo(dtype).min).unsqueeze(1)


def text_starts(text_ids: Tensor) -> Tensor:
    """``[N + 1]`` int32: where each of the N texts of a batch starts, rows laid end to end, and the end of all."""
    starts = changes(text_ids).flatten().nonzero()[:, 0]
    return torch.nn.functional.pad(starts, (0, 1), value=text_ids.numel()).to(torch.int32)


def find_packing(model: nn.Module, *, name: str) -> Packing:
    """The packing of ``model``, proven by a small forward that leaves the model as it was.

    In a row of two texts and padding, exchanging one text must leave the other's outputs equal to the bit, and each
    text's outputs must be those that it gets in a row of its own. Flash attention is proven as it will run, under the
    autocast that is on.

    Raises:
        ValueError: the model does not keep them apart, or fails.
    """
    advice = "use group_by_length=True in its place."
    if not accepts(model, "position_ids"):
        raise ValueError(
            f"pack=True needs position_ids, which the {name}, {type(model).__name__}, does not take; {advice}"
        )
    packing, weight = _described(model), weight_of(model)
    device, dtype = weight.device.type, weight.dtype
    if autocast := packing.flash and torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
    try:
        with left_untouched(model), torch.autocast(device, dtype=dtype, enabled=autocast):
            problem = _mixes(model, packing, dtype=dtype)
    except Exception as error:  # the forward is the user's code
        problem = f"its forward fails with {type(error).__name__}: {error}"
        if packing.flash and dtype.itemsize > 2:
            advice = "flash attention needs half precision: torch_dtype='bfloat16' (Trainer: precision='bf16-mixed')."
    if problem:
        raise ValueError(f"pack=True does not work with the {name}, {type(model).__name__}: {problem}; {advice}")
    return packing


def answers_late(device: torch.device) -> bool:
    """Whether the host, asking there, waits for all that it has ordered before."""
    return device.type != "cpu"


def find_padding(model: nn.Module) -> Packing | None:
    """How ``model`` is told of padding without the host's waiting for the device; None: by the batch's own mask.

    For torch's attention, transformers asks the device at each forward whether all of a mask ``[B, S]`` is attended,
    which the host has counted. Proven by a small forward that leaves the model as it was: attended places must get the
    scores that they get by that mask.
    """
    if getattr(getattr(model, "config", None), "_attn_implementation", None) != "sdpa":
        return None
    padding = _described(model)
    input_ids = probe_ids(model, 2 * sum(_LENGTHS)).view(2, -1)
    whole, cut = torch.ones_like(input_ids), torch.ones_like(input_ids)
    cut[1, -_PADDING:] = 0
    dtype = weight_of(model).dtype
    try:
        with left_untouched(model):
            for attended in (whole, cut):
                batch = {"attention_mask": attended, "info": {"num_attended": int(attended.sum())}}
                mask = padding.padding(batch, dtype=dtype)
                expected = outputs_of(model, {"input_ids": input_ids, "attention_mask": attended})[attended != 0]
                found = outputs_of(model, {"input_ids": input_ids, "attention_mask": mask})[attended != 0]
                if (found - expected).abs().max() > tolerance(expected, dtype, roundings=16):
                    return None
    except Exception:  # the forward is the user's code, which takes the batch's own mask
        return None
    return padding


def _described(model: nn.Module) -> Packing:
    """What the model says of its positions and layers."""
    config = getattr(model, "config", None)
    kinds = dict.fromkeys(getattr(config, "layer_types", None) or ("full_attention",))
    reach = getattr(config, "sliding_window", None)
    return Packing(
        first_position=first_position(model),
        windows={kind: reach if kind == "sliding_attention" else None for kind in kinds},
        flash=uses_flash_attention(model),
    )


def _mixes(model: nn.Module, packing: Packing, *, dtype: torch.dtype) -> str | None:
    """What is wrong when texts share a row of a model that computes in `dtype`; None: nothing."""
    first, second = _LENGTHS
    a, b, c, d = probe_ids(model, 2 * (first + second)).split([first, second, second, first])
    padding = a[:1].expand(_PADDING)
    rows = torch.stack([torch.cat([a, b, padding]), torch.cat([a, c, padding]), torch.cat([d, b, padding])])
    text_ids = torch.repeat_interleave(torch.arange(3), torch.tensor([first, second, _PADDING])).expand_as(rows)
    packed = outputs_of(
        model, packing.inputs({"input_ids": rows, "text_ids": text_ids.to(rows.device)}, dtype=weight_of(model).dtype)
    )
    ab, ac, db = packed[0], packed[1], packed[2]
    ends = slice(first, first + second)
    if not torch.equal(ab[:first], ac[:first]) or not torch.equal(ab[ends], db[ends]):
        return "a text of a packed row sees its neighbour"
    for text, found in ((a, ab[:first]), (b, ab[ends])):
        ids = text.unsqueeze(0)
        expected = outputs_of(model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)})[0]
        if (found - expected).abs().max() > tolerance(expected, dtype, roundings=16):
            return "a packed text gets other scores than in a row of its own"
    return None
