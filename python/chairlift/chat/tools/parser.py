"""Base class of the tool-call parsers: separates streamed text into content and tool calls."""

from __future__ import annotations

import json
import re
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from chairlift.chat.tools.json_text import JsonText
from chairlift.grammar.source import ToolCallFormat

ParserSteps = Generator[None, None, None]
"""Part of a parser as a generator that yields when it needs more text."""

MAX_HEAD = 256
"""Maximum characters of a call's name with its id and the marks around it."""
_ARGUMENTS = ("arguments", "parameters")
_NAMES = ("name", "tool_name")
_CALL_KEYS = frozenset((*_ARGUMENTS, *_NAMES, "id", "tool_call_id", "type"))
"""Allowed keys of a call's object; an object with other keys is not a call."""
_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """An increment of one tool call. The first has the call's `id` and `name`; all have the next part of its arguments."""

    index: int
    """Index of the call in its answer."""
    arguments: str = ""
    """The next part of the arguments' JSON text."""
    id: str | None = None
    name: str | None = None
    custom: bool = False
    """Whether `arguments` are the free text of a custom tool's input."""


class InvalidCall(Exception):
    """Text that began like a call is not one, or stops being one."""


class ToolParser(ABC):
    """Parses one answer: takes its text in pieces, returns content and tool calls.

    The result does not depend on how the text is cut, and the time is linear in its length. Text that may begin a call is held back until
    it is known to be content. Text that looks like a call but is not (invalid JSON, an unknown function) is returned as content. A call is
    returned as soon as its name is known and its arguments begin. Arguments that turn out to be invalid JSON are returned as the model
    wrote them, up to the end of the call.
    """

    marks: ClassVar[tuple[str, ...]]
    """Texts that begin a call or end one."""
    end_mark: ClassVar[str]
    """The mark that ends arguments that are invalid JSON: the last of a format's `marks`, unless the format names another."""
    inner_marks: ClassVar[tuple[str, ...]] = ()
    """Texts inside calls; like the marks they may be control tokens."""
    wraps_content: ClassVar[bool] = False
    """Whether content has marks too, so that answers without tools must be parsed."""
    needs_types: ClassVar[bool] = False
    """Whether arguments are plain text, of which only the functions' schemas tell the types."""

    def __init_subclass__(cls) -> None:
        if "marks" in vars(cls) and "end_mark" not in vars(cls):
            cls.end_mark = cls.marks[-1]

    def __init__(
        self,
        names: Collection[str],
        new_id: Callable[[], str] | None = None,
        types: Mapping[str, Mapping[str, frozenset[str]]] | None = None,
    ) -> None:
        """`names` are the available functions; `new_id` creates call ids.

        `types` are the JSON types of each function's arguments, for a parser that needs them.
        """
        self._names = names
        self._types = types or {}
        self._new_id = new_id or self.new_id
        self._text = ""
        self._at = 0
        self._over = False
        self._output: list[str | ToolCallDelta] = []
        self._spaces: list[str] = []
        self._raw: list[str] = []
        """Text of a call that may still turn out to be content."""
        self._calls = 0
        self._in_arguments = False
        self._parser = self._parse()

    @classmethod
    @abstractmethod
    def call_format(cls, template: str) -> ToolCallFormat:
        """Returns the format for the grammar that makes a model with this chat template write calls."""

    @staticmethod
    def history(conversation: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Returns the messages as the model's chat template takes calls and results of tools."""
        return conversation

    @staticmethod
    def new_id() -> str:
        """Returns a call id in OpenAI's format."""
        return f"call_{secrets.token_hex(12)}"

    @property
    def num_calls(self) -> int:
        """The number of calls that have begun."""
        return self._calls

    def push(self, text: str) -> list[str | ToolCallDelta]:
        """Parses the next piece of text; returns content as strings, and increments of calls, in order."""
        self._text, self._at = self._text[self._at :] + text, 0
        next(self._parser)
        output, self._output = self._output, []
        return output

    def end(self, stop: str = "") -> list[str | ToolCallDelta]:
        """Ends the text, before the stop string `stop` if there is one; returns what was held back."""
        if goes_on(self._text[self._at :], stop, (*self.marks, *self.inner_marks)):
            self._at = len(self._text)
        self._over = True
        for _ in self._parser:
            pass
        if not self._calls:
            self._output += self._spaces
        return self._output

    @abstractmethod
    def _parse(self) -> ParserSteps:
        """Parses the answer to its end."""

    def _emit_content(self, text: str) -> None:
        """Returns text as content. Trailing space is held back: before a call it belongs to the call."""
        stripped = text.rstrip()
        if stripped:
            self._output += (*self._spaces, stripped)
            self._spaces.clear()
        if len(stripped) < len(text):
            self._spaces.append(text[len(stripped) :])

    def _content(self) -> Generator[None, None, str]:
        """Returns text as content up to the next mark. Consumes and returns the mark, or "" at the end of the text."""
        mark = yield from self._until(self.marks, self._emit_content)
        self._raw = [mark]
        return mark

    def _until(self, marks: tuple[str, ...], emit: Callable[[str], None]) -> Generator[None, None, str]:
        """Passes text to `emit` as it arrives, up to the first of `marks`. Consumes and returns the mark, or "" at the end of the text."""
        pattern = re.compile("|".join(map(re.escape, marks)))
        while not (match := pattern.search(self._text, self._at)):
            end = self._safe_end(marks)
            emit(self._text[self._at : end])
            self._at = end
            if self._over:
                return ""
            yield
        emit(self._text[self._at : match.start()])
        self._at = match.end()
        return match[0]

    def _marked_calls(self, call: Callable[[], ParserSteps], ends: tuple[str, ...]) -> ParserSteps:
        """Parses the answer to its end. `call` parses a call after its mark; one of the marks `ends` that follows no call is content."""
        after_call = False
        while mark := (yield from self._content()):
            if mark not in ends:
                before = self._calls
                yield from self._attempt(call())
                after_call = self._calls > before
            else:
                if not after_call:
                    self._emit_content(mark)
                after_call = False

    def _safe_end(self, marks: tuple[str, ...]) -> int:
        """Returns the end of the text, before any suffix that may begin a mark."""
        return len(self._text) if self._over else safe_end(self._text, marks, self._at)

    def _peek(self) -> Generator[None, None, str]:
        """Returns the next character without consuming it; "" at the end."""
        while self._at == len(self._text) and not self._over:
            yield
        return self._text[self._at : self._at + 1]

    def _take(self) -> None:
        """Consumes the peeked character."""
        self._raw.append(self._text[self._at])
        self._at += 1

    def _skip_space(self, also: str = "") -> Generator[None, None, str]:
        """Skips space and the characters `also`; returns the next character without consuming it, "" at the end."""
        while (character := (yield from self._peek())) and (character.isspace() or character in also):
            self._take()
        return character

    def _expect(self, expected: str) -> ParserSteps:
        if (yield from self._skip_space()) != expected:
            raise InvalidCall
        self._take()

    def _expect_one_of(self, *expected: str) -> Generator[None, None, str]:
        """Consumes and returns one of the texts `expected`. A part of one stays in the text while it may go on: `end` may drop it."""
        while not (found := next((one for one in expected if self._text.startswith(one, self._at)), "")):
            rest = self._text[self._at :]
            if self._over:
                self._raw.append(rest)
                self._at = len(self._text)
            if self._over or not any(one.startswith(rest) for one in expected):
                raise InvalidCall
            yield
        self._raw.append(found)
        self._at += len(found)
        return found

    def _text_until(self, mark: str, limit: int | None = None) -> Generator[None, None, str]:
        """Consumes text up to and including `mark`; returns the text before it, of at most `limit` characters."""
        end = self._text.find(mark, self._at)
        parts: list[str] = []
        while end < 0:
            safe = self._safe_end((mark,))
            parts.append(self._text[self._at : safe])
            self._raw.append(parts[-1])
            self._at = safe
            if self._over or (limit is not None and sum(map(len, parts)) > limit):
                raise InvalidCall
            yield
            end = self._text.find(mark, self._at)
        parts.append(self._text[self._at : end])
        self._raw.append(parts[-1] + mark)
        self._at = end + len(mark)
        text = "".join(parts)
        if limit is not None and len(text) > limit:
            raise InvalidCall
        return text

    def _value(self, first: str) -> Generator[None, None, str]:
        """Consumes and returns a JSON value that begins with one of the characters `first` (any if "")."""
        character = yield from self._skip_space()
        if not character or (first and character not in first):
            raise InvalidCall
        value, parts = JsonText(), []
        while not value.done:
            start = self._at
            read, self._at = value.read(self._text, self._at)
            parts.append(read)
            self._raw.append(self._text[start : self._at])
            if value.invalid or not (value.done or (yield from self._peek())):
                raise InvalidCall
        return "".join(parts)

    def _attempt(self, steps: ParserSteps) -> ParserSteps:
        """Parses one or more calls. From an invalid position on, the text is content, or the rest of the call's arguments."""
        try:
            yield from steps
        except InvalidCall:
            if self._in_arguments:
                yield from self._rest_of_arguments()
            else:
                self._emit_content("".join(self._raw))
        self._in_arguments = False
        self._raw.clear()

    def _rest_of_arguments(self) -> ParserSteps:
        """Returns the text up to the end mark as arguments."""
        mark = yield from self._until((self.end_mark,), self._emit_arguments)
        self._at -= len(mark)

    def _objects(self) -> ParserSteps:
        """Parses one call's object, or a list of them."""
        if (yield from self._skip_space()) != "[":
            yield from self._object()
            return
        self._take()
        yield from self._rest_of_objects()

    def _rest_of_objects(self) -> ParserSteps:
        """Parses a list of calls' objects after its bracket."""
        yield from self._object()
        while (yield from self._skip_space()) != "]":
            yield from self._expect(",")
            yield from self._object()
        self._take()

    def _object(self) -> ParserSteps:
        """Parses one call as an object with its name and arguments in any order."""
        name: str | None = None
        arguments: str | None = None
        yield from self._expect("{")
        while True:
            key = json.loads((yield from self._value('"')))
            if key not in _CALL_KEYS:
                raise InvalidCall
            yield from self._expect(":")
            if key in _NAMES:
                name = json.loads((yield from self._value('"')))
                if name not in self._names:
                    raise InvalidCall
            elif key not in _ARGUMENTS:
                yield from self._value("")
            elif name is not None and (yield from self._skip_space()) == "{":
                yield from self._arguments(name)
                break
            else:
                arguments = _object_text((yield from self._value('{"n')))
            if (yield from self._skip_space()) != ",":
                if name is None or (yield from self._peek()) != "}":
                    raise InvalidCall
                self._begin_call(name)
                self._emit_arguments(arguments or "{}")
                break
            self._take()
        # Ignore further keys of the call. Some models omit the last brace.
        while (yield from self._skip_space()) == ",":
            self._take()
            yield from self._value('"')
            yield from self._expect(":")
            yield from self._value("")
        if (yield from self._peek()) == "}":
            self._take()
        self._raw.clear()

    def _arguments(self, name: str) -> ParserSteps:
        """Parses a call's arguments, returning them as they arrive."""
        self._begin_call(name)
        self._in_arguments = True
        value = JsonText()
        while not value.done and (yield from self._peek()):
            read, self._at = value.read(self._text, self._at)
            self._emit_arguments(read)
            if value.invalid:
                raise InvalidCall
        self._in_arguments = False

    def _whole_call(self, name: str, arguments: str) -> None:
        """Returns a call whose arguments are complete; raises InvalidCall if no response could carry them."""
        if _SURROGATE.search(arguments):
            raise InvalidCall
        self._begin_call(name)
        self._emit_arguments(arguments)

    def _begin_call(self, name: str) -> None:
        """Returns the first increment of a call."""
        self._spaces.clear()
        self._raw.clear()
        self._output.append(ToolCallDelta(self._calls, id=self._new_id(), name=name))
        self._calls += 1

    def _emit_arguments(self, text: str) -> None:
        """Returns the next arguments of the newest call."""
        if text:
            self._output.append(ToolCallDelta(self._calls - 1, text))


def safe_end(text: str, marks: Sequence[str], begin: int = 0) -> int:
    """Returns the end of the text, before any suffix from `begin` on that may begin a mark."""
    longest = max(map(len, marks)) - 1
    for start in range(max(begin, len(text) - longest), len(text)):
        if any(mark.startswith(text[start:]) for mark in marks):
            return start
    return len(text)


def goes_on(held: str, stop: str, marks: Sequence[str]) -> bool:
    """Whether the text `held`, if any, begins one of `marks`, and the stop string after it continues this mark."""
    return bool(held and stop) and any(
        mark.startswith(held) and (mark.startswith(held + stop) or (held + stop).startswith(mark)) for mark in marks
    )


def _object_text(text: str) -> str:
    """Returns the text of an object that may be null or empty, or encoded as a string as some models write it; raises InvalidCall."""
    if text.startswith('"'):
        text = json.loads(text).strip() or "{}"
        value = JsonText()
        if value.read(text, 0)[1] < len(text) or not value.done:
            raise InvalidCall
        if _SURROGATE.search(text):  # not valid Unicode, so no response could carry it
            raise InvalidCall
    if text == "null":
        return "{}"
    if not text.startswith("{"):
        raise InvalidCall
    return text
