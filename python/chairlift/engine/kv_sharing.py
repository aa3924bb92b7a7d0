"""Divides the bytes of KV blocks among the engines of a process, between two steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from chairlift import _core
from chairlift.errors import InvalidSetting

if TYPE_CHECKING:
    from chairlift.engine.engine import Engine


@dataclass(frozen=True, slots=True)
class SharedBlocks:
    """An engine's KV blocks whose memory other engines can use."""

    block_bytes: int
    """Bytes of a block."""
    least: int
    """Blocks of one sequence of full length, which the engine always has."""
    most: int
    """Blocks that the engine can use if it is alone."""
    total: int | None
    """Bytes for all engines together, if `--kv-cache-memory-bytes` says so."""
    state_bytes: int = 0
    """Bytes of the engine's recurrent states, which it always has."""


class KvSharing:
    """Gives each engine its limit of KV blocks."""

    def __init__(self) -> None:
        self._budget = _core.KvBudget()
        self._engines: dict[int, Engine] = {}

    def add(self, number: int, engine: Engine) -> None:
        """Adds an engine with its promised minimum. Raises InvalidSetting if all minimums are more than there is."""
        shared = engine.shared_blocks
        if shared is None:
            return
        promised = self._budget.promised() + shared.least * shared.block_bytes + shared.state_bytes
        if self._engines and shared.total is not None and promised > shared.total:
            raise InvalidSetting(
                f"--kv-cache-memory-bytes {shared.total} is for all models, and one sequence of full length for each of the "
                f"{len(self._engines) + 1} loaded ones needs {promised}: raise it, or lower --max-model-len"
            )
        self._budget.add(number, block_bytes=shared.block_bytes, state_bytes=shared.state_bytes, least=shared.least, most=shared.most)
        self._engines[number] = engine
        if len(self._engines) > 1:
            self._budget.set(number, engine.set_block_limit(shared.least))
            self.divide()

    def remove(self, number: int) -> None:
        """Removes an engine. The others can use its bytes."""
        if self._engines.pop(number, None) is not None:
            self._budget.remove(number)
            self._apply(self._budget.grow())

    def divide(self) -> None:
        """Sets the limits anew if an engine could use more blocks. For between two steps, because blocks lose their content."""
        for number, engine in self._engines.items():
            self._budget.report(number, *engine.blocks_used())
        if self._budget.is_short():
            # An engine can have what the others have given back.
            self._apply(self._budget.shrink())
            self._apply(self._budget.grow())

    def _apply(self, limits: list[tuple[int, int]]) -> None:
        for number, blocks in limits:
            self._budget.set(number, self._engines[number].set_block_limit(blocks))
