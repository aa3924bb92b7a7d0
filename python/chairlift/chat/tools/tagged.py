"""Formats in which each argument of a call stands between tags, as plain text: those of Qwen, Seed-OSS, MiniMax, DeepSeek V3.2 and GLM."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Callable, Generator
from typing import ClassVar

from chairlift.chat.tools.argument_types import argument_json
from chairlift.chat.tools.hermes import HERMES_CLOSE, HERMES_OPEN, Hermes
from chairlift.chat.tools.parser import MAX_HEAD, InvalidCall, ParserSteps

QWEN_PARAMETER = "<parameter="
SEED_OPEN, SEED_CLOSE = "<seed:tool_call>", "</seed:tool_call>"
MINIMAX_OPEN, MINIMAX_CLOSE = "<minimax:tool_call>", "</minimax:tool_call>"
DSML = "\uff5cDSML\uff5c"
GLM_KEY = "<arg_key>"


class Tagged(Hermes):
    """Calls whose arguments are plain text between tags.

    Text is returned as it arrives, other arguments when they are complete. Calls as JSON are accepted too. A forced call is one, because a
    grammar for text between tags cannot be made of a JSON schema.
    """

    needs_types = True
    key_tags: ClassVar[tuple[str, str]]
    """The tags around an argument's name."""
    value_tags: ClassVar[tuple[str, ...]] = ()
    """The tags of which one stands before its value, if any does."""
    text_tag: ClassVar[str] = ""
    """The one of them before a text, whatever the schema says."""
    value_ends: ClassVar[tuple[str, ...]]
    """The tag after its value, with and without the line break that belongs to it."""
    ends: ClassVar[tuple[str, ...]]
    """The tags of which each ends a call."""
    forgetful: ClassVar[bool] = False
    """Whether models forget the tag after a value, before the next tag on a line of its own."""

    @abstractmethod
    def _call_name(self) -> Generator[None, None, str]:
        """Consumes the beginning of a call; returns the function's name."""

    def _call(self) -> ParserSteps:
        if self._raw == [self.marks[0]] and (yield from self._skip_space()) in ("{", "["):
            yield from super()._call()
            return
        name = yield from self._call_name()
        if name not in self._names or not (tag := (yield from self._next_tag())):
            raise InvalidCall
        self._begin_call(name)
        self._emit_arguments("{")
        try:
            separator = ""
            while tag == self.key_tags[0]:
                if not (yield from self._argument(name, separator)):
                    return
                separator, tag = ", ", (yield from self._next_tag())
            if not tag:
                raise InvalidCall
            self._emit_arguments("}")
            yield from self._skip_space()
        except InvalidCall:
            if not (yield from self._peek()):  # the answer breaks off within the arguments, which stay incomplete
                self._raw.clear()
                return
            self._emit_arguments("}")
            raise

    def _next_tag(self) -> Generator[None, None, str]:
        """Consumes and returns the tag of an argument's name or one that ends the call; returns "" before other text."""
        yield from self._skip_space()
        try:
            return (yield from self._expect_one_of(self.key_tags[0], *self.ends))
        except InvalidCall:
            return ""

    def _argument(self, name: str, separator: str) -> Generator[None, None, bool]:
        """Consumes one argument and returns it after `separator`. Returns False if the text ends within it."""
        key = (yield from self._text_until(self.key_tags[1])).strip()
        types = self._types.get(name, {}).get(key, frozenset())
        if self.value_tags:
            yield from self._skip_space()
            if (yield from self._expect_one_of(*self.value_tags)) == self.text_tag:
                types = frozenset({"string"})
        elif self.value_ends[0][0] == "\n" and (yield from self._peek()) == "\n":
            self._take()
        self._emit_arguments(f"{separator}{json.dumps(key, ensure_ascii=False)}: ")
        self._raw.clear()
        if types == {"string"}:
            self._emit_arguments('"')
            ended = yield from self._text_of_value(name, lambda piece: self._emit_arguments(json.dumps(piece, ensure_ascii=False)[1:-1]))
            self._emit_arguments('"' if ended else "")
            return ended
        pieces: list[str] = []
        ended = yield from self._text_of_value(name, pieces.append)
        self._emit_arguments(argument_json("".join(pieces), types) if ended else "")
        return ended

    def _text_of_value(self, name: str, emit: Callable[[str], None]) -> Generator[None, None, bool]:
        """Passes a value of a call of `name` to `emit`, and consumes the tag after it. Returns False if the text ends within it."""
        further = tuple(f"\n{tag}" for tag in (self.key_tags[0], *self.ends)) if self.forgetful else ()
        while mark := (yield from self._until((*self.value_ends, *further), emit)):
            if mark in self.value_ends:
                return True
            self._raw = [mark]
            try:
                yield from self._expect_after_value(name, mark)
            except InvalidCall:
                emit(mark)
                self._unread(len(mark))
            else:
                self._unread(1)
                return True
        return False

    def _expect_after_value(self, name: str, mark: str) -> ParserSteps:
        """Consumes what shows that `mark` is not part of a value: the name of one of the function's arguments, or the end of the call."""
        if mark[1:] == self.key_tags[0]:
            yield from self._expect_one_of(*(f"{key}{self.key_tags[1]}" for key in self._types.get(name, ())))
            return
        if mark[1:] != self.end_mark and (yield from self._skip_space()):
            yield from self._expect_one_of(self.end_mark)
        if (yield from self._skip_space()):
            yield from self._expect_one_of(self.marks[0])

    def _unread(self, start: int) -> None:
        """Returns what was consumed since `_raw` began, from its character `start` on, to the text."""
        back = "".join(self._raw)[start:]
        self._raw.clear()
        if len(back) <= self._at:
            self._at -= len(back)
        else:  # it came in several pieces
            self._text, self._at = back + self._text[self._at :], 0


