"""What the compiler makes of the kernels of a layer beside attention, for the shapes of well-known models."""

import re
from itertools import product

import pytest
from compile_gate import FULL
from offline import SHARED_MEMORY, Compiled, compiled, most_spilled
from triton import next_power_of_2

from chairlift.kernels import (
    LARGEST,
    act_mul,
    copy_blocks,
    dequantise,
    expert_linear,
    fp8_linear,
    quantise_rows,
    quantised_linear,
    resolve,
    rms_norm,
    rope_write,
    sort_experts,
    weight_tile,
    write_kv,
)
from chairlift.kernels.launch_settings import DeviceLimits

pytestmark = pytest.mark.slow

DEVICES = list(SHARED_MEMORY) if FULL else [90]
FP8_DEVICES = [capability for capability in DEVICES if capability >= 89]
"""Compute capabilities; Triton stores e4m3 from 8.9 on."""


def assert_wide(made: Compiled) -> None:
    """No lane moves less than 16 bytes at once."""
    assert made.spilled == 0
    assert set(made.loads) == set(made.stores) == {16}


WHOLE = {"least": None, "largest": LARGEST}
ROUNDING = WHOLE | {"least": 1e-12}
"""Constants of kernels that can round what they write, and do not or do."""
UNCLAMPED = {"slope": 1.0, "limit": None}


def assert_rounds(made: Compiled) -> None:
    """No lane loads less than 16 bytes at once, and it stores at least 8 values of 8 bits."""
    assert made.spilled == 0
    assert set(made.loads) == {16}
    assert made.stores[8] + made.stores[16] > 0
    assert_keeps_nan(made)


def assert_keeps_nan(made: Compiled) -> None:
    """What is no number stays none in 8 bits, as in torch: the clamp would make a finite one of it, and a wrong answer of an error."""
    assert "min.NaN." in made.ptx


@pytest.mark.parametrize(
    ("columns", "warps", "weight", "residual", "inner"),
    [(4096, 16, "bf16", False, False), (4096, 16, "bf16", True, False), (576, 4, "bf16", True, False), (3584, 16, "fp32", True, True)],
    ids=["alone", "with a sum", "smollm2", "gemma-2"],
)
@pytest.mark.parametrize(("capability", "rounds"), [*((one, False) for one in DEVICES), *((one, True) for one in FP8_DEVICES)])
def test_rms_norm(columns, warps, weight, residual, inner, rounds, capability):
    made = compiled(
        rms_norm._rms_norm_kernel,
        {
            "out_ptr": "*fp8e4nv:16" if rounds else "*bf16:16",
            "scale_ptr": "*fp32:16" if rounds else None,
            "x_ptr": "*bf16:16",
            "weight_ptr": f"*{weight}:16",
            "residual_ptr": "*bf16:16" if residual else None,
            "inner_ptr": f"*{weight}:16" if inner else None,
            "eps": "fp32",
            "columns": "i32:16",
            **(ROUNDING if rounds else WHOLE),
            "block": next_power_of_2(columns),
        },
        capability=capability,
        num_warps=warps,
    )
    if rounds:
        assert_rounds(made)
    else:
        assert_wide(made)
    assert made.registers <= 64


@pytest.mark.parametrize("capability", DEVICES)
@pytest.mark.parametrize("gelu", [False, True])
def test_act_mul(gelu, capability):
    pointers = {"out_ptr": "*bf16:16", "scale_ptr": None, "gate_up_ptr": "*bf16:16", "columns": "i32:16"}
    constants = {"root": act_mul.ROOT, "gelu": gelu, **UNCLAMPED, **WHOLE, "block": act_mul.BLOCK}
    made = compiled(act_mul._act_mul_kernel, pointers | constants, capability=capability)
    assert_wide(made)
    assert made.registers <= 40


