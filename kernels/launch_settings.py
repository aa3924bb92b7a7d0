"""Launch settings of the attention kernels: tile sizes, warps and pipeline stages, for a device and the shapes of a model's heads.

BLOCK_M query rows and BLOCK_N keys are multiplied at a time, with FlashAttention's names. A tile that needs more shared memory than the
device has does not launch, and one that needs more registers than a thread has is slow. `make compile-gate` compiles the settings of all
shapes and devices and checks both.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from triton import __version__, next_power_of_2

from chairlift.kernels.errors import HeadsTooLarge

HOPPER = 9
"""Major compute capability of the devices whose products are wgmma."""
SHARED_OPERANDS = (HOPPER, 10)
"""Major compute capabilities of the devices whose products in 16 bits (wgmma, tcgen05) read the tile they multiply from shared memory."""
MIN_KEYS = 16
"""Smallest BLOCK_N: the inner side that `tl.dot` needs."""
MAX_QUERIES = 16384
"""Numbers of a tile's queries beyond which the query heads of a single KV head are in several tiles."""
SLACK = 1024
"""Bytes of shared memory for the reductions of a softmax."""
OLDER_TRITON = 2048
"""Bytes that Triton 3.4 takes besides where products are tcgen05."""
SPILLS_MORE = tuple(map(int, __version__.split(".")[:2])) < (3, 6)
"""Whether this Triton needs more registers than later ones for prompts with wide heads."""


class DeviceLimits(NamedTuple):
    """The properties of a device on which launch settings depend."""

    capability: tuple[int, int]
    shared_memory: int
    """Bytes that one program may use."""
    multiprocessors: int


class HeadShape(NamedTuple):
    """The shape of a layer's attention: query heads in a group, dimensions of keys and values, bytes of a query and of a cached number."""

    group: int
    head_dim: int
    value_dim: int
    query_bytes: int
    cache_bytes: int


class LaunchSettings(NamedTuple):
    """Keyword arguments of a launch."""

    BLOCK_M: int
    BLOCK_N: int
    num_warps: int
    num_stages: int


INTERPRETER = DeviceLimits((9, 0), 232448, 1)
"""The limits of Triton's interpreter: an H100's, with one program at a time."""


@functools.cache
def device_limits(device: torch.device) -> DeviceLimits:
    """The limits of a CUDA device; INTERPRETER for a CPU."""
    if device.type != "cuda":
        return INTERPRETER
    found = torch.cuda.get_device_properties(device)
    return DeviceLimits((found.major, found.minor), found.shared_memory_per_block_optin, found.multi_processor_count)


def head_shape(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, tokens: int = 1) -> HeadShape:
    """The shape of query [T, heads, D] and of a cache (see `paged_decode`), for tiles of at least `tokens` tokens.

    The query heads of a KV head are a group. Those of a single KV head are several ones if a tile cannot hold them.
    """
    heads, dim = query.shape[1], keys.shape[-1]
    group = heads // keys.shape[1] if keys.shape[1] > 1 else _group(heads, dim, tokens)
    return HeadShape(group, dim, values.shape[-1], query.element_size(), keys.element_size())


