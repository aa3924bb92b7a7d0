"""The sequences of an engine: those that have not ended, and held ones."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from chairlift import _core
from chairlift.engine.adapters import Adapter, Adapters
from chairlift.engine.engine_request import EngineRequest, shared_salt
from chairlift.engine.mask_time import MaskTime
from chairlift.errors import InvalidRequest, QueueFull
from chairlift.grammar.grammar import Grammar
from chairlift.runner.sampling.logprobs import PromptLogprobs
from chairlift.sampling import SamplingParams

if TYPE_CHECKING:
    from chairlift.runner.interface import Runner
    from chairlift.runner.sampling.matcher import Matcher


Preparation = Literal["grammar", "read_cache"]
"""The timeline states in which a request waits that cannot run yet: its grammar is compiled, or its KV is read from disk."""


@dataclass(slots=True)
class SequenceState:
    """The engine's state of a sequence that has not ended."""

    seq: int
    """The core's handle."""
    params: SamplingParams
    seed: int
    prompt: PromptLogprobs | None = None
    """Progress of the prompt's log-probabilities, shared by the request's sequences; None if they are not requested."""
    grammar: Future[Grammar] | None = None
    """Done when the sequence runs; None without a grammar."""
    adapter: Adapter | None = None
    charge: Callable[[float], None] | None = None
    """Charges the tenant for the processor time of the grammar's masks, in seconds."""
    read: Callable[[], bool] | None = None
    """Begins to read its KV from disk; None if that holds none of it. Returns whether the sequence can run now."""
    slot: int | None = None
    """Its current or last batch slot."""

    def new_matcher(self) -> Matcher | None:
        """Returns a grammar matcher at the start of the output; None without a grammar."""
        structure = self.params.structured_output
        return None if self.grammar is None or structure is None else self.grammar.result().matcher(structure.budget, self.charge)


