"""Why a request found less of its conversation in the prefix cache than the turn before it had left there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class MissReason(StrEnum):
    """What kept the prefix cache from being used, by the name in explanations and metrics."""

    MODEL = "model_changed"
    ADAPTER = "adapter_changed"
    SALT = "cache_salt_changed"
    GROUP = "cache_group_changed"
    SETTINGS = "settings_changed"
    TOOLS = "tools_changed"
    SYSTEM = "system_changed"
    HISTORY = "history_edited"
    SHORTENED = "history_shortened"
    REASONING = "reasoning_dropped"
    TEMPLATE = "template_rewrote_history"
    TOKENS = "answer_retokenized"
    RESTARTED = "engine_restarted"
    STATE = "no_recurrent_state"
    EVICTED = "evicted"
    UPSTREAM = "upstream_missed"

    @property
    def what(self) -> str:
        """The reason in words."""
        return _MEANINGS[self].what

    @property
    def advice(self) -> str:
        """What to do."""
        return _MEANINGS[self].advice


@dataclass(frozen=True, slots=True)
class _Meaning:
    """A reason in words, what to do, and the words of other APIs; None where these report no miss."""

    what: str
    advice: str
    openai: str = "input_changed"
    anthropic: str | None = "messages_changed"


_MEANINGS = {
    MissReason.MODEL: _Meaning(
        "the turn before was answered by another model", "stay with one model within a conversation", "model_changed", "model_changed"
    ),
    MissReason.ADAPTER: _Meaning(
        "the turn before used another LoRA adapter", "stay with one adapter within a conversation", "model_changed", "model_changed"
    ),
    MissReason.SALT: _Meaning(
        "cache_salt differs from that of the turn before", "send the same cache_salt with each turn", anthropic="unavailable"
    ),
    MissReason.GROUP: _Meaning(
        "the tenant's cache group has changed", "nothing: the next turn finds this one's prompt", anthropic="unavailable"
    ),
    MissReason.SETTINGS: _Meaning(
        "an input of the chat template has changed", "send the same value with each turn", "reasoning_effort_changed", "unavailable"
    ),
    MissReason.TOOLS: _Meaning(
        "a tool has changed, and tools come first in the prompt",
        "send the same tools in the same order with each turn",
        "tools_changed",
        "tools_changed",
    ),
    MissReason.SYSTEM: _Meaning(
        "the system prompt has changed", "move what changes (dates, ids, counters) into the last message", anthropic="system_changed"
    ),
    MissReason.HISTORY: _Meaning("an earlier message has changed", "return earlier messages as they were, and append to them"),
    MissReason.SHORTENED: _Meaning(
        "earlier messages were left out or summarized", "nothing, if the history was compacted on purpose", "context_compacted"
    ),
    MissReason.REASONING: _Meaning(
        "the answer's reasoning was not returned", "return reasoning_content (or thinking blocks) with the answer"
    ),
    MissReason.TEMPLATE: _Meaning(
        "the messages are the same, but the chat template renders earlier ones in another way",
        "nothing, if the model was trained with it; some templates keep reasoning if chat_template_kwargs says so",
    ),
    MissReason.TOKENS: _Meaning(
        "the answer's text is the same, but its tokens are not those that the model generated",
        "use the server with --exact-history, and return answers as they were",
    ),
    MissReason.RESTARTED: _Meaning(
        "an engine was restarted and its cache is empty", "keep KV on disk with --prefix-cache-dir", "unavailable", None
    ),
    MissReason.STATE: _Meaning(
        "the KV was there, but no recurrent state after it",
        "nothing within one conversation; a state is saved where a prompt or an answer ended",
        "unavailable",
        None,
    ),
    MissReason.EVICTED: _Meaning(
        "the blocks were evicted, or are in another engine's cache",
        "more KV memory (--kv-cache-memory-bytes), fewer sessions at a time, or --swap-space on a GPU and --prefix-cache-dir on a CPU",
        "unavailable",
        None,
    ),
    MissReason.UPSTREAM: _Meaning(
        "the messages are the same, but the upstream's cache had lost them, or its chat template renders earlier ones in another way",
        "more KV memory at the upstream, or fewer sessions at a time",
        "unavailable",
        None,
    ),
}


_TAKERS = {
    "same_session": "this session itself",
    "same_tenant": "another session of this tenant",
    "other_tenant": "sessions of other tenants",
    "no_session": "requests without a session",
}
"""Whom blocks were evicted for, in words."""


@dataclass(frozen=True, slots=True)
class Difference:
    """Where a prompt first differs from the one before it."""

    field: str | None = None
    """As in `messages[3].content`, counted as the chat template gets them; None if no field differs."""
    before: str | None = None
    """The beginning of the text at the first different token in the prompt before."""
    now: str | None = None


@dataclass(frozen=True, slots=True)
class CacheMiss:
    """A cache miss with its cause."""

    reason: MissReason
    missed_tokens: int
    """Tokens that the turn before had left in the cache and that were computed again."""
    reusable_tokens: int
    """Tokens in whole blocks of the prompt and the answer of the turn before, as far as this prompt is long."""
    difference: Difference = Difference()
    evicted_for: Mapping[str, int] = field(default_factory=dict)
    """Evicted tokens of the session by whom their blocks were for, as in `Timeline.evicted_for`."""
    seconds: float | None = None
    """Estimate of the time lost, by this request's own prefill speed; None before its first answer has ended."""

    def summary(self) -> str:
        """Returns the cause in a sentence."""
        field = self.difference.field
        where = f" ({field})" if field else ""
        seconds = "" if self.seconds is None else f", about {self.seconds:.2g} s"
        if whom := [_TAKERS.get(name, name) for name, _ in sorted(self.evicted_for.items(), key=lambda one: -one[1])]:
            where = f" (for {' and '.join(whom)})"
        lost = f"{self.missed_tokens} of {self.reusable_tokens} tokens were computed again{seconds}"
        return f"Cache miss: {self.reason.what}{where}. {lost}."

    def json(self, *, with_texts: bool) -> dict[str, object]:
        """Returns the object of explanations. `with_texts` adds both sides' texts, which only the tenant may see."""
        texts = {"before": self.difference.before, "now": self.difference.now} if with_texts else {}
        return {
            "reason": str(self.reason),
            "field": self.difference.field,
            **texts,
            "evicted_for": dict(self.evicted_for),
            "missed_tokens": self.missed_tokens,
            "reusable_tokens": self.reusable_tokens,
            "seconds": self.seconds,
            "summary": self.summary(),
            "advice": self.reason.advice,
        }

    def openai(self) -> dict[str, object]:
        """Returns OpenAI's `prompt_cache_diagnostics`; `unavailable` if the requests do not differ."""
        reason = _MEANINGS[self.reason].openai
        if reason == "unavailable":
            return {"type": "unavailable"}
        if reason == "reasoning_effort_changed" and not any(name in (self.difference.field or "") for name in ("reasoning", "thinking")):
            reason = "input_changed"
        counts = {"cache_missed_tokens": self.missed_tokens, "comparison_reusable_tokens": self.reusable_tokens}
        return {"type": "cache_miss", "reason": reason, **counts}

    def anthropic(self) -> dict[str, object] | None:
        """Returns Anthropic's `diagnostics`; None if the requests do not differ."""
        kind = _MEANINGS[self.reason].anthropic
        if kind is None:
            return None
        return {"cache_miss_reason": {"type": kind, **({} if kind == "unavailable" else {"cache_missed_input_tokens": self.missed_tokens})}}
