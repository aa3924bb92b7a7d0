"""Writes quantised checkpoints as their formats are documented, number by number, and the model that they stand for."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import load_file, save_file

GROUP = 16
DOWN = "model.layers.1.mlp.down_proj"
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
        activations = "activation_scale" if name.endswith("_inv") else "input_scale"
        return Packed({"weight": numbers, name: stored, activations: torch.ones(())}, numbers.float() * whole_scale)

    return pack


def nvfp4(names: dict[str, str]) -> Callable[[torch.Tensor], Packed]:
    """Codes of e2m1, scales of 16 columns in e4m3, and a factor of all, which `names` has as what multiplies or as what divides."""

    def pack(weight: torch.Tensor) -> Packed:
        tiles, codes = weight.unflatten(1, (-1, 16)), torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
        factor = weight.abs().max() / (6 * 448)
        scale = (tiles.abs().amax(2) / 6 / factor).to(torch.float8_e4m3fn)
        whole_scale = (scale.float() / (1 / factor) if "divisor" in names else scale.float() * factor)[..., None]
        nearest = (tiles.abs() / whole_scale)[..., None].sub(codes).abs().argmin(-1)
        numbers = (nearest + 8 * (tiles < 0)).flatten(1).to(torch.uint8)
        tensors = {names["weight"]: numbers[:, ::2] | numbers[:, 1::2] << 4, "weight_scale": scale, names["inputs"]: torch.ones(1)}
        tensors |= {names["divisor"]: (1 / factor)[None]} if "divisor" in names else {names["factor"]: factor}
        return Packed(tensors, (codes[nearest] * tiles.sign() * whole_scale).flatten(1))

    return pack


def nf4(nested: bool) -> Callable[[torch.Tensor], Packed]:
    """Codes of any 16 numbers for blocks of 64 of the flat matrix; their scales are numbers, or codes of 256 numbers."""

    def pack(weight: torch.Tensor) -> Packed:
        blocks, numbers = weight.reshape(-1, 64), torch.linspace(-1, 1, 16) ** 3
        scale = blocks.abs().amax(1)
        tensors = {"weight.quant_map": numbers}
        state = {"quant_type": "nf4", "blocksize": 64, "dtype": "float32", "shape": list(weight.shape)}
        if nested:
            table, offset = torch.linspace(-1, 1, 256), scale.mean()
            largest = (scale - offset).abs().max()
            codes = ((scale - offset)[:, None] / largest - table).abs().argmin(1)
            state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset.item()}
            tensors |= {"weight.nested_absmax": largest[None], "weight.nested_quant_map": table}
            scale = table[codes] * largest + offset
        tensors["weight.absmax"] = codes.to(torch.uint8) if nested else scale
        nearest = (blocks / scale[:, None])[..., None].sub(numbers).abs().argmin(-1)
        flat = nearest.reshape(-1).to(torch.uint8)
        tensors["weight"] = (flat[::2] << 4 | flat[1::2])[:, None]
        tensors["weight.quant_state.bitsandbytes__nf4"] = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
        return Packed(tensors, (numbers[nearest] * scale[:, None]).reshape(weight.shape))

    return pack


def int8(group: int | None, packed: bool) -> Callable[[torch.Tensor], Packed]:
    """Integers of 8 bits, as they are or plus 128 in words."""

    def pack(weight: torch.Tensor) -> Packed:
        tiles = weight.unflatten(1, (-1, group or weight.shape[1]))
        scale = (tiles.abs().amax(2) / 127).to(torch.bfloat16)
        numbers = (tiles / scale.float()[..., None]).round().clamp(-128, 127)
        whole, stored = (numbers * scale.float()[..., None]).flatten(1), numbers.flatten(1).to(torch.int8)
        if not packed:
            return Packed({"weight": stored, "weight_scale": scale}, whole)
        words = (stored.int() + 128).to(torch.uint8).view(torch.int32)
        return Packed({"weight_packed": words, "weight_scale": scale, "weight_shape": torch.tensor(weight.shape)}, whole)

    return pack


def mlx(bits: int) -> Callable[[torch.Tensor], Packed]:
    """Integers of any bits, bit by bit from the lowest on, with a scale and a bias of each group of columns."""

    def pack(weight: torch.Tensor) -> Packed:
        tiles = weight.unflatten(1, (-1, GROUP))
        bias = tiles.amin(2).to(torch.bfloat16)
        scale = ((tiles.amax(2) - bias.float()) / (2**bits - 1)).to(torch.bfloat16)
        numbers = ((tiles - bias.float()[..., None]) / scale.float()[..., None]).round().clamp(0, 2**bits - 1)
        whole = (numbers * scale.float()[..., None] + bias.float()[..., None]).flatten(1)
        digits = (numbers.flatten(1).long()[..., None] >> torch.arange(bits)) & 1
        words = (digits.reshape(len(weight), -1, 32) << torch.arange(32)).sum(2)
        return Packed({"weight": words.to(torch.uint32), "scales": scale, "biases": bias}, whole)

    return pack


def gptq_of_8_bits(weight: torch.Tensor) -> Packed:
    """Integers of 8 bits along the inputs, zeros along the outputs, less 1."""
    tiles = weight.unflatten(1, (-1, GROUP))
    low, high = tiles.amin(2), tiles.amax(2)
    scale = ((high - low) / 255).to(torch.float16)
    zero = (-low / scale).round().clamp(0, 255)
    zero[0], zero[1] = 0, 255
    numbers = ((tiles / scale.float()[..., None]).round() + zero[..., None]).clamp(0, 255)
    whole = ((numbers - zero[..., None]) * scale.float()[..., None]).flatten(1)
    words = numbers.flatten(1).to(torch.uint8).contiguous().view(torch.int32).T
    zeros = ((zero.T - 1) % 256).to(torch.uint8).contiguous().view(torch.int32)
    return Packed({"qweight": words, "qzeros": zeros, "scales": scale.T}, whole)


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


def mixed(wide: Callable[[torch.Tensor], Packed], others: Callable[[torch.Tensor], Packed]) -> Callable[[torch.Tensor], Packed]:
    """One way for matrices with more columns than rows, among which is DOWN, and another one for the others."""
    return lambda weight: (wide if weight.shape[1] > len(weight) else others)(weight)


def grouped(*configs: dict[str, object]) -> dict[str, object]:
    """The config of a checkpoint of compressed-tensors that is quantised in several ways."""
    groups = [config["config_groups"]["group_0"] | {"format": config["format"]} for config in configs]
    return configs[0] | {"format": "mixed-precision", "config_groups": {f"group_{index}": group for index, group in enumerate(groups)}}


NVFP4 = Format(
    nvfp4({"weight": "weight_packed", "divisor": "weight_global_scale", "inputs": "input_global_scale"}),
    compressed("nvfp4-pack-quantized", 4, "float", strategy="tensor_group", group_size=16),
)
MODELOPT = nvfp4({"weight": "weight", "factor": "weight_scale_2", "inputs": "input_scale"})
EXPANDED = {
    "nvfp4": NVFP4,
    "nvfp4 of modelopt": Format(MODELOPT, {"quant_method": "modelopt", "quant_algo": "NVFP4"}),
    "nvfp4 and floats by row": Format(
        mixed(FORMATS["floats by row"].pack, NVFP4.pack), grouped(FORMATS["floats by row"].config, NVFP4.config)
    ),
    "packed and floats in blocks": Format(
        mixed(FORMATS["packed"].pack, FORMATS["floats in blocks"].pack),
        grouped(FORMATS["floats in blocks"].config, FORMATS["packed"].config),
    ),
    "modelopt, mixed": Format(
        mixed(MODELOPT, FORMATS["modelopt"].pack),
        {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}
        | {"quantized_layers": {DOWN: {"quant_algo": "NVFP4", "group_size": 16}, "model.layers.1.mlp.up_proj": {"quant_algo": "FP8"}}},
    ),
    "nf4": Format(nf4(False), {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}),
    "nested nf4": Format(nf4(True), {"quant_method": "bitsandbytes", "_load_in_4bit": True, "bnb_4bit_use_double_quant": True}),
    "int8": Format(int8(None, False), compressed("int-quantized", 8, "int", strategy="channel")),
    "int8 in words": Format(int8(GROUP, True), compressed("pack-quantized", 8, "int", **PACKED) | {"quantization_status": "compressed"}),
    "mlx": Format(mlx(4), {"bits": 4, "group_size": GROUP}),
    "mlx of 6 bits": Format(mlx(6), {"bits": 6, "group_size": GROUP, "mode": "affine", DOWN: {"bits": 6, "group_size": GROUP}}),
    "gptq of 8 bits": Format(gptq_of_8_bits, {"quant_method": "gptq", "bits": 8, "group_size": GROUP}),
}
"""Those that are multiplied out, on a CPU alone."""


def quantise_checkpoint(directory: Path, target: Path, form: str) -> None:
    """Quantises the layers of a checkpoint into `target`, and overwrites the checkpoint's weights with those that these stand for."""
    pack, config = (FORMATS | EXPANDED)[form]
    tensors, packed = load_file(directory / "model.safetensors"), {}
    for name, tensor in tensors.items():
        if not name.endswith("proj.weight") and not (form.startswith("mlx") and tensor.ndim == 2):
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
