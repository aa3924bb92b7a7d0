"""Claims of papers beside what the simulator finds. Writes benches/results/papers.md, the same on any machine.

    python benches/papers.py agents.jsonl.gz        a quarter of an hour

The file is `agents.jsonl.gz` of callanjfox/kv-cache-tester (Apache-2.0) as described in docs/capacity.md; the other traces are in
tests/data/traces. A claim is here if the simulator can test it: it has no kernels, no network and no model, and its step times come from
a roofline or from constants. The papers' figures are those of their abstracts, unless another place is named.
"""

from __future__ import annotations

import heapq
import math
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "support"))

from continuum import Constant, Engine, Figures, Keeps, Lifetimes, common_blocks
from routers import conversations
from traces import ARENA, CODE, CONV, mooncake, workload

from chairlift import Candidate, Policy
from chairlift.bench.sessions import RecordedSession, read_sessions
from chairlift.config import EngineConfig
from chairlift.models.config import ModelConfig
from chairlift.sim.devices import DEVICES
from chairlift.sim.policy import use
from chairlift.sim.result import Result
from chairlift.sim.run import machine, run, simulate
from chairlift.sim.sessions import simulate_sessions
from chairlift.sim.shapes import KNOWN
from chairlift.sim.steps import StepTime
from chairlift.sim.workload import Workload

RESULT = Path(__file__).parent / "results" / "papers.md"
REQUESTS = 1000
PRECISION = 1.05
"""The largest rates are exact to this factor."""


class Claim(NamedTuple):
    """A paper's claim, our figure and what differs."""

    paper: str
    claim: str
    ours: str
    differs: str


def largest_rate(trace: Workload, meets: Callable[[Result], bool], model: str, device: str, **settings: Any) -> float:
    """The largest scale of the trace's rate that meets a target; 0 if none above a thousandth does."""
    config = EngineConfig(**settings)
    numbers, steps = machine(model, device, config)
    low, high = 0.001, 64.0
    if not meets(run(trace.faster(low), numbers, steps)):
        return 0.0
    while high > PRECISION * low:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if meets(run(trace.faster(middle), numbers, steps)) else (low, middle)
    return low


def normalised(result: Result) -> float:
    """The median of end-to-end latency for each output token, in seconds."""
    done = result.finished
    return float(np.median((done["ended"] - done["arrived"]) / done["output_tokens"])) / 1e6


def p99(seconds: NDArray[np.float64]) -> float:
    """The 99th percentile."""
    return float(np.percentile(seconds, 99))


def orca() -> Claim:
    """Joining at every step against whole batches, on lengths as Orca draws them."""
    dice = np.random.default_rng(0)
    arrivals = np.cumsum(dice.exponential(1e6 / 10, REQUESTS)).astype(np.int64)
    prompts, outputs = dice.integers(32, 513, REQUESTS), dice.integers(1, 129, REQUESTS)
    trace = workload(CONV).first(REQUESTS).with_(arrival_us=arrivals, prompt=prompts, output=outputs, most=outputs, names=0)
    common: dict[str, Any] = {"max_num_seqs": 32, "enable_prefix_caching": False, "kv_reservation": "max-tokens"}
    alone = normalised(simulate(trace.faster(0.001), model="Llama-3.1-8B", device="A100", **common))

    def rate(**settings: Any) -> float:
        return largest_rate(trace, lambda result: normalised(result) <= 2 * alone, "Llama-3.1-8B", "A100", **common, **settings)

    joined, whole = rate(), max(rate(batching="dynamic", static_batch_size=size, batch_timeout_ms=1.0) for size in (4, 8, 16, 32))
    return Claim(
        "Orca (Yu et al., OSDI'22)",
        "36.9 times FasterTransformer's throughput at the same latency, GPT-3 175B",
        f"{joined / whole:.1f} times the rate of whole batches (the best of four sizes)",
        "Prompts of 32 to 512 tokens and outputs of 1 to 128, drawn evenly. Target: median latency for an output token at most twice that "
        "of an idle machine. An 8B model on a modelled A100, where both schedulers have the same kernels: the paper compares two "
        "implementations, on several GPUs.",
    )


