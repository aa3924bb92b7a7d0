"""A request on the client side: validation, detokenization and increments of its output."""

from __future__ import annotations

import logging
import math
import struct
import sys
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from chairlift.engine.detokenizer import TextStream
from chairlift.engine.engine_request import EngineRequest, ResumedChoice, pack_tokens
from chairlift.errors import ContextExceeded, InvalidRequest
from chairlift.outputs import RequestOutput, Timeline, Timing, TokenLogprobs
from chairlift.sampling import SamplingParams
from chairlift.scheduling import Scheduling

if TYPE_CHECKING:
    from chairlift.engine.engine_info import EngineInfo
    from chairlift.engine.frames import StepOutputs
    from chairlift.engine.held_sequences import HeldSequence
    from chairlift.tokenizer import Tokenizer

log = logging.getLogger("chairlift")

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
        prompt_token_ids: list[int],
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
        self._text = TextStream(tokenizer, params)
        self._eos = frozenset() if params.ignore_eos else tokenizer.eos_token_ids
        self._answer: list[int] = []
        self._tokens: list[int] = []
        self._logprobs: list[float] = []
        self._details: list[bytes] = []
        self._logprob = 0.0
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
        return self._logprob / max(self.num_tokens, 1)

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

    def end(self, timeline: Mapping[str, Any]) -> bool:
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
        complete = len(self._tokens) <= most
        tokens, self._tokens = self._tokens[:most], self._tokens[most:]
        logprobs, self._logprobs = self._logprobs[:most], self._logprobs[most:]
        details, self._details = self._details[:most], self._details[most:]
        finish = self._finish if complete else 0
        reason = FINISH_REASONS[finish]
        if self.over or (not tokens and reason is None):
            return None
        # A stop token is in the ids, but only in the text if the request includes stop strings.
        shown = tokens[:-1] if finish == STOP and not self._shows_stop else tokens
        text, offsets = self._show(shown, final=reason is not None)
        stop_reason: str | int | None = None
        if self._text.stopped is not None:
            tokens, reason, stop_reason = tokens[: len(offsets)], "stop", self._text.stopped
        elif finish == STOP and tokens and tokens[-1] not in self._eos:
            stop_reason = tokens[-1]
        self.num_tokens += len(tokens)
        self._logprob += sum(logprobs[: len(tokens)])
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


