"""Separates a model's reasoning from its answer."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from chairlift.chat.tools.parser import goes_on, safe_end
from chairlift.grammar.source import ReasoningFormat

REASONING_FORMATS = {
    "apertus": ReasoningFormat("<|inner_prefix|>", "<|inner_suffix|>"),
    "apriel": ReasoningFormat("Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]", dropped=("[END FINAL RESPONSE]",)),
    "cohere_command3": ReasoningFormat("<|START_THINKING|>", "<|END_THINKING|>"),
    "deepseek_r1": ReasoningFormat("<think>", "</think>", implicit=True),
    "gemma4": ReasoningFormat("<|channel>thought", "<channel|>"),
    "granite": ReasoningFormat("Here is my thought process:", "Here is my response:"),
    "granite_thinking_parser": ReasoningFormat("<think>", "</think>", dropped=("<response>", "</response>")),
    "hunyuan_a13b": ReasoningFormat("<think>", "</think>", dropped=("<answer>", "</answer>")),
    "mistral": ReasoningFormat("[THINK]", "[/THINK]"),
    "openai_gptoss": ReasoningFormat(
        "<|channel|>analysis<|message|>", "<|end|>", after_end="<|start|>assistant", answer="<|channel|>final<|message|>", repeats=True
    ),
    "qwen3": ReasoningFormat("<think>", "</think>"),
    "seed_oss": ReasoningFormat("<seed:think>", "</seed:think>"),
}
"""Formats by vLLM's names, `apertus` and `apriel`. `qwen3` is that of most models with `<think>`."""

_TEMPLATE_MARKS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("openai_gptoss", ("<|channel|>", "<|message|>")),
    ("gemma4", ("<|channel>", "<channel|>")),
    ("mistral", ("[THINK]", "[/THINK]")),
    ("granite", ("Here is my thought process:",)),
    ("qwen3", ("<minimax:tool_call>",)),  # it writes results of tools as <response>
    ("granite_thinking_parser", ("<response>", "</think>")),
    ("apriel", ("[BEGIN FINAL RESPONSE]",)),
    ("hunyuan_a13b", ("<answer>", "</think>")),
    ("cohere_command3", ("<|START_THINKING|>",)),
    ("seed_oss", ("</seed:think>",)),
    ("apertus", ("<|inner_prefix|>",)),
    ("deepseek_r1", ("<\uff5cAssistant\uff5c>", "</think>")),
    ("qwen3", ("think>",)),
)
"""Texts in a chat template that together identify its format; the first format that fits counts.

Some templates have only one of the marks of `qwen3`.
"""

_RECIPIENT = re.compile(r"to=[^\s<]+\s*$")
"""What stands before a mark of gpt-oss that begins a call instead of reasoning."""
_MAX_HEAD = 256
"""Maximum characters of it."""

MAX_THOUGHT = 8192
"""Characters of reasoning without an end in which calls are looked for. All are parsed at once, which may take 12 ms."""

TAIL_TOKENS = 32
"""Tokens at the prompt's end in which the chat template may begin or skip the reasoning."""


def format_for_template(template: str) -> ReasoningFormat | None:
    """Returns the format of a model with this chat template; None if the template does not mention reasoning."""
    for name, marks in _TEMPLATE_MARKS:
        if all(mark in template for mark in marks):
            return REASONING_FORMATS[name]
    return None


class ReasoningState(Enum):
    """The state of an output between two tokens."""

    POSSIBLE = "possible"
    """The model may begin with reasoning."""
    OPEN = "open"
    """Reasoning has begun and not ended."""
    OVER = "over"
    """The answer has begun."""


@dataclass(frozen=True, slots=True)
class Reasoning:
    """How one request's outputs contain reasoning: its format, and the state at the end of the prompt."""

    format: ReasoningFormat
    state: ReasoningState

    @classmethod
    def after_prompt(cls, form: ReasoningFormat, tail: str, continued: Mapping[str, Any] | None) -> Reasoning:
        """Returns the reasoning of outputs to a prompt that ends with the text `tail`; `continued` is the message that they continue."""
        if continued is not None:
            tail = continued["content"]
            if tail.rfind(form.start) > tail.rfind(form.end):
                return cls(form, ReasoningState.OPEN)
            return cls(form, ReasoningState.OVER if tail.strip() else ReasoningState.POSSIBLE)
        tail = tail.rstrip()
        if tail.endswith(form.start):
            return cls(form, ReasoningState.OPEN)
        return cls(form, ReasoningState.OVER if tail.endswith(form.end) else ReasoningState.POSSIBLE)


