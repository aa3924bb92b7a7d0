"""Processes that render chat templates, so that a template can take neither time nor memory from this one."""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import subprocess
import threading
import time
from typing import Any

from chairlift.child_process import start_python
from chairlift.errors import InvalidRequest
from chairlift.template_renderer import LENGTH_BYTES, decode, encode

MAX_SECONDS = 2.0
"""CPU time that rendering may take."""

MAX_BYTES = 512 << 20
"""Memory that rendering may take."""

MAX_PROCESSES = 2
"""Templates that are rendered at once; more wait."""

_SIGNALS_OF_JOBS = (signal.SIGPROF, signal.SIGSEGV, signal.SIGABRT)
"""Signals by which a job may end its process."""


class _ThreadTime(threading.local):
    seconds = 0.0


JOB_TIME = _ThreadTime()
"""Seconds of processor time that the jobs of the calling thread have taken in the processes."""


class TemplateProcesses:
    """The processes of this program. They are started when they are needed and replaced when a template has ended one. Thread-safe."""

    def __init__(self, max_seconds: float = MAX_SECONDS, max_bytes: int = MAX_BYTES) -> None:
        self._max_seconds, self._max_bytes = max_seconds, max_bytes
        self.forget()

    def forget(self) -> None:
        """Begins without processes. A forked child of this program calls it, because those that there are belong to its parent."""
        self._free = threading.BoundedSemaphore(MAX_PROCESSES)
        self._idle: list[subprocess.Popen[bytes]] = []

    @property
    def pids(self) -> list[int]:
        """The ids of the processes that are idle."""
        return [process.pid for process in self._idle]

    def prepare(self) -> None:
        """Starts a process for the first job, unless there is one: it takes as long to start as a small model to answer."""
        with self._free:
            if not self._idle:
                self._idle.append(self._start())

    def run(self, job: dict[str, Any]) -> Any:
        """Runs one job: see `template_renderer`. Blocks, without the GIL. Raises InvalidRequest if the template fails or takes too much."""
        try:
            content = encode(job)
        except (TypeError, ValueError) as error:
            raise InvalidRequest(f"messages and variables of the chat template must be JSON: {error}", param="messages") from None
        with self._free:
            reply = self._try(content)
            if isinstance(reply, int) and reply < 0 and -reply not in _SIGNALS_OF_JOBS:  # it was killed from outside
                reply = self._try(content)
        if isinstance(reply, int):
            raise InvalidRequest(self._reason(reply))
        answer = decode(reply)
        if "error" in answer:
            raise InvalidRequest(answer["error"], param=answer["param"])
        return answer["result"]

    def close(self) -> None:
        """Ends the processes that are idle."""
        while self._idle:
            _close(self._idle.pop())

    def _try(self, content: bytes) -> bytes | int:
        """Returns the reply to a job, or the exit status of the process if the process ended."""
        process = self._idle.pop() if self._idle else self._start()
        if process.poll() is not None:  # it was killed while it was idle
            _close(process)
            process = self._start()
        began = time.monotonic()
        try:
            reply = _exchange(process, content)
        except BaseException:
            process.kill()
            _close(process)
            raise
        if reply is None:
            JOB_TIME.seconds += min(self._max_seconds, time.monotonic() - began)
            return _close(process)
        self._idle.append(process)
        return reply

    def _start(self) -> subprocess.Popen[bytes]:
        arguments = "-m", "chairlift.template_renderer", str(self._max_seconds), str(self._max_bytes)
        return start_python(*arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def _reason(self, status: int) -> str:
        if status == -signal.SIGPROF:
            return f"rendering takes longer than {self._max_seconds:g} seconds"
        return f"rendering ended its process ({f'killed by signal {-status}' if status < 0 else f'exit status {status}'})"


def _exchange(process: subprocess.Popen[bytes], content: bytes) -> bytes | None:
    """Sends a job, returns the reply and counts the job's time; None if the process ended."""
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(len(content).to_bytes(LENGTH_BYTES, "little") + content)
        process.stdin.flush()
    except BrokenPipeError:
        return None
    head = process.stdout.read(2 * LENGTH_BYTES)
    if len(head) < 2 * LENGTH_BYTES:
        return None
    expected, taken = (int.from_bytes(part, "little") for part in (head[:LENGTH_BYTES], head[LENGTH_BYTES:]))
    reply = process.stdout.read(expected)
    if len(reply) < expected:
        return None
    JOB_TIME.seconds += taken / 1e6
    return reply


def _close(process: subprocess.Popen[bytes]) -> int:
    """Ends a process; returns its exit status."""
    assert process.stdin is not None
    assert process.stdout is not None
    for pipe in (process.stdin, process.stdout):
        with contextlib.suppress(BrokenPipeError):
            pipe.close()
    return process.wait()


PROCESSES = TemplateProcesses()
atexit.register(PROCESSES.close)
os.register_at_fork(after_in_child=PROCESSES.forget)