class Request:
    """A running request. Its choices have `tag` and the numbers after it."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        tag: int,
        prompt_token_ids: list[int],
        params: SamplingParams,
        scheduling: Scheduling | None = None,
        *,
        arrived: float | None = None,
        sequence: HeldSequence | None = None,
    ) -> None:
        """`arrived` is when its first byte was read, on the monotonic clock; now by default. It continues `sequence`, if given."""
        self._sent = EngineRequest.of(tag, prompt_token_ids, params, scheduling)
        arrived = time.monotonic() if arrived is None else arrived
        self.tags = range(tag, tag + params.num_sequences)
        self.prompt_token_ids = prompt_token_ids
        self.params = params
        self.sequence = sequence
        self.prompt_logprobs: list[TokenLogprobs | None] | None = None if params.prompt_logprobs is None else [None]
        """Log-probabilities of the prompt tokens received so far, shared by all choices."""
        shared = prompt_token_ids, params, arrived, self.prompt_logprobs
        self.choices = [Choice(tokenizer, index, *shared) for index in range(params.num_sequences)]
        self.on_start: Callable[[], None] | None = None
        """Called once, when the engine admits the first choice."""
        self.some_over = False
        """Whether the last increment of any choice was taken."""
        self.missed_deadline = False
        """Whether a choice missed its deadline."""
        self._submitted: float | None = None
        self._whole: dict[int, RequestOutput] = {}
        self._taken: list[RequestOutput] = []  # only with a `sequence`

    @property
    def over(self) -> bool:
        """Whether the last increment of every choice was taken."""
        return self.some_over and all(choice.over for choice in self.choices)

    @property
    def num_tokens(self) -> int:
        """Tokens of all choices taken so far, including discarded ones."""
        return sum(choice.num_tokens for choice in self.choices)

    @property
    def num_received(self) -> int:
        """Tokens of all choices that engines have sent, taken or not."""
        return sum(choice.num_received for choice in self.choices)

    @property
    def scheduling(self) -> Scheduling:
        """Its scheduling parameters."""
        return self._sent.scheduling

    def begin(self, spent: Mapping[str, float] | None = None) -> EngineRequest:
        """The request for an engine that gets it now. It goes on after the tokens that were received from earlier engines.

        `spent` has the seconds in each timeline state since its arrival. Raises SequenceDropped.
        """
        now = time.monotonic_ns() // 1000
        before = {state: int(seconds * 1e6) for state, seconds in (spent or {}).items()}
        # A new engine does not hold the sequence that the last one lost. So a resumed request continues none.
        continues = None if self.sequence is None else self.sequence.continued_by(self.tags.start)
        self._submitted = now / 1e6 if self._submitted is None else self._submitted
        if not self.num_received:
            if self.prompt_logprobs is not None:
                del self.prompt_logprobs[1:]
            return replace(self._sent, submitted=now, spent=before, continues=continues)
        resumed = tuple(choice.resumed(self._submitted) for choice in self.choices if not choice.complete)
        return replace(self._sent, submitted=now, spent=before, resumed=resumed)

    def unfinished(self) -> list[int]:
        """The tags of the choices that need an engine."""
        return [tag for tag, choice in zip(self.tags, self.choices, strict=True) if not choice.complete]

    def timelines(self) -> list[Timeline]:
        """The timelines of the choices that have ended in an engine."""
        return [choice.timeline for choice in self.choices if choice.timeline is not None]

    def choice(self, tag: int) -> Choice:
        """The choice with this tag."""
        return self.choices[tag - self.tags.start]

    def finished(self) -> list[int]:
        """The tags of the choices that are over."""
        return [tag for tag, choice in zip(self.tags, self.choices, strict=True) if choice.over]

    @property
    def num_untaken(self) -> int:
        """Tokens of all choices that were received and not taken yet."""
        return sum(choice.num_untaken for choice in self.choices if not choice.over)

    def take(self, most: int = sys.maxsize) -> list[RequestOutput]:
        """At most `most` tokens of each choice, one increment per choice. With `best_of`, whole choices at the end."""
        parts = [part for choice in self.choices if (part := choice.take(most)) is not None]
        for part in parts:
            if part.finish_reason is not None:
                self.some_over = True
        if self.sequence is not None:
            self._taken += parts
            if parts and parts[-1].finish_reason in ("stop", "length"):
                self.sequence.finish(self._taken)
        if not self.params.ranked:
            return parts
        for part in parts:
            self._whole[part.index] = joined(self._whole.get(part.index), part)
        return self._best() if self.over else []

    def _best(self) -> list[RequestOutput]:
        """The `n` best choices: finished ones first, then by mean log-probability."""

        def merit(output: RequestOutput) -> tuple[bool, float]:
            return output.finish_reason in ("stop", "length"), self.choices[output.index].mean_logprob

        best = sorted(self._whole.values(), key=merit, reverse=True)[: self.params.n]
        return [replace(output, index=index) for index, output in enumerate(best)]


def _microseconds(seconds: float) -> int:
    return max(0, round(seconds * 1e6))


def joined(whole: RequestOutput | None, part: RequestOutput) -> RequestOutput:
    """A choice's output so far with its next increment."""
    if whole is None:
        return part
    return replace(
        part,
        text=whole.text + part.text,
        token_ids=whole.token_ids + part.token_ids,
        logprobs=None if part.logprobs is None else [*(whole.logprobs or ()), *part.logprobs],
        text_offsets=None if part.text_offsets is None else [*(whole.text_offsets or ()), *part.text_offsets],
        prompt_logprobs=part.prompt_logprobs if whole.prompt_logprobs is None else whole.prompt_logprobs,
    )


R = TypeVar("R", bound=Request)


