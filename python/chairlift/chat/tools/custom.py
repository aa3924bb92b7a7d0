"""Custom tools, whose input is free text: the model calls them as functions with one argument."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from chairlift.chat.tools.json_text import parsed_object
from chairlift.chat.tools.parser import ToolCallDelta

INPUT = "input"
"""Name of the argument."""

PARAMETERS = {"type": "object", "properties": {INPUT: {"type": "string"}}, "required": [INPUT], "additionalProperties": False}


class CustomCalls:
    """Converts the arguments of calls of custom tools to their input. An input is returned as a whole when its call ends."""

    def __init__(self, names: Collection[str]) -> None:
        """`names` are the custom tools; calls of other tools are not changed."""
        self._names = names
        self._call: ToolCallDelta | None = None
        """The current call, if it is one of a custom tool."""
        self._arguments: list[str] = []

    def push(self, part: ToolCallDelta) -> list[ToolCallDelta]:
        """Takes the next increment of a call; returns increments."""
        if part.name is None:
            if self._call is None:
                return [part]
            self._arguments.append(part.arguments)
            return []
        ended = self.end()
        if part.name not in self._names:
            return [*ended, part]
        self._call, self._arguments = replace(part, custom=True, arguments=""), [part.arguments]
        return [*ended, self._call]

    def end(self) -> list[ToolCallDelta]:
        """Ends the current call; returns its input."""
        if self._call is None:
            return []
        call, self._call = self._call, None
        return [ToolCallDelta(call.index, _input("".join(self._arguments)), custom=True)]


def _input(arguments: str) -> str:
    """Returns the input in a call's arguments, as far as they are valid JSON; else the arguments."""
    value = parsed_object(arguments).get(INPUT)
    return value if isinstance(value, str) else arguments
