"""Reads streams of server-sent events."""

import json
from typing import Any

import httpx


def events(response: httpx.Response) -> list[Any]:
    """The data of a stream's events, decoded; None for [DONE]. The stream has nothing else."""
    data = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    return [None if one == "[DONE]" else json.loads(one) for one in data]


def objects(text: str) -> list[dict[str, Any]]:
    """The data of a stream's events as far as it is JSON, decoded."""
    return [json.loads(line.removeprefix("data: ")) for line in text.split("\n") if line.startswith("data: {")]
