"""Chooses one of a model's engines for a request, by what each is expected to have in its cache and how long it is expected to take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from chairlift import _core
from chairlift.engine.replica import Replica

PREFILL_TOKENS = 1024
"""Tokens of the prompt whose time an engine's counter `predicted_prefill_us` predicts."""


class ReplicaRouter:
    """The router of one model's engines: see `chairlift._core.Router`."""

    def __init__(self, routing: str) -> None:
        """`routing` is a name of --routing."""
        self._routing = routing
        self._router: _core.Router | None = None  # until the caches' size is known

    def choose(
        self, replicas: Sequence[Replica], prompt: Sequence[int], salt: bytes, session: bytes | None, facts: Mapping[str, Any]
    ) -> tuple[Replica, int]:
        """Returns one of the engines, and the tokens of the prompt that it is expected to compute. `facts` are the model's."""
        if len(replicas) == 1:
            return replicas[0], len(prompt)
        if self._router is None:
            self._router = _core.Router(self._routing, facts["num_kv_blocks"] * facts["block_size"])
        index, cached = self._router.choose([_seen(replica) for replica in replicas], prompt, salt, session)
        return replicas[index], len(prompt) - cached

    def forget(self, replica: Replica) -> None:
        """Forgets what the engine of this number was sent before it started."""
        if self._router is not None:
            self._router.forget(replica.number)


def _seen(replica: Replica) -> tuple[int, int, int, float]:
    """An engine as the router sees it. The prompts that were sent to it are known better here than by its last report."""
    engine = replica.engine
    stats = engine.stats()
    token_us = stats.get("predicted_prefill_us", 0) / PREFILL_TOKENS
    wait = stats.get("predicted_wait_us", 0) if engine.open_sequences >= engine.facts["max_num_seqs"] else 0
    wait += stats.get("predicted_step_us", 0) if engine.open_sequences else 0  # a prompt begins after the present step
    return replica.number, engine.open_sequences, wait + round(engine.prompt_tokens * token_us), token_us
