"""Live sequences: text that stays computed between generations and can be forked."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from chairlift.engine.arguments import text_or_ids
from chairlift.errors import InvalidRequest, SequenceBusy, SequenceDropped
from chairlift.outputs import RequestOutput
from chairlift.sampling import SamplingParams
from chairlift.scheduling import Scheduling

if TYPE_CHECKING:
    from chairlift.engine.llm import LLM
    from chairlift.engine.loop import Engine

Call = Callable[[Callable[["Engine"], Any]], Any]
"""Calls a function with the engine, between two steps."""


class LiveSequence:
    """A prompt and what was generated or appended since, whose KV stays in the cache between two generations.

    `LLM.open` makes one. Use it with `with`, or call `drop`. It is dropped by itself if it is not used for the length of its lease. Under
    memory pressure its KV may be evicted. It is then computed again. `LLM.generate` accepts several live sequences as prompts and runs
    them in one batch. Methods raise SequenceDropped after `drop`, SequenceBusy while the sequence is generated, and InvalidRequest.
    """

    def __init__(self, llm: LLM, call: Call, handle: int, token_ids: list[int], computed: int, scheduling: Scheduling) -> None:
        """`computed` is the number of leading tokens that the engine's sequence may hold."""
        self._llm, self._call, self._handle = llm, call, handle
        self._token_ids = token_ids  # never changed in place, because forks share it
        self._computed = computed
        self._scheduling = scheduling
        self._dropped = False
        self._tag: int | None = None
        self._logprobs: list[float | None] = [None] * len(token_ids)  # None for tokens that were not generated; shared too
        self._new: list[RequestOutput] = []

    @property
    def token_ids(self) -> list[int]:
        """All tokens so far."""
        return list(self._token_ids)

    @property
    def text(self) -> str:
        """The text of all tokens so far."""
        return self._llm.tokenizer.decode(self._token_ids)

    @property
    def scheduling(self) -> Scheduling:
        """The scheduling parameters of its generations."""
        return self._scheduling

    @property
    def priority(self) -> int:
        """Lower goes first, under policies with priorities. A new value holds from the next step on, also for a running generation."""
        return self._scheduling.priority

    @priority.setter
    def priority(self, priority: int) -> None:
        self._scheduling = replace(self._scheduling, priority=priority)
        tag = self._tag
        if tag is not None:
            self._call(lambda engine: engine.set_priority(tag, priority))

    def score(self, *, mean: bool = False) -> float:
        """The sum of the log-probabilities of the generated tokens, or their `mean`; 0 if none were generated."""
        logprobs = [logprob for logprob in self._logprobs if logprob is not None]
        return math.fsum(logprobs) / (max(len(logprobs), 1) if mean else 1)

    def fork(self, count: int = 1) -> list[LiveSequence]:
        """Returns `count` copies. They share all computed KV. Only a partly filled last block is copied, when a copy goes on.

        Appended tokens are computed first. A sequence that is being generated is copied as it was before. Raises TooManySequences, and
        then makes no copy.
        """
        self.check_dropped()
        if self._tag is None:
            self.compute()
        forks: list[LiveSequence] = []
        try:
            for _ in range(count):
                handle = self._call(lambda engine: engine.fork_sequence(self._handle))
                fork = LiveSequence(self._llm, self._call, handle, self._token_ids, self._computed, self._scheduling)
                fork._logprobs = self._logprobs
                forks.append(fork)
        except BaseException:
            for fork in forks:
                fork.drop()
            raise
        return forks

    def append(self, content: str | list[int]) -> None:
        """Appends text or token ids. The next generation computes only these. Raises InvalidRequest beyond the context length."""
        self.check_dropped()
        self._check_idle()
        given = text_or_ids(content)
        tokens = self._llm.tokenizer.encode(given, add_special_tokens=False) if isinstance(given, str) else given
        limit, vocabulary = self._llm.facts["max_model_len"], self._llm.facts["vocab_size"]
        length = len(self._token_ids) + len(tokens)
        if length >= limit:
            raise InvalidRequest(
                f"the sequence would have {length} tokens, and the context of this model has {limit}, with at least one to generate",
                param="content",
                code="context_length_exceeded",
            )
        for token in tokens:
            if type(token) is not int or not 0 <= token < vocabulary:
                raise InvalidRequest(f"{token!r:.50} is not a token id: they are 0 to {vocabulary - 1}", param="content")
        self._token_ids = [*self._token_ids, *tokens]
        self._logprobs = [*self._logprobs, *[None] * len(tokens)]

    def compute(self) -> None:
        """Computes what was appended, so that the next generation starts at once."""
        self.check_dropped()
        self._check_idle()
        # The next generation computes the last token, because it samples after it.
        known = len(self._token_ids) - 1
        if known > self._computed:
            self._llm.compute(self._token_ids[:-1], (self._handle, self._computed), self._scheduling)
            self._computed = known

    def rewind(self, count: int) -> None:
        """Removes the last `count` tokens. The others stay computed. Raises InvalidRequest unless one token is left."""
        self.check_dropped()
        self._check_idle()
        kept = len(self._token_ids) - count
        if not 0 < kept <= len(self._token_ids):
            raise InvalidRequest(f"count must be from 0 to {len(self._token_ids) - 1}, got {count!r:.50}", param="count")
        self._token_ids, self._logprobs = self._token_ids[:kept], self._logprobs[:kept]
        self._computed = min(self._computed, kept)

    def generate(self, params: SamplingParams | None = None) -> RequestOutput:
        """Generates from here and keeps the tokens, those of a stop string or stop token included. See `LLM.generate`.

        If the generation fails, or misses a deadline, the sequence stays as it was.
        """
        return self._llm.generate([self], params)[0]

    def stream(self, params: SamplingParams | None = None) -> Generator[RequestOutput, None, None]:
        """Like `generate`, in increments. If the generator is closed early, the sequence stays as it was."""
        return self._llm.stream(self, params)

    def drop(self) -> None:
        """Frees the sequence's memory and aborts its generation, if any. May be called repeatedly."""
        if not self._dropped:
            self._dropped = True
            tag = self._tag
            if tag is not None:
                self._llm.abort(tag)
            self._call(lambda engine: engine.drop_sequence(self._handle))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.drop()

    def begin(self, tag: int) -> tuple[int, int]:
        """Begins the generation `tag`. Returns the engine's handle and how many leading tokens it may hold. For `LLM`."""
        self.check_dropped()
        self._check_idle()
        self._tag, self._new = tag, []
        return self._handle, self._computed

    def receive(self, part: RequestOutput) -> None:
        """Takes an increment of the generation; the last one ends it. For `LLM`."""
        self._new.append(part)
        if part.finish_reason in ("stop", "length"):
            self._token_ids = [*self._token_ids, *(token for new in self._new for token in new.token_ids)]
            self._logprobs = [*self._logprobs, *(one.logprob for new in self._new for one in new.logprobs or ())]
            self._computed = len(self._token_ids)
        if part.finish_reason is not None:
            self._tag = None

    def end(self, tag: int) -> None:
        """Ends the generation `tag`, if it has not ended. For `LLM`."""
        if self._tag == tag:
            self._tag = None

    def check_dropped(self) -> None:
        """Raises SequenceDropped after `drop`."""
        if self._dropped:
            raise SequenceDropped("this sequence was dropped: open a new one, or fork another before")

    def _check_idle(self) -> None:
        if self._tag is not None:
            raise SequenceBusy("this sequence is being generated: wait until that has ended, or use a fork")