class Sequences:
    """Adds requests to the scheduler and keeps the state of each of their sequences, by tag. Times are microseconds."""

    def __init__(
        self, seed: int, scheduler: _core.Scheduler, runner: Runner, eos: Sequence[int], adapters: Adapters, mask_time: MaskTime
    ) -> None:
        self._scheduler, self._eos, self._adapters, self._mask_time = scheduler, eos, adapters, mask_time
        self._engine_seed = seed
        self._vocab_size = runner.model_config.vocab_size
        self._unique_salts = itertools.count()
        self._states: dict[int, SequenceState] = {}

    def __len__(self) -> int:
        return len(self._states)

    def get(self, tag: int) -> SequenceState | None:
        """The state of a sequence; None if it has ended."""
        return self._states.get(tag)

    def add(self, request: EngineRequest, now: int, grammar: Future[Grammar] | None = None, preparation: Preparation | None = None) -> None:
        """Queues a request (see `Engine.add`). It cannot run until `prepare` ends its `preparation`."""
        tag, params = request.tag, request.sampling
        if self.live(request):
            raise InvalidRequest(f"request {tag} is already running", param="request_id")
        tokens = np.frombuffer(request.prompt, dtype=np.int32)
        if tokens.size and (int(tokens.min()) < 0 or int(tokens.max()) >= self._vocab_size):
            raise InvalidRequest(f"token ids must be from 0 to {self._vocab_size - 1}", param="prompt")
        # The log-probabilities of a resumed request's prompt have been sent.
        scores = None if params.prompt_logprobs is None or request.resumed else PromptLogprobs(tag, tokens, params.prompt_logprobs)
        adapter = None if params.lora is None else self._adapters.get(params.lora)
        try:
            added = self._scheduler.add(request, now, self._salt(request, adapter), preparation)
        except BaseException as error:
            raise _public_error(error) from None
        charge = None if grammar is None else self._mask_time.meter(request.scheduling)
        for index, seq in added:
            self._states[tag + index] = SequenceState(seq, params, self._seed(tag + index, index, params), scores, grammar, adapter, charge)

    def live(self, request: EngineRequest) -> list[int]:
        """The tags of a request's sequences that have not ended."""
        return [tag for tag in request.tags if tag in self._states]

    def expect_read(self, request: EngineRequest, read: Callable[[], bool]) -> None:
        """Records how the KV of a request is read from disk, for when the scheduler asks for it."""
        for tag in self.live(request):
            self._states[tag].read = read

    def prepare(self, request: EngineRequest, next: Preparation | None, now: int) -> None:
        """Records that a request's preparation is done: the `next` one follows, or the request can run."""
        for tag in self.live(request):
            self._scheduler.prepare(self._states[tag].seq, next, now)

    def abort(self, tag: int, now: int, *, stopped: bool = False) -> bool:
        """Ends a sequence and frees its memory; False if it has ended already. `stopped` counts it as finished by a stop string."""
        state = self._states.get(tag)
        if state is None:
            return False
        self.forget(tag)
        return (self._scheduler.stop if stopped else self._scheduler.abort)(state.seq, now)

    def abort_all(self, now: int) -> None:
        """Ends every sequence."""
        for tag in list(self._states):
            self.abort(tag, now)

    def forget(self, tag: int) -> SequenceState:
        """Forgets a sequence that has ended."""
        state = self._states.pop(tag)
        if state.grammar is not None:
            self.release(state.grammar)
        return state

    def release(self, grammar: Future[Grammar]) -> None:
        """Takes a grammar back that is not compiled yet, unless a sequence waits for it."""
        if not grammar.done() and not any(state.grammar is grammar for state in self._states.values()):
            grammar.cancel()

    def end_tokens(self, params: SamplingParams) -> list[int]:
        """The token ids at which a sequence stops."""
        ends = [*params.stop_token_ids, *([] if params.ignore_eos else self._eos)]
        return [token for token in ends if token < self._vocab_size]

    def uses(self, adapter: Adapter) -> int:
        """The number of sequences that have not ended and use an adapter."""
        return sum(state.adapter == adapter for state in self._states.values())

    def _salt(self, request: EngineRequest, adapter: Adapter | None) -> bytes:
        """The salt of a request's prefix cache entries. Requests with equal salts share KV blocks.

        A request with prompt log-probabilities gets a unique salt, because all its positions must be computed. Byte 255 is not valid
        UTF-8, so no caller's salt can be equal.
        """
        if request.sampling.prompt_logprobs is not None:
            return b"\xff" + next(self._unique_salts).to_bytes(8)
        return shared_salt(request.scheduling.cache_salt, None if adapter is None else adapter.digest)

    def _seed(self, tag: int, index: int, params: SamplingParams) -> int:
        """The seed of a sequence's draws. Sequences without a seed draw independently."""
        if params.seed is None:
            return hash((self._engine_seed, tag))
        if not index:
            return params.seed
        # Python's hash of -1 is that of -2, so it is not taken of negative seeds.
        return hash((params.seed, index) if params.seed >= 0 else (~params.seed, index, 1))


def check_grammar(request: EngineRequest, grammar: Future[Grammar]) -> None:
    """Waits for the compiled grammar. Raises InvalidRequest, naming the request's field."""
    structure = request.sampling.structured_output
    assert structure is not None  # it has a grammar
    try:
        grammar.result()
    except InvalidRequest as error:
        raise InvalidRequest(f"{structure.param} cannot be used: {error}", param=structure.param, code=error.code) from None


def _public_error(error: BaseException) -> BaseException:
    """The core's refusal as an error of `chairlift.errors`."""
    match error:
        case _core.QueueFull():
            message, retry_after = error.args
            return QueueFull(message, retry_after=retry_after / 1e6)
        case _core.NoNewTokens():
            return InvalidRequest(str(error), param="max_tokens")
        case _core.TooLong() | _core.NeverFits():
            return InvalidRequest(str(error), param="prompt", code="context_length_exceeded")
        case _core.Rejected():
            return InvalidRequest(str(error), param="prompt")
    return error
