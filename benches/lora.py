"""The cost of LoRA adapters: 16 streams without adapters, with one adapter for all, and with several.

    python benches/lora.py [MODEL] [--rank 16] [--dtype bfloat16] [--threads N]       writes benches/results/lora.md

Adapters have random matrices for all seven projections. Each round generates the same prompts with each number of adapters in turn; the
figure is the median over the rounds of a round's ratio to its run without adapters.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
from pages import machine, write

from chairlift import LLM, SamplingParams
from chairlift.config import DEFAULT_MODEL
from chairlift.models.config import ModelConfig

STREAMS, PROMPT, OUTPUT, ROUNDS = 16, 32, 96, 7
COUNTS = (0, 1, 4, 16)
"""Adapters of a run."""


def write_adapter(directory: Path, model: ModelConfig, rank: int, dtype: str, seed: int) -> None:
    """Writes an adapter in peft's format."""
    rng = np.random.default_rng(seed)
    queries, kv = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    hidden, inner = model.hidden_size, model.intermediate_size
    shapes = {"self_attn.q_proj": (queries, hidden), "self_attn.k_proj": (kv, hidden), "self_attn.v_proj": (kv, hidden)}
    shapes |= {"self_attn.o_proj": (hidden, queries), "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden)}
    shapes |= {"mlp.down_proj": (hidden, inner)}
    header: dict[str, object] = {}
    data = bytearray()
    for layer in range(model.num_layers):
        for name, (outs, ins) in shapes.items():
            for which, shape in (("A", (rank, ins)), ("B", (outs, rank))):
                numbers = rng.standard_normal(shape, dtype=np.float32) * np.float32(0.02)
                part = numbers.tobytes() if dtype == "float32" else (numbers.view(np.uint32) >> 16).astype(np.uint16).tobytes()
                place = [len(data), len(data) + len(part)]
                entry = {"dtype": {"float32": "F32", "bfloat16": "BF16"}[dtype], "shape": shape, "data_offsets": place}
                header[f"base_model.model.model.layers.{layer}.{name}.lora_{which}.weight"] = entry
                data += part
    directory.mkdir()
    text = json.dumps(header).encode()
    (directory / "adapter_model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)
    modules = [name.split(".")[1] for name in shapes]
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "bias": "none", "target_modules": modules}
    (directory / "adapter_config.json").write_text(json.dumps(config))


def seconds(llm: LLM, prompts: list[list[int]], adapters: int) -> float:
    """Generates from all prompts at once. Returns the seconds of the steps after the first tokens."""
    names = [f"a{index % adapters}" if adapters else None for index in range(STREAMS)]
    params = [SamplingParams(temperature=0.0, max_tokens=OUTPUT, ignore_eos=True, lora=name) for name in names]
    first = [SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, lora=name) for name in names]
    llm.generate(prompts, first, progress=False)  # the prompts are then in the prefix cache
    began = time.perf_counter()
    llm.generate(prompts, params, progress=False)
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default=DEFAULT_MODEL)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, LLM(args.model, enable_lora=True, max_lora_rank=args.rank, threads=args.threads) as llm:
        model = llm.engine.runner.model_config
        assert isinstance(model, ModelConfig)
        for index in range(max(COUNTS)):
            path = Path(folder) / f"a{index}"
            write_adapter(path, model, args.rank, args.dtype, index)
            llm.load_lora_adapter(path.name, path)
        prompts = np.random.default_rng(0).integers(1000, model.vocab_size, (STREAMS, PROMPT)).tolist()
        rounds = [{count: seconds(llm, prompts, count) for count in COUNTS} for _ in range(1 + args.rounds)][1:]
        decisions = {what: value for what, value, _ in llm.info.decisions}
    lines = ["# LoRA adapters", "", machine()]
    lines += [
        f"{args.model}, weights {decisions['weights']}, {args.threads} threads; {STREAMS} streams of {OUTPUT} tokens; adapters of rank"
    ]
    lines += [f"{args.rank} in {args.dtype} on all seven projections. Median of {args.rounds} rounds.", ""]
    lines += ["| adapters | tokens/s | time beside none |", "|---|---|---|"]
    for count in COUNTS:
        rate = statistics.median(STREAMS * OUTPUT / one[count] for one in rounds)
        lines.append(f"| {count} | {rate:,.0f} | {statistics.median(one[count] / one[0] for one in rounds):.2f} |")
    write("lora.md", lines)


if __name__ == "__main__":
    main()
