"""Users that run recorded sessions of agents without turns, with a KV cache for a part of their contexts, simulated.

Writes benches/results/sessions.md.

    python benches/sessions.py agents.jsonl.gz        a minute

The file is `agents.jsonl.gz` of callanjfox/kv-cache-tester (Apache-2.0) as described in docs/capacity.md. The working set is the mean of
the tokens of all live contexts with a cache that loses nothing. The modelled machine is an 8B model on an H100: 12 ms a step, 0.4 ms for
each decode, 40 us for each prompt token and 1 ns for each pair of a prompt token and a token before it.
"""

from __future__ import annotations

import sys
from pathlib import Path
from statistics import mean

from chairlift.bench.sessions import RecordedSession, read_sessions
from chairlift.sim.sessions import simulate_sessions
from chairlift.sim.steps import StepTime

RESULT = Path(__file__).parent / "results" / "sessions.md"
STEP = StepTime(((0.0, 12_000.0), (1.0, 12_040.0)), decode_seq=360.0, prefill_pair=1e-3)
LONGEST, BLOCK = 200_000, 64
USERS, PARTS, SEEDS = (16, 32, 64), (0.5, 0.75, 1.0), (1, 2, 3)
COLUMNS = (
    ("requests/s", "requests_per_s", "{:.3f}"),
    ("cached", "cached_share", "{:.0%}"),
    ("TTFT p50, s", "ttft_p50_s", "{:.1f}"),
    ("p99", "ttft_p99_s", "{:.0f}"),
    ("longest wait of a turn", "longest_wait_s", "{:.0f}"),
    ("slowdown, mean", "slowdown_mean", "{:.1f}"),
    ("worst", "slowdown_worst", "{:.1f}"),
)


def figures(sessions: list[RecordedSession], users: int, blocks: int) -> dict[str, float]:
    """The means of the figures over the seeds."""
    sizes = {
        "num_kv_blocks": blocks,
        "block_size": BLOCK,
        "max_num_batched_tokens": 2048,
        "max_num_seqs": 256,
        "max_model_len": LONGEST,
        "session_turns": "off",
    }
    runs = [
        simulate_sessions(sessions, users, model="Llama-3.1-8B", device="H100", step_time=STEP, seed=seed, **sizes).figures()
        for seed in SEEDS
    ]
    return {name: mean(run[name] or 0.0 for run in runs) for name in runs[0]}


def main() -> None:
    """Simulates all cells and writes the table."""
    sessions = read_sessions(sys.argv[1], LONGEST)
    requests = sum(one.num_requests for one in sessions)
    lines = [
        "# Sessions of agents in a closed loop, simulated",
        "",
        f"Written by `benches/sessions.py` from {len(sessions)} sessions with {requests:,} requests; means",
        f"of {len(SEEDS)} seeds, three hours each. KV is the part of the working set that the cache holds.",
        "",
        f"| users | KV | {' | '.join(label for label, _, _ in COLUMNS)} |",
        f"|---|---|{'---|' * len(COLUMNS)}",
    ]
    for users in USERS:
        free = figures(sessions, users, 10**6)
        cells = [("all", free)]
        cells += [(f"{part:g}", figures(sessions, users, int(free["context_tokens"] * part / BLOCK))) for part in PARTS]
        for name, one in cells:
            lines.append(f"| {users} | {name} | {' | '.join(form.format(one[key]) for _, key, form in COLUMNS)} |")
            print(lines[-1], flush=True)
    RESULT.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
