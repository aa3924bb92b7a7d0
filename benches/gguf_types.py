"""Times the linear layers of a 1-billion-parameter Llama on the CPU for each GGUF type, and writes benches/results/gguf_types.md.

Weights are random blocks. A step of N sequences that decode their first token is linear work and little else. Four layers stand for
sixteen: the time of those, times four, plus that of the head. Takes about a minute for each type.
"""

from __future__ import annotations

import argparse
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from pages import write
from peers.machine import best, describe

from chairlift import _core
from chairlift.runner.gguf_grids import GRID_TYPES, provide_grids

HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM, VOCABULARY = 2048, 8192, 32, 8, 64, 32000
LAYERS, MEASURED = 16, 4
ROWS = (1, 2, 4, 16, 64)
MATRIX_WEIGHTS = LAYERS * (HIDDEN * (2 * HEADS + 2 * KV_HEADS) * HEAD_DIM + 3 * HIDDEN * INNER) + VOCABULARY * HIDDEN
"""Weights that a token is multiplied by."""
MIXED = {"Q4_K_M": ("Q4_K", "Q6_K")}
"""File types of two block types: of `v_proj` and `down_proj` half are of the second one, and the head."""


def blocks(kind: str, rows: int, ins: int, random: np.random.Generator) -> np.ndarray:
    """Random weights of a type; their scales are small and finite."""
    if kind == "F32":
        return (random.standard_normal((rows, ins), dtype=np.float32) * 0.02).view(np.uint8).reshape(-1)
    if kind in ("F16", "BF16"):
        return np.full(2 * rows * ins, 0x21, np.uint8)
    elements, size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    found = random.integers(0, 256, (rows * ins // elements, size), dtype=np.uint8)
    scale = np.frombuffer(np.float16(0.001).tobytes(), np.uint8)
    if kind == "Q6_K":
        found[:, -2:] = scale
    elif kind == "MXFP4":
        found[:, 0] = 118
    elif kind == "IQ1_M":  # the digits of the scale are in the highest bits of four words
        found[:, 49::2] &= 15
        found[:, 55] |= 0x10
    else:
        found[:, :2] = scale
        if kind in ("Q4_1", "Q5_1", "Q4_K", "Q5_K"):
            found[:, 2:4] = scale
    return found.reshape(-1)


def number(kind: str) -> str:
    """The type's name for `_core.Linear`."""
    return {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}.get(kind, str(int(GGMLQuantizationType[kind])))


def decoder(kind: str, form: str, threads: int, isa: str) -> _core.Decoder:
    """A model of a type, of MEASURED layers."""
    random = np.random.default_rng(0)
    usual, other = MIXED.get(kind, (kind, kind))

    def linear(outs: list[int], ins: int, kinds: list[str], gated: bool = False) -> _core.Linear:
        tensors = [(number(k), rows, blocks(k, rows, ins, random), 0) for k, rows in zip(kinds, outs, strict=True)]
        return _core.Linear([[tensor] for tensor in tensors], ins, form, threads=threads, gated=gated, isa=isa)

    kv, queries = KV_HEADS * HEAD_DIM, HEADS * HEAD_DIM
    ones = np.ones(HIDDEN, np.float32)
    decoder_blocks = []
    for index in range(MEASURED):
        second = other if index % 2 else usual
        attention = _core.DecoderBlock.attention(
            norm=ones,
            qkv_proj=linear([queries, kv, kv], HIDDEN, [usual, usual, second]),
            kv=(0, index, False),
            o_proj=linear([HIDDEN], queries, [usual]),
            scale=HEAD_DIM**-0.5,
            rope=0,
        )
        mlp = _core.DecoderBlock.mlp(
            norm=ones,
            gate_up_proj=linear([INNER, INNER], HIDDEN, [usual, usual], gated=True),
            down_proj=linear([HIDDEN], INNER, [second]),
        )
        decoder_blocks += [attention, mlp]
    return _core.Decoder(
        decoder_blocks,
        norm=ones,
        head=linear([VOCABULARY], HIDDEN, [other]),
        hidden_size=HIDDEN,
        num_heads=HEADS,
        kv_heads=[(KV_HEADS, HEAD_DIM, None)],
        rms_norm_eps=1e-5,
        ropes=[((10000.0 ** (-np.arange(0, HEAD_DIM, 2) / HEAD_DIM)).astype(np.float32), 1.0)],
        threads=threads,
    )


def measure(model: _core.Decoder, rows: int, seconds: float) -> float:
    """Seconds of a step of the whole model, the layers that were not made counted."""
    cache = _core.KvCache(parts=[(MEASURED, KV_HEADS, HEAD_DIM, None)], blocks=rows + 1, block_size=16, dtype="float32")
    at = np.arange(rows, dtype=np.int32)
    arrays: dict[str, Any] = {
        "input_ids": at,
        "positions": at * 0,
        "slot_mapping": (at + 1) * 16,
        "query_starts": np.arange(rows + 1, dtype=np.int32),
        "context_lens": at * 0 + 1,
        "batch_slots": at,
        "block_tables": (at + 1).reshape(-1, 1),
    }
    logits = np.empty((rows, VOCABULARY), np.float32)
    layers = best(lambda: model.forward(cache, **arrays), seconds)
    return layers * LAYERS / MEASURED + best(lambda: model.logits(at, logits), seconds / 2)


def main() -> None:
    """Measures the types that are named, or all, with each instruction set that is named, and writes the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("types", nargs="*", help="such as Q4_K, Q4_K_M, int8:Q4_0 (with --quantization int8)")
    parser.add_argument("--seconds", type=float, default=1.0, help="time for each number of rows")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--cpu-isa", nargs="+", default=_core.instruction_sets()[:1], help="instruction sets (default: the fastest)")
    args = parser.parse_args()
    provide_grids(GRID_TYPES, Path("random weights"))
    known = [GGMLQuantizationType(n).name for n in _core.block_types()]
    names = args.types or [*MIXED, *known, "F16", "BF16", "F32", "int8:Q4_0", "int8:Q8_0"]
    lines = [
        "# Steps of a 1B Llama by GGUF type",
        "",
        f"Written by `benches/gguf_types.py`. Tokens per second of a step that decodes N sequences; {MATRIX_WEIGHTS / 1e6:.0f} million",
        "weights, random, on the machine below with the threads given. One row is one stream.",
        "",
        f"Machine: {describe()['cpu']}, {args.threads} threads.",
        "",
        "| type | instruction set | " + " | ".join(f"{rows} rows" for rows in ROWS) + " |",
        "|---|---|" + "---|" * len(ROWS),
    ]
    for name, isa in product(names, args.cpu_isa):
        kind = name.removeprefix("int8:")
        model = decoder(kind, "int8" if name != kind else "kept", args.threads, isa)
        rates = [rows / measure(model, rows, args.seconds) for rows in ROWS]
        lines.append(f"| {name} | {isa} | " + " | ".join(f"{rate:.1f}" for rate in rates) + " |")
        print(lines[-1], flush=True)
        del model
    write("gguf_types.md", lines)


if __name__ == "__main__":
    main()
