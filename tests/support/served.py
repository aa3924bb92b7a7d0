"""A whole server in a process of its own, with a real engine and no model, for tests that hurt it."""

import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import paced_engine


class Served:
    """A running server: where it listens, its processes, and what it says of itself."""

    def __init__(self, port: int, directory: Path, process: subprocess.Popen[bytes], model: str = "") -> None:
        self.port = port
        self.model = model
        self.process = process
        self.directory = directory
        self._gate = directory / "gate"
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=None)
        self._admin = httpx.Client(transport=httpx.HTTPTransport(uds=str(directory / "admin")), base_url="http://admin", timeout=None)
        self._log = directory / "log"

    def state(self) -> dict[str, Any]:
        """What must be as before when nobody is there any more."""
        reported = self.admin_state()
        self.http.get("/live")  # so that both clients' connections are open at each look: idle ones are closed
        return {name: reported[name] for name in ("running", "waiting", "used_tokens", "http")} | {
            "blocks": reported["total_blocks"] - reported["free_blocks"],
            "sockets": self.sockets(),
        }

    def admin_state(self) -> dict[str, Any]:
        """What the operator's socket tells: the engine's counters, which are 0 while there is none, and who was let in."""
        reported: dict[str, Any] = self._admin.get("/state").json()
        return reported

    def administer(self, path: str, body: dict[str, object]) -> httpx.Response:
        """Posts to the operator's socket."""
        return self._admin.post(path, json=body)

    @contextmanager
    def held(self) -> Iterator[Callable[[], None]]:
        """Keeps long requests from ending until the block ends, or until what it yields is called."""
        self._gate.touch()
        try:
            yield partial(self._gate.unlink, missing_ok=True)
        finally:
            self._gate.unlink(missing_ok=True)

    def sockets(self) -> int:
        """Open files of the server's process that are sockets."""
        count = 0
        for entry in Path(f"/proc/{self.process.pid}/fd").iterdir():
            try:
                count += os.readlink(entry).startswith("socket:")
            except OSError:
                continue  # it was closed meanwhile
        return count

    def memory(self) -> dict[str, int]:
        """MiB that the server's process and the engine's hold."""
        return {"server": _resident(self.process.pid), "engine": _resident(self.engine())}

    def engine(self) -> int:
        """The process id of the only engine."""
        [child] = self.engines()
        return child

    def engines(self) -> list[int]:
        """The process ids of the engines, oldest first."""
        return [int(child) for child in Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()]

    def replicas(self) -> list[dict[str, Any]]:
        """What the operator's socket tells of the first model's engines."""
        reported: list[dict[str, Any]] = self._admin.get("/models").json()["models"][0]["replicas"]
        return reported

    def log(self) -> str:
        """What the server and the engine have logged."""
        return self._log.read_text()

    def status(self, path: str) -> int:
        """The status of a probe, 0 while nobody listens."""
        try:
            return self.http.get(path).status_code
        except httpx.TransportError:
            return 0

    def answer(self, prompt: str = "golden", **fields: object) -> str:
        """A greedy completion."""
        reply = self.http.post("/v1/completions", json={"prompt": prompt, "max_tokens": 24, "temperature": 0, **fields})
        assert reply.status_code == 200, reply.text
        return str(reply.json()["choices"][0]["text"])


@contextmanager
def served(*flags: str, script: str = paced_engine.__file__, load_format: str = "none") -> Iterator[Served]:
    """Serves with an engine of `script`, without a model by default, until it is left."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        command = [sys.executable, script, "serve", "--load-format", load_format, "--port", str(port)]
        command += ["--admin-socket", str(directory / "admin"), "--log-level", "warning", *flags]
        with (directory / "log").open("wb") as log:
            process = subprocess.Popen(command, stderr=log, env=os.environ | {paced_engine.GATE: str(directory / "gate")})
        server = Served(port, directory, process, next(iter(flags), ""))
        try:
            until(lambda: _ready(server))
            yield server
        finally:
            process.terminate()
            process.wait(60)
            print(server.log())  # for whoever reads why a test failed


def _ready(server: Served) -> bool:
    assert server.process.poll() is None, "the server ended"
    return server.status("/ready") == 200


def _resident(process: int) -> int:
    return int(re.findall(r"VmRSS:\s+(\d+)", Path(f"/proc/{process}/status").read_text())[0]) // 1024


def until(condition: Callable[[], bool], seconds: float = 120.0) -> None:
    """Returns as soon as `condition()` holds; the time is a guard, not a measurement."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.05)


def request(port: int, path: str, body: dict[str, object]) -> bytes:
    """A POST as it goes over the wire."""
    text = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\ncontent-type: application/json\r\ncontent-length: {len(text)}\r\n\r\n"
    return head.encode() + text


def bare(reported: Any) -> Any:
    """An answer without what differs from one time to the next: names, times, and what was found in the cache."""
    if isinstance(reported, list):
        return [bare(one) for one in reported]
    if isinstance(reported, dict):
        own = ("id", "created", "created_at", "completed_at", "item_id", "usage")
        return {name: bare(value) for name, value in reported.items() if name not in own}
    return reported
