"""`chairlift compare`."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from chairlift.bench.report.page import Page
from chairlift.bench.report.plot import Axis, Plot, cdf
from chairlift.bench.traces import read
from chairlift.cli import compare_flags
from chairlift.cli.flag_checks import refuse
from chairlift.config import EngineConfig, ServerConfig
from chairlift.errors import InvalidSetting
from chairlift.sim import table
from chairlift.sim.compare import Side, made_up, simulated, variants
from chairlift.sim.devices import Profile, device
from chairlift.sim.live import really_run
from chairlift.sim.picture import picture
from chairlift.sim.run import basis, ready
from chairlift.sim.workload import Workload

_COLUMNS = (
    ("all done", "all_done_s", "time"),
    ("tokens/s", "tokens_per_s", "rate"),
    ("seats used", "seats_used", "share"),
    ("first token p50", "ttft_p50_s", "time"),
    ("p95", "ttft_p95_s", "time"),
    ("wait, mean", "wait_mean_s", "time"),
    ("not served", "unserved", "rare"),
)
"""The table: heading, figure, and how it is written; rare ones are left out where they are 0."""

_OF_MADE_UP = ("prompt_tokens", "output_tokens", "request_rate")


def run(given: Mapping[str, Any], engine: EngineConfig, server: ServerConfig, began: float) -> int:
    """Runs the same requests under each variant, in virtual time or really, and shows them side by side."""
    if given["run"] and given["machine"]:
        raise InvalidSetting("--device names a machine to simulate: with --run this one does the work")
    if not given["run"]:
        refuse("it is for the engine that --run runs", load_format=given.get("load_format"), threads=given.get("threads"))
    if set(given["batchings"]) == {"continuous"}:
        refuse("continuous batching has no batches of a size", static_batch_size=given["batch"])
    if "dynamic" not in given["batchings"]:
        refuse("only dynamic batches wait to fill", batch_timeout_ms=given["timeout"])
    if engine.max_num_seqs is None and not given["trace"]:
        engine = replace(engine, max_num_seqs=min(compare_flags.SEATS, engine.max_num_batched_tokens or compare_flags.SEATS))
    workload = _workload(given, engine)
    sides = []
    for variant in variants(engine, given["batchings"], given["policies"], given["batch"], given["timeout"] or compare_flags.TIMEOUT):
        if given["run"]:
            print(f"running {len(workload):,} requests: {variant.name}", file=sys.stderr, flush=True)
            sides.append(really_run(workload, variant))
        else:
            sides.append(simulated(workload, variant, given["model"], given["machine"] or "cpu"))
    title, about = _title(workload, sides), _about(given, engine, workload)
    rests = None if given["run"] else basis(given["model"], device(given["machine"] or "cpu"), engine)
    if given["json"]:
        print(json.dumps({"title": title, "about": about, "basis": rests, "sides": [_document(side) for side in sides]}, indent=1))
    else:
        words = (f"{side.variant.title}. {side.variant.words}" for side in sides)
        print("\n".join([f"{title}.", about, "", table.text(_lines(sides)), "", *words, *(["", table.wrapped([rests])] if rests else [])]))
    if given["output"] or given["report"]:
        drawn = picture(sides, title, about)
        if given["output"]:
            Path(given["output"]).write_text(drawn, encoding="utf-8")
        if given["report"]:
            _page(sides, drawn, [rests] if rests else []).write(given["report"])
    return 0


def _lines(sides: Sequence[Side]) -> list[list[str]]:
    """The sides in cells, each with how many times the tokens a second of the first it makes."""
    figures = [side.figures() for side in sides]
    columns = [column for column in _COLUMNS if column[2] != "rare" or any(one[column[1]] for one in figures)]
    lines = [["", *(heading for heading, _, _ in columns)]]
    lines += [[side.variant.name, *(_cell(one[key], kind) for _, key, kind in columns)] for side, one in zip(sides, figures, strict=True)]
    if len(sides) > 1:
        lines[0].insert(3, f"to {sides[0].variant.name}")
        for line, one in zip(lines[1:], figures, strict=True):
            line.insert(3, f"{one['tokens_per_s'] / figures[0]['tokens_per_s']:.2f}x")
    return lines


def _cell(value: float, kind: str) -> str:
    return {"time": f"{value:,.2f} s", "rate": f"{value:,.0f}", "share": f"{value:.0%}"}.get(kind, f"{value:,}")


def _workload(given: Mapping[str, Any], engine: EngineConfig) -> Workload:
    """What is asked for; raises InvalidSetting for flags of made-up requests beside a trace, and the other way round."""
    beside = [f"--{name.replace('_', '-')}" for name in (_OF_MADE_UP if given["trace"] else ["rate_scale"]) if given[name] is not None]
    if beside:
        raise InvalidSetting(f"{beside[0]} is for {'made-up requests: leave out' if given['trace'] else 'a trace: name one with'} --trace")
    if given["trace"]:
        return ready(Workload.of(read(given["trace"]), engine.tenant_weights), given["rate_scale"] or 1.0, given["num_requests"])
    count, prompt = given["num_requests"] or compare_flags.REQUESTS, given["prompt_tokens"] or compare_flags.PROMPT_TOKENS
    output, rate = given["output_tokens"] or compare_flags.OUTPUT_TOKENS, given["request_rate"] or compare_flags.RATE
    return Workload.of(made_up(count, prompt, output, rate))


def _title(workload: Workload, sides: Sequence[Side]) -> str:
    seats = {side.seats for side in sides}
    return f"The same {len(workload):,} requests" + (f" on the same {seats.pop():,} seats" if len(seats) == 1 else "")


def _about(given: Mapping[str, Any], engine: EngineConfig, workload: Workload) -> str:
    """The requests and the machine in a sentence."""

    def between(name: str) -> str:
        column = workload.column(name)
        return f"{column.min():,} to {column.max():,}"

    seconds = int(workload.column("arrival_us")[-1]) / 1e6
    pace = f"over {seconds:,.1f} s" if seconds else "all at once"
    on = device(given["machine"] or "cpu")
    model = on.model if isinstance(on, Profile) else engine.model
    where = "this machine, really run" if given["run"] else f"{'two cores of a Xeon' if on.name == 'cpu' else on.name}, simulated"
    which = f"{Path(model).name} on {where}" if model else where
    return f"Prompts of {between('prompt')} tokens, answers of {between('output')}, {pace}. {which}."


def _document(side: Side) -> dict[str, Any]:
    config = side.variant.config
    return {"name": side.variant.name, "batching": config.batching, "policy": config.scheduling_policy, "figures": side.figures()}


def _page(sides: Sequence[Side], drawn: str, notes: Sequence[str]) -> Page:
    page = Page("Ways to batch, side by side")
    page.notes(notes)
    page.drawing(drawn)
    header, *rows = _lines(sides)
    page.table(header, rows)
    page.plots(
        [
            _shares(sides, "TTFT", "How long until an answer begins.", "first_token"),
            _shares(sides, "E2EL", "How long until it is there.", "ended"),
        ]
    )
    page.heading("Variants")
    page.words({side.variant.name: f"{side.variant.title}. {side.variant.words}" for side in sides})
    return page


def _shares(sides: Sequence[Side], name: str, caption: str, until: str) -> Plot:
    curves = [
        cdf(side.variant.name, np.sort((side.rides[until] - side.rides["arrived"]) / 1e6).tolist(), colour)
        for colour, side in enumerate(sides)
    ]
    return Plot(name, f"{caption} The share of requests for which it is so long at most.", Axis(name, "s"), Axis("share", "%"), curves)
