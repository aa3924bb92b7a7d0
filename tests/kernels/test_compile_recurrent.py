"""What the compiler makes of the kernels of recurrent layers, for the shapes of well-known models."""

import re

import pytest
from compile_gate import FULL
from offline import SHARED_MEMORY, compiled, most_spilled
from triton import next_power_of_2

from chairlift.kernels import advance_heads, convolve, gated_norm
from chairlift.kernels.quantise_rows import whole_row

pytestmark = pytest.mark.slow

DEVICES = list(SHARED_MEMORY) if FULL else [90]
ARRAYS = dict.fromkeys(("starts_ptr", "positions_ptr", "writes_ptr", "write_starts_ptr"), "*i32:16")
SIZES = {"slot_stride": "i32:16", "pitch": "i32:16"}
STACK = dict.fromkeys(SHARED_MEMORY, 0) | {100: 24}
"""Bytes of stack. ptxas takes a few for sm_100, with most registers unused."""
CONVOLUTIONS = {"lfm2": (3, True), "qwen3-next": (4, False)}
"""Taps, and whether the input and the output are multiplied by others."""
HEADS = {"qwen3-next": (32, 16, 128, 128, None), "granite-4-h": (128, 1, 128, 64, "*fp32:16"), "nemotron-h": (128, 8, 128, 64, "*fp32:16")}
"""Heads, keys, sizes of keys and values, and what a state space adds of the value."""


@pytest.mark.parametrize("capability", DEVICES)
@pytest.mark.parametrize("model", CONVOLUTIONS if FULL else ["lfm2"])
def test_convolve(model, capability):
    taps, gated = CONVOLUTIONS[model]
    arguments = {"x_ptr": "*bf16:16", "columns_ptr": "*fp32:16", "channels": "i32:16", "first": "i32:16", "taps": taps, "gated": gated}
    arguments |= ARRAYS | SIZES | {"channel_block": convolve.CHANNELS}
    tiles = {"out_ptr": "*bf16:16", "taps_ptr": "*fp32:16", "bias_ptr": None, "rows_ptr": "*i32:16", "tokens": "i32"}
    made = compiled(convolve._convolve_kernel, arguments | tiles | {"token_block": convolve.TOKENS}, capability=capability)
    assert made.spilled <= STACK[capability]
    assert made.registers <= 168
    assert made.loads[16] > 0
    assert set(made.stores) == {16}
    made = compiled(convolve._move_columns_kernel, arguments | {"column_block": next_power_of_2(taps - 1)}, capability=capability)
    assert made.spilled <= STACK[capability]
    # Lanes wait for each other before the slot that they read is written.
    assert "bar.sync" in made.ptx


@pytest.mark.parametrize("capability", DEVICES)
@pytest.mark.parametrize("model", HEADS if FULL else ["qwen3-next", "granite-4-h"])
def test_advance_heads(model, capability):
    count, groups, key_size, value_size, skip = HEADS[model]
    key_block, value_block = advance_heads.blocks(key_size, value_size)
    arguments = {"out_ptr": "*bf16:16", "mixed_ptr": "*bf16:16", "projected_ptr": "*bf16:16", "matrices_ptr": "*fp32:16"}
    arguments |= {"rates_ptr": "*fp32:16", "step_bias_ptr": "*fp32:16", "skip_ptr": skip, "mixed_pitch": "i32:16"}
    arguments |= ARRAYS | SIZES | dict.fromkeys(("queries_at", "keys_at", "values_at", "steps_at", "betas_at"), "i32:16")
    arguments |= {"count": count, "groups": groups, "key_size": key_size, "value_size": value_size, "tiled": False}
    arguments |= {"least": 0.0, "most": advance_heads.LARGEST_STEP, "key_block": key_block, "value_block": value_block}
    made = compiled(advance_heads._advance_heads_kernel, arguments, capability=capability)
    # The state stays in registers from token to token.
    assert made.spilled <= most_spilled(STACK[capability], "advance_heads", capability, model)
    assert made.registers <= 168
    assert made.loads[16] > 0
    assert made.stores[16] > 0
    # The tokens of a state begin where those of the one before ended.
    of_states, of_tokens = re.findall(r"scf\.for %\w+ = (%\S+) to", made.ttgir)
    assert of_tokens != of_states
    assert not of_tokens.startswith("%c")


@pytest.mark.parametrize("capability", DEVICES)
@pytest.mark.parametrize(("group", "weights", "gate_first"), [(128, 128, False), (8192, 8192, True)])
def test_gated_norm(group, weights, gate_first, capability):
    arguments = {"out_ptr": "*bf16:16", "x_ptr": "*bf16:16", "gates_ptr": "*bf16:16", "norm_ptr": "*fp32:16", "eps": "fp32"}
    arguments |= dict.fromkeys(("width", "pitch", "first"), "i32:16")
    arguments |= {"group": group, "weights": weights, "gate_first": gate_first, "block": group}
    _, warps = whole_row(group)
    made = compiled(gated_norm._gated_norm_kernel, arguments, capability=capability, num_warps=warps)
    assert made.spilled <= STACK[capability]
    assert made.registers <= 128
    assert set(made.stores) == ({16} if group > 1000 else {2 * group // 32})
