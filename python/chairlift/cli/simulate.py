"""`chairlift simulate`: simulates a trace on a modelled device."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from chairlift.cli import flags, policy_files, shared_models, simulated_trace, values
from chairlift.config import EngineConfig
from chairlift.errors import InvalidSetting
from chairlift.scheduling import ROUTINGS
from chairlift.sim import table
from chairlift.sim.devices import device
from chairlift.sim.groups import GROUPS, figures
from chairlift.sim.models import ModelsResult, devices_of, simulate_models
from chairlift.sim.report import SIMULATED, page
from chairlift.sim.result import Result
from chairlift.sim.run import SETTINGS, basis, machine, model_on
from chairlift.sim.run import run as simulated
from chairlift.sim.sessions import DURATION, THINK_TIME, USERS, simulate_sessions

EXAMPLES = """\
examples:
  chairlift simulate --trace conv.csv --model Llama-3.1-8B --modelled-device H100
  chairlift simulate --trace conv.csv --model Llama-3.1-8B --modelled-device H100 --rate-scale 4 --policy shortest
  chairlift simulate --trace conv.csv --model Llama-3.1-8B --modelled-device H100 --policy mine.py:Mine
  chairlift simulate --trace conv.csv --model Llama-3.1-8B --modelled-device A100 --batching static --static-batch-size 32
  chairlift simulate --trace conv.csv --model Llama-3.1-8B --modelled-device H100 --replicas 8 --num-requests 1000000
  chairlift simulate --trace day.journal --rate-scale 4 --speculative-config '{"method": "off"}'
  chairlift simulate --trace mixed.csv --models models.toml --modelled-device H100
  chairlift simulate --sessions agents.jsonl.gz --users 32 --model Llama-3.1-8B --modelled-device H100
  chairlift simulate --sessions agents.jsonl.gz --trace conv.csv --model Llama-3.1-8B --modelled-device H100
  chairlift calibrate -o here.json && chairlift simulate --trace conv.csv --modelled-device here.json

The scheduler is the one that serves. Only time is simulated: a step takes as long as a roofline of the device's bandwidth and
peak says, or as 'chairlift calibrate' measured. The roofline assumes that kernels reach 80 % of a GPU's bandwidth and 60 % of
its peak, and that each step has 0.5 ms of overhead. Use it to compare settings and devices: its absolute error is unknown. The
same command gives the same numbers. Traces are read as by 'chairlift bench': Azure, BurstGPT, Mooncake, ShareGPT, or a CSV of
arrival_s,prompt_tokens,output_tokens. A journal of 'chairlift serve --journal' is a trace too. The drafts that
it recorded are proposed again.

With --models, a trace's column 'model' names each request's model. All models are loaded, share the device's memory, and run a
step of one model at a time, chosen as by 'chairlift serve --models'. '--modelled-device chat=chat.json,embed=embed.json' names a
file of 'chairlift calibrate' for each. Drafts are not simulated then.

With --sessions, users run recorded sessions of agents in a closed loop: a request is sent when the answer before it has come and
the recorded time has passed. Each user has one session at a time. The first seventh of the time is left out of the figures. With
--trace too, its requests arrive beside the sessions.

