"""Formats in which each argument of a call stands between tags, as plain text: Qwen's and GLM's."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Generator
from typing import ClassVar

from chairlift.chat.tools.argument_types import argument_json
from chairlift.chat.tools.hermes import HERMES_CLOSE, HERMES_OPEN, Hermes
from chairlift.chat.tools.parser import MAX_HEAD, InvalidCall, ParserSteps

QWEN_FUNCTION, QWEN_PARAMETER = "<function=", "<parameter="
GLM_KEY = "<arg_key>"


class Tagged(Hermes):
    """Calls whose arguments are plain text between tags.

    Text is returned as it arrives, other arguments when they are complete. Calls as JSON are accepted too. A forced call is one, because a
    grammar for text between tags cannot be made of a JSON schema.
    """

    needs_types = True
    key_tags: ClassVar[tuple[str, str]]
    """The tags around an argument's name."""
    value_tag: ClassVar[str]
    """The tag before its value, "" for none."""
    value_ends: ClassVar[tuple[str, ...]]
    """The tag after its value, with and without the line break that belongs to it."""
    ends: ClassVar[tuple[str, ...]]
    """The tags of which each ends a call."""

    @abstractmethod
    def _call_name(self) -> Generator[None, None, str]:
        """Consumes the beginning of a call; returns the function's name."""

    def _call(self) -> ParserSteps:
        if self._raw == [HERMES_OPEN] and (yield from self._skip_space()) in ("{", "["):
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
        if self.value_tag:
            yield from self._skip_space()
            yield from self._expect_one_of(self.value_tag)
        elif (yield from self._peek()) == "\n":
            self._take()
        self._emit_arguments(f"{separator}{json.dumps(key, ensure_ascii=False)}: ")
        self._raw.clear()
        types = self._types.get(name, {}).get(key, frozenset())
        if types == {"string"}:
            self._emit_arguments('"')
            ended = yield from self._until(self.value_ends, lambda piece: self._emit_arguments(json.dumps(piece, ensure_ascii=False)[1:-1]))
            self._emit_arguments('"' if ended else "")
            return bool(ended)
        pieces: list[str] = []
        ended = yield from self._until(self.value_ends, pieces.append)
        self._emit_arguments(argument_json("".join(pieces), types) if ended else "")
        return bool(ended)


class Qwen(Tagged):
    """`<tool_call><function=f><parameter=city>Bern</parameter></function></tool_call>`: the format of Qwen3-Coder, Qwen3.5 and Nemotron 3.

    The tags are on lines of their own. The outer ones may be missing.
    """

    marks: ClassVar[tuple[str, ...]] = (HERMES_OPEN, QWEN_FUNCTION, HERMES_CLOSE)
    inner_marks = (QWEN_PARAMETER, "</parameter>", "</function>")
    key_tags = (QWEN_PARAMETER, ">")
    value_tag = ""
    value_ends = ("\n</parameter>", "</parameter>")
    ends = ("</function>", HERMES_CLOSE)

    def _call_name(self) -> Generator[None, None, str]:
        if self._raw[0] != QWEN_FUNCTION:
            yield from self._expect_one_of(QWEN_FUNCTION)
        return (yield from self._text_until(">", MAX_HEAD)).strip()


class Glm(Tagged):
    """`<tool_call>f<arg_key>city</arg_key><arg_value>Bern</arg_value></tool_call>`: the format of GLM 4.5 to 4.7.

    GLM 4.5 and 4.6 write line breaks between the tags.
    """

    inner_marks = (GLM_KEY, "</arg_key>", "<arg_value>", "</arg_value>")
    key_tags = (GLM_KEY, "</arg_key>")
    value_tag = "<arg_value>"
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
