"""Chooses one of a model's engines for a request, by what each has in its cache and how long it is expected to take."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from chairlift import _core
from chairlift.engine.replica import Replica

if TYPE_CHECKING:
    from chairlift.engine.stats import Stats
    from chairlift.engine.stream import Stream

PREFILL_TOKENS = 1024
"""Tokens of the prompt whose time an engine's counter `predicted_prefill_us` predicts."""

UNMEASURED_TOKEN_US = 1.0
"""The time of a prompt's token before any engine has measured one: then the engines share the tokens equally."""


class ReplicaRouter:
    """The router of one model's engines: see `chairlift._core.Router`."""

    def __init__(self, routing: str) -> None:
        """`routing` is a name of --routing."""
        self.hash_key = secrets.token_bytes(16)
        """The key under which all engines name their KV blocks."""
        self._routing = routing
        self._router: _core.Router | None = None  # until the size of a block is known

    def choose(self, replicas: Sequence[Replica], stream: Stream, salt: bytes, session: bytes | None) -> Replica:
        """Returns one of the engines, and tells the request how much of its prompt that engine is expected to compute."""
        prompt, group = stream.prompt_token_ids, stream.scheduling.cache_group
        router = self._of(replicas[0])
        slowest = max((replica.engine.stats() for replica in replicas), key=lambda stats: stats.predicted_prefill_us)
        index, cached, request = router.choose([_seen(replica, slowest) for replica in replicas], prompt, salt, session, group)
        stream.expected_tokens = len(prompt) - cached
        stream.on_computed = partial(router.computed, request)
        return replicas[index]

    def cache_changed(self, replica: Replica, cached: bytes, dropped: bytes) -> None:
        """Takes the names of KV blocks that an engine has cached, and dropped."""
        self._of(replica).cache_changed(replica.number, cached, dropped)

    def forget(self, replica: Replica) -> None:
        """Forgets the cache of an engine that has ended."""
        if self._router is not None:
            self._router.forget(replica.number)

    def _of(self, replica: Replica) -> _core.Router:
        if self._router is None:
            info = replica.engine.info
            self._router = _core.Router(self._routing, int.from_bytes(self.hash_key), info.block_size, info.recurrent)
        return self._router


def _seen(replica: Replica, slowest: Stats) -> tuple[int, int, int, float, int]:
    """An engine as the router sees it. The prompts that were sent to it are known better here than by its last report.

    An engine that has measured no prompt yet counts as fast as the `slowest` that has. Otherwise it would seem free and get all requests.
    """
    engine = replica.engine
    stats = engine.stats()
    speed = stats if stats.predicted_prefill_us else slowest
    token_us = speed.predicted_prefill_us / PREFILL_TOKENS or UNMEASURED_TOKEN_US
    wait = stats.predicted_wait_us if engine.open_sequences >= engine.info.max_num_seqs else 0
    wait += speed.predicted_step_us if engine.open_sequences else 0  # a prompt begins after the present step
    wait += round(engine.prompt_tokens * token_us)
    return replica.number, engine.open_sequences, wait, token_us, stats.predicted_turn_us
