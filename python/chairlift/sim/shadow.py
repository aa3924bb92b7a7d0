"""A shadow: what a running server would have done under other settings, from its journal."""

from __future__ import annotations

import os
import signal
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from chairlift import _core
from chairlift.errors import InvalidSetting
from chairlift.sim import groups
from chairlift.sim.policy import failure_of
from chairlift.sim.proposal import Proposals, candidates
from chairlift.sim.result import ended, labels

CPU_SHARE = 0.02
"""The part of one core that a shadow may take."""
SLICE_BYTES, SLICE_REQUESTS = 1 << 16, 32
"""Bytes that are read and requests that are simulated between two checks of the CPU time."""
SLICE_CPU_SECONDS = 5.0
"""CPU time after which a policy's method is interrupted, because it may never return."""
CATCH_UP_SECONDS = 60.0
"""A shadow that is behind for longer leaves out requests until it has caught up."""
WINDOW_SECONDS, WINDOW_REQUESTS = 600.0, 20_000
"""The figures cover the requests that ended in these seconds, at most the latest of this number."""
POLL_SECONDS, REPORT_SECONDS = 2.0, 10.0
"""Intervals between two reads of the journal, and between two reports."""
MAX_GROUPS = 100
"""Most tenants and sessions that are reported: those with the most requests."""

RUNS = ("simulated", "shadow", "recorded")
"""The recorded settings and the others in virtual time, and the recorded run itself."""

_COLUMNS = ("tag", "finish", "arrived", "first_token", "ended", "prompt_tokens", "cached_tokens", "output_tokens", "preemptions")
_ROW = np.dtype([(name, "<i8") for name in _COLUMNS] + [("tenant", "O"), ("session", "O")])


class Shadow:
    """Follows a journal and simulates its requests under the recorded settings and under others.

    Call `work` regularly. It takes at most `CPU_SHARE` of a core over time: when that does not suffice, requests are left out, and
    `document` says which share was covered. `apply` makes the settings of `_core.what_if` from the recorded ones. `now` and `cpu` are the
    clocks in seconds; the second counts from the start of the process.
    """

    def __init__(
        self,
        path: str | Path,
        apply: Callable[[Mapping[str, Any]], dict[str, Any]],
        *,
        now: Callable[[], float] = time.monotonic,
        cpu: Callable[[], float] = time.process_time,
    ) -> None:
        """Raises InvalidSetting if the file is no journal or the settings are impossible."""
        self._path, self._apply, self._now, self._cpu = Path(path), apply, now, cpu
        self._began = self._caught_up_at = now()
        self._created_at = time.time()
        self._number = 0
        self._core: _core.Shadow | None = None
        self._policy: str | None = None
        self._failure: str | None = None
        self._proposal: dict[str, object] | None = None
        self._open()

    def work(self) -> None:
        """Reads and simulates what has been recorded, as far as the CPU time allows."""
        while self._cpu() <= CPU_SHARE * (self._now() - self._began):
            data = self._file.read(SLICE_BYTES)
            more = self._advance(data)
            if not data and not more:
                self._caught_up_at = self._now()
                if not self._open_restarted() and not self._open_next():
                    return

    def document(self) -> dict[str, object]:
        """The figures of the last `WINDOW_SECONDS` of the newest engine as plain data, by run, tenant and session.

        `covered` is the share of requests that were simulated, `behind_s` how long ago everything recorded was read, and `failure` what
        the policy raised, if it did: since then the order of arrival holds in its place. `proposal` is the last one (see
        `proposal.propose`); None before the end of the first hour.
        """
        self._take()
        rows = {run: np.concatenate([np.empty(0, _ROW), *parts]) for run, parts in self._rows.items()}
        _, simulated, skipped = self._counts[-1]
        _, simulated_before, skipped_before = self._counts[0]
        seen = simulated - simulated_before + skipped - skipped_before
        elapsed = self._now() - self._began
        return {
            "window_s": min(WINDOW_SECONDS, elapsed),
            "covered": (simulated - simulated_before) / seen if seen else None,
            "behind_s": self._now() - self._caught_up_at,
            "cpu_share": self._cpu() / elapsed if elapsed else 0.0,
            "failure": self._failure,
            "proposal": self._proposal,
            "runs": {run: groups.figures(rows[run]) for run in RUNS},
            "tenants": _by("tenant", rows),
            "sessions": _by("session", rows),
        }

    def _open(self) -> None:
        """Opens the journal of the newest engine. Its times start again, and so do the figures."""
        path = self._path.with_name(f"{self._path.name}.{self._number}") if self._number else self._path
        try:
            self._file: BinaryIO = path.open("rb")
        except OSError as error:
            raise InvalidSetting(f"{path}: cannot be read ({error.strerror}); name a file that --journal writes") from None
        self._head = b""
        self._core = None
        self._proposals: Proposals | None = None
        self._read_at = self._now()
        self._rows: dict[str, deque[NDArray[Any]]] = {run: deque() for run in RUNS}
        self._counts: deque[tuple[float, int, int]] = deque([(self._now(), 0, 0)])

    def _open_restarted(self) -> bool:
        """Opens the journal of a restarted server, which begins anew, if there is one."""
        own = os.fstat(self._file.fileno())
        try:
            first = self._path.stat()
        except FileNotFoundError:
            return False
        replaced = first.st_mtime > own.st_mtime if self._number else first.st_ino != own.st_ino
        if not replaced and own.st_size >= self._file.tell():
            return False
        self._file.close()
        # The journals of the earlier server's engines are older.
        self._number, self._created_at = 0, first.st_mtime
        self._open()
        return True

    def _open_next(self) -> bool:
        """Opens the journal of a restarted engine, if there is one. The journal of an earlier server is older than this process."""
        following = self._path.with_name(f"{self._path.name}.{self._number + 1}")
        if not following.exists() or following.stat().st_mtime < self._created_at:
            return False
        self._number += 1
        self._open()
        return True

    def _advance(self, data: bytes) -> bool:
        """Simulates a slice. Returns whether there is more to simulate."""
        if data:
            self._read_at = self._now()
        try:
            if self._core is None:
                self._head += data
                if (recorded := _core.journal_settings(self._head)) is None:
                    return False
                changes = self._apply(recorded)
                self._policy = changes.get("scheduling_policy")
                tried = [change for change in candidates(recorded) if _possible(self._head, change)]
                self._core, self._proposals = _core.Shadow(self._head, [changes, *tried]), Proposals(tried)
            elif data:
                self._core.feed(data)
        except ValueError as error:
            raise InvalidSetting(f"{self._path} cannot be followed: {error}") from None
        if self._now() - self._caught_up_at > CATCH_UP_SECONDS:
            self._core.skip()
            return False
        more = True
        with _Interrupting(SLICE_CPU_SECONDS):
            more = self._core.advance(SLICE_REQUESTS)
        self._failure = failure_of(self._policy, for_good=True) or self._failure
        return more

    def _take(self) -> None:
        """Adds the requests that ended to the window, and drops those that are too old."""
        if self._core is None or self._proposals is None:
            return
        taken = self._core.take()
        simulated, shadow, *tried = taken["runs"]
        added = [_rows(report) for report in (simulated, shadow, taken["recorded"])]
        for run, rows in zip(RUNS, added, strict=True):
            if len(rows):
                self._rows[run].append(rows)
        # Nothing is recorded while the server is idle, but time goes on.
        now = self._core.now + (self._now() - self._read_at) * 1e6
        self._proposals.add([added[0], *map(ended, tried), added[2]])
        self._proposal = self._proposals.next(now) or self._proposal
        self._counts.append((self._now(), *self._core.counts))
        while len(self._counts) > 2 and self._counts[1][0] < self._now() - WINDOW_SECONDS:
            self._counts.popleft()
        since = now - WINDOW_SECONDS * 1e6
        for parts in self._rows.values():
            while parts and (parts[0]["ended"][-1] < since or sum(map(len, parts)) > WINDOW_REQUESTS + len(parts[0])):
                parts.popleft()


