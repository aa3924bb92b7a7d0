"""The latest turns of conversations: each one's prompt and answers, and the ways to find the turn that a request goes on from.

Everything is kept by tenant, in bounded memory. Only the tenant's own requests find a turn.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from chairlift.server.cache_miss import CacheMiss
from chairlift.server.keys import Reader

MAX_BYTES = 64 << 20
"""Memory for all turns. Groups of tenants have equal shares."""
MAX_GROUPS = 64
"""Groups of tenants whose turns are kept: the last that sent something."""
MAX_MISSES = 2000
"""Cache misses that stay known, for explanations."""
_TURN_BYTES, _PART_BYTES, _NAME_BYTES = 2000, 80, 300
"""Memory for a turn besides its tokens, for a part of its prompt, and for a name under which it is found."""

Part = tuple[str, bytes]
"""A field of a conversation, as in `messages[3].content`, and the hash of its value."""


class Scope(NamedTuple):
    """What must be equal for two prompts to share KV blocks."""

    model: str
    adapter: str | None
    salt: str | None
    group: str
    fingerprint: object


class Anchor(NamedTuple):
    """Where in a prompt the answer's message begins, right after the last control token before it."""

    rendered: int
    """Tokens before it as the chat template and the tokenizer made them."""
    digest: bytes
    """The hash of these tokens."""
    tail: int
    """Tokens of the prompt from there on: the beginning of the answer's message."""


@dataclass(slots=True)
class Answer:
    """An answer to a turn's prompt."""

    tokens: array[int]
    parts: Sequence[Part]
    """Its fields, named as in a message: `content`, `reasoning`, `tool_calls[0].name` and so on."""


@dataclass(slots=True, eq=False)
class Turn:
    """A prompt that an engine has computed, and its answers."""

    tenant: str
    limit_group: str
    """The group of tenants that shares the memory."""
    answer_id: str
    thread: str | None
    """The client's name for the conversation."""
    scope: Scope
    parts: Sequence[Part]
    prompt: array[int]
    anchor: Anchor
    restarts: int
    """How often the model's engines had ended before."""
    continued_by: str | None = None
    """The id of the latest answer of a turn that goes on from this one."""
    answers: dict[int, Answer] = field(default_factory=dict)
    names: list[Hashable] = field(default_factory=list)

    def tokens(self, index: int) -> array[int]:
        """Returns the prompt and the answer of that index, as far as it is known."""
        answer = self.answers.get(index)
        return self.prompt if answer is None else self.prompt + answer.tokens

    @property
    def size(self) -> int:
        """Bytes of memory, about."""
        tokens = len(self.prompt) + sum(len(answer.tokens) for answer in self.answers.values())
        parts = len(self.parts) + sum(len(answer.parts) for answer in self.answers.values())
        return _TURN_BYTES + self.prompt.itemsize * tokens + _PART_BYTES * parts + _NAME_BYTES * len(self.names)


class Found(NamedTuple):
    """A turn, and the number of the answer that a conversation goes on from."""

    turn: Turn
    choice: int = 0


class Turns:
    """The turns of all tenants."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._groups: OrderedDict[str, OrderedDict[Turn, int]] = OrderedDict()
        """The turns of each group with their sizes, in the order in which they will be forgotten."""
        self._sizes: dict[str, int] = {}
        self._named: dict[Hashable, Found] = {}
        self._misses: OrderedDict[str, tuple[Reader, CacheMiss]] = OrderedDict()

    @property
    def size(self) -> int:
        """Bytes in use."""
        return sum(self._sizes.values())

    def add(self, turn: Turn) -> None:
        """Adds a turn whose prompt has been computed."""
        names = [(turn.tenant, "id", turn.answer_id)]
        if turn.thread is not None:
            names.append((turn.tenant, "thread", turn.thread))
        self._keep(turn, names, Found(turn))

    def add_answer(self, turn: Turn, index: int, answer: Answer, keys: Iterable[bytes]) -> None:
        """Adds a complete answer, which `find` knows by each of `keys`. It has no effect if the turn has been forgotten."""
        if turn in self._groups.get(turn.limit_group, ()):
            turn.answers[index] = answer
            self._keep(turn, [(turn.tenant, "answer", key) for key in keys], Found(turn, index))

    def supersede(self, turn: Turn, later: Turn | None = None) -> None:
        """Lets a turn be forgotten before others, because `later` continues it or its session has ended."""
        turn.continued_by = None if later is None else later.answer_id
        if turn in self._groups.get(turn.limit_group, ()):
            self._groups[turn.limit_group].move_to_end(turn, last=False)

    def with_id(self, tenant: str, answer_id: str) -> Found | None:
        """Returns the turn with this answer."""
        return self._named.get((tenant, "id", answer_id))

    def with_answer(self, tenant: str, key: bytes) -> Found | None:
        """Returns the turn that has an answer of this key."""
        return self._named.get((tenant, "answer", key))

    def latest(self, tenant: str, thread: str) -> Found | None:
        """Returns the latest turn of a conversation that the client has named."""
        return self._named.get((tenant, "thread", thread))

    def newest(self, found: Found, parts: Sequence[Part] | None = None) -> Found:
        """Returns the last of the turns that go on from a turn, or the last of which the prompt of these `parts` has all."""
        while found.turn.continued_by is not None:
            later = self.with_id(found.turn.tenant, found.turn.continued_by)
            if later is None or (parts is not None and later.turn.parts != parts[: len(later.turn.parts)]):
                break
            found = later
        return found

    def end_thread(self, tenant: str, thread: str) -> None:
        """Lets the latest turn of a conversation be forgotten before others, and by its name at once."""
        if (found := self._named.pop((tenant, "thread", thread), None)) is not None:
            self.supersede(found.turn)

    def add_miss(self, answer_id: str, reader: Reader, miss: CacheMiss) -> None:
        """Records why the request with this answer missed the cache. Only `reader` may see the texts."""
        self._misses[answer_id] = reader, miss
        while len(self._misses) > MAX_MISSES:
            self._misses.popitem(last=False)

    def miss(self, answer_id: str) -> tuple[Reader, CacheMiss] | None:
        """Returns the cache miss of the request with this answer, and who may see its texts."""
        return self._misses.get(answer_id)

    def _keep(self, turn: Turn, names: Sequence[Hashable], found: Found) -> None:
        group = turn.limit_group
        turns = self._groups.setdefault(group, OrderedDict())
        turn.names += names
        self._named |= dict.fromkeys(names, found)
        self._sizes[group] = self._sizes.get(group, 0) + turn.size - turns.pop(turn, 0)
        turns[turn] = turn.size
        self._groups.move_to_end(group)
        while len(self._groups) > MAX_GROUPS:
            self._forget_oldest(next(iter(self._groups)))
        share = self._max_bytes // len(self._groups)
        for other in list(self._groups):
            while self._sizes.get(other, 0) > share:
                self._forget_oldest(other)

    def _forget_oldest(self, group: str) -> None:
        """Forgets a group's oldest turn, and the group with its last turn."""
        turn, size = self._groups[group].popitem(last=False)
        self._sizes[group] -= size
        for name in turn.names:
            if (found := self._named.get(name)) is not None and found.turn is turn:
                del self._named[name]
        if not self._groups[group]:
            del self._groups[group], self._sizes[group]
