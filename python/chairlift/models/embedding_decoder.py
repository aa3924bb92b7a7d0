"""Decoders that compute embeddings as encoders do: their tokens may attend to later ones, and all poolings are known."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from chairlift.architectures import ARCHITECTURES, GEMMA_NORMS, HEADLESS, EncoderArchitecture, Norms
from chairlift.architectures.encoders import decoder_layout
from chairlift.architectures.llama import LLAMA
from chairlift.errors import UnsupportedModel
from chairlift.models.config import ModelConfig
from chairlift.models.fields import parse_names
from chairlift.models.quantization import described_beside

_BIDIRECTIONAL = "BidirectionalModel"
"""What ends the names of NVIDIA's classes, such as LlamaBidirectionalModel."""
_EUROBERT = ("EuroBertModel", "EuroBertForMaskedLM")
"""Classes that compute a Llama whose tokens attend to later ones."""


def decoder_name(raw: dict[str, Any]) -> tuple[str, str] | None:
    """Returns the name in `architectures` of a config.json that stands for a decoder, and that of the decoder with its head."""
    for name in parse_names(raw, "architectures") or []:
        if name in ARCHITECTURES:
            return name, name
        known = LLAMA if name in _EUROBERT else HEADLESS.get(name)
        full = known.name if known else name.removesuffix(_BIDIRECTIONAL) + "ForCausalLM"
        if full in ARCHITECTURES and not raw.get("text_config"):
            return name, full
    return None


def is_causal(raw: dict[str, Any], name: str) -> bool:
    """Whether tokens attend to no later ones."""
    usual = raw.get("is_causal") is not False and raw.get("use_bidirectional_attention") in (None, False, "vision")
    return usual and not name.endswith(_BIDIRECTIONAL) and name not in _EUROBERT


def parse_decoder(raw: dict[str, Any], directory: Path, names: tuple[str, str]) -> tuple[ModelConfig, EncoderArchitecture]:
    """Parses the configuration of a decoder (see `decoder_name`) and returns it with its layout as an encoder.

    Raises UnsupportedModel for features that the encoder's code lacks.
    """
    model = ModelConfig.parse(raw | {"architectures": [names[1]], "is_causal": True, "use_bidirectional_attention": None})
    ropes = (model.rope, model.local_rope)
    lacking = {
        "experts": model.experts,
        "recurrent layers": model.recurrence,
        "attention to latents": model.latent,
        "layers with different heads": model.variants,
        "attention sinks": model.family.sinks,
        "gated attention": model.family.gated_attention,
        "queries that grow with their position": model.temperature,
        "capped attention scores": model.scales.scores_cap,
        "layers without rotary positions": not all(model.uses_rope),
        "scaled or partial rotations": any(rope.scale != 1 or rope.dim != model.head_dim for rope in ropes),
        "multipliers": model.scales.residual != 1 or model.scales.embedding not in (1, model.hidden_size**0.5),
        "norms of all heads together": model.family.whole_norms,
        "norms of other names": model.family.norms not in (Norms(), GEMMA_NORMS),
        "layer norms": model.family.centred,
        "norms of queries and keys after their rotation": model.family.rotated_first,
        "rotated pairs of neighbours": model.family.adjacent_pairs,
        "fused projections": len(model.family.projections.gate_up) != 2,
        "biases of attention's output and of MLPs": model.output_bias or model.mlp_bias,
        "quantised weights": model.scheme or described_beside(directory),
    }
    if found := [what for what, present in lacking.items() if present]:
        raise UnsupportedModel(f"{names[0]} computes embeddings of whole texts here, and there is no code for that with {found[0]}")
    return model, decoder_layout(
        model.family.projections,
        post_norms=model.family.post_norms,
        qk_norm=model.qk_norm,
        name=names[0],
        model_type=str(raw.get("model_type")),
        models="",
        norm_offset=model.family.norm_offset,
        gate=model.activation,
        scaled_embeddings=model.scales.embedding != 1,
    )


def windows_of(model: ModelConfig, *, causal: bool) -> tuple[int | None, ...]:
    """Returns how many tokens on either side each layer attends to. Raises UnsupportedModel for windows of tokens that see later ones."""
    if causal:
        return tuple(None if window is None else window - 1 for window in model.windows)
    if model.local_rope != model.rope or any(window is not None and window < model.max_position_embeddings for window in model.windows):
        raise UnsupportedModel(f"{model.architecture} with windows and attention to later tokens has no code of ours")
    return (None,) * model.num_layers
