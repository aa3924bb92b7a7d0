"""Compares each GPU kernel with its reference in torch on small inputs, for `chairlift doctor`."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from chairlift.kernels import recurrent_reference
from chairlift.layers import linear
from chairlift.layers.attention import paged_attention, plan_attention
from chairlift.layers.device_attention import DevicePlan
from chairlift.layers.experts import Rows
from chairlift.layers.recurrent import Convolution, Heads, Offsets, plan_states
from chairlift.runner.memory.precision import FP8_CAPABILITY

TOLERANCE = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 4e-2}
"""Largest error relative to the largest number."""
HEAD_SIZES = (64, 128, 256)
BLOCK_SIZE = 16
CHUNKS = ((1, 1), (1, 40), (1, 900), (3, 90), (50, 50), (33, 130))
"""New tokens and context of the sequences for which attention is checked: decodes, one of them split, a short chunk and prefills."""


class KernelCheck(NamedTuple):
    """The result of one check."""

    name: str
    ok: bool
    says: str


def check_kernels(device: torch.device, dtype: torch.dtype, seconds: float) -> Iterator[KernelCheck]:
    """Runs the kernels one after another on a device. Checks that would begin after `seconds` are skipped and reported as such."""
    began = time.monotonic()
    for name, compare in _checks(device, dtype):
        if time.monotonic() - began > seconds:
            yield KernelCheck(name, True, f"not checked: {seconds:.0f} s are over; compiled kernels are kept, so run this again")
            continue
        try:
            error = compare()
        # A report must go on whatever a driver or a compiler raises.
        except Exception as problem:
            yield KernelCheck(name, False, f"does not run: {type(problem).__name__}: {str(problem).strip().splitlines()[-1]:.300}")
            continue
        bound = TOLERANCE[dtype]
        # Written so that NaN fails.
        ok = error <= bound
        yield KernelCheck(name, ok, f"{'ok' if ok else 'wrong'}: relative error {error:.1e} ({bound:.0e} allowed)")


def _checks(device: torch.device, dtype: torch.dtype) -> Iterator[tuple[str, Callable[[], float]]]:
    from chairlift.kernels import act_mul, rms_norm

    random = torch.Generator().manual_seed(0)

    def draw(*shape: int, kind: torch.dtype = dtype) -> torch.Tensor:
        return torch.randn(*shape, generator=random).to(device, kind)

    # Triton has no fp8 for older devices; its interpreter has.
    has_fp8 = device.type != "cuda" or torch.cuda.get_device_capability(device) >= FP8_CAPABILITY
    for size in HEAD_SIZES:
        yield f"paged attention, head size {size}", partial(_attention, draw, size, device)
    if has_fp8:
        yield f"paged attention, head size {HEAD_SIZES[0]}, fp8 KV", partial(_attention, draw, HEAD_SIZES[0], device, fp8=True)
    x, residual, weight = draw(5, 1536), draw(5, 1536), draw(1536)
    yield "rms_norm", lambda: _error(rms_norm.rms_norm(x, weight, 1e-6), rms_norm.rms_norm_reference(x, weight, 1e-6))

    def summed() -> float:
        sums = residual.clone(), residual.clone()
        found, expected = rms_norm.add_rms_norm(x, sums[0], weight, 1e-6), rms_norm.add_rms_norm_reference(x, sums[1], weight, 1e-6)
        return max(_error(found, expected), _error(*sums))

    yield "add_rms_norm", summed

    def gated(activation: str) -> float:
        return _error(act_mul.act_mul(x, activation), act_mul.act_mul_reference(x, activation))

    for activation in ("silu", "gelu_tanh"):
        yield f"act_mul, {activation}", partial(gated, activation)
    if has_fp8:
        yield "rows rounded to fp8", partial(_rounded, draw, dtype)
        yield "linear, fp8 products", partial(_fp8_product, draw)

    for kind in ("int8", "fp8", "int4"):
        yield f"linear, {kind} weights", partial(_linear, draw, kind)
    for kind in ("16 bits", "fp8", "int4", "MXFP4"):
        yield f"experts, weights of {kind}", partial(_experts, draw, kind)
    for rule in ("gated delta rule", "state space"):
        yield f"recurrent layer, {rule}", partial(_recurrent, draw, device, delta=rule == "gated delta rule")
    yield "copy_blocks", partial(_copies, draw, device)
    yield "resolve", partial(_resolved, device)
    yield "write_kv", partial(_stored, draw, device, dtype)
    yield "rope_write", partial(_rope, draw, device, dtype)
    yield "sampling", partial(_sampling, draw, device)
    yield "sampling with penalties", partial(_sampling, draw, device, penalties=True)
    yield "log-probabilities", partial(_logprobs, draw, device)


Draw = Callable[..., torch.Tensor]


def _copies(draw: Draw, device: torch.device) -> float:
    from chairlift.kernels.copy_blocks import copy_blocks, copy_blocks_reference

    cache, pairs = draw(6, 512, kind=torch.float32), torch.tensor([[1, 2], [2, 3]], dtype=torch.int32, device=device)
    expected = cache.clone()
    copy_blocks(cache, pairs)
    copy_blocks_reference(expected, pairs)
    return _error(cache, expected)


def _resolved(device: torch.device) -> float:
    from chairlift.kernels.resolve import resolve
    from chairlift.kernels.resolve_reference import resolve_reference

    ids, last = torch.tensor([5, -1, -3], dtype=torch.int32, device=device), torch.tensor([7, 8, 9], dtype=torch.int32, device=device)
    return _error(resolve(ids, last), resolve_reference(ids, last))


def _stored(draw: Draw, device: torch.device, dtype: torch.dtype) -> float:
    from chairlift.kernels.write_kv import write_kv
    from chairlift.kernels.write_kv_reference import write_kv_reference

    k, v, slots = draw(3, 2, 64), draw(3, 2, 64), torch.tensor([17, -1, 33], dtype=torch.int32, device=device)
    found = [torch.zeros(4, 2, BLOCK_SIZE, 64, dtype=dtype, device=device) for _ in range(4)]
    write_kv(k, v, found[0], found[1], slots)
    write_kv_reference(k, v, found[2], found[3], slots)
    return max(_error(found[0], found[2]), _error(found[1], found[3]))


def _rope(draw: Draw, device: torch.device, dtype: torch.dtype) -> float:
    from chairlift.kernels.rope_write import rope_write, rope_write_reference

    qkv, angles = draw(3, 8, 128), draw(3, 64, kind=torch.float32)
    slots = torch.tensor([17, -1, 33], dtype=torch.int32, device=device)
    caches = [torch.zeros(4, 2, BLOCK_SIZE, 128, dtype=dtype, device=device) for _ in range(4)]
    expected = rope_write_reference(qkv.clone(), angles.cos(), angles.sin(), caches[2], caches[3], slots)
    found = rope_write(qkv, angles.cos(), angles.sin(), caches[0], caches[1], slots)
    return max(_error(found, expected), _error(caches[0], caches[2]), _error(caches[1], caches[3]))


def _recurrent(draw: Draw, device: torch.device, *, delta: bool) -> float:
    """A layer's outputs and states after a decode step and a prompt that is longer than a program's tokens."""
    from chairlift.kernels import advance_heads, convolve, gated_norm

    width, keys = 4 * 64, 2 * 64
    offsets = Offsets(
        queries=width + keys, keys=width, values=0, gates=width + 2 * keys, betas=2 * width + 2 * keys, steps=2 * width + 2 * keys + 4
    )

    def vector(size: int) -> torch.Tensor:
        return draw(size, kind=torch.float32)

    heads = Heads(
        count=4,
        groups=2,
        key_size=64,
        value_size=64,
        tiled=False,
        rates=-vector(4).exp(),
        step_bias=vector(4),
        skip=None if delta else vector(4),
        limits=(0.0, math.inf),
        norm=vector(64),
        norm_group=64,
        eps=1e-6,
        offsets=offsets,
    )
    convolution = Convolution(taps=draw(4, width + 2 * keys, kind=torch.float32), bias=None, first=0, gated=False)
    starts, contexts = np.array([0, 1, 20], dtype=np.int32), np.array([9, 19], dtype=np.int32)
    positions = np.concatenate(([8], np.arange(19, dtype=np.int32)))
    on_device = torch.from_numpy(starts).to(device), torch.from_numpy(positions.astype(np.int32)).to(device)
    step = plan_states(on_device, (starts, contexts), np.array([1, 0]), np.array([[1, 5, 2]]), ())
    rows, found = draw(20, 2 * width + 2 * keys + 8), []
    states = draw(3, 3, width + 2 * keys, kind=torch.float32), draw(3, 4, 64, 64, kind=torch.float32)
    for convolving, advancing, normalising in (
        (convolve.convolve, advance_heads.advance_heads, gated_norm.gated_norm),
        (recurrent_reference.convolve, recurrent_reference.advance_heads, recurrent_reference.gated_norm),
    ):
        columns, matrices = (state.clone() for state in states)
        mixed = convolving(rows, columns, convolution, step)
        found.append((normalising(advancing(mixed, rows, matrices, heads, step), rows, heads), columns, matrices))
    return max(map(_error, *found))


def _linear(draw: Draw, kind: str) -> float:
    """A product with a quantised weight, of which several programs sum parts, and the weight multiplied out."""
    from chairlift.kernels import dequantise, quantised_linear

    x, whole = draw(5, 512), draw(96, 512)
    weight = linear.quantise(whole, "int8" if kind == "int8" else "fp8")
    if kind == "int4":
        pairs = weight.numbers.view(torch.uint8)[:, ::2].contiguous()
        zero = (draw(96, 4) + 8).clamp(0, 15).to(torch.uint8)
        weight = linear.Quantised(pairs, draw(96, 4), zero, 128)
    expected = linear.dequantise(weight, torch.float32)
    arrived = quantised_linear.counters(weight.numbers)
    found = quantised_linear.quantised_linear(x, *weight.stored, None, arrived)
    return max(
        _error(found, x.float() @ expected.T), float(arrived.any()), _error(dequantise.dequantise(*weight.stored, 512, x.dtype), expected)
    )


def _experts(draw: Draw, kind: str) -> float:
    """Both products of experts, of numbers that no rounding to fp16 changes, and of the same numbers in torch on the host."""
    from chairlift.kernels.expert_linear import expert_linear
    from chairlift.kernels.sort_experts import sort_experts

    half = draw(1).dtype if draw(1).element_size() == 2 else torch.float16
    choices = draw(9, 4).topk(2).indices.contiguous()
    sorted_rows, host = sort_experts(choices, 4), Rows.sort(choices.cpu(), 4)
    weight = _expert_weights(draw, kind)
    numbers, scale, zero, group = weight.stored
    rows_of_all = linear.Quantised(numbers.flatten(0, 1), scale.flatten(0, 1), None if zero is None else zero.flatten(0, 1), group)
    whole = linear.dequantise(rows_of_all, torch.float32).cpu().view(4, 96, 64)
    stored = (whole.to(numbers.device, half), None, None, 0) if kind == "16 bits" else weight.stored
    errors = [float((sorted_rows[0].cpu() != host.order).any())]
    for spread, rows in ((True, 9), (False, 18)):
        x = draw(rows, 64).float().round().to(half)
        expected = host.linear(x.float().cpu(), whole, None, spread=spread)
        errors.append(_error(expert_linear(x, stored, None, sorted_rows, 2, spread=spread), expected))
    return max(errors)


def _expert_weights(draw: Draw, kind: str) -> linear.Quantised:
    """Weights [4, 96, 64] of four experts, with small integers or MXFP4's numbers, and powers of two as scales."""
    if kind in ("16 bits", "fp8"):
        return linear.Quantised(draw(4, 96, 64).float().round().to(torch.float8_e4m3fn), torch.exp2(draw(4, 96, 1).float().round()))
    pairs = draw(4, 96, 32).float().mul(60).int().remainder(256).to(torch.uint8)
    if kind == "MXFP4":
        return linear.Quantised(pairs, torch.full_like(pairs[..., :2], 127), None, 32)
    zero = (draw(4, 96, 2) + 8).clamp(0, 15).to(torch.uint8)
    return linear.Quantised(pairs, torch.exp2(draw(4, 96, 2).float().round().clamp(-2, 2)).half(), zero, 32)


