"""HTTP requests to a running server, for the commands that send them."""

from __future__ import annotations

import argparse
import json
import os
import ssl
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

from chairlift.cli import flags
from chairlift.errors import ChairliftError, InvalidSetting
from chairlift.server.keys import is_key_list
from chairlift.settings import ENV_PREFIX

URL = "http://127.0.0.1:8000"
TIMEOUT, STREAM_TIMEOUT = 10.0, 600.0
"""Seconds without a byte after which a request fails."""

CLIENT_KEY = f"{ENV_PREFIX}CLIENT_API_KEY"
"""The variable of the key that a client sends. CHAIRLIFT_API_KEY has the server's keys, of all tenants, and is never sent."""


def add_server(parser: argparse.ArgumentParser) -> None:
    """Adds the flags for the server's address and the API key."""
    parser.add_argument("--url", default=URL, metavar="URL", help=f"address of the server (default: {URL})")
    add_api_key(parser)


def add_api_key(parser: argparse._ActionsContainer) -> None:
    """Adds `--api-key`, the key that this client sends."""
    parser.add_argument("--api-key", dest="client_api_key", metavar="KEY", help=f"API key to send to the server [{CLIENT_KEY}]")
    flags.read_variable(parser, "client_api_key")


def client_key(args: argparse.Namespace) -> str | None:
    """The key to send to the server, if any. Raises InvalidSetting for a list of tenants' keys: that is the server's setting."""
    flag: str | None = args.client_api_key
    key, source = (flag, "--api-key") if flag is not None else (os.environ.get(CLIENT_KEY), CLIENT_KEY)
    if key is not None and is_key_list(key):
        raise InvalidSetting(f"{source} is a list of tenants' keys, for 'chairlift serve': a client sends one key, without a name")
    return key or None


def get_json(url: str, path: str, api_key: str | None) -> Any:
    """The JSON body of GET `path` at the server `url`. Raises ChairliftError, with the server's message for an error status."""
    with _errors(url, api_key), _open(url, path, api_key) as response:
        return json.load(response)


def post_json(url: str, path: str, api_key: str | None, body: Mapping[str, Any]) -> Any:
    """The JSON body of POST `path` at the server `url`. Raises ChairliftError, with the server's message for an error status."""
    with _errors(url, api_key), _open(url, path, api_key, body) as response:
        return json.load(response)


def model_names(url: str, api_key: str | None) -> list[str]:
    """The models of the server at `url`. Raises ChairliftError."""
    try:
        return [one["id"] for one in get_json(url, "/v1/models", api_key)["data"]]
    except (KeyError, TypeError):
        raise ChairliftError(f"what listens at {url} is no server with OpenAI's API") from None


def stream_chat(url: str, api_key: str | None, body: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Posts a chat completion and yields the reasoning and the text of its events. Raises ChairliftError, also for a cut-off answer."""
    ended = False
    with _errors(url, api_key), _open(url, "/v1/chat/completions", api_key, {**body, "stream": True}, STREAM_TIMEOUT) as response:
        for line in response:
            data = line.removeprefix(b"data:").strip()
            if not line.startswith(b"data:"):
                continue
            if data == b"[DONE]":
                ended = True
                continue
            event = json.loads(data)
            if "error" in event:
                raise ChairliftError(event["error"]["message"])
            for choice in event["choices"]:
                ended = ended or choice.get("finish_reason") is not None
                delta = choice["delta"]
                yield delta.get("reasoning_content") or "", delta.get("content") or ""
    if not ended:
        raise ChairliftError(f"the server at {url} broke the answer off")


def _open(url: str, path: str, api_key: str | None, body: Mapping[str, Any] | None = None, timeout: float = TIMEOUT) -> Any:
    if urlsplit(url).scheme not in ("http", "https"):
        raise ChairliftError(f"--url {url}: expected something like {URL}")
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url.rstrip("/").removesuffix("/v1") + path, data, {"content-type": "application/json"})
    if api_key is not None:
        request.add_unredirected_header("authorization", f"Bearer {api_key}")  # not sent to the target of a redirect
    return urllib.request.urlopen(request, timeout=timeout)


@contextmanager
def _errors(url: str, api_key: str | None) -> Iterator[None]:
    """Turns the errors of a request into ChairliftError."""
    try:
        yield
    except urllib.error.HTTPError as error:
        if error.code == 401:
            problem = "requires an API key" if api_key is None else "rejects this API key"
            raise ChairliftError(f"the server {problem}: set it with --api-key or {CLIENT_KEY}") from None
        try:
            body = json.load(error)["error"]
            message = body if isinstance(body, str) else body["message"]  # Ollama's routes have a text
        except (ValueError, KeyError, TypeError):
            message = f"the server returned status {error.code}"
        raise ChairliftError(message) from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        if isinstance(reason, ssl.SSLCertVerificationError):
            hint = "if it is your own, set the variable SSL_CERT_FILE to its path"
            raise ChairliftError(f"the certificate of {url} is not trusted ({reason.verify_message}): {hint}") from None
        raise ChairliftError(f"no chairlift server at {url} ({reason}): start one with 'chairlift serve', or set --url") from None
