"""The turn of a conversation that a request is: finds the turn before it, explains a cache miss, and is kept for the next one."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from starlette.requests import Request

from chairlift.engine.frames import NoteSession
from chairlift.server.cache_miss import CacheMiss, MissReason
from chairlift.server.chat.exact_history import Parse, anchor_of, before_stop, exact_tokens
from chairlift.server.chat.prompt_parts import answer_keys, message_parts, parts_of, returned_answers
from chairlift.server.chat.request import ChatRequest
from chairlift.server.chat.turn_difference import PromptOfTurn, cache_miss
from chairlift.server.model import ServedModel
from chairlift.server.turns import Answer, Found, Scope, Turn, Turns

if TYPE_CHECKING:
    from chairlift.outputs import RequestOutput
    from chairlift.server.keys import Tenant

_MAX_ANSWERS = 32
"""Returned answers among which the turn before is looked for, the last first."""
_MAX_MATCHES = 4
"""Turns whose tokens are compared with a prompt."""


@dataclass(frozen=True, slots=True)
class TurnLabels:
    """Whose turn it is, and how the client says what it continues."""

    tenant: Tenant
    scope: Scope
    thread: str | None = None
    comparison: str | None = None
    """The id of the answer that the client wants the prompt to be compared with."""
    restarts: int = 0
    """How often the model's engines have ended."""


def turn_labels(request: Request, model: ServedModel, body: ChatRequest) -> TurnLabels:
    """Returns whose turn a request is, and what it continues."""
    tenant, info = request.state.ticket.tenant, model.engine.info
    scope = Scope(model.name, model.adapter(body.model), body.cache_salt, tenant.cache_group or "", (info.digest, info.fingerprint))
    comparison = None if body.prompt_cache_options is None else body.prompt_cache_options.comparison_response_id
    restarts = sum(replica.restarts for replica in model.engine.replicas)
    session = body.session(request.state.context.session)
    return TurnLabels(tenant, scope, None if session is None else session.name, comparison, restarts)


