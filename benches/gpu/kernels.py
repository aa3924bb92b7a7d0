"""Times every kernel on a GPU beside the device's ceilings and other implementations; takes up to eight minutes.

The ceilings, a copy and a product of bf16 matrices, are measured first, in the same run. Calls are replayed as CUDA graphs over memory
that the L2 cache cannot hold; times are medians. Shapes are those of Llama-3.1-8B: 32 heads of 128, 8 KV heads, bf16. Peers of attention
(torch's SDPA, and FlashAttention-3 of the package fa3-fwd where it is installed) get keys and values that lie in one piece, which is an
upper bound for a cache in blocks. What matters most comes first: attention of a few usual steps, then what takes a smaller part of a step.
`--sweep` also times attention with other launch settings.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import itertools
import math
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import common
import mixtures
from pool import DIM, HEADS, KV_HEADS, TOKEN_BYTES, Pool
from sweep import sweep

HIDDEN, INNER, VOCABULARY = 4096, 14336, 128_256
POOL_SHARE = 0.6
"""Share of the device's memory that a cache takes at most."""
USUAL = ((64, 2048), (256, 1024), (1, 2048), (64, 8192), (1, 32768))
"""Decode steps (batch, context) that are timed in each form of the cache, the most usual first."""


def decode(run: common.Run, copied: float, form: tuple[str, int, Any], cases: list[tuple[int, int]]) -> None:
    """Attention of one token a sequence: bytes of keys and values a second. `form` is the cache's name, block size and dtype."""
    import torch

    name, size, dtype = form
    half = torch.float16 if run.dry else torch.bfloat16
    most = POOL_SHARE * run.memory
    for layers in (8, 2):
        # Longer ones do not fit as often as others, or not at all.
        fitting = [case for case in cases if (_bytes(case, 8, dtype) <= most) == (layers == 8) and _bytes(case, layers, dtype) <= most]
        if not fitting:
            continue
        tokens = max(batch * (context + size) for batch, context in fitting)
        pool = Pool(run, max(tokens, 100 if run.dry else 60_000), layers, size, dtype)
        for batch, context in fitting:
            query = torch.randn(batch, HEADS, DIM, device=run.device).to(half)
            seconds = common.time_calls(run, pool.calls([(1, context)] * batch, query))
            rate = batch * context * TOKEN_BYTES * dtype.itemsize / seconds
            row = {"block": name, "batch": batch, "context": context, "us": seconds * 1e6}
            number = run.row("Decode attention", row | {"GB/s": rate / 1e9, "of copy": rate / copied})
            if size == 16 and dtype == half:
                with run.tried(f"SDPA, {batch} x {context}", 30):
                    theirs = _sdpa_decode(run, pool, query, batch, context)
                    run.more(number, {"sdpa us": theirs * 1e6, "sdpa / ours": theirs / seconds})
                if has_fa3(run):
                    with run.tried(f"FlashAttention-3, {batch} x {context}", 30):
                        theirs = _fa3_decode(run, pool, query, batch, context)
                        run.more(number, {"FA3 us": theirs * 1e6, "FA3 / ours": theirs / seconds})
        del pool
        common.free()


def has_fa3(run: common.Run) -> bool:
    """Whether FlashAttention-3 is installed: the package fa3-fwd, which has no pages."""
    return not run.dry and importlib.util.find_spec("fa3_fwd_interface") is not None


def _fa3_decode(run: common.Run, pool: Pool, query: Any, batch: int, context: int) -> float:
    import torch
    from fa3_fwd_interface import flash_attn_with_kvcache

    rows, used = query.view(batch, 1, HEADS, DIM), query.new_full((batch,), context, dtype=torch.int32)
    # It reads [batch, context, heads, D], by strides.
    parts = [(k.transpose(1, 2), v.transpose(1, 2)) for k, v in pool.in_one_piece(batch, context)]
    return common.time_calls(run, [lambda k=k, v=v: flash_attn_with_kvcache(rows, k, v, cache_seqlens=used) for k, v in parts], repeats=7)


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


VARLEN = "torch.nn.attention.varlen"
OTHERS = {"varlen": "varlen_attn, in one piece", "varlen-pages": "varlen_attn, pages of 256", "flex": "flex_attention, pages"}
"""Parts of `other_decodes`, and what they time."""


