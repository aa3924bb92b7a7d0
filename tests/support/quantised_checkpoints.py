"""Writes quantised checkpoints as their formats are documented, number by number, and the model that they stand for."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import load_file, save_file

GROUP = 16
BLOCK = (16, 32)
"""Rows and columns of a block of fp8."""


class Packed(NamedTuple):
    """A checkpoint's tensors of a weight, and the weight that they stand for."""

    tensors: dict[str, torch.Tensor]
    whole: torch.Tensor


class Format(NamedTuple):
    """How weights are written, and the `quantization_config` that says so."""

    pack: Callable[[torch.Tensor], Packed]
    config: dict[str, object]


def words(integers: torch.Tensor, order: tuple[int, ...] = tuple(range(8))) -> torch.Tensor:
    """Packs 4-bit integers, eight neighbours of a row to a word. `order[i]` is the neighbour in bits 4i to 4i + 3."""
    found = torch.zeros(len(integers), integers.shape[1] // 8, dtype=torch.int64)
    for place, column in enumerate(order):
        found |= integers[:, column::8].long() << 4 * place
    return torch.where(found < 1 << 31, found, found - (1 << 32)).to(torch.int32)


def integers(weight: torch.Tensor, group: int, symmetric: bool, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Integers from 0 to 15 [out, in], and their scales and zeros [out, groups]."""
    tiles = weight.unflatten(1, (-1, group))
    low, high = tiles.amin(2), tiles.amax(2)
    scale = ((tiles.abs().amax(2) / 7.5) if symmetric else (high - low) / 15).to(dtype)
    zero = torch.full_like(scale, 8) if symmetric else (-low / scale).round().clamp(0, 15)
    # Zeros at both ends of their range, which a zero that is stored less 1 may miss.
    if not symmetric:
        zero[0], zero[1] = 0, 15
    numbers = ((tiles.float() / scale.float()[..., None]).round() + zero[..., None]).clamp(0, 15)
    return numbers.flatten(1).int(), scale, zero.int()


def multiplied_out(numbers: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor, group: int) -> torch.Tensor:
    return (numbers - zero.repeat_interleave(group, 1)) * scale.float().repeat_interleave(group, 1)


def gptq(offset: int) -> Callable[[torch.Tensor], Packed]:
    """Integers packed along the inputs, zeros along the outputs, less 1 in the first version; all transposed."""

    def pack(weight: torch.Tensor) -> Packed:
        numbers, scale, zero = integers(weight, GROUP, offset == 0, torch.float16)
        tensors = {"qweight": words(numbers).T, "qzeros": words((zero.T - offset) % 16), "scales": scale.T}
        tensors["g_idx"] = torch.arange(weight.shape[1], dtype=torch.int32) // GROUP
        tensors["bias"] = torch.zeros(len(weight), dtype=torch.float16)
        return Packed(tensors, multiplied_out(numbers, scale, zero, GROUP))

    return pack


def gptq_in_order(weight: torch.Tensor) -> Packed:
    """GPTQ with `desc_act`: groups are of columns from all over, the same ones in all matrices of as many columns."""
    columns = weight.shape[1]
    order = torch.randperm(columns, generator=torch.Generator().manual_seed(columns))
    numbers, scale, zero = integers(weight[:, order], GROUP, False, torch.float16)
    back = order.argsort()
    tensors = {"qweight": words(numbers[:, back]).T, "qzeros": words((zero.T - 1) % 16), "scales": scale.T}
    tensors["g_idx"] = (back // GROUP).to(torch.int32)
    return Packed(tensors, multiplied_out(numbers, scale, zero, GROUP)[:, back])


def awq(weight: torch.Tensor) -> Packed:
    """Integers and zeros packed along the outputs, in an order of their own."""
    numbers, scale, zero = integers(weight, GROUP, False, torch.float16)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    tensors = {"qweight": words(numbers.T, order), "qzeros": words(zero.T, order), "scales": scale.T}
    return Packed(tensors, multiplied_out(numbers, scale, zero, GROUP))


def pack_quantized(symmetric: bool, group: int | None, dtype: torch.dtype = torch.bfloat16) -> Callable[[torch.Tensor], Packed]:
    """Integers packed along the inputs, zeros along the outputs."""

    def pack(weight: torch.Tensor) -> Packed:
        each = group or weight.shape[1]
        numbers, scale, zero = integers(weight, each, symmetric, dtype)
        tensors = {"weight_packed": words(numbers), "weight_scale": scale, "weight_shape": torch.tensor(weight.shape)}
        if not symmetric:
            tensors["weight_zero_point"] = words(zero.T).T
        return Packed(tensors, multiplied_out(numbers, scale, zero, each))

    return pack


def e4m3(rows: int, columns: int, name: str, dtype: torch.dtype = torch.float32) -> Callable[[torch.Tensor], Packed]:
    """Floats with a scale for each block; 0 rows or columns mean all."""

    def pack(weight: torch.Tensor) -> Packed:
        tall, wide = rows or len(weight), columns or weight.shape[1]
        # The last blocks may be smaller.
        below, right = -len(weight) % tall, -weight.shape[1] % wide
        tiles = torch.nn.functional.pad(weight, (0, right, 0, below)).unflatten(1, (-1, wide)).unflatten(0, (-1, tall))
        scale = (tiles.abs().amax((1, 3)) / 448).to(dtype)
        whole_scale = scale.float().repeat_interleave(tall, 0).repeat_interleave(wide, 1)[: len(weight), : weight.shape[1]]
        numbers = (weight / whole_scale).clamp(-448, 448).to(torch.float8_e4m3fn)
        stored = scale if columns or rows else scale.reshape(())
        return Packed({"weight": numbers, name: stored, "input_scale": torch.ones(())}, numbers.float() * whole_scale)

    return pack


def compressed(layout: str, bits: int, kind: str, **how: object) -> dict[str, object]:
    """A config of compressed-tensors; with 8 bits activations would be rounded too."""
    activations = {"num_bits": 8, "type": kind, "strategy": "token", "symmetric": True, "dynamic": True} if bits == 8 else None
    group = {"targets": ["Linear"], "weights": {"num_bits": bits, "type": kind, "symmetric": True} | how, "input_activations": activations}
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }


PACKED = {"strategy": "group", "group_size": GROUP}
AUTO_ROUND = {"quant_method": "auto-round", "bits": 4, "group_size": GROUP, "data_type": "int", "sym": False}
FORMATS = {
    "gptq": Format(gptq(1), {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": False}),
    "gptq v2": Format(gptq(0), {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "checkpoint_format": "gptq_v2"}),
    "gptq, desc_act": Format(gptq_in_order, {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": True, "sym": False}),
    "awq": Format(awq, {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}),
    "auto-round": Format(gptq(1), AUTO_ROUND | {"packing_format": "auto_round:auto_gptq", "extra_config": {"lm_head": {"bits": 16}}}),
    "auto-round's own": Format(gptq(0), AUTO_ROUND | {"packing_format": "auto_round", "quant_method": "intel/auto-round"}),
    "auto-round as awq": Format(awq, AUTO_ROUND | {"packing_format": "auto_round:auto_awq"}),
    "packed": Format(pack_quantized(True, GROUP), compressed("pack-quantized", 4, "int", **PACKED)),
    "packed, with zeros": Format(pack_quantized(False, GROUP), compressed("pack-quantized", 4, "int", **PACKED | {"symmetric": False})),
    "packed by row": Format(pack_quantized(True, None), compressed("pack-quantized", 4, "int", strategy="channel")),
    "floats": Format(e4m3(0, 0, "weight_scale"), compressed("float-quantized", 8, "float", strategy="tensor")),
    "floats by row": Format(e4m3(1, 0, "weight_scale", torch.bfloat16), compressed("float-quantized", 8, "float", strategy="channel")),
    "floats in blocks": Format(
        e4m3(*BLOCK, "weight_scale"), compressed("float-quantized", 8, "float", strategy="block", block_structure=list(BLOCK))
    ),
    "fp8": Format(e4m3(0, 0, "weight_scale"), {"quant_method": "fp8", "activation_scheme": "static"}),
    "modelopt": Format(e4m3(0, 0, "weight_scale"), {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]}),
    "modelopt by row": Format(e4m3(1, 0, "weight_scale"), {"quant_method": "modelopt", "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}),
    "fp8 in blocks": Format(
        e4m3(*BLOCK, "weight_scale_inv"), {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": list(BLOCK)}
    ),
}


def quantise_checkpoint(directory: Path, target: Path, form: str) -> None:
    """Quantises the layers of a checkpoint into `target`, and overwrites the checkpoint's weights with those that these stand for."""
    pack, config = FORMATS[form]
    tensors, packed = load_file(directory / "model.safetensors"), {}
    for name, tensor in tensors.items():
        if not name.endswith("proj.weight"):
            packed[name] = tensor
            continue
        parts, tensors[name] = pack(tensor)
        layer = name.removesuffix("weight")
        packed |= {
            f"{layer}{kind}": part.contiguous() for kind, part in parts.items() if f"{layer}{kind}" not in tensors or kind == "weight"
        }
    target.mkdir()
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    save_file(packed, target / "model.safetensors", metadata={"format": "pt"})
    raw = json.loads((directory / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(raw | {"quantization_config": config}))
