"""A journal, lived again: as it was recorded, and under other settings."""

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
from chairlift.sim.result import Result

Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True)
class Replay:
    """A journal's calls, made again: what came of the requests, and whether every decision came out the same.

    `differs_at` is the first plan, counted from 0 and with the empty ones, that did not. `truncated`: the file is cut off,
    as after a crash. `step_model`: microseconds of an empty step, a prompt token, a decoding sequence, a token of context,
    a pair of tokens of a prompt.
    """

    result: Result
    calls: int
    hash: str
    differs_at: int | None
    truncated: bool
    step_model: Sequence[float]


class Recording:
    """A journal's file, read whole; raises InvalidSetting where it can't be, or is none."""

    def __init__(self, path: str | Path) -> None:
        self._path = path
        try:
            self._bytes = Path(path).read_bytes()
        except OSError as error:
            raise InvalidSetting(f"{path}: cannot be read ({error.strerror}); name a file that --journal wrote") from None

    def replay(self) -> Replay:
        """Makes every recorded call again; times are the recorded ones."""
        began = time.perf_counter()
        found = self._ask(self._unfit(), _core.replay)
        result = Result([found["report"]], found["config"], time.perf_counter() - began, recorded=True)
        return Replay(result, found["calls"], found["hash"], found["differs_at"], found["truncated"], found["step_model"])

    def what_if(self, settings: Mapping[str, Any]) -> Result:
        """Simulates the requests under the recorded settings but for `settings`, by the names of `_core.Scheduler`."""
        began = time.perf_counter()
        found = self._ask("these settings make no scheduler", _core.what_if, dict(settings))
        return Result([found["report"]], found["config"], time.perf_counter() - began)

    def steps(self) -> tuple[Mapping[str, Any], NDArray[np.int64]]:
        """The scheduler's settings, and its steps: int64 [N, 6], a load's four numbers, microseconds to the end and to the next plan.

        The latter is -1 where nothing was planned at once.
        """
        told = self._ask(self._unfit(), _core.replay)["config"]
        return told, np.frombuffer(self._ask(self._unfit(), _core.step_times), np.int64).reshape(-1, 6)

    def _unfit(self) -> str:
        return f"{self._path} cannot be replayed"

    def _ask(self, unfit: str, function: Callable[..., Answer], *arguments: object) -> Answer:
        try:
            return function(self._bytes, *arguments)
        except (ValueError, OverflowError) as error:
            raise InvalidSetting(f"{unfit}: {error}") from None
        except BaseException as error:
            # Records that can be read may yet make no sense together: the core takes that for its caller's mistake, and panics.
            if type(error).__name__ != "PanicException":
                raise
            raise InvalidSetting(f"{self._path}: the journal is damaged, its calls make no sense: {error}") from None
