"""Compiles an engine's grammars on a separate thread, caches them, and matches output against them token by token."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future
from queue import SimpleQueue
from typing import TYPE_CHECKING

from chairlift.errors import InvalidRequest, QueueFull, RequestFailed
from chairlift.grammar.budget import BudgetMatcher
from chairlift.grammar.trial import Trial, Vocabulary, compiled
from chairlift.sampling import ReasoningBudget, StructuredOutput

if TYPE_CHECKING:
    import numpy as np
    from llguidance import LLMatcher, LLTokenizer

MAX_WAITING = 256
"""Maximum number of grammars that wait to be compiled."""
MAX_KEPT, MAX_KEPT_BYTES = 256, 512 * 2**20
"""Maximum number and total bytes of cached grammars. The newest grammar is always kept."""
STACK_BYTES = 64 * 2**20
"""Stack of the compiling thread in bytes: many times the stack of a trial. Only used pages take memory."""


class Grammar:
    """A compiled grammar of `size` bytes. Each sequence has its own matcher."""

    def __init__(self, template: LLMatcher, size: int, tokenizer: LLTokenizer) -> None:
        self._template = template
        self._tokenizer = tokenizer
        self.size = size

    def matcher(self, budget: ReasoningBudget | None = None) -> Matcher | BudgetMatcher:
        """Returns a matcher at the start of the output. All matchers of a grammar share its lexer's cache."""
        matcher = Matcher(self._template.deep_copy())
        return matcher if budget is None else BudgetMatcher(matcher, budget, self._piece)

    def _piece(self, token: int) -> bytes:
        piece: bytes = self._tokenizer.decode_bytes([token])
        return piece


class Matcher:
    """The position of one sequence in a grammar: a `chairlift.runner.sampling.matcher.Matcher`."""

    def __init__(self, place: LLMatcher) -> None:
        self._place = place

    def mask(self, bitmask: np.ndarray, index: int) -> None:
        """Sets the bits of the tokens that the grammar allows next. After the grammar's end only end-of-sequence tokens are allowed.

        `bitmask` is int32 [rows, ceil(vocabulary / 32)]. Raises ValueError.
        """
        row = bitmask[index]
        self._place.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        self._check()

    def accept(self, token: int) -> None:
        """Advances by one token. Raises ValueError if the grammar does not allow it."""
        self._place.consume_token(token)
        self._check()

    def forced(self) -> list[int]:
        """The tokens that must come next, one after the other; none if there is a choice."""
        tokens: list[int] = self._place.compute_ff_tokens()
        return tokens

    def allows(self, tokens: Sequence[int]) -> bool:
        """Whether these tokens may come next, one after the other."""
        return bool(self._place.validate_tokens(list(tokens)) == len(tokens))

    def copy(self) -> Matcher:
        """Another matcher at the same position."""
        return Matcher(self._place.deep_copy())

    def _check(self) -> None:
        if self._place.is_error():
            raise ValueError(self._place.get_error())


class Grammars:
    """Compiles grammars over a model's vocabulary. Each grammar is first compiled in a trial process with limits on time and memory.

    Only one thread may call `compile`. The first call starts another thread, which loads the tokenizer and compiles.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._trial = Trial(vocabulary)
        self._tokenizer: LLTokenizer | None = None
        self._kept: OrderedDict[tuple[str, str, str, bool], Future[Grammar]] = OrderedDict()
        self._work: SimpleQueue[tuple[StructuredOutput, Future[Grammar]] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def compile(self, structure: StructuredOutput) -> Future[Grammar]:
        """Returns the future of the compiled grammar. It fails with InvalidRequest if the grammar is invalid. Raises QueueFull."""
        key = (structure.kind, structure.text, structure.before, structure.disable_any_whitespace)
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
        """Ends the thread after its current grammar, and ends the trial process."""
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
                if self._tokenizer is None:
                    self._trial.start()  # loads the vocabulary too, at the same time
                    self._tokenizer = self._vocabulary.load()
                size = self._trial.run(structure)
                future.set_result(Grammar(compiled(self._tokenizer, structure), size, self._tokenizer))
            except Exception as error:
                future.set_exception(error)
            except BaseException as error:  # a Rust panic is not an Exception
                future.set_exception(RequestFailed(f"the grammar could not be compiled: {error}"))

    def _shrink(self) -> None:
        """Evicts the least recently requested grammars. Sequences that use them are not affected."""
        sizes = {key: _size(future) for key, future in self._kept.items()}
        total = sum(sizes.values())
        while len(self._kept) > MAX_KEPT or (total > MAX_KEPT_BYTES and len(self._kept) > 1):
            key, _ = self._kept.popitem(last=False)
            total -= sizes[key]


def _is_accident(future: Future[Grammar]) -> bool:
    """Whether the compilation failed for a reason other than the grammar."""
    return future.done() and not isinstance(future.exception(), InvalidRequest | None)


def _size(future: Future[Grammar]) -> int:
    return future.result().size if future.done() and future.exception() is None else 0
