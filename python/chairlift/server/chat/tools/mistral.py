"""The syntaxes of Mistral: `[TOOL_CALLS][{"name": "f", "arguments": {}}]` and, newer, `[TOOL_CALLS]f[ARGS]{}`, once for each call."""

from __future__ import annotations

import secrets
import string

from chairlift.grammar.source import ToolCallFormat
from chairlift.server.chat.tools.syntax import Broken, Steps, Syntax

MARK, CALL_ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"

_LONGEST = 256
"""Characters that a name may have, with an id and the marks around it."""


class Mistral(Syntax):
    """The model's own id of a call, which may be between name and arguments, is not kept."""

    marks = (MARK,)
    end_mark = MARK
    inner_marks = (CALL_ID, ARGS)

    @classmethod
    def form(cls, template: str) -> ToolCallFormat:
        """The newer one where the template knows it."""
        if ARGS in template:
            return ToolCallFormat(MARK, before="", between=ARGS, after="", separator=MARK)
        return ToolCallFormat(f"{MARK}[", separator=", ", end="]")

    @staticmethod
    def new_id() -> str:
        """A call's id: Mistral's templates refuse others than of nine letters and digits."""
        return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))

    def _parse(self) -> Steps:
        while (yield from self._content()):
            yield from self._attempt(self._behind_mark())

    def _behind_mark(self) -> Steps:
        if (yield from self._skip_space()) in ("[", "{"):
            yield from self._objects()
            return
        head = ""
        while not head.endswith(ARGS) and (character := (yield from self._peek())) != "{":
            if not character or len(head) == _LONGEST:
                raise Broken
            head += character
            self._take()
        name = head.removesuffix(ARGS).partition(CALL_ID)[0].strip()
        if name not in self._names or (yield from self._skip_space()) != "{":
            raise Broken
        yield from self._arguments(name)
