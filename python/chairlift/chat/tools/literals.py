"""Formats in which models write arguments in another syntax than JSON: Gemma's and Python's."""

from __future__ import annotations

import ast
import json
from collections.abc import Generator
from typing import Any, ClassVar

from chairlift.chat.tools.argument_types import PYTHON_WORDS
from chairlift.chat.tools.parser import InvalidCall, ParserSteps, ToolParser
from chairlift.grammar.source import ToolCallFormat

GEMMA_OPEN = ("<|tool_call>", "<start_function_call>")
_GEMMA_CLOSE = ("<tool_call|>", "<end_function_call>")
_GEMMA_QUOTES = ('<|"|>', "<escape>")
PYTHONIC_OPEN = "<|tool_call_start|>"
PYTHONIC_MARKS = (PYTHONIC_OPEN, "<|tool_list_start|>")
PYTHONIC_LIST = "List of tools: "
"""Texts in the chat templates of models that write calls between marks. LFM2's show only the list of tools, some of them without marks."""
_PYTHONIC_CLOSE = "<|tool_call_end|>"
OLMO_OPEN, _OLMO_CLOSE = "<function_calls>", "</function_calls>"
_LINE_BREAKS = {"\n": "\\n", "\r": "\\r"}
"""Line breaks in strings, where Python's syntax has none."""

_MAX_NAME = 128
_MAX_DEPTH = 32
"""Maximum nesting of arguments."""


class Gemma(ToolParser):
    """`<|tool_call>call:f{city:<|"|>Bern<|"|>,days:3}<tool_call|>`: the format of Gemma 4, and of FunctionGemma with other marks.

    A call is returned when it is complete. JSON is accepted as arguments too.
    """

    marks = (*GEMMA_OPEN, *_GEMMA_CLOSE)
    end_mark = _GEMMA_CLOSE[0]
    inner_marks = _GEMMA_QUOTES

    @classmethod
    def call_format(cls, template: str) -> ToolCallFormat:
        """Calls with JSON as arguments, because a grammar for Gemma's own syntax cannot be made of a JSON schema."""
        begin, end = next(pair for pair in zip(GEMMA_OPEN, _GEMMA_CLOSE, strict=True) if pair[0] in template or pair[0] == GEMMA_OPEN[1])
        return ToolCallFormat(begin, "call:", "", "", f"{end}{begin}", end)

    def _parse(self) -> ParserSteps:
        yield from self._marked_calls(self._call, _GEMMA_CLOSE)

    def _call(self) -> ParserSteps:
        yield from self._skip_space()
        yield from self._expect_one_of("call:")
        name = ""
        while (character := (yield from self._peek())) != "{":
            if not character or len(name) == _MAX_NAME:
                raise InvalidCall
            name += character
            self._take()
        if name.strip() not in self._names:
            raise InvalidCall
        arguments = yield from self._object_value(0)
        self._whole_call(name.strip(), _json(arguments))

    def _object_value(self, depth: int) -> Generator[None, None, dict[str, Any]]:
        if depth == _MAX_DEPTH:
            raise InvalidCall
        yield from self._expect("{")
        value: dict[str, Any] = {}
        while (yield from self._skip_space(",")) != "}":
            key = yield from self._key()
            yield from self._expect(":")
            value[key] = yield from self._any_value(depth + 1)
        self._take()
        return value

    def _key(self) -> Generator[None, None, str]:
        match (yield from self._skip_space()):
            case '"':
                return str(json.loads((yield from self._value('"'))))
            case "<":
                return (yield from self._quoted())
        return (yield from self._bare(":"))

    def _any_value(self, depth: int) -> Generator[None, None, Any]:
        match (yield from self._skip_space()):
            case "{":
                return (yield from self._object_value(depth))
            case "[":
                return (yield from self._list_value(depth))
            case '"':
                return json.loads((yield from self._value('"')))
            case "<":
                return (yield from self._quoted())
        text = yield from self._bare(",]}")
        try:
            return json.loads(PYTHON_WORDS.get(text, text))
        except ValueError:
            return text

    def _list_value(self, depth: int) -> Generator[None, None, list[Any]]:
        if depth == _MAX_DEPTH:
            raise InvalidCall
        self._take()
        value: list[Any] = []
        while (yield from self._skip_space(",")) != "]":
            value.append((yield from self._any_value(depth + 1)))
        self._take()
        return value

    def _quoted(self) -> Generator[None, None, str]:
        quote = yield from self._expect_one_of(*_GEMMA_QUOTES)
        return (yield from self._text_until(quote))

    def _bare(self, ends: str) -> Generator[None, None, str]:
        """Consumes text without quotes up to one of the characters `ends`."""
        parts: list[str] = []
        while (character := (yield from self._peek())) not in ends or not character:
            if not character or character in "<{[":
                raise InvalidCall
            parts.append(character)
            self._take()
        return "".join(parts).strip()


