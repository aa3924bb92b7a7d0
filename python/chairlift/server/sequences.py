"""The live sequences of a server's clients, by id. Their tokens, leases and limits are the engine client's."""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from chairlift.server.errors import ApiError

if TYPE_CHECKING:
    from chairlift.engine.async_live_sequence import AsyncLiveSequence
    from chairlift.server.model import ServedModel


@dataclass(frozen=True, slots=True)
class ServedSequence:
    """A live sequence with its id."""

    id: str
    created: int
    model: ServedModel
    sequence: AsyncLiveSequence
    fields: dict[str, Any]
    """The fields of the opening request that hold for all its generations."""

    def json(self) -> dict[str, Any]:
        """Returns the object that clients see. `expires_at` is null while the sequence is computed or generated."""
        sequence = self.sequence
        return {
            "id": self.id,
            "object": "sequence",
            "created": self.created,
            "expires_at": None if sequence.busy else int(time.time() + sequence.expires - time.monotonic()),
            "tokens": len(sequence),
            "generated_tokens": sequence.num_generated,
            "score": sequence.score(),
            "priority": sequence.priority,
        }


class Sequences:
    """All live sequences that clients have opened and not dropped."""

    def __init__(self) -> None:
        self._served: dict[str, ServedSequence] = {}

    def add(self, model: ServedModel, sequence: AsyncLiveSequence, fields: dict[str, Any]) -> ServedSequence:
        """Gives a sequence an id that nobody can guess, which is forgotten when the sequence is dropped."""
        served = ServedSequence(f"seq-{secrets.token_hex(16)}", int(time.time()), model, sequence, fields)
        self._served[served.id] = served
        sequence.on_drop = lambda: self._served.pop(served.id, None)
        return served

    def get(self, tenant: str, id: str) -> ServedSequence:
        """Returns a sequence of `tenant`. Raises ApiError 404, which is the same for other tenants' sequences."""
        served = self._served.get(id)
        if served is None or served.sequence.scheduling.tenant != tenant or served.sequence.dropped:
            message = "there is no live sequence of this id: it was dropped, its lease has ended, or it was never opened"
            raise ApiError(404, message, param="id", code="sequence_not_found")
        return served

    def of(self, tenant: str) -> list[ServedSequence]:
        """Returns the sequences of `tenant`, oldest first."""
        owned = [served for served in self._served.values() if served.sequence.scheduling.tenant == tenant]
        return [served for served in owned if not served.sequence.dropped]