Devices: H200, H100, A100, A10G, L4, RTX4090, cpu (two cores of a Xeon), or a file that 'chairlift calibrate' wrote.
Models: Llama-3.1-8B, Llama-3.1-70B, Llama-3.2-1B, Llama-3.2-3B, Mistral-7B, Qwen2.5-7B, Qwen3-8B, Qwen3-32B, SmolLM2-135M,
SmolLM2-1.7B; any other by its directory, .gguf file or hub name. A directory with a config.json takes precedence over a
well-known model of the same name. A file of 'chairlift calibrate' names its model and data types.
"""


def add_parser(commands: Any, summary: str) -> None:
    """Adds the command and its flags."""
    parser = flags.add_command(commands, "simulate", summary, EXAMPLES, run)
    parser.usage = "%(prog)s [--trace FILE] [--sessions PATH] [MODEL]"
    trace = "requests with their arrival times, prompt and output lengths; or a journal"
    parser.add_argument("--trace", metavar="FILE", help=trace)
    parser.add_argument(
        "--sessions", metavar="PATH", help=f"{flags.SESSIONS}, which users run in a closed loop, beside a trace if there is one"
    )
    flags.add_value(parser, "--users", values.whole(1, 10**6), "N", f"users of --sessions (default: {USERS})")
    flags.add_max_think_time(parser, THINK_TIME)
    duration = f"seconds of --sessions to simulate (default: {DURATION / 3600:g} hours)"
    flags.add_value(parser, "--duration", values.number(1.0, 1e9), "S", duration)
    disk = "bytes a second at which a disk with all contexts of --sessions is read, like 2G, as with --prefix-cache-dir (default: none)"
    flags.add_value(parser, "--disk", values.size(1 << 20, 1 << 40), "N", disk)
    flags.add_model(parser, flags.SIMULATED_MODEL)
    shared_models.add_flag(parser)
    parser.add_argument(
        "--modelled-device", default="cpu", metavar="NAME", help="device to simulate, or a file of 'chairlift calibrate' (default: cpu)"
    )
    flags.add_value(parser, "--rate-scale", values.number(1e-6, 1e6), "X", "multiply the trace's request rate by X", 1.0)
    flags.add_value(parser, "--num-requests", values.whole(1, 10**8), "N", "the trace's first N requests; a shorter trace is repeated")
    flags.add_value(parser, "--replicas", values.whole(1, 1024), "N", "engines behind a router", 1)
    parser.add_argument(
        "--routing", choices=ROUTINGS, default="round-robin", help="how the router chooses a replica (default: round-robin)"
    )
    flags.add_json(parser)
    flags.add_report(parser)
    flags.add_fields(parser, EngineConfig, [*SETTINGS, "speculative_config"])
    policy_files.accept(parser)


def run(args: argparse.Namespace) -> int:
    """Simulates a trace or sessions and reports latencies and throughput. Returns 1 if the policy failed."""
    if args.sessions is not None:
        return _run_sessions(args)
    if args.trace is None:
        raise InvalidSetting("name what to simulate: --trace FILE or --sessions PATH")
    flags.reject("it is for --sessions", users=args.users, max_think_time=args.max_think_time, duration=args.duration, disk=args.disk)
    if args.models is not None:
        return _run_models(args)
    engine = args.engine
    workload = simulated_trace.read(args.trace, engine, args.num_requests, args.rate_scale)
    on = device(args.modelled_device)
    settings, step_time = machine(args.model, on, engine)
    drafts = engine.num_speculative_tokens
    result = simulated(workload, settings, step_time, replicas=args.replicas, routing=args.routing, draft_tokens=drafts)
    note = basis(args.model, on, engine)
    if args.json:
        print(json.dumps(result.document() | _cost(result) | {"step_time": step_time.document(), "basis": note}, indent=1))
    else:
        print(_summary(result, note))
    if args.report:
        model = model_on(on, engine)
        title = f"Simulation: {model} on {args.modelled_device}" if model else f"Simulation: {args.modelled_device}"
        page({Path(args.trace).name: result}, title, [SIMULATED, note, *_changes(args)]).write(args.report)
    return 1 if result.policy_failure else 0


def _run_sessions(args: argparse.Namespace) -> int:
    """Simulates users of sessions and reports their figures."""
    flags.reject("it is for --trace without --sessions", models=args.models, report=args.report)
    on, engine, beside = device(args.modelled_device), args.engine, None
    if args.trace is not None:
        beside = simulated_trace.read(args.trace, engine, args.num_requests, args.rate_scale)
    else:
        flags.reject("it is for --trace", rate_scale=None if args.rate_scale == 1 else args.rate_scale, num_requests=args.num_requests)
    settings = {name: getattr(engine, name) for name in SETTINGS}
    result = simulate_sessions(
        args.sessions,
        args.users or USERS,
        model=args.model,
        device=on,
        longest_think=THINK_TIME if args.max_think_time is None else args.max_think_time,
        duration=args.duration or DURATION,
        disk=args.disk,
        beside=beside,
        replicas=args.replicas,
        routing=args.routing,
        **settings,
    )
    note, failure = basis(args.model, on, engine), result.result.policy_failure
    if args.json:
        more: dict[str, Any] = {"refused_for": dict(result.result.refused_for), "policy_failure": failure, "replays": result.replays()}
        more |= {"tenants": result.grouped("tenant"), "tiers": result.grouped("tier")}
        more |= {"without_session": figures(result.others)} if beside is not None else {}
        print(json.dumps(result.figures() | more | {"wall_s": result.wall, "basis": note}, indent=1))
        return 1 if failure else 0
    speed = f"{result.span:,.0f} s simulated in {result.wall:.2f} s ({result.span / result.wall:,.0f} times real time)."
    notes = [*table.refusals(result.result.refused_for), speed, note]
    kinds = {"of sessions": figures(result.requests), "others": figures(result.others)} if beside is not None else {}
    grouped = [table.group(kinds, "requests"), *(table.group(result.grouped(by), by) for by in ("tenant", "tier"))]
    tables = [table.text(lines) for lines in (table.sessions(result.figures()), *grouped) if lines]
    print("\n\n".join([*tables, table.wrapped(notes)]))
    return 1 if failure else 0


def _run_models(args: argparse.Namespace) -> int:
    """Simulates a trace on several models and reports each model's figures."""
    models = shared_models.read(args)
    flags.reject("each of several models has one engine", replicas=None if args.replicas == 1 else args.replicas)
    on = devices_of(args.modelled_device)
    result = simulate_models(args.trace, models, device=on, rate_scale=args.rate_scale, requests=args.num_requests)
    notes = _notes(on)
    if args.json:
        print(json.dumps(result.document() | {"basis": notes}, indent=1))
    else:
        print(_models_summary(result, notes))
    if args.report:
        title = f"Simulation: {len(models)} models on {args.modelled_device}"
        page(result.results, title, [SIMULATED, *notes, *_changes(args)]).write(args.report)
    return 1 if any(one.policy_failure for one in result.results.values()) else 0


