"""Checks every kernel against torch on a GPU, and then the engine against transformers; takes about four minutes.

Each kernel runs in bf16, fp16 and fp32 beside its reference in torch, on the same device, with memory poisoned by NaN, and then again and
again: all results must be equal bit for bit, or its programs race. Errors are relative to the largest number expected. bf16, which models
have, comes first: all its kernels, the sampler and the engine; then the other dtypes. Ends with 1 if anything is wrong.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

import common
import mixtures
import numpy as np
from ahead import Ahead
from correct_engine import engine
from results import NO

TOLERANCES = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 1.6e-2}
"""For one rounding at the end; attention, which rounds weights too, gets twice as much."""


class Checks:
    """Runs checks one after the other and writes each into a table as soon as it is known."""

    def __init__(self, run: common.Run, title: str) -> None:
        self.run, self.title, self.repeats = run, title, 0 if run.dry else 20

    def check(self, name: str, kernel: Callable[[], Any], reference: Callable[[], Any], tolerance: float, dtype: str = "") -> None:
        """Compares the tensors that both give, and the kernel's with those of its other runs."""
        row: dict[str, Any] = {"kernel": name, "dtype": dtype, "error": math.nan, "tolerance": tolerance, "same": ""}
        try:
            found, expected = _tensors(kernel()), _tensors(reference())
            row["error"] = max(_error(one, other) for one, other in zip(found, expected, strict=True))
            again = [_tensors(kernel()) for _ in range(self.repeats)]
            same = sum(all(_bits(one, other) for one, other in zip(found, more, strict=True)) for more in again)
            row["same"] = f"{same} of {self.repeats}"
            good = row["error"] <= tolerance and same == self.repeats
        except Exception as error:
            row["same"], good = f"{type(error).__name__}: {str(error).strip()[:160]}".replace("\n", " "), False
            if self.run.dry or common.device_is_lost():
                self.note(row, good)
                raise
        self.note(row, good)

    def both(self, name: str, way: Callable[[Any], Any], functions: tuple[Any, Any], tolerance: float, dtype: str) -> None:
        """Checks what `way` makes of a kernel beside what it makes of the kernel's reference."""
        kernel, reference = functions
        self.check(name, lambda: way(kernel), lambda: way(reference), tolerance, dtype)

    def note(self, row: dict[str, Any], good: bool) -> None:
        """Writes a check, and whether it is good."""
        self.run.row(self.title, row | {"good": "yes" if good else NO})


def _tensors(found: Any) -> list[Any]:
    return [part.clone() for part in (found if isinstance(found, tuple | list) else (found,))]


def _error(found: Any, expected: Any) -> float:
    """The largest difference, relative to the largest number; infinite where only one of both is NaN."""
    if not found.is_floating_point():
        return 0.0 if bool((found == expected).all()) else math.inf
    found, expected = found.double(), expected.double()
    if bool((found.isnan() != expected.isnan()).any()):
        return math.inf
    scale = expected.nan_to_num().abs().max().clamp(min=1e-30)
    return float((found - expected).nan_to_num().abs().max() / scale)


def _bits(one: Any, other: Any) -> bool:
    import torch

    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