def vllm() -> Claim:
    """Blocks on demand against memory reserved for the longest sequence."""
    trace = workload(CONV).first(REQUESTS)
    prompts = np.minimum(trace.column("prompt"), 1500)
    outputs = np.minimum(trace.column("output"), 2048 - prompts)
    trace = trace.with_(prompt=prompts, output=outputs, most=2048 - prompts, names=0)
    sizes: dict[str, Any] = {"num_kv_blocks": 1001, "max_num_seqs": 256, "max_model_len": 2048, "enable_prefix_caching": False}
    alone = normalised(simulate(trace.faster(0.001), model="Llama-3.1-8B", device="A100", **sizes))

    def rate(reservation: str) -> float:
        target = 2 * alone
        return largest_rate(trace, lambda one: normalised(one) <= target, "Llama-3.1-8B", "A100", kv_reservation=reservation, **sizes)

    paged, reserved = rate("watermark"), rate("max-tokens")
    return Claim(
        "vLLM (Kwon et al., SOSP'23)",
        "2 to 4 times the throughput of FasterTransformer and Orca at the same latency",
        f"{paged / reserved:.1f} times the rate of a scheduler that reserves 2,048 tokens for each sequence",
        "Azure's conversations of 2023, cut to 2,048 tokens, another trace than the paper's; KV for 16,000 tokens. Both schedulers join "
        "sequences at every step and have the same kernels. Same target as above.",
    )


def sarathi() -> list[Claim]:
    """Chunked prompts against whole ones, at targets for tokens and queue."""

    def meets(result: Result) -> bool:
        queued = float(np.median(result.requests["started"] - result.requests["arrived"])) / 1e6
        return (result.itl(99) or 0.0) <= 0.1 and queued <= 2

    def rate(trace: Workload, budget: int) -> float:
        sizes = {"max_num_batched_tokens": budget, "max_num_seqs": 128, "enable_prefix_caching": False}
        return largest_rate(trace, meets, "Mistral-7B", "A100", **sizes)

    claims = []
    for name, path in (("conversations", CONV), ("code", CODE)):
        trace = workload(path).first(REQUESTS)
        chunked, whole = rate(trace, 512), max(rate(trace, budget) for budget in (4096, 8192, 16384))
        claims.append(
            Claim(
                "Sarathi-Serve (Agrawal et al., OSDI'24)",
                "2.6 times vLLM's capacity, Mistral-7B on one A100",
                f"{chunked / whole:.1f} times, Azure's {name}",
                "99 of 100 tokens within 100 ms, half of the requests started within 2 s. Chunks of 512 tokens against the best of three "
                "budgets that cut no usual prompt. vLLM of then computed prompts before decodes; ours decodes beside whole prompts, and a "
                "token waits as long. Other traces than the paper's: a prompt of Azure's code is longer for its output.",
            )
        )
    return claims


def vtc() -> Claim:
    """Service of clients that all have requests waiting."""
    trace, blocks = workload(ARENA).with_(arrival_us=0), 640
    bound = 2 * max(int(trace.column("prompt").max()), 2 * 16 * blocks)
    limits = {"num_kv_blocks": 1 + blocks, "block_size": 16, "max_num_batched_tokens": 10**6, "max_model_len": 10**5, "max_num_seqs": 64}
    gaps = {}
    for policy in ("vtc", "fair", "fcfs"):
        settings = limits | {"watermark": 32, "enable_prefix_caching": False, "scheduling_policy": policy}
        gaps[policy] = run(trace, settings, StepTime.constant(10_000)).fairness()["service_gap"] or 0.0
    return Claim(
        "VTC (Sheng et al., OSDI'24)",
        f"two backlogged clients differ by at most 2 max(w_p L, w_q M) (theorem 4.4): here {bound:,}",
        ", ".join(f"{policy} {gap:,.0f}" for policy, gap in gaps.items()),
        "27 clients of Chatbot Arena, all requests at once, KV for 10,240 tokens, constant steps. The gap is looked at in windows of a "
        "second. The bound says nothing of fcfs.",
    )


