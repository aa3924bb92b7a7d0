"""A server for the time of a command: one that runs already, or a new one on this machine."""

from __future__ import annotations

import argparse
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

from chairlift.cli import flags
from chairlift.cli.remote import URL, get_json, model_names
from chairlift.config import DEFAULT_MODEL
from chairlift.errors import ChairliftError, ModelNotFound
from chairlift.server.config import ServerConfig
from chairlift.settings import ENV_PREFIX

MODEL_HELP = f"{flags.MODEL_SOURCES} (default: the first model of the server, or {DEFAULT_MODEL} if none runs)"
POLL_SECONDS = 0.1
EXIT_SECONDS = 15.0
"""Seconds that a server which this command started gets to end its requests and exit."""

_OF_MODELS = {"tool_call_parser", "reasoning_parser", "exact_history", "max_body_size"}
"""Settings of a server that say how it uses a model."""
_OTHER_SERVERS = {f"{ENV_PREFIX}{name.upper()}" for name in {*ServerConfig.__dataclass_fields__, "journal"} - _OF_MODELS}
"""Variables for 'chairlift serve': with them, this command's own server may have another address or model, want a key or share files."""

_SERVE = """\
import signal, sys
from chairlift.engine.process_signals import end_with_parent
end_with_parent(signal.SIGTERM)
from chairlift.__main__ import main
sys.exit(main())
"""


def add_url(parser: argparse.ArgumentParser) -> None:
    """Adds `--url`."""
    help = f"address of the server (default: {URL} if that serves the model, else a new server, for this command)"
    parser.add_argument("--url", metavar="URL", help=help)


@contextmanager
def server_for(model: str | None, url: str | None, api_key: str | None) -> Iterator[tuple[str, str]]:
    """Yields the address of a server and the name that it has for `model`, or for its first model if that is None.

    Without a `url`, it is the server at the usual address, or one that runs until the end of the block. Raises ChairliftError.
    """
    names = _names_at_usual_address(api_key) if url is None else model_names(url, api_key)
    if (name := _name_in(names, model)) is not None:
        yield url or URL, name
        return
    if url is not None:
        lacks = "lists no model" if model is None else f"does not serve {model}"
        raise ModelNotFound(f"the server at {url} {lacks}: it has {', '.join(names) or 'none'}")
    with _started(model or DEFAULT_MODEL) as (started_url, process):
        _wait(started_url, process, api_key)
        yield started_url, model_names(started_url, api_key)[0]


def _names_at_usual_address(api_key: str | None) -> list[str]:
    """The models of the server at the usual address; none if nothing listens there, or something that cannot be used."""
    try:
        return model_names(URL, api_key) if _listens(URL) else []
    except ChairliftError as error:
        print(f"chairlift: {error}", file=sys.stderr)
        return []


def _listens(url: str) -> bool:
    parts = urlsplit(url)
    try:
        socket.create_connection((parts.hostname or "", parts.port or 80), 1).close()
    except OSError:
        return False
    return True


def _name_in(names: list[str], model: str | None) -> str | None:
    if model is None:
        return names[0] if names else None
    return next((name for name in (model, Path(model).name) if name in names), None)


def _command(model: str, port: int) -> list[str]:
    """The command of a server that ends with this process, however that ends."""
    return [sys.executable, "-P", "-c", _SERVE, "serve", model, "--host", "127.0.0.1", "--port", str(port), "--log-level", "warning"]


@contextmanager
def _started(model: str) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """Yields the address and the process of `chairlift serve`, which ends with the block. Ctrl-C in the terminal does not reach it."""
    port = urlsplit(URL).port or 0
    if _listens(URL):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    print(f"chairlift: starting a server for {model} at {url}", file=sys.stderr)
    environment = {name: value for name, value in os.environ.items() if name not in _OTHER_SERVERS}
    process = subprocess.Popen(_command(model, port), stdin=subprocess.DEVNULL, start_new_session=True, env=environment)
    try:
        yield url, process
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGTERM)  # the second one ends it at once
            process.wait()


def _wait(url: str, process: subprocess.Popen[bytes], api_key: str | None) -> None:
    """Waits until the server is ready. Raises ChairliftError if it ends: its own output has the reason."""
    while process.poll() is None:
        try:
            get_json(url, "/ready", api_key)
            return
        except ChairliftError:
            time.sleep(POLL_SECONDS)
    raise ChairliftError(f"the server ended with status {process.returncode}: see its message above")