class Qwen(Tagged):
    """`<tool_call><function=f><parameter=city>Bern</parameter></function></tool_call>`: the format of Qwen3-Coder, Qwen3.5 and Nemotron 3.

    The tags are on lines of their own. The outer ones may be missing.
    """

    marks: ClassVar[tuple[str, ...]] = (HERMES_OPEN, "<function=", HERMES_CLOSE)
    inner_marks: ClassVar[tuple[str, ...]] = (QWEN_PARAMETER, "</parameter>", "</function>")
    key_tags = (QWEN_PARAMETER, ">")
    name_end: ClassVar[str] = ">"
    """What follows the function's name."""
    value_ends: ClassVar[tuple[str, ...]] = ("\n</parameter>", "</parameter>")
    ends: ClassVar[tuple[str, ...]] = ("</function>", HERMES_CLOSE)
    forgetful = True

    def _call_name(self) -> Generator[None, None, str]:
        function = self.marks[1]
        if self._raw[0] != function:
            yield from self._skip_space()
            yield from self._expect_one_of(function)
        return (yield from self._text_until(self.name_end, MAX_HEAD)).strip()


class Seed(Qwen):
    """`<seed:tool_call><function=f><parameter=city>Bern</parameter></function></seed:tool_call>`: the format of Seed-OSS.

    Line breaks at both ends of a value belong to it.
    """

    marks = (SEED_OPEN, "<function=", SEED_CLOSE)
    value_ends = ("</parameter>",)
    ends = ("</function>", SEED_CLOSE)
    forgetful = False


class MiniMax(Qwen):
    """`<minimax:tool_call><invoke name="f"><parameter name="city">Bern</parameter></invoke></minimax:tool_call>`: MiniMax-M2's format."""

    marks = (MINIMAX_OPEN, '<invoke name="', MINIMAX_CLOSE)
    inner_marks = ()
    key_tags = ('<parameter name="', '">')
    name_end = '">'
    value_ends = ("</parameter>",)
    ends = ("</invoke>", MINIMAX_CLOSE)
    forgetful = False


class DeepSeek32(Qwen):
    """`<invoke name="f"><parameter name="city" string="true">Bern</parameter></invoke>`: the format of DeepSeek V3.2.

    Each of these tags, and of those around all calls, has `\uff5cDSML\uff5c` before its name. `string="false"` stands before JSON.
    """

    marks = (f"<{DSML}function_calls>", f'<{DSML}invoke name="', f"</{DSML}function_calls>")
    inner_marks = ()
    key_tags = (f'<{DSML}parameter name="', '" string="')
    name_end = '">'
    value_tags = ('true">', 'false">')
    text_tag = value_tags[0]
    value_ends = (f"</{DSML}parameter>",)
    ends = (f"</{DSML}invoke>", marks[2])
    forgetful = False


class DeepSeek4(DeepSeek32):
    """The same between `tool_calls` instead of `function_calls`: the format of DeepSeek V4."""

    marks = (f"<{DSML}tool_calls>", f'<{DSML}invoke name="', f"</{DSML}tool_calls>")
    ends = (f"</{DSML}invoke>", marks[2])


class Glm(Tagged):
    """`<tool_call>f<arg_key>city</arg_key><arg_value>Bern</arg_value></tool_call>`: the format of GLM 4.5 to 4.7.

    GLM 4.5 and 4.6 write line breaks between the tags.
    """

    inner_marks = (GLM_KEY, "</arg_key>", "<arg_value>", "</arg_value>")
    key_tags = (GLM_KEY, "</arg_key>")
    value_tags = ("<arg_value>",)
    value_ends = ("</arg_value>",)
    ends = (HERMES_CLOSE,)

    def _call_name(self) -> Generator[None, None, str]:
        name = ""
        while (character := (yield from self._peek())) not in ("", "\n", "<"):
            if len(name) == MAX_HEAD:
                raise InvalidCall
            name += character
            self._take()
        return name.strip()
