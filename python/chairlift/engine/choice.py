"""One choice of a request on the client side: its tokens, its text and its increments."""

from __future__ import annotations

import sys
import time
from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING

from chairlift.engine.detokenizer import TextStream
from chairlift.engine.engine_request import ResumedChoice, pack_tokens
from chairlift.errors import InvalidRequest
from chairlift.outputs import RequestOutput, Timeline, Timing, TokenLogprobs
from chairlift.sampling import SamplingParams

if TYPE_CHECKING:
    from chairlift import _core
    from chairlift.tokenizer import Tokenizer

STOP, ERROR, DEADLINE = 1, 3, 4
FINISH_REASONS = (None, "stop", "length", "error", "deadline")
"""Names of the engine's finish codes. A missed deadline comes without a token, so the engine sends no code for it."""


class Choice:
    """One choice of a running request. It collects token ids and returns increments of text.

    Tokens are buffered until they are taken, so a slow reader gets fewer, longer increments.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        index: int,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        arrived: float,
        prompt_logprobs: list[TokenLogprobs | None] | None = None,
    ) -> None:
        """`prompt_logprobs` is complete when the first output token arrives."""
        self.index = index
        self.num_tokens = 0
        """Tokens taken so far, up to a stop string."""
        self.over = False
        """Whether its last increment was taken."""
        self.starved = False
        """Whether it failed because the device was out of memory."""
        self.refusal: InvalidRequest | None = None
        """Why it failed, if its own grammar was the reason."""
        self._prompt_token_ids = prompt_token_ids
        self._prompt_logprobs = prompt_logprobs
        self._num_logprobs = params.logprobs
        self._embeds = params.embed
        self._structure = params.structured_output
        self._embedding: array[float] | None = None
        self._shows_stop = params.include_stop_str_in_output
        self._one_by_one = bool(params.stop) or params.logprobs is not None
        self._text = TextStream(tokenizer, params, prompt_token_ids)
        self._eos = frozenset() if params.ignore_eos else tokenizer.eos_token_ids
        self._answer: list[int] = []
        self._tokens: list[int] = []
        self._logprobs = array("d")  # of all tokens of the answer
        self._details: list[bytes] = []
        self._finish = 0
        self._arrived = arrived
        self._first: float | None = None
        self._started: float | None = None
        self._queued: float | None = None
        self._cached_tokens = self._own_cached_tokens = 0
        self._timeline: Timeline | None = None

    @property
    def mean_logprob(self) -> float:
        """Mean log-probability of the tokens taken; 0 if the engine does not send them."""
        return sum(self._logprobs[: self.num_tokens]) / max(self.num_tokens, 1)

    @property
    def num_received(self) -> int:
        """Tokens that engines have sent, taken or not."""
        return len(self._answer)

    @property
    def timeline(self) -> Timeline | None:
        """The timeline of the ended choice; None before its end, or if a stop string ended it."""
        return self._timeline

    @property
    def complete(self) -> bool:
        """Whether nothing more is needed from the engine."""
        return self.over or bool(self._finish)

    def resumed(self, submitted: float) -> ResumedChoice:
        """What the next engine must know to go on. `submitted` is when the request was sent to the first one."""
        started = submitted + (self._queued or 0.0)
        first_token = None if self._first is None else max(self._first, started)
        submitted_us, started_us = _microseconds(submitted - self._arrived), _microseconds(started - self._arrived)
        first_us = None if first_token is None else _microseconds(first_token - self._arrived)
        cached = self._cached_tokens, self._own_cached_tokens
        return ResumedChoice(self.index, pack_tokens(self._answer), *cached, submitted_us, started_us, first_us)

    def feed(self, token: int, logprob: float, finish: int, detail: bytes | None = None, refusal: bytes | None = None) -> None:
        """Adds a token with its finish code (0: none) and its line of log-probabilities, if any; or the prompt's embedding.

        An ERROR has no token, but maybe a `refusal`, the packed reason; its detail means nothing.
        """
        if self._finish:
            return  # it has failed here, and its engine does not know yet
        if self._embeds and finish == STOP and detail is not None:
            self._embedding = array("f", detail)
        elif finish == ERROR:
            if refusal is not None:
                structure = self._structure
                self.refusal = InvalidRequest.unpacked(refusal, None if structure is None else structure.param)
        else:
            self._answer.append(token)
            self._tokens.append(token)
            self._logprobs.append(logprob)
            if detail is not None:
                self._details.append(detail)
        if self._first is None:
            self._first = time.monotonic()
        self._finish = finish

    @property
    def cached_tokens(self) -> int:
        """Tokens of the prompt that were found in the prefix cache when it was admitted."""
        return self._cached_tokens

    def start(self, cached_tokens: int, own_cached_tokens: int, queued: int) -> None:
        """Records the admission: cached prompt tokens, those of them that its tenant used before, and microseconds in the queue."""
        self._cached_tokens, self._own_cached_tokens, self._queued = cached_tokens, own_cached_tokens, queued / 1e6
        if self._started is None:
            self._started = time.monotonic()

    def end(self, timeline: _core.Timeline) -> bool:
        """Records the timeline of the ended sequence; True if it missed its deadline, which has no other message."""
        self._timeline = Timeline.read(timeline)
        if missed := self._timeline.finish == "deadline":
            self._finish = DEADLINE
        return missed

    def fail(self) -> None:
        """Ends the choice with an error."""
        self._finish = ERROR

    def starve(self) -> None:
        """Ends the choice because the device was out of memory."""
        self.starved = True
        self.fail()

    @property
    def num_untaken(self) -> int:
        """Tokens that were received and not taken yet."""
        return len(self._tokens)

    def take(self, most: int = sys.maxsize) -> RequestOutput | None:
        """At most `most` tokens since the last call as one increment; None if there is nothing.

        The last one has a `finish_reason`. A stop string can end the choice while the engine continues; the caller must then abort it.
        """
        finish = self._finish if len(self._tokens) <= most else 0
        reason = FINISH_REASONS[finish]
        if self.over or (not self._tokens and reason is None):
            return None
        tokens, self._tokens = self._tokens[:most], self._tokens[most:]
        details: list[bytes] = []
        if self._details:
            details, self._details = self._details[:most], self._details[most:]
        # A stop token is in the ids, but only in the text if the request includes stop strings.
        shown = tokens[:-1] if finish == STOP and not self._shows_stop else tokens
        text, offsets = self._show(shown, final=reason is not None)
        stop_reason: str | int | None = None
        if self._text.stopped is not None:
            tokens, reason, stop_reason = tokens[: len(offsets)], "stop", self._text.stopped
        elif finish == STOP and tokens and tokens[-1] not in self._eos:
            stop_reason = tokens[-1]
        self.num_tokens += len(tokens)
        output = RequestOutput(text, tokens, self._prompt_token_ids, reason, stop_reason, index=self.index, queued=self._queued)
        output.cached_tokens, output.own_cached_tokens = self._cached_tokens, self._own_cached_tokens
        if self._num_logprobs is not None:
            output.logprobs = TokenLogprobs.read(b"".join(details[: len(tokens)]), self._num_logprobs)
            output.text_offsets = offsets + [self._text.length] * (len(tokens) - len(offsets))
        if self._prompt_logprobs is not None and len(self._prompt_logprobs) == len(self._prompt_token_ids):
            output.prompt_logprobs, self._prompt_logprobs = self._prompt_logprobs, None
        if reason is not None:
            self._close(output)
        return output

    def _show(self, tokens: list[int], *, final: bool) -> tuple[str, list[int]]:
        """The tokens' text and each token's offset in the output, up to a stop string; no offsets unless needed."""
        if not self._one_by_one:
            return self._text.push(tokens, final), []
        # One by one, so that the ids before a stop string do not depend on how many tokens were taken at once.
        text, offsets = "", []
        for token in tokens:
            offsets.append(self._text.length)
            text += self._text.push([token], False)
            if self._text.stopped is not None:
                return text, offsets
        return (text + self._text.push([], True) if final else text), offsets

    def _close(self, output: RequestOutput) -> None:
        self.over = True
        output.embedding = self._embedding
        timeline = output.timeline = self._timeline
        if timeline is not None and timeline.ended is not None:
            output.preemptions = timeline.preemptions
            started = timeline.ended if timeline.started is None else timeline.started
            first_token = None if timeline.first_token is None else timeline.first_token - timeline.arrived
            times = started - timeline.arrived, first_token, timeline.ended - timeline.arrived
            output.timing = Timing(started - timeline.submitted, *times)
        else:
            # A stop string ended the choice before the engine did, so this process's clock is used.
            now = time.monotonic()
            started = now if self._started is None else self._started
            first_token = None if self._first is None else self._first - self._arrived
            output.timing = Timing(self._queued or 0.0, started - self._arrived, first_token, now - self._arrived)


def _microseconds(seconds: float) -> int:
    return max(0, round(seconds * 1e6))
