"""`chairlift compare`: batching modes and policies on the same requests."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from chairlift.cli import flags, policy_files, simulated_trace, values
from chairlift.config import EngineConfig
from chairlift.errors import InvalidSetting
from chairlift.sim import compare_report, table
from chairlift.sim.compare import simulate_variant, synthetic_requests, variants
from chairlift.sim.compare_plot import plot
from chairlift.sim.devices import Device, Profile, device
from chairlift.sim.live import run_live
from chairlift.sim.run import SETTINGS, basis, model_on
from chairlift.sim.workload import Workload

TIMEOUT_MS = 500.0
"""Default of `--batch-timeout-ms`."""

SLOTS, REQUESTS, INPUT_LEN, OUTPUT_LEN, RATE = 8, 32, 64, 96, 6.0
"""Defaults: few enough requests to follow by eye, and more than static batching can serve."""

_EXAMPLES = """\
examples:
  chairlift compare                                  32 requests on 8 batch slots, as a table
  chairlift compare -o compare.svg                   the same as a plot
  chairlift compare --run                            run them on this machine's engine
  chairlift compare --trace conv.csv --model Llama-3.1-8B --modelled-device H100 --report page.html
  chairlift compare --batching continuous --policy fcfs,shortest,fair --num-requests 200
  chairlift compare --max-num-seqs 16 --request-rate inf --output-len 200

Every variant gets the same requests. Without --run the comparison is simulated, as by 'chairlift simulate'; --trace, --model and
--modelled-device work as there, and the same command gives the same numbers and the same plot.
"""

_VARIED = {"batching", "scheduling_policy", "static_batch_size", "batch_timeout_ms"}
"""Settings in which the variants differ."""


def add_parser(commands: Any, summary: str) -> None:
    """Adds the command and its flags."""
    parser = flags.add_command(commands, "compare", summary, _EXAMPLES, run)
    parser.add_argument("--run", dest="live", action="store_true", help="run the variants on this machine's engine, one after the other")
    flags.add_model(parser, flags.SIMULATED_MODEL)
    parser.add_argument("--modelled-device", metavar="NAME", help="device to simulate, or a file of 'chairlift calibrate' (default: cpu)")
    _add_requests(parser.add_argument_group("requests"))
    _add_variants(parser.add_argument_group("variants"))
    group = parser.add_argument_group("results")
    flags.add_json(group)
    flags.add_value(group, ("-o", "--output"), values.picture, "FILE", "write a plot, as .svg or .png")
    flags.add_report(group)
    flags.add_fields(parser, EngineConfig, [*(name for name in SETTINGS if name not in _VARIED), "load_format", "threads"])


def _add_requests(group: argparse._ArgumentGroup) -> None:
    tokens = values.whole(1, 10**6)
    group.add_argument("--trace", metavar="FILE", help="use a trace's requests (default: synthetic ones)")
    flags.add_value(group, "--num-requests", values.whole(1, 10**8), "N", f"requests (default: {REQUESTS}, or all of a trace)")
    flags.add_value(group, "--input-len", tokens, "N", f"mean prompt length, in tokens (default: {INPUT_LEN})")
    flags.add_value(group, "--output-len", tokens, "N", f"mean output length, in tokens (default: {OUTPUT_LEN})")
    flags.add_value(
        group, "--request-rate", values.number(1e-6, 1e6, infinite=True), "X", f"requests a second; inf: all at once (default: {RATE:g})"
    )
    flags.add_value(group, "--rate-scale", values.number(1e-6, 1e6), "X", "multiply a trace's request rate by X (default: 1)")


def _add_variants(group: argparse._ArgumentGroup) -> None:
    for flag, name, field in (("--batching", "batchings", "batching"), ("--policy", "policies", "scheduling_policy")):
        choices = EngineConfig.__dataclass_fields__[field].metadata["choices"]
        default = ["static", "dynamic", "continuous"] if name == "batchings" else ["fcfs"]
        files = "" if name == "batchings" else ", and policies in Python as FILE.py:NAME"
        shown = f"some of {', '.join(choices)}{files} (default: {','.join(default)})"
        group.add_argument(flag, dest=name, type=values.several(_one_of(choices)), default=default, metavar="NAME,NAME", help=shown)
    group.add_argument(
        "--static-batch-size",
        dest="batch",
        type=values.whole(1, 10**6),
        metavar="N",
        help="sequences in a static or dynamic batch (default: --max-num-seqs)",
    )
    group.add_argument(
        "--batch-timeout-ms",
        dest="timeout",
        type=values.number(1e-3, 1e9),
        metavar="MS",
        help=f"longest wait for a dynamic batch to fill (default: {TIMEOUT_MS:g})",
    )


def _one_of(choices: tuple[str, ...]) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if policy_files.is_file(text) and "fcfs" in choices:
            return policy_files.load(text)
        if text not in choices:
            raise argparse.ArgumentTypeError(f"expected some of {', '.join(choices)}, got {text!r:.50}")
        return text

    return parse


def run(args: argparse.Namespace) -> int:
    """Runs the same requests under each variant, simulated or live, and compares the results. Returns 1 if a policy failed."""
    engine = _checked_config(args)
    workload = _workload(args, engine)
    on, results = device(args.modelled_device or "cpu"), []
    for variant in variants(engine, args.batchings, args.policies, args.batch, args.timeout or TIMEOUT_MS):
        if args.live:
            print(f"running {len(workload):,} requests: {variant.name}", file=sys.stderr, flush=True)
            results.append(run_live(workload, variant))
        else:
            results.append(simulate_variant(workload, variant, args.model, on))
    title, subtitle = compare_report.title(len(workload), results), _subtitle(on, engine, workload, live=args.live)
    note = None if args.live else basis(args.model, on, engine)
    if args.json:
        variant_documents = [compare_report.document(result) for result in results]
        print(json.dumps({"title": title, "subtitle": subtitle, "basis": note, "variants": variant_documents}, indent=1))
    else:
        descriptions = (f"{result.variant.title}: {result.variant.description}" for result in results)
        lines = [f"{title}.", subtitle, "", table.text(compare_report.lines(results)), "", *compare_report.refusals(results), *descriptions]
        print("\n".join([*lines, *(["", table.wrapped([note])] if note else [])]))
    if args.output or args.report:
        svg = plot(results, title, subtitle)
        if args.output:
            svg.write(args.output)
        if args.report:
            compare_report.page(results, svg, [note] if note else []).write(args.report)
    return 1 if any(result.policy_failure for result in results) else 0


def _checked_config(args: argparse.Namespace) -> EngineConfig:
    """The engine's settings. Raises InvalidSetting for flags that exclude each other."""
    engine: EngineConfig = args.engine
    if args.live and args.modelled_device:
        raise InvalidSetting("--modelled-device is for a simulation: --run uses this machine")
    if args.live and (added := set(args.policies).difference(EngineConfig.__dataclass_fields__["scheduling_policy"].metadata["choices"])):
        raise InvalidSetting(f"{', '.join(sorted(added))}: policies in Python are simulated only, without --run")
    if not args.live:
        load_format, threads = getattr(args, "load_format", None), getattr(args, "threads", None)
        flags.reject("it is for --run", load_format=load_format, threads=threads)
    if set(args.batchings) == {"continuous"}:
        flags.reject("continuous batching has no fixed batches", static_batch_size=args.batch)
    if "dynamic" not in args.batchings:
        flags.reject("it is for dynamic batching", batch_timeout_ms=args.timeout)
    if engine.max_num_seqs is None and not args.trace:
        engine = replace(engine, max_num_seqs=min(SLOTS, engine.max_num_batched_tokens or SLOTS))
    return engine


