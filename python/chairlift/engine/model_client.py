"""Makes the requests and the live sequences of a model, for any client of its engines."""

from __future__ import annotations

import asyncio
import itertools
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from chairlift.engine.arguments import Prompt, sampling, text_or_ids
from chairlift.engine.async_live_sequence import AsyncLiveSequence, AsyncSequences
from chairlift.engine.engine_info import EngineInfo
from chairlift.engine.held_sequences import COMPUTE, LEASE
from chairlift.engine.stream import Stream, add_part, joined
from chairlift.engine.validation import check_tokens, encode_bad_words, validate
from chairlift.errors import InvalidRequest
from chairlift.outputs import RequestOutput
from chairlift.sampling import MAX_SEQUENCES, SamplingParams
from chairlift.scheduling import Scheduling

if TYPE_CHECKING:
    from chairlift.config import EngineConfig
    from chairlift.engine.frames import Frame
    from chairlift.engine.held_sequences import HeldSequence, HeldSequences
    from chairlift.tokenizer import Tokenizer


class ModelClient(ABC):
    """Makes the requests and the live sequences of one model. A subclass runs them in one engine, or in one of several."""

    def __init__(self, config: EngineConfig, tags: Iterator[int], held: type[HeldSequences] = AsyncSequences) -> None:
        """`tags` yields the first tag of each request, at intervals of MAX_SEQUENCES. `held` counts the live sequences."""
        self.config = config
        self._info = EngineInfo()
        self._tags, self._seeds = tags, itertools.count(1, MAX_SEQUENCES)
        self._sequences = held(lambda: self.info, self.tell)

    @property
    def info(self) -> EngineInfo:
        """The model and the limits of the engine. It has the defaults until the first start is complete."""
        return self._info

    @property
    @abstractmethod
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer. Raises EngineDead before the first start is complete."""

    @abstractmethod
    def check_ready(self) -> None:
        """Raises EngineDead unless requests can run."""

    @abstractmethod
    def run(
        self,
        stream: Stream,
        *,
        request_id: str | None = None,
        on_start: Callable[[], None] | None = None,
        spent: Mapping[str, float] | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Runs a request of `prepare`: see `generate`. `spent` are all seconds since its arrival.

        After EngineDead it may be called again once an engine is ready. That engine goes on after the last token, and the increments go on
        after the last one that was yielded.
        """

    @abstractmethod
    def abort_dropped(self, tag: int) -> None:
        """Ends the request that continues a live sequence, because that was dropped."""

    @abstractmethod
    def tell(self, frame: Frame) -> None:
        """Sends a frame that the next engine does not need, about live sequences or sessions, to the engines that are ready."""

    async def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Tokenizes a prompt without blocking the event loop."""
        return await asyncio.to_thread(self.tokenizer.encode, text, add_special_tokens=add_special_tokens)

    async def tokens(self, prompt: Prompt, *, param: str = "prompt", add_special_tokens: bool = True) -> list[int]:
        """Returns the tokens of a prompt, text or token ids. Raises InvalidRequest for `param` if these are not the model's."""
        content = text_or_ids(prompt)
        if isinstance(content, str):
            return await self.encode(content, add_special_tokens=add_special_tokens)
        check_tokens(content, self.info, param)
        return content

    def validate(self, prompt_token_ids: Sequence[int], params: SamplingParams) -> SamplingParams:
        """Returns the parameters with `max_tokens` filled in. Raises InvalidRequest if the model cannot run the request.

        The token ids are the model's: see `check_tokens`.
        """
        return validate(prompt_token_ids, params, self.info)

    def default_params(self, **settings: Any) -> SamplingParams:
        """The checkpoint's recommended sampling parameters (`--generation-config`), overridden by `settings`."""
        return SamplingParams(**{**self.info.default_sampling, **settings})

    async def prepare(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        scheduling: Scheduling | None = None,
        *,
        arrived: float | None = None,
        whole: bool = False,
    ) -> Stream:
        """Makes a request of a prompt, for `run`. `whole` is as in `prepare_tokens`. Raises InvalidRequest."""
        self.check_ready()
        return await self.prepare_tokens(await self.tokens(prompt), params, scheduling, arrived=arrived, whole=whole)

    async def prepare_tokens(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams | None = None,
        scheduling: Scheduling | None = None,
        *,
        arrived: float | None = None,
        sequence: HeldSequence | None = None,
        whole: bool = False,
    ) -> Stream:
        """Makes a request of token ids that `check_tokens` has accepted, or that are the tokenizer's. They must not change.

        `arrived` is when its first byte was read, on the monotonic clock; now by default. A request that continues `sequence` must run
        while that is `generating` or `computing`. With `whole` and without stop strings, there is one increment for each choice. Raises
        InvalidRequest.
        """
        self.check_ready()
        params = self.default_params() if params is None else params
        _check_kind("params", params, SamplingParams)
        scheduling = Scheduling() if scheduling is None else scheduling
        _check_kind("scheduling", scheduling, Scheduling)
        if params.bad_words or self.tokenizer.suppressed_token_ids:
            params = await self._encode_bad_words(params)
        params = self._seeded(self.validate(prompt_token_ids, params))
        return self._stream(prompt_token_ids, params, scheduling, arrived=arrived, sequence=sequence, whole=whole)

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        scheduling: Scheduling | None = None,
        *,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        on_start: Callable[[], None] | None = None,
        spent: Mapping[str, float] | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Runs one request. Yields increments of its choices, by `index`; the last of each has a `finish_reason`.

        With `best_of`, the `n` best choices are yielded whole at the end. Closing or cancelling the iterator aborts the request; use
        `contextlib.aclosing` if the loop may end early. `request_id` is for `explain`. `on_start` is called once, when the engine
        admits the first choice. `spent` has the seconds of earlier timeline states: times and deadlines count from there. Raises
        InvalidRequest or QueueFull before the first increment, and RequestFailed, OutOfMemory, DeadlineMissed or EngineDead at any time.
        """
        called = time.monotonic()
        before = dict(spent or {})
        params = sampling(params, sampling_params)
        stream = await self.prepare(prompt, params, scheduling, arrived=called - sum(before.values()))
        before["tokenize"] = before.get("tokenize", 0.0) + time.monotonic() - called
        async with aclosing(self.run(stream, request_id=request_id, on_start=on_start, spent=before)) as outputs:
            async for output in outputs:
                yield output

    async def collect(self, stream: Stream) -> list[RequestOutput]:
        """Runs a request of `prepare` to its end. Returns its choices in order. Errors as in `run`."""
        parts: dict[int, list[RequestOutput]] = {}
        async with aclosing(self.run(stream)) as outputs:
            async for output in outputs:
                add_part(parts.setdefault(output.index, []), output)
        return [joined(parts[index]) for index in sorted(parts)]

    async def open(self, prompt: Prompt, *, scheduling: Scheduling | None = None, lease: float = LEASE) -> AsyncLiveSequence:
        """Computes a prompt and returns it as a live sequence (see `LLM.open`). Errors as in `generate`, and TooManySequences."""
        sequence = self.hold(await self.tokens(prompt), scheduling or Scheduling(), lease)
        try:
            await AsyncLiveSequence.compute(sequence)
        except BaseException:
            sequence.drop()
            raise
        return sequence

    def hold(self, prompt_token_ids: Sequence[int], scheduling: Scheduling, lease: float = LEASE) -> AsyncLiveSequence:
        """Returns a prompt as a live sequence, which is not computed yet. Raises InvalidRequest and TooManySequences."""
        self.validate(prompt_token_ids, COMPUTE)
        self._sequences.expire()
        return AsyncLiveSequence(self, self._sequences, prompt_token_ids, scheduling, lease)

    async def _encode_bad_words(self, params: SamplingParams) -> SamplingParams:
        return await asyncio.to_thread(encode_bad_words, params, self.tokenizer)

    def _seeded(self, params: SamplingParams) -> SamplingParams:
        """Gives a request without a seed one, so that every engine draws the same tokens for it."""
        seed = next(self._seeds)
        return params if params.seed is not None else replace(params, seed=hash((self.config.seed, seed)))

    def _stream(self, prompt_token_ids: Sequence[int], params: SamplingParams, scheduling: Scheduling, **rest: Any) -> Stream:
        return Stream(self.tokenizer, next(self._tags), prompt_token_ids, params, scheduling, **rest)


def _check_kind(name: str, value: object, kind: type) -> None:
    if not isinstance(value, kind):
        raise InvalidRequest(f"{name} must be {kind.__name__}, got {value!r:.50}", param=name)
