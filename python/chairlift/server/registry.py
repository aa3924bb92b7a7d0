"""Recent requests by id: those being prepared, the ids of answers, and reasons of refusals."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from chairlift.server.keys import Reader
from chairlift.server.observability.request_context import RequestContext

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")

MAX_REQUESTS = 10_000
"""Requests that stay known after they end; the engine keeps as many timelines."""

MAX_REFUSALS = 1000
"""Refused requests that stay known: an overloaded server refuses more than anybody asks about."""

MAX_MESSAGE_BYTES = 600
"""The beginning of a refusal's message that is kept: with ids and objects less than 1 KB."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """What a refused request got: the HTTP status, and the code and the beginning of the message of OpenAI's error object."""

    status: int
    code: str | None
    text: bytes
    """The message in UTF-8: a string would take four bytes for each of its characters if one of them needs them."""

    @classmethod
    def of(cls, status: int, error: Mapping[str, Any]) -> Refusal:
        """Returns what is kept of an error object."""
        message: str = error["message"]
        return cls(status, error.get("code"), message[:MAX_MESSAGE_BYTES].encode(errors="replace")[:MAX_MESSAGE_BYTES])

    def explanation(self, request_id: str) -> dict[str, object]:
        """Returns the body of `GET /v1/requests/{id}/explain` for this request."""
        message = self.text.decode(errors="ignore")
        summary = f"Refused with status {self.status}{f' ({self.code})' if self.code else ''}: {message}"
        refused = {"status": self.status, "code": self.code, "message": message}
        return {"id": request_id, "object": "request.explanation", "summary": summary, "refused": refused, "sequences": []}


class RequestRegistry:
    """The newest requests by the reader who may ask and the request's id, which clients choose.

    A tenant finds its own requests, and the operator finds all.
    """

    def __init__(self) -> None:
        # Ordered dicts, because a dict searches past all that left for its first entry.
        self._prompt_counts: OrderedDict[str, int] = OrderedDict()
        """Number of prompts by the id of the answer."""
        self._answer_ids: OrderedDict[tuple[Reader, str], str] = OrderedDict()
        self._refusals: OrderedDict[tuple[Reader, str], Refusal] = OrderedDict()
        self._preparing: dict[tuple[Reader, str], RequestContext] = {}
        """Accepted requests that are not in the engine yet."""

    def add(self, tenant: str, request_id: str, answer_id: str, prompts: int) -> None:
        """Registers an accepted request of `prompts` prompts."""
        self._prompt_counts[answer_id] = prompts
        if len(self._prompt_counts) > MAX_REQUESTS:
            self._prompt_counts.popitem(last=False)
        for reader in {tenant, None}:
            self._refusals.pop((reader, request_id), None)
            _put_last(self._answer_ids, (reader, request_id), answer_id, 2 * MAX_REQUESTS)

    def add_preparing(self, tenant: str, context: RequestContext) -> None:
        """Registers an accepted request whose prompt is about to be tokenized."""
        for reader in {tenant, None}:
            self._preparing[reader, context.request_id] = context

    def remove_preparing(self, tenant: str, context: RequestContext) -> None:
        """Called when the request is prepared or over; a newer request of that id stays."""
        for reader in {tenant, None}:
            if self._preparing.get((reader, context.request_id)) is context:
                del self._preparing[reader, context.request_id]

    def preparing(self, reader: Reader, request_id: str) -> RequestContext | None:
        """Returns the request of that id if it is being prepared."""
        return self._preparing.get((reader, request_id))

    def add_refusal(self, tenant: str, request_id: str, refusal: Refusal) -> None:
        """Registers a refused request."""
        for reader in {tenant, None}:
            _put_last(self._refusals, (reader, request_id), refusal, 2 * MAX_REFUSALS)

    def refusal(self, reader: Reader, request_id: str) -> Refusal | None:
        """Returns why the newest request of that id was refused; None if it was not, or is not known."""
        return self._refusals.get((reader, request_id))

    def resolve(self, reader: Reader, name: str) -> tuple[str, list[str]]:
        """Returns the answer's id and the engine's ids of the request called `name`, its request id or answer id.

        The list is empty for an unknown request.
        """
        answer_id = name if name in self._prompt_counts else self._answer_ids.get((reader, name), name)
        return answer_id, engine_ids(answer_id, self._prompt_counts.get(answer_id, 0))


def engine_ids(answer_id: str, prompts: int) -> list[str]:
    """Returns the engine's request id for each prompt of the request with this answer."""
    return [answer_id] if prompts == 1 else [f"{answer_id}-{i}" for i in range(prompts)]


def _put_last(entries: OrderedDict[_Key, _Value], key: _Key, value: _Value, limit: int) -> None:
    """Sets `key` as the newest entry and drops the oldest entries above `limit`."""
    entries.pop(key, None)
    entries[key] = value
    while len(entries) > limit:
        entries.popitem(last=False)
