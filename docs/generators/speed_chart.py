"""Draws docs/images/speed.svg from the committed results of benches: `python docs/generators/speed_chart.py`."""

from __future__ import annotations

import re
from html import escape
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent.parent
CHART = ROOT / "docs/images/speed.svg"
RESULTS = ROOT / "benches/results"
WIDTH, LEFT, BAR, GAP = 860, 330, 20, 44
_STYLE = """\
text { font: 13px system-ui, sans-serif; fill: #5b6168 } .title { font-size: 14.5px; font-weight: 600; fill: #1c1e21 }
.end { text-anchor: end } .exact { fill: #4e79a7 } .fast { fill: #f0943d } .peer { fill: #b8bec6 } .page { fill: #fff }
"""


class Bar(NamedTuple):
    """One engine's rate: its label, output tokens a second, and the class of its colour."""

    label: str
    rate: float
    kind: str


def groups() -> dict[str, list[Bar]]:
    """Returns the bars by title, read from the result files."""
    plain, amx = _served("serving.md"), _served("serving_amx.md")
    page = (RESULTS / "gguf_serving.md").read_text().partition("## Llama")[2].partition("\n## ")[0]
    large = {row[0]: float(row[-1]) for row in _rows(page) if row[-1].replace(".", "").isdecimal()}
    return {
        "135M, 64 requests at once, AMD EPYC without AMX": [
            Bar("Chairlift, default", plain["chairlift"], "exact"),
            Bar("Chairlift, default without drafts", plain["chairlift_undrafted"], "exact"),
            Bar("Chairlift, exact fp32", plain["chairlift_exact"], "exact"),
            Bar("Chairlift, 8 bit", plain["chairlift_int8"], "fast"),
            Bar("vLLM, bf16", plain["vllm_bf16"], "peer"),
            Bar("vLLM, fp32", plain["vllm_f32"], "peer"),
            Bar("llama.cpp, Q8_0", plain["llama_q8_0"], "peer"),
        ],
        "135M, 64 requests at once, Intel Xeon with AMX": [
            Bar("Chairlift, exact fp32", amx["chairlift"], "exact"),
            Bar("Chairlift, --cpu-math fast", amx["chairlift_fast"], "fast"),
            Bar("vLLM, bf16", amx["vllm_bf16"], "peer"),
        ],
        "1B of random weights in Q4_K_M, 16 streams with their prompts, Intel Xeon with AMX": [
            Bar("Chairlift, exact fp32", large["chairlift"], "exact"),
            Bar("Chairlift, --cpu-math fast", large["chairlift --cpu-math fast"], "fast"),
            Bar("vLLM, bf16", large["vLLM, bfloat16"], "peer"),
            Bar("OpenVINO, int4, in process", large["OpenVINO GenAI, int4, in process"], "peer"),
            Bar("llama.cpp, without AMX", large["llama.cpp"], "peer"),
        ],
    }


def _served(name: str) -> dict[str, float]:
    """Returns the output tokens a second of each engine when all requests come at once."""
    page = (RESULTS / name).read_text().partition("## All at once")[2].partition("\n## ")[0]
    return {row[0]: float(row[4].strip("*")) for row in _rows(page) if re.fullmatch(r"\*\*[\d.]+\*\*", row[4])}


def _rows(page: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines() if line.startswith("|")]


def chart() -> str:
    """Returns the chart as SVG; each group has a scale of its own."""
    parts, y = list[str](), 34
    for title, bars in groups().items():
        longest = max(bar.rate for bar in bars)
        parts.append(f'<text class="title" x="16" y="{y}">{escape(title)}</text>')
        for bar in bars:
            y += BAR + 6
            width = (WIDTH - LEFT - 80) * bar.rate / longest
            parts.append(f'<text class="end" x="{LEFT - 10}" y="{y}">{escape(bar.label)}</text>')
            parts.append(f'<rect class="{bar.kind}" x="{LEFT}" y="{y - 14}" width="{width:.1f}" height="{BAR - 2}"/>')
            parts.append(f'<text x="{LEFT + width + 8:.1f}" y="{y}">{int(bar.rate + 0.5):,}</text>')
        y += GAP
    note = "Output tokens/s over HTTP on two cores. Chairlift drafts by prompt lookup unless its label says otherwise; the others do not."
    parts.append(f'<text x="16" y="{y - 12}">{note}</text>')
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y}" width="{WIDTH}" height="{y}">'
    return f'{head}\n<style>{_STYLE}</style>\n<rect class="page" width="{WIDTH}" height="{y}"/>\n' + "\n".join(parts) + "\n</svg>\n"


if __name__ == "__main__":
    CHART.write_text(chart())
