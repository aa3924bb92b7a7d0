"""Compiles an engine's grammars on a separate thread, and caches them."""

from __future__ import annotations

import threading
from collections import OrderedDict
from concurrent.futures import Future
from typing import TYPE_CHECKING

from chairlift.errors import InvalidRequest, QueueFull, RequestFailed
from chairlift.grammar.allowance import TenantAllowances
from chairlift.grammar.compile_queue import CompileQueue, Work
from chairlift.grammar.grammar import Grammar
from chairlift.grammar.trial import Trial, Vocabulary, compiled
from chairlift.grammar.usage import TENANT_SECONDS, GrammarUsage
from chairlift.sampling import StructuredOutput

if TYPE_CHECKING:
    from llguidance import LLTokenizer

MAX_KEPT, MAX_KEPT_BYTES = 256, 512 * 2**20
"""Maximum number and total bytes of cached grammars. The newest grammar is always kept."""
STACK_BYTES = 64 * 2**20
"""Stack of the compiling thread in bytes: many times the stack of a trial. Only used pages take memory."""


class Grammars:
    """Compiles grammars over a model's vocabulary. Each grammar is first compiled in a trial process with limits on time and memory.

    Tenants share no grammar, because the sequences of one grammar share the states of its lexer and their limit. Only one thread may call
    `compile`. The first call starts another thread, which loads the tokenizer and compiles.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._trial = Trial(vocabulary)
        self._tokenizer: LLTokenizer | None = None
        self._kept: OrderedDict[tuple[str, str, str, str, bool | None], Future[Grammar]] = OrderedDict()
        self._allowances = TenantAllowances(TENANT_SECONDS)
        self._queue = CompileQueue()
        self._thread: threading.Thread | None = None

    def compile(self, structure: StructuredOutput, tenant: str = "") -> Future[Grammar]:
        """Returns the future of the compiled grammar. Raises QueueFull.

        The future fails with InvalidRequest if the grammar is invalid, and with QueueFull if the tenant's grammars have taken too much
        time. The caller may cancel it when no request waits for it any more.
        """
        key = (tenant, structure.kind, structure.text, structure.before, structure.disable_any_whitespace)
        for worn in [key for key, future in self._kept.items() if _worn(future)]:
            del self._kept[worn]
        if key not in self._kept:
            future: Future[Grammar] = Future()
            self._queue.put(Work(structure, tenant, future))
            self._kept[key] = future
            self._start()
        self._kept.move_to_end(key)
        self._shrink()
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
        while (work := self._queue.get()) is not None:
            try:
                work.future.set_result(self._compiled(work))
            except Exception as error:
                work.future.set_exception(error)
            except BaseException as error:  # a Rust panic is not an Exception
                work.future.set_exception(RequestFailed(f"the grammar could not be compiled: {error}"))

    def _compiled(self, work: Work) -> Grammar:
        allowance = self._allowances.of(work.tenant)
        if allowance.left <= 0:
            message = "your grammars have taken more processor time than they may: make them simpler, or send new ones later"
            raise QueueFull(message, retry_after=allowance.refilled_in)
        if self._tokenizer is None:
            self._trial.start()  # loads the vocabulary too, at the same time
            self._tokenizer = self._vocabulary.load()
        size = self._trial.run(work.structure)
        return Grammar(compiled(self._tokenizer, work.structure), size, self._tokenizer, GrammarUsage(allowance))

    def _shrink(self) -> None:
        """Evicts the least recently requested grammars. Sequences that use them are not affected."""
        sizes = {key: _size(future) for key, future in self._kept.items()}
        total = sum(sizes.values())
        while len(self._kept) > MAX_KEPT or (total > MAX_KEPT_BYTES and len(self._kept) > 1):
            key, _ = self._kept.popitem(last=False)
            total -= sizes[key]


def _worn(future: Future[Grammar]) -> bool:
    """Whether the next request needs a new one: it was cancelled, failed for a reason other than the grammar, or has a worn grammar."""
    if not future.done():
        return False
    if future.cancelled() or not isinstance(future.exception(), InvalidRequest | None):
        return True
    return future.exception() is None and future.result().usage.worn


def _size(future: Future[Grammar]) -> int:
    return future.result().size if future.done() and future.exception() is None else 0
