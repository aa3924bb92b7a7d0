"""Requests that were refused, so that their clients can be told why when they ask later."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

REMEMBERED = 1000
"""How many refused requests are known; whoever overloads a server makes more of them than anybody asks about."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """What a client got instead of an answer: an HTTP status and OpenAI's error object."""

    status: int
    error: Mapping[str, Any]

    def explanation(self, request_id: str) -> dict[str, Any]:
        """It as the answer to a question about the request."""
        code = self.error.get("code")
        summary = f"Refused with status {self.status}{f' ({code})' if code else ''}: {self.error['message']}"
        return {"id": request_id, "object": "request.explanation", "summary": summary, "refused": self._json(), "sequences": []}

    def _json(self) -> dict[str, Any]:
        return {"status": self.status, "code": self.error.get("code"), "message": self.error["message"]}


class Refusals:
    """The newest refusals, by who may ask and the request's id."""

    def __init__(self) -> None:
        self._kept: dict[tuple[str, str], Refusal] = {}

    def add(self, tenant: str, request_id: str, refusal: Refusal) -> None:
        """Remembers a refusal for its tenant and for the operator, whose name is ""."""
        for reader in {tenant, ""}:
            self._kept.pop((reader, request_id), None)  # so that it is among the newest
            self._kept[reader, request_id] = refusal
        while len(self._kept) > 2 * REMEMBERED:
            del self._kept[next(iter(self._kept))]

    def find(self, tenant: str, request_id: str) -> Refusal | None:
        """The refusal of the request that `tenant` calls so."""
        return self._kept.get((tenant, request_id))

    def forget(self, tenant: str, request_id: str) -> None:
        """Forgets it, since a newer request of that id was taken."""
        for reader in {tenant, ""}:
            self._kept.pop((reader, request_id), None)
