"""Times every kernel on a GPU beside the device's ceilings and torch's own ways; takes about eight minutes.

The ceilings, a copy and a product of bf16 matrices, are measured first, in the same run. Calls are replayed as CUDA graphs over memory
that the L2 cache cannot hold; times are medians. Shapes are those of Llama-3.1-8B: 32 heads of 128, 8 KV heads, bf16. Peers of attention
get keys and values that lie in one piece (`sdpa`), which is an upper bound for a cache in blocks.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import common
import numpy as np

HEADS, KV_HEADS, DIM, HIDDEN, INNER, VOCABULARY = 32, 8, 128, 4096, 14336, 128_256
TOKEN_BYTES = 2 * KV_HEADS * DIM
"""Of a token's keys and values in one layer, times the bytes of a number."""
POOL_SHARE = 0.6
"""Share of the device's memory that a cache takes at most."""


class Pool:
    """A cache of a few layers, which calls go through in turn, as a model's do; its strides decide what is compiled."""

    def __init__(self, run: common.Run, tokens: int, layers: int, block_size: int, dtype: Any) -> None:
        import torch

        from chairlift.models.shape import KvSpec
        from chairlift.runner.memory.kv_cache import KvCache

        self.run, self.block_size = run, block_size
        spec = KvSpec(KV_HEADS, DIM, DIM, None)
        self.cache = KvCache([spec] * layers, tokens // block_size + 2, block_size, dtype, torch.device(run.device))
        # Zeros would be quicker to read for some memories; the bits of small numbers in each form are good for all.
        self.cache.tensor.view(torch.uint8).random_(0, 48)

    def plans(self, lengths: list[tuple[int, int]]) -> list[Any]:
        """Steps of (queries, context), enough for all layers together to be cold."""
        import torch

        from chairlift.layers.device_attention import DevicePlan

        queries, contexts = (np.array(part, dtype=np.int32) for part in zip(*lengths, strict=True))
        widths = -(-contexts // self.block_size)
        size = float(contexts.sum()) * TOKEN_BYTES * self.cache.tensor.element_size() * len(self.cache.layers)
        there = len(self.cache.tensor) - 1
        made = []
        for seed in range(min(common.copies(self.run, size), max(1, there // int(widths.sum())))):
            order = np.random.default_rng(seed).permutation(there) + 1
            tables = np.zeros((len(lengths), int(widths.max())), dtype=np.int32)
            for row, used, end in zip(tables, widths, widths.cumsum(), strict=True):
                row[:used] = order[end - used : end]
            starts = np.concatenate(([0], queries.cumsum())).astype(np.int32)
            slots = np.zeros(int(queries.sum()), dtype=np.int32)
            made.append(DevicePlan.send(slots, starts, contexts, tables, windows=[None], device=torch.device(self.run.device)))
        return made

    def calls(self, lengths: list[tuple[int, int]], query: Any) -> list[Callable[[], object]]:
        """Attention of all layers over all plans."""
        from chairlift.layers.attention import paged_attention

        scales = None
        if self.cache.tensor.element_size() == 1:
            scales = (query.new_ones(KV_HEADS).float(), query.new_ones(KV_HEADS).float())
        return [
            lambda plan=plan, layer=layer: paged_attention(query, *layer, plan, scales=scales)
            for plan in self.plans(lengths)
            for layer in self.cache.layers
        ]

    def in_one_piece(self, batch: int, context: int) -> list[tuple[Any, Any]]:
        """The pool's memory as contiguous keys and values [batch, kv_heads, context, D], as often as needed to be cold."""
        flat, size = self.cache.tensor.view(-1), batch * context * TOKEN_BYTES // 2
        count = min(common.copies(self.run, 2 * size * self.cache.tensor.element_size()), len(flat) // (2 * size))
        parts = flat[: count * 2 * size].view(count, 2, batch, KV_HEADS, context, DIM)
        return [(part[0], part[1]) for part in parts]


def decode(run: common.Run, copied: float) -> None:
    """Attention of one token a sequence: bytes of keys and values a second."""
    import torch

    grid = [(batch, context) for context in (512, 2048, 8192, 32768) for batch in (1, 8, 32, 64, 128, 256)]
    few = [(64, 2048), (64, 8192), (1, 32768)]
    grid, few = ([(2, 40)], [(2, 40)]) if run.dry else (grid, few)
    half = torch.float16 if run.dry else torch.bfloat16
    most = POOL_SHARE * run.memory
    forms = [("16", 16, half, grid), ("32", 32, half, few), ("64", 64, half, few), ("16, fp8", 16, torch.float8_e4m3fn, few)]
    for name, size, dtype, cases in forms[: 2 if run.dry else None]:
        for layers in (8, 2):
            # Longer ones do not fit as often as others, or not at all.
            fitting = [case for case in cases if (_bytes(case, 8, dtype) <= most) == (layers == 8) and _bytes(case, layers, dtype) <= most]
            if not fitting or not run.fits(f"decode, blocks of {name}, {layers} layers", 25):
                continue
            with run.tried(f"decode, blocks of {name}"):
                tokens = max(batch * (context + size) for batch, context in fitting)
                pool = Pool(run, max(tokens, 100 if run.dry else 60_000), layers, size, dtype)
                for batch, context in fitting:
                    query = torch.randn(batch, HEADS, DIM, device=run.device).to(half)
                    seconds = common.time_calls(run, pool.calls([(1, context)] * batch, query))
                    rate = batch * context * TOKEN_BYTES * dtype.itemsize / seconds
                    row = {
                        "block": name,
                        "batch": batch,
                        "context": context,
                        "us": seconds * 1e6,
                        "GB/s": rate / 1e9,
                        "of copy": rate / copied,
                    }
                    run.row("Decode attention", row)
                    if size == 16 and dtype == half:
                        theirs = _sdpa_decode(run, pool, query, batch, context)
                        row |= {"sdpa us": theirs * 1e6, "sdpa / ours": theirs / seconds}
                del pool
            common.free()


def many_layers(run: common.Run) -> None:
    """The same attention in caches of two and of 32 layers, where a layer's parts of neighbouring blocks lie far apart."""
    import torch

    batch, context = (2, 40) if run.dry else (32, 2048)
    half = torch.float16 if run.dry else torch.bfloat16
    query = torch.randn(batch, HEADS, DIM, device=run.device).to(half)
    for layers in (2, 4) if run.dry else (2, 32):
        pool = Pool(run, batch * (context + 64), layers, 16, half)
        seconds = common.time_calls(run, pool.calls([(1, context)] * batch, query))
        piece = pool.cache.tensor.stride(0) * half.itemsize
        row = {"layers": layers, "bytes of a block": piece, "batch": batch, "context": context, "us": seconds * 1e6}
        run.row("Decode attention by layers in a block", row)
        del pool
        common.free()


def _bytes(case: tuple[int, int], layers: int, dtype: Any) -> float:
    return float(case[0] * (case[1] + 64) * TOKEN_BYTES * dtype.itemsize * layers)


def _sdpa_decode(run: common.Run, pool: Pool, query: Any, batch: int, context: int) -> float:
    """torch over keys and values in one piece, the heads of a group as rows of one matrix: as good as it gets with SDPA."""
    from torch.nn.functional import scaled_dot_product_attention

    rows = query.view(batch, KV_HEADS, HEADS // KV_HEADS, DIM)
    calls = [lambda k=k, v=v: scaled_dot_product_attention(rows, k, v) for k, v in pool.in_one_piece(batch, context)]
    return common.time_calls(run, calls, repeats=7)


def other_decodes(run: common.Run) -> None:
    """Peers that take long to compile, or are not in every torch: varlen attention, and flex_attention over pages."""
    import torch

    if run.dry:
        return
    title = "Decode attention, other ways"
    for batch, context in ((64, 2048), (64, 8192)):
        pool = Pool(run, batch * (context + 128), 8, 16, torch.bfloat16)
        query = torch.randn(batch, HEADS, DIM, device="cuda").bfloat16()
        ours = common.time_calls(run, pool.calls([(1, context)] * batch, query))
        run.row(title, {"way": "chairlift, blocks of 16", "batch": batch, "context": context, "us": ours * 1e6})
        for name, make in (
            ("varlen_attn, in one piece", _varlen),
            ("varlen_attn, pages of 256", _varlen_paged),
            ("flex_attention, pages", _flex),
        ):
            if run.fits(f"{name}, {batch} x {context}", 30):
                with run.tried(f"{name}, {batch} x {context}", 60):
                    seconds = common.time_calls(run, make(pool, query, batch, context), repeats=7, graph="flex" not in name)
                    run.row(title, {"way": name, "batch": batch, "context": context, "us": seconds * 1e6, "time / ours": seconds / ours})
        del pool
        common.free()


def _varlen(pool: Pool, query: Any, batch: int, context: int) -> list[Callable[[], object]]:
    import torch
    from torch.nn.attention.varlen import varlen_attn

    starts, ends = (torch.arange(batch + 1, device="cuda", dtype=torch.int32) * step for step in (1, context))
    return [
        lambda k=k, v=v: varlen_attn(query, k.view(-1, KV_HEADS, DIM), v.view(-1, KV_HEADS, DIM), starts, ends, 1, context, enable_gqa=True)
        for k, v in pool.in_one_piece(batch, context)
    ]


def _varlen_paged(pool: Pool, query: Any, batch: int, context: int) -> list[Callable[[], object]]:
    import torch
    from torch.nn.attention.varlen import varlen_attn

    starts = torch.arange(batch + 1, device="cuda", dtype=torch.int32)
    used = torch.full((batch,), context, device="cuda", dtype=torch.int32)
    tables = torch.randperm(batch * context // 256, device="cuda").int().view(batch, -1)
    more = {"enable_gqa": True, "seqused_k": used, "block_table": tables}
    return [
        lambda k=k, v=v: varlen_attn(
            query, k.view(-1, 256, KV_HEADS, DIM), v.view(-1, 256, KV_HEADS, DIM), starts, None, 1, context, **more
        )
        for k, v in pool.in_one_piece(batch, context)
    ]


def _flex(pool: Pool, query: Any, batch: int, context: int) -> list[Callable[[], object]]:
    import torch
    from torch.nn.attention.experimental._paged_attention import PagedAttention
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    pages = PagedAttention(batch * context // 128, 128, batch)
    for row in range(batch):
        pages.reserve(torch.tensor(row, device="cuda"), torch.tensor(context, device="cuda"))
    mask = create_block_mask(lambda b, h, q, k: q + context - 1 >= k, batch, None, 1, context, device="cuda")
    paged = pages.convert_logical_block_mask(mask)
    compiled, rows = torch.compile(flex_attention), query.unsqueeze(2)
    return [
        lambda k=k, v=v: compiled(rows, k.reshape(1, KV_HEADS, -1, DIM), v.reshape(1, KV_HEADS, -1, DIM), block_mask=paged, enable_gqa=True)
        for k, v in pool.in_one_piece(batch, context)
    ]


def prefill(run: common.Run, computed: float) -> None:
    """Attention of whole prompts, and of chunks behind a context: FLOP a second of what a causal mask leaves."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    cases = [(length, length) for length in (512, 2048, 4096, 8192, 16384)] + [(512, 8192), (2048, 16384)]
    cases = [(20, 20)] if run.dry else cases
    half = torch.float16 if run.dry else torch.bfloat16
    pool = Pool(run, 40 if run.dry else 60_000, 2, 16, half)
    for queries, context in cases:
        query = torch.randn(queries, HEADS, DIM, device=run.device).to(half)
        work = 4 * HEADS * DIM * (queries * context - queries * (queries - 1) / 2)
        seconds = common.time_calls(run, pool.calls([(queries, context)], query)[:4])
        row = {"queries": queries, "context": context, "us": seconds * 1e6, "TFLOP/s": work / seconds / 1e12}
        row = run.row("Prefill attention", row | {"of product": work / seconds / computed})
        if queries == context and not run.dry:
            with run.tried("SDPA of a prompt", 60):
                # Heads repeated beforehand: every backend takes that, and it costs nothing here.
                q, k, v = (torch.randn(1, HEADS, context, DIM, device=run.device).to(half) for _ in range(3))
                theirs = common.time_calls(run, [lambda q=q, k=k, v=v: scaled_dot_product_attention(q, k, v, is_causal=True)], repeats=7)
                row |= {"sdpa TFLOP/s": work / theirs / 1e12, "sdpa / ours": theirs / seconds}
                with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
                    flash = common.time_calls(run, [lambda q=q, k=k, v=v: scaled_dot_product_attention(q, k, v, is_causal=True)], repeats=7)
                row["flash / ours"] = flash / seconds
    del pool
    common.free()


def layers(run: common.Run, copied: float) -> None:
    """What lies between products and attention: bytes that must be read and written, a second, beside torch's eager way."""
    import torch
    from torch.nn import functional

    from chairlift.kernels import act_mul, copy_blocks, resolve, rms_norm, rope_write

    half = torch.float16 if run.dry else torch.bfloat16
    hidden, inner = (64, 96) if run.dry else (HIDDEN, INNER)

    def normal(*shape: int) -> Any:
        return torch.randn(*shape, device=run.device).to(half)

    def line(name: str, tokens: int, size: float, ours: list[Any], theirs: list[Any] | None = None) -> None:
        with run.tried(f"{name}, {tokens} tokens", 60):
            seconds = common.time_calls(run, ours)
            row = {"kernel": name, "tokens": tokens, "us": seconds * 1e6, "GB/s": size / seconds / 1e9, "of copy": size / seconds / copied}
            run.row("Between products and attention", row)
            if theirs:
                other = common.time_calls(run, theirs)
                row |= {"torch us": other * 1e6, "torch / ours": other / seconds}

    weight = torch.ones(hidden, device=run.device, dtype=half)
    for tokens in (2,) if run.dry else (64, 256, 2048, 8192):
        if not run.fits(f"layers, {tokens} tokens", 15):
            break
        size = 2 * tokens * hidden * 2
        xs = [(normal(tokens, hidden), normal(tokens, hidden)) for _ in range(common.copies(run, 2 * size))]
        ours: list[Any] = [lambda x=x: rms_norm.rms_norm(x, weight, 1e-5) for x, _ in xs]
        theirs: list[Any] = [lambda x=x: functional.rms_norm(x, (hidden,), weight, 1e-5) for x, _ in xs]
        line("rms_norm", tokens, size, ours, theirs)
        ours = [lambda x=x, r=r: rms_norm.add_rms_norm(x, r, weight, 1e-5) for x, r in xs]
        theirs = [lambda x=x, r=r: functional.rms_norm(r.add_(x), (hidden,), weight, 1e-5) for x, r in xs]
        line("add_rms_norm", tokens, 2 * size, ours, theirs)
        size = 3 * tokens * inner * 2
        gates = [normal(tokens, 2 * inner) for _ in range(common.copies(run, size))]
        ours = [lambda g=g: act_mul.act_mul(g, "silu") for g in gates]
        theirs = [lambda g=g: functional.silu(g[:, :inner]) * g[:, inner:] for g in gates]
        line("act_mul", tokens, size, ours, theirs)
        size = 2 * tokens * (HEADS + 2 * KV_HEADS) * DIM * 2
        wide = [normal(tokens, HEADS + 2 * KV_HEADS, DIM) for _ in range(common.copies(run, size))]
        cos, sin = torch.randn(2, tokens, DIM // 2, device=run.device).unbind(0)
        slots = torch.randperm(tokens, device=run.device).int() + 16
        cache = normal(tokens // 16 + 2, 2, KV_HEADS, 16, DIM)
        given = cos, sin, cache[:, 0], cache[:, 1], slots
        ours = [lambda w=w, g=given: rope_write.rope_write(w, *g) for w in wide]
        line("rope_write", tokens, size, ours, [lambda w=w, g=given: _rope_in_torch(w, *g) for w in wide])
        del xs, gates, wide, cache
        common.free()
    ids = torch.full((256,), -1, dtype=torch.int32, device=run.device)
    last = torch.zeros(256, dtype=torch.int32, device=run.device)
    line("resolve", 256, 2 * 256 * 4, [lambda: resolve.resolve(ids, last)] * 8)
    words = 64 if run.dry else 1 << 20
    blocks = normal(66, words)
    pairs = torch.stack((torch.arange(32), torch.arange(32) + 33), 1).int().to(run.device)
    line("copy_blocks, 32 of 2 MiB", 512, 32 * words * 2 * 2, [lambda: copy_blocks.copy_blocks(blocks, pairs)])


def eight_bits(run: common.Run, copied: float) -> None:
    """Products in fp8 (W8A8) beside those in 16 bits, and the kernels that round their inputs beside two kernels each."""
    import torch
    from torch.nn import functional

    from chairlift.kernels import act_mul, quantise_rows, rms_norm
    from chairlift.layers.linear import MIN_ABSMAX, Linear, quantise, round_rows

    if not run.dry and torch.cuda.get_device_capability() < (8, 9):
        run.say("Products in fp8: the card has none.")
        return
    half = torch.float16 if run.dry else torch.bfloat16
    hidden, inner = (64, 96) if run.dry else (HIDDEN, INNER)
    norm = torch.ones(hidden, device=run.device, dtype=half)

    def line(name: str, tokens: int, size: float, ours: list[Any], theirs: list[Any]) -> None:
        with run.tried(f"{name}, {tokens} tokens", 60):
            seconds = common.time_calls(run, ours)
            row = {"in fp8": name, "tokens": tokens, "us": seconds * 1e6, "of copy": size / seconds / copied}
            row = run.row("Products in 8 bits", row)
            other = common.time_calls(run, theirs)
            row |= {"other us": other * 1e6, "other / ours": other / seconds}

    for tokens in (2,) if run.dry else (1, 64, 256, 2048):
        if not run.fits(f"8 bits, {tokens} tokens", 15):
            break
        size = 3 * tokens * hidden
        xs = [torch.randn(tokens, hidden, device=run.device).to(half) for _ in range(common.copies(run, size))]
        ours: list[Any] = [lambda x=x: rms_norm.rms_norm(x, norm, 1e-5, least=MIN_ABSMAX) for x in xs]
        theirs: list[Any] = [lambda x=x: quantise_rows.quantise_rows(rms_norm.rms_norm(x, norm, 1e-5), MIN_ABSMAX) for x in xs]
        line("rms_norm that rounds", tokens, size, ours, theirs)
        size = 5 * tokens * inner
        gates = [torch.randn(tokens, 2 * inner, device=run.device).to(half) for _ in range(common.copies(run, size))]
        ours = [lambda g=g: act_mul.act_mul(g, "silu", least=MIN_ABSMAX) for g in gates]
        theirs = [lambda g=g: quantise_rows.quantise_rows(act_mul.act_mul(g, "silu"), MIN_ABSMAX) for g in gates]
        line("act_mul that rounds", tokens, size, ours, theirs)
        del gates
        if run.dry:
            continue
        size = hidden * inner
        weights = [torch.randn(inner, hidden, device=run.device).to(half) for _ in range(common.copies(run, size))]
        linears = [Linear(quantise(weight, "fp8"), rounds_activations=True) for weight in weights]
        rows = round_rows(xs[0])
        ours = [lambda f=f, r=rows: f(r) for f in linears]
        theirs = [lambda w=w, x=xs[0]: functional.linear(x, w) for w in weights]
        line("W8A8 product", tokens, size, ours, theirs)
        del weights, linears, xs
        common.free()


def _rope_in_torch(qkv: Any, cosines: Any, sines: Any, keys: Any, values: Any, slots: Any) -> Any:
    """In the dtype of the model, as transformers does, and an index to store."""
    import torch

    cos, sin = (part.unsqueeze(1).to(qkv.dtype) for part in (cosines, sines))
    low, high = qkv[:, : HEADS + KV_HEADS].chunk(2, -1)
    turned = torch.cat((low * cos - high * sin, high * cos + low * sin), -1)
    block, offset = slots // 16, slots % 16
    keys[block, :, offset] = turned[:, HEADS:]
    values[block, :, offset] = qkv[:, HEADS + KV_HEADS :]
    return turned[:, :HEADS]


def sampling(run: common.Run, copied: float) -> None:
    """The sampler's tiers; `passes` is how often the time would do to read all logits."""
    import torch

    from chairlift.kernels.sampling.sample import sample
    from chairlift.kernels.sampling.settings import Settings

    vocabulary = 300 if run.dry else VOCABULARY
    for count in (2,) if run.dry else (1, 64, 256):
        size = count * vocabulary * 4
        logits = [torch.randn(count, vocabulary, device=run.device) * 3 for _ in range(common.copies(run, size))]
        places = torch.arange(count, dtype=torch.int32, device=run.device)
        said = torch.zeros(count, vocabulary, dtype=torch.int32, device=run.device)

        def settings(temperature: float, top_k: int, top_p: float, count: int = count, places: Any = places) -> Settings:
            ones, zeros = torch.ones(count, device=run.device), torch.zeros(count, device=run.device)
            return Settings(ones * temperature, places * 0 + top_k, ones * top_p, zeros, places.long(), ones * 1.1, zeros, zeros, places)

        ways: list[tuple[str, Settings, bool, bool]] = [
            ("greedy", settings(0, 0, 1), False, False),
            ("temperature", settings(1, 0, 1), False, False),
            ("top-k 50, top-p 0.9", settings(1, 50, 0.9), True, False),
            ("top-p 0.9", settings(1, 0, 0.9), True, False),
            ("penalties, top-p 0.9", settings(1, 0, 0.9), True, True),
        ]
        peers: dict[str, Callable[[Any], object]] = {
            "greedy": lambda x: x.argmax(-1),
            "temperature": lambda x: x.softmax(-1).div_(torch.empty_like(x).exponential_()).argmax(-1),
            "top-p 0.9": _nucleus_in_torch,
        }
        for name, chosen, truncated, penalised in ways:
            if not run.fits(f"sampling, {name}", 10):
                break
            with run.tried(f"sampling, {name}, {count} rows", 60):
                last = torch.zeros(count, dtype=torch.int32, device=run.device)
                more = (places, places, chosen, last, said if penalised else None)
                seconds = common.time_calls(run, [lambda x=x, m=more, t=truncated: sample(x, *m, truncated=t) for x in logits])
                row = {"tier": name, "rows": count, "us": seconds * 1e6, "GB/s, one pass": size / seconds / 1e9}
                row = run.row("Sampling", row | {"passes": seconds * copied / size})
                if name in peers:
                    theirs = common.time_calls(run, [lambda x=x, f=peers[name]: f(x) for x in logits], graph=name != "top-p 0.9")
                    row |= {"torch us": theirs * 1e6, "torch / ours": theirs / seconds}
        del logits, said
        common.free()


def _nucleus_in_torch(logits: Any) -> Any:
    """As transformers does: sort, sum up, mask, draw."""
    import torch

    ordered, places = logits.sort(-1, descending=True)
    chances = ordered.softmax(-1)
    ordered = ordered.masked_fill(chances.cumsum(-1) - chances > 0.9, -math.inf)
    return places.gather(-1, torch.multinomial(ordered.softmax(-1), 1))


def main() -> None:
    """Measures the ceilings, and then all kernels, the most important first."""
    run = common.begin("kernels", __doc__ or "", 8)
    with run.tried("the ceilings"):
        copied, computed = common.ceilings(run)
        for part, given, seconds in (
            (decode, copied, 300),
            (prefill, computed, 90),
            (layers, copied, 90),
            (sampling, copied, 60),
            (eight_bits, copied, 60),
        ):
            if run.fits(part.__name__, 20):
                with run.tried(part.__name__, seconds):
                    part(run, given)
        if run.fits("layers in a block", 20):
            with run.tried("layers in a block", 60):
                many_layers(run)
        if run.fits("other ways", 40):
            with run.tried("other ways"):
                other_decodes(run)
    run.say(f"Done, with {run.left:.0f} s left.")


if __name__ == "__main__":
    main()
