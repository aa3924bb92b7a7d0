"""Grammar matchers: they decide which tokens may come next."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, Self

import numpy as np

from chairlift.errors import InvalidRequest

log = logging.getLogger("chairlift")


class Matcher(Protocol):
    """The position of one sequence in a grammar.

    The sampler gets a new matcher each time a sequence is assigned a slot, and lets it accept the output so far. It then calls `mask`
    before each draw and `accept` after it, on the engine's thread. An exception ends only this sequence; the client gets the message of an
    InvalidRequest.
    """

    def mask(self, bitmask: np.ndarray, index: int) -> None:
        """Sets the bits of allowed tokens in row `index` of int32 [rows, ceil(vocabulary / 32)], which is zero.

        Token t is bit t % 32 of word t // 32. A row without any bit ends the sequence with an error.
        """

    def accept(self, token: int) -> None:
        """Advances by the sampled token, which may be the end of the sequence. Raises if the grammar does not allow it."""

    def forced(self) -> Sequence[int]:
        """The tokens that must come next, one after the other. Called only with speculative decoding."""

    def copy(self) -> Self:
        """Another matcher at the same position. Called only for drafted tokens."""


@dataclass(slots=True)
class MatchedRows:
    """The consecutive rows of a step that sample for one sequence with a grammar: one, and one for each drafted token."""

    first: int
    matcher: Matcher
    draft: list[int]
    """The drafted tokens: row `first` + i + 1 follows token i."""
    refusal: InvalidRequest | None = None
    """The matcher's reason to end the sequence, once it has raised one."""

    @property
    def rows(self) -> range:
        """The rows."""
        return range(self.first, self.first + 1 + len(self.draft))

    def fail(self, error: Exception) -> None:
        """Keeps or logs the error of the matcher."""
        if isinstance(error, InvalidRequest):
            self.refusal = error
        else:
            log.error("grammar error: the request ends with an error", exc_info=error)


def matched_rows(matchers: Mapping[int, Matcher], slots: np.ndarray, inputs: np.ndarray) -> list[MatchedRows]:
    """The rows that matchers (by slot) decide. `slots` [N] are the rows' slots, `inputs` [N] the tokens that the rows follow."""
    matched: list[MatchedRows] = []
    before = None
    for i, slot in enumerate(slots.tolist()):
        if slot in matchers:
            if slot == before:
                matched[-1].draft.append(int(inputs[i]))
            else:
                matched.append(MatchedRows(i, matchers[slot], []))
        before = slot
    return matched


class Masks(NamedTuple):
    """The masks of a step."""

    matched: Sequence[MatchedRows] = ()
    """Their rows."""
    octets: np.ndarray = np.zeros((0, 0), dtype=np.uint8)
    """The tokens that the matchers allow, uint8 [rows, bytes]: token t is bit t % 8 of byte t // 8."""

    def octets_of(self, row: int) -> np.ndarray | None:
        """The tokens that are allowed in a row of the step; None if no matcher decides it."""
        rows = [i for one in self.matched for i in one.rows]
        return self.octets[rows.index(row)] if row in rows else None


def masks(matched: Sequence[MatchedRows], vocabulary: int) -> Masks:
    """Computes the masks of these rows.

    Rows after a drafted token that the grammar does not allow have no bits. Their samples are not used.
    """
    if not matched:
        return Masks()
    bitmask = np.zeros((sum(len(one.rows) for one in matched), -(-vocabulary // 32)), dtype=np.int32)
    index = 0
    for one in matched:
        try:
            one.matcher.mask(bitmask, index)
        except Exception as error:
            one.fail(error)
            bitmask[index] = 0
        else:
            _allow_drafted(one, bitmask[index:])
        index += len(one.rows)
    return Masks(matched, bitmask.astype("<i4", copy=False).view(np.uint8))


def _allow_drafted(matched: MatchedRows, bitmask: np.ndarray) -> None:
    """Sets the rows after each drafted token up to the first that the grammar does not allow. Row 0 of `bitmask` has those before them."""
    if not matched.draft:
        return
    matcher = matched.matcher.copy()
    for index, token in enumerate(matched.draft):
        if not int(bitmask[index, token // 32]) >> (token % 32) & 1:
            return  # a draft may be anything
        try:
            matcher.accept(token)
            matcher.mask(bitmask, index + 1)
        except Exception as error:  # the row fails if the model chooses this token
            matched.fail(error)
            bitmask[index + 1] = 0
            return


def accept(matched: Sequence[MatchedRows], chosen: np.ndarray, failed: int) -> dict[int, InvalidRequest]:
    """Advances each matcher by its tokens in `chosen` [N], up to the first that is not the drafted one.

    If a matcher raises, its token becomes `failed`. Returns the reasons of failed rows, if their matchers gave one.
    """
    refusals: dict[int, InvalidRequest] = {}
    for one in matched:
        for i, drafted in zip(one.rows, [*one.draft, None], strict=True):
            if chosen[i] != failed:
                try:
                    one.matcher.accept(int(chosen[i]))
                except Exception as error:
                    one.fail(error)
                    chosen[i] = failed
            if chosen[i] == failed and one.refusal is not None:
                refusals[i] = one.refusal
            if chosen[i] != drafted:
                break
    return refusals
