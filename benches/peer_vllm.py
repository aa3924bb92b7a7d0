"""Drives vLLM's own V1 scheduler and ours through the same steps in one process; writes benches/results/scheduler_vllm.md.

Needs no GPU and nothing compiled of vLLM. The environment that `serving.py setup --steps vllm` makes will do:

    PYTHONPATH=python PEERS/vllm/bin/python benches/peer_vllm.py

Otherwise vLLM's wheel lies unpacked and what it imports was put beside it, as HOW_TO says:
`python benches/peer_vllm.py --vllm UNPACKED_WHEEL --deps WHAT_IT_IMPORTS`. Takes about two minutes, and wants the machine for itself. Use
an interpreter built with optimizations: the peer is all Python.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from pages import machine, write
from peers.machine import Busy
from peers.results import DISTURBED
from scheduler import BLOCK_SIZE, CONTEXT, MAX_MODEL_LEN, MAX_TOKENS, SIZES, python_scheduler

from chairlift import SamplingParams
from chairlift.engine.engine_request import EngineRequest

STEPS, TURN = 256, 8
ROUNDS = 3
"""Times that every case is measured, other cases in between: a machine that others share changes its speed."""
PROMPT, OUTPUT = 512, 128
LONG, LONG_PROMPTS = 32_768, 30
STOP = 50_000
HOW_TO = (
    "`pip download --no-deps vllm==0.33.0`, unzip the wheel into VLLM; `pip install --no-deps --target DEPS aiohappyeyeballs aiohttp "
    "aiosignal apache-tvm-ffi==0.1.11 attrs cachetools cbor2 cloudpickle 'fastapi<0.137' frozenlist 'llguidance<1.8' msgspec multidict "
    "orjson oss-harmony partial-json-parser pillow propcache psutil py-cpuinfo pybase64 pyzmq sentencepiece tiktoken uvloop "
    "xgrammar==0.2.8 yarl`; then pass --vllm VLLM --deps DEPS"
)

Prompt = NDArray[np.int32]


def clock() -> float:
    """Microseconds."""
    return time.perf_counter() * 1e6


@dataclass(frozen=True)
class Case:
    """What a scheduler is set up for, and what arrives before each of its steps."""

    name: str
    running: int
    blocks: int
    arrivals: list[list[tuple[Prompt, int]]]
    max_model_len: int = MAX_MODEL_LEN


class Engine(Protocol):
    """A scheduler under measurement."""

    def add(self, prompt: Any, new: int) -> float:
        """Queues a request; the microseconds it took."""

    def step(self) -> tuple[float, int, int]:
        """Plans a step and takes in one token a sampled request; the microseconds it took, its tokens and its sequences."""

    def preemptions(self) -> int:
        """How many there have been."""

    def as_given(self, prompt: Prompt) -> Any:
        """A prompt in the form that `add` takes."""


class Ours:
    """`add`, then `plan` and `commit` with the outputs read, as the engine's loop calls them."""

    def __init__(self, case: Case) -> None:
        self.scheduler, self.buffers = python_scheduler(case.running, num_kv_blocks=case.blocks, max_model_len=case.max_model_len)
        self.sampled = np.full(MAX_TOKENS, 7, np.int32)
        self.tag = 0

    def add(self, prompt: Prompt, new: int) -> float:
        self.tag += 1
        request = EngineRequest(self.tag, prompt.tobytes(), SamplingParams(max_tokens=new, stop_token_ids=(STOP,)))
        start = clock()
        self.scheduler.add(request, 0)
        return clock() - start

    def step(self) -> tuple[float, int, int]:
        start = clock()
        plan = self.scheduler.plan(self.buffers, 0)
        if plan is None:
            return clock() - start, 0, 0
        outputs = self.scheduler.commit(plan, self.sampled, 0)
        read = outputs.tags, outputs.tokens, outputs.finishes
        elapsed = clock() - start
        assert read
        return elapsed, plan.num_tokens, plan.num_seqs

    def preemptions(self) -> int:
        return self.scheduler.stats()["preemptions"]

    def as_given(self, prompt: Prompt) -> Prompt:
        return prompt


