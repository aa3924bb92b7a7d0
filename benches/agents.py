"""Agents on Chairlift with and without turns of sessions, on vLLM and on llama.cpp; writes benches/results/agents_serving.md.

    python benches/agents.py agents_small.jsonl.gz [--servers Chairlift vLLM] [--seconds 240]      five minutes for each of 8 runs

Users run recorded sessions in a closed loop, as `chairlift bench serve --sessions` does, with KV for the same number of tokens on each
server. The servers are those of `benches/serving.py setup`. Wants the machine for itself.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from gate_agents import USERS, WORKING_SET, chairlift, kv_tokens, llama_cpp, measure, vllm
from pages import RESULTS, machine
from peers.engines import Peer
from peers.install import HOME, versions

SERVERS: dict[str, Callable[[int], Peer]] = {
    "Chairlift": partial(chairlift, turns="named"),
    "Chairlift, `--session-turns off`": chairlift,
    "vLLM": vllm,
    "llama.cpp": llama_cpp,
}
PARTS = {"three quarters": 0.75, "all": 2.0}


def row(name: str, part: str, figures: dict[str, Any]) -> str:
    """A row of the table."""
    cells = [
        name,
        part,
        f"{figures['request_throughput']:.2f}",
        f"{figures['cached_share'] or 0:.0%}",
        f"{figures['median_ttft_ms'] / 1e3:.2f}",
        f"{figures['p99_ttft_ms'] / 1e3:.1f}",
        f"{figures['longest_wait_s'] or 0:.0f}",
        str(figures["failed"]),
    ]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Measures every server and writes the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trace")
    parser.add_argument("--servers", nargs="+", choices=SERVERS, default=list(SERVERS))
    parser.add_argument("--kv", nargs="+", choices=PARTS, default=list(PARTS), help="the part of the contexts for which there is KV")
    parser.add_argument("--seconds", type=float, default=240.0)
    parser.add_argument("--state", type=Path, default=HOME, help="where the servers' logs go")
    args = parser.parse_args()
    rows = []
    for part in args.kv:
        for server in args.servers:
            tokens = kv_tokens(PARTS[part])
            peer = SERVERS[server](tokens)
            figures = measure(peer, tokens, gate=False, trace=args.trace, seconds=args.seconds, state=args.state)
            rows.append(row(server, part, figures))
            print(rows[-1], flush=True)
    text = f"""# Agents on Chairlift and its peers

Written by benches/agents.py on {machine()}; {", ".join(f"{name} {version}" for name, version in versions().items())}.
{USERS} users run recorded sessions for {args.seconds:g} s, one run each, on the default model. KV is the part of their contexts
({WORKING_SET:,} tokens) that the cache holds. vLLM computes in {vllm(0).weights}, and llama.cpp ends all running requests with an error
when their contexts exceed the KV that its slots share. Times are seconds.

| server | KV | requests/s | prompt tokens found in the cache | TTFT p50 | TTFT p99 | longest wait | failed requests |
|---|---|---|---|---|---|---|---|
{chr(10).join(rows)}
"""
    (RESULTS / "agents_serving.md").write_text(text)


if __name__ == "__main__":
    main()
