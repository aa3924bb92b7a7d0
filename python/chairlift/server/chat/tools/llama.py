"""The syntax of Llama 3: `{"name": "f", "parameters": {}}` as the whole answer, or behind `<|python_tag|>`; `;` between several."""

from __future__ import annotations

from chairlift.grammar.source import ToolCallFormat
from chairlift.server.chat.tools.syntax import Broken, Steps, Syntax

TAG = "<|python_tag|>"


class Llama(Syntax):
    """Without the tag only an answer that begins with a call is one."""

    marks = (TAG,)
    end_mark = TAG

    @classmethod
    def form(cls, template: str) -> ToolCallFormat:
        """Without the tag, which is for functions that Meta has built in."""
        return ToolCallFormat(between='", "parameters": ', separator="; ")

    def _parse(self) -> Steps:
        if (yield from self._skip_space()) == "{":
            yield from self._attempt(self._several())
        else:
            self._say("".join(self._raw))
        while (yield from self._content()):
            yield from self._attempt(self._several())

    def _several(self) -> Steps:
        yield from self._object()
        while (yield from self._skip_space(";")) == "{":
            yield from self._object()
        if (yield from self._peek()):
            raise Broken