def _rounded(draw: Draw, dtype: torch.dtype) -> float:
    """Rows rounded to fp8 beside themselves, and those that other kernels round beside rows rounded later."""
    from chairlift.kernels import act_mul, rms_norm
    from chairlift.kernels.quantise_rows import quantise_rows

    # Numbers that fp8 has, of which a row's largest is fp8's largest: no rounding changes them.
    exact = draw(5, 512, kind=torch.float32).mul(100).clamp(-448, 448).to(torch.float8_e4m3fn).to(dtype)
    exact[:, 0] = 448
    least, weight, small = linear.MIN_ABSMAX, draw(512), exact / 100
    numbers, scale = quantise_rows(exact, least)
    error = _error(numbers.float() * scale, exact)
    for found, expected in (
        (rms_norm.rms_norm(small, weight, 1e-6, least=least), rms_norm.rms_norm(small, weight, 1e-6)),
        (act_mul.act_mul(small, "silu", least=least), act_mul.act_mul(small, "silu")),
    ):
        later = quantise_rows(expected, least)
        moved = (found[0].view(torch.uint8) != later[0].view(torch.uint8)).float().mean()
        error = max(error, float(moved), _error(found[1], later[1]))
    return error


def _fp8_product(draw: Draw) -> float:
    """Products of weights and activations in fp8, of a few rows and, by torch, of more; and those of the same numbers in fp32."""
    from chairlift.kernels.fp8_linear import MAX_ROWS, fp8_linear

    layer, errors = linear.Linear(linear.quantise(draw(96, 512), "fp8"), rounds_activations=True), []
    assert isinstance(layer.weight, linear.Quantised)
    for rows in (17, MAX_ROWS + 16):
        x = linear.quantise(draw(rows, 512), "fp8")
        whole = linear.dequantise(x, torch.float32) @ linear.dequantise(layer.weight, torch.float32).T
        if rows <= MAX_ROWS:
            errors.append(_error(fp8_linear(x.numbers, x.scale, *layer.weight[:2], None, draw(1).dtype), whole))
        elif x.numbers.is_cuda:
            errors.append(_error(layer(linear.Rounded(x.numbers, x.scale, draw(1).dtype)), whole))
    return max(errors)


