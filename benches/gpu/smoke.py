"""Does the engine run on this GPU? Ninety seconds: the first script to run, and what to read first.

A model of the shape of the default one (SmolLM2-135M) and one of the shape of Llama-3.1-8B, both with random weights, in bf16: answers
beside transformers, CUDA graphs, sampling, grammars, steps without graphs, swapped KV, fp8, and a server whose engine is killed. Each check
is a row that says what was found and what is allowed. Greedy answers are checked by scoring them as prompts: each token must be, but for
rounding, the most likely one. That finds wrong attention, KV or graphs, because a prompt is computed by other kernels than an answer.
"""

from __future__ import annotations

import json
import math
import os
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import common
import mixtures
import numpy as np
import serve
from ahead import Ahead
from results import NO

GAP = 0.3
"""Log-probabilities of bf16 that lie closer than this may change places. The logits have a standard deviation of about 4."""
ALONE = 8
"""Texts that are scored alone too, for what rounding changes."""
UNLIKE = 0.3
"""Largest share of the difference of unrelated log-probabilities that those of weights in 8 bits may differ from bf16."""
BEST, BEST_IN_8_BITS = 0.9, 0.85
"""Least share of the tokens of greedy answers that are the most likely ones when they are scored as prompts."""
EXPERTS = {"num_experts_per_tok": 4, "moe_intermediate_size": 128}
DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128}
SPACE = {"mamba_n_heads": 8, "mamba_d_head": 64, "mamba_d_state": 128, "mamba_n_groups": 1, "position_embedding_type": "nope"}
HYBRIDS = {
    "delta rules and experts": {
        "architectures": ["Qwen3_5MoeForCausalLM"],
        "model_type": "qwen3_5_moe_text",
        "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
        "num_experts": 32,
        "shared_expert_intermediate_size": 128,
        **DELTA,
        **EXPERTS,
    },
    "state spaces and experts": {
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "model_type": "granitemoehybrid",
        "layer_types": ["mamba", "attention", "mamba", "mamba"],
        "num_local_experts": 32,
        "shared_intermediate_size": 128,
        **SPACE,
        **EXPERTS,
    },
    "latents and groups of experts": {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "q_lora_rank": 128,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_routed_experts": 32,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "n_group": 4,
        "topk_group": 2,
        **EXPERTS,
    },
}
"""Small models with experts, recurrent layers and latents, in addition to the shape of a Llama."""
AHEAD_SECONDS = 10
"""Most seconds to wait for kernels that are compiled ahead."""
START_SECONDS = 40
"""Most seconds until a server is ready."""
END_SECONDS = 20
"""Most seconds until it has ended by itself."""