class Pythonic(ToolParser):
    """`[f(city="Bern", days=3), g()]`, as the whole answer or between marks: the format of Llama 3.2 and 4, ToolACE and LFM2.

    Calls are returned when the list is complete. Without marks, only an answer that begins with a call contains calls. LFM2 writes JSON if
    a prompt asks for it.
    """

    marks: ClassVar[tuple[str, ...]] = (PYTHONIC_OPEN, _PYTHONIC_CLOSE, "<|python_start|>", "<|python_end|>")
    end_mark = _PYTHONIC_CLOSE

    @classmethod
    def call_format(cls, template: str) -> ToolCallFormat:
        """Calls with JSON as an unpacked dictionary, which needs no grammar of Python's literals."""
        marked = any(text in template for text in (*PYTHONIC_MARKS, PYTHONIC_LIST))
        begin, end = (PYTHONIC_OPEN, _PYTHONIC_CLOSE) if marked else ("", "")
        return ToolCallFormat(f"{begin}[", "", "(**", ")", ", ", f"]{end}")

    def _parse(self) -> ParserSteps:
        if (yield from self._skip_space()) == "[":
            yield from self._attempt(self._call_list())
        else:
            self._emit_content("".join(self._raw))
        after_call = self._calls > 0
        while mark := (yield from self._content()):
            before = self._calls
            if mark in (PYTHONIC_OPEN, "<|python_start|>"):
                yield from self._skip_space()
                yield from self._attempt(self._call_list())
            elif not after_call:
                self._emit_content(mark)
            after_call = self._calls > before

    def _call_list(self) -> ParserSteps:
        yield from self._expect("[")
        if (yield from self._skip_space()) == "{":
            yield from self._rest_of_objects()
            return
        calls = [(yield from self._python_call())]
        while (yield from self._skip_space(",")) != "]":
            calls.append((yield from self._python_call()))
        self._take()
        for name, arguments in calls:
            self._whole_call(name, arguments)

    def _python_call(self) -> Generator[None, None, tuple[str, str]]:
        """Consumes one call; returns its name and its arguments as JSON."""
        name = ""
        while (character := (yield from self._peek())) != "(":
            if not (character.isidentifier() or character.isdigit() or character in ("-", ".", ":", "/")) or len(name) == _MAX_NAME:
                raise InvalidCall
            name += character
            self._take()
        if name not in self._names:
            raise InvalidCall
        return name, _python_arguments("".join((yield from self._brackets())))

    def _brackets(self) -> Generator[None, None, list[str]]:
        """Consumes a bracket and what follows, up to the one that closes it. Escapes line breaks in strings, where Python has none."""
        parts: list[str] = []
        depth, quote, escaped = 0, "", False
        while depth or not parts:
            if not (character := (yield from self._peek())):
                raise InvalidCall
            self._take()
            if escaped:
                escaped = False
            elif quote:
                escaped = character == "\\"
                quote = "" if character == quote else quote
                character = _LINE_BREAKS.get(character, character)
            elif character in "\"'":
                quote = character
            else:
                depth += (character in "[({") - (character in "])}")
            parts.append(character)
        return parts


class Olmo(Pythonic):
    """`<function_calls>f(city="Bern", days=3)</function_calls>`, with each call on a line of its own: the format of OLMo 3."""

    marks = (OLMO_OPEN, _OLMO_CLOSE)

    @classmethod
    def call_format(cls, template: str) -> ToolCallFormat:
        """Calls with JSON as an unpacked dictionary, which needs no grammar of Python's literals."""
        return ToolCallFormat(OLMO_OPEN, "", "(**", ")", "\n", _OLMO_CLOSE)

    def _parse(self) -> ParserSteps:
        yield from self._marked_calls(self._lines, (_OLMO_CLOSE,))

    def _lines(self) -> ParserSteps:
        yield from self._skip_space()
        while True:
            self._whole_call(*(yield from self._python_call()))
            if (yield from self._skip_space()) in ("", "<"):
                return


def _python_arguments(brackets: str) -> str:
    """Returns as JSON the arguments of a call with these brackets, which are not evaluated; raises InvalidCall."""
    source = f"call{brackets}"
    try:
        call = ast.parse(source, mode="eval").body
        if not isinstance(call, ast.Call) or call.args:
            raise InvalidCall
        if len(call.keywords) == 1 and call.keywords[0].arg is None:
            arguments = json.loads(ast.get_source_segment(source, call.keywords[0].value) or "")
        else:
            arguments = {keyword.arg: _literal(keyword.value) for keyword in call.keywords}
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise InvalidCall from None
    if not isinstance(arguments, dict) or None in arguments:
        raise InvalidCall
    return _json(arguments)


def _json(arguments: dict[str, Any]) -> str:
    """Returns the arguments as JSON; raises InvalidCall for numbers that JSON cannot express."""
    try:
        return json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    except ValueError:
        raise InvalidCall from None


_JSON_NAMES = {"true": True, "false": False, "null": None}


def _literal(value: ast.expr) -> Any:
    """Returns the JSON value of a literal; raises InvalidCall for other expressions."""
    match value:
        case ast.Constant(value=str() | int() | float() | bool() | None as constant):
            return constant
        case ast.Name(id=name) if name in _JSON_NAMES:
            return _JSON_NAMES[name]
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)):
            return -number
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_literal(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            literals = [(None if key is None else _literal(key), _literal(inner)) for key, inner in zip(keys, values, strict=True)]
            if all(isinstance(key, str) for key, _ in literals):
                return dict(literals)
    raise InvalidCall
