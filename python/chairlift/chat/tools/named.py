"""Formats in which a function's plain name stands before its arguments: those of Functionary and GLM-4-0414."""

from __future__ import annotations

import json
from typing import Any, ClassVar

from chairlift.chat.tools.parser import InvalidCall, ParserSteps, ToolParser
from chairlift.grammar.source import ToolCallFormat

FUNCTIONARY_OPEN, _FUNCTIONARY_CLOSE = "<function=", "</function>"
_RECIPIENT, _ALL = ">>>", "all\n"
_GLM4_TURN = "<|assistant|>"


class Named(ToolParser):
    """A function's name, `name_end`, and the arguments as JSON, at the beginning of the answer and after each of the marks."""

    name_end: ClassVar[str] = "\n"

    def _parse(self) -> ParserSteps:
        yield from self._attempt(self._call())
        while (yield from self._content()):
            yield from self._attempt(self._call())

    def _call(self) -> ParserSteps:
        yield from self._named_call((yield from self._expect_one_of(*self._heads())))

    def _heads(self) -> list[str]:
        return [f"{name}{self.name_end}" for name in self._names]

    def _named_call(self, head: str) -> ParserSteps:
        if (yield from self._skip_space()) != "{":
            raise InvalidCall
        yield from self._arguments(head.removesuffix(self.name_end))


class Functionary31(Named):
    """`<function=f>{"city": "Bern"}</function>`: the format of Functionary 3.1, and of Llama 3.1 for functions described in a prompt."""

    marks = (FUNCTIONARY_OPEN, _FUNCTIONARY_CLOSE)
    name_end = ">"

    @classmethod
    def call_format(cls, template: str) -> ToolCallFormat:
        """One call after another."""
        return ToolCallFormat(FUNCTIONARY_OPEN, "", ">", "", f"{_FUNCTIONARY_CLOSE}{FUNCTIONARY_OPEN}", _FUNCTIONARY_CLOSE)

    def _parse(self) -> ParserSteps:
        yield from self._marked_calls(self._call, (_FUNCTIONARY_CLOSE,))


class Functionary32(Named):
    """`>>>f`, a line break and `{"city": "Bern"}`: the format of Functionary 3.2, which writes content after `>>>all` and a line break.

    The prompt ends with the first `>>>`.
    """

    marks = (_RECIPIENT,)
    wraps_content = True

    @classmethod
    def call_format(cls, template: str) -> ToolCallFormat:
        """Calls without the first mark."""
        return ToolCallFormat("", "", "\n", "", _RECIPIENT, content=_ALL)

    def _call(self) -> ParserSteps:
        head = yield from self._expect_one_of(_ALL, *self._heads())
        if head != _ALL:
            yield from self._named_call(head)


class Glm4(Named):
    """`f`, a line break and `{"city": "Bern"}` as the whole answer: the format of GLM-4-0414.

    Further calls follow after `<|assistant|>`.
    """

    marks = (_GLM4_TURN,)

    @classmethod
    def call_format(cls, template: str) -> ToolCallFormat:
        """Calls without a mark before the first."""
        return ToolCallFormat("", "", "\n", "", _GLM4_TURN)

    @staticmethod
    def history(conversation: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Makes each call a message whose `metadata` is the function's name, and results of tools observations."""
        turns: list[dict[str, Any]] = []
        for message in conversation:
            turn = dict(message)
            calls = [call["function"] for call in turn.pop("tool_calls", ())]
            if turn["role"] == "tool":
                turn["role"] = "observation"
            if turn["content"] or not calls:
                turns.append(turn)
            for call in calls:
                arguments = call["arguments"]
                written = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
                turns.append({"role": "assistant", "metadata": call["name"], "content": written})
        return turns

    def _call(self) -> ParserSteps:
        yield from self._skip_space()
        yield from super()._call()