def deliver(step: StepOutputs, requests: dict[int, R]) -> list[R]:
    """Adds a step's tokens to `requests`, by tag, and removes ended tags. Returns the requests with news.

    Unknown tags belong to aborted requests; their tokens are dropped.
    """
    touched: dict[int, R] = {}
    for tag, *admission in step.started:
        if (request := requests.get(tag)) is not None:
            request.choice(tag).start(*admission)
            if (on_start := request.on_start) is not None:
                request.on_start = None
                on_start()
    for timeline in step.ended:
        tag = timeline["tag"]
        if (request := requests.get(tag)) is not None and request.choice(tag).end(timeline):
            touched[request.tags.start] = request
            del requests[tag]
    for tag, lines in step.prompts:
        request = requests.get(tag)
        if request is not None and request.prompt_logprobs is not None and request.params.prompt_logprobs is not None:
            request.prompt_logprobs += TokenLogprobs.read(lines, request.params.prompt_logprobs)
    details, refusals = step.details, step.refusals
    count = len(step.finishes)
    tags, tokens = struct.unpack(f"<{count}Q", step.tags), struct.unpack(f"<{count}i", step.tokens)
    logprobs = struct.unpack(f"<{count}f", step.logprobs) if step.logprobs else (0.0,) * count
    for tag, token, logprob, finish in zip(tags, tokens, logprobs, step.finishes, strict=True):
        if (request := requests.get(tag)) is None:
            continue
        choice = request.choice(tag)
        try:
            choice.feed(token, logprob, finish, details.get(tag), refusals.get(tag))
        except Exception:  # a defect that one request meets must not end the others
            log.exception("sequence %d ends with an error, because its output cannot be read", tag)
            choice.fail()
        touched[request.tags.start] = request
        if finish:
            del requests[tag]
    for tag in step.starved:
        if (request := requests.pop(tag, None)) is not None:
            request.choice(tag).starve()
            touched[request.tags.start] = request
    return list(touched.values())


def default_params(info: EngineInfo, settings: Mapping[str, Any]) -> SamplingParams:
    """Returns the sampling parameters that the checkpoint of an engine recommends, overridden by `settings`."""
    return SamplingParams(**{**info.default_sampling, **settings})


def shared_salt(cache_salt: str | None, adapter: bytes | None) -> bytes:
    """The salt of prefix cache entries and held sequences under a caller's `cache_salt` and the hash of an adapter's files.

    Keys and values depend on the adapter. Byte 254 is not valid UTF-8, so no caller's salt can be equal to that of an adapter.
    """
    salt = (cache_salt or "").encode()
    return salt if adapter is None else b"\xfe" + adapter + salt


def validate(prompt: Sequence[int], params: SamplingParams, info: EngineInfo) -> SamplingParams:
    """Returns the parameters with `max_tokens` filled in. Raises InvalidRequest if the model cannot run the request.

    For `bad_words` see `encode_bad_words`.
    """
    if not len(prompt):
        raise InvalidRequest("The prompt is empty: at least one token is needed.", param="prompt")
    max_tokens = _token_for_embedding(len(prompt), info) if params.embed else _room_for_answer(len(prompt), params, info)
    vocabulary = info.vocab_size
    for token in prompt:
        if type(token) is not int or not 0 <= token < vocabulary:
            raise InvalidRequest(
                f"The prompt contains {token!r:.50}, which is not a token id: token ids are integers from 0 to {vocabulary - 1}.",
                param="prompt",
            )
    words = [token for word in params.bad_words if not isinstance(word, str) for token in word]
    for name, tokens in (("logit_bias", params.logit_bias), ("allowed_token_ids", params.allowed_token_ids), ("bad_words", words)):
        if tokens and (largest := max(tokens)) >= vocabulary:
            raise InvalidRequest(f"{name} has token {largest}, but this model's token ids are 0 to {vocabulary - 1}", param=name)
    return replace(params, max_tokens=max_tokens)