class FirstTokens(NamedTuple):
    """Seconds for all requests of Chatbot Arena's clients, and medians of seconds to a first token.

    `quiet` is of the 14 clients with the fewest requests (194 in all), `busy` of the 2 with the most (558).
    """

    span: float
    everyone: float
    quiet: float
    busy: float

    @classmethod
    def of(cls, result: Result) -> FirstTokens:
        """Those of a simulation in which every request got a first token."""
        clients, seconds = result.labels("tenant"), result.ttft()
        names, counts = np.unique(clients, return_counts=True)
        by_requests = names[np.argsort(counts, kind="stable")]
        groups = (by_requests, by_requests[:14], by_requests[-2:])
        return cls(result.span, *(float(np.median(seconds[np.isin(clients, group)])) for group in groups))

    def __str__(self) -> str:
        """The figures in words."""
        medians = f"median first token {self.everyone:.2f} s, of quiet clients {self.quiet:.2f} s, of busy ones {self.busy:.2f} s"
        return f"{self.span:.0f} s for all requests, {medians}"


MEASURED = {"fcfs": FirstTokens(757.7, 39.07, 36.5, 44.95), "vtc": FirstTokens(755.9, 4.91, 0.95, 108.63)}
"""Of `fair_bench/{FCFS,VTC}/all_results_real.jsonl` in VTC's artifact, github.com/Ying1123/VTC-artifact at 192c2e2."""


def vtc_seconds() -> Claim:
    """First tokens and throughput of clients at the times of the trace, beside what VTC's authors measured with the same requests."""
    trace = workload(ARENA)
    # Admission knew the lengths of outputs.
    trace = trace.with_(most=trace.column("output"), predicted=trace.column("output"))
    shape = {"num_key_value_heads": 32, "intermediate_size": 11008, "vocab_size": 32000, "max_position_embeddings": 4096}
    steps = DEVICES["a10g"].step_time(ModelConfig.parse(KNOWN["Llama-3.1-8B"] | shape), dtype="float16", kv="float16")
    settings: dict[str, Any] = {"model": "Llama-3.1-8B", "device": "A10G", "enable_prefix_caching": False, "kv_reservation": "peak"}
    settings |= {"num_kv_blocks": 626, "block_size": 16, "max_num_seqs": 512, "max_model_len": 4096}

    def result(policy: str, factor: float) -> FirstTokens:
        return FirstTokens.of(simulate(trace, step_time=steps.times(factor), scheduling_policy=policy, **settings))

    low, high = 0.5, 8.0
    while high > 1.001 * low:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if result("fcfs", middle).span < MEASURED["fcfs"].span else (low, middle)
    return Claim(
        "VTC (Sheng et al., OSDI'24), 27 clients on an A10G",
        f"measured by its authors: {'; '.join(f'{policy} {figures}' for policy, figures in MEASURED.items())}",
        "; ".join(f"{policy} {result(policy, low)}" for policy in MEASURED),
        "The figures are those of the files in the paper's artifact. The same 1,500 requests of Chatbot Arena at the same times, "
        "Llama-2-7B in float16, KV for 10,000 tokens, admission by the known lengths of outputs. Steps take "
        f"{low:.2f} times a roofline's time, so that fcfs takes as long as it did there; all else follows. That engine computes prompts "
        "in steps of their own. Quiet clients are the 14 with the fewest requests, busy ones the 2 with the most.",
    )


class Boost(Policy):
    """the earliest arrival, of which small requests get an earlier one"""

    cache = "when_queued"
    gamma = 0.0
    """The decay rate of the response time's tail, for each microsecond."""

    def rank(self, request: Candidate) -> int:
        """`arrived` minus the boost of Yu and Scully, Strongly Tail-Optimal Scheduling in the Light-Tailed M/G/1 (2404.08826)."""
        size = max(1e-9, self.gamma * request.work_left)
        return max(0, request.arrived + 10**12 + round(math.log1p(-math.exp(-size)) / self.gamma))


