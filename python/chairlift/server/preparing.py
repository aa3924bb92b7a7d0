"""Requests that were accepted and are not in the engine yet: their prompts are being tokenized."""

from __future__ import annotations

from chairlift.server.observability.request_context import RequestContext


class Preparing:
    """The contexts of such requests, by who may ask and the request's id."""

    def __init__(self) -> None:
        self._contexts: dict[tuple[str, str], RequestContext] = {}

    def add(self, tenant: str, context: RequestContext) -> None:
        """Adds a request for its tenant and for the operator, whose name is ""."""
        for reader in {tenant, ""}:
            self._contexts[reader, context.request_id] = context

    def remove(self, tenant: str, context: RequestContext) -> None:
        """Removes a request, unless a newer one has its id."""
        for reader in {tenant, ""}:
            if self._contexts.get((reader, context.request_id)) is context:
                del self._contexts[reader, context.request_id]

    def find(self, tenant: str, request_id: str) -> RequestContext | None:
        """The request that `tenant` calls so."""
        return self._contexts.get((tenant, request_id))
