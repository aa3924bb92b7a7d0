"""Draws what it is told on standard input as SVG, and prints the names of the files. Runs where matplotlib is."""

from __future__ import annotations

import json
import sys
from typing import Any

import matplotlib

matplotlib.use("svg")
matplotlib.rcParams["svg.hashsalt"] = "serving"
from matplotlib import pyplot as plt  # noqa: E402

PANELS = (
    ("ttft_p99", "TTFT p99, s", 1),
    ("itl_p99", "ITL p99, ms", 1e3),
    ("tpot_p50", "TPOT p50, ms", 1e3),
    ("goodput", "goodput, requests/s", 1),
)


def save(figure: Any, path: str) -> None:
    """Writes a figure, the same bytes for the same numbers."""
    figure.savefig(path, metadata={"Date": None}, bbox_inches="tight")
    print(path)


def main() -> None:
    """Bars of throughput, and lines over the rate."""
    data = json.load(sys.stdin)
    if offline := sorted(data["offline"].items(), key=lambda item: item[1]):
        figure, axes = plt.subplots(figsize=(8, 0.5 + 0.3 * len(offline)))
        colours = ["tab:orange" if name.startswith("chairlift") else "tab:grey" for name, _ in offline]
        bars = axes.barh([name for name, _ in offline], [value for _, value in offline], color=colours)
        axes.bar_label(bars, fmt="%.0f", padding=3)
        axes.set_xlabel("output tokens/s, all requests at once")
        save(figure, f"{data['out']}_offline.svg")
    online = {peer: rates for peer, rates in data["online"].items() if rates}
    if online:
        plt.rcParams["axes.prop_cycle"] = plt.cycler(color=plt.colormaps["tab20"].colors)
        figure, grid = plt.subplots(2, 2, figsize=(10, 7))
        for axes, (name, label, factor) in zip(grid.flat, PANELS, strict=True):
            for peer, rates in online.items():
                style = "-" if peer.startswith("chairlift") else "--"
                axes.plot(
                    [float(rate) for rate in rates], [found[name] * factor for found in rates.values()], style, marker="o", label=peer
                )
            axes.set_xlabel("requests/s")
            axes.set_title(label)
            axes.set_xscale("log", base=2)
            ticks = sorted({float(rate) for rates in online.values() for rate in rates})
            axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
            if name != "goodput":
                axes.set_yscale("log")
        grid.flat[-1].legend(fontsize=7)
        figure.tight_layout()
        save(figure, f"{data['out']}_online.svg")


if __name__ == "__main__":
    main()