class CurrentTurn:
    """A request as a turn of its conversation."""

    def __init__(
        self,
        turns: Turns,
        model: ServedModel,
        labels: TurnLabels,
        conversation: list[dict[str, Any]],
        variables: dict[str, Any],
        rendered: list[int],
        parse: Parse | None,
    ) -> None:
        """`rendered` are the prompt's tokens. With `parse`, returned answers get the tokens that were generated."""
        self._turns, self._model, self._labels = turns, model, labels
        tokenizer = model.engine.tokenizer
        self._continues_last = bool(variables.get("continue_final_message"))
        plain = array("I", rendered)
        anchor = anchor_of(plain, tokenizer)
        self.exact = 0
        """Leading tokens of the prompt that were taken from an earlier turn and that differ from the rendered ones; 0 if none differ."""
        tokens = plain
        candidates = list(self._answered(conversation))
        if parse is not None:
            usable = (found for _, found in candidates[:_MAX_MATCHES] if found.turn.scope == labels.scope)
            matches = (exact_tokens(found, plain, tokenizer, parse) for found in usable)
            exact, count = next((match for match in matches if match is not None), (plain, 0))
            if exact != plain:
                tokens, self.exact = exact, count
        self.tokens = tokens.tolist() if self.exact else rendered
        parts = parts_of(conversation, variables)
        self._prompt = PromptOfTurn(conversation, parts, tokens, anchor, labels.scope, labels.restarts)
        self.compared: bool | None = None
        """Whether the answer that the client wants the prompt to be compared with is known; None if it names none."""
        self._earlier = self._find(candidates)
        self._turn: Turn | None = None
        self._answers: dict[int, array[int]] = {}
        self.miss: CacheMiss | None = None
        """Why the cache was not used as far as it could be; known from the first output on."""
        self._settled = False

    @property
    def begun(self) -> bool:
        """Whether `begin` was called."""
        return self._turn is not None

    def begin(self, answer_id: str, cached: int) -> None:
        """Called when the prompt has been computed, of which `cached` tokens were in the cache."""
        engine = self._model.engine
        tenant, prompt = self._labels.tenant, self._prompt
        if self._earlier is not None and engine.config.enable_prefix_caching:
            self.miss = cache_miss(self._earlier, prompt, cached, engine.config.block_size, engine.tokenizer)
        labels = tenant.name, tenant.group, answer_id, self._labels.thread, prompt.scope
        self._turn = Turn(*labels, prompt.parts, prompt.tokens, prompt.anchor, prompt.restarts)
        self._turns.add(self._turn)
        if self.miss is not None:
            self._turns.add_miss(answer_id, tenant.reader, self.miss)

    def push(self, output: RequestOutput) -> None:
        """Takes the next tokens of an answer."""
        tokens = self._answers.setdefault(output.index, array("I"))
        tokens.extend(output.token_ids)
        stop = output.stop_reason
        if isinstance(stop, str) and not output.text.endswith(stop):
            self._answers[output.index] = before_stop(tokens, stop, self._model.engine.tokenizer)

    def end_answer(self, index: int, message: dict[str, Any]) -> None:
        """Called with a complete answer as the chat template gets it when the client returns it."""
        labels = self._labels
        if labels.thread is not None and not message.get("tool_calls"):
            self._model.engine.tell(NoteSession(labels.tenant.name, labels.thread, "awaits_user"))
        if self._turn is None or self._continues_last:  # the client will return the last message and the answer as one
            return
        keys = answer_keys(message, self._prompt.conversation[-1])
        self._turns.add_answer(self._turn, index, Answer(self._answers.pop(index), message_parts(message)), keys)
        if self._earlier is not None:
            self._turns.supersede(self._earlier.turn, self._turn)

    def settle(self, output: RequestOutput, computed: int) -> None:
        """Completes and counts a miss at the end of the first answer, before which `computed` tokens of the prompt were computed."""
        if self.miss is None or self._turn is None or self._settled:
            return
        self._settled = True
        timing, timeline = output.timing, output.timeline
        if timing is not None and timing.first_token is not None and computed > 0:
            seconds = (timing.first_token - timing.started) / computed * self.miss.missed_tokens
            self.miss = replace(self.miss, seconds=round(seconds, 6))
        if self.miss.reason is MissReason.EVICTED and timeline is not None and 2 * timeline.lost_hit_tokens >= self.miss.missed_tokens:
            self.miss = replace(self.miss, reason=MissReason.STATE)
        elif self.miss.reason is MissReason.EVICTED and timeline is not None:
            self.miss = replace(self.miss, evicted_for=timeline.evicted_for)
        tenant = self._labels.tenant
        self._turns.add_miss(self._turn.answer_id, tenant.reader, self.miss)
        self._model.metrics.count_cache_miss(self.miss, tenant.name, self._labels.thread)

    def _answered(self, conversation: list[dict[str, Any]]) -> Iterator[tuple[int, Found]]:
        """Yields the turns whose answers the conversation has, the last first, with the number of assistant's messages after each."""
        for number, keys in enumerate(returned_answers(conversation, _MAX_ANSWERS)):
            for key in keys:
                if (found := self._turns.with_answer(self._labels.tenant.name, key)) is not None:
                    yield number, found
                    break

    def _find(self, answered: list[tuple[int, Found]]) -> Found | None:
        """Returns the turn that the prompt continues, by the client's word for it, else by the answers that it returns."""
        tenant, labels = self._labels.tenant.name, self._labels
        if labels.comparison is not None:
            named = self._turns.with_id(tenant, labels.comparison)
            self.compared = named is not None
            if named is not None:
                return named
        if answered:
            # Messages of the assistant after the last known one are changed answers of later turns.
            later, found = answered[0]
            return self._turns.newest(found, None if later else self._prompt.parts)
        latest = None if labels.thread is None else self._turns.latest(tenant, labels.thread)
        return latest if latest is not None and self._goes_on(latest.turn) else None

    def _goes_on(self, turn: Turn) -> bool:
        """Whether the prompt may continue the latest turn of the session. A first message to a subagent does not."""
        if any(message["role"] == "assistant" for message in self._prompt.conversation):
            return True
        heads = [
            [part for part in parts if not part[0].startswith("messages[") or part[0].startswith("messages[0]")]
            for parts in (turn.parts, self._prompt.parts)
        ]
        return heads[0] == heads[1]
