"""The engine's part of `correct.py`: beside transformers, and beside itself with steps that do not overlap, and without graphs."""

from __future__ import annotations

import copy
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import common
import numpy as np

if TYPE_CHECKING:
    from correct import Checks

TIE = 1e-3
"""Two logits of fp32 that lie closer than this may change places."""


def engine(run: common.Run, checks: Checks) -> None:
    """Greedy answers and log-probabilities of a small random Llama, and answers sampled in all ways."""
    import torch
    import transformers

    from chairlift import LLM, SamplingParams

    device = run.device
    config = common.llama(*((64, 128, 2, 4, 2, 512) if run.dry else (512, 1024, 4, 8, 2, 4096)), torch_dtype="float32")
    settings = {"num_kv_blocks": 3000, "max_num_seqs": 32, "max_num_batched_tokens": 256, "max_model_len": 1024, "device": device}
    random = np.random.default_rng(1)
    longest, answer, many = (40, 6, 4) if run.dry else (300, 64, 32)
    prompts = [random.integers(0, config["vocab_size"], random.integers(1, longest)).tolist() for _ in range(many)]
    with tempfile.TemporaryDirectory() as folder:
        directory = common.write_model(Path(folder) / "model", config)
        made = transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**config, "dtype": torch.float32}))
        for tensor in made.parameters():
            # Wider than usual: logits that are all alike would hide errors.
            if tensor.dim() > 1:
                tensor.normal_(0, 0.2 * (64 / tensor.shape[1]) ** 0.5)
        made.save_pretrained(directory)
        common.write_model(directory, config)
        exact = made.to(device).eval()
        greedy = SamplingParams(temperature=0.0, max_tokens=answer, ignore_eos=True)
        with common.steps_overlap(True):
            llm = LLM(str(directory), dtype="float32", **settings)
        outputs = llm.generate(prompts, greedy, progress=False)
        same = ties = 0
        for prompt, output in zip(prompts, outputs, strict=True):
            whole = torch.tensor([prompt + output.token_ids], device=device)
            best = exact(whole).logits[0, len(prompt) - 1 : -1].float().topk(2).values
            theirs = exact.generate(whole[:, : len(prompt)], attention_mask=torch.ones_like(whole[:, : len(prompt)]), **_greedy(answer))
            theirs = theirs[0, len(prompt) :].tolist()
            if theirs == output.token_ids:
                same += 1
            else:
                first = next(i for i, (one, other) in enumerate(zip(theirs, output.token_ids, strict=True)) if one != other)
                ties += bool(best[first, 0] - best[first, 1] < TIE)
        row = {
            "check": f"greedy answers of {answer} tokens, fp32",
            "found": f"{same} of {many} as transformers'",
            "allowed": f"{ties} at a tie",
        }
        checks.note(row, same + ties == many)
        for name in ("float32",) if run.dry else ("float32", "bfloat16", "float16"):
            other = llm
            if name != "float32":
                with common.steps_overlap(True):
                    other = LLM(str(directory), dtype=name, **settings)
            _logprobs(run, checks, other, exact, prompts, name)
        del llm
        common.free()
        _depths(run, checks, directory, prompts, answer, settings)


def _greedy(count: int) -> dict[str, Any]:
    from transformers import GenerationConfig

    return {"generation_config": GenerationConfig(max_new_tokens=count, do_sample=False, eos_token_id=None, pad_token_id=0)}


def _logprobs(run: common.Run, checks: Checks, llm: Any, exact: Any, prompts: list[list[int]], name: str) -> None:
    """Log-probabilities of prompts, computed in chunks beside others, against those of transformers in fp32 and in the same dtype."""
    import torch

    from chairlift import SamplingParams

    def theirs(model: Any, prompt: list[int]) -> np.ndarray:
        ids = torch.tensor(prompt, device=run.device)
        found = model(ids[None]).logits[0, :-1].float().log_softmax(-1).gather(1, ids[1:, None])
        return found[:, 0].double().cpu().numpy()

    prompts = [prompt for prompt in prompts if len(prompt) > 1]
    requested = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    mine = [np.array([line.logprob for line in output.prompt_logprobs[1:]]) for output in llm.generate(prompts, requested, progress=False)]
    right = [theirs(exact, prompt) for prompt in prompts]
    error = max(float(np.abs(one - other).max()) for one, other in zip(mine, right, strict=True))
    allowed = TIE
    if name != "float32":
        rounded = copy.deepcopy(exact).to(getattr(torch, name))
        allowed = 2 * max(float(np.abs(theirs(rounded, prompt) - other).max()) for prompt, other in zip(prompts, right, strict=True))
    row = {"check": f"log-probabilities of prompts, {name}", "found": f"{error:.2g} off", "allowed": f"{allowed:.2g}"}
    if name != "float32":
        row["allowed"] += ", twice what transformers is"
    checks.note(row, error <= allowed)


def _depths(run: common.Run, checks: Checks, directory: Path, prompts: list[list[int]], answer: int, settings: dict[str, Any]) -> None:
    """All ways to sample: equal answers one step at a time and overlapped, with graphs and without."""
    from chairlift import LLM, SamplingParams

    base = SamplingParams(max_tokens=answer, ignore_eos=True, seed=3)
    ways = [
        replace(base, temperature=0.0),
        replace(base, temperature=1.0),
        replace(base, temperature=0.8, top_k=40, top_p=0.9),
        replace(base, temperature=1.2, min_p=0.02, logprobs=2),
        replace(base, temperature=0.7, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.2),
        replace(base, temperature=1.0, max_tokens=max(1, answer // 3), stop_token_ids=[7, 11, 13]),
    ]
    params = [ways[i % len(ways)] for i in range(len(prompts))]

    def answers(overlaps: bool, eager: bool) -> list[list[int]]:
        with common.steps_overlap(overlaps):
            llm = LLM(str(directory), dtype="float32", enforce_eager=eager, **settings)
        graphs = [decision for decision in llm.engine.info.decisions if decision[0] == "CUDA graphs"]
        run.say(f"Steps overlap: {overlaps}. CUDA graphs: {graphs[0][1:] if graphs else 'the device has none'}.")
        found = [output.token_ids for output in llm.generate(prompts, params, progress=False)]
        del llm
        common.free()
        return found

    overlapped = answers(overlaps=True, eager=False)
    others = {
        "answers with steps overlapped, and one at a time": answers(overlaps=False, eager=False),
        "answers with graphs on and off": answers(overlaps=True, eager=True),
    }
    for check, found in others.items():
        same = sum(one == other for one, other in zip(overlapped, found, strict=True))
        row = {"check": check, "found": f"{same} of {len(prompts)} equal", "allowed": "all"}
        checks.note(row, same == len(prompts))
