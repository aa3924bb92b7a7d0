"""Starts and ends the servers that benchmarks measure."""

from __future__ import annotations

import contextlib
import http.client
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

START_SECONDS = 300
"""How long a server may take until it is ready."""


def free_port() -> int:
    """A free port of this machine."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
    return port


@contextlib.contextmanager
def server(
    command: Sequence[str],
    ready: str = "/ready",
    log: Path | None = None,
    cwd: Path | None = None,
    environ: Mapping[str, str] | None = None,
) -> Iterator[tuple[int, subprocess.Popen[bytes]]]:
    """Runs a server in a session of its own until it is left; yields its port, and its process, when it answers the page `ready`.

    `command` has `{port}` in it where it listens. A status from 500 on means that it is not ready. Its output goes to this process's, or to
    the `log`. Raises SystemExit if it does not start.
    """
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, _leave)  # the server has another session, and does not get this process's signals
    port = free_port()
    filled = [part.replace("{port}", str(port)) for part in command]
    with contextlib.ExitStack() as stack:
        output = stack.enter_context(log.open("wb")) if log else None
        process = subprocess.Popen(
            filled, env={**os.environ, **(environ or {})}, cwd=cwd, stdout=output, stderr=output, start_new_session=True
        )
    try:
        until = time.monotonic() + START_SECONDS
        while not _answers(f"http://127.0.0.1:{port}{ready}"):
            if process.poll() is not None or time.monotonic() > until:
                said = f":\n{log.read_text(errors='replace')[-2000:]}" if log and log.is_file() else ""
                raise SystemExit(f"{command[0]} has not started{said}")
            time.sleep(0.1)
        yield port, process
    finally:
        end(process, 60)


def _leave(number: int, frame: object) -> NoReturn:
    sys.exit(128 + number)


def _answers(url: str) -> bool:
    directly = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with directly.open(url, timeout=10):
            return True
    except urllib.error.HTTPError as error:
        return error.code < 500
    except (OSError, http.client.HTTPException):
        return False


def end(process: subprocess.Popen[bytes], seconds: float = 15) -> None:
    """Ends a process and the session that it began: some peers leave workers behind. It has some seconds to end by itself."""
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(seconds)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


def child(pid: int) -> int:
    """The process id of a process's first child: the engine of a server."""
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])
