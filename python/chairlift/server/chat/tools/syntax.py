"""What the syntaxes of tool calls have in common: text as it comes, and out of it content and calls."""

from __future__ import annotations

import json
import re
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Generator
from typing import ClassVar

from chairlift.grammar.source import ToolCallFormat
from chairlift.server.chat.tools.call import CallDelta
from chairlift.server.chat.tools.json_text import JsonText

Steps = Generator[None, None, None]
"""A part of a parser: it yields where it needs more text."""

_ARGUMENTS = ("arguments", "parameters")
_KEYS = frozenset((*_ARGUMENTS, "name", "id", "type"))
"""What a call's object may hold; any other is somebody's data, and no call."""
_SURROGATE = re.compile("[\ud800-\udfff]")


class Broken(Exception):
    """What began like a call is none, or does not go on as one."""


class Syntax(ABC):
    """A parser of one answer: takes its text in pieces, gives content and calls.

    The same text gives the same content and calls however it was cut, in time that is linear in its length. Nothing that may be the
    beginning of a call is given as content before it is known to be none. What looks like a call and is none (no JSON, a function
    that was not offered) is content, as it was written. A call is told as soon as its name is known and its arguments begin; should
    they turn out to be no JSON, they are told as the model wrote them, up to the end of the call.
    """

    marks: ClassVar[tuple[str, ...]]
    """What tells calls from content."""
    end_mark: ClassVar[str]
    """The one before which arguments end that are no JSON."""
    inner_marks: ClassVar[tuple[str, ...]] = ()
    """What stands within calls; some vocabularies have control tokens for it, as for the others."""

    def __init__(self, names: Collection[str], new_id: Callable[[], str] | None = None) -> None:
        """`names` are the functions on offer; `new_id` makes up what a call is called."""
        self._names = names
        self._new_id = new_id or self.new_id
        self._text = ""
        self._at = 0
        self._over = False
        self._news: list[str | CallDelta] = []
        self._spaces: list[str] = []
        self._raw: list[str] = []
        """What was read of a call that may turn out to be none."""
        self._calls = 0
        self._in_arguments = False
        self._parser = self._parse()

    @classmethod
    @abstractmethod
    def form(cls, template: str) -> ToolCallFormat:
        """How a model with this chat template is made to write calls."""

    @staticmethod
    def new_id() -> str:
        """A call's id, in OpenAI's form."""
        return f"call_{secrets.token_hex(12)}"

    def push(self, text: str) -> list[str | CallDelta]:
        """Takes the next piece of text; gives what is new, in order: content as strings, and pieces of calls."""
        self._text, self._at = self._text[self._at :] + text, 0
        next(self._parser)
        news, self._news = self._news, []
        return news

    def end(self) -> list[str | CallDelta]:
        """The text has ended: gives what was held back."""
        self._over = True
        for _ in self._parser:
            pass
        if not self._calls:
            self._news += self._spaces
        return self._news

    @abstractmethod
    def _parse(self) -> Steps:
        """Reads the answer to its end."""

    def _say(self, text: str) -> None:
        """Gives content. Space at its end is held back: before a call it belongs to the call."""
        said = text.rstrip()
        if said:
            self._news += (*self._spaces, said)
            self._spaces.clear()
        if len(said) < len(text):
            self._spaces.append(text[len(said) :])

    def _content(self) -> Generator[None, None, str]:
        """Gives text as content up to the next mark, which is taken and returned; "" if the text ends first."""
        pattern = re.compile("|".join(map(re.escape, self.marks)))
        while not (found := pattern.search(self._text, self._at)):
            end = self._safe_end(self.marks)
            self._say(self._text[self._at : end])
            self._at = end
            if self._over:
                return ""
            yield
        self._say(self._text[self._at : found.start()])
        self._at = found.end()
        self._raw = [found[0]]
        return found[0]

    def _safe_end(self, marks: tuple[str, ...]) -> int:
        """Where the text ends, but for what may be the beginning of a mark."""
        if self._over:
            return len(self._text)
        longest = max(map(len, marks)) - 1
        for start in range(max(self._at, len(self._text) - longest), len(self._text)):
            if any(mark.startswith(self._text[start:]) for mark in marks):
                return start
        return len(self._text)

    def _peek(self) -> Generator[None, None, str]:
        """The next character, which is not taken; "" at the end."""
        while self._at == len(self._text) and not self._over:
            yield
        return self._text[self._at : self._at + 1]

    def _take(self) -> None:
        """Takes the character that was peeked at."""
        self._raw.append(self._text[self._at])
        self._at += 1

    def _skip_space(self, more: str = "") -> Generator[None, None, str]:
        """The next character that is no space (nor one of `more`), which is not taken; "" at the end."""
        while (character := (yield from self._peek())) and (character.isspace() or character in more):
            self._take()
        return character

    def _expect(self, wanted: str) -> Steps:
        if (yield from self._skip_space()) != wanted:
            raise Broken
        self._take()

    def _value(self, first: str) -> Generator[None, None, str]:
        """A JSON value that has to begin with one of the characters `first` (any if it is ""), whole."""
        character = yield from self._skip_space()
        if not character or (first and character not in first):
            raise Broken
        value, parts = JsonText(), []
        while not value.done:
            start = self._at
            read, self._at = value.read(self._text, self._at)
            parts.append(read)
            self._raw.append(self._text[start : self._at])
            if value.broken or not (value.done or (yield from self._peek())):
                raise Broken
        return "".join(parts)

    def _attempt(self, steps: Steps) -> Steps:
        """Reads a call, or several. From where it is none it is content, or what its arguments go on with."""
        try:
            yield from steps
        except Broken:
            if self._in_arguments:
                yield from self._rest_of_arguments()
            else:
                self._say("".join(self._raw))
        self._in_arguments = False
        self._raw.clear()

    def _rest_of_arguments(self) -> Steps:
        """Tells what follows as it is, up to the mark that ends it."""
        while (found := self._text.find(self.end_mark, self._at)) < 0:
            end = self._safe_end((self.end_mark,))
            self._argue(self._text[self._at : end])
            self._at = end
            if self._over:
                return
            yield
        self._argue(self._text[self._at : found])
        self._at = found

    def _objects(self) -> Steps:
        """One call's object, or a list of them."""
        if (yield from self._skip_space()) != "[":
            yield from self._object()
            return
        self._take()
        yield from self._object()
        while (yield from self._skip_space()) != "]":
            yield from self._expect(",")
            yield from self._object()
        self._take()

    def _object(self) -> Steps:
        """One call as an object that has its name and its arguments, in any order."""
        name: str | None = None
        arguments: str | None = None
        yield from self._expect("{")
        while True:
            key = json.loads((yield from self._value('"')))
            if key not in _KEYS:
                raise Broken
            yield from self._expect(":")
            if key == "name":
                name = json.loads((yield from self._value('"')))
                if name not in self._names:
                    raise Broken
            elif key not in _ARGUMENTS:
                yield from self._value("")
            elif name is not None and (yield from self._skip_space()) == "{":
                yield from self._arguments(name)
                break
            else:
                arguments = _object_text((yield from self._value('{"n')))
            if (yield from self._skip_space()) != ",":
                if name is None or (yield from self._peek()) != "}":
                    raise Broken
                self._tell(name)
                self._argue(arguments or "{}")
                break
            self._take()
        # What may follow in a call says nothing more, and some models forget its last brace.
        while (yield from self._skip_space()) == ",":
            self._take()
            yield from self._value('"')
            yield from self._expect(":")
            yield from self._value("")
        if (yield from self._peek()) == "}":
            self._take()
        self._raw.clear()

    def _arguments(self, name: str) -> Steps:
        """A call's arguments, told as they come."""
        self._tell(name)
        self._in_arguments = True
        value = JsonText()
        while not value.done and (yield from self._peek()):
            read, self._at = value.read(self._text, self._at)
            self._argue(read)
            if value.broken:
                raise Broken
        self._in_arguments = False

    def _tell(self, name: str) -> None:
        """Begins a call."""
        self._spaces.clear()
        self._raw.clear()
        self._news.append(CallDelta(self._calls, id=self._new_id(), name=name))
        self._calls += 1

    def _argue(self, text: str) -> None:
        """Goes on with the arguments of the call that was begun last."""
        if text:
            self._news.append(CallDelta(self._calls - 1, text))


def _object_text(text: str) -> str:
    """The text of an object that is one, is in a string, as some models have it, or is null."""
    if text.startswith('"'):
        text = json.loads(text).strip()
        value = JsonText()
        if value.read(text, 0)[1] < len(text) or not value.done:
            raise Broken
        if _SURROGATE.search(text):  # no Unicode text, and no answer could hold it
            raise Broken
    if text == "null":
        return "{}"
    if not text.startswith("{"):
        raise Broken
    return text
