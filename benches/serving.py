"""Compares engines that serve a small model on a CPU, end to end on this machine; writes benches/results/serving.md.

    python benches/serving.py setup     sets the peers up: 20 GB, and half an hour on two cores
    python benches/serving.py table     makes the committed table: measures its rows in about 25 minutes, and reports them
    python benches/serving.py run       measures what --peers, --rates and --repeats name
    python benches/serving.py report    writes the tables and plots of what was measured

Measuring says first how long it takes, and can be interrupted and run again. The peers and the raw results are below benches/.peers,
or where the environment variable PEERS_HOME says. Nothing else should run on the machine: a run beside which others took more than
3 % of the CPU is done once more, and marked.
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peers import install, report, results
from peers.engines import PEERS, Peer, Run
from peers.machine import Busy, describe, peaks
from peers.results import DISTURBED, Slo
from peers.workload import REQUESTS, Request, fingerprint, workload

ROOT = Path(__file__).parent.parent
PAUSE = 1.0
"""Seconds between a run and the next, for what the peer still cleans up."""
WARM_UP = 16
"""Requests, of prompts that are not measured, before the first run of a peer: some compile a kernel for each size of a step."""
MODES = ["offline", "0.5", "1", "2", "4", "8"]

TABLE = {
    "chairlift": ["offline", "2"],
    "vllm_bf16": ["offline", "2"],
    "chairlift_undrafted": ["offline", "2"],
    "openvino_bf16": ["offline", "2"],
    "chairlift_exact": ["offline", "2"],
    "chairlift_in_process": ["offline"],
    "llama_f16_32": ["offline", "2"],
    "openvino_f32": ["offline"],
    "chairlift_int8": ["offline", "2"],
    "vllm_f32": ["offline"],
    "chairlift_undrafted_in_process": ["offline"],
    "openvino_int8_bf16": ["offline"],
    "llama_q4_1": ["offline"],
    "llama_q8_0": ["offline"],
    "vllm_bf16_in_process": ["offline"],
}
"""The rows of the committed table. Ours are apart from each other, so that a slow minute of the machine meets others too."""
REPEATS = 2


@dataclass(frozen=True)
class Wanted:
    """The modes of each peer that are to be measured, and how often."""

    modes: dict[str, list[str]]
    repeats: int
    online_repeats: int


def plan(wanted: Wanted, done: set[results.Key], now: results.Setting) -> Iterator[tuple[int, str, list[str]]]:
    """Repeats, peers in turn within each, every other time backwards, and the modes of a peer that are still to do."""
    for repeat in range(max(wanted.repeats, wanted.online_repeats)):
        for peer in wanted.modes if repeat % 2 == 0 else reversed(wanted.modes):
            offline, online = repeat < wanted.repeats, repeat < wanted.online_repeats and PEERS[peer].online
            modes = [mode for mode in wanted.modes[peer] if (offline if mode == "offline" else online)]
            if todo := [mode for mode in modes if (now, peer, mode, repeat) not in done]:
                yield repeat, peer, todo


def seconds(peer: Peer, mode: str, requests: list[Request]) -> float:
    """How long a run takes, about."""
    part = given(peer, mode, requests)
    busy = sum(request.output for request in part) / peer.speed
    return busy + PAUSE if mode == "offline" else max(busy, part[-1].arrival / float(mode)) + 5 + PAUSE


def given(peer: Peer, mode: str, requests: list[Request]) -> list[Request]:
    """The requests that a peer gets."""
    return requests[: peer.some] if mode == "offline" and peer.some else requests


def measure(run: Run, session: int, requests: list[Request], mode: str) -> dict[str, Any]:
    """One run of one peer."""
    before = Busy.now(session)
    answers = run(requests, None if mode == "offline" else float(mode))
    shares = Busy.now(session).shares(before)
    return {"shares": shares, "failed": sum(bool(a.error) for a in answers), "answers": [a.record() for a in answers]}


def run(args: argparse.Namespace, wanted: Wanted) -> None:
    """Measures the wanted modes of each peer, those that are still to be measured at this commit and on this machine."""
    requests = workload(install.HF / "tokenizer.json", args.requests)
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    facts = {"workload": fingerprint(requests), "machine": describe(), "commit": commit, "versions": install.versions()}
    done = {results.key(record) for record in results.read(args.raw) if "error" not in record}
    todo = list(plan(wanted, done, results.setting(facts)))
    total = sum(PEERS[peer].start + 3 + sum(seconds(PEERS[peer], mode, requests) for mode in modes) for _, peer, modes in todo)
    print(f"{sum(len(modes) for _, _, modes in todo)} runs, about {total / 60:.0f} minutes", flush=True)
    facts["peaks"] = peaks() if todo else {}
    began = time.perf_counter()
    for i, (repeat, peer, modes) in enumerate(todo):
        spent = (time.perf_counter() - began) / 60
        print(f"[{i + 1}/{len(todo)}, {spent:.1f} min] {peer}, repeat {repeat + 1}", flush=True)
        try:
            with PEERS[peer].running() as (ask, session, start):
                ask([Request(r.prompt[::-1], 16, 0.0) for r in requests[:WARM_UP]], None)
                for mode in modes:
                    part = given(PEERS[peer], mode, requests)
                    for _ in range(1 + args.retries):
                        time.sleep(PAUSE)
                        found = measure(ask, session, part, mode)
                        when = time.strftime("%Y-%m-%dT%H:%M:%S")
                        record = {**facts, "peer": peer, "mode": mode, "repeat": repeat, "when": when, "start": round(start, 2), **found}
                        results.append(args.raw, record)
                        print(f"    {mode}: {line(record, args.slo)}", flush=True)
                        if found["shares"]["others"] <= DISTURBED:
                            break
        except (RuntimeError, OSError) as error:
            print(f"    failed: {error}", flush=True)
            results.append(args.raw, {**facts, "peer": peer, "mode": modes[0], "repeat": repeat, "error": str(error)})


def line(record: dict[str, Any], slo: Slo) -> str:
    """A run in one line."""
    found = results.numbers(record, slo)
    shares = record["shares"]
    if not found:
        return f"all {record['failed']} failed: {record['answers'][0]['error'][:200]}"
    itl = "" if record["mode"] == "offline" else f", ITL p99 {found['itl_p99'] * 1e3:.0f} ms"  # not every engine tells it offline
    return (
        f"{found['tokens_s']:.1f} tokens/s, TTFT p50/p99 {found['ttft_p50']:.2f}/{found['ttft_p99']:.2f} s, "
        f"TPOT p50 {found['tpot_p50'] * 1e3:.0f} ms{itl}; {record['failed']} failed; "
        f"CPU: peer {shares['peer']:.0%}, client {shares['client']:.1%}, others {shares['others']:.1%}"
    )


def arguments(given: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("setup", "table", "run", "report"))
    parser.add_argument("--peers", type=lambda text: text.split(","), default=list(PEERS), help="some of " + ", ".join(PEERS))
    parser.add_argument("--rates", type=lambda text: text.split(","), default=MODES, help="offline, or requests a second")
    parser.add_argument("--repeats", type=int, default=REPEATS)
    parser.add_argument("--requests", type=int, default=REQUESTS, help="how many; 64 is the committed table's number")
    parser.add_argument("--retries", type=int, default=1, help="how often a disturbed run is done again")
    parser.add_argument(
        "--steps", type=lambda text: text.split(","), default=[], help="for setup: llama, transformers, models, vllm, openvino, plots"
    )
    parser.add_argument("--raw", type=Path, default=install.HOME / "serving.jsonl", help="every run, as JSON lines")
    parser.add_argument("--out", type=Path, default=ROOT / "benches/results/serving.md")
    parser.add_argument("--max-ttft-ms", type=float, default=2000.0, help="what goodput asks of a request")
    parser.add_argument("--max-tpot-ms", type=float, default=200.0)
    args = parser.parse_args(given)
    args.slo = Slo(args.max_ttft_ms / 1e3, args.max_tpot_ms / 1e3)
    if unknown := set(args.peers) - set(PEERS):
        parser.error(f"there is no peer {', '.join(sorted(unknown))}; there are {', '.join(PEERS)}")
    return args


def main() -> None:
    """Does what the command line says."""
    args = arguments(sys.argv[1:])
    for number in (signal.SIGINT, signal.SIGTERM):  # so that the peer that runs is ended too, in the background as well
        signal.signal(number, signal.default_int_handler)
    if args.command == "setup":
        install.setup(args.steps)
        return
    if args.command in ("run", "table"):
        chosen = Wanted(dict.fromkeys(args.peers, args.rates), args.repeats, args.repeats)
        try:
            run(args, Wanted(TABLE, REPEATS, 1) if args.command == "table" else chosen)
        except KeyboardInterrupt:
            sys.exit("interrupted; the same command goes on from here")
    if args.command in ("report", "table"):
        requests = workload(install.HF / "tokenizer.json", args.requests)
        sys.stdout.write(report.write(results.read(args.raw), requests, args.out, args.slo))


if __name__ == "__main__":
    main()