class Theirs:
    """`Request` with its hashes and `add_request`, then `schedule` and `update_from_output`, as vLLM's EngineCore calls them."""

    def __init__(self, case: Case) -> None:
        import torch
        from vllm.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig
        from vllm.sampling_params import SamplingParams
        from vllm.utils.hashing import get_hash_fn_by_name
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.core.sched.scheduler import Scheduler
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
        from vllm.v1.outputs import ModelRunnerOutput
        from vllm.v1.request import Request
        from vllm.v1.structured_output import StructuredOutputManager

        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "config.json").write_text(json.dumps(MODEL))
            model = ModelConfig(model=folder, skip_tokenizer_init=True, dtype="float32", max_model_len=case.max_model_len)
        config = VllmConfig(
            model_config=model,
            cache_config=CacheConfig(block_size=BLOCK_SIZE, enable_prefix_caching=True),
            scheduler_config=SchedulerConfig(
                max_num_seqs=case.running,
                max_num_batched_tokens=MAX_TOKENS,
                max_model_len=case.max_model_len,
                is_encoder_decoder=False,
                async_scheduling=False,
            ),
        )
        cache, limits = config.cache_config, config.scheduler_config
        cache.num_gpu_blocks = case.blocks
        # What the platform or a default may have changed.
        switches = cache.enable_prefix_caching, limits.enable_chunked_prefill, limits.async_scheduling
        assert switches == (True, True, False), switches
        sizes = cache.block_size, limits.max_num_seqs, limits.max_num_batched_tokens
        assert sizes == (BLOCK_SIZE, case.running, MAX_TOKENS), sizes
        spec = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=1, head_size=1, dtype=torch.float32)
        kv_cache = KVCacheConfig(num_blocks=case.blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)])
        self.scheduler = Scheduler(
            vllm_config=config,
            kv_cache_config=kv_cache,
            structured_output_manager=StructuredOutputManager(config),
            block_size=BLOCK_SIZE,
        )
        hash_fn = get_hash_fn_by_name(cache.prefix_caching_hash_algo)
        init_none_hash(hash_fn)
        self.hasher = get_request_block_hasher(BLOCK_SIZE, hash_fn)
        self.request, self.params, self.output = Request, SamplingParams, ModelRunnerOutput
        self.tag = self.preempted = 0

    def add(self, prompt: list[int], new: int) -> float:
        self.tag += 1
        params = self.params(max_tokens=new, stop_token_ids=[STOP], ignore_eos=True)
        name = f"request-{self.tag}"
        start = clock()
        self.scheduler.add_request(self.request(name, prompt, params, None, block_hasher=self.hasher))
        return clock() - start

    def step(self) -> tuple[float, int, int]:
        start = clock()
        plan = self.scheduler.schedule()
        elapsed = clock() - start
        self.preempted += len(plan.preempted_req_ids or ())
        names = list(plan.num_scheduled_tokens)
        requests = self.scheduler.requests
        # A prompt that is not through samples nothing; `schedule` has advanced what is computed already.
        sampled = [[7] if requests[name].num_computed_tokens >= requests[name].num_tokens else [] for name in names]
        output = self.output(req_ids=names, req_id_to_index={name: i for i, name in enumerate(names)}, sampled_token_ids=sampled)
        start = clock()
        read = self.scheduler.update_from_output(plan, output)
        elapsed += clock() - start
        assert read is not None
        return elapsed, plan.total_num_scheduled_tokens, len(names)

    def preemptions(self) -> int:
        return self.preempted

    def as_given(self, prompt: Prompt) -> list[int]:
        tokens: list[int] = prompt.tolist()
        return tokens


