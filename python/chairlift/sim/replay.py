"""Replays a journal, as it was recorded or under other settings."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from chairlift import _core
from chairlift.errors import InvalidSetting
from chairlift.sim.policy import report_failure
from chairlift.sim.result import Result
from chairlift.sim.workload import COLUMNS, DRAFT_COLUMNS, Workload

Returned = TypeVar("Returned")

_MAGIC = b"chairlift-journal-"


@dataclass(frozen=True, slots=True)
class Replay:
    """The result of making a journal's calls again, and whether every decision was the same.

    `differs_at` is the index of the first plan that differs, counting empty ones. `truncated` is set if the file is cut off, as after a
    crash. `step_model` has the microseconds of an empty step, a prompt token, a decoding sequence, a context token, and a pair of prompt
    tokens.
    """

    result: Result
    calls: int
    hash: str
    differs_at: int | None
    truncated: bool
    step_model: Sequence[float]


def is_journal(path: str | Path) -> bool:
    """Whether a file begins like a journal."""
    with Path(path).open("rb") as file:
        return file.read(len(_MAGIC)) == _MAGIC


class Recording:
    """A journal. Raises InvalidSetting if the file cannot be read or is no journal."""

    def __init__(self, path: str | Path) -> None:
        self._path = path
        try:
            self._bytes = Path(path).read_bytes()
        except OSError as error:
            raise InvalidSetting(f"{path}: cannot be read ({error.strerror}); name a file that --journal wrote") from None

    def replay(self) -> Replay:
        """Makes every recorded call again, at the recorded times."""
        start = time.perf_counter()
        report = self._call(self._cannot_replay(), _core.replay)
        result = Result([report["report"]], report["config"], time.perf_counter() - start, recorded=True)
        return Replay(result, report["calls"], report["hash"], report["differs_at"], report["truncated"], report["step_model"])

    def what_if(self, settings: Mapping[str, Any]) -> Result:
        """Simulates the recorded requests with the recorded settings, updated by `settings`, named as in `_core.Scheduler`."""
        start = time.perf_counter()
        report = self._call("these settings are impossible", _core.what_if, dict(settings))
        failure = report_failure(settings.get("scheduling_policy"))
        return Result([report["report"]], report["config"], time.perf_counter() - start, policy_failure=failure)

    def workload(self) -> Workload:
        """The recorded requests, with the lengths of their outputs and their drafts, for a simulation of another load or machine.

        Aborted requests end with the tokens that they had. Prompts share what earlier prompts have, not earlier outputs. Sessions are left
        out.
        """
        found = self._call(self._cannot_replay(), _core.workload)
        arrays = {name: np.frombuffer(found[name], np.int64) for name in ("requests", "names", "drafts")}
        return Workload(
            arrays["requests"].reshape(-1, len(COLUMNS)),
            tuple(found["tenants"]),
            arrays["names"],
            found["name_block"],
            arrays["drafts"].reshape(-1, len(DRAFT_COLUMNS)),
            lacks_sessions=found["has_sessions"],
        )

    def steps(self) -> tuple[Mapping[str, Any], NDArray[np.int64]]:
        """The scheduler's settings, and its steps as int64 [N, 6]: the four fields of `Load`, microseconds to the end and to the next plan.

        The last is -1 if the next plan did not follow at once.
        """
        steps = np.frombuffer(self._call(self._cannot_replay(), _core.step_times), np.int64).reshape(-1, 6)
        return self._call(self._cannot_replay(), _core.journal_settings) or {}, steps

    def _cannot_replay(self) -> str:
        return f"{self._path} cannot be replayed"

    def _call(self, problem: str, function: Callable[..., Returned], *arguments: object) -> Returned:
        try:
            return function(self._bytes, *arguments)
        except (ValueError, OverflowError) as error:
            raise InvalidSetting(f"{problem}: {error}") from None
        except BaseException as error:
            # The core panics if records are valid one by one but contradict each other.
            if type(error).__name__ != "PanicException":
                raise
            raise InvalidSetting(f"{self._path}: the journal is damaged, its calls contradict each other: {error}") from None