class Smoke:
    """The parts of the script, and the models that they share."""

    def __init__(self, run: common.Run, folder: Path) -> None:
        self.run = run
        shape, large = (576, 1536, 30, 9, 3, 49_152), (4096, 14336, 32, 32, 8, 128_256)
        if run.small:
            large = (3072, 8192, 28, 24, 8, 128_256)
        if run.dry:
            shape = large = (64, 96, 2, 4, 2, 512)
        self.config, self.vocabulary = common.llama(*shape, tie_word_embeddings=True, eos_token_id=0), large[-1]
        self.directory = common.write_model(folder / "default", self.config)
        self.large = common.write_model(folder / "large", common.llama(*large))
        self.sizes = {"max_num_seqs": 32, "max_num_batched_tokens": 2048, "num_kv_blocks": 4000, "max_model_len": 2048}
        self.answer, count = (6, 4) if run.dry else (48, 16)
        if run.dry:
            self.sizes = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "num_kv_blocks": 100, "max_model_len": 128}
        lengths = np.random.default_rng(1).integers(1, 30 if run.dry else 400, count)
        self.prompts = [serve.prompts(1, int(length), self.config["vocab_size"], seed)[0] for seed, length in enumerate(lengths)]
        self.llm = serve.Engine(run, self.directory, **self.sizes)
        self.ahead = Ahead(run, __file__, ("8B-bf16", "fp8", "8B-fp8"))

    def check(self, name: str, good: bool, found: str, allowed: str) -> None:
        """Writes a check."""
        self.run.row("Checks", {"check": name, "found": found, "allowed": allowed, "good": "yes" if good else NO})

    def graphs(self, llm: Any) -> None:
        """Checks that decode steps were captured as CUDA graphs."""
        decisions = {name: (value, why) for name, value, why in llm.info.decisions}
        value, why = decisions.get("CUDA graphs", ("none", "a CPU has none"))
        if value == "none":
            print(f"{'*' * 20} CUDA GRAPHS WERE NOT CAPTURED: {why} {'*' * 20}", flush=True)
        self.check("CUDA graphs", value != "none" or self.run.dry, value if value != "none" else f"none: {why}", "captured")

    def generate(self, llm: Any, prompts: list[list[int]] | None = None, **params: Any) -> list[Any]:
        """Answers to the prompts, greedy by default."""
        from chairlift import SamplingParams

        given = {"temperature": 0.0, "max_tokens": self.answer, "ignore_eos": True} | params
        return list(llm.generate(self.prompts if prompts is None else prompts, SamplingParams(**given), progress=False))

    def scores(self, llm: Any, prompts: list[list[int]]) -> list[list[Any]]:
        """A line with the most likely token for each token of the prompts but the first."""
        outputs = self.generate(llm, prompts, max_tokens=1, prompt_logprobs=1)
        return [output.prompt_logprobs[1:] for output in outputs]

    def check_greedy(self, llm: Any, what: str, prompts: list[list[int]], answers: list[list[int]]) -> None:
        """Scores answers as prompts: each token must be the most likely one, but for rounding, and most must be it indeed.

        How much rounding changes is measured: texts that are scored alone are computed by other products than texts in company. In 8 bits
        a number that is rounded the other way moves by a sixteenth, so only the share counts.
        """
        whole = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
        scored = self.scores(llm, whole)
        lines = [line for answer, found in zip(answers, scored, strict=True) for line in found[-len(answer) :]]
        alone = [line for text in whole[:ALONE] for line in self.scores(llm, [text])[0]]
        together = [line for found in scored[:ALONE] for line in found]
        rounding = max(abs(one.logprob - other.logprob) for one, other in zip(alone, together, strict=True))
        gap = max(line.top[0][1] - line.logprob for line in lines)
        in_8_bits = "8 bits" in what
        share, allowed = BEST_IN_8_BITS if in_8_bits else BEST, math.inf if in_8_bits else max(GAP, 2 * rounding)
        best = sum(line.rank == 1 for line in lines)
        found = f"{gap:.2g} below the best, {best} of {len(lines)} the best"
        # Written so that NaN fails.
        good = gap <= allowed and best >= share * len(lines)
        self.check(f"greedy answers, {what}", good, found, f"{allowed:.2g} below, {share:.0%} the best")

    def bf16(self) -> None:
        """Loads the default model's shape; its log-probabilities beside transformers', and its answers."""
        import torch

        llm = self.llm()
        self.graphs(llm)
        answers = [output.token_ids for output in self.generate(llm)]
        self.run.keep(answers=answers)
        self.check_greedy(llm, "bf16", self.prompts, answers)
        prompts = [prompt for prompt in self.prompts if len(prompt) > 1]
        mine = [np.array([line.logprob for line in lines]) for lines in self.scores(llm, prompts)]
        model = serve.same_weights(self.run, llm, self.config)

        def theirs(prompt: list[int]) -> np.ndarray:
            ids = torch.tensor(prompt, device=self.run.device)
            return model(ids[None]).logits[0, :-1].float().log_softmax(-1).gather(1, ids[1:, None])[:, 0].double().cpu().numpy()

        rounded = [theirs(prompt) for prompt in prompts]
        model.float()
        exact = [theirs(prompt) for prompt in prompts]
        error, allowed = (max(float(np.abs(a - b).max()) for a, b in zip(x, exact, strict=True)) for x in (mine, rounded))
        allowed = max(2 * allowed, 1e-3)
        self.check("log-probabilities of prompts", error <= allowed, f"{error:.2g} off", f"{allowed:.2g}: twice transformers' in bf16")

    def sampling(self) -> None:
        """Penalties, log-probabilities, seeds, and all filters."""
        llm = self.llm()
        ways = {
            "temperature": {"temperature": 1.0},
            "top-k, top-p": {"temperature": 0.8, "top_k": 40, "top_p": 0.9},
            "min-p": {"temperature": 1.2, "min_p": 0.02},
            "penalties": {"temperature": 0.7, "repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.2},
        }
        for name, way in ways.items():
            one, other = ([output.token_ids for output in self.generate(llm, **way, seed=3)] for _ in range(2))
            same = sum(a == b for a, b in zip(one, other, strict=True))
            inside = all(0 <= token < self.config["vocab_size"] for answer in one for token in answer)
            # Bits depend on the other rows of a step, and steps on the time that earlier ones took.
            self.check(f"{name}: equal seeds give equal answers", same >= 0.8 * len(one) and inside, f"{same} of {len(one)}", "80 %")
        few = self.prompts[:4]
        plain = self.generate(llm, few, logprobs=3)
        lines = [line for output in plain for line in output.logprobs]
        whole = [prompt + output.token_ids for prompt, output in zip(few, plain, strict=True)]
        again = [line for found in self.scores(llm, whole) for line in found[-self.answer :]]
        error = max(abs(one.logprob - other.logprob) for one, other in zip(lines, again, strict=True))
        self.check("log-probabilities of answers", error <= GAP, f"{error:.2g} off those of the same tokens as a prompt", f"{GAP}")
        penalised = self.generate(llm, few, repetition_penalty=2.0, presence_penalty=2.0, frequency_penalty=2.0)
        distinct = [sum(len(set(output.token_ids)) for output in outputs) for outputs in (plain, penalised)]
        good = distinct[0] <= distinct[1] >= 0.9 * len(few) * self.answer
        self.check("penalties: distinct tokens", good, f"{distinct[1]}, {distinct[0]} without", f"{0.9 * len(few) * self.answer:.0f}")

    def grammar(self) -> None:
        """Answers that a regular expression allows, beside others that are free."""
        llm = self.llm()
        pattern = "t[1-9]{2}[0-9]"
        outputs = self.generate(llm, self.prompts[:8], structured_output={"regex": pattern}, temperature=1.0, seed=1, ignore_eos=False)
        good = sum(re.fullmatch(pattern, output.text.strip()) is not None for output in outputs)
        self.check("answers as a grammar wants them", good == len(outputs), f"{good} of {len(outputs)}, such as {outputs[0].text!r}", "all")

    def eager(self) -> None:
        """Steps without graphs give the answers that steps with graphs give."""
        self.llm.close()
        llm = serve.load(self.run, self.directory, **self.sizes, enforce_eager=True)
        answers = [output.token_ids for output in self.generate(llm)]
        kept = self.run.results.values.get("answers", [])
        same = sum(one == other for one, other in zip(answers, kept, strict=False))
        self.check_greedy(llm, "without graphs", self.prompts, answers)
        # The same kernels compute both, in batches of the same sizes but for padding.
        self.check("answers without graphs", same >= 0.9 * len(answers), f"{same} of {len(answers)} as with graphs", "90 %")
        del llm
        common.free()

    def swap(self) -> None:
        """Sequences that are preempted go to host memory and back."""
        from chairlift.runner import build

        measured: list[int] = []
        usual = build.time_swap
        # Swapping is always chosen if it costs nothing.
        build.time_swap = lambda *given: measured.append(usual(*given)) or 0
        few = {"num_kv_blocks": 12 if self.run.dry else 140, "swap_space": 64 << 20 if self.run.dry else 1 << 30}
        try:
            llm = serve.load(self.run, self.directory, **self.sizes | few)
        finally:
            build.time_swap = usual
        prompts = [prompt[:100] for prompt in self.prompts]
        answer = 24 if self.run.dry else 150
        answers = [output.token_ids for output in self.generate(llm, prompts, max_tokens=answer)]
        swaps = llm.engine.stats().preemptions_swap
        self.check("sequences swapped", swaps > 0, f"{swaps}; a block there and back: {measured[0] / 1e3:.1f} us", "some")
        self.check_greedy(llm, "swapped", prompts, answers)
        del llm
        common.free()

    def large_bf16(self) -> None:
        """The 8B shape: graphs, a first number for steps and prompts, answers."""
        self._large({})

    def large_fp8(self) -> None:
        """The same in fp8."""
        self._large(self._eight_bits())

    def _eight_bits(self) -> dict[str, Any]:
        # torch on a CPU computes no products in fp8.
        return {"quantization": "int8"} if self.run.dry else {"quantization": "fp8", "kv_cache_dtype": "fp8"}

    def _large(self, more: dict[str, Any]) -> None:
        self.llm.close()
        # Others must not use the device while steps are timed.
        self.ahead.end(AHEAD_SECONDS)
        began = time.perf_counter()
        sizes = dict(self.sizes) if self.run.dry else {**self.sizes, "max_num_seqs": 64, "num_kv_blocks": 3000, "max_model_len": 4096}
        llm = serve.load(self.run, self.large, **sizes, **more)
        loaded = time.perf_counter() - began
        self.graphs(llm)
        vocabulary, name = self.vocabulary, "fp8" if more else "bf16"
        answers: list[list[int]] = []
        for batch, length, answer in ((2, 9, 4), (1, 60, 1)) if self.run.dry else ((64, 128, 64), (1, 128, 64), (1, 4000, 1)):
            prompts = serve.prompts(batch, length, vocabulary)
            serve.timed(llm, prompts, min(2, answer))
            with serve.Clock(llm) as clock:
                seconds, found = serve.timed(llm, serve.prompts(batch, length, vocabulary, 1), answer)
            steps = [whole for whole, _ in clock.decode(batch)]
            row = {"model": name, "loaded s": loaded, "batch": batch, "prompt": length, "answer": answer, "s": seconds}
            row["ms/step"] = statistics.median(steps) * 1e3 if steps else None
            row["tokens/s"] = batch * (answer if answer > 1 else length) / seconds
            self.run.row("The 8B shape", row)
            answers = answers or found
        batch, length = (2, 9) if self.run.dry else (64, 128)
        self.check_greedy(llm, f"8B, {'8 bits' if more else name}", serve.prompts(batch, length, vocabulary, 1), answers)
        del llm
        common.free()

    def fp8(self) -> None:
        """Weights and KV of 8 bits beside bf16."""
        prompts = [prompt for prompt in self.prompts if len(prompt) > 1]

        def lines(llm: Any) -> np.ndarray:
            return np.array([line.logprob for found in self.scores(llm, prompts) for line in found])

        exact = lines(self.llm())
        self.llm.close()
        llm = serve.load(self.run, self.directory, **self.sizes, **self._eight_bits())
        self.graphs(llm)
        found = lines(llm)
        error = float(np.abs(found - exact).mean() / np.abs(np.roll(found, 1) - exact).mean())
        self.check("log-probabilities in 8 bits", error <= UNLIKE, f"{error:.2g} of unrelated ones' difference to bf16", f"{UNLIKE}")
        self.check_greedy(llm, "8 bits", self.prompts, [output.token_ids for output in self.generate(llm)])
        del llm
        common.free()

    def hybrid(self) -> None:
        """Experts, recurrent layers and latents: greedy answers, and a prompt that begins with a saved state or with cached blocks."""
        self.llm.close()
        for name, config in HYBRIDS.items():
            shape = (64, 64, 2, 4, 2, 512) if self.run.dry else (256, 256, 4, 4, 2, 32_768)
            layers = {"layer_types": config["layer_types"][: shape[2]]} if self.run.dry and "layer_types" in config else {}
            directory = common.write_model(self.directory.parent / name, common.llama(*shape, **config | layers))
            llm = serve.load(self.run, directory, **self.sizes, enable_prefix_caching=True)
            self.graphs(llm)
            prompts = [[token % 500 for token in prompt] for prompt in self.prompts][: 2 if self.run.dry else None]
            answers = [output.token_ids for output in self.generate(llm, prompts)]
            whole = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
            lines = [line for answer, found in zip(answers, self.scores(llm, whole), strict=True) for line in found[-len(answer) :]]
            best = sum(line.rank == 1 for line in lines) / len(lines)
            # Rounding may choose another expert, which changes more than the last digits.
            self.check(f"greedy answers, {name}", best >= BEST, f"{best:.0%} the best when scored as prompts", f"{BEST:.0%}")
            turn = self.generate(llm, [max(whole, key=len)])[0]
            self.check(f"a prefix is found, {name}", turn.cached_tokens > 0, f"after {turn.cached_tokens} tokens", "some")
            del llm
            common.free()

    def mxfp4(self) -> None:
        """Experts in MXFP4 beside the same numbers in bf16."""
        self.llm.close()
        shape = (64, 64, 2, 4, 2, 512) if self.run.dry else (512, 512, 4, 8, 2, 32_768)
        config = mixtures.gpt_oss(*shape, num_local_experts=8, num_experts_per_tok=2)
        prompts = [[token % 500 for token in prompt] for prompt in self.prompts if len(prompt) > 1][: 2 if self.run.dry else None]
        scored = []
        for directory in mixtures.write_mxfp4(self.directory.parent / "mxfp4", config):
            llm = serve.load(self.run, directory, **self.sizes, load_format="auto")
            self.graphs(llm)
            answers = [output.token_ids for output in self.generate(llm, prompts)]
            whole = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
            lines = [line for answer, found in zip(answers, self.scores(llm, whole), strict=True) for line in found[-len(answer) :]]
            best = sum(line.rank == 1 for line in lines) / len(lines)
            what = f"greedy answers, gpt-oss, {directory.name}"
            self.check(what, best >= BEST, f"{best:.0%} the best when scored as prompts", f"{BEST:.0%}")
            scored.append(self.scores(llm, prompts))
            del llm
            common.free()
        gap, allowed = mixtures.logprob_gap(*scored), GAP / 3
        self.check("log-probabilities in MXFP4", gap <= allowed, f"{gap:.2g} off those of the same numbers in bf16", f"{allowed:.2g}")

    def restart(self) -> None:
        """A server whose engine is killed answers again, and answers the same."""
        self.llm.close()
        body = {"prompt": self.prompts[0], "max_tokens": 8, "temperature": 0, "ignore_eos": True}
        with server(self.run, self.directory, self.sizes) as (ask, engine):
            first, before = ask(body), engine()
            os.kill(before, signal.SIGKILL)
            began = time.perf_counter()
            _until(lambda: engine() not in (0, before))
            second = ask(body)
            seconds = time.perf_counter() - began
        self.check("answers after the engine was killed", first == second, f"{second!r:.60}, {seconds:.1f} s later", f"{first!r:.60}")


@contextmanager
def server(run: common.Run, directory: Path, sizes: dict[str, int]) -> Iterator[tuple[Callable[[dict[str, Any]], str], Callable[[], int]]]:
    """A server in a process of its own: a function that asks for a completion, and one that tells the engine's process, or 0."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in sizes.items()]
    flags += ["--device", run.device, "--load-format", "dummy", "--log-level", "warning", "--no-enable-prefix-caching"]
    command = [sys.executable, "-m", "chairlift", "serve", str(directory), "--port", str(port), *flags]
    path = os.pathsep.join((str(common.ROOT / "python"), os.environ.get("PYTHONPATH", "")))
    process = subprocess.Popen(command, env=os.environ | {"PYTHONPATH": path})

    def ask(body: dict[str, Any]) -> str:
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=START_SECONDS) as reply:
            return str(json.load(reply)["choices"][0]["text"])

    def ready() -> bool:
        if process.poll() is not None:
            raise RuntimeError(f"the server ended with {process.returncode}")
        try:
            return bool(urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=5).status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def engine() -> int:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        return int(children[0]) if children and ready() else 0

    try:
        _until(ready)
        yield ask, engine
    finally:
        try:
            process.terminate()
            process.wait(END_SECONDS)
        finally:  # also when the part's time is over
            process.kill()
            process.wait()


def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + START_SECONDS
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"took more than {START_SECONDS} s")
        time.sleep(0.05)


def main() -> int:
    """Runs the checks, the most telling first; 1 if one is wrong."""
    run = common.begin("smoke", __doc__ or "", 1.5)
    with tempfile.TemporaryDirectory() as name:
        smoke = Smoke(run, Path(name))
        run.part("bf16", smoke.bf16, most=60)
        run.part("8B-bf16", smoke.large_bf16, most=45)
        run.part("sampling", smoke.sampling, most=20)
        run.part("grammar", smoke.grammar, needs=5, most=15)
        run.part("fp8", smoke.fp8, most=30)
        run.part("swap", smoke.swap, needs=5, most=20)
        run.part("restart", smoke.restart, needs=15, most=90)
        run.part("eager", smoke.eager, needs=5, most=20)
        run.part("8B-fp8", smoke.large_fp8, most=45)
        run.part("hybrid", smoke.hybrid, needs=10, most=40)
        run.part("mxfp4", smoke.mxfp4, needs=10, most=40)
        smoke.llm.close()
        smoke.ahead.end()
    return run.finish()


if __name__ == "__main__":
    sys.exit(main())
