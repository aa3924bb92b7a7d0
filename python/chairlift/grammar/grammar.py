"""A compiled grammar, and the position of a sequence in it."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeAlias

from chairlift.errors import InvalidRequest
from chairlift.grammar.budget import BudgetMatcher
from chairlift.grammar.usage import GrammarUsage
from chairlift.sampling import ReasoningBudget

if TYPE_CHECKING:
    import numpy as np

    from chairlift._core import GrammarMatcher, GrammarVocabulary

Charge: TypeAlias = Callable[[float], None]

LIMIT_REACHED = re.compile(r"(lexer|parser) error: (too many|current row has)", re.IGNORECASE)
"""The beginning of llguidance's messages about its limits."""
TOO_COMPLEX = "grammar_too_complex"
"""The error code of a grammar that reaches one."""
NOT_ALLOWED = re.compile(r"Parser Error: token|parser stopped")
"""The beginning of its messages about a token that the grammar does not allow."""
SHARED = ("lexer error", "panic")
"""The beginnings of messages about failures of the lexer, which all matchers of a grammar share."""


class Grammar:
    """A compiled grammar, which took `size` bytes when it was compiled. Each sequence has its own matcher."""

    def __init__(self, template: GrammarMatcher, size: int, vocabulary: GrammarVocabulary, usage: GrammarUsage) -> None:
        self._template, self._vocabulary = template, vocabulary
        self._size = size
        self.usage = usage

    @property
    def size(self) -> int:
        """Bytes, with the lexer's states that were added since."""
        return self._size + self.usage.growth

    def matcher(self, budget: ReasoningBudget | None = None, charge: Charge | None = None) -> Matcher | BudgetMatcher:
        """Returns a matcher at the start of the output. All matchers of a grammar share its lexer.

        `charge` gets the processor time of each token's mask, in seconds.
        """
        matcher = Matcher(self._template, self._template.copy(), self.usage, charge)
        return matcher if budget is None else BudgetMatcher(matcher, budget, self._vocabulary.piece)


class Matcher:
    """The position of one sequence in a grammar: a `chairlift.runner.sampling.matcher.Matcher`.

    `mask` and `accept` raise InvalidRequest if the grammar has become too complex, has taken too much time, or cannot go on.
    """

    def __init__(self, template: GrammarMatcher, matcher: GrammarMatcher, usage: GrammarUsage, charge: Charge | None = None) -> None:
        self._template, self._matcher, self._usage, self._charge = template, matcher, usage, charge

    def mask(self, bitmask: np.ndarray, index: int) -> None:
        """Sets the bits of the tokens that the grammar allows next. After the grammar's end only end-of-sequence tokens are allowed.

        `bitmask` is int32 [rows, ceil(vocabulary / 32)].
        """
        self._usage.check()
        before = self._usage.spent
        memoryview(bitmask[index]).cast("B")[:] = self._usage.call(self._matcher.mask)
        self._usage.lexer_bytes = self._matcher.lexer_bytes
        if self._charge is not None:
            self._charge(self._usage.spent - before)
        check(self._matcher, self._usage)

    def accept(self, token: int) -> None:
        """Advances by one token. Raises ValueError if the grammar does not allow it."""
        self._usage.check()
        self._usage.call(self._matcher.consume, token)
        if self._matcher.error is not None:
            # If the lexer reaches a limit within the token, the message only says that the token is not allowed. A second matcher tells.
            second = self._template.copy()
            self._usage.call(second.consume, token)
            if second.error is not None and LIMIT_REACHED.match(second.error):
                check(second, self._usage)
        check(self._matcher, self._usage)

    def forced(self) -> list[int]:
        """The tokens that must come next, one after the other; none if there is a choice, or no time."""
        return [] if self._usage.exhausted else self._usage.call(self._matcher.forced)

    def allows(self, tokens: Sequence[int]) -> bool:
        """Whether these tokens may come next, one after the other."""
        return self._usage.call(self._matcher.allows, tokens)

    def copy(self) -> Matcher:
        """Another matcher at the same position."""
        return Matcher(self._template, self._matcher.copy(), self._usage, self._charge)


def check(matcher: GrammarMatcher, usage: GrammarUsage) -> None:
    """Raises ValueError if a matcher has got a token that the grammar does not allow, and InvalidRequest if it has failed otherwise.

    The code is `grammar_too_complex` if it has reached a limit; it has none if the grammar cannot go on.
    """
    if (error := matcher.error) is None:
        return
    message = error.removesuffix("<non-verbose/>").strip()
    usage.broken = usage.broken or message.startswith(SHARED)
    if LIMIT_REACHED.match(message):
        raise InvalidRequest(f"the grammar is too complex for this answer ({message:.200}): make it simpler", code=TOO_COMPLEX)
    if NOT_ALLOWED.match(message):
        raise ValueError(message)
    raise InvalidRequest(f"the grammar has no way to go on with this answer ({message:.200}): write it in another way")
