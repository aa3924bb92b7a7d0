"""Agents on llama.cpp's server, vLLM and Chairlift without turns, direct and through the gate; writes benches/results/gate_agents.md.

    python benches/gate_agents.py agents_small.jsonl.gz [--servers llama.cpp ...] [--seconds 90]      two minutes for each of 18 runs

Users run recorded sessions in a closed loop, as `chairlift bench serve --sessions` does. The KV cache holds a part of their contexts, or
twice as much. Each run starts its server anew. Runs that are done are kept in gate_agents.jsonl of --state, and are not run again.
The servers are those of `benches/serving.py setup`. Wants the machine for itself.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pages import RESULTS, machine
from peers.engines import Peer, chairlift_server, llama_server, vllm_server
from peers.install import HF, HOME, gguf, versions
from peers.machine import describe
from servers import server

WORKING_SET = 15_787
"""Mean tokens of the contexts of eight users of agents_small.jsonl.gz, as `chairlift simulate` gives it."""
USERS, LONGEST = 8, 8192
HAS_BF16 = not {"avx512_bf16", "amx_bf16"}.isdisjoint(describe()["flags"])
"""Whether this processor multiplies numbers in bf16. On others vLLM is faster in float32."""
PARTS = {"half": 0.5, "three quarters": 0.75, "all": 2.0}


def kv_tokens(share: float) -> int:
    """Tokens of KV for a part of the contexts, as llama.cpp rounds them."""
    return int(WORKING_SET * share) // 256 * 256


def llama_cpp(tokens: int) -> Peer:
    """Slots for all users that share the KV."""
    flags = ["--ctx-size", str(tokens), "--kv-unified", "--cache-ram", "0"]
    return llama_server(gguf("Q4_1"), "Q4_1", "8 bit", flags, seqs=USERS)


def vllm(tokens: int) -> Peer:
    """With its prefix cache, in blocks of 128 tokens."""
    peer = vllm_server(HF, "bfloat16" if HAS_BF16 else "float32", 0.0)
    flags = ["--enable-prefix-caching", "--enable-prompt-tokens-details", "--max-model-len", str(LONGEST), "--block-size", "128"]
    peer.command.extend([*flags, "--num-gpu-blocks-override", str(max(tokens, LONGEST + 128) // 128)])
    return peer


def chairlift(tokens: int, turns: str = "off") -> Peer:
    """Our server, without turns of sessions where nothing else is said."""
    return chairlift_server(gguf("Q4_1"), "Q4_1", "8 bit", ["--num-kv-blocks", str(tokens // 16), "--session-turns", turns])


SERVERS: dict[str, Callable[[int], Peer]] = {"llama.cpp": llama_cpp, "vLLM": vllm, "Chairlift without turns": chairlift}


def measure(peer: Peer, tokens: int, *, gate: bool, trace: str, seconds: float, state: Path) -> dict[str, Any]:
    """The figures of one run, as `bench serve` saves them."""
    run = [sys.executable, "-m", "chairlift"]
    with contextlib.ExitStack() as stack:
        port, _ = stack.enter_context(server(peer.command, "/health", state / "server.log", environ=peer.environ))
        if gate:
            # llama.cpp does not tell how much KV its slots share.
            upstream = ["--upstream", f"http://127.0.0.1:{port}", "--upstream-kv-tokens", str(tokens)]
            port, _ = stack.enter_context(server([*run, "gate", *upstream, "--port", "{port}"], log=state / "gate.log"))
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        load = ["--sessions", trace, "--users", str(USERS), "--duration", str(seconds), "--max-think-time", "3.75", "--ignore-eos"]
        save = ["--disable-tqdm", "--save-result", "--result-dir", folder, "--result-filename", "result.json"]
        # Its status is 1 if requests failed: that is a result too.
        subprocess.run(
            [*run, "bench", "serve", "--base-url", f"http://127.0.0.1:{port}", *load, *save], check=False, stdout=subprocess.DEVNULL
        )
        figures: dict[str, Any] = json.loads((Path(folder) / "result.json").read_text())
    return figures


def row(name: str, part: str, direct: dict[str, Any], through: dict[str, Any]) -> str:
    """A row of the table."""
    both = [direct, through]
    alone = direct["request_throughput"]
    cells = [
        name,
        part,
        *(f"{one['request_throughput']:.2f}" for one in both),
        f"{through['request_throughput'] / alone:.2f}x" if alone else "-",
        ", ".join(f"{one['cached_share'] or 0:.0%}" for one in both),
        ", ".join(f"{one['median_ttft_ms'] / 1e3:.2f}" for one in both),
        ", ".join(f"{one['p99_ttft_ms'] / 1e3:.1f}" for one in both),
        ", ".join(f"{one['longest_wait_s'] or 0:.0f}" for one in both),
        ", ".join(str(one["failed"]) for one in both),
    ]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Measures what is not measured yet and writes the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trace")
    parser.add_argument("--servers", nargs="+", choices=SERVERS, default=list(SERVERS))
    parser.add_argument("--seconds", type=float, default=90.0)
    parser.add_argument("--state", type=Path, default=HOME)
    args = parser.parse_args()
    args.state.mkdir(parents=True, exist_ok=True)
    kept = args.state / "gate_agents.jsonl"
    done = {tuple(key): figures for key, figures in map(json.loads, kept.read_text().splitlines())} if kept.exists() else {}
    rows = []
    for name in args.servers:
        for part, share in PARTS.items():
            for gate in (False, True):
                key = (name, part, gate, args.seconds)
                if key not in done:
                    tokens = kv_tokens(share)
                    done[key] = measure(SERVERS[name](tokens), tokens, gate=gate, trace=args.trace, seconds=args.seconds, state=args.state)
                    with kept.open("a") as file:
                        file.write(json.dumps([key, done[key]]) + "\n")
            rows.append(row(name, part, done[name, part, False, args.seconds], done[name, part, True, args.seconds]))
            print(rows[-1], flush=True)
    text = f"""# Agents, direct and through the gate

Written by benches/gate_agents.py on {machine()}; {", ".join(map(" ".join, versions().items()))}.
{USERS} users run recorded sessions for {args.seconds:g} s, one run each. KV is the part of their contexts ({WORKING_SET:,} tokens) that
the server's cache holds.
Pairs are direct and through the gate; times are seconds. There is no ratio where no request was answered: llama.cpp ends all running
requests with an error when their contexts exceed the KV that its slots share.

| server | KV | requests/s, direct | through the gate | ratio | found in the cache | TTFT p50 | TTFT p99 | longest wait | failed requests |
|---|---|---|---|---|---|---|---|---|---|
{chr(10).join(rows)}
"""
    (RESULTS / "gate_agents.md").write_text(text)


if __name__ == "__main__":
    main()
