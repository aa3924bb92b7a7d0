"""The traces of tests/data/traces, as workloads."""

import csv
import gzip
from functools import cache
from pathlib import Path

from chairlift.bench.traces import TraceRequest, read
from chairlift.sim.workload import Workload

TRACES = Path(__file__).parent.parent / "data" / "traces"
CONV, CODE, ARENA = (TRACES / f"{name}.csv.gz" for name in ("azure2023_conv", "azure2023_code", "vtc_arena_27clients"))


@cache
def workload(path: Path) -> Workload:
    return Workload.of(read(path))


@cache
def mooncake() -> Workload:
    with gzip.open(TRACES / "mooncake_conversation_runs.csv.gz", "rt") as file:
        return Workload.of(
            [
                TraceRequest(float(row["arrival_s"]), int(row["prompt_tokens"]), int(row["output_tokens"]), _ids(row["hash_runs"]))
                for row in csv.DictReader(file)
            ]
        )


def _ids(runs: str) -> tuple[int, ...]:
    ends = (run.partition("-") for run in runs.split("|"))
    return tuple(number for first, _, last in ends for number in range(int(first), int(last or first) + 1))
