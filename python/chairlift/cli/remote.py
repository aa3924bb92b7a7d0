"""What the commands share that ask a running server."""

from __future__ import annotations

import argparse
import json
import ssl
import urllib.error
import urllib.request
from typing import Any
from urllib.parse import urlsplit

from chairlift.cli import flags
from chairlift.errors import ChairliftError

URL = "http://127.0.0.1:8000"
TIMEOUT = 10.0


def add(parser: argparse.ArgumentParser) -> None:
    """Adds the flags that say which server, and with which key."""
    parser.add_argument("--url", default=URL, metavar="URL", help=f"where the server listens (default: {URL})")
    parser.add_argument("--api-key", metavar="KEY", help="the server's API key, if it wants one [CHAIRLIFT_API_KEY]")
    flags.heed(parser, "api_key")


def ask(url: str, path: str, api_key: str | None) -> Any:
    """What the server at `url` answers to GET `path`, as JSON; raises ChairliftError with its own words where it refuses."""
    if urlsplit(url).scheme not in ("http", "https"):
        raise ChairliftError(f"--url {url}: expected something like {URL}")
    headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
    request = urllib.request.Request(url.rstrip("/").removesuffix("/v1") + path, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        if error.code == 401:
            wanted = "wants a key" if api_key is None else "has another key"
            raise ChairliftError(f"the server {wanted}: give it with --api-key or CHAIRLIFT_API_KEY") from None
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