def follow(shadow: Shadow, report: Callable[[Mapping[str, Any]], None], running: Callable[[], bool]) -> None:
    """Works every `POLL_SECONDS`, and reports a document every `REPORT_SECONDS`, as long as `running`."""
    due = time.monotonic() + REPORT_SECONDS
    while running():
        shadow.work()
        if time.monotonic() >= due:
            report(shadow.document())
            due = time.monotonic() + REPORT_SECONDS
        time.sleep(POLL_SECONDS)


class _Interrupting:
    """Raises TimeoutError in a policy that the block calls, when the block has taken more than `seconds` of CPU time.

    The block ends there if it was outside of the policy by then: the simulation itself may take long.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def __enter__(self) -> None:
        self._before = signal.signal(signal.SIGPROF, self._interrupt)
        signal.setitimer(signal.ITIMER_PROF, self._seconds)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> bool:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, self._before)
        return kind is TimeoutError

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"the policy took more than {self._seconds:g} s of CPU time for {SLICE_REQUESTS} requests")


def _possible(head: bytes, change: dict[str, Any]) -> bool:
    """Whether a scheduler can have the recorded settings with this change."""
    try:
        _core.Shadow(head, [change])
    except ValueError:
        return False
    return True


def _rows(report: _core.Ended) -> NDArray[Any]:
    """The requests of a report."""
    requests = ended(report)
    rows = np.empty(len(requests), _ROW)
    for column in _COLUMNS:
        rows[column] = requests[column]
    for group in ("tenant", "session"):
        rows[group] = labels(report, group)
    return rows


def _by(group: str, rows: Mapping[str, NDArray[Any]]) -> dict[str, dict[str, dict[str, float | None]]]:
    """The figures by tenant or session and run, of those with the most requests."""
    names, counts = np.unique(np.concatenate([one[group] for one in rows.values()]), return_counts=True)
    shown = [str(name) for name in names[np.argsort(-counts, kind="stable")] if name or group == "tenant"][:MAX_GROUPS]
    kept = {run: one[np.isin(one[group], shown)] for run, one in rows.items()}
    by_run = {run: groups.grouped(one, one[group]) for run, one in kept.items()}
    return {name: {run: by_run[run].get(name) or groups.figures(np.empty(0, _ROW)) for run in RUNS} for name in shown}
