"""Hermes' format of tool calls, which many models use, and others in part."""

from __future__ import annotations

from typing import ClassVar

from chairlift.chat.tools.parser import ParserSteps, ToolParser
from chairlift.grammar.source import ToolCallFormat

HERMES_OPEN, HERMES_CLOSE = "<tool_call>", "</tool_call>"


class Hermes(ToolParser):
    """`<tool_call>{"name": "f", "arguments": {}}</tool_call>`, once for each call: the format of Hermes, Qwen and many others.

    Also accepts a list of calls between two marks, as SmolLM2 writes it, and a missing or doubled last brace.
    """

    marks: ClassVar[tuple[str, ...]] = (HERMES_OPEN, HERMES_CLOSE)
    form: ClassVar[ToolCallFormat | None] = None
    """How a model writes calls, if not as Qwen's templates do."""

    @classmethod
    def call_format(cls, template: str) -> ToolCallFormat:
        """That of Qwen's templates, with line breaks, unless the class has its own."""
        begin, end = f"{cls.marks[0]}\n", f"\n{cls.end_mark}"
        return cls.form or ToolCallFormat(begin, separator=f"{end}\n{begin}", end=end)

    def _parse(self) -> ParserSteps:
        yield from self._marked_calls(self._call, (self.end_mark,))

    def _call(self) -> ParserSteps:
        yield from self._objects()
        yield from self._skip_space("}")