def other_decodes(run: common.Run, part: str) -> None:
    """Peers that take long to compile, or are not in every torch: varlen attention, and flex_attention over pages."""
    import torch

    make = {"varlen": _varlen, "varlen-pages": _varlen_paged, "flex": _flex}[part]
    if part != "flex" and "enable_gqa" not in inspect.signature(importlib.import_module(VARLEN).varlen_attn).parameters:
        run.say(f"{OTHERS[part]}: torch {torch.__version__} has it without groups of heads.")
        return
    for batch, context in ((64, 2048), (64, 8192)):
        pool = Pool(run, batch * (context + 128), 8, 16, torch.bfloat16)
        query = torch.randn(batch, HEADS, DIM, device="cuda").bfloat16()
        ours = common.time_calls(run, pool.calls([(1, context)] * batch, query))
        seconds = common.time_calls(run, make(pool, query, batch, context), repeats=7, graph=part != "flex")
        row = {
            "way": OTHERS[part],
            "batch": batch,
            "context": context,
            "us": seconds * 1e6,
            "ours us": ours * 1e6,
            "time / ours": seconds / ours,
        }
        run.row("Decode attention, other ways", row)
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


def prefill(run: common.Run, computed: float, cases: list[tuple[int, int]]) -> None:
    """Attention of whole prompts, and of chunks behind a context: FLOP a second of what a causal mask leaves."""
    import torch

    half = torch.float16 if run.dry else torch.bfloat16
    pool = Pool(run, 40 if run.dry else 60_000, 2, 16, half)
    for queries, context in cases:
        query = torch.randn(queries, HEADS, DIM, device=run.device).to(half)
        work = _causal_work(queries, context)
        seconds = common.time_calls(run, pool.calls([(queries, context)], query)[:4])
        row = {"queries": queries, "context": context, "us": seconds * 1e6, "TFLOP/s": work / seconds / 1e12}
        number = run.row("Prefill attention", row | {"of product": work / seconds / computed})
        if queries == context and not run.dry:
            for name, call in _prompt_peers(run, context).items():
                with run.tried(f"{name} of a prompt of {context}", 30):
                    theirs = common.time_calls(run, [call], repeats=7)
                    run.more(number, {f"{name} TFLOP/s": work / theirs / 1e12, f"{name} / ours": theirs / seconds})
    del pool
    common.free()


def _causal_work(queries: int, context: int) -> float:
    return 4 * HEADS * DIM * (queries * context - queries * (queries - 1) / 2)


def _prompt_peers(run: common.Run, context: int) -> dict[str, Callable[[], object]]:
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    # Heads repeated beforehand: every backend takes that, and it costs nothing here.
    q, k, v = (torch.randn(1, HEADS, context, DIM, device=run.device).bfloat16() for _ in range(3))

    def flash() -> object:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return scaled_dot_product_attention(q, k, v, is_causal=True)

    peers: dict[str, Callable[[], object]] = {"sdpa": lambda: scaled_dot_product_attention(q, k, v, is_causal=True), "flash": flash}
    if has_fa3(run):
        from fa3_fwd_interface import flash_attn_func

        rows, few = q.transpose(1, 2), [x[:, :KV_HEADS].transpose(1, 2) for x in (k, v)]
        peers["FA3"] = lambda: flash_attn_func(rows, *few, causal=True)
    return peers


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
            number = run.row("Between products and attention", row)
            if theirs:
                other = common.time_calls(run, theirs)
                run.more(number, {"torch us": other * 1e6, "torch / ours": other / seconds})

    weight = torch.ones(hidden, device=run.device, dtype=half)
    for tokens in (2,) if run.dry else (64, 256, 2048, 8192):
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
    """The kernels that round the inputs of products in fp8, beside two kernels each."""
    import torch

    from chairlift.kernels import act_mul, quantise_rows, rms_norm
    from chairlift.layers.linear import MIN_ABSMAX

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
            number = run.row("Inputs in 8 bits", row)
            other = common.time_calls(run, theirs)
            run.more(number, {"other us": other * 1e6, "other / ours": other / seconds})

    for tokens in (2,) if run.dry else (1, 64, 256, 2048):
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
        del xs
        common.free()