def _attention(draw: Draw, size: int, device: torch.device, fp8: bool = False) -> float:
    """Decodes and prefills beside torch's attention, in fp32 on the host."""
    heads, kv_heads = 8, 2
    counts, contexts = (np.array(column, dtype=np.int32) for column in zip(*CHUNKS, strict=True))
    starts = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
    width = -(-int(contexts.max()) // BLOCK_SIZE)
    tables = np.arange(1, len(CHUNKS) * width + 1, dtype=np.int32).reshape(len(CHUNKS), width)
    cache = draw(tables.size + 1, 2, kv_heads, BLOCK_SIZE, size)
    cache = cache.to(torch.float8_e4m3fn) if fp8 else cache
    scales = (torch.full((kv_heads,), 0.5, device=device), torch.full((kv_heads,), 2.0, device=device)) if fp8 else None
    keys, values, query = cache[:, 0], cache[:, 1], draw(int(starts[-1]), heads, size)
    slots = np.full(len(query), -1, dtype=np.int32)
    plan = DevicePlan.send(slots, starts, contexts, tables, windows=[None], device=device)
    found = paged_attention(query, keys, values, plan, scales=scales)
    host = torch.device("cpu")
    expected_plan = plan_attention(slots, starts, contexts, tables, windows=frozenset([None]), block_size=BLOCK_SIZE, device=host)
    wide, wide_values = keys.float().cpu() * (0.5 if fp8 else 1), values.float().cpu() * (2 if fp8 else 1)
    return _error(found, paged_attention(query.float().cpu(), wide, wide_values, expected_plan))


def _sampling(draw: Draw, device: torch.device, penalties: bool = False) -> float:
    from chairlift.kernels.sampling import reference
    from chairlift.kernels.sampling.sample import sample
    from chairlift.kernels.sampling.settings import Settings

    logits, count = draw(4, 5000, kind=torch.float32), 4
    floats = {"temperature": [0.0, 1.0, 0.7, 1.0], "top_p": [1.0, 0.9, 1.0, 1.0], "min_p": [0.0, 0.0, 0.0, 0.1]}
    numbers = {name: torch.tensor(values, device=device) for name, values in floats.items()}
    penalty = (
        {"repetition": 1.5, "presence": 2.0, "frequency": 0.5} if penalties else {"repetition": 1.0, "presence": 0.0, "frequency": 0.0}
    )
    numbers |= {name: torch.full((count,), value, device=device) for name, value in penalty.items()}
    integers = {"top_k": torch.tensor([0, 0, 50, 0], dtype=torch.int32, device=device)}
    slots = torch.tensor([1, -1, 0, 2] if penalties else [-1] * count, dtype=torch.int32, device=device)
    settings = Settings(**numbers, **integers, seed=torch.arange(count, device=device), slot=slots)
    # The tokens with the highest counts are the likeliest tokens.
    counts_before = (logits[:3] > 1).int() * 4 if penalties else None
    rows = torch.arange(count, dtype=torch.int32, device=device)
    last = torch.zeros(count, dtype=torch.int32, device=device)
    host, counts = Settings(*(column.cpu() for column in settings)), None if counts_before is None else counts_before.cpu().clone()
    changed, whole = logits.clone(), logits.cpu()
    expected = reference.sample(whole, rows.cpu(), rows.cpu(), host, last.cpu(), counts, truncated=True)
    found = sample(changed, rows, rows, settings, last, counts_before, truncated=True)
    wrong = counts is not None and counts_before is not None and not torch.equal(counts_before.cpu(), counts)
    return max(float(wrong or (found.cpu() != expected).any()), _error(changed, whole))


def _logprobs(draw: Draw, device: torch.device) -> float:
    from chairlift.kernels.sampling import reference
    from chairlift.kernels.sampling.logprobs import score

    logits, places, tokens = draw(3, 5000, kind=torch.float32), torch.arange(3, device=device), torch.tensor([0, 17, 4999], device=device)
    found, expected = score(logits, places, tokens, 4).cpu(), reference.score(logits.cpu(), places.cpu(), tokens.cpu(), 4)
    numbers = [1, *range(7, 11)]  # log-probabilities; the other columns are integers
    others = [column for column in range(11) if column not in numbers]
    wrong = float((found[:, others] != expected[:, others]).any())
    bits = [lines[:, numbers].contiguous().view(torch.float32) for lines in (found, expected)]
    return max(wrong, _error(*bits))


def _error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest error, relative to the largest number expected."""
    wide, right = found.detach().cpu().double(), expected.detach().cpu().double()
    return float((wide - right).abs().max() / right.abs().max().clamp(min=1e-12))