@pytest.mark.parametrize("capability", FP8_DEVICES if FULL else [89, 90])
@pytest.mark.parametrize("columns", [1536, 14336, 28672])
def test_act_mul_of_rows_that_are_rounded(columns, capability):
    arguments = {"out_ptr": "*fp8e4nv:16", "scale_ptr": "*fp32:16", "gate_up_ptr": "*bf16:16", "columns": "i32:16"}
    arguments |= {"root": act_mul.ROOT, "gelu": True, **UNCLAMPED, **ROUNDING, "block": next_power_of_2(columns)}
    warps = min(next_power_of_2(columns) // 256, quantise_rows.MAX_WARPS)
    assert_rounds(compiled(act_mul._act_mul_kernel, arguments, capability=capability, num_warps=warps))


STRIDES = dict.fromkeys((f"{part}_{stride}" for part in ("keys", "values") for stride in ("block", "head", "offset")), "i32:16")

CACHES = {"bf16": {"keys_ptr": "*bf16:16", "values_ptr": "*bf16:16", "key_scale_ptr": None, "value_scale_ptr": None}}
CACHES |= {"fp8": {"keys_ptr": "*fp8e4nv:16", "values_ptr": "*fp8e4nv:16", "key_scale_ptr": "*fp32:16", "value_scale_ptr": "*fp32:16"}}

HEADS = {
    "llama-3.1-8b": (32, 8, 128, False),
    "smollm2-135m": (9, 3, 64, False),
    "qwen3-8b": (32, 8, 128, True),
    "gemma-3-4b": (8, 4, 256, True),
}
"""Heads, KV heads, dimensions of a head, and whether heads are normalised."""


STORES = [*((one, "bf16") for one in DEVICES), *((one, "fp8") for one in FP8_DEVICES)]
"""Devices and caches."""


@pytest.mark.parametrize(("capability", "cache"), STORES)
@pytest.mark.parametrize("model", HEADS)
def test_rope_write(model, capability, cache):
    heads, kv_heads, dim, normed = HEADS[model]
    arguments = {"qkv_ptr": "*bf16:16", "cosines_ptr": "*fp32:16", "sines_ptr": "*fp32:16", "slots_ptr": "*i32", "eps": "fp32"}
    arguments |= dict.fromkeys(("query_norm_ptr", "key_norm_ptr"), "*bf16:16" if normed else None)
    arguments |= CACHES[cache] | STRIDES | {"qkv_token": "i32:16", "heads": heads, "kv_heads": kv_heads, "half": dim // 2}
    arguments |= {"block_size": 16, "pair_block": dim // 2, "head_block": min(1024 // dim, next_power_of_2(heads))}
    arguments |= {"rotated_first": False}
    made = compiled(rope_write._rope_write_kernel, arguments, capability=capability, num_warps=2)
    assert made.spilled == made.shared_memory == 0
    assert made.registers <= 64
    # The slot is the one narrow load, and the scale of keys, that of values and either again for the other half. Of eight bits, 8 pairs are
    # 8 bytes.
    assert set(made.loads) == {16, 4}
    assert made.device_loads()[4] == (1 if cache == "bf16" else 4)
    assert set(made.stores) == ({16} if cache == "bf16" else {16, 8})
    if cache == "fp8":
        assert_keeps_nan(made)


@pytest.mark.parametrize(("capability", "cache"), STORES)
def test_write_kv(capability, cache):
    heads, dim, value_dim = 8, 192, 128
    arguments = {"k_ptr": "*bf16:16", "v_ptr": "*bf16:16", "slots_ptr": "*i32"} | CACHES[cache] | STRIDES
    arguments |= dict.fromkeys(("k_token", "k_head", "v_token", "v_head"), "i32:16")
    arguments |= {"heads": heads, "key_dim": dim, "value_dim": value_dim, "block_size": 16, "head_block": 4, "dim_block": 256}
    made = compiled(write_kv._write_kv_kernel, arguments, capability=capability)
    assert made.spilled == 0
    assert made.registers <= 64
    assert set(made.loads) == {16, 4}
    assert set(made.stores) == ({16} if cache == "bf16" else {8})
    if cache == "fp8":
        assert_keeps_nan(made)


@pytest.mark.parametrize("capability", DEVICES)
def test_copy_blocks(capability):
    arguments = {"cache_ptr": "*i32:16", "pairs_ptr": "*i32", "count": "i32", "words": "i32:16", "block": copy_blocks.BLOCK}
    made = compiled(copy_blocks._copy_blocks_kernel, arguments, capability=capability, num_warps=8)
    assert made.spilled == 0
    assert made.loads == {16: 1, 4: 2}
    assert made.stores == {16: 1}
    # Between pairs the lanes wait for each other.
    assert "bar.sync" in made.ptx


@pytest.mark.parametrize("capability", DEVICES)
def test_resolve(capability):
    arguments = {"out_ptr": "*i32:16", "input_ids_ptr": "*i32:16", "last_token_ptr": "*i32:16", "count": "i32", "block": resolve.BLOCK}
    made = compiled(resolve._resolve_kernel, arguments, capability=capability)
    assert made.spilled == 0
    assert made.registers <= 40


@pytest.mark.parametrize("capability", FP8_DEVICES)
def test_quantise_rows(capability):
    columns = 4096
    arguments = {"numbers_ptr": "*fp8e4nv:16", "scale_ptr": "*fp32:16", "x_ptr": "*bf16:16", "columns": "i32:16"}
    arguments |= ROUNDING | {"block": columns}
    assert_rounds(compiled(quantise_rows._quantise_rows_kernel, arguments, capability=capability, num_warps=16))


WEIGHTS = {"int8": ("*i8:16", "*fp32:16", 0), "fp8": ("*u8:16", "*fp32:16", 128), "int4": ("*u8:16", "*fp16:16", 128)}
"""Types of a quantised weight's numbers and scales, and the columns of a scale."""
LINEAR = [(80, 1, "int4"), (86, 128, "fp8"), (89, 64, "int4"), (90, 1, "fp8"), (90, 128, "int8"), (100, 64, "int4")]
if FULL:
    MAX_ROWS = {"int4": quantised_linear.MAX_ROWS_OF_4_BITS}
    LINEAR = [(*one, kind) for kind in WEIGHTS for one in product(SHARED_MEMORY, (1, MAX_ROWS.get(kind, quantised_linear.MAX_ROWS)))]


def weight_arguments(kind: str) -> dict[str, object]:
    numbers, scale, group = WEIGHTS[kind]
    arguments = {"numbers_ptr": numbers, "scale_ptr": scale, "zero_ptr": "*u8:16" if kind == "int4" else None, "GROUP": group}
    sizes = {"outs": "i32:16", "ins": "i32:16", "pitch": "i32:16", "groups": "i32:16"}
    return arguments | sizes | {"BLOCK_N": weight_tile.BLOCK_N, "BLOCK_K": weight_tile.block_k(group)}


@pytest.mark.parametrize(("capability", "rows", "kind"), LINEAR)
def test_quantised_linear(capability, rows, kind):
    arguments = {"out_ptr": "*bf16:16", "x_ptr": "*bf16:16", "bias_ptr": None, "rows": "i32", **weight_arguments(kind)}
    limits = DeviceLimits(divmod(capability, 10), SHARED_MEMORY[capability], 132)
    tiling = quantised_linear.tiling(rows, 4096, 4096, weight_tile.BLOCK_K, limits)
    arguments |= {"BLOCK_M": tiling.BLOCK_M, "BLOCK_N": quantised_linear.BLOCK_N}
    arguments |= {"parts_ptr": "*fp32:16", "arrived_ptr": "*i32:16", "tiles": "i32"}
    kernel = quantised_linear._quantised_linear_kernel
    made = compiled(kernel, arguments, capability=capability, num_warps=tiling.num_warps, num_stages=tiling.num_stages)
    # ptxas takes a few bytes of stack for sm_100, with most registers unused.
    assert made.spilled <= (8 if capability == 100 else 0)
    assert made.shared_memory <= SHARED_MEMORY[capability]
    assert made.loads[16] > 0
    assert made.wgmma or made.mma or "tcgen05.mma" in made.ptx
    # A conversion for each number would take longer than to load it.
    assert not re.search(r"cvt\.rn\.\w*f\d+\.[su]", made.ptx)
    # Tiles are loaded ahead.
    assert "cp.async.cg" in made.ptx


EXPERTS = {**WEIGHTS, "bf16": ("*bf16:16", None, 0), "fp16": ("*fp16:16", None, 0), "mxfp4": ("*u8:16", "*u8:16", 32)}
"""The same for the experts of a mixture. Activations are in bf16, with weights in fp16 as these."""
MEANS = (0, 16, 32, expert_linear.FEW, expert_linear.MANY)
"""Rows of an expert, on average, from which tiles have other sizes."""
PRODUCTS = [
    (80, 0, "int4"),
    (80, 256, "fp16"),
    (86, 64, "mxfp4"),
    (89, 16, "bf16"),
    (90, 0, "mxfp4"),
    (90, 256, "fp8"),
    (90, 256, "mxfp4"),
    (100, 16, "bf16"),
    (120, 0, "int8"),
]
if FULL:
    PRODUCTS = list(product(SHARED_MEMORY, MEANS, EXPERTS))


@pytest.mark.parametrize(("capability", "mean", "kind"), PRODUCTS)
def test_expert_linear(capability, mean, kind):
    numbers, scale, group = EXPERTS[kind]
    limits = DeviceLimits(divmod(capability, 10), SHARED_MEMORY[capability], 132)
    grouped = group == 128
    settings, block_k = expert_linear.expert_settings(mean * 128, 128, scale is not None, grouped, limits)
    half = "*fp16:16" if kind == "fp16" else "*bf16:16"
    arguments = {"out_ptr": half, "x_ptr": half, "numbers_ptr": numbers, "scale_ptr": scale, "bias_ptr": None}
    arguments |= {"zero_ptr": "*u8:16" if kind == "int4" else None, "order_ptr": "*i32:16", "ends_ptr": "*i32:16", "used": "i32"}
    arguments |= {"experts": "i32:16", "outs": "i32:16", "ins": "i32:16", "pitch": "i32:16", "groups": "i32:16"}
    arguments |= {"SPREAD": True, "MXFP4": kind == "mxfp4", "GROUP": group, "EXPERTS": 128}
    arguments |= {"BLOCK_M": settings.BLOCK_M, "BLOCK_N": settings.BLOCK_N, "BLOCK_K": block_k}
    launch = {"num_warps": settings.num_warps, "num_stages": settings.num_stages}
    made = compiled(expert_linear._expert_linear_kernel, arguments, capability=capability, **launch)
    assert made.spilled <= most_spilled(0, "expert_linear", capability, mean, kind)
    assert made.shared_memory <= SHARED_MEMORY[capability]
    assert made.loads[16] > 0
    assert made.wgmma or made.mma or "tcgen05.mma" in made.ptx
    assert not re.search(r"cvt\.rn\.\w*f\d+\.[su]", made.ptx)
    assert "cp.async.cg" in made.ptx


@pytest.mark.parametrize("group", [16, 32, 64] if FULL else [16])
@pytest.mark.parametrize("capability", DEVICES)
def test_small_groups_of_4_bits(capability, group):
    limits = DeviceLimits(divmod(capability, 10), SHARED_MEMORY[capability], 132)
    size = weight_tile.block_k(group)
    tiling = quantised_linear.tiling(1, 4096, 4096, size, limits)
    settings, _ = expert_linear.expert_settings(0, 128, True, True, limits)
    shared = {"out_ptr": "*bf16:16", "x_ptr": "*bf16:16", "bias_ptr": None, **weight_arguments("int4"), "GROUP": group, "BLOCK_K": size}
    alone = {"rows": "i32", "parts_ptr": "*fp32:16", "arrived_ptr": "*i32:16", "tiles": "i32"}
    mixed = {"order_ptr": "*i32:16", "ends_ptr": "*i32:16", "used": "i32", "experts": "i32:16"}
    mixed |= {"SPREAD": True, "MXFP4": False, "EXPERTS": 128}
    for kernel, arguments, chosen in (
        (quantised_linear._quantised_linear_kernel, shared | alone | {"BLOCK_N": quantised_linear.BLOCK_N}, tiling),
        (expert_linear._expert_linear_kernel, shared | mixed | {"BLOCK_N": settings.BLOCK_N}, settings),
    ):
        launch = {"num_warps": chosen.num_warps, "num_stages": chosen.num_stages}
        made = compiled(kernel, arguments | {"BLOCK_M": chosen.BLOCK_M}, capability=capability, **launch)
        assert made.spilled == 0
        assert made.shared_memory <= SHARED_MEMORY[capability]
        assert made.wgmma or made.mma or "tcgen05.mma" in made.ptx


def test_sort_experts():
    made = compiled(
        sort_experts._sort_experts_kernel,
        {"order_ptr": "*i32:16", "ends_ptr": "*i32:16", "experts_ptr": "*i64:16", "choices": "i32", "BLOCK": sort_experts.BLOCK},
    )
    assert made.spilled == 0


@pytest.mark.parametrize("outs", [4096, 28672])
@pytest.mark.parametrize("rows", [1, fp8_linear.MAX_ROWS])
@pytest.mark.parametrize("capability", FP8_DEVICES)
def test_fp8_linear(capability, rows, outs):
    limits = DeviceLimits(divmod(capability, 10), SHARED_MEMORY[capability], 132)
    settings = fp8_linear.fp8_settings(rows, outs, limits)
    arguments = {"out_ptr": "*bf16:16", "x_ptr": "*fp8e4nv:16", "x_scale_ptr": "*fp32:16", "numbers_ptr": "*fp8e4nv:16"}
    arguments |= {"scale_ptr": "*fp32:16", "bias_ptr": None, "rows": "i32", "outs": "i32:16", "ins": "i32:16"}
    arguments |= {"BLOCK_M": settings.BLOCK_M, "BLOCK_N": settings.BLOCK_N, "BLOCK_K": fp8_linear.BLOCK_K}
    launch = {"num_warps": settings.num_warps, "num_stages": settings.num_stages}
    made = compiled(fp8_linear._fp8_linear_kernel, arguments, capability=capability, **launch)
    assert made.spilled == 0
    assert made.shared_memory <= SHARED_MEMORY[capability]
    assert made.loads[16] > 0
    assert "cp.async.cg" in made.ptx
    assert made.wgmma or made.mma or "tcgen05.mma" in made.ptx


@pytest.mark.parametrize("capability", DEVICES)
@pytest.mark.parametrize("kind", WEIGHTS)
def test_dequantise(kind, capability):
    made = compiled(dequantise._dequantise_kernel, {"out_ptr": "*bf16:16", **weight_arguments(kind)}, capability=capability)
    assert made.spilled == 0
    assert set(made.stores) == {16}
