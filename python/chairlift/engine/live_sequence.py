"""Live sequences of `LLM`: text that stays computed between generations and can be forked."""

from __future__ import annotations

from collections.abc import Generator
from types import TracebackType
from typing import TYPE_CHECKING, Self

from chairlift.engine.arguments import text_or_ids
from chairlift.engine.held_sequences import Call, HeldSequence, HeldSequences, HeldState
from chairlift.outputs import RequestOutput
from chairlift.sampling import SamplingParams
from chairlift.scheduling import Scheduling

if TYPE_CHECKING:
    from chairlift.engine.llm import LLM


class LiveSequence(HeldSequence):
    """A prompt and what was generated or appended since, whose KV stays in the cache between two generations.

    `LLM.open` makes one. Use it with `with`, or call `drop`. It is dropped by itself if it is not used for the length of its lease. Under
    memory pressure its KV may be evicted. It is then computed again. `LLM.generate` accepts several live sequences as prompts and runs
    them in one batch. Methods raise SequenceDropped after `drop`, SequenceBusy while the sequence is generated, and InvalidRequest.
    """

    def __init__(self, llm: LLM, call: Call, held: HeldSequences, token_ids: list[int], scheduling: Scheduling, lease: float) -> None:
        super().__init__(held, call, token_ids, scheduling, lease)
        self._llm = llm

    @property
    def text(self) -> str:
        """The text of all tokens so far."""
        return self._llm.tokenizer.decode(self.token_ids)

    def fork(self, count: int = 1) -> list[LiveSequence]:
        """Returns `count` copies. They share all computed KV. Only a partly filled last block is copied, when a copy goes on.

        Appended tokens are computed first. A sequence that is being generated is copied as it was before. Raises TooManySequences, and
        then makes no copy.
        """
        if self.uncomputed and not self.busy:
            self.compute()
        forks: list[LiveSequence] = self._call(lambda engine: self._forks(count, engine))
        return forks

    def append(self, content: str | list[int]) -> None:
        """Appends text or token ids. The next generation computes only these. Raises InvalidRequest beyond the context length."""
        given = text_or_ids(content)
        self._append(self._llm.tokenizer.encode(given, add_special_tokens=False) if isinstance(given, str) else given)

    def compute(self) -> None:
        """Computes what was appended, so that the next generation starts at once."""
        if self.uncomputed:
            with self.computing() as prompt:
                self._llm.compute(self, prompt)

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
        if self._state is not HeldState.DROPPED:
            tag = self._call(self.release)
            if tag is not None:
                self._llm.abort(tag)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.drop()
