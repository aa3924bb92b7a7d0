"""`chairlift plan`."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from chairlift.bench.arrivals import gaps_in_words
from chairlift.bench.report.plot import duration
from chairlift.bench.traces import read
from chairlift.cli.flag_checks import refuse
from chairlift.cli.progress import bar
from chairlift.config import DEFAULT_MODEL, EngineConfig, ServerConfig
from chairlift.sim import table
from chairlift.sim.calibrate import SECONDS, calibrate
from chairlift.sim.devices import Device, Profile
from chairlift.sim.devices import device as known
from chairlift.sim.mix import FEWEST, Mix
from chairlift.sim.plan import Band, Plan, Targets, plan
from chairlift.sim.run import basis, check_sizes, ready
from chairlift.sim.workload import Workload

if TYPE_CHECKING:
    from collections.abc import Iterator

REQUESTS, PROMPT_TOKENS, OUTPUT_TOKENS = 2000, 256, 128
"""Of a trace, and of a request without one, where nobody says."""

WORDS = {
    "compute": "compute: steps take all the time there is, and neither seats, KV cache nor laxer targets bring much",
    "seats": "seats: requests wait for one of --max-num-seqs",
    "kv": "KV cache: requests wait for blocks of it",
    "ttft": "the target for first tokens: the machine could do more if they might come later",
    "itl": "the target between tokens: the machine could do more if they might come slower",
}
"""What binds, for people."""

MORE = {
    "compute": "a machine twice as fast",
    "seats": "twice the seats",
    "kv": "twice the KV cache",
    "ttft": "twice the time to first tokens",
    "itl": "twice the time between tokens",
}


def run(given: Mapping[str, Any], engine: EngineConfig, server: ServerConfig, began: float) -> int:
    """Says how many users fit."""
    mix, traffic = _mix(given, engine)
    targets = Targets(ttft=given["ttft_ms"] / 1e3, itl=given["itl_ms"] / 1e3, percentile=given["percentile"])
    on = known(given["machine"]) if given["machine"] else _measured(engine)
    with bar("planning") as on_progress:
        found = plan(mix, targets, device=on, model=given["model"], config=engine, on_progress=on_progress)
    model = on.model if isinstance(on, Profile) else engine.model
    told = told_of(found, on, model, traffic, given["users_every"]) | {"rests on": basis(given["model"], on, engine)}
    if given["json"]:
        users = found.users(given["users_every"])
        print(
            json.dumps(
                found.document() | {"users": users.rate, "machine": on.name, "model": model, "told": told}, indent=1, allow_nan=False
            )
        )
    else:
        print("\n".join(_lines(told, found)))
    if given["report"]:
        from chairlift.sim.plan_report import page

        page(found, told, _more(found)).write(given["report"])
    return 0


def told_of(found: Plan, on: Device | Profile, model: str, traffic: str, every: float) -> dict[str, str]:
    """The plan in words, by what they are about."""
    measured = isinstance(on, Profile)
    targets, users, figures = found.targets, found.users(every), found.figures
    flags = "".join(f" --{name.replace('_', '-')} {value}" for name, value in found.settings.items())
    # A journal does not tell its model.
    name = "" if model == DEFAULT_MODEL else f" {shlex.quote(model)}" if model else " MODEL"
    told = {
        "title": f"{f'{model} on ' if model else ''}{on.name}: about {_rates(found.most)} requests a second",
        "users": f"{users.rate:,.0f} people ({users.low:,.0f} to {users.high:,.0f}) who each send one every {every:g} s",
        "traffic": traffic,
        "targets": f"{targets.percentile:g} of 100 first tokens within {duration(targets.ttft)}, as many times between tokens within "
        f"{duration(targets.itl)}",
        "binds": WORDS[found.binds],
        "settings": f"chairlift serve{name}{flags}" if flags else "the defaults; others that were tried bring no more",
    }
    if flags:
        told["without them"] = f"about {_rates(found.default)} requests a second"
    at = next(point for point in found.points if point.rate == found.most.rate)
    told["at that rate"] = (
        f"first tokens within {duration(at.ttft)}, times between tokens within {duration(at.itl)}; "
        f"{figures['batch_mean'] or 0:.3g} sequences a step, {figures['kv_used_max'] or 0:.0%} of the KV cache held at most, "
        f"{figures['tokens_per_s'] or 0:,.0f} output tokens a second"
    )
    if found.left_out:
        told["left out"] = f"{found.left_out:,} requests of the trace, which are longer than the machine takes"
    spells = "from the unluckiest of five spells of traffic to the luckiest" if found.spells > 1 else "one spell of traffic"
    told["range"] = (
        f"{spells}, with steps {found.error:.1%} slower and faster{'' if measured else ' (a guess: nobody measured this machine)'}"
    )
    return told


def _rates(band: Band) -> str:
    return f"{band.rate:.3g} ({band.low:.3g} to {band.high:.3g})"


def _more(found: Plan) -> list[list[str]]:
    """What there would be with more of something: a row each."""
    return [[MORE[name], f"{rate:.3g}", f"{rate / found.most.rate - 1:+.0%}"] for name, rate in found.brings.items()]


def _lines(told: Mapping[str, str], found: Plan) -> Iterator[str]:
    yield f"{told['title']},"
    yield f"{told['users']}."
    yield ""
    names = [name for name in told if name not in ("title", "users", "rests on")]
    for name in names:
        yield f"{name.ljust(max(map(len, names)))}  {told[name]}"
    yield ""
    yield "With more of one thing, requests a second:"
    for what, rate, gain in _more(found):
        yield f"  {what.ljust(max(map(len, MORE.values())))}  {rate:>7}  {gain:>6}"
    yield ""
    yield table.wrapped([told["rests on"]])


def _mix(given: Mapping[str, Any], engine: EngineConfig) -> tuple[Mix, str]:
    """The traffic that was asked for, and its words."""
    shape = gaps_in_words(given["burstiness"])
    if given["trace"]:
        refuse("a --trace has lengths of its own", **{name: given[name] for name in ("input_len", "output_len", "range_ratio")})
        every = Workload.of(read(given["trace"]), engine.tenant_weights)
        trace = ready(every, 1.0, given["num_requests"] or min(REQUESTS, len(every)))
        timed = bool(trace.column("arrival_us")[-1]) if given["self_timed"] is None else given["self_timed"]
        few = f", which are few: its {FEWEST} would say more" if timed and len(trace) < FEWEST else ""
        coming = "at its own times, faster or slower" if timed else f"at random ({shape})"
        words = f"the first {len(trace):,} requests of {Path(given['trace']).name}{few}, {coming}"
        return Mix(trace=trace, timed=timed, burstiness=given["burstiness"]), words
    refuse("it is for the requests of a --trace", num_requests=given["num_requests"], self_timed=given["self_timed"])
    prompt, output, spread = given["input_len"] or PROMPT_TOKENS, given["output_len"] or OUTPUT_TOKENS, given["range_ratio"] or 0.0
    words = f"prompts of {prompt:,} tokens, answers of {output:,}{f' ± {spread:.0%}' if spread else ''}, at random ({shape})"
    return Mix(prompt_tokens=prompt, output_tokens=output, spread=spread, burstiness=given["burstiness"]), words


def _measured(engine: EngineConfig) -> Profile:
    check_sizes(engine)
    print(f"No --device: measuring this machine for {SECONDS:.0f} s (chairlift calibrate -o FILE keeps what is measured).", file=sys.stderr)
    with bar(f"calibrating with {engine.model}") as on_progress:
        return calibrate(engine, SECONDS, on_progress)
