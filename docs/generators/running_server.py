"""A server for the recording, the outputs of the README and the pictures of the dashboard."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from chairlift.server.http.sockets import open_port

SHARED_FLAGS = ("--scheduling-policy", "fair", "--api-key", "alice=KEY1,bob=KEY2", "--max-num-seqs", "4")
"""The flags of a small server that two tenants share."""


class Server:
    """A server with the default model on a free port; its log is in `folder`."""

    def __init__(self, folder: str, *flags: str) -> None:
        with open_port("127.0.0.1", 0) as free:
            port = free.getsockname()[1]
        self._log = Path(folder, "log")
        self.url = f"http://127.0.0.1:{port}"
        with self._log.open("w") as log:
            command = [sys.executable, "-m", "chairlift", "serve", "--port", str(port), *flags]
            self._num_engines = int(flags[flags.index("--replicas") + 1]) if "--replicas" in flags else 1
            self._process = subprocess.Popen(command, stderr=log, stdout=log)

    def wait(self) -> None:
        """Waits until the server has loaded its models and all of their engines."""
        while "listening on" not in self.log() or not self._ready():
            if self._process.poll() is not None:
                raise SystemExit(self.log())
            time.sleep(0.1)

    def _ready(self) -> bool:
        with contextlib.suppress(HTTPError), urlopen(f"{self.url}/ready"):
            return self.log().count(" ready in ") >= self._num_engines
        return False

    def log(self) -> str:
        """Returns the log so far."""
        return self._log.read_text()

    def stream(self, headers: Mapping[str, str], **body: Any) -> Iterator[str]:
        """Yields the pieces of a completion."""
        data = json.dumps({**body, "stream": True}).encode()
        with urlopen(Request(f"{self.url}/v1/completions", data, {**headers, "content-type": "application/json"})) as response:
            for line in response:
                if line.startswith(b"data: {"):
                    yield json.loads(line[6:])["choices"][0]["text"]

    def answer(self, key: str, name: str) -> Iterator[str]:
        """Yields the pieces of a greedy completion, the same for each request. `name` is the id of the request."""
        headers = {"authorization": f"Bearer {key}", "x-request-id": name}
        return self.stream(headers, prompt="The history of bridges begins with", max_tokens=60, temperature=0)

    def explain(self, key: str, name: str) -> str:
        """Returns the first paragraph of `chairlift explain`."""
        environment = os.environ | {"CHAIRLIFT_CLIENT_API_KEY": key, "COLUMNS": "1000"}
        command = [sys.executable, "-m", "chairlift", "explain", name, "--url", self.url]
        return subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout.partition("\n\n")[0]

    def kill_engine(self) -> None:
        """Kills the process that computes."""
        listed = subprocess.run(["ps", "-o", "pid=,args=", "--ppid", str(self._process.pid)], check=True, capture_output=True, text=True)
        [engine] = [line.split()[0] for line in listed.stdout.splitlines() if "chairlift.engine.process" in line]
        os.kill(int(engine), signal.SIGKILL)

    def close(self) -> None:
        """Ends the server."""
        self._process.terminate()
        self._process.wait()
