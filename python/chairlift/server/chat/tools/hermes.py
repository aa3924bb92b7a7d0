"""The syntax of Hermes, Qwen and many others: `<tool_call>{"name": "f", "arguments": {}}</tool_call>`, once for each call."""

from __future__ import annotations

from chairlift.grammar.source import ToolCallFormat
from chairlift.server.chat.tools.syntax import Steps, Syntax

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class Hermes(Syntax):
    """A list of calls between two marks, as SmolLM2 writes it, is read too, and a missing or doubled last brace forgiven."""

    marks = (OPEN, CLOSE)
    end_mark = CLOSE

    @classmethod
    def form(cls, template: str) -> ToolCallFormat:
        """As Qwen's templates write it, with line breaks."""
        return ToolCallFormat(f"{OPEN}\n", separator=f"\n{CLOSE}\n{OPEN}\n", end=f"\n{CLOSE}")

    def _parse(self) -> Steps:
        told = False
        while mark := (yield from self._content()):
            if mark == OPEN:
                before = self._calls
                yield from self._attempt(self._within())
                told = self._calls > before
            else:
                if not told:
                    self._say(mark)
                told = False

    def _within(self) -> Steps:
        yield from self._objects()
        yield from self._skip_space("}")