MODEL = {
    "architectures": ["BenchForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_hidden_layers": 1,
    "vocab_size": STOP + 1,
    "max_position_embeddings": 2 * LONG,
}


def import_vllm(arguments: argparse.Namespace) -> str:
    """Makes vLLM importable, for a CPU, with a model that vLLM need not look for; its version."""
    os.environ |= {"VLLM_TARGET_DEVICE": "cpu", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"}
    if arguments.vllm is not None:
        sys.path.insert(0, str(arguments.vllm))
    if arguments.deps is not None:
        # Last, so that nothing in there replaces what is installed.
        sys.path.append(str(arguments.deps))
    try:
        import torch
        import vllm
        import vllm.v1.core.sched.scheduler
        import vllm.v1.structured_output
        from vllm.model_executor.models import ModelRegistry
    except ImportError as error:
        sys.exit(f"vLLM cannot be imported ({error}): {HOW_TO}")

    class BenchForCausalLM(torch.nn.Module):
        """What vLLM asks of a text generation model; never made."""

        def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
            super().__init__()

        def embed_input_ids(self, input_ids: Any) -> Any: ...

        def forward(self, input_ids: Any, positions: Any) -> Any: ...

        def compute_logits(self, hidden_states: Any) -> Any: ...

    logging.getLogger("vllm").setLevel(logging.ERROR)
    ModelRegistry.register_model("BenchForCausalLM", BenchForCausalLM)
    return str(vllm.__version__)


def prompts(lens: Iterable[int], seed: int) -> list[Prompt]:
    """Prompts that share nothing."""
    random = np.random.default_rng(seed)
    return [random.integers(0, STOP, size, dtype=np.int32) for size in lens]


def decode(running: int) -> Case:
    """All arrive at once; what follows their prefill is decoding only."""
    # Lengths differ, so that blocks fill up in every step and not in every sixteenth.
    arrivals = [(prompt, MAX_MODEL_LEN - CONTEXT) for prompt in prompts((CONTEXT - i % BLOCK_SIZE for i in range(running)), 0)]
    steps = -(-running * CONTEXT // MAX_TOKENS // TURN) * TURN + 32 + STEPS
    return Case(f"decode, {running} running", running, running * MAX_MODEL_LEN // BLOCK_SIZE + 1, [arrivals] + [[]] * (steps - 1))


def mixed(running: int) -> Case:
    """Arrivals at the pace at which others end, from the first step on; the cache has a fifth more than they need."""
    counts = [(step + 1) * running // OUTPUT - step * running // OUTPUT for step in range(2 * OUTPUT + STEPS)]
    stream = iter(prompts([PROMPT] * sum(counts), 1))
    arrivals = [[(next(stream), OUTPUT) for _ in range(count)] for count in counts]
    blocks = running * (PROMPT + OUTPUT) // BLOCK_SIZE * 6 // 5 + 1
    return Case(f"{running} running, {PROMPT} in / {OUTPUT} out", running, blocks, arrivals)


def engines(case: Case) -> tuple[Engine, Engine]:
    """Both, set up alike; what exists by then is out of the garbage collector's way, as in vLLM's own EngineCore."""
    both = Ours(case), Theirs(case)
    gc.unfreeze()
    gc.collect()
    gc.freeze()
    return both


@dataclass(frozen=True)
class Samples:
    """Microseconds of one case in one round, and their ratios turn by turn (of prompts, one by one)."""

    ours: Sequence[float]
    theirs: Sequence[float]
    ratios: Sequence[float]

    def ratio(self) -> float:
        """Of the medians."""
        return statistics.median(self.theirs) / statistics.median(self.ours)


def line(name: str, rounds: Sequence[Samples]) -> str:
    """Their and our microseconds over all rounds, the ratio of the medians, each round's, and the middle eight tenths of the ratios."""
    ours, theirs, ratios = (list(chain.from_iterable(getattr(one, field) for one in rounds)) for field in ("ours", "theirs", "ratios"))
    low, *_, high = statistics.quantiles(ratios, n=10, method="inclusive")
    cells = [
        name,
        f"{statistics.median(theirs):.0f}",
        f"{p99(theirs):.0f}",
        f"{statistics.median(ours):.1f}",
        f"{p99(ours):.1f}",
        f"{Samples(ours, theirs, ratios).ratio():.0f}",
        " / ".join(f"{one.ratio():.0f}" for one in rounds),
        f"{low:.0f} to {high:.0f}",
    ]
    return f"| {' | '.join(cells)} |"


def p99(times: Sequence[float]) -> float:
    """The value that one in a hundred exceeds."""
    return statistics.quantiles(times, n=100, method="inclusive")[-1]


def turn(engine: Engine, arrivals: list[list[tuple[Prompt, int]]]) -> tuple[list[float], list[tuple[int, int]]]:
    """A few steps of one scheduler: their microseconds, and their sizes in tokens and sequences."""
    times, sizes = [], []
    for arriving in arrivals:
        for prompt, new in arriving:
            engine.add(engine.as_given(prompt), new)
        elapsed, *size = engine.step()
        times.append(elapsed)
        sizes.append((size[0], size[1]))
    return times, sizes


def measure_steps(case: Case) -> Samples:
    """Both schedulers through one case, turn by turn, each step of theirs of our step's size."""
    both = engines(case)
    times: tuple[list[list[float]], ...] = ([], [])
    for at in range(0, len(case.arrivals), TURN):
        results = [turn(engine, case.arrivals[at : at + TURN]) for engine in both]
        assert results[0][1] == results[1][1], f"{case.name}: the steps differ"
        if at >= len(case.arrivals) - STEPS:
            assert all(seqs == case.running for _, seqs in results[0][1]), case.name
            for taken, (new, _) in zip(times, results, strict=True):
                taken.append(new)
    assert [engine.preemptions() for engine in both] == [0, 0]
    ratios = [statistics.median(theirs) / statistics.median(ours) for ours, theirs in zip(*times, strict=True)]
    ours, theirs = (list(chain.from_iterable(taken)) for taken in times)
    return Samples(ours, theirs, ratios)


def through_prompt(engine: Engine, prompt: Any) -> tuple[float, float, list[int]]:
    """Microseconds of adding a prompt, and of that and every step until its one token; the steps' tokens."""
    total = added = engine.add(prompt, 1)
    sizes: list[int] = []
    while True:
        elapsed, tokens, _ = engine.step()
        if not tokens:
            return added, total, sizes
        total += elapsed
        sizes.append(tokens)


def measure_prompts() -> dict[str, Samples]:
    """A long prompt added, computed to its token, and once more out of the prefix cache."""
    both = engines(Case("", 1, 2 * LONG // BLOCK_SIZE, [], LONG + MAX_MODEL_LEN))
    samples: tuple[list[tuple[float, ...]], ...] = ([], [])
    for prompt in prompts([LONG] * LONG_PROMPTS, 2):
        for engine, taken in zip(both, samples, strict=True):
            given = engine.as_given(prompt)
            added, cold, chunks = through_prompt(engine, given)
            _, warm, rest = through_prompt(engine, given)
            # Found again, we copy the last block and compute one token, where vLLM computes the whole block.
            assert (chunks, rest) == ([MAX_TOKENS] * (LONG // MAX_TOKENS), [BLOCK_SIZE if engine is both[1] else 1])
            taken.append((added, cold, warm))
    names = ("added", f"added, and {LONG // MAX_TOKENS} steps to its token", "added, found in the prefix cache, and 1 step")
    found = {}
    for name, ours, theirs in zip(names, *(zip(*taken, strict=True) for taken in samples), strict=True):
        ratios = [their / our for our, their in zip(ours, theirs, strict=True)]
        found[f"{LONG} tokens {name}"] = Samples(ours, theirs, ratios)
    return found


def measure() -> dict[str, list[Samples]]:
    """Every case in every round, by name."""
    found: dict[str, list[Samples]] = {}
    for _ in range(ROUNDS):
        cases = [make(running) for make in (decode, mixed) for running in SIZES]
        for name, samples in ({case.name: measure_steps(case) for case in cases} | measure_prompts()).items():
            found.setdefault(name, []).append(samples)
    return found


def main() -> None:
    """Runs everything and writes the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", type=Path, help="a folder that holds the package vllm")
    parser.add_argument("--deps", type=Path, help="a folder that holds what vLLM imports and is not installed")
    version = import_vllm(parser.parse_args())
    before = Busy.now(session=-1)  # everything but this process is others
    rows = [line(name, rounds) for name, rounds in measure().items()]
    others = Busy.now(session=-1).shares(before)["others"]
    lines = [
        "# A scheduling decision beside vLLM's",
        "",
        f"{time.strftime('%Y-%m-%d')}, {machine()}; vLLM {version}. Microseconds,",
        f"in one process and one interpreter. The two take turns of {TURN} steps, so that what else the machine does meets both;",
        f"{ROUNDS} rounds of all cases, {STEPS} steps a case and {LONG_PROMPTS} long prompts in each.",
        f"Blocks of {BLOCK_SIZE}, {MAX_TOKENS} tokens a step at most, prefix cache on.",
        "Each step but the table's last is checked to be of one size on both sides, in tokens and sequences; nothing is preempted.",
        "The last column is of the ratios turn by turn (of the prompts, one by one): a busy machine slows vLLM more than ours, a quiet",
        f"one is nearer its lower end. Others took {others:.1%} of the CPU{': too much, measure again' if others > DISTURBED else ''}.",
        "",
        "| case | vLLM p50 | vLLM p99 | ours p50 | ours p99 | ratio of p50 | each round | 10 to 90 % |",
        "|---|---|---|---|---|---|---|---|",
        *rows,
        "",
        "Counted for vLLM: `schedule` and `update_from_output` of its synchronous V1 scheduler, statistics off; not the making of the",
        "`ModelRunnerOutput`, nor the worker's own preparation of the step's arrays. Counted for ours: `plan`, which fills those arrays,",
        "`commit`, and reading the outputs, all called from Python. Garbage collection is on; what exists before the first step is frozen,",
        "as vLLM's engine does it. No model runs in between. This is CPU time, and no latency that a client sees: vLLM's default, async",
        "scheduling, hides most of its part behind the device's step where that is longer.",
        "",
        f"`decode`: contexts of {CONTEXT} tokens at the start. `{PROMPT} in / {OUTPUT} out`: a request arrives as another ends, and its",
        "prompt is computed beside the decodes. The cache is a fifth larger than what runs, so that blocks are evicted all the time;",
        "no prompt repeats. Adding a request is not counted here.",
        "",
        f"`{LONG} tokens`: adding is vLLM's `Request`, which names the prompt's blocks with SHA-256, and `add_request`. Ours is `add`,",
        "which copies the prompt and leaves the naming to the steps, so only the lines with steps in them compare like with like. Ours",
        "names blocks with 64 bits and compares their tokens at a hit; vLLM trusts the name. A prompt found again costs vLLM a step of a",
        "whole block, and us one of one token.",
    ]
    write("scheduler_vllm.md", lines)


if __name__ == "__main__":
    main()
