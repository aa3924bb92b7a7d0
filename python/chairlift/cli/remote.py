"""What the commands share that ask a running server."""

from __future__ import annotations

import argparse
import json
import os
import ssl
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from chairlift.cli import flags
from chairlift.config import ENV_PREFIX
from chairlift.errors import ChairliftError, InvalidSetting
from chairlift.server.keys import is_key_list

URL = "http://127.0.0.1:8000"
TIMEOUT = 10.0

CLIENT_KEY = f"{ENV_PREFIX}CLIENT_API_KEY"
"""The variable with the one key that a client sends. CHAIRLIFT_API_KEY has the server's, of all tenants, and is never sent."""


def add(parser: argparse.ArgumentParser) -> None:
    """Adds the flags that say which server, and with which key."""
    parser.add_argument("--url", default=URL, metavar="URL", help=f"where the server listens (default: {URL})")
    add_api_key(parser)


def add_api_key(parser: argparse._ActionsContainer) -> None:
    """Adds the flag for the key that this client sends."""
    parser.add_argument("--api-key", dest="client_api_key", metavar="KEY", help=f"your API key, if the server wants one [{CLIENT_KEY}]")
    flags.heed(parser, "client_api_key")


def client_key(given: Mapping[str, Any]) -> str | None:
    """The key to send to the server; raises InvalidSetting for a list of tenants' keys, which is the server's and is sent nowhere."""
    flag: str | None = given["client_api_key"]
    key, source = (flag, "--api-key") if flag is not None else (os.environ.get(CLIENT_KEY), CLIENT_KEY)
    if key is not None and is_key_list(key):
        raise InvalidSetting(f"{source} is a list of tenants' keys, as 'chairlift serve' takes: a client sends one key, without a name")
    return key or None


def ask(url: str, path: str, api_key: str | None) -> Any:
    """What the server at `url` answers to GET `path`, as JSON; raises ChairliftError with its own words where it refuses."""
    if urlsplit(url).scheme not in ("http", "https"):
        raise ChairliftError(f"--url {url}: expected something like {URL}")
    request = urllib.request.Request(url.rstrip("/").removesuffix("/v1") + path)
    if api_key is not None:
        request.add_unredirected_header("authorization", f"Bearer {api_key}")  # a redirect may lead to another server
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        if error.code == 401:
            wanted = "wants a key" if api_key is None else "has another key"
            raise ChairliftError(f"the server {wanted}: give it with --api-key or {CLIENT_KEY}") from None
        try:
            message = json.load(error)["error"]["message"]
        except (ValueError, KeyError, TypeError):
            message = f"the server answers {error.code}"
        raise ChairliftError(message) from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        if isinstance(reason, ssl.SSLCertVerificationError):
            hint = "if it is your own, name it in the variable SSL_CERT_FILE"
            raise ChairliftError(f"the certificate of {url} is not trusted ({reason.verify_message}): {hint}") from None
        raise ChairliftError(f"no chairlift server at {url} ({reason}): start one with 'chairlift serve', or name it with --url") from None
