"""Measures and limits what the matchers of one grammar take: processor time, and memory for the lexer's states."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from chairlift.errors import InvalidRequest
from chairlift.grammar.allowance import Allowance

CALL_SECONDS = 0.5e-3
"""Processor time that a call of a matcher may take at no charge. Masks of usual schemas and regular expressions take 0.01 to 0.3 ms."""
GRAMMAR_SECONDS, TENANT_SECONDS = 0.1, 0.2
"""What the calls of one grammar, and of all grammars of a tenant, may take beyond that, for example while a lexer has few states."""
MAX_GROWTH = 16 * 2**20
"""Bytes by which a grammar may grow before the next request gets a newly compiled one."""

P = ParamSpec("P")
T = TypeVar("T")


class GrammarUsage:
    """What the matchers of one grammar have taken. It draws on an allowance of its own and on that of its tenant.

    `check` ends the sequences of a grammar whose allowance is used up. When the tenant's allowance is used up, it ends the sequences of all
    its grammars that take more than the usual, and when that is far overdrawn, of all its grammars. In a period of T seconds the grammars
    of a tenant therefore take at most `CALL_SECONDS` a call + 2 `TENANT_SECONDS` + `REFILL` T, and one call more.
    """

    def __init__(
        self,
        tenant: Allowance,
        lexer_bytes: int = 0,
        *,
        clock: Callable[[], float] = time.monotonic,
        processor_clock: Callable[[], float] = time.thread_time,
    ) -> None:
        """`lexer_bytes` are those of the compiled grammar's lexer."""
        self._own, self._tenant = Allowance(GRAMMAR_SECONDS, clock), tenant
        self._processor_clock = processor_clock
        self.spent = 0.0
        """Processor time of all calls, in seconds."""
        self.lexer_bytes = self._compiled_bytes = lexer_bytes
        """Bytes of the lexer's states after the last mask."""
        self.broken = False
        """Whether the lexer, which all matchers share, has failed."""

    @property
    def growth(self) -> int:
        """Bytes of the states that the lexer has got since the grammar was compiled."""
        return self.lexer_bytes - self._compiled_bytes

    @property
    def worn(self) -> bool:
        """Whether the next request should get a newly compiled grammar."""
        return self.broken or self.growth > MAX_GROWTH

    @property
    def exhausted(self) -> bool:
        """Whether the grammar may take no more time now."""
        if self._own.left <= 0:
            return True
        return self._tenant.left <= 0 and (self._tenant.far_overdrawn or not self._own.full)

    def check(self) -> None:
        """Raises InvalidRequest with the code `grammar_timeout` if the grammar is exhausted."""
        if not self.exhausted:
            return
        message = (
            f"the grammar takes much more processor time than {1000 * CALL_SECONDS:g} ms a token: make it simpler, "
            "with fewer ways to read the same text"
        )
        if self._own.left > 0:
            seconds = max(1, math.ceil(self._tenant.refilled_in))
            message = f"your grammars together have taken more processor time than they may: try again in {seconds} s"
        raise InvalidRequest(message, code="grammar_timeout")

    def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Calls a function of a matcher and charges its processor time."""
        began = self._processor_clock()
        result = function(*args, **kwargs)
        self.spend(self._processor_clock() - began)
        return result

    def spend(self, seconds: float) -> None:
        """Charges the processor time of one call."""
        self.spent += seconds
        self._own.spend(seconds - CALL_SECONDS)
        self._tenant.spend(seconds - CALL_SECONDS)
