"""Recurrent layers in Triton's interpreter beside torch's token by token, for the shapes of each family."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from interpreted import assert_close

from chairlift.kernels import recurrent_reference as reference
from chairlift.kernels.advance_heads import advance_heads
from chairlift.kernels.convolve import convolve
from chairlift.kernels.gated_norm import gated_norm
from chairlift.layers.recurrent import Convolution, DecodeStates, Heads, LayerState, Offsets, StateStep, plan_states, plan_writes

GENERATOR = torch.Generator().manual_seed(0)
SLOTS, CPU = 10, torch.device("cpu")
STARTS, CONTEXTS, OWN = np.array([0, 1, 6, 8, 18]), np.array([21, 5, 7, 10]), np.array([3, 0, 5, 2])
"""A decode, a whole prompt, a chunk, and a prompt longer than a program's tokens."""
SAVES = np.array([[3, 10, 8], [1, 5, 6], [1, 4, 1], [3, 1, 4], [2, 6, 7], [2, 7, 9]])
"""In no order: at the end of a chunk, inside of it, and after fewer tokens than a convolution sees."""


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=GENERATOR)


def step(starts: np.ndarray = STARTS, contexts: np.ndarray = CONTEXTS, own: np.ndarray = OWN, saves: np.ndarray = SAVES) -> StateStep:
    before = contexts - np.diff(starts)
    positions = np.concatenate([np.arange(first, end) for first, end in zip(before, contexts, strict=True)])
    on_device = tuple(torch.from_numpy(array.astype(np.int32)) for array in (starts, positions))
    return plan_states(on_device, (starts, contexts), own, saves, ())


def same(found: torch.Tensor, expected: torch.Tensor, states: torch.Tensor, expected_states: torch.Tensor) -> None:
    assert_close(found, expected)
    torch.testing.assert_close(states, expected_states, rtol=2e-6, atol=2e-6 * expected_states.abs().max().item())


def test_the_states_of_a_sequence_are_written_in_order_and_its_own_slot_last():
    writes, starts = plan_writes(STARTS, CONTEXTS, OWN, SAVES)
    assert writes.tolist() == [[1, 3], [4, 1], [5, 6], [5, 0], [1, 7], [2, 9], [2, 5], [1, 4], [10, 8], [10, 2]]
    assert starts.tolist() == [0, 1, 4, 7, 10]


def convolution(taps: int, channels: int, gated: bool) -> tuple[Convolution, int]:
    """A convolution, and the numbers of a row."""
    first = 2 * channels if gated else 16
    return Convolution(
        taps=random(taps, channels), bias=random(channels) if gated else None, first=first, gated=gated
    ), first + channels + 16


@pytest.mark.parametrize(
    ("taps", "channels", "gated", "dtype"), [(3, 144, True, torch.float32), (4, 32, False, torch.float16), (2, 16, False, torch.float32)]
)
def test_convolutions_are_those_of_torch_and_so_are_the_states(taps, channels, gated, dtype):
    layer, pitch = convolution(taps, channels, gated)
    rows, columns = random(18, pitch).to(dtype), random(SLOTS, taps - 1, channels)
    expected_columns = columns.clone()
    expected = reference.convolve(rows, expected_columns, layer, step())
    same(convolve(rows, columns, layer, step()), expected, columns, expected_columns)


def heads(delta: bool, tiled: bool = False, key_size: int = 16, value_size: int = 32) -> tuple[Heads, int, int]:
    """Four heads with two keys, and the numbers of a row of the convolution and of the projection."""
    keys, width = 2 * key_size, 4 * value_size
    if delta:
        offsets = Offsets(
            queries=0, keys=keys, values=2 * keys, gates=2 * keys + width, betas=2 * keys + 2 * width, steps=2 * keys + 2 * width + 4
        )
    else:
        offsets = Offsets(queries=width + keys, keys=width, values=0, gates=0, steps=2 * width + 2 * keys, betas=0)
    made = Heads(
        count=4,
        groups=2,
        key_size=key_size,
        value_size=value_size,
        tiled=tiled,
        rates=-random(4).exp(),
        step_bias=random(4),
        skip=None if delta else random(4),
        limits=(0.0, math.inf) if delta else (0.01, 2.0),
        norm=random(value_size if delta else width),
        norm_group=value_size if delta else width // 2,
        eps=1e-5,
        offsets=offsets,
    )
    return made, 2 * keys + width, 2 * keys + 2 * width + 8


