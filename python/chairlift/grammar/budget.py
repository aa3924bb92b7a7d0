"""Limits the number of reasoning tokens in one output."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

    from chairlift.grammar.grammar import Matcher
    from chairlift.sampling import ReasoningBudget


class BudgetMatcher:
    """A matcher that ends the reasoning once its budget is spent: the end mark's tokens are then the only ones allowed.

    If the model has written the mark's first tokens itself, the others follow. The mark begins as soon as the grammar allows it, which is
    after a complete character.
    """

    def __init__(self, inner: Matcher, budget: ReasoningBudget, piece: Callable[[int], bytes]) -> None:
        """`inner` is the matcher of the output's grammar, `piece` returns the bytes of a token."""
        self._inner = inner
        self._budget = budget
        self._piece = piece
        pieces = [piece(token) for token in budget.end_tokens]
        self._beginnings = [b"".join(pieces[:count]) for count in range(len(pieces))]
        """The texts of the end mark's first tokens."""
        self._start = budget.start.encode()
        """Text that begins the reasoning, if it has not begun."""
        self._reasoning = not budget.start
        self._over = False
        """Whether no reasoning can begin any more."""
        self._spent = 0
        self._text = b""
        """The output's last bytes, which may contain a part of a mark."""
        self._forced: Sequence[int] = ()
        """The end mark's remaining tokens, once the first was sampled."""

    def mask(self, bitmask: np.ndarray, index: int) -> None:
        """Sets the bits of the tokens that are allowed next, as in `Matcher.mask`."""
        if forced := self._next():
            # The words are signed.
            bitmask[index].view("uint32")[forced[0] // 32] |= 1 << forced[0] % 32
        else:
            self._inner.mask(bitmask, index)

    def accept(self, token: int) -> None:
        """Advances by one token. Raises ValueError if it is not allowed."""
        forced = self._next()
        if forced and token != forced[0]:
            raise ValueError(f"token {token} is not the next one of the end mark")
        self._inner.accept(token)
        self._forced = forced[1:]
        if not self._over:
            self._read(self._piece(token))

    def forced(self) -> Sequence[int]:
        """The tokens that must come next, one after the other; none if there is a choice."""
        return self._next() or self._inner.forced()

    def copy(self) -> BudgetMatcher:
        """Another matcher at the same position."""
        other = BudgetMatcher(self._inner.copy(), self._budget, self._piece)
        other._start, other._reasoning, other._over = self._start, self._reasoning, self._over
        other._spent, other._text, other._forced = self._spent, self._text, self._forced
        return other

    def _next(self) -> Sequence[int]:
        """The tokens that the budget forces next."""
        if self._forced:
            return self._forced
        if not self._reasoning or self._spent < self._budget.tokens:
            return ()
        written = max(count for count, text in enumerate(self._beginnings) if self._text.endswith(text))
        tokens = self._budget.end_tokens[written:]
        return tokens if self._inner.allows(tokens) else ()

    def _read(self, piece: bytes) -> None:
        """Finds the marks."""
        self._text += piece
        begun = self._reasoning
        if not begun:
            self._text = text = self._text.lstrip()
            if not text.startswith(self._start):
                self._over = not self._start.startswith(text)
                return
            self._reasoning, self._text = True, text.removeprefix(self._start)
        end = self._budget.end.encode()
        if (at := self._text.find(end)) < 0:
            self._spent += begun
            self._text = self._text[1 - len(end) :]
            return
        self._reasoning, self._text = False, self._text[at + len(end) :]
        self._start, self._over = self._budget.again.encode(), not self._budget.again
