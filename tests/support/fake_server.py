"""Servers in processes of their own, around fakes of the engine: see serve_fake.py."""

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import httpx
from server_here import wait_until

from chairlift.server.http.sockets import open_port


@contextlib.contextmanager
def running(shutdown_timeout=30, loads="well", max_files=None, **environment):
    """A server in a process, which may have `max_files` files open: yields the process and a client of it."""
    with open_port("127.0.0.1", 0) as free:
        port = free.getsockname()[1]
    command = [sys.executable, str(Path(__file__).with_name("serve_fake.py")), str(port), str(shutdown_timeout), loads]
    if max_files is not None:
        command = ["sh", "-c", f'ulimit -n {max_files} && exec "$@"', "sh", *command]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=os.environ | environment)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30) as client:
            yield process, client
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


def status(client, path):
    """The status of a probe, 0 while nobody listens."""
    try:
        return client.get(path).status_code
    except httpx.TransportError:
        return 0


@contextlib.contextmanager
def own_process(tmp_path, loads, **options):
    """A ready server whose engine has a process of its own, and what tells that process's id."""
    file = tmp_path / "pid"
    with running(loads=loads, COUNTING_ENGINE_HURRY="1.0", COUNTING_ENGINE_PID=str(file), **options) as (process, client):
        wait_until(lambda: status(client, "/ready") == 200)
        yield process, client, lambda: int(file.read_text())


def metric(text, name, label=""):
    """The value of a metric that has no labels of its own, or with one of them as the text shows it."""
    [line] = [line for line in text.splitlines() if line.startswith(f"chairlift_{name}{{") and label in line]
    return float(line.split()[-1])