def tail() -> list[Claim]:
    """The tail of latencies under orders by size with perfect lengths."""
    claims = []
    for name, path in (("conversations", CONV), ("code", CODE)):
        trace = workload(path).first(4 * REQUESTS)
        # Output lengths are predicted perfectly.
        trace = trace.with_(predicted=trace.column("output"))
        limits: dict[str, Any] = {"max_num_seqs": 32, "enable_prefix_caching": False}
        numbers, steps = machine("Llama-3.1-8B", "L4", EngineConfig(**limits))
        loaded = trace.faster(largest_rate(trace, lambda one: p99(one.ttft()) <= 20, "Llama-3.1-8B", "L4", **limits))
        found = {policy: run(loaded, numbers | {"scheduling_policy": policy}, steps) for policy in ("shortest", "fcfs")}
        # The decay rate that suits this load, of a few: the papers choose theirs by the arrivals' and the sizes' distributions.
        boosted = []
        for seconds in (1, 3, 10, 30, 100):
            Boost.gamma = 1e-6 / seconds
            boosted.append(run(loaded, numbers | {"scheduling_policy": use(Boost())}, steps))
        found["boost"] = min(boosted, key=lambda one: p99(one.e2e()))
        srpt = found.pop("shortest")
        shown = "; ".join(
            f"{policy} {p99(one.e2e()) / p99(srpt.e2e()) - 1:+.0%}, TTFT {p99(one.ttft()) / p99(srpt.ttft()) - 1:+.0%}"
            for policy, one in found.items()
        )
        claims.append(
            Claim(
                "Beyond Prediction: Tail-Aware Scheduling (2606.18431, ICML'26)",
                "P99 of the time to the last token 35 to 50 % lower than SRPT with perfect lengths, P99 of TTFT 34 to 47 % lower, on "
                "Azure's traces",
                f"P99 against `shortest`, Azure's {name}: {shown}",
                "`shortest` is SRPT with perfect lengths here. The abstract does not give the paper's rule, and no other text of it was "
                "found: `boost` is gamma-Boost (2404.08826), written as a policy in Python in benches/papers.py, with the best of five "
                "gammas for this trace. 4,000 requests, Llama-3.1-8B on a modelled L4, at the largest rate at which fcfs keeps P99 of TTFT "
                "within 20 s. The gain is that of arrival order, the default here, in which long requests do not wait for all short ones.",
            )
        )
    return claims


def lmetric() -> list[Claim]:
    """The router's product of uncached tokens and requests against the least loaded engine."""
    claims = []
    for name, trace, scale in (("made conversations", conversations(), 1.5), ("Mooncake's conversations", mooncake().first(4000), 0.6)):
        means = {}
        for routing in ("least-loaded", "lmetric", "predicted"):
            result = simulate(trace, model="Llama-3.1-8B", device="H100", replicas=4, routing=routing, rate_scale=scale)
            means[routing] = float(result.ttft().mean()), float(result.tpot().mean())
        ttft, tpot = means.pop("least-loaded")
        shown = "; ".join(f"{routing}: TTFT {one / ttft - 1:+.0%}, TPOT {other / tpot - 1:+.0%}" for routing, (one, other) in means.items())
        claims.append(
            Claim(
                "LMetric (2603.15202)",
                "TTFT up to 92 % and TPOT up to 21 % lower than vLLM's router",
                f"means against the least loaded, {name}: {shown}",
                "Four modelled H100s with an 8B model. The paper compares with the router of vLLM, ours with the least loaded engine. "
                "`predicted` is the default here.",
            )
        )
    return claims


class Turn(NamedTuple):
    """A turn of a conversation: its prompt, of which the first tokens are those of the turn before."""

    time: float
    conversation: int
    prompt: int
    shared: int


def turns_of(path: str, users: int) -> list[Turn]:
    """The turns of agents' main threads at times that do not depend on a server: ten seconds for each answer."""
    dice, sessions = np.random.default_rng(1), read_sessions(path, 200_000)
    free = sorted(float(at) for at in dice.uniform(0, 60, users))
    turns = []
    for conversation, number in enumerate(dice.permutation(len(sessions))):
        session, time, before = sessions[number], heapq.heappop(free), list[int]()
        for turn in session.threads[0]:
            time += min(turn.think, 60.0)
            blocks = session.blocks(turn)
            turns.append(Turn(time, conversation, turn.prompt_tokens, common_blocks(before, blocks) * session.block))
            before, time = blocks, time + 10.0
        heapq.heappush(free, time + float(dice.uniform(5, 60)))
    return sorted(turns)


