"""One request on its caller's side: checked before it goes to the engine, and made readable as its tokens come back."""

from __future__ import annotations

import struct
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from chairlift.engine.text import TextStream
from chairlift.errors import InvalidRequest
from chairlift.outputs import RequestOutput, Timing
from chairlift.sampling import SamplingParams

if TYPE_CHECKING:
    from chairlift.tokenizer import Tokenizer

STOP, ERROR = 1, 3
FINISH_REASONS = (None, "stop", "length", "error")
"""The engine's finish codes, as words."""


class Report(Protocol):
    """What one step of the engine gave, as bytes: see `protocol.Step`."""

    @property
    def tags(self) -> bytes:
        """u64, one a token."""

    @property
    def tokens(self) -> bytes:
        """i32, one a token."""

    @property
    def finishes(self) -> bytes:
        """u8, one a token."""

    @property
    def started(self) -> Sequence[Sequence[int]]:
        """One a request that was admitted."""

    @property
    def ended(self) -> Sequence[Sequence[int]]:
        """One a request that ended."""


class Request:
    """A request in flight: takes token ids as they come, gives increments of text.

    Tokens pile up in it until they are taken, at most `max_tokens` of them: a slow reader gets fewer, longer increments.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: list[int], params: SamplingParams) -> None:
        self.prompt_token_ids = prompt_token_ids
        self.params = params
        self._text = TextStream(tokenizer, params)
        self._eos = frozenset() if params.ignore_eos else tokenizer.eos_token_ids
        self._tokens: list[int] = []
        self._finish = 0
        self._created = time.monotonic()
        self._first: float | None = None
        self._queued = 0.0
        self._cached_tokens = 0
        self._account: Sequence[int] | None = None

    def feed(self, token: int, finish: int) -> None:
        """Takes one token from the engine, and how it ended the request (0: not)."""
        if finish != ERROR:  # its token means nothing
            self._tokens.append(token)
        if self._first is None:
            self._first = time.monotonic()
        self._finish = finish

    def start(self, cached_tokens: int, queued: int) -> None:
        """Takes what the engine found when it admitted the request: tokens in the cache, and microseconds it had waited."""
        self._cached_tokens, self._queued = cached_tokens, queued / 1e6

    def settle(self, account: Sequence[int]) -> None:
        """Takes what the engine counted for the request when it ended it."""
        self._account = account

    def take(self) -> RequestOutput | None:
        """Everything since the last call, as one increment; None when there is nothing.

        The last one has a `finish_reason`. A stop string can end the request here while the engine goes on: then
        the caller must abort it.
        """
        tokens, self._tokens = self._tokens, []
        reason = FINISH_REASONS[self._finish]
        if not tokens and reason is None:
            return None
        # A stop token is the caller's to see among the ids, but it is not text.
        shown = tokens[:-1] if self._finish == STOP else tokens
        text, used = self._show(shown, final=reason is not None)
        stop_reason: str | int | None = None
        if self._text.stopped is not None:
            tokens, reason, stop_reason = tokens[:used], "stop", self._text.stopped
        elif self._finish == STOP and tokens[-1] not in self._eos:
            stop_reason = tokens[-1]
        output = RequestOutput(text, tokens, self.prompt_token_ids, reason, stop_reason)
        if reason is not None:
            self._close(output)
        return output

    def _show(self, tokens: list[int], *, final: bool) -> tuple[str, int]:
        """Their text, and how many of them it took up to a stop string."""
        # One by one where a stop string may end it: the ids must not depend on how many were taken at once.
        pieces = [[token] for token in tokens] if self.params.stop else [tokens]
        text, used = "", 0
        for piece in pieces:
            text += self._text.push(piece, False)
            used += len(piece)
            if self._text.stopped is not None:
                return text, used
        return (text + self._text.push([], True) if final else text), used

    def _close(self, output: RequestOutput) -> None:
        output.cached_tokens = self._cached_tokens
        if self._account is not None:
            _, output.preemptions, arrived, started, first, ended = self._account
            output.timing = Timing((started - arrived) / 1e6, (first - arrived) / 1e6, (ended - arrived) / 1e6)
        else:
            # A stop string was found before the engine's own end: the clock on this side has to do.
            first_token = None if self._first is None else self._first - self._created
            output.timing = Timing(self._queued, first_token, time.monotonic() - self._created)


R = TypeVar("R", bound=Request)


def deliver(report: Report, requests: dict[int, R]) -> dict[int, R]:
    """Hands a step's tokens to `requests`, by tag, and removes those which ended; returns those which got something.

    Tags that are not there belong to requests whose callers have left: their tokens are dropped.
    """
    for tag, cached_tokens, queued in report.started:
        if (request := requests.get(tag)) is not None:
            request.start(cached_tokens, queued)
    for account in report.ended:
        if (request := requests.get(account[0])) is not None:
            request.settle(account)
    count = len(report.finishes)
    touched: dict[int, R] = {}
    tags, tokens = struct.unpack(f"<{count}Q", report.tags), struct.unpack(f"<{count}i", report.tokens)
    for tag, token, finish in zip(tags, tokens, report.finishes, strict=True):
        if (request := requests.get(tag)) is None:
            continue
        request.feed(token, finish)
        touched[tag] = request
        if finish:
            del requests[tag]
    return touched


def validate(prompt: Sequence[int], params: SamplingParams, facts: Mapping[str, Any]) -> SamplingParams:
    """The parameters with `max_tokens` filled in; raises InvalidRequest for what the model can't take.

    `facts` are the engine's: `max_model_len` and `vocab_size` are used.
    """
    if not len(prompt):
        raise InvalidRequest("The prompt is empty: at least one token is needed.", param="prompt")
    limit = facts["max_model_len"]
    room = limit - len(prompt)
    wanted = max(room, 1) if params.max_tokens is None else params.max_tokens
    if wanted > room:
        raise InvalidRequest(
            f"This model's maximum context length is {limit} tokens. However, you requested {len(prompt) + wanted} tokens "
            f"({len(prompt)} in the prompt, {wanted} for the output). Please shorten the prompt or ask for fewer tokens.",
            param="prompt",
            code="context_length_exceeded",
        )
    vocabulary = facts["vocab_size"]
    for token in prompt:
        if type(token) is not int or not 0 <= token < vocabulary:
            raise InvalidRequest(
                f"The prompt holds {token!r:.50}, which is no token id: they are integers from 0 to {vocabulary - 1}.", param="prompt"
            )
    return replace(params, max_tokens=wanted)
