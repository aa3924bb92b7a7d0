"""Checks LoRA adapters against the model that they are loaded for."""

from __future__ import annotations

from chairlift.checkpoint.adapter import FUSED, AdapterFiles, LowRank
from chairlift.errors import UnsupportedModel
from chairlift.models.config import ModelConfig

ATTENTION = ("q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj")

WHOLE = ("o_proj", "down_proj")
"""Modules that are never fused with others."""


def updates_for(files: AdapterFiles, model: ModelConfig) -> dict[tuple[int, str], LowRank]:
    """Returns the updates of an adapter by layer and module, with B's rows in the model's order.

    Raises UnsupportedModel for an adapter that changes what the model's layers do not have, or whose shapes are not theirs.
    """
    check_shapes(files, model)
    return {position: _in_halves(update, model.head_dim) if update.alternates else update for position, update in files.updates.items()}


def _in_halves(update: LowRank, head_dim: int) -> LowRank:
    rows = update.b.reshape(update.outputs // head_dim, head_dim // 2, 2, -1)
    return update._replace(b=rows.swapaxes(1, 2).reshape(-1), alternates=False)


def check_shapes(files: AdapterFiles, model: ModelConfig) -> None:
    """Checks that the adapter changes layers that the model has, of their shapes. Raises UnsupportedModel."""
    if model.variants:
        raise UnsupportedModel(f"{model.architecture} has layers of several shapes, for which adapters are not supported")
    if model.latent:
        raise UnsupportedModel(f"{model.architecture} makes keys and values of latents, for which adapters are not supported")
    for (layer, module), update in files.updates.items():
        if layer >= model.num_layers:
            raise UnsupportedModel(
                f"adapter {files.path}: it is for another base: it changes layer {layer}, and the model has {model.num_layers} layers"
            )
        if reason := _refusal(model, layer, module):
            raise UnsupportedModel(f"adapter {files.path}: {reason}")
        expected = _shape(model, layer, module)
        if (update.outputs, update.inputs) != expected:
            found, wanted = f"{update.outputs}x{update.inputs}", "{}x{}".format(*expected)
            raise UnsupportedModel(
                f"adapter {files.path}: it is for another base: {module} of layer {layer} is {found}, and the model's is {wanted}"
            )


def _refusal(model: ModelConfig, layer: int, module: str) -> str:
    """Why a layer's module cannot have an update, or ""."""
    name, names = model.architecture, model.family.projections
    if module in ATTENTION:
        recurrent = model.recurrence is not None and model.recurrence.layers[layer]
        if recurrent or not model.attention[layer]:
            return f"it changes {module} of layer {layer} of {name}, which has no attention"
        fused, own = len(names.qkv) == 1, names.qkv[0].endswith(".qkv_proj")
    else:
        if not model.feeds[layer]:
            return f"it changes {module} of layer {layer} of {name}, which has no MLP"
        if model.experts and model.experts.layers[layer]:
            return f"layer {layer} of {name} has experts, which adapters cannot change"
        if module == "gate_proj" and not model.gated:
            return f"it changes {module} of layer {layer} of {name}, whose MLP has no gate"
        fused, own = len(names.gate_up) == 1 and model.gated, names.gate_up[0].endswith(".gate_up_proj")
    if module in FUSED:
        return "" if own else f"it changes {module} of layer {layer} of {name}, which has none of this name"
    return f"{name} has fused projections, of which adapters cannot change {module} alone" if fused and module not in WHOLE else ""


def _shape(model: ModelConfig, layer: int, module: str) -> tuple[int, int]:
    """Outputs and inputs of a layer's module."""
    hidden, inner, kv = model.hidden_size, model.inner_of(layer), model.num_kv_heads * model.head_dim
    queries = model.num_heads * model.head_dim
    return {
        "q_proj": (2 * queries if model.family.gated_queries else queries, hidden),
        **{"k_proj": (kv, hidden), "v_proj": (kv, hidden), "o_proj": (hidden, queries)},
        **{"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)},
        **{"qkv_proj": (queries + 2 * kv, hidden), "gate_up_proj": (2 * inner, hidden)},
    }[module]