def _workload(args: argparse.Namespace, engine: EngineConfig) -> Workload:
    """The requests. Raises InvalidSetting for flags of synthetic requests beside a trace, and the other way round."""
    if args.trace:
        synthetic = {"input_len": args.input_len, "output_len": args.output_len, "request_rate": args.request_rate}
        flags.reject("it is for synthetic requests, without --trace", **synthetic)
        return simulated_trace.read(args.trace, engine, args.num_requests, args.rate_scale or 1.0)
    flags.reject("it is for a --trace", rate_scale=args.rate_scale)
    lengths = args.input_len or INPUT_LEN, args.output_len or OUTPUT_LEN
    return Workload.of(synthetic_requests(args.num_requests or REQUESTS, *lengths, args.request_rate or RATE))


def _subtitle(on: Device | Profile, engine: EngineConfig, workload: Workload, *, live: bool) -> str:
    """One sentence on the requests and one on the machine."""

    def between(name: str) -> str:
        column = workload.column(name)
        return f"{column.min():,} to {column.max():,}"

    seconds = int(workload.column("arrival_us")[-1]) / 1e6
    arrivals = f"over {seconds:,.1f} s" if seconds else "all at once"
    model = model_on(on, engine)
    where = "this machine" if live else f"{'two cores of a Xeon' if on.name == 'cpu' else on.name}, simulated"
    which = f"{Path(model).name} on {where}" if model else where
    return f"Prompts of {between('prompt')} tokens, outputs of {between('output')}, {arrivals}. {which}."