def uncached(turns: list[Turn], capacity: int, threshold: int | None = None, growth: int = 0) -> NDArray[np.int64]:
    """The tokens that each turn computes when conversations lose the ends of their contexts, the least recently used first.

    With a `threshold` each first loses only as much as lets its next turn, which adds `growth`, compute at most `threshold` tokens.
    """
    cached, lengths, found, used = dict[int, int](), dict[int, int](), [], 0
    for _, conversation, prompt, shared in turns:
        kept = cached.pop(conversation, 0)
        found.append(prompt - min(kept, shared))
        used += prompt - kept
        floors: list[Callable[[int], int]] = [lambda other: 0]
        if threshold is not None:
            floors.insert(0, lambda other, most=threshold: max(0, lengths[other] + growth - most))  # type: ignore[misc]
        for floor in floors:
            for other in list(cached) if used > capacity else ():
                lost = min(used - capacity, max(0, cached[other] - floor(other)))
                cached[other] -= lost
                used -= lost
                if not cached[other]:
                    del cached[other]
                if used <= capacity:
                    break
        cached[conversation], lengths[conversation] = prompt, prompt
    return np.array(found)


def tail_lru(path: str) -> Claim:
    """Eviction for the tail of latencies against LRU, as the paper simulates it: tokens that a turn computes."""
    turns = turns_of(path, 32)
    turns = turns[: len(turns) * 3 // 4]  # at the end fewer users have sessions
    everything = uncached(turns, 10**12)
    contexts = {turn.conversation: turn.prompt for turn in turns}
    whole = 32 * mean(contexts.values())
    shown = []
    for share in (0.5, 0.75, 1.0):
        lru = uncached(turns, int(share * whole))
        tried = [uncached(turns, int(share * whole), threshold, int(everything.mean())) for threshold in (4000, 16_000, 64_000)]
        best = min(tried, key=lambda one: float(np.percentile(one, 95)))
        changes = [f"P{percent} {np.percentile(best, percent) / np.percentile(lru, percent) - 1:+.0%}" for percent in (50, 90, 95)]
        shown.append(f"KV for {share:.0%}: {', '.join(changes)}, mean {best.mean() / lru.mean() - 1:+.0%}")
    return Claim(
        "Tail-Optimized LRU (2510.15152)",
        "P90 of TTFT up to 27.5 % and P95 up to 23.9 % lower than LRU's, on WildChat",
        f"tokens that a turn computes, against LRU: {'; '.join(shown)}",
        "Recorded coding agents, 32 at a time, in place of WildChat: contexts are tens of times longer. The best of three thresholds for "
        "P95; times do not depend on the cache. It is not a policy here: it shortens the tail, but the usual turn and the machine compute "
        "more. Sessions take turns instead (below).",
    )


CONTINUUM = (
    "Continuum / CacheTTL (2511.02230)",
    "mean completion time of agents 1.12 to 3.66 times better, 1.10 to 3.22 times the throughput (v2); over 8 times better (v4)",
)
AGENTS = (
    "32 recorded sessions of coding agents in a closed loop, an 8B model on an H100. Completion is the mean of times over those alone. "
)
SEEDS, PARTS = (1, 2), (0.5, 0.75)


def turns(sessions: list[RecordedSession]) -> tuple[Claim, list[tuple[int, float]]]:
    """Turns of sessions against LRU. Returns the tokens of KV and LRU's requests a second for each part of the contexts, too."""
    step = StepTime(((0.0, 12_000.0), (1.0, 12_040.0)), decode_seq=360.0, prefill_pair=1e-3)
    common: dict[str, Any] = {"model": "Llama-3.1-8B", "device": "H100", "step_time": step, "block_size": 64, "max_model_len": 200_000}
    common |= {"max_num_batched_tokens": 2048, "max_num_seqs": 256}

    def figures(turns: str, blocks: int) -> dict[str, float]:
        settings = common | {"num_kv_blocks": blocks, "session_turns": turns}
        runs = [simulate_sessions(sessions, 32, seed=seed, **settings).figures() for seed in SEEDS]
        names = ("slowdown_mean", "requests_per_s", "longest_wait_s", "context_tokens")
        return {name: mean(one[name] or 0.0 for one in runs) for name in names}

    whole = figures("off", 10**6)["context_tokens"]
    shown, served = list[str](), list[tuple[int, float]]()
    for part in PARTS:
        blocks = int(part * whole / 64)
        lru, named = figures("off", blocks), figures("named", blocks)
        served.append((64 * blocks, lru["requests_per_s"]))
        shown.append(
            f"KV for {part:.0%}: completion {lru['slowdown_mean'] / named['slowdown_mean']:.1f} times better, "
            f"{named['requests_per_s'] / lru['requests_per_s']:.1f} times the requests, longest wait "
            f"{named['longest_wait_s'] / 60:.0f} min (LRU's {lru['longest_wait_s'] / 60:.0f} min)"
        )
    differs = f"{AGENTS}The scheduler's default, in the place of the paper's rule."
    return Claim(*CONTINUUM, f"turns of sessions, against LRU: {'; '.join(shown)}", differs), served


def times_to_live(sessions: list[RecordedSession], served: list[tuple[int, float]]) -> Claim:
    """Continuum's rule against LRU, with KV for so many tokens, with which the scheduler's LRU serves so many requests a second."""
    times = Lifetimes.of(sessions)
    rules: dict[str, Keeps] = {"its rule": times, "with memoryfulness 1": replace(times, memoryfulness=1.0), "always 60 s": Constant(60.0)}
    shown, compared = list[str](), list[str]()

    def figures(tokens: int, rule: Keeps | None) -> Figures:
        return Figures(*map(mean, zip(*(Engine(sessions, 32, tokens, seed, rule).run() for seed in SEEDS), strict=True)))

    for part, (tokens, requests) in zip(PARTS, served, strict=True):
        lru = figures(tokens, None)
        compared.append(f"{lru.requests / requests:.2f}")
        for name, rule in rules.items():
            kept = figures(tokens, rule)
            shown.append(
                f"KV for {part:.0%}, {name}: completion {lru.slowdown / kept.slowdown:.1f} times better, "
                f"{kept.requests / lru.requests:.1f} times the requests, longest wait {kept.longest / 60:.0f} min"
            )
    return Claim(
        *CONTINUUM,
        f"against LRU: {'; '.join(shown)}",
        f"{AGENTS}A context is kept after a call of a tool for the time that maximises P(tool ends in time) x (mean wait x memoryfulness + "
        "reload) - time; the trace has no names of tools. The scheduler has no such rule, so this is a model of an engine in "
        f"benches/continuum.py, whose LRU serves {' and '.join(compared)} times the requests of the scheduler's. It is not a policy here: "
        f"half of these tools take over {np.median(times.times):.0f} s (the paper's mean is 1 to 2 s), about as long as a reload, and the "
        f"turns that a session had do not tell how many are left (memoryfulness {times.memoryfulness:.2f}), so by the rule hardly any "
        "context is worth keeping. Longer times serve more because sessions then run to their end, and the others wait without a bound.",
    )


def main() -> None:
    """Tests all claims and writes the table."""
    path = sys.argv[1]
    sessions = read_sessions(path, 200_000)
    ours, served = turns(sessions)
    claims = [orca(), vllm(), *sarathi(), vtc(), vtc_seconds(), *tail(), *lmetric(), tail_lru(path)]
    claims += [times_to_live(sessions, served), ours]
    rows = "\n".join(f"| {' | '.join(claim)} |" for claim in claims)
    text = f"""# Papers

Written by `benches/papers.py`; the same on any machine. Rates are the largest that meet a target, to {PRECISION - 1:.0%}.

| paper | its figure | ours, simulated | what differs |
|---|---|---|---|
{rows}
"""
    RESULT.write_text(text)
    print(rows)


if __name__ == "__main__":
    main()