def _room_for_answer(prompt: int, params: SamplingParams, info: EngineInfo) -> int:
    """Returns the most tokens of an answer to a prompt of this length. Raises InvalidRequest."""
    check_generates(info)
    limit = info.max_model_len
    room = limit - prompt
    max_tokens = max(room, 1) if params.max_tokens is None else params.max_tokens
    if max_tokens > room:
        raise ContextExceeded(
            f"This model's maximum context length is {limit} tokens. However, you requested {prompt + max_tokens} tokens "
            f"({prompt} in the prompt, {max_tokens} in the completion). Please reduce the length of the prompt or completion.",
            param="prompt",
            limit=limit,
            prompt=prompt,
            answer=max_tokens,
        )
    return max_tokens


def _token_for_embedding(prompt: int, info: EngineInfo) -> int:
    """Returns the number of tokens that end an embedding's request: one. Raises InvalidRequest."""
    limit = check_embeds(info)
    if prompt > limit:
        message = f"This model's maximum context length is {limit} tokens for an embedding, and the input has {prompt}."
        raise ContextExceeded(message, param="input", limit=limit, prompt=prompt)
    return 1


def check_generates(info: EngineInfo) -> None:
    """Raises InvalidRequest if the model computes only embeddings or scores."""
    _check_no_scores(info)
    if not info.generates:
        message = "this model computes embeddings and generates no text: use /v1/embeddings (in Python: LLM.embed)"
        raise InvalidRequest(message, param="model", code="unsupported")


def check_embeds(info: EngineInfo) -> int:
    """Returns the most tokens of a text to embed. Raises InvalidRequest if the model computes no embeddings."""
    if info.max_text_len is None:
        message = "this model generates text and computes no embeddings here: use an encoder, or a decoder with code of Chairlift's own"
        raise InvalidRequest(message, param="model", code="unsupported")
    return info.max_text_len


def check_scores(info: EngineInfo) -> str:
    """Returns what becomes of the model's numbers: see `relevance`. Raises InvalidRequest if it does not score pairs of texts."""
    if info.score is None:
        raise InvalidRequest("this model does not score pairs of texts: use a cross-encoder", param="model", code="unsupported")
    return info.score


def _check_no_scores(info: EngineInfo) -> None:
    if info.score is not None:
        message = "this model only scores pairs of texts: use /v1/rerank (in Python: LLM.score)"
        raise InvalidRequest(message, param="model", code="unsupported")


def relevance(number: float, kind: str) -> float:
    """Returns the score of a pair of texts, of a classifier's number; `kind` is sigmoid or identity."""
    return number if kind == "identity" else 1 / (1 + math.exp(-max(number, -700.0)))


def check_dimensions(dimensions: int | None, info: EngineInfo) -> int:
    """Returns the most tokens of a text to embed. Raises InvalidRequest unless embeddings can be shortened to this many numbers.

    None keeps all numbers.
    """
    limit = check_embeds(info)
    _check_no_scores(info)
    if dimensions is not None:
        most = info.embedding_size
        if type(dimensions) is not int or not 1 <= dimensions <= most:
            raise InvalidRequest(f"dimensions must be an integer from 1 to {most}, got {dimensions!r:.50}", param="dimensions")
    return limit


def encode_bad_words(params: SamplingParams, tokenizer: Tokenizer) -> SamplingParams:
    """Returns the parameters with the texts of `bad_words` encoded, both as they are and after a space.

    The tokens that the model never samples become bad words, too.
    """
    suppressed = () if params.embed else tokenizer.suppressed_token_ids
    if not suppressed and not any(isinstance(word, str) for word in params.bad_words):
        return params
    words: dict[tuple[int, ...], None] = {}
    for word in params.bad_words:
        if isinstance(word, str):
            bare = word.lstrip(" ")
            found = [tuple(tokenizer.encode(text, add_special_tokens=False)) for text in (bare, " " + bare)]
        else:
            found = [word]
        words.update(dict.fromkeys(filter(None, found)))
    words.update(dict.fromkeys((token,) for token in suppressed))
    return replace(params, bad_words=tuple(words))
