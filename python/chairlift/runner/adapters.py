"""What the stores of LoRA adapters have in common: the check against the model, and the adapter of each batch slot."""

from __future__ import annotations

from chairlift.checkpoint.adapter import AdapterFiles
from chairlift.errors import UnsupportedModel
from chairlift.models.config import ModelConfig


class SlotAdapters:
    """The number of each batch slot's adapter."""

    def __init__(self) -> None:
        self.slots: dict[int, int] = {}
        """The adapters' numbers, of the slots that have one."""

    def assign(self, slot: int, number: int) -> None:
        """Sets the adapter of a batch slot; 0 for none."""
        self.slots.pop(slot, None)
        if number:
            self.slots[slot] = number


def check_shapes(files: AdapterFiles, model: ModelConfig) -> None:
    """Raises UnsupportedModel for an adapter whose shapes are not those of the model's layers."""
    if len(model.projections.qkv) == 1 or len(model.projections.gate_up) == 1:
        raise UnsupportedModel(f"{model.architecture} has fused projections, for which adapters are not supported")
    if model.variants:
        raise UnsupportedModel(f"{model.architecture} has layers of several shapes, for which adapters are not supported")
    if model.latent:
        raise UnsupportedModel(f"{model.architecture} makes keys and values of latents, for which adapters are not supported")
    if model.recurrence:
        raise UnsupportedModel(f"{model.architecture} has recurrent layers, for which adapters are not supported")
    queries, kv = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    hidden, inner = model.hidden_size, model.intermediate_size
    shapes = {
        **{"q_proj": (queries, hidden), "k_proj": (kv, hidden), "v_proj": (kv, hidden), "o_proj": (hidden, queries)},
        **{"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)},
    }
    another = f"adapter {files.directory}: it is for another base"
    for (layer, module), update in files.updates.items():
        if layer >= model.num_layers:
            raise UnsupportedModel(f"{another}: it changes layer {layer}, and the model has {model.num_layers} layers")
        if model.experts and model.experts.layers[layer] and module in ("gate_proj", "up_proj", "down_proj"):
            raise UnsupportedModel(
                f"adapter {files.directory}: layer {layer} of {model.architecture} has experts, which adapters cannot change"
            )
        if (update.outputs, update.inputs) != shapes[module]:
            found, expected = f"{update.outputs}x{update.inputs}", "{}x{}".format(*shapes[module])
            raise UnsupportedModel(f"{another}: {module} of layer {layer} is {found}, and the model's is {expected}")