@functools.cache
def _group(heads: int, dim: int, tokens: int) -> int:
    most = max(MAX_QUERIES // (_padded(dim) * tokens), 1)
    return max(size for size in range(1, min(heads, most) + 1) if heads % size == 0)


@functools.cache
def decode_settings(shape: HeadShape, tokens: int, limits: DeviceLimits) -> LaunchSettings:
    """Settings of `paged_decode` for chunks of up to `tokens` tokens. All heads of a group and all tokens of a chunk are in one tile.

    Raises HeadsTooLarge if the device has too little shared memory.
    """
    rows = max(16, _padded(shape.group * tokens))
    # Threads multiply fp32 inputs, and need registers for their operands.
    tile = 8192 if shape.query_bytes == 4 else 16384
    keys = min(max(tile // (_padded(shape.head_dim) * shape.cache_bytes), MIN_KEYS), 64)
    # As many warps as hold the output in half of their registers.
    warps = 4 if rows * shape.value_dim <= 8192 else 8
    return _fitted(shape, LaunchSettings(rows, keys, warps, 3), rows, limits)


@functools.cache
def prefill_settings(shape: HeadShape, limits: DeviceLimits) -> LaunchSettings:
    """Settings of `paged_prefill`. All heads of a group are in one tile. Raises HeadsTooLarge too."""
    widest, out = _padded(max(shape.head_dim, shape.value_dim)), _padded(shape.value_dim)
    if shape.query_bytes == 4:
        # Tensor cores would round fp32 inputs to tf32, so threads multiply, and need registers for their operands.
        rows, keys, stages = max(4096 // widest, 16), 32 if widest <= 128 else MIN_KEYS, 2
        rows = min(rows, 64)
    elif limits.capability[0] == HOPPER:
        # wgmma multiplies at least 64 rows.
        rows, keys = 128 if out <= 256 else 64, min(max(8192 // widest, MIN_KEYS), 64)
        stages = 3 if out <= 256 else 2
    else:
        # Operands of mma.sync are in registers, beside the output.
        rows = 128 if out <= 128 else 64
        keys = min(max((8192 if rows == 64 else 4096) // out, MIN_KEYS), 64)
        if rows == 64 and shape.cache_bytes < shape.query_bytes:
            keys = MIN_KEYS  # the converted keys and values take registers too
        stages = 3
    if widest > 512:
        rows = min(rows, 32)  # more queries of latents, beside the output, do not fit into registers
    if SPILLS_MORE and _spills(shape, limits):
        rows //= 2
    least = int(max(_padded(shape.group), 16))
    return _fitted(shape, LaunchSettings(max(rows, least), keys, 8, stages), least, limits)


def _spills(shape: HeadShape, limits: DeviceLimits) -> bool:
    """Whether older versions of Triton spill registers for prompts in 16 bits, with as many rows as later ones."""
    converted = shape.cache_bytes < shape.query_bytes
    if shape.query_bytes == 4:
        return False
    if shape.head_dim > 512:
        return converted
    return shape.value_dim > (128 if converted else 256) and limits.capability[0] not in SHARED_OPERANDS


def chunk_tokens(shape: HeadShape, limits: DeviceLimits) -> int:
    """Tokens of a tile of `paged_prefill`, for the core's `prefill_work`."""
    return prefill_settings(shape, limits).BLOCK_M // shape.group


def shared_memory(shape: HeadShape, settings: LaunchSettings, capability: tuple[int, int]) -> int:
    """The most bytes of shared memory that Triton takes for a program with these settings."""
    width = _padded(shape.head_dim) + _padded(shape.value_dim)
    shared = capability[0] in SHARED_OPERANDS and shape.query_bytes < 4
    # The tile that is multiplied is in shared memory too, converted if need be. Elsewhere it is in registers.
    buffers = settings.num_stages if shared else max(settings.num_stages - 1, 1)
    query = settings.BLOCK_M * _padded(shape.head_dim) * shape.query_bytes
    probabilities = settings.BLOCK_M * settings.BLOCK_N * shape.query_bytes
    converted = settings.BLOCK_N * width * shape.query_bytes if shared and shape.cache_bytes < shape.query_bytes else 0
    slack = SLACK + OLDER_TRITON if capability[0] == 10 else SLACK
    return query + probabilities + buffers * settings.BLOCK_N * width * shape.cache_bytes + converted + slack


def _fitted(shape: HeadShape, wanted: LaunchSettings, least_rows: int, limits: DeviceLimits) -> LaunchSettings:
    """The wanted settings, or smaller ones that fit into the device's shared memory."""
    rows, keys, warps, stages = wanted
    while (needed := shared_memory(shape, LaunchSettings(rows, keys, warps, stages), limits.capability)) > limits.shared_memory:
        if stages > 2:
            stages -= 1
        elif keys > MIN_KEYS:
            keys //= 2
        elif rows > least_rows:
            rows //= 2
        elif stages > 1:
            stages -= 1
        else:
            raise HeadsTooLarge(
                f"attention with {shape.head_dim} dimensions a head in {8 * shape.query_bytes} bits needs {needed >> 10} KiB of shared "
                f"memory, and this device has {limits.shared_memory >> 10}"
            )
    return LaunchSettings(rows, keys, warps, stages)


def _padded(size: int) -> int:
    return int(next_power_of_2(size))
