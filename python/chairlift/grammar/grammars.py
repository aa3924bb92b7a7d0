"""Compiles an engine's grammars on a separate thread, and caches them."""

from __future__ import annotations

import os
import sys
import threading
from collections import Counter, OrderedDict
from collections.abc import Mapping
from concurrent.futures import Future
from typing import TYPE_CHECKING, TypeAlias
from weakref import WeakKeyDictionary

from chairlift.errors import InvalidRequest, QueueFull, RequestFailed
from chairlift.grammar.allowance import TenantAllowances
from chairlift.grammar.compile_queue import CompileQueue, Work
from chairlift.grammar.grammar import Grammar
from chairlift.grammar.trial import Trial, Vocabulary, compiled
from chairlift.grammar.usage import TENANT_SECONDS, GrammarUsage
from chairlift.sampling import StructuredOutput
from chairlift.trim import trim

if TYPE_CHECKING:
    from chairlift._core import GrammarVocabulary

MAX_KEPT = 256
"""Maximum number of cached grammars."""
MAX_BYTES, MAX_BYTES_OF_GROUP = 512 * 2**20, 256 * 2**20
"""Maximum bytes of the grammars that are cached or used by sequences, of all tenants and of one group."""
TRIMMED_BYTES = 64 * 2**20
"""Bytes of grammars that have ended whose memory is returned to the system together."""
STACK_BYTES = 64 * 2**20
"""Stack of the compiling thread in bytes: many times the stack of a trial. Only used pages take memory."""

NICE = 5
"""How much lower the compiling thread's priority is than that of the steps of running requests."""

Key: TypeAlias = tuple[str, str, str, str, bool | None]
"""A group of tenants, and what distinguishes its grammars."""


