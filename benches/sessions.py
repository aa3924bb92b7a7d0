"""Users that run recorded sessions of agents with a KV cache for a part of their contexts, simulated: with turns of sessions, and without.

Writes benches/results/sessions.md, row by row.

    python benches/sessions.py agents.jsonl.gz agents_small.jsonl.gz        twenty minutes

The first file is `agents.jsonl.gz` of callanjfox/kv-cache-tester (Apache-2.0) as described in docs/capacity.md. The working set is the
mean of the tokens of all live contexts with a cache that loses nothing. The modelled machine is an 8B model on an H100: 12 ms a step,
0.4 ms for each decode, 40 us for each prompt token and 1 ns for each pair of a prompt token and a token before it. The rule of turns was
chosen with every second session, and the other half is held out. The second file has short sessions, for a model of a billion weights on
two cores.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from statistics import mean
from typing import Any

from chairlift.bench.sessions import RecordedSession, read_sessions
from chairlift.sim.sessions import simulate_sessions
from chairlift.sim.steps import StepTime

RESULT = Path(__file__).parent / "results" / "sessions.md"
STEP = StepTime(((0.0, 12_000.0), (1.0, 12_040.0)), decode_seq=360.0, prefill_pair=1e-3)
LONGEST, BLOCK, PROCESSES = 200_000, 64, 4
CASES = (("held out", 32, 60), ("all", 32, 60), ("all", 32, 600), ("all", 16, 60), ("all", 64, 60))
PARTS, SEEDS = (0.5, 0.75, 1.0), (1, 2, 3)
RULES: dict[str, dict[str, Any]] = {
    "turns": {"session_turns": "named"},
    "LRU": {"session_turns": "off"},
    "fewest uncached": {"session_turns": "off", "scheduling_policy": "prefix", "queue_ageing_ms": 600_000.0},
}
HOST_CASE, HOST_PART = ("all", 32, 60), 0.5
HOST_RULES: dict[str, dict[str, Any]] = {f"turns, {gb} GB": {"session_turns": "named", "swap_space": gb << 30} for gb in (100, 200, 400)}
SMALL_CASE = ("short, on a CPU", 8, 3.75)
SMALL_RULES: dict[str, dict[str, Any]] = {"turns, disk": {"session_turns": "named", "disk": 1e9}}
COLUMNS = (
    ("requests/s", "requests_per_s", "{:.3f}"),
    ("cached", "cached_share", "{:.0%}"),
    ("TTFT p50, s", "ttft_p50_s", "{:.1f}"),
    ("p99", "ttft_p99_s", "{:.0f}"),
    ("longest wait of a turn", "longest_wait_s", "{:.0f}"),
    ("slowdown, mean", "slowdown_mean", "{:.1f}"),
    ("worst", "slowdown_worst", "{:.1f}"),
)
_sessions: dict[str, list[RecordedSession]] = {}


def run(job: tuple[str, int, float, int, str, int]) -> dict[str, float | None]:
    """The figures of one simulation: sessions, users, longest time between answer and request, blocks, rule and seed."""
    sessions, users, longest_think, blocks, rule, seed = job
    how: dict[str, Any] = {"num_kv_blocks": blocks, "seed": seed, "longest_think": float(longest_think)}
    if sessions == SMALL_CASE[0]:
        how |= {"model": "Llama-3.2-1B", "device": "cpu", "block_size": 16, "max_model_len": 8192}
    else:
        how |= {"model": "Llama-3.1-8B", "device": "H100", "step_time": STEP, "block_size": BLOCK, "max_model_len": LONGEST}
        how |= {"max_num_batched_tokens": 2048, "max_num_seqs": 256}
    return simulate_sessions(_sessions[sessions], users, **how, **(RULES | HOST_RULES | SMALL_RULES)[rule]).figures()


def rows(pool: ProcessPoolExecutor) -> Iterator[str]:
    """The rows of the table, in order."""
    for case in (*CASES, SMALL_CASE):
        free = means(pool, case, 10**6, ["LRU"])
        yield row(case, "all", "LRU", free["LRU"])
        for part in PARTS:
            small = case == SMALL_CASE
            blocks = int(free["LRU"]["context_tokens"] * part / (16 if small else BLOCK))
            rules = [*RULES, *(HOST_RULES if (case, part) == (HOST_CASE, HOST_PART) else SMALL_RULES if small else ())]
            for rule, figures in means(pool, case, blocks, rules).items():
                yield row(case, f"{part:g}", rule, figures)


def row(case: tuple[str, int, float], part: str, rule: str, figures: dict[str, float]) -> str:
    """A row of the table."""
    values = " | ".join(form.format(figures[key]) for _, key, form in COLUMNS)
    return f"| {' | '.join(map(str, case))} | {part} | {rule} | {values} |"


def means(pool: ProcessPoolExecutor, case: tuple[str, int, float], blocks: int, rules: list[str]) -> dict[str, dict[str, float]]:
    """The means of the figures over the seeds, by rule."""
    runs = list(pool.map(run, [(*case, blocks, rule, seed) for rule in rules for seed in SEEDS]))
    of_rules = {rule: runs[at * len(SEEDS) : (at + 1) * len(SEEDS)] for at, rule in enumerate(rules)}
    return {rule: {name: mean(one[name] or 0.0 for one in runs) for name in runs[0]} for rule, runs in of_rules.items()}


def main() -> None:
    """Simulates all cells and writes the table."""
    _sessions["all"] = read_sessions(sys.argv[1], LONGEST)
    _sessions["held out"] = _sessions["all"][1::2]
    _sessions[SMALL_CASE[0]] = read_sessions(sys.argv[2], 8192)
    requests = sum(one.num_requests for one in _sessions["all"])
    lines = [
        "# Sessions of agents in a closed loop, simulated",
        "",
        f"Written by `benches/sessions.py` from {len(_sessions['all'])} sessions with {requests:,} requests; means",
        f"of {len(SEEDS)} seeds, three and a half hours each. `gap` is the longest time between an answer and the next request, in",
        "seconds. `KV` is the part of the working set that the cache holds. `turns` is the default, `LRU` has `--session-turns off`, and",
        "`fewest uncached` has the policy `prefix` with an ageing of 600 s beside it, and `turns, N GB` has `--swap-space NG`.",
        "`turns, disk` has contexts on a disk that reads a gigabyte a second. `short` sessions run on two cores with Llama-3.2-1B.",
        "",
        f"| sessions | users | gap | KV | rule | {' | '.join(label for label, _, _ in COLUMNS)} |",
        f"|---|---|---|---|---|{'---|' * len(COLUMNS)}",
    ]
    with ProcessPoolExecutor(PROCESSES, mp_context=get_context("fork")) as pool:
        for line in rows(pool):
            lines.append(line)
            print(line, flush=True)
            RESULT.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
