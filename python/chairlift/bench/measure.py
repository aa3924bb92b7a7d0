"""One run against a server, from its warm-up to what the reader has to know about its numbers."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from chairlift.bench import processes
from chairlift.bench.client import Target, models
from chairlift.bench.load import warm_up
from chairlift.bench.record import Record, Run
from chairlift.bench.workload import Job, random_jobs
from chairlift.errors import ChairliftError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

Result = TypeVar("Result")

BUSY = 0.8
"""The part of a core from which on a client process delays what it measures."""

LATE = 0.01
"""Seconds of lateness at p99 that a reader should know of."""

WARM_UP = (64, 16)
"""Prompt and output of a warm-up request."""

_POLL = 0.25


def wait_for(target: Target, seconds: float) -> list[dict[str, Any]]:
    """What the server's /v1/models lists, once it answers; raises ChairliftError if it doesn't within `seconds`."""
    return _within(seconds, lambda: asyncio.run(models(target)))


def wait_until_ready(target: Target, seconds: float) -> None:
    """Returns when a request succeeds: a server may list models that it still loads. Raises ChairliftError after `seconds`."""
    _within(seconds, lambda: asyncio.run(warm_up(target, random_jobs(1, *WARM_UP, seed=-1))))


def _within(seconds: float, attempt: Callable[[], Result]) -> Result:
    until = time.monotonic() + seconds
    while True:
        try:
            return attempt()
        except ChairliftError:
            if time.monotonic() >= until:
                raise
            time.sleep(_POLL)


def measure(
    target: Target, jobs: Sequence[Job], *, seats: int | None = None, workers: int = 1, warmups: int = 1, progress: str | None = None
) -> Run:
    """Warms the server up, puts the load on it from `workers` processes, and notes what disturbed the numbers.

    `progress` is what the bar says; None shows none. Ctrl-C ends the load, and the run is of what had ended by then. Raises ChairliftError
    if the server refuses the very first request.
    """
    with _bar(progress, len(jobs)) as on_end:
        if warmups:
            # Words of their own: a prompt of the run would be in the server's cache when its turn comes.
            asyncio.run(warm_up(target, random_jobs(warmups, *WARM_UP, seed=-1)))
        records, share = processes.drive(target, jobs, seats, workers, on_end)
    run = Run(records, cpu_share=share, notes=notes(records, share), interrupted=len(records) < len(jobs))
    if run.interrupted:
        run.notes.insert(0, f"Interrupted: {len(records)} of {len(jobs)} requests had ended, and the numbers are of these.")
    return run


def notes(records: Sequence[Record], cpu_share: float | None) -> list[str]:
    """What a reader has to know about the numbers, in whole sentences."""
    done = [record for record in records if record.ok]
    found = []
    if failures := Counter(record.failure for record in records if not record.ok):
        kind = failures.most_common(1)[0][0]
        said = Counter(record.detail for record in records if record.failure == kind).most_common(1)[0][0]
        found.append(
            f"{failures.total()} of {len(records)} requests failed, most of them with {kind}: {' '.join(said.split())} (--save-detailed "
            "tells of each)."
        )
    if cpu_share is not None and cpu_share > BUSY:
        found.append(
            f"One process of the client used {cpu_share:.0%} of a core: its own delays are in these numbers. Give it more with --processes."
        )
    lags = sorted(record.lag for record in records)
    if lags and lags[int(len(lags) * 0.99)] > LATE:
        found.append(
            f"Requests were sent late, by {lags[int(len(lags) * 0.99)] * 1e3:.0f} ms at p99. Latencies count from when they were due, so "
            "this is in them."
        )
    if done and not any(record.counted for record in done):
        found.append("The server tells no usage: output tokens are the pieces of its streams, input tokens what was asked for.")
    pieces, tokens = sum(len(record.times) for record in done), sum(record.output_tokens for record in done)
    if pieces and tokens / pieces > 1.05:
        found.append(f"A piece of a stream brings {tokens / pieces:.1f} tokens on average: ITL is the gap between pieces, not tokens.")
    short = sum(record.output_tokens < record.wanted_tokens for record in done)
    if short:
        mean = statistics.fmean(record.output_tokens / record.wanted_tokens for record in done)
        found.append(
            f"{short} of {len(done)} answers are shorter than asked for ({mean:.0%} of the length on average): the model ended them. "
            "--ignore-eos makes it go on, where the server can."
        )
    cached, prompts = sum(record.cached_tokens or 0 for record in done), sum(record.prompt_tokens for record in done)
    if cached > 0.01 * prompts:
        found.append(
            f"{cached / prompts:.0%} of the prompt tokens were in the server's cache. If the workload shares no beginnings, they are left "
            "from a run with the same seed: change --seed."
        )
    return found


@contextmanager
def _bar(text: str | None, total: int) -> Iterator[Callable[[bool], None] | None]:
    """A progress bar on stderr, where somebody sees it; yields what is to hear of each end."""
    if text is None:
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[failed]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True, refresh_per_second=4) as progress:
        task = progress.add_task(text, total=total, failed="")
        failed = 0

        def on_end(ok: bool) -> None:
            nonlocal failed
            failed += not ok
            progress.update(task, advance=1, failed=f"{failed} failed" if failed else "")

        yield on_end