class Grammars:
    """Compiles grammars over a model's vocabulary. Each grammar is first compiled in a trial process with limits on time and memory.

    Tenants share no grammar, because the sequences of one grammar share the states of its lexer and their limit. Only one thread may call
    `compile`. The first call starts another thread, which loads the vocabulary and compiles.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._trial = Trial(vocabulary)
        self._tokens: GrammarVocabulary | None = None
        self._lock = threading.Lock()
        """Guards `_kept`."""
        self._kept: OrderedDict[Key, Future[Grammar]] = OrderedDict()
        self._living: WeakKeyDictionary[GrammarUsage, tuple[str, int]] = WeakKeyDictionary()
        """The group of each grammar that is cached or used by a sequence, and its bytes when it was compiled."""
        self._used_bytes = self._most_bytes = 0
        """Bytes of all grammars now, and when they were the most since memory was returned to the system."""
        self._allowances = TenantAllowances(TENANT_SECONDS)
        self._queue = CompileQueue()
        self._thread: threading.Thread | None = None

    def compile(self, structure: StructuredOutput, group: str = "", tenant: str = "") -> Future[Grammar]:
        """Returns the future of the compiled grammar. Raises QueueFull.

        The limits and the cache are those of a group of tenants; the tenants of a group take turns. The future fails with InvalidRequest if
        the grammar is invalid, and with QueueFull if the group's grammars have taken too much time, or if grammars that are in use leave no
        memory for it. The caller may cancel it when no request waits for it any more.
        """
        key = (group, structure.kind, structure.text, structure.before, structure.disable_any_whitespace)
        with self._lock:
            for worn in [key for key, future in self._kept.items() if _worn(future)]:
                del self._kept[worn]
            if key not in self._kept:
                future: Future[Grammar] = Future()
                self._queue.put(Work(structure, group, tenant, future))
                self._kept[key] = future
                self._start()
            self._kept.move_to_end(key)
            while len(self._kept) > MAX_KEPT:
                self._evict(dict.fromkeys(self._kept, 1))
            return self._kept[key]

    def close(self) -> None:
        """Ends the thread after its current grammar, and ends the trial process."""
        if self._thread is not None:
            self._queue.close()
            self._trial.close()

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._compile, name="grammars", daemon=True)
            before = threading.stack_size(STACK_BYTES)
            try:
                self._thread.start()
            finally:
                threading.stack_size(before)

    def _compile(self) -> None:
        if sys.platform == "linux":
            os.nice(NICE)  # there this is the priority of a thread, and of the processes that it starts
        while (work := self._queue.get()) is not None:
            try:
                work.future.set_result(self._compiled(work))
            except Exception as error:
                work.future.set_exception(error)
            except BaseException as error:  # a Rust panic is not an Exception
                work.future.set_exception(RequestFailed(f"the grammar could not be compiled: {error}"))

    def _compiled(self, work: Work) -> Grammar:
        allowance = self._allowances.of(work.group)
        if allowance.left <= 0:
            message = "your grammars have taken more processor time than they may: make them simpler, or send new ones later"
            raise QueueFull(message, retry_after=allowance.refilled_in)
        if self._tokens is None:
            self._trial.start()  # loads the vocabulary too, at the same time
            self._tokens = self._vocabulary.load()
        size = self._trial.run(work.structure)
        self._make_room(work.group, size)
        template = compiled(self._tokens, work.structure)
        usage = GrammarUsage(allowance, template.lexer_bytes)
        grammar = Grammar(template, size, self._tokens, usage)
        self._living[usage] = work.group, size
        return grammar

    def _make_room(self, group: str, size: int) -> None:
        """Evicts cached grammars until a group may have `size` bytes more. Raises QueueFull if those that sequences use are too many."""
        with self._lock:
            while crowd := self._groups_without_room(group, size):
                sizes = {key: taken for key, future in self._kept.items() if key[0] in crowd and (taken := _size(future))}
                if not sizes:
                    whose = "your grammars" if crowd == {group} else "the grammars of all requests"
                    raise QueueFull(f"{whose} take as much memory as they may: wait until requests with grammars end", retry_after=1.0)
                self._evict(sizes)
        self._trim()

    def _groups_without_room(self, group: str, size: int) -> set[str]:
        """Whose grammars leave no room for `size` bytes more of a group: nobody's, its own, or those of all."""
        used: Counter[str] = Counter()
        for usage, (owner, compiled_size) in self._living.items():
            used[owner] += compiled_size + usage.growth
        self._used_bytes = used.total()
        self._most_bytes = max(self._most_bytes, self._used_bytes)
        if used[group] + size > MAX_BYTES_OF_GROUP:
            return {group}
        return set(used) if used.total() + size > MAX_BYTES else set()

    def _trim(self) -> None:
        """Returns memory to the system if the grammars have become much smaller: it is in small blocks, of which glibc would keep most.

        Call it without the lock: it takes tens of milliseconds.
        """
        if self._most_bytes - self._used_bytes > TRIMMED_BYTES:
            self._most_bytes = self._used_bytes
            trim()

    def _evict(self, sizes: Mapping[Key, int]) -> None:
        """Evicts the least recently requested grammar of the group with the most. Sequences that use it are not affected.

        `sizes` has what each grammar that may be evicted counts, in the order of `_kept`.
        """
        by_group: Counter[str] = Counter()
        for key, size in sizes.items():
            by_group[key[0]] += size
        most = max(by_group.values())
        del self._kept[next(key for key in sizes if by_group[key[0]] == most)]


def _worn(future: Future[Grammar]) -> bool:
    """Whether the next request needs a new one: it was cancelled, failed for a reason other than the grammar, or has a worn grammar."""
    if not future.done():
        return False
    if future.cancelled() or not isinstance(future.exception(), InvalidRequest | None):
        return True
    return future.exception() is None and future.result().usage.worn


def _size(future: Future[Grammar]) -> int:
    """The bytes of a compiled grammar; 0 of one that is not, because it waits, failed or was cancelled."""
    compiled = future.done() and not future.cancelled() and future.exception() is None
    return future.result().size if compiled else 0
