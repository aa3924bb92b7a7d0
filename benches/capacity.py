"""Where one box ends, simulated on real traces: draws docs/images/capacity_*.svg and writes benches/results/capacity.md.

    python benches/capacity.py                       all of it: about five minutes; --requests 20000 for a short look

Everything but the speed of the simulator itself is the same on any machine.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable
from html import escape
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "support"))

from pages import ROOT, say, write
from traces import CODE, CONV, mooncake, workload

from chairlift.bench.report.plot import HEIGHT, WIDTH, Axis, Curve, Plot
from chairlift.config import EngineConfig
from chairlift.sim.result import Result
from chairlift.sim.run import machine, run, simulate
from chairlift.sim.workload import Workload

IMAGES = ROOT / "docs" / "images"
MODEL = "Llama-3.1-8B"
MACHINES = ("L4", "A10G", "RTX4090", "A100", "H100", "H200")
TTFT, ITL = 2.0, 0.1
"""Seconds that 95 of 100 first tokens, and 95 of 100 times between tokens, may take."""
BUDGETS = (256, 512, 2048)
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f7f7f")


def meets(result: Result) -> bool:
    """Whether a run kept the targets."""
    ttft = sorted(result.ttft())
    return ttft[int(0.95 * len(ttft))] <= TTFT and (result.itl(95) or 0) <= ITL and not result.refused


def ceiling(trace: Workload, on: str, **settings: object) -> tuple[float, Result | None]:
    """The largest rate (requests a second) that keeps the targets, to 3 %, and the run at it; or the least that was tried, and None."""
    config = EngineConfig(**settings)  # type: ignore[arg-type]
    device, step_time = machine(MODEL, on, config)
    own = len(trace) / (int(trace.column("arrival_us")[-1]) / 1e6)
    low, high, best = 0.01, 64.0, None
    while high > 1.03 * low:
        middle = (low * high) ** 0.5
        result = run(trace.faster(middle), device, step_time)
        if meets(result):
            low, best = middle, result
        else:
            high = middle
    return low * own, best


def save(name: str, plot: Plot) -> None:
    """Writes a plot that needs no page around it."""
    style = "text{font:11px system-ui,sans-serif;fill:#62676d}path{fill:none;stroke-width:1.7}.grid{stroke:#d9dce0;stroke-width:1}"
    style += ".dashed{stroke-dasharray:5 3}path.mark{stroke:#62676d;stroke-dasharray:2 3}"
    style += "".join(f"path.c{n}{{stroke:{colour}}}circle.c{n},text.c{n}{{fill:{colour}}}" for n, colour in enumerate(COLOURS))
    key = "".join(
        f'<text class="c{curve.colour}" x="{WIDTH - 20}" y="{26 + 15 * place}" text-anchor="end">{escape(curve.name)}</text>'
        for place, curve in enumerate(plot.curves)
    )
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
    drawn = plot.svg().replace(f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" ', head, 1)
    at = drawn.index(">") + 1
    paper = f'<style>{style}</style><rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>'
    IMAGES.mkdir(exist_ok=True)
    (IMAGES / f"capacity_{name}.svg").write_text(drawn[:at] + paper + drawn[at:].replace("</svg>", key + "</svg>") + "\n")


def curve(name: str, points: list[tuple[float, float]], colour: int) -> Curve:
    """A curve through points."""
    x, y = zip(*points, strict=True)
    return Curve(name, x, y, colour=colour)


def machines(traces: dict[str, Workload]) -> list[str]:
    """The ceilings of each machine for each trace, at the best size of a step, and how full it is there."""
    lines = [f"| machine | {' | '.join(f'{name}: requests a second | tokens a step | KV held, most | batch' for name in traces)} |"]
    lines.append("|---|" + "---|" * 4 * len(traces))
    for on in MACHINES:
        cells = []
        for trace in traces.values():
            found = {budget: ceiling(trace, on, max_num_batched_tokens=budget) for budget in BUDGETS}
            budget, (rate, best) = max(found.items(), key=lambda one: one[1][0])
            figures = best.figures() if best else {}
            held, batch = figures.get("kv_used_max") or 0, figures.get("batch_mean") or 0
            cells.append(f"{rate:.2f} | {budget:,} | {held:.0%} | {batch:.0f}" if best else "none | | | ")
        say(f"{on}: {cells}")
        lines.append(f"| {on} | {' | '.join(cells)} |")
    return lines


def knee(trace: Workload) -> list[str]:
    """Time to first token against the rate, on one box and with several ways to batch."""
    own = len(trace) / (int(trace.column("arrival_us")[-1]) / 1e6)
    ways = {
        "continuous": {},
        "static, 64": {"batching": "static", "static_batch_size": 64, "max_num_seqs": 64},
        "dynamic, 64, 1 s": {"batching": "dynamic", "static_batch_size": 64, "max_num_seqs": 64, "batch_timeout_ms": 1000.0},
    }
    scales = [0.1 * 1.15**power for power in range(32)]
    curves, lines = [], ["| batching | requests a second within the targets |", "|---|---|"]
    for colour, (name, settings) in enumerate(ways.items()):
        device, step_time = machine(MODEL, "A100", EngineConfig(**settings))  # type: ignore[arg-type]
        points = []
        for scale in scales:
            ttft = sorted(run(trace.faster(scale), device, step_time).ttft())
            points.append((scale * own, float(ttft[int(0.95 * len(ttft))])))
            if points[-1][1] > 100:
                break
        curves.append(curve(name, points, colour))
        rate, best = ceiling(trace, "A100", **settings)
        lines.append(f"| {name} | {f'{rate:.2f}' if best else f'none, down to {rate:.2f}'} |")
    save("knee", Plot("Time to first token by rate", "", Axis("requests a second", log=True), Axis("TTFT p95", "s", log=True), curves))
    return lines


def fleet(trace: Workload) -> list[str]:
    """Replicas and routers, on prompts that share their beginnings."""
    curves = []
    lines = ["| replicas | router | TTFT p50 | TTFT p99 | prompt tokens found in cache |", "|---|---|---|---|---|"]
    for colour, routing in enumerate(("round-robin", "least-loaded", "prefix-aware")):
        points = []
        for replicas in (2, 4, 8, 16):
            # Twice the traffic for twice the replicas would be other traffic: the same is spread thinner.
            result = simulate(trace, model=MODEL, device="H100", replicas=replicas, routing=routing)
            figures = result.figures()
            points.append((float(replicas), figures["prefix_hit_share"] or 0.0))
            lines.append(
                f"| {replicas} | {routing} | {figures['ttft_p50_s']:.2f} s | {figures['ttft_p99_s']:.2f} s | {points[-1][1]:.1%} |"
            )
        curves.append(curve(routing, points, colour))
    save("fleet", Plot("Prefix cache by router", "", Axis("replicas", log=True), Axis("prompt tokens found in cache", "%"), curves))
    return lines


def million(trace: Workload, requests: int) -> list[str]:
    """Many requests over a fleet, and how long that takes."""
    began = time.perf_counter()
    scale = 16
    result = simulate(trace, model=MODEL, device="H100", replicas=16, routing="least-loaded", rate_scale=scale, requests=requests)
    wall = time.perf_counter() - began
    p50, p99 = (1000 * (result.figures()[name] or 0) for name in ("ttft_p50_s", "ttft_p99_s"))
    return [
        f"{requests:,} requests (azure2023_conv at {scale} times its rate, repeated) on 16 H100s behind the least-loaded router:\n"
        f"{wall:.0f} s on this machine, {result.decisions / wall / 1e6:.2f} million decisions a second, {result.span / wall:.0f} times "
        f"real time for all 16 together.\nTTFT p50 {p50:.0f} ms, p99 {p99:.0f} ms."
    ]


def speed(trace: Workload) -> list[str]:
    """How fast one box is simulated."""
    lines = ["| machine | decisions a second | times real time |", "|---|---|---|"]
    for on in ("A100", "H200"):
        result = simulate(trace, model=MODEL, device=on)
        lines.append(f"| {on} | {result.decisions / result.wall / 1e6:.2f} million | {result.span / result.wall:,.0f} |")
    return lines


def section(title: str, lines: Iterable[str]) -> str:
    say(title)
    return f"## {title}\n\n" + "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=1_000_000, help="for the largest run (default: a million)")
    args = parser.parse_args()
    conv, code = workload(CONV), workload(CODE)
    parts = [
        "# Where one box ends, simulated\n\nWritten by `benches/capacity.py`: "
        f"{MODEL} in bfloat16, steps by the roofline of each machine (python/chairlift/sim/devices.py).\n"
        f"Targets: 95 of 100 first tokens within {TTFT:g} s, 95 of 100 times between tokens within {ITL * 1000:g} ms. A decision is who\n"
        "computes how many tokens in a step. KV held is the most of any step, batch the average over the time in which there was a step.\n",
        section("Machines", machines({"azure2023_conv": conv.first(3000), "azure2023_code": code.first(3000)})),
        section("Ways to batch, azure2023_conv on an A100", knee(conv.first(3000))),
        section("Routers, mooncake_conversation on H100s", fleet(mooncake())),
        section("A fleet", million(conv, args.requests)),
        section("Speed of the simulator, azure2023_conv", speed(conv)),
    ]
    write("capacity.md", parts)


if __name__ == "__main__":
    main()
