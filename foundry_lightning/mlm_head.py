"""A head that makes a masked language model of any encoder."""

from types import SimpleNamespace
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from transformers.modeling_outputs import MaskedLMOutput

from foundry_lightning.config import Checks, plain, problems_to_error
from foundry_lightning.losses import IGNORED_LABEL
from foundry_lightning.models import accepts, first_hidden

_WIDTH_NAMES = ("hidden_size", "dim", "d_model", "n_embd")
_INIT_STD = 0.02  # BERT's initializer_range


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
        hidden_size, vocab_size = plain(hidden_size), plain(vocab_size)
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
        hidden = first_hidden(self.encoder(input_ids, **kwargs))
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