def products(run: common.Run, copied: float) -> None:
    """Products with quantised weights beside those in 16 bits, for the four matrices of a layer."""
    import torch
    from torch.nn import functional

    from chairlift.layers.linear import Linear, Quantised, multiplied_out, quantise, round_rows

    half = torch.float16 if run.dry else torch.bfloat16
    shapes = (
        {"o": (64, 128)}
        if run.dry
        else {"qkv": (6144, HIDDEN), "o": (HIDDEN, HIDDEN), "gate, up": (2 * INNER, HIDDEN), "down": (HIDDEN, INNER)}
    )
    has_fp8 = not run.dry and torch.cuda.get_device_capability() >= (8, 9)

    def quantised(kind: str, whole: Any) -> Linear:
        if kind == "int4":
            pairs, groups = whole.view(torch.uint8)[:, : whole.shape[1] // 2].contiguous(), whole[:, ::128]
            return Linear(Quantised(pairs, groups.abs() / 8, torch.full_like(groups, 8, dtype=torch.uint8), 128))
        return Linear(quantise(whole, kind.split()[0]), rounds_activations=kind == "fp8 and activations")

    for name, (outs, ins) in shapes.items():
        whole = [torch.randn(outs, ins, device=run.device).to(half) for _ in range(common.copies(run, outs * ins))]
        for kind in ("fp8 and activations", "fp8", "int8", "int4")[not has_fp8 :]:
            linears = [quantised(kind, each) for each in whole]
            for rows in (2,) if run.dry else (1, 64, 128, 256):
                x = torch.randn(rows, ins, device=run.device).to(half)
                given = round_rows(x) if linears[0].rounds_activations else x
                with run.tried(f"{name}, {kind}, {rows} rows", 30):
                    seconds = common.time_calls(run, [lambda f=f, g=given: f(g) for f in linears], repeats=7)
                    size = outs * ins * (0.5 if kind == "int4" else 1)
                    row = {"matrix": name, "weight": kind, "rows": rows, "us": seconds * 1e6, "of copy": size / seconds / copied}
                    right = functional.linear(x, multiplied_out(linears[0].weight, half))
                    row["error"] = float((linears[0](given) - right).abs().max() / right.abs().max())
                    number = run.row("Products with quantised weights", row)
                    other = common.time_calls(run, [lambda w=w, x=x: functional.linear(x, w) for w in whole], repeats=7)
                    run.more(number, {"bf16 us": other * 1e6, "bf16 / ours": other / seconds})
            del linears
        del whole
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
            with run.tried(f"sampling, {name}, {count} rows", 60):
                last = torch.zeros(count, dtype=torch.int32, device=run.device)
                more = (places, places, chosen, last, said if penalised else None)
                seconds = common.time_calls(run, [lambda x=x, m=more, t=truncated: sample(x, *m, truncated=t) for x in logits])
                row = {"tier": name, "rows": count, "us": seconds * 1e6, "GB/s, one pass": size / seconds / 1e9}
                number = run.row("Sampling", row | {"passes": seconds * copied / size})
                if name in peers:
                    theirs = common.time_calls(run, [lambda x=x, f=peers[name]: f(x) for x in logits], graph=name != "top-p 0.9")
                    run.more(number, {"torch us": theirs * 1e6, "torch / ours": theirs / seconds})
        del logits, said
        common.free()


def _nucleus_in_torch(logits: Any) -> Any:
    """As transformers does: sort, sum up, mask, draw."""
    import torch

    ordered, places = logits.sort(-1, descending=True)
    chances = ordered.softmax(-1)
    ordered = ordered.masked_fill(chances.cumsum(-1) - chances > 0.9, -math.inf)
    return places.gather(-1, torch.multinomial(ordered.softmax(-1), 1))


def main() -> int:
    """Measures the ceilings, and then all kernels, the most important first."""
    run = common.begin("kernels", __doc__ or "", 8, sweep=False)
    import torch

    copied, computed = common.ceilings(run)
    half = torch.float16 if run.dry else torch.bfloat16
    usual = [(2, 40)] if run.dry else list(USUAL)
    chunks = [(20, 20)] if run.dry else [(2048, 2048), (8192, 8192), (2048, 16384)]
    run.part("decode", lambda: decode(run, copied, ("16", 16, half), usual), most=60)
    run.part("prefill", lambda: prefill(run, computed, chunks), most=60)
    run.part("layers", lambda: layers(run, copied), most=60)
    run.part("sampling", lambda: sampling(run, copied), most=40)
    run.part("products", lambda: products(run, copied), most=40)
    run.part("experts", lambda: mixtures.products(run), most=60)
    run.part("eight-bits", lambda: eight_bits(run, copied), most=40)
    run.part("decode-fp8", lambda: decode(run, copied, ("16, fp8", 16, torch.float8_e4m3fn), usual), most=40)
    if not run.dry:
        run.part("decode-64", lambda: decode(run, copied, ("64", 64, half), usual), most=40)
    if run.flags["sweep"]:
        sweep(run)
    if not run.dry:
        lengths = (512, 2048, 8192, 32768)
        rest = [case for case in itertools.product((1, 8, 32, 64, 128, 256), lengths) if case not in usual]
        run.part("decode-more", lambda: decode(run, copied, ("16", 16, half), rest), most=90)
        run.part("prefill-more", lambda: prefill(run, computed, [(512, 512), (4096, 4096), (16384, 16384), (512, 8192)]), most=60)
        run.part("decode-32", lambda: decode(run, copied, ("32", 32, half), usual), most=40)
        for part in OTHERS:
            run.part(part, partial(other_decodes, run, part), needs=30, most=60)
    run.part("many-layers", lambda: many_layers(run), most=60)
    return run.finish()


if __name__ == "__main__":
    sys.exit(main())
