"""Writes what was measured as Markdown, with plots beside it."""

from __future__ import annotations

import json
import statistics
import subprocess
from pathlib import Path
from typing import Any

from peers import results, summary
from peers.engines import BATCH, PEERS
from peers.install import HF, HOME, python
from peers.machine import linear_flops
from peers.results import Record, Slo
from peers.workload import Request, fingerprint, useful_share

REFERENCE = "vllm_f32"
"""Whose answers the others' are compared with: fp32, and not ours."""


def write(records: list[Record], requests: list[Request], out: Path, slo: Slo) -> str:
    """Writes `out` and, where the means to are there, its plots; returns the text."""
    records = results.latest(records, fingerprint(requests))
    failures = {record["peer"]: record["error"] for record in records if "error" in record}
    records = results.chosen(records)
    if not records:
        raise SystemExit("there are no results of this workload yet: run some first, with the same --requests")
    measured_peaks: list[dict[str, float]] = [record["peaks"] for record in records if record.get("peaks")]
    peaks = max(measured_peaks, key=lambda found: found["fp32_gflop_s"], default={})
    lines = [*_head(records, requests, peaks), *_summary(records), *_offline(records, requests)]
    rates = results.rates(records)
    for rate in rates:
        lines += _online(records, rate, slo)
    lines += _gains(records, requests)
    measured = {record["peer"] for record in records}
    for peer in failures.keys() - measured:
        lines += ["", f"{peer} did not run: {failures[peer].strip().splitlines()[-1][:200]}"]
    plots = _plots(records, out, slo)
    lines += [part for plot in plots for part in ("", f"![{plot.stem}]({plot.name})")]
    text = "\n".join([*lines, *_notes(slo)]) + "\n"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(text)
    return text


def _head(records: list[Record], requests: list[Request], peaks: dict[str, float]) -> list[str]:
    machine, day = records[-1]["machine"], max(record["when"] for record in records)[:10]
    prompts, outputs = [len(r.prompt) for r in requests], [r.output for r in requests]
    names = ", ".join(f"{name} {version}" for name, version in records[-1]["versions"].items())
    lines = [
        "# Serving on a CPU, engine beside engine",
        "",
        f"{day}, {machine['cpu']}, {machine['cores']} cores ({', '.join(machine['flags'])}), {machine['memory_gib']} GiB.",
        f"{names}; Chairlift at {records[-1]['commit']}.",
        "",
        f"SmolLM2-135M-Instruct, {len(requests)} requests, seed 0: prompts of {min(prompts)} to {max(prompts)} tokens ({sum(prompts):,}),",
        f"outputs of {min(outputs)} to {max(outputs)} ({sum(outputs):,}); greedy only,",
        "ends of text ignored, prefix caches off, prompts without common beginnings. One peer at a time on the machine, peers in turn,",
        "medians of the runs. Loading, and a warm-up of 16 other requests, are over before a run begins; model files are in memory.",
    ]
    if peaks:
        lines += [
            "",
            f"The machine, measured through torch: {peaks['read_gb_s']:.0f} GB/s read, {peaks['fp32_gflop_s']:.0f} GFLOP/s in fp32, "
            f"{peaks['bf16_gflop_s']:.0f} in bf16, {peaks['int8_gop_s']:.0f} GOP/s in int8.",
        ]
    return lines


def _summary(records: list[Record]) -> list[str]:
    """Our rows beside the best peers."""
    runs = results.of(records, mode="offline")
    found = {peer: results.medians(results.of(runs, peer=peer), Slo()) for peer in results.order(runs, lambda record: record["peer"])}
    speeds = {peer: values["tokens_s"] for peer, values in found.items() if values and PEERS[peer].some is None}
    lines = summary.table(speeds)
    said = ["All requests at once, each engine in the best of its settings that were measured, by what its linear layers multiply in:"]
    ratios = ["", "Ours to the quickest peer that is asked the same way; below 1 the peer is quicker:", "", *lines]
    return ["", "## Beside the best peers", "", *said, "", *summary.grid(speeds), *ratios] if lines else []


