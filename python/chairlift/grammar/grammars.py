"""The grammars of an engine: compiled by a thread of their own, kept for the next request, and followed token by token."""

from __future__ import annotations

import threading
from collections import OrderedDict
from concurrent.futures import Future
from queue import SimpleQueue
from typing import TYPE_CHECKING

from chairlift.errors import InvalidRequest, QueueFull, RequestFailed
from chairlift.grammar.trial import Trial, Vocabulary, compiled
from chairlift.sampling import StructuredOutput

if TYPE_CHECKING:
    import torch
    from llguidance import LLMatcher, LLTokenizer

MAX_WAITING = 256
"""Grammars that may wait to be compiled."""
MAX_KEPT, MAX_KEPT_BYTES = 256, 512 * 2**20
"""Compiled grammars that are kept, and their memory, though the newest always is."""
STACK_BYTES = 64 * 2**20
"""Many times what a grammar has had in its trial; only what is used takes memory."""


class Grammar:
    """A compiled grammar, of which every sequence has its own matcher; `size` is its memory in bytes."""

    def __init__(self, template: LLMatcher, size: int) -> None:
        self._template = template
        self.size = size

    def matcher(self) -> Matcher:
        """A matcher at the beginning of an answer; it shares with the others what they find out about the grammar."""
        return Matcher(self._template.deep_copy())


class Matcher:
    """One sequence's place in a grammar, as `chairlift.runner.sampling.matcher` wants it."""

    def __init__(self, place: LLMatcher) -> None:
        self._place = place

    def mask(self, bitmask: torch.Tensor, index: int) -> None:
        """Sets a bit for each token that may come next, only ends of sequence behind the grammar's end; raises ValueError.

        `bitmask` is int32 [rows, ceil(vocabulary / 32)] on the CPU.
        """
        row = bitmask[index]
        self._place.unsafe_compute_mask_ptr(row.data_ptr(), row.nbytes)
        self._check()

    def accept(self, token: int) -> None:
        """Goes on by one token; raises ValueError if the grammar has no place for it."""
        self._place.consume_token(token)
        self._check()

    def _check(self) -> None:
        if self._place.is_error():
            raise ValueError(self._place.get_error())


class Grammars:
    """Compiles grammars over a model's vocabulary, each at first in a trial that bounds its time and memory.

    `compile` belongs to one thread; the first call of it starts another, which reads the tokenizer and does the work.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._trial = Trial(vocabulary)
        self._tokenizer: LLTokenizer | None = None
        self._kept: OrderedDict[tuple[str, str], Future[Grammar]] = OrderedDict()
        self._work: SimpleQueue[tuple[StructuredOutput, Future[Grammar]] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def compile(self, structure: StructuredOutput) -> Future[Grammar]:
        """The grammar as soon as it is compiled, or InvalidRequest with what is wrong with it; raises QueueFull."""
        key = (structure.kind, structure.text)
        future = self._kept.get(key)
        if future is None or _is_accident(future):
            if self._work.qsize() >= MAX_WAITING:
                raise QueueFull(f"{MAX_WAITING} grammars wait to be compiled, as many as may", retry_after=1.0)
            future = self._kept[key] = Future()
            self._start()
            self._work.put((structure, future))
        self._kept.move_to_end(key)
        self._shrink()
        return future

    def close(self) -> None:
        """Ends the thread, after what it is compiling, and the process of its trials."""
        if self._thread is not None:
            self._work.put(None)
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
        while (work := self._work.get()) is not None:
            structure, future = work
            try:
                size = self._trial.run(structure)
                if self._tokenizer is None:
                    self._tokenizer = self._vocabulary.load()
                future.set_result(Grammar(compiled(self._tokenizer, structure), size))
            except Exception as error:
                future.set_exception(error)
            except BaseException as error:  # a panic of Rust's is no Exception
                future.set_exception(RequestFailed(f"the grammar could not be compiled: {error}"))

    def _shrink(self) -> None:
        """Lets go of the grammars that were not asked for the longest; sequences that use them go on."""
        sizes = {key: _size(future) for key, future in self._kept.items()}
        total = sum(sizes.values())
        while len(self._kept) > MAX_KEPT or (total > MAX_KEPT_BYTES and len(self._kept) > 1):
            key, _ = self._kept.popitem(last=False)
            total -= sizes[key]


def _is_accident(future: Future[Grammar]) -> bool:
    """Whether it failed for a reason that is not in the grammar."""
    return future.done() and not isinstance(future.exception(), InvalidRequest | None)


def _size(future: Future[Grammar]) -> int:
    return future.result().size if future.done() and future.exception() is None else 0
