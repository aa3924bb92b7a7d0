"""Runs one API request: submits its prompts to the engine side by side, counts its tokens and measures its latencies."""

from __future__ import annotations

import asyncio
import sys
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import TYPE_CHECKING

from starlette.requests import Request

from chairlift.engine.background import cancel
from chairlift.errors import ChairliftError, DeadlineMissed, InvalidRequest, QueueFull, SequenceDropped, WaitTooLong
from chairlift.outputs import RequestOutput, Timeline, Timing
from chairlift.sampling import SamplingParams
from chairlift.scheduling import Scheduling
from chairlift.server.errors import api_error, whole_seconds
from chairlift.server.keys import Reader
from chairlift.server.model import model_of
from chairlift.server.observability.latencies import Latencies
from chairlift.server.observability.usage_log import UsageLabels, UsageLog
from chairlift.server.registry import engine_ids
from chairlift.server.schema.fields import GenerationRequest
from chairlift.server.schema.logprobs import MAX_LOGPROBS, max_tokens_with_logprobs
from chairlift.server.service import service_of
from chairlift.server.session_wait import HEADER, expected_wait, preferred_wait, takes_turns
from chairlift.server.submission import Submission
from chairlift.server.usage import Energy, Usage, timing_metrics

if TYPE_CHECKING:
    from chairlift.engine.async_live_sequence import AsyncLiveSequence

_ENERGY_SECONDS = 5.0
"""Longest wait, in seconds, of a complete answer for the engine's report of its energy."""
_STARTED_AT_ONCE = 256
"""Prompts of a request that are started before other callbacks of the event loop run."""
_STEPS_OF_TEXTS = 2
"""Steps that the texts to embed of a request may fill in the engine: the next one is ready when one has ended."""
_MAX_BUFFERED_OUTPUTS = 64
"""Outputs of a request with several prompts that are buffered for a slow client."""