def _offline(records: list[Record], requests: list[Request]) -> list[str]:
    runs = results.of(records, mode="offline")
    if not runs:
        return []
    token, logits = linear_flops(json.loads((HF / "config.json").read_text()))
    lines = [
        "",
        "## All at once",
        "",
        "| peer | asked | weights | arithmetic | output tokens/s | each run | useful | linear work, GFLOP/s | TTFT p50 s "
        f"| TPOT p50 ms | answers as {REFERENCE}'s | start s |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    slo = Slo()
    for peer in results.order(runs, lambda record: record["peer"]):
        mine = results.of(runs, peer=peer)
        found = results.medians(mine, slo)
        if not found:
            lines.append(f"| {peer} | | | | failed: {_failure(mine)} |" + " |" * 7)
            continue
        part = requests[: len(mine[0]["answers"])]
        work = sum(len(r.prompt) + r.output - 1 for r in part) * token + sum(r.output for r in part) * logits
        rate = work / found["span"] / 1e9
        same, of = results.agreement(runs, peer, REFERENCE)
        # Chairlift's batches compute nothing for those that ended: their rows are empty, which is lost all the same.
        useful = useful_share(part, BATCH) if "static" in peer or "dynamic" in peer else 1.0
        each = " / ".join(f"{results.numbers(run, slo).get('tokens_s', 0):.1f}{_mark(run)}" for run in mine)
        cells = [
            peer,
            "HTTP" if PEERS[peer].serves else "in process",
            PEERS[peer].weights,
            PEERS[peer].arithmetic,
            f"**{found['tokens_s']:.1f}**",
            each,
            f"{useful:.2f}",
            f"{rate:.0f}",
            f"{found['ttft_p50']:.2f}",
            f"{found['tpot_p50'] * 1e3:.0f}",
            f"{same} of {of}" if of else "",
            f"{statistics.median(run['start'] for run in mine):.1f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _gains(records: list[Record], requests: list[Request]) -> list[str]:
    """What continuous batching is worth on the same engine, beside what the lengths of the workload let it be."""
    speed = {peer: results.medians(results.of(records, peer=peer, mode="offline"), Slo()).get("tokens_s") for peer in PEERS}
    possible, lines = 1 / useful_share(requests, BATCH), []
    for peer, found in speed.items():
        if found and (whole := speed.get(f"{peer}_dynamic")):  # a static batch starts with the first to come, alone
            gain = found / whole
            share = f"{gain:.2f} times whole ones of {BATCH}, of {possible:.2f} that the lengths allow ({gain / possible:.0%})"
            lines += ["", f"{peer}: continuous batches are {share}."]
    return lines


def _online(records: list[Record], rate: str, slo: Slo) -> list[str]:
    runs = results.of(records, mode=rate)
    lines = [
        "",
        f"## {rate} requests a second",
        "",
        "| peer | TTFT p50 s | p95 | p99 | TPOT p50 ms | p99 | ITL p99 ms | goodput req/s | output tokens/s | CPU of the peer "
        "| others' CPU, each run |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for peer in results.order(runs, lambda record: record["peer"]):
        mine = results.of(runs, peer=peer)
        found = results.medians(mine, slo)
        if not found:
            lines.append(f"| {peer} | failed: {_failure(mine)} |" + " |" * 9)
            continue
        cells = [
            peer if PEERS[peer].serves else f"{peer} (in process)",
            *(f"{found[f'ttft_p{q}']:.2f}" for q in (50, 95, 99)),
            *(f"{found[name] * 1e3:.0f}" for name in ("tpot_p50", "tpot_p99", "itl_p99")),
            f"{found['goodput']:.2f}",
            f"{found['tokens_s']:.1f}",
            f"{mine[0]['shares']['peer']:.0%}",
            " / ".join(f"{run['shares']['others']:.1%}{_mark(run)}" for run in mine),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _failure(runs: list[Record]) -> str:
    errors = [answer["error"] for run in runs for answer in run["answers"] if answer["error"]]
    return errors[0][:120].replace("|", "/") if errors else "no answer"


def _mark(run: Record) -> str:
    failed = f" ({run['failed']} failed)" if run["failed"] else ""
    return ("†" if run["shares"]["others"] > results.DISTURBED else "") + failed


def _notes(slo: Slo) -> list[str]:
    return [
        "",
        f"† other processes took more than {results.DISTURBED:.0%} of the CPU; such runs count only where there is no other.",
        "",
        "`useful`: output tokens among those that a batch computes until its longest answer ends. `linear work`: what the linear layers of",
        "prompts and outputs come to, over the whole time. `goodput`: requests a second, over the whole time, with TTFT of at most",
        f"{slo.ttft:g} s and TPOT of at most {slo.tpot * 1e3:g} ms. TTFT counts from when a request was due. ITL are the gaps between",
        "pieces of text: where a server sends tokens together, or holds one back until a character is whole, they are one.",
        "`HTTP`: servers are driven through their streaming `/v1/completions` with token ids, by one client on the same cores, whose",
        "CPU is not in the others'. `in process`: a program calls the engine, token ids in and out, and is spared HTTP and streaming:",
        "compare such rows with each other. `arithmetic`: the smallest type that the linear layers multiply in; where the processor lacks",
        "bf16, it is emulated. `start s`: until the engine takes requests, from files that were read before.",
        "transformers, one by one, gets only some of the requests. Chairlift drafts by prompt lookup, except in `undrafted` rows, and",
        "the others do not: ends of text are ignored, so answers begin to repeat, and that gains more here than in chats.",
    ]


def _plots(records: list[Record], out: Path, slo: Slo) -> list[Path]:
    """Plots, drawn in an environment of their own: nothing else here needs a plotting library."""
    if not python("plots").exists():
        return []
    peers = results.order(records, lambda record: record["peer"])
    offline = {peer: results.medians(results.of(records, peer=peer, mode="offline"), slo) for peer in peers}
    online = {
        peer: {rate: results.medians(results.of(records, peer=peer, mode=rate), slo) for rate in results.rates(records)} for peer in peers
    }
    data: dict[str, Any] = {
        "offline": {peer: found["tokens_s"] for peer, found in offline.items() if found},
        "online": {peer: {rate: found for rate, found in each.items() if found} for peer, each in online.items()},
        "out": str(out.with_suffix("")),
    }
    script = Path(__file__).with_name("plots.py")
    done = subprocess.run(
        [python("plots"), script],
        input=json.dumps(data),
        capture_output=True,
        text=True,
        check=True,
        env={"MPLCONFIGDIR": str(HOME / "plots")},
    )
    return [Path(line) for line in done.stdout.splitlines()]
