"""LoRA adapters with random matrices, in peft's format."""

import json
from pathlib import Path

import gguf
import numpy as np
from safetensors.numpy import save_file

from chairlift.checkpoint.adapter import MODULES
from chairlift.checkpoint.gguf import _LAYER

SHAPES = {
    **{f"self_attn.{name}_proj": shape for name, shape in {"q": ("q", "x"), "k": ("kv", "x"), "v": ("kv", "x"), "o": ("x", "q")}.items()},
    **{f"mlp.{name}_proj": shape for name, shape in {"gate": ("inner", "x"), "up": ("inner", "x"), "down": ("x", "inner")}.items()},
    **{"self_attn.qkv_proj": ("qkv", "x"), "mlp.gate_up_proj": ("gate_up", "x")},
}
"""Outputs and inputs of each module, as names of sizes."""


def matrices(model: Path, rank: int = 4, seed: int = 0, modules: tuple[str, ...] = MODULES) -> dict[str, np.ndarray]:
    """A and B of each module of each layer, by their names in a checkpoint, for the model in the directory."""
    config, rng = json.loads((model / "config.json").read_text()), np.random.default_rng(seed)
    head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    sizes = {"x": config["hidden_size"], "inner": config["intermediate_size"]}
    sizes |= {"q": head * config["num_attention_heads"], "kv": head * config["num_key_value_heads"]}
    sizes |= {"qkv": sizes["q"] + 2 * sizes["kv"], "gate_up": 2 * sizes["inner"]}
    found = {}
    for layer in range(config["num_hidden_layers"]):
        for name, (outs, ins) in SHAPES.items():
            if name.partition(".")[2] in modules:
                place = f"model.layers.{layer}.{name}"
                found[f"{place}.lora_A"] = rng.normal(0, 0.3, (rank, sizes[ins])).astype(np.float32)
                found[f"{place}.lora_B"] = rng.normal(0, 0.3, (sizes[outs], rank)).astype(np.float32)
    return found


def write(directory: Path, tensors: dict[str, np.ndarray], rank: int = 4, alpha: float = 8, **config: object) -> Path:
    """Writes an adapter, with fields of adapter_config.json in `config`. Returns the directory."""
    directory.mkdir(parents=True, exist_ok=True)
    save_file({f"base_model.model.{name}.weight": tensor for name, tensor in tensors.items()}, directory / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "bias": "none", "target_modules": list(MODULES)}
    (directory / "adapter_config.json").write_text(json.dumps(settings | config))
    return directory


def write_gguf(path: Path, tensors: dict[str, np.ndarray], heads: int, kv_heads: int, alpha: float = 8) -> Path:
    """Writes an adapter of a Llama as llama.cpp's converter does, which permutes the rows of rotary projections. Returns the path."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", alpha)
    names = {hugging: ours for ours, hugging in _LAYER.items()}
    for name, tensor in tensors.items():
        _, _, layer, module = name.rpartition(".")[0].split(".", 3)
        if name.endswith("lora_B") and (count := {"self_attn.q_proj": heads, "self_attn.k_proj": kv_heads}.get(module)):
            tensor = tensor.reshape(count, 2, -1, tensor.shape[1]).swapaxes(1, 2).reshape(tensor.shape)
        writer.add_tensor(f"blk.{layer}.{names[module]}.weight.{name[-6:].lower()}", tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def random(directory: Path, model: Path, seed: int = 0, rank: int = 4) -> Path:
    """Writes an adapter for all modules of the model. Returns the directory."""
    return write(directory, matrices(model, rank, seed), rank)