class Generation:
    """The generation that one API request asks for. `outputs` runs it; closing `outputs` early aborts it in the engine.

    `head` holds the fields that every response begins with: id, object, created, model, determinism, arithmetic, and service_tier if the
    request has one.
    """

    def __init__(
        self,
        request: Request,
        body: GenerationRequest,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        *,
        kind: str,
        prefix: str,
        default_max_tokens: int | None = None,
        sequence: AsyncLiveSequence | None = None,
        user_turn_end: int | None = None,
    ) -> None:
        """Validates the prompts; raises InvalidRequest, and ApiError if they exceed the queue's limit.

        `kind` is the `object` of the response and `prefix` begins its id. `default_max_tokens` applies where the request sets no limit.
        The only prompt continues `sequence`, if given. See `Scheduling` for `user_turn_end`.
        """
        self._service, self._model = service_of(request), model_of(request)
        self._context = request.state.context
        self._session = body.session(self._context.session)
        self._scheduling = replace(self._urgency(request, body), user_turn_end=user_turn_end)
        self._takes_turns = takes_turns(self._session, self._model.engine.config)
        self._max_wait = preferred_wait(request.headers) if self._takes_turns else None
        self._reader: Reader = request.state.reader
        self._stream = bool(body.stream)
        lora = self._model.adapter(body.model)
        if lora is not None:
            params = replace(params, lora=lora)
        # A stream of the Responses API ends with the whole response.
        always_whole = kind == "response"
        most = max_tokens_with_logprobs(params, len(prompts)) if always_whole or not self._stream else sys.maxsize
        hint = "" if always_whole else ", or stream the response"
        self._prompts = [(prompt, self._with_max_tokens(prompt, params, default_max_tokens, most, hint)) for prompt in prompts]
        self._n = params.n
        self._sequence = sequence
        self._request_id = body.request_id or self._context.request_id
        self._ticket = request.state.ticket
        self._ticket.add_prompts(len(prompts))
        answer_id = self.id = f"{prefix}{uuid.uuid4().hex}"
        self._service.registry.add(self._scheduling.tenant, self._request_id, answer_id, len(prompts))
        self._service.registry.remove_preparing(self._scheduling.tenant, self._context)
        self._engine_ids = engine_ids(answer_id, len(prompts))
        self.head = {
            "id": answer_id,
            "object": kind,
            "created": int(time.time()),
            "model": lora or self._model.name,
            "determinism": self._model.engine.info.determinism,
            "arithmetic": self._model.engine.info.arithmetic,
            **({"service_tier": self.service_tier} if body.service_tier is not None and self.service_tier else {}),
        }
        config = self._model.engine.config
        cacheable = sum(len(prompt) // config.block_size * config.block_size for prompt in prompts) if config.enable_prefix_caching else 0
        self.usage = Usage(prompt=sum(map(len, prompts)), cacheable=cacheable)
        if body.energy:
            self.usage.energy = Energy(None, self._model.engine.info.energy_method)
        self._timing: Timing | None = None

    def _urgency(self, request: Request, body: GenerationRequest) -> Scheduling:
        """Returns the scheduling parameters of the tenant, its tier, the headers and the body; raises InvalidRequest."""
        tier = self._service.tiers.choose(body.service_tier, request.state.tenant)
        scheduling = body.scheduling(request.state.ticket.tenant.scheduling(tier), request.headers, self._session)
        return self._service.tiers.bound(scheduling, self._model.engine.config.scheduling_policy)

    def _with_max_tokens(self, prompt: Sequence[int], params: SamplingParams, default: int | None, most: int, hint: str) -> SamplingParams:
        """Returns the parameters with the prompt's `max_tokens`; raises InvalidRequest.

        The response has room for `most` tokens; `hint` names another way to get more.
        """
        resolved = self._model.engine.validate(prompt, params)
        if params.max_tokens is not None and params.max_tokens > most:
            message = f"the answers' log-probabilities would be more than {MAX_LOGPROBS} numbers: ask for at most {most} tokens, for fewer"
            raise InvalidRequest(f"{message} answers or log-probabilities{hint}", param="logprobs")
        if params.max_tokens is not None or resolved.max_tokens is None:
            return resolved
        wanted = resolved.max_tokens if default is None else max(default, params.min_tokens)
        return replace(resolved, max_tokens=min(wanted, resolved.max_tokens, most))

    @property
    def service_tier(self) -> str | None:
        """The tier that serves the request, in OpenAI's words; None for a background request."""
        return None if self._scheduling.served_tier == "background" else self._scheduling.tier

    async def wait_headers(self) -> dict[str, str]:
        """Returns the headers of a stream without a first event: how long it is expected to wait for its session's turn, if it does."""
        if not self._takes_turns:
            return {}
        seconds = await expected_wait(self._model.engine, self._engine_ids[0])
        return {} if seconds is None else {HEADER: str(whole_seconds(seconds))}

    def metrics(self, wanted: bool | None) -> dict[str, dict[str, float | None]]:
        """Returns the `metrics` field of the response, if it is `wanted`, once an answer has ended.

        Several answers are timed from first start to last end.
        """
        return {"metrics": timing_metrics(self._timing, self.usage.completion)} if wanted and self._timing else {}

    def _usage_labels(self, index: int) -> UsageLabels:
        return UsageLabels.of(self._engine_ids[index], self._request_id, self._model.name, self._scheduling, self._length(index))

    def outputs(self) -> AsyncGenerator[tuple[int, RequestOutput]]:
        """Yields (choice index, increment); raises the engine's errors. Without `stream` a prompt yields only when it is complete."""
        return self._generate_prompt(0) if len(self._prompts) == 1 else self._generate_prompts()

    async def _generate_prompts(self) -> AsyncGenerator[tuple[int, RequestOutput]]:
        """Yields the increments of several prompts as they come.

        Texts to embed are in the engine as many as fill two steps, so that the prompts of others do not wait for thousands of them.
        """
        queue: asyncio.Queue[tuple[int, RequestOutput | Exception | None]] = asyncio.Queue(_MAX_BUFFERED_OUTPUTS)

        async def pump(index: int) -> None:
            end = None
            try:
                async with aclosing(self._generate_prompt(index)) as outputs:
                    async for item in outputs:
                        await queue.put(item)
            except Exception as error:
                end = error
            await queue.put((index, end))

        info, embeds = self._model.engine.info, self._prompts[0][1].embed
        tasks: list[asyncio.Task[None]] = []
        ended = running = 0  # prompts, and the tokens of those in the engine

        def has_room() -> bool:
            tokens = running + self._length(len(tasks))
            fits = tokens <= _STEPS_OF_TEXTS * info.max_num_batched_tokens and len(tasks) - ended < _STEPS_OF_TEXTS * info.max_num_seqs
            return fits or not embeds or ended == len(tasks)

        try:
            while ended < len(self._prompts):
                while len(tasks) < len(self._prompts) and has_room():
                    running += self._length(len(tasks))
                    tasks.append(asyncio.create_task(pump(len(tasks))))
                    if len(tasks) % _STARTED_AT_ONCE == 0:
                        await asyncio.sleep(0)
                index, item = await queue.get()
                if isinstance(item, Exception):
                    raise item
                if item is None:
                    ended += 1
                    running -= self._length(index)
                else:
                    yield index, item
        finally:
            await cancel(tasks)

    def _length(self, index: int) -> int:
        return len(self._prompts[index][0])

    async def _generate_prompt(self, index: int) -> AsyncGenerator[tuple[int, RequestOutput]]:
        """Yields one prompt's increments and updates usage and metrics."""
        prompt, params = self._prompts[index]
        first_choice = index * self._n
        progress = self._begin(index, params)
        submission = Submission(
            self._model,
            prompt,
            params,
            self._scheduling,
            request_id=self._engine_ids[index],
            context=self._context,
            buffered=not self._stream,
            session=self._session,
            max_wait=self._max_wait,
            sequence=self._sequence,
        )
        try:
            times = progress.times
            async with aclosing(submission.outputs(self._ticket.started, times.observe, times.reset)) as outputs:
                async for output in outputs:
                    self._count_tokens(progress, output)
                    if output.finish_reason:
                        self._count_answer(progress, output, output.finish_reason)
                        if not progress.unfinished:
                            await self._count_energy(index, progress.timelines)
                        if progress.usage_log is not None and not progress.unfinished:
                            known = submission.timelines() if params.ranked else progress.timelines
                            await progress.usage_log.write_ended(self._model.engine, self._usage_labels(index), known)
                            progress.usage_log = None
                    yield first_choice + output.index, output
            if params.ranked:  # `best_of`: discarded answers count as usage too
                self.usage.completion += max(0, submission.num_received - progress.tokens)
        except DeadlineMissed as missed:
            progress.reason = "deadline"
            # Usage counts tokens that were sampled but not sent, and those of the request's other prompts.
            self.usage.completion += missed.completion_tokens - progress.tokens
            totals = {"prompt_tokens": self.usage.prompt, "completion_tokens": self.usage.completion}
            raise DeadlineMissed(str(missed), **totals) from None
        except Exception as error:
            # A dropped sequence ends a request that has run.
            dropped = isinstance(error, SequenceDropped)
            progress.reason = "abort" if dropped else "error"
            # One that ran before its grammar or its biases ended it has used what others use.
            if isinstance(error, QueueFull | InvalidRequest | WaitTooLong) and not dropped and not submission.started:
                self._count_refusal(progress, error)
            raise
        finally:
            self._end(progress)

    def _begin(self, index: int, params: SamplingParams) -> _Progress:
        metrics = self._model.metrics
        metrics.observe_params(params)
        latencies = metrics.latencies(self._scheduling)
        return _Progress(index, params.n, latencies, _TokenTimes(latencies, self._context.arrived), self._service.usage_log)

    def _count_tokens(self, progress: _Progress, output: RequestOutput) -> None:
        """Updates usage by an increment."""
        count = len(output.token_ids)
        progress.lengths[output.index] = progress.lengths.get(output.index, 0) + count
        progress.tokens += count
        self.usage.completion += count
        cached = output.cached_tokens if self._reader is None else output.own_cached_tokens
        if progress.cached is None or cached < progress.cached:
            # Forks hit blocks that the first of them computed. The minimum is what was cached before the request.
            self.usage.cached += cached - (progress.cached or 0)
            progress.cached = cached

    def _count_answer(self, progress: _Progress, output: RequestOutput, reason: str) -> None:
        """Updates usage, timing and metrics by the last increment of an answer."""
        progress.unfinished -= 1
        progress.timelines.append(output.timeline)
        self._timing = output.timing if self._timing is None else self._timing.merge(output.timing)
        metrics, tokens = self._model.metrics, progress.lengths.pop(output.index)
        metrics.observe_answer(output, tokens, progress.latencies)
        if (tier := self._service.tiers.tiers.get(self._scheduling.served_tier)) is not None:
            metrics.observe_targets(self._scheduling.tier, tier, output.timing, tokens)
        metrics.count_finished(reason, time.monotonic() - self._context.arrived, progress.latencies)
        if output.timeline is not None:
            self.usage.accepted += output.timeline.accepted_draft_tokens
            self.usage.rejected += output.timeline.draft_tokens - output.timeline.accepted_draft_tokens

    async def _count_energy(self, index: int, known: Sequence[Timeline | None]) -> None:
        """Adds a prompt's energy to the usage, if the request asks for it, there is a meter and the engine answers in time."""
        energy = self.usage.energy
        if energy is None or energy.method is None:
            return
        timelines = [timeline for timeline in known if timeline is not None]
        if self._prompts[index][1].ranked or len(timelines) < len(known):
            try:
                async with asyncio.timeout(_ENERGY_SECONDS):
                    timelines = await self._model.engine.explain(self._engine_ids[index])
            except (ChairliftError, TimeoutError):
                return  # the answer is complete
        joules = sum(timeline.energy_joules or 0.0 for timeline in timelines)
        energy.joules = round((energy.joules or 0.0) + joules, 6)

    def _count_refusal(self, progress: _Progress, error: QueueFull | InvalidRequest | WaitTooLong) -> None:
        """Records a prompt that was rejected and has used nothing."""
        progress.usage_log = None
        progress.refused = True
        if isinstance(error, QueueFull):
            progress.unfinished = 0  # the engine counts the requests that it rejects
        if isinstance(error, WaitTooLong):
            progress.unfinished = 0
            self._service.count_rejected("session_wait", self._model)
        self._service.registry.add_refusal(self._scheduling.tenant, self._request_id, api_error(error).refusal())

    def _end(self, progress: _Progress) -> None:
        """Counts the answers that did not end, and records the prompt in the usage log and the traces."""
        engine, metrics = self._model.engine, self._model.metrics
        if self._session is not None and self._session.final:
            self._service.end_session(self._scheduling.tenant, self._session.name)
        if self._scheduling.session is not None and not progress.refused:
            counts = len(self._prompts[progress.index][0]), progress.cached or 0, progress.tokens
            timelines = [timeline for timeline in progress.timelines if timeline is not None]
            metrics.sessions.add(self._scheduling.tenant, self._scheduling.session, *counts, timelines)
        for _, tokens in zip_longest(range(progress.unfinished), progress.lengths.values(), fillvalue=0):
            metrics.count_finished(progress.reason, time.monotonic() - self._context.arrived, progress.latencies)
            if not progress.refused:
                metrics.observe_lengths(len(self._prompts[progress.index][0]), tokens)
        if progress.usage_log is not None:
            progress.usage_log.write_later(engine, self._usage_labels(progress.index))
        if self._service.traces is not None:
            self._service.traces.trace_request(engine, self._model.name, self._engine_ids[progress.index], self._context)


@dataclass(slots=True)
class _Progress:
    """What one prompt has generated so far."""

    index: int
    unfinished: int
    """Answers that have not ended."""
    latencies: Latencies
    times: _TokenTimes
    usage_log: UsageLog | None
    """The log that still needs the prompt's record; None if there is no log, or it has the record."""
    refused: bool = False
    """Whether the engine took nothing of the prompt."""
    reason: str = "abort"
    """Why the unfinished answers ended."""
    tokens: int = 0
    cached: int | None = None
    lengths: dict[int, int] = field(default_factory=dict)
    """Tokens of each answer that has not ended, by its index."""
    timelines: list[Timeline | None] = field(default_factory=list)


class _TokenTimes:
    """Measures TTFT, queue time and inter-token latency of one prompt's answers."""

    def __init__(self, latencies: Latencies, arrived: float) -> None:
        self._latencies = latencies
        self._arrived = arrived
        self._started = False
        self._latest: dict[int, float] = {}
        """Time of each answer's newest token, by the answer's index."""

    def observe(self, output: RequestOutput) -> None:
        """Records an increment that arrived just now."""
        if not output.token_ids:
            return
        now = time.monotonic()
        if not self._started:
            self._started = True
            # Both histograms are updated together, so that their percentiles cover the same requests.
            self._latencies.first_token.observe(now - self._arrived)
            self._latencies.queued.observe(output.queued or 0.0)
        elif output.index in self._latest:
            self._latencies.between_tokens.observe(now - self._latest[output.index])
        self._latest[output.index] = now

    def reset(self) -> None:
        """Called when the answers start over in a new engine: the gap is not an inter-token latency."""
        self._latest.clear()