class ReasoningParser:
    """Separates the text of one output into reasoning and answer.

    The result does not depend on how the text is cut, and the time is linear in its length. The first end mark ends the reasoning. Text
    that may be part of a mark is held back. Whitespace around the reasoning is dropped.
    """

    def __init__(self, reasoning: Reasoning) -> None:
        self._format = reasoning.format
        self.state = reasoning.state
        self.thought = ""
        """The end of the current reasoning, or of the last one if that is over."""
        self._text = ""
        self._spaces: list[str] = []
        """Whitespace that is dropped if a mark follows it."""
        self._begun = False
        """Whether text of the current reasoning was returned."""
        self._parts = 0
        """Number of completed parts of the reasoning that had text."""
        self._at_start = False
        """Whether only whitespace and dropped marks have followed the end of the reasoning."""
        self._head = ""
        """The newest text of the answer, where reasoning may begin again."""
        self._dropped = re.compile("|".join(map(re.escape, self._format.dropped)) or "(?!)")

    def push(self, text: str, *, final: bool = False) -> tuple[str, str]:
        """Parses the next piece of text; returns reasoning and answer. `final` also returns what was held back."""
        self._text += text
        reasoning: list[str] = []
        answer: list[str] = []
        before = None
        while self.state is not before:
            before = self.state
            match before:
                case ReasoningState.POSSIBLE:
                    self._parse_start(answer, final)
                case ReasoningState.OPEN:
                    self._parse_reasoning(reasoning, final)
                case ReasoningState.OVER:
                    self._parse_answer(answer, final)
        return "".join(reasoning), "".join(answer)

    def end(self, stop: str = "") -> tuple[str, str]:
        """Ends the text, before the stop string `stop` if there is one; returns reasoning and answer that were held back."""
        if goes_on(self._text, stop, (self._format.start, self._format.end, *self._format.dropped)):
            self._text = ""
        return self.push("", final=True)

    def _parse_start(self, answer: list[str], final: bool) -> None:
        """Decides whether the output begins with reasoning."""
        form = self._format
        if form.repeats:  # the answer's parser finds reasoning wherever it begins
            self.state = ReasoningState.OVER
            return
        text = self._text.lstrip()
        self._spaces.append(self._text[: len(self._text) - len(text)])
        self._text = text
        if text.startswith(form.start):
            self._open(text.removeprefix(form.start))
        elif final or not form.start.startswith(text):
            if form.implicit and text:
                self._open(text)
            else:
                self.state = ReasoningState.OVER
                answer += self._spaces
                self._spaces.clear()

    def _open(self, text: str) -> None:
        self.state, self.thought, self._text, self._begun = ReasoningState.OPEN, "", text, False
        self._spaces.clear()

    def _parse_reasoning(self, reasoning: list[str], final: bool) -> None:
        """Consumes reasoning up to its end mark."""
        text, end = self._text, self._format.end
        if (at := text.find(end)) >= 0:
            self._emit_reasoning(text[:at], reasoning)
            self._spaces.clear()
            self.state, self._text = ReasoningState.OVER, text[at + len(end) :]
            self._at_start = not self._format.repeats
            self._parts += self._begun
            return
        at = len(text) if final else safe_end(text, (end,))
        self._emit_reasoning(text[:at], reasoning)
        self._text = text[at:]

    def _emit_reasoning(self, text: str, reasoning: list[str]) -> None:
        """Returns text as reasoning, without whitespace at both ends."""
        if not self._begun:
            text = text.lstrip()
        if stripped := text.rstrip():
            if self._parts and not self._begun:
                reasoning.append("\n")
            self._begun = True
            reasoning += (*self._spaces, stripped)
            self.thought = "".join((self.thought, *self._spaces, stripped))[-MAX_THOUGHT:]
            self._spaces.clear()
        if self._begun and len(stripped) < len(text):
            self._spaces.append(text[len(stripped) :])

    def _parse_answer(self, answer: list[str], final: bool) -> None:
        """Consumes the answer, up to the next reasoning if it may begin again."""
        form = self._format
        text = self._text
        while form.repeats and (at := text.find(form.start)) >= 0:
            self._head = (self._head + text[:at])[-_MAX_HEAD:]
            begin, text = text[:at], text[at + len(form.start) :]
            if not _RECIPIENT.search(self._head):
                answer.append(begin)
                self._open(text)
                return
            answer += (begin, form.start)
        text = self._dropped.sub("", text)
        text = text.lstrip() if self._at_start else text
        marks = (form.start,) if form.repeats else form.dropped
        at = len(text) if final or not marks else safe_end(text, marks)
        answer.append(text[:at])
        self._at_start = self._at_start and not text[:at]
        self._head = (self._head + text[:at])[-_MAX_HEAD:] if form.repeats else ""
        self._text = text[at:]


class ReasoningTokens:
    """Counts the tokens of one output that belong to its reasoning, including its end mark."""

    def __init__(self, reasoning: Reasoning, piece: Callable[[int], bytes]) -> None:
        """`piece` returns the bytes of a token."""
        # A token may be part of a character, so the marks are searched in bytes, which Latin-1 maps to characters.
        form = reasoning.format
        form = replace(form, start=_as_bytes(form.start), end=_as_bytes(form.end), dropped=())
        self._parser = ReasoningParser(replace(reasoning, format=form))
        self._piece = piece
        self._undecided = 0

    def count(self, token_ids: Sequence[int]) -> int:
        """Returns how many more tokens are reasoning after the next tokens."""
        count = 0
        for token in token_ids:
            before = self._parser.state
            self._parser.push(self._piece(token).decode("latin-1"))
            match before, self._parser.state:
                case ReasoningState.POSSIBLE, ReasoningState.POSSIBLE:
                    self._undecided += 1
                case ReasoningState.POSSIBLE, ReasoningState.OPEN:
                    count += self._undecided + 1
                case (ReasoningState.OPEN, _) | (_, ReasoningState.OPEN):
                    count += 1
        return count


def _as_bytes(mark: str) -> str:
    return mark.encode().decode("latin-1")
