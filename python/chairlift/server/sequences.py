"""The live sequences of a server's clients, by id. Their tokens, leases and limits are the engine client's."""

from __future__ import annotations

import secrets
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from chairlift.engine.held_sequences import MAX_HELD
from chairlift.errors import TooManySequences
from chairlift.server.errors import ApiError

if TYPE_CHECKING:
    from chairlift.engine.async_live_sequence import AsyncLiveSequence
    from chairlift.server.keys import Tenant
    from chairlift.server.model import ServedModel

MAX_INVENTED = 3 * MAX_HELD // 4
"""Most live sequences of all tenants that have a name and no key: clients name them as they like."""

INVENTED_SHARE = 8
"""One of these tenants may hold at most this fraction, 1/8, of what all of them may still hold."""


@dataclass(frozen=True, slots=True)
class ServedSequence:
    """A live sequence with its id."""

    id: str
    created: int
    model: ServedModel
    sequence: AsyncLiveSequence
    fields: dict[str, Any]
    """The fields of the opening request that hold for all its generations."""
    opened: float = field(default_factory=time.monotonic)
    """When it was opened, by the monotonic clock: the system's clock may be set meanwhile."""

    def json(self) -> dict[str, object]:
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

    def __init__(self, on_drop: Callable[[ServedSequence], None]) -> None:
        """`on_drop` is called for each sequence that was dropped."""
        self._on_drop = on_drop
        self._served: dict[str, ServedSequence] = {}
        self._invented: Counter[str] = Counter()
        """The number of sequences of each tenant that has a name and no key."""

    def check_room(self, tenant: Tenant, count: int = 1) -> None:
        """Raises TooManySequences unless `tenant` may hold `count` more. The engine's limits apply in addition."""
        if not tenant.name or tenant.has_key:
            return
        held, own = self._invented.total(), self._invented[tenant.name]
        if own + count > (MAX_INVENTED - held) // INVENTED_SHARE:
            message = (
                f"all tenants without keys may hold {MAX_INVENTED} sequences and hold {held}, and one of them an eighth of the rest: "
                "drop some first"
            )
            raise TooManySequences(message, retry_after=None)

    def add(self, tenant: Tenant, model: ServedModel, sequence: AsyncLiveSequence, fields: dict[str, Any]) -> ServedSequence:
        """Gives a sequence an id that nobody can guess, which is forgotten when the sequence is dropped."""
        served = ServedSequence(f"seq-{secrets.token_hex(16)}", int(time.time()), model, sequence, fields)
        self._served[served.id] = served
        invented = tenant.name if not tenant.has_key else ""
        if invented:
            self._invented[invented] += 1

        def forget() -> None:
            del self._served[served.id]
            if invented:
                self._invented[invented] -= 1
                if not self._invented[invented]:
                    del self._invented[invented]
            self._on_drop(served)

        sequence.on_drop = forget
        return served

    def drop_all(self) -> None:
        """Drops all sequences."""
        for served in list(self._served.values()):
            served.sequence.drop()

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
