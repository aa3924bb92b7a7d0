"""Sequences that stay computed between two generations: their tokens, limits and leases. The engine has only their KV."""

from __future__ import annotations

import itertools
import math
import threading
import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from enum import Enum, auto
from typing import TYPE_CHECKING, Self

from chairlift.checks import integer, number
from chairlift.engine.engine_request import Continues
from chairlift.engine.frames import DropSequence, ForkSequence, Frame, SetPriority
from chairlift.errors import InvalidRequest, SequenceBusy, SequenceDropped, TooManySequences
from chairlift.outputs import RequestOutput
from chairlift.sampling import SamplingParams
from chairlift.scheduling import Scheduling

if TYPE_CHECKING:
    from chairlift.engine.engine_info import EngineInfo

MAX_PER_TENANT = 1024
"""Most held sequences of one tenant."""
MAX_HELD = 16_384
"""Most held sequences of all tenants."""
LEASE = 600.0
"""Default seconds after which an unused sequence is dropped."""
LONGEST_LEASE = 86_400.0

COMPUTE = SamplingParams(max_tokens=1, temperature=0.0)
"""Parameters of requests that only compute. The engine computes nothing without generating a token, which is discarded."""


class HeldState(Enum):
    """What a held sequence does."""

    IDLE = auto()
    COMPUTING = auto()
    """The engine computes the sequence's last tokens and generates none."""
    GENERATING = auto()
    DROPPED = auto()


_IDLE, _COMPUTING, _GENERATING, _DROPPED = HeldState  # a member of a module is found in half the time


class HeldSequences:
    """The held sequences of an engine's client: counts them by tenant and ends their leases.

    `info` returns the description of the engine, and `send` sends a frame to it. Handles are unique, also among engines that replace each
    other. An engine opens a sequence that it does not know when a request continues it.
    """

    def __init__(self, info: Callable[[], EngineInfo], send: Callable[[Frame], None]) -> None:
        self.info = info
        self.send = send
        self.lock = threading.RLock()
        """Held while a sequence is opened, forked or dropped, or begins to run, because threads may share an `LLM`."""
        self._handles = itertools.count(1)
        self._by_tenant: dict[str, dict[int, HeldSequence]] = {}  # and by handle
        self._count = 0
        self._next_expiry = math.inf  # no lease ends earlier

    def __len__(self) -> int:
        return self._count

    def check_room(self, tenant: str, count: int = 1) -> None:
        """Raises TooManySequences unless `tenant` may hold `count` more, and leaves as many for others as it holds."""
        own = self._by_tenant.get(tenant, {})
        if len(own) + count > MAX_PER_TENANT:
            message = f"a tenant may hold {MAX_PER_TENANT} sequences, and this one holds {len(own)}: drop some first"
            raise TooManySequences(message, retry_after=_seconds_until(min((held.expires for held in own.values()), default=math.inf)))
        if (free := MAX_HELD - self._count) < count:
            message = f"all tenants together may hold {MAX_HELD} sequences, and hold {self._count}: drop some first"
            raise TooManySequences(message, retry_after=_seconds_until(self._next_expiry))
        if len(own) + count > free:
            message = f"a tenant may hold as many sequences as are free, {free}, and this one holds {len(own)}: drop some first"
            raise TooManySequences(message, retry_after=_seconds_until(self._next_expiry))

    def enter(self, sequences: Sequence[HeldSequence], tenant: str) -> list[int]:
        """Adds sequences of `tenant` and gives each its handle. Returns the handles."""
        own = self._by_tenant.setdefault(tenant, {})
        handles = []
        for sequence in sequences:
            sequence.handle = handle = next(self._handles)
            own[handle] = sequence
            handles.append(handle)
        self._count += len(sequences)
        return handles

    def remove(self, sequence: HeldSequence) -> None:
        """Removes a sequence."""
        own = self._by_tenant[sequence.scheduling.tenant]
        del own[sequence.handle]
        if not own:
            del self._by_tenant[sequence.scheduling.tenant]
        self._count -= 1

    def lease_until(self, expires: float) -> None:
        """Called when a lease has a new end."""
        if expires < self._next_expiry:
            self._next_expiry = expires

    def expire(self) -> None:
        """Drops the sequences whose leases have ended. O(1) if there is none."""
        now = time.monotonic()
        if now < self._next_expiry:
            return
        with self.lock:
            for sequence in [held for own in self._by_tenant.values() for held in own.values() if held.expires <= now]:
                sequence.release()
            self._next_expiry = min((held.expires for own in self._by_tenant.values() for held in own.values()), default=math.inf)


