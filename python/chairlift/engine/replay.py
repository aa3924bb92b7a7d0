"""A journal, lived again: as it was recorded, and under other settings."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chairlift import _core
from chairlift.errors import InvalidSetting


@dataclass(frozen=True, slots=True)
class Run:
    """What came of the requests once: `config` by the names of `_core.Scheduler`, ledgers in the order in which they ended.

    `refused` is how many were turned away; None for the recorded run, whose journal has nothing of them.
    """

    config: Mapping[str, Any]
    ledgers: Sequence[Mapping[str, Any]]
    stats: Mapping[str, Any]
    refused: int | None

    @property
    def began(self) -> int:
        """Microseconds at which the first request came, on the run's own clock."""
        return min((ledger["arrived"] for ledger in self.ledgers), default=0)

    @property
    def span(self) -> float:
        """Seconds from the first arrival to the last end."""
        return (max((ledger["ended"] for ledger in self.ledgers), default=0) - self.began) / 1e6

    def finished(self) -> Iterator[Mapping[str, Any]]:
        """The ledgers of the requests that came to their own end."""
        return (ledger for ledger in self.ledgers if ledger["finish"] in ("stop", "length"))

    def ttft(self) -> list[float]:
        """Seconds from arrival to first token of the requests that got one, sorted."""
        return sorted((ledger["first_token"] - ledger["arrived"]) / 1e6 for ledger in self.ledgers if ledger["first_token"] is not None)

    def causes(self) -> dict[str, float]:
        """Seconds by cause, the mean of all requests that ended."""
        sums: dict[str, int] = {}
        for ledger in self.ledgers:
            for cause, time in ledger["causes"].items():
                sums[cause] = sums.get(cause, 0) + time
        return {cause: total / 1e6 / len(self.ledgers) for cause, total in sums.items()}

    def figures(self) -> dict[str, float | None]:
        """The numbers by which runs are compared: names that end in `_s` are seconds; None for what is not known.

        Time per output token and end to end are those of the requests that finished, time in the queue that of all.
        """
        ended = [ledger["finish"] for ledger in self.ledgers]
        unfinished = sum(self.stats[name] for name in ("running", "waiting", "swapped"))
        queued = sorted((_started(ledger) - ledger["arrived"]) / 1e6 for ledger in self.ledgers)
        whole = sorted((ledger["ended"] - ledger["arrived"]) / 1e6 for ledger in self.finished())
        paces = sorted(
            (ledger["ended"] - ledger["first_token"]) / 1e6 / (ledger["output_tokens"] - 1)
            for ledger in self.finished()
            if ledger["output_tokens"] > 1
        )
        return {
            "requests": len(ended) + unfinished + (self.refused or 0),
            "finished": ended.count("stop") + ended.count("length"),
            "missed_deadline": ended.count("deadline"),
            "refused": self.refused,
            "aborted": ended.count("abort"),
            "failed": ended.count("error"),
            "unfinished": unfinished,
            **_percentiles("ttft", self.ttft(), 50, 90, 99),
            **_percentiles("queue", queued, 50, 99),
            **_percentiles("time_per_output_token", paces, 50, 99),
            **_percentiles("end_to_end", whole, 50, 99),
            "preemptions_recompute": self.stats["preemptions_recompute"],
            "preemptions_swap": self.stats["preemptions_swap"],
            "recomputed_tokens": self.stats["recomputed_tokens"],
            "prefix_hit_share": _ratio(self.stats["prefix_hits"], self.stats["prefix_queries"]),
            "steps": self.stats["steps"],
            "span_s": self.span,
            "tokens_per_s": _ratio(self.stats["generated_tokens"], self.span),
        }


@dataclass(frozen=True, slots=True)
class Replay:
    """A journal's calls, made again: the run, and whether every decision came out the same.

    `differs_at` is the first plan, counted from 0 and with the empty ones, that did not. `truncated`: the last record is cut off,
    as after a crash. `step_model`: microseconds of an empty step, a prompt token, a decoding sequence, a token of context,
    a pair of tokens of a prompt.
    """

    run: Run
    calls: int
    hash: str
    differs_at: int | None
    truncated: bool
    step_model: Sequence[float]


class Recording:
    """A journal's file, read whole; raises InvalidSetting where it can't be, or is none."""

    def __init__(self, path: str) -> None:
        self._path = path
        try:
            self._bytes = Path(path).read_bytes()
        except OSError as error:
            raise InvalidSetting(f"{path}: cannot be read ({error.strerror}); name a file that --journal wrote") from None

    def replay(self) -> Replay:
        """Makes every recorded call again."""
        found = self._ask(f"{self._path} cannot be replayed, only what --journal of this version of chairlift wrote can", _core.replay)
        run = Run(found["config"], found["ended"], found["stats"], None)
        return Replay(run, found["calls"], found["hash"], found["differs_at"], found["truncated"], found["step_model"])

    def what_if(self, settings: Mapping[str, Any]) -> Run:
        """Simulates the requests under the recorded settings but for `settings`, by the names of `_core.Scheduler`."""
        found = self._ask("these settings make no scheduler", _core.what_if, dict(settings))
        return Run(found["config"], found["ended"], found["stats"], len(found["refused"]))

    def _ask(self, unfit: str, function: Callable[..., dict[str, Any]], *arguments: object) -> dict[str, Any]:
        try:
            return function(self._bytes, *arguments)
        except (ValueError, OverflowError) as error:
            raise InvalidSetting(f"{unfit}: {error}") from None
        except BaseException as error:
            # Records that can be read may yet make no sense together: the core takes that for its caller's mistake, and panics.
            if type(error).__name__ != "PanicException":
                raise
            raise InvalidSetting(f"{self._path}: the journal is damaged, its calls make no sense: {error}") from None


def _started(ledger: Mapping[str, Any]) -> int:
    """When a request left the queue: with its first chunk, or by its end."""
    when: int = ledger["ended"] if ledger["started"] is None else ledger["started"]
    return when


def _percentiles(name: str, values: Sequence[float], *percents: int) -> dict[str, float | None]:
    """The values below or at which so many percent lie (nearest rank); None of nothing."""
    ranks = {percent: max(0, -(-len(values) * percent // 100) - 1) for percent in percents}
    return {f"{name}_p{percent}_s": values[rank] if values else None for percent, rank in ranks.items()}


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None
