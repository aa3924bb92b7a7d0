"""One benchmark run: readiness check, warm-up, load, and notes on the validity of the figures."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from chairlift.bench import processes
from chairlift.bench.client import Target, models
from chairlift.bench.load import warm_up
from chairlift.bench.record import Record, Run
from chairlift.bench.session_alone import Alone, sample
from chairlift.bench.session_load import SessionLoad, SessionRecord
from chairlift.bench.sessions import RecordedSession
from chairlift.bench.workload import Job, random_jobs
from chairlift.errors import ChairliftError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

Result = TypeVar("Result")

MAX_CPU_SHARE = 0.8
"""The share of a core above which a client process delays its own measurements."""

MAX_LAG = 0.01
"""Seconds of p99 lateness of sends above which a note is added."""

WARM_UP = (64, 16)
"""Prompt and output length of a warm-up request."""

_POLL = 0.25


def wait_for(target: Target, seconds: float) -> list[dict[str, Any]]:
    """The models that /v1/models lists, once the server responds. Raises ChairliftError after `seconds`."""
    return _retry(seconds, lambda: asyncio.run(models(target)))


def wait_until_ready(target: Target, seconds: float) -> None:
    """Waits until a request succeeds: a server can list models that are still loading. Raises ChairliftError after `seconds`."""
    _retry(seconds, lambda: asyncio.run(warm_up(target, random_jobs(1, *WARM_UP, seed=-1))))


def _retry(seconds: float, attempt: Callable[[], Result]) -> Result:
    deadline = time.monotonic() + seconds
    while True:
        try:
            return attempt()
        except ChairliftError:
            if time.monotonic() >= deadline:
                raise
            time.sleep(_POLL)


def measure(
    target: Target,
    jobs: Sequence[Job],
    *,
    max_concurrency: int | None = None,
    workers: int = 1,
    warmups: int = 1,
    progress: str | None = None,
) -> Run:
    """Warms the server up and runs the load from `workers` processes.

    `progress` is the label of a progress bar; None shows none. After Ctrl-C the run has the requests that had ended. Raises ChairliftError
    if a warm-up request fails.
    """
    with _bar(progress, len(jobs)) as on_end:
        _warm_up(target, warmups)
        records, share = processes.drive(target, jobs, max_concurrency, workers, on_end)
    run = Run(records, cpu_share=share, notes=notes(records, share), interrupted=len(records) < len(jobs))
    if run.interrupted:
        run.notes.insert(0, f"Interrupted: {len(records)} of {len(jobs)} requests had ended; the figures cover these.")
    return run


@dataclass
class SessionsRun:
    """A run of sessions, and of requests without a session beside them."""

    run: Run
    """All requests."""
    replays: list[SessionRecord]
    others: list[Record]
    """The requests without a session."""


def measure_sessions(
    target: Target,
    sessions: Sequence[RecordedSession],
    users: int,
    *,
    longest_think: float,
    duration: float | None = None,
    beside: Sequence[Job] = (),
    max_concurrency: int | None = None,
    seed: int = 0,
    warmups: int = 1,
    progress: str | None = None,
) -> SessionsRun:
    """Warms the server up, measures what a session takes alone, and lets users run sessions: see `SessionLoad`. Otherwise as `measure`."""
    with _bar(progress, sum(session.num_requests for session in sessions) + len(beside)) as on_end:
        _warm_up(target, warmups)
        alone = _measure_alone(target, sample(sessions), seed)
        load = SessionLoad(target, sessions, longest_think, seed, on_end, alone)
        replays, share = asyncio.run(load.run(users, duration, beside, max_concurrency))
    records = sorted((*load.others, *(record for replay in replays for record in replay.records)), key=lambda record: record.due)
    run = Run(records, cpu_share=share, notes=notes(records, share), interrupted=load.interrupted)
    if alone is None:
        run.notes.append("Slowdowns are unknown: a request of the session that was replayed alone failed.")
    return SessionsRun(run, replays, load.others)


def _measure_alone(target: Target, session: RecordedSession, seed: int) -> Alone | None:
    """The times of requests that are alone on the server, by a replay of a session without its gaps; None if a request failed."""
    load = SessionLoad(target, [session], 0.0, seed, is_alone=True)
    [replay], _ = asyncio.run(load.run(1))
    if load.interrupted:
        raise KeyboardInterrupt
    return Alone.fitted(replay.records, session.fresh_tokens()[0]) if replay.complete else None


def _warm_up(target: Target, count: int) -> None:
    """Sends warm-up requests of another seed: prompts of the run must not be in the server's cache."""
    if count:
        asyncio.run(warm_up(target, random_jobs(count, *WARM_UP, seed=-1)))


def notes(records: Sequence[Record], cpu_share: float | None) -> list[str]:
    """Notes on the validity of the figures, as sentences."""
    done = [record for record in records if record.ok]
    result = []
    if failures := Counter(record.failure for record in records if not record.ok):
        kind = failures.most_common(1)[0][0]
        detail = Counter(record.detail for record in records if record.failure == kind).most_common(1)[0][0]
        result.append(
            f"{failures.total()} of {len(records)} requests failed, most often with {kind}: {' '.join(detail.split())} (see "
            "--save-detailed)."
        )
    if cpu_share is not None and cpu_share > MAX_CPU_SHARE:
        result.append(f"A client process used {cpu_share:.0%} of a core, so the figures include its own delays. Use more --processes.")
    lags = sorted(record.lag for record in records)
    if lags and lags[int(len(lags) * 0.99)] > MAX_LAG:
        result.append(
            f"The client sent requests late, by {lags[int(len(lags) * 0.99)] * 1e3:.0f} ms at p99. Latencies count from the due times and "
            "include this."
        )
    if done and not any(record.counted for record in done):
        result.append("The server reports no usage: output tokens are counted as stream events, input tokens as requested.")
    events, tokens = sum(len(record.times) for record in done), sum(record.output_tokens for record in done)
    if events and tokens / events > 1.05:
        result.append(f"A stream event has {tokens / events:.1f} tokens on average: ITL is the gap between events, not tokens.")
    short = sum(record.output_tokens < record.requested_tokens for record in done)
    if short:
        mean = statistics.fmean(record.output_tokens / record.requested_tokens for record in done)
        result.append(
            f"{short} of {len(done)} outputs are shorter than requested ({mean:.0%} of the length on average), because the model stopped. "
            "--ignore-eos generates the full length, if the server supports it."
        )
    cached, prompts = sum(record.cached_tokens or 0 for record in done), sum(record.prompt_tokens for record in done)
    if cached > 0.01 * prompts:
        result.append(
            f"{cached / prompts:.0%} of the prompt tokens came from the server's prefix cache. If the prompts share no prefixes, an "
            "earlier run with the same seed left them there: change --seed."
        )
    return result


@contextmanager
def _bar(text: str | None, total: int) -> Iterator[Callable[[bool], None] | None]:
    """Shows a progress bar on stderr. Yields the function to call at each end, or None without a bar."""
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