class HeldSequence:
    """One held sequence: its tokens, how many of them the engine may hold, its lease, and the generation that runs.

    Base class of `AsyncLiveSequence`. Every use renews the lease.
    """

    def __init__(self, held: HeldSequences, token_ids: Iterable[int], scheduling: Scheduling, lease: float) -> None:
        """Raises InvalidRequest for a lease out of range, and TooManySequences."""
        number("lease", lease, 0.0, LONGEST_LEASE, above=True)
        self._held = held
        self._token_ids = array("i", token_ids)  # never changed in place, because forks share it
        self._logprobs: list[tuple[int, float]] = []  # (position, value) of generated tokens; never changed in place
        self._score = 0.0
        self._computed = 0
        self._scheduling = scheduling
        self._lease = lease
        self._state = _IDLE
        self._tag: int | None = None
        self.on_drop: Callable[[], object] | None = None
        """Called when the sequence is dropped."""
        self.expires = math.inf
        """When the lease ends, on the monotonic clock. Infinite while the sequence is computed or generated."""
        self.handle = 0
        self._idle_since = time.monotonic()
        self._idle_token_seconds = 0.0
        with held.lock:
            held.check_room(scheduling.tenant)
            held.enter([self], scheduling.tenant)
            self._renew()

    def __len__(self) -> int:
        return len(self._token_ids)

    @property
    def token_ids(self) -> list[int]:
        """All tokens so far."""
        return self._token_ids.tolist()

    @property
    def priority(self) -> int:
        """Lower goes first, under policies with priorities. A new value holds from the next step on, also for a running generation."""
        return self._scheduling.priority

    @priority.setter
    def priority(self, priority: int) -> None:
        self.check_dropped()
        self._scheduling = replace(self._scheduling, priority=priority)
        tag = self._tag
        if tag is not None:
            self._held.send(SetPriority(tag, priority))

    @property
    def num_generated(self) -> int:
        """Number of generated tokens."""
        return len(self._logprobs)

    @property
    def idle_token_seconds(self) -> float:
        """The sequence's tokens multiplied by the seconds for which it held them and did nothing."""
        self._count_idle_time()
        return self._idle_token_seconds

    @property
    def scheduling(self) -> Scheduling:
        """The scheduling parameters of its generations."""
        return self._scheduling

    @property
    def dropped(self) -> bool:
        """Whether it was dropped or its lease has ended."""
        return self._state is _DROPPED or time.monotonic() >= self.expires

    @property
    def busy(self) -> bool:
        """Whether it is computed or generated."""
        return self._state is _COMPUTING or self._state is _GENERATING

    @property
    def uncomputed(self) -> bool:
        """Whether `compute` has something to do. The next generation computes the last token, because it samples after it."""
        return len(self._token_ids) - 1 > self._computed

    def score(self, *, mean: bool = False) -> float:
        """The sum of the log-probabilities of the generated tokens, or their `mean`; 0 if none were generated."""
        return self._score / (max(len(self._logprobs), 1) if mean else 1)

    def check_room(self, count: int) -> None:
        """Raises SequenceDropped, or TooManySequences if `count` forks cannot be made."""
        self.check_dropped()
        self._held.check_room(self._scheduling.tenant, count)

    def rewind(self, count: int) -> None:
        """Removes the last `count` tokens. The others stay computed. Raises InvalidRequest unless one token is left."""
        self._check_idle()
        integer("count", count, 0, len(self._token_ids) - 1)
        self._count_idle_time()
        kept = len(self._token_ids) - count
        self._token_ids = self._token_ids[:kept]
        self._set_logprobs([(position, logprob) for position, logprob in self._logprobs if position < kept])
        self._computed = min(self._computed, kept)
        self._renew()

    def params(self, params: SamplingParams) -> SamplingParams:
        """The parameters of a generation: with log-probabilities, for the score. Raises InvalidRequest for fields that it cannot have."""
        if params.num_sequences > 1 or params.prompt_logprobs is not None:
            raise InvalidRequest("a live sequence has one answer and no prompt_logprobs: fork it for several answers", param="n")
        if params.lora is not None:
            raise InvalidRequest("live sequences are computed without adapters", param="lora")
        return replace(params, logprobs=params.logprobs or 0)

    def own_scheduling(self, given: Scheduling | None) -> Scheduling:
        """The scheduling parameters of a generation: its own, unless others are given. Raises InvalidRequest for another tenant or salt."""
        own = self._scheduling
        if given is None or given == Scheduling():
            return own
        if (given.tenant, given.cache_salt) != (own.tenant, own.cache_salt):
            raise InvalidRequest("this live sequence belongs to another tenant or cache_salt", param="scheduling", code="not_owner")
        return given

    def generating(self) -> AbstractContextManager[array[int]]:
        """Runs a generation in the block. Yields its prompt. Raises SequenceBusy and SequenceDropped.

        The prompt is an array, because a list of a million tokens takes 30 ms to pack for the engine.
        """
        return self._running(_GENERATING)

    def computing(self) -> AbstractContextManager[array[int]]:
        """Runs a request that only computes, in the block. Yields its prompt. Raises SequenceBusy and SequenceDropped."""
        return self._running(_COMPUTING)

    @contextmanager
    def _running(self, state: HeldState) -> Iterator[array[int]]:
        with self._held.lock:
            self._check_idle()
            self._count_idle_time()
            self._state, self.expires = state, math.inf
        try:
            yield self._token_ids if state is _GENERATING else self._token_ids[:-1]
        finally:  # without `finish`, the sequence stays as it was
            self._tag = None
            if self._state is not _DROPPED:
                self._state, self._idle_since = _IDLE, time.monotonic()
                self._renew()

    def continued_by(self, tag: int) -> Continues:
        """Called when the request `tag` is about to continue it, from the tokens that the engine may hold."""
        self.check_dropped()
        self._tag = tag
        return Continues(self.handle, self._computed)

    def finish(self, parts: Iterable[RequestOutput]) -> None:
        """Takes the whole output of the request, which has ended by a stop or by its length."""
        if self._state is _COMPUTING:
            self._computed = len(self._token_ids) - 1
        elif self._state is _GENERATING:
            pairs = [pair for part in parts for pair in zip(part.token_ids, part.logprobs or (), strict=True)]
            start = len(self._token_ids)
            self._token_ids = self._token_ids + array("i", [token for token, _ in pairs])
            self._set_logprobs([*self._logprobs, *((start + index, one.logprob) for index, (_, one) in enumerate(pairs))])
            self._computed = len(self._token_ids)

    def release(self) -> int | None:
        """Drops the sequence, unless it was dropped. Returns the tag of the request that continues it, which must be aborted."""
        with self._held.lock:
            if self._state is _DROPPED:
                return None
            self._count_idle_time()
            self._state = _DROPPED
            self._held.remove(self)
        self._held.send(DropSequence(self.handle))
        if self.on_drop is not None:
            self.on_drop()
        return self._tag

    def check_dropped(self) -> None:
        """Raises SequenceDropped after `drop` or the end of the lease."""
        if self.dropped:
            raise SequenceDropped("this sequence was dropped, or its lease has ended: open a new one, or fork another before")

    def append_tokens(self, tokens: Sequence[int]) -> None:
        """Appends token ids of the model. Raises InvalidRequest beyond the context length."""
        self._check_idle()
        self._count_idle_time()
        limit = self._held.info().max_model_len
        length = len(self._token_ids) + len(tokens)
        if length >= limit:
            raise InvalidRequest(
                f"the sequence would have {length} tokens, and the context of this model has {limit}, with at least one to generate",
                param="content",
                code="context_length_exceeded",
            )
        self._token_ids = self._token_ids + array("i", tokens)
        self._renew()

    def _forks(self, count: int) -> list[Self]:
        """Makes `count` idle copies, all or none. Raises InvalidRequest, TooManySequences and SequenceDropped."""
        integer("count", count, 1, 2**31 - 1)
        held, forks = self._held, []
        with held.lock:
            self.check_room(count)
            now = time.monotonic()
            expires = now + self._lease
            held.lease_until(expires)
            if self._state is _IDLE:
                self.expires = expires
            for _ in range(count):
                fork = object.__new__(type(self))
                fork.__dict__ = fields = self.__dict__.copy()  # a quarter of the time of copy.copy
                fields["_state"], fields["_tag"], fields["on_drop"], fields["expires"] = _IDLE, None, None, expires
                fields["_idle_since"], fields["_idle_token_seconds"] = now, 0.0
                forks.append(fork)
            held.send(ForkSequence(self.handle, held.enter(forks, self._scheduling.tenant)))
        return forks

    def _set_logprobs(self, logprobs: list[tuple[int, float]]) -> None:
        self._logprobs, self._score = logprobs, math.fsum(logprob for _, logprob in logprobs)

    def _count_idle_time(self) -> None:
        """Called before its tokens or its state change."""
        if self._state is _IDLE:
            now = time.monotonic()
            self._idle_token_seconds += len(self._token_ids) * (now - self._idle_since)
            self._idle_since = now

    def _renew(self) -> None:
        self.expires = time.monotonic() + self._lease
        self._held.lease_until(self.expires)

    def _check_idle(self) -> None:
        self.check_dropped()
        if self.busy:
            raise SequenceBusy("this sequence is being generated: wait until that has ended, or use a fork")


def _seconds_until(expires: float) -> float | None:
    """Seconds until the end of a lease; None if it is infinite."""
    return None if math.isinf(expires) else max(0.0, expires - time.monotonic())
