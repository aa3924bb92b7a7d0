"""The formats in which models write tool calls, with a parser for each."""

from __future__ import annotations

import secrets
import string

from chairlift.grammar.source import ToolCallFormat
from chairlift.server.chat.tools.parser import InvalidCall, ParserSteps, ToolParser

HERMES_OPEN, HERMES_CLOSE = "<tool_call>", "</tool_call>"
LLAMA_TAG = "<|python_tag|>"
MISTRAL_MARK, MISTRAL_CALL_ID, MISTRAL_ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"

_MAX_MISTRAL_HEAD = 256
"""Maximum characters of a call's name with its id and the marks around it, in Mistral's format."""


class Hermes(ToolParser):
    """`<tool_call>{"name": "f", "arguments": {}}</tool_call>`, once for each call: the format of Hermes, Qwen and many others.

    Also accepts a list of calls between two marks, as SmolLM2 writes it, and a missing or doubled last brace.
    """

    marks = (HERMES_OPEN, HERMES_CLOSE)
    end_mark = HERMES_CLOSE

    @classmethod
    def call_format(cls, template: str) -> ToolCallFormat:
        """The format of Qwen's templates, with line breaks."""
        return ToolCallFormat(f"{HERMES_OPEN}\n", separator=f"\n{HERMES_CLOSE}\n{HERMES_OPEN}\n", end=f"\n{HERMES_CLOSE}")

    def _parse(self) -> ParserSteps:
        after_call = False
        while mark := (yield from self._content()):
            if mark == HERMES_OPEN:
                before = self._calls
                yield from self._attempt(self._call())
                after_call = self._calls > before
            else:
                if not after_call:
                    self._emit_content(mark)
                after_call = False

    def _call(self) -> ParserSteps:
        yield from self._objects()
        yield from self._skip_space("}")


class Llama(ToolParser):
    """`{"name": "f", "parameters": {}}` as the whole answer or after `<|python_tag|>`, with `;` between calls: the format of Llama 3.

    Without the tag, only an answer that begins with a call contains calls.
    """

    marks = (LLAMA_TAG,)
    end_mark = LLAMA_TAG

    @classmethod
    def call_format(cls, template: str) -> ToolCallFormat:
        """Omits the tag, which Llama uses for its built-in functions."""
        return ToolCallFormat(between='", "parameters": ', separator="; ")

    def _parse(self) -> ParserSteps:
        if (yield from self._skip_space()) == "{":
            yield from self._attempt(self._call_list())
        else:
            self._emit_content("".join(self._raw))
        while (yield from self._content()):
            yield from self._attempt(self._call_list())

    def _call_list(self) -> ParserSteps:
        yield from self._object()
        while (yield from self._skip_space(";")) == "{":
            yield from self._object()
        if (yield from self._peek()):
            raise InvalidCall


class Mistral(ToolParser):
    """`[TOOL_CALLS][{"name": "f", "arguments": {}}]` or `[TOOL_CALLS]f[ARGS]{}`, once for each call: Mistral's older and newer format.

    The model's own call id between name and arguments is dropped.
    """

    marks = (MISTRAL_MARK,)
    end_mark = MISTRAL_MARK
    inner_marks = (MISTRAL_CALL_ID, MISTRAL_ARGS)

    @classmethod
    def call_format(cls, template: str) -> ToolCallFormat:
        """The newer format if the template uses it."""
        if MISTRAL_ARGS in template:
            return ToolCallFormat(MISTRAL_MARK, before="", between=MISTRAL_ARGS, after="", separator=MISTRAL_MARK)
        return ToolCallFormat(f"{MISTRAL_MARK}[", separator=", ", end="]")

    @staticmethod
    def new_id() -> str:
        """Returns a call id. Mistral's templates accept only ids of nine letters and digits."""
        return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))

    def _parse(self) -> ParserSteps:
        while (yield from self._content()):
            yield from self._attempt(self._after_mark())

    def _after_mark(self) -> ParserSteps:
        if (yield from self._skip_space()) in ("[", "{"):
            yield from self._objects()
            return
        head = ""
        while not head.endswith(MISTRAL_ARGS) and (character := (yield from self._peek())) != "{":
            if not character or len(head) == _MAX_MISTRAL_HEAD:
                raise InvalidCall
            head += character
            self._take()
        name = head.removesuffix(MISTRAL_ARGS).partition(MISTRAL_CALL_ID)[0].strip()
        if name not in self._names or (yield from self._skip_space()) != "{":
            raise InvalidCall
        yield from self._arguments(name)


TOOL_PARSERS: dict[str, type[ToolParser]] = {"hermes": Hermes, "llama": Llama, "mistral": Mistral}

_TEMPLATE_MARKS = {"mistral": ("[TOOL_CALLS]",), "hermes": ("<tool_call>",), "llama": ("<|python_tag|>", "ipython")}
"""Texts in a chat template that identify its format."""


def parser_for_template(template: str) -> type[ToolParser]:
    """Returns the parser for a model with this chat template; Hermes if the template does not tell."""
    return next((TOOL_PARSERS[name] for name, marks in _TEMPLATE_MARKS.items() if any(mark in template for mark in marks)), Hermes)