def _notes(on: str | dict[str, str]) -> list[str]:
    """The bases of the step times."""
    files = on if isinstance(on, dict) else {"": on}
    return list(dict.fromkeys(device(file).basis for file in files.values()))


def _models_summary(result: ModelsResult, notes: list[str]) -> str:
    """The figures as text, and the bases of the step times."""
    span = f"{result.span:,.0f} s simulated in {result.wall:.2f} s."
    refused = [f"{name}: {sentence}" for name, one in result.results.items() for sentence in table.refusals(one.refused_for)]
    return "\n".join([table.text(table.models(result.figures())), "", span, table.wrapped([*refused, *notes])])


def _changes(args: argparse.Namespace) -> list[str]:
    """A sentence on how the simulation differs from the trace, if it does."""
    changed = [f"{args.num_requests:,} of its requests"] if args.num_requests else []
    changed += [f"{args.rate_scale:g} times its rate"] if args.rate_scale != 1 else []
    changed += [f"{args.replicas:,} replicas behind a {args.routing} router"] if args.replicas > 1 else []
    return [f"The trace was simulated with {', '.join(changed)}."] if changed else []


def _summary(result: Result, basis: str) -> str:
    """The figures as text, and the `basis` of the step times."""
    return "\n".join(
        [
            table.text(table.cells({"": result})[1:]),
            "",
            *(line for group in GROUPS if (lines := table.group(result.grouped(group), group)) for line in (table.text(lines), "")),
            *([table.wrapped(notes), ""] if (notes := table.notes(result)) else []),
            f"Mean time in each state: {table.states(result)}",
            f"{result.span:,.0f} s simulated in {result.wall:.2f} s ({result.span / result.wall:,.0f} times real time), "
            f"{result.decisions / result.wall / 1e6:.1f} million decisions a second.",
            table.wrapped([basis]),
        ]
    )


def _cost(result: Result) -> dict[str, object]:
    """The simulation's wall time and decisions, and each replica's share of the load."""
    return {
        "replicas": [{"requests": len(one.requests), "tokens": one.stats["generated_tokens"]} for one in result.replicas],
        "wall_s": result.wall,
        "decisions": result.decisions,
    }
