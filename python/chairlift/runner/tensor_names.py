"""How checkpoints name the tensors of a decoder."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import NamedTuple

WRAPPED_PREFIXES = ("model.language_model.", "language_model.model.", "model.text_model.")
"""Prefixes of the decoder's tensors in a model that also reads images."""

_SAVED_AS = (
    ("block_sparse_moe.experts.w2.weight", "mlp.experts.down_proj"),
    ("block_sparse_moe.input_linear.weight", "block_sparse_moe.experts.gate_up_proj"),
    ("block_sparse_moe.output_linear.weight", "block_sparse_moe.experts.down_proj"),
    ("block_sparse_moe.router.layer.", "block_sparse_moe.router."),
    ("block_sparse_moe.", "mlp."),
    ("mlp.moe_statics.", "mlp.gate.moe_statics."),
    ("mlp.e_score_correction_bias", "mlp.gate.e_score_correction_bias"),
    ("mlp.experts.gate_up_proj", "feed_forward.experts.gate_up_proj"),
    ("feed_forward.experts.w2.weight", "feed_forward.experts.down_proj"),
)


class TensorNames(NamedTuple):
    """How a checkpoint names a decoder's tensors.

    Names begin with `prefix` instead of `model.`, and have other `words`. Matrices with the suffixes `transposed` are [inputs, outputs].
    """

    prefix: str
    words: Mapping[str, str] = MappingProxyType({})
    transposed: tuple[str, ...] = ()

    @classmethod
    def of(cls, found: Iterable[str]) -> TensorNames:
        """Those of a checkpoint with these tensors. Embedding models, such as Qwen3-Embedding, have no prefix."""
        known = set(found)
        return next((names for embeddings, names in _BY_EMBEDDINGS.items() if embeddings in known), cls("model."))

    def stored(self, name: str) -> str:
        """A tensor's name in the checkpoint."""
        name = ".".join(self.words.get(word, word) for word in name.split("."))
        if name.startswith("model."):
            return self.prefix + name.removeprefix("model.")
        return f"language_model.{name}" if self.prefix == "language_model.model." else name


_GPT2 = TensorNames("transformer.", {"embed_tokens": "wte", "layers": "h"}, ("c_attn.weight", "c_proj.weight", "c_fc.weight"))
_BY_EMBEDDINGS = {
    **{f"{prefix}embeddings.weight": TensorNames(prefix, {"embed_tokens": "embeddings"}) for prefix in ("backbone.", "model.")},
    "gpt_neox.embed_in.weight": TensorNames("gpt_neox.", {"embed_tokens": "embed_in", "lm_head": "embed_out"}),
    "transformer.wte.weight": _GPT2,
    "wte.weight": _GPT2._replace(prefix=""),
    **{f"{prefix}embed_tokens.weight": TensorNames(prefix) for prefix in ("model.", "", "model.decoder.", "decoder.", *WRAPPED_PREFIXES)},
}


def saved_as(stored: str) -> Iterator[str]:
    """The names that transformers 5 may give a tensor in checkpoints that keep its own names."""
    return (stored.replace(usual, other) for usual, other in _SAVED_AS if usual in stored)