class Sequences:
    """Sequences (queries, context) over a cache of shuffled blocks, of which the rest is NaN; the first of its two layers is used.

    A context of 0 is padding.
    """

    def __init__(self, run: common.Run, lengths: Sequence[tuple[int, int]], heads: int, kv_heads: int, dims: tuple[int, int], **more: Any):
        import torch

        from chairlift.kernels.write_kv_reference import write_kv_reference
        from chairlift.models.shape import KvSpec
        from chairlift.runner.memory.kv_cache import KvCache

        self.lengths, self.device = lengths, torch.device(run.device)
        dtype, kv, size = more["dtype"], more.get("kv", more["dtype"]), more.get("block_size", 16)
        self.scales = more.get("scales")
        widths = [-(-context // size) for _, context in lengths]
        spec = KvSpec(kv_heads, *dims, None)
        cache = KvCache([spec, spec], sum(widths) + 2, size, kv, self.device)
        cache.tensor.view(torch.uint8).fill_(0xFF)  # NaN in each of the forms
        self.keys, self.values = cache.layers[0]
        blocks = np.random.default_rng(0).permutation(np.arange(1, sum(widths) + 1))
        self.tables = np.zeros((len(lengths), max(1, *widths)), dtype=np.int32)
        random, slots = torch.Generator(self.device).manual_seed(0), []
        for i, (queries, context) in enumerate(lengths):
            used, blocks = np.split(blocks, [widths[i]])
            self.tables[i, : len(used)] = used
            places = (used.repeat(size)[:context] * size + np.arange(context) % size).astype(np.int32)
            k, v = (torch.randn(context, kv_heads, dim, generator=random, device=self.device) for dim in dims)
            write_kv_reference(k, v, self.keys, self.values, torch.from_numpy(places).to(self.device), self.scales)
            slots += places[-queries:].tolist() if context else [-1] * queries
        self.slots = np.array(slots, dtype=np.int32)
        self.query = torch.randn(len(slots), heads, dims[0], generator=random, device=self.device).to(dtype)

    def plan(self, window: int | None = None) -> Any:
        """The step as the kernels read it."""
        from chairlift.layers.device_attention import DevicePlan

        starts = np.cumsum([0] + [queries for queries, _ in self.lengths], dtype=np.int32)
        lens = np.array([context for _, context in self.lengths], dtype=np.int32)
        return DevicePlan.send(self.slots, starts, lens, self.tables, windows=[window], device=self.device)

    def attend(self, plan: Any, **options: Any) -> Any:
        """What the kernels make of it, without padding."""
        from chairlift.layers.attention import paged_attention

        out = paged_attention(self.query, self.keys, self.values, plan, scales=self.scales, **options)
        return out[np.flatnonzero(self.slots >= 0)]

    def dense(self, *, window: int | None = None, softcap: float | None = None, sinks: Any = None, scale: float | None = None) -> Any:
        """The same written out in fp64."""
        import torch

        scale, outputs, start = scale or self.query.shape[-1] ** -0.5, [], 0
        for i, (queries, context) in enumerate(self.lengths):
            q, start = self.query[start : start + queries].double(), start + queries
            if not context:
                continue
            at = torch.from_numpy(self.tables[i].astype(np.int64)).to(self.device)
            group = q.shape[1] // self.keys.shape[1]
            seen = []
            for cache, factor in zip((self.keys, self.values), self.scales or (None, None), strict=True):
                part = cache[at].transpose(0, 1).flatten(1, 2)[:, :context].double()
                seen.append((part if factor is None else part * factor.double()[:, None, None]).repeat_interleave(group, 0))
            scores = torch.einsum("qhd,hkd->hqk", q, seen[0]) * scale
            if softcap:
                scores = softcap * (scores / softcap).tanh()
            key, position = torch.arange(context, device=self.device), torch.arange(context - queries, context, device=self.device)
            hidden = key[None] > position[:, None]
            if window:
                hidden |= key[None] <= position[:, None] - window
            scores = scores.masked_fill(hidden, -math.inf)
            if sinks is not None:
                scores = torch.cat((scores, sinks.double()[:, None, None].expand(-1, queries, 1)), 2)
            outputs.append(torch.einsum("hqk,hkd->qhd", scores.softmax(-1)[..., :context], seen[1]))
        return torch.cat(outputs)


SHAPES = ((8, 4, (128, 128), 16), (1, 7, (80, 80), 16), (2, 1, (64, 64), 32), (2, 8, (96, 64), 64), (2, 2, (256, 256), 16))
SHAPES += ((1, 32, (576, 512), 16),)
"""Heads for which attention is checked: KV heads, query heads of each, dimensions of keys and values, and the size of a block.

The last ones are as those of latents.
"""
KINDS: tuple[dict[str, Any], ...] = (
    {},
    {"window": 700, "sinks": True, "softcap": 5.0},
    {"window": 100},
    {"softcap": 2.0},
    {"sinks": True},
)


def _steps(run: common.Run) -> dict[str, list[tuple[int, int]]]:
    """Steps of (queries, context), by what they are."""
    drafts = [(1, 0), (1, 1), (1, 15), (1, 16), (1, 17), (1, 511), (1, 512), (1, 513), (2, 514), (4, 1040)]
    chunks = [(5, 5), (40, 40), (17, 130), (1, 33), (130, 300)]
    if run.dry:
        drafts, chunks = [(1, 0), (1, 17), (2, 514)], [(5, 5), (17, 130)]
    else:
        drafts += [(1, 8000), (1, 3001)] * 8
        chunks += [(2048, 2048), (512, 4100), (1, 5000)]
    return {"decode": [(1, context) for _, context in drafts], "decode, drafts": drafts, "prefill": chunks}


def attention(run: common.Run, checks: Checks, dtype: Any, shape: tuple[Any, ...], kinds: Sequence[dict[str, Any]]) -> None:
    """Decode and prefill through the plan that layers use, for one shape of heads."""
    import torch

    name = str(dtype).removeprefix("torch.")
    kv_heads, group, dims, size = shape
    for kind in kinds:
        for what, lengths in _steps(run).items():
            made = Sequences(run, lengths, kv_heads * group, kv_heads, dims, dtype=dtype, block_size=size)
            options = kind | ({"sinks": torch.linspace(-3, 4, kv_heads * group, device=run.device)} if "sinks" in kind else {})
            plan = made.plan(options.get("window"))
            checks.check(
                f"{what} {kv_heads}x{group} heads, {dims[0]}/{dims[1]}, blocks of {size} {' '.join(kind)}".strip(),
                lambda m=made, p=plan, o=options: m.attend(p, **o),
                lambda m=made, o=options: m.dense(**o),
                2 * TOLERANCES[name],
                name,
            )


def fp8_attention(run: common.Run, checks: Checks, dtype: Any) -> None:
    """Decode and prefill over a cache of fp8."""
    import torch

    name = str(dtype).removeprefix("torch.")
    for what, lengths in _steps(run).items():
        scales = tuple(torch.rand(8, device=run.device) * 0.1 + 0.01 for _ in range(2))
        made = Sequences(run, lengths, 32, 8, (128, 128), dtype=dtype, kv=torch.float8_e4m3fn, scales=scales)
        plan = made.plan()
        checks.check(f"{what}, cache of fp8", lambda m=made, p=plan: m.attend(p), lambda m=made: m.dense(), 2 * TOLERANCES[name], name)


def combine(run: common.Run, checks: Checks) -> None:
    """Partial results of which one is none, with and without a sink."""
    import torch

    from chairlift.kernels.paged_combine import paged_combine, paged_combine_reference

    parts = torch.randn(40, 8, 128, device=run.device)
    lses = torch.randn(40, 8, device=run.device) * 3
    lses[2] = -math.inf
    work = torch.tensor([[1, 2, 40, 2], [0, 0, 0, 0], [1, 0, 2, 20], [0, 1, 2, 20]], dtype=torch.int32, device=run.device)
    for sinks in (None, torch.linspace(-2, 5, 8, device=run.device)):

        def kernel(sinks: Any = sinks) -> Any:
            out = torch.full((2, 8, 128), math.nan, device=run.device)
            paged_combine(out, parts, lses, work=work, merges=2, sinks=sinks)
            return out

        def reference(sinks: Any = sinks) -> Any:
            return torch.stack([paged_combine_reference(parts[first::2], lses[first::2], sinks) for first in (1, 0)])

        checks.check("combine" + (", sinks" if sinks is not None else ""), kernel, reference, TOLERANCES["float32"], "float32")


def _rounded_layers(run: common.Run, checks: Checks, dtype: Any, x: Any, weight: Any) -> None:
    """Kernels that round what they write to fp8, beside two kernels. A number may be off by one step, of 32 at most."""
    import torch

    from chairlift.kernels import act_mul, rms_norm
    from chairlift.kernels.quantise_rows import quantise_rows
    from chairlift.layers.linear import MIN_ABSMAX

    if not run.dry and torch.cuda.get_device_capability() < (8, 9):
        return
    name = str(dtype).removeprefix("torch.")
    ways: dict[str, Callable[..., Any]] = {
        "rms_norm": lambda **rounding: rms_norm.rms_norm(x, weight, 1e-5, **rounding),
        "add_rms_norm": lambda **rounding: rms_norm.add_rms_norm(x, x.clone(), weight, 1e-5, **rounding),
        "act_mul": lambda **rounding: act_mul.act_mul(x, "silu", **rounding),
    }
    for what, way in ways.items():
        checks.check(
            f"{what} in fp8",
            lambda way=way: way(least=MIN_ABSMAX),
            lambda way=way: quantise_rows(way(), MIN_ABSMAX),
            32 / 448,
            name,
        )


def layers(run: common.Run, checks: Checks, dtype: Any) -> None:
    """All that is not attention nor sampling, in one dtype."""
    import torch

    from chairlift.kernels import act_mul, copy_blocks, resolve, resolve_reference, rms_norm, rope_write, write_kv, write_kv_reference

    rows = 3 if run.dry else 257
    random = torch.Generator(run.device).manual_seed(0)

    def normal(*shape: int) -> Any:
        return torch.randn(*shape, generator=random, device=run.device)

    name = str(dtype).removeprefix("torch.")
    tolerance = TOLERANCES[name]
    for columns in (576,) if run.dry else (64, 576, 4096, 5000):
        x, residual, weight, inner = normal(rows, columns).to(dtype), normal(rows, columns).to(dtype), normal(columns), normal(columns)
        ways = rms_norm.rms_norm, rms_norm.rms_norm_reference
        checks.both(f"rms_norm {columns}", lambda f, x=x, w=weight: f(x, w, 1e-5), ways, tolerance, name)
        for more in ({}, {"inner": inner}):

            def added(function: Any, x: Any = x, residual: Any = residual, weight: Any = weight, more: Any = more) -> Any:
                kept = residual.clone()
                return function(x, kept, weight, 1e-5, **more), kept

            ways = rms_norm.add_rms_norm, rms_norm.add_rms_norm_reference
            checks.both(f"add_rms_norm {columns} {''.join(more)}".strip(), added, ways, tolerance, name)
        for activation in ("silu", "gelu_tanh"):
            gate_up = (normal(rows, 2 * columns) * 4).to(dtype)
            ways = act_mul.act_mul, act_mul.act_mul_reference
            checks.both(f"act_mul {activation} {columns}", lambda f, g=gate_up, a=activation: f(g, a), ways, tolerance, name)
    _rounded_layers(run, checks, dtype, normal(rows, 4096).to(dtype), normal(4096))
    forms = [dtype] if run.dry else [dtype, torch.float8_e4m3fn]
    for heads, kv_heads, dim, normed in ((4, 2, 16, True),) if run.dry else ((32, 8, 128, False), (7, 7, 80, True), (9, 3, 256, True)):
        for kv in forms:
            slots = torch.randperm(rows + 15, generator=random, device=run.device)[:rows].int()
            slots[1] = -1
            wide, angles = normal(rows, heads + 2 * kv_heads, dim).to(dtype), normal(rows, dim // 2) * 9
            norms = (normal(dim), normal(dim)) if normed else None
            eight = kv == torch.float8_e4m3fn
            scales = (torch.rand(2, kv_heads, device=run.device) + 0.1).unbind(0) if eight else None

            def cache(kv_heads: int = kv_heads, dim: int = dim, kv: Any = kv) -> Any:
                memory = torch.empty(-(-(rows + 15) // 16), 2, kv_heads, 16, dim, dtype=kv, device=run.device)
                memory.view(torch.uint8).fill_(0xFF)
                return memory, memory[:, 0], memory[:, 1]

            def turned(f: Any, wide: Any = wide, a: Any = angles, s: Any = slots, n: Any = norms, sc: Any = scales, c: Any = cache) -> Any:
                memory, keys, values = c()
                query = f(wide.clone(), a.cos(), a.sin(), keys, values, s, norms=n, eps=1e-5, scales=sc)
                return query, memory

            def written(f: Any, wide: Any = wide, h: int = kv_heads, s: Any = slots, sc: Any = scales, c: Any = cache) -> Any:
                memory, keys, values = c()
                f(wide[:, :h], wide[:, -h:], keys, values, s, sc)
                return memory

            # A number that lies between two of 8 bits may go to either when the two compute it differently: 2 ** -3 apart.
            allowed = 0.13 if eight else tolerance
            form = f"{heads}+2x{kv_heads} heads, {dim}{', cache of fp8' if eight else ''}"
            checks.both(f"rope_write {form}", turned, (rope_write.rope_write, rope_write.rope_write_reference), allowed, name)
            checks.both(f"write_kv {form}", written, (write_kv.write_kv, write_kv_reference.write_kv_reference), allowed, name)
    pairs = torch.tensor([[4, 1], [1, 2], [2, 3], [5, 4]], dtype=torch.int32, device=run.device)
    blocks = normal(7, 3000).to(dtype)

    def copied(function: Any, blocks: Any = blocks, pairs: Any = pairs) -> Any:
        kept = blocks.clone()
        function(kept, pairs)
        return kept

    checks.both("copy_blocks, chained", copied, (copy_blocks.copy_blocks, copy_blocks.copy_blocks_reference), 0.0, name)
    last = torch.tensor([40, 41, 2**31 - 1, -1, 44], dtype=torch.int32, device=run.device)
    ids = torch.arange(1500, dtype=torch.int32, device=run.device)
    ids[:4] = torch.tensor([-5, -3, -1, -4])
    checks.both("resolve", lambda f: f(ids, last), (resolve.resolve, resolve_reference.resolve_reference), 0.0, "int32")


def sampling(run: common.Run, checks: Checks) -> None:
    """Draws under all settings at once, and lines of log-probabilities.

    Noise is made with the device's own logarithm, so one draw in many thousands may differ from torch's: see `agree`.
    """
    import torch

    from chairlift.kernels.sampling import logprobs, reference, sample, threshold
    from chairlift.kernels.sampling.settings import Settings

    count, vocabulary = (4, 150) if run.dry else (256, 128_256)
    random = np.random.default_rng(0)
    logits = torch.randn(count, vocabulary, generator=torch.Generator(run.device).manual_seed(0), device=run.device) * 3
    logits[1::6] = logits[1::6].round()
    logits[2::6, ::3] = -math.inf
    logits[3::6] = -2.5

    def column(values: Any, kind: Any = np.float32) -> Any:
        return torch.from_numpy(np.broadcast_to(np.asarray(values, dtype=kind), (count,)).copy()).to(run.device)

    slots = np.where(np.arange(count) % 5 == 0, np.arange(count) // 5, -1)
    settings = Settings(
        temperature=column(random.choice([0.0, 0.7, 1.0, 2.0], count)),
        top_k=column(random.choice([0, 1, 50, 1000], count), np.int32),
        top_p=column(random.choice([1.0, 0.9, 0.5], count)),
        min_p=column(random.choice([0.0, 0.05], count)),
        seed=column(random.integers(-(2**63), 2**63 - 1, count), np.int64),
        repetition=column(1.2),
        presence=column(0.5),
        frequency=column(0.25),
        slot=column(slots, np.int32),
    )
    rows, positions = column(random.permutation(count), np.int32), column(random.integers(0, 9999, count), np.int32)
    said = torch.randint(0, 7, (count // 5 + 1, vocabulary), device=run.device, dtype=torch.int32)
    said *= torch.rand(said.shape, device=run.device) < 0.01
    ways = settings[:4]

    def allowed(least: Any) -> Any:
        # The device's exponential is not torch's: where a thousand tokens are left, one more or less is no error.
        return (reference.ordered(logits) >= least.unsqueeze(1)).sum(1).double().log()

    checks.check(
        "sampling thresholds, tokens left",
        lambda: allowed(threshold.thresholds(logits, rows, settings)),
        lambda: allowed(reference.thresholds(logits, *(values[rows.long()] for values in ways))),
        2e-3,
        "float32",
    )
    for truncated, penalised in ((False, False), (True, False), (True, True)):
        drawn: dict[Any, Any] = {}

        def draw(function: Any, drawn: Any = drawn, truncated: bool = truncated, penalised: bool = penalised) -> Any:
            last = torch.zeros(count, dtype=torch.int32, device=run.device)
            tokens = function(logits.clone(), rows, positions, settings, last, said.clone() if penalised else None, truncated=truncated)
            drawn[function] = tokens
            return tokens, last

        name = f"sample{', truncated' * truncated}{', penalised' * penalised}"
        checks.check(name, lambda d=draw: d(sample.sample), lambda d=draw: d(sample.sample), 0.0, "float32")
        draw(reference.sample)
        same = int((drawn[sample.sample] == drawn[reference.sample]).sum())
        row = {"kernel": f"{name}: tokens as torch's", "dtype": "float32", "error": 1 - same / count, "tolerance": 0.01, "same": ""}
        checks.note(row, same >= 0.99 * count)
    places, tokens = torch.arange(0, count, 2, device=run.device), column(random.integers(0, vocabulary, count), np.int32)
    for count_likeliest in (0, 5):
        numbers = [1, *range(3 + count_likeliest, 3 + 2 * count_likeliest)]

        def lines(function: Any, most: int = count_likeliest, numbers: Any = numbers) -> Any:
            found = function(logits, places, tokens, most)
            scores = found[:, numbers].contiguous().view(torch.float32)
            kept = [i for i in range(found.shape[1]) if i not in numbers]
            return scores.clamp(min=-100), found[:, kept]

        checks.both(f"score, {count_likeliest} likeliest", lines, (logprobs.score, reference.score), 1e-5, "float32")


def main() -> int:
    """Runs all checks; 1 if something is wrong."""
    run = common.begin("correct", __doc__ or "", 8)
    import torch

    def attention_part(dtype: Any, shape: tuple[Any, ...]) -> str:
        return f"attention-{str(dtype).removeprefix('torch.')}-{shape[0]}x{shape[1]}x{shape[2][0]}"

    def attend(dtype: Any, shape: tuple[Any, ...], kinds: Sequence[dict[str, Any]] = KINDS[:1]) -> None:
        run.part(attention_part(dtype, shape), lambda: attention(run, Checks(run, "Attention"), dtype, shape, kinds), most=90)

    def all_layers(dtype: Any) -> None:
        name = f"layers-{str(dtype).removeprefix('torch.')}"
        run.part(name, lambda: layers(run, Checks(run, "Layers"), dtype), most=60)

    # The interpreter computes nonsense in bf16.
    first, *others = (torch.float32,) if run.dry else (torch.bfloat16, torch.float16, torch.float32)
    ahead = Ahead(run, __file__, (*(attention_part(first, shape) for shape in SHAPES), "sampling", "engine"))
    all_layers(first)
    attend(first, SHAPES[2 if run.dry else 0], KINDS[1:2] if run.dry else KINDS)
    run.part("sampling", lambda: sampling(run, Checks(run, "Sampling")), most=60)
    sixteen = torch.float16 if run.dry else first
    run.part("experts", lambda: mixtures.check(run, Checks(run, "Experts"), sixteen), most=60)
    run.part("engine", lambda: engine(run, Checks(run, "The engine")), needs=30, most=150)
    run.part("combine", lambda: combine(run, Checks(run, "Combine")))
    if not run.dry:
        for shape in SHAPES[1:]:
            attend(first, shape)
        if torch.cuda.get_device_capability() >= (8, 9):
            run.part("attention-fp8", lambda: fp8_attention(run, Checks(run, "Attention"), first), most=60)
    for dtype in others:
        all_layers(dtype)
        for shape in SHAPES[:2]:
            attend(dtype, shape)
    ahead.end()
    return run.finish()


if __name__ == "__main__":
    sys.exit(main())