@pytest.mark.parametrize(
    ("delta", "tiled", "sizes", "dtype"), [(True, True, (128, 48), torch.float32), (False, False, (48, 16), torch.float16)]
)
def test_heads_are_those_of_torch_and_so_are_their_states(delta, tiled, sizes, dtype):
    made, channels, pitch = heads(delta, tiled, *sizes)
    mixed, rows, matrices = random(18, channels).to(dtype), random(18, pitch).to(dtype), random(SLOTS, 4, *sizes)
    # Inputs of softplus beyond both of its ends.
    rows[:3, made.offsets.steps] = torch.tensor([-30.0, 25.0, 60.0])
    expected_matrices = matrices.clone()
    expected = reference.advance_heads(mixed, rows, expected_matrices, made, step())
    found = advance_heads(mixed, rows, matrices, made, step())
    same(found, expected, matrices, expected_matrices)
    assert_close(gated_norm(found, rows, made), reference.gated_norm(found, rows, made))


@pytest.mark.parametrize("delta", [True, False])
def test_chunks_company_and_saved_states_change_no_bit(delta):
    made, channels, pitch = heads(delta)
    layer = replace(convolution(4, channels, False)[0], first=0)
    rows = random(9, pitch)

    def compute(first: int, end: int, slot: int, state: LayerState, saves: list[list[int]] = []) -> torch.Tensor:  # noqa: B006
        chunk = step(np.array([0, end - first]), np.array([end]), np.array([slot]), np.array(saves, dtype=int).reshape(-1, 3))
        mixed = convolve(rows[first:end].contiguous(), state.columns, layer, chunk)
        return advance_heads(mixed, rows[first:end].contiguous(), state.matrices, made, chunk)

    state = LayerState(random(SLOTS, 3, channels), random(SLOTS, 4, 16, 32))
    whole = compute(0, 9, 0, state, [[0, 2, 3], [0, 6, 4]])
    for cuts in ([0, 1, 2, 9], [0, 6, 9]):
        assert torch.equal(torch.cat([compute(first, end, 1, state) for first, end in itertools.pairwise(cuts)]), whole)
        assert all(torch.equal(part[1], part[0]) for part in state)
    for slot, first in ((3, 2), (4, 6)):
        assert torch.equal(compute(first, 9, slot, state), whole[first:])


def test_decodes_of_a_graph_are_those_of_a_step_and_padding_changes_no_state():
    made, channels, pitch = heads(delta=True)
    layer = replace(convolution(4, channels, False)[0], first=0)
    rows, columns, matrices = random(4, pitch), random(SLOTS, 3, channels), random(SLOTS, 4, 16, 32)
    lengths, own, saves = (np.array([0, 1, 2]), np.array([5, 1])), np.array([2, 7]), np.array([[1, 1, 4]])
    plain = step(*lengths, own, saves)
    expected_columns, expected_matrices = columns.clone(), matrices.clone()
    mixed = convolve(rows[:2], expected_columns, layer, plain)
    expected = advance_heads(mixed, rows[:2], expected_matrices, made, plain)
    states = DecodeStates(4, SLOTS, CPU)
    # Of an earlier step with more sequences.
    states.fill((np.arange(5), np.full(4, 9)), np.arange(4), np.zeros((0, 3), dtype=int))
    states.fill(lengths, own, saves)
    # What is behind the sequences of a step is left from others.
    padded = states.step(torch.tensor([0, 1, 2, 77, 99], dtype=torch.int32), torch.tensor([4, 0, 0, 0], dtype=torch.int32), ())
    found = advance_heads(convolve(rows, columns, layer, padded), rows, matrices, made, padded)
    assert torch.equal(found[:2], expected)
    assert torch.equal(columns, expected_columns)
    assert torch.equal(matrices, expected_matrices)
