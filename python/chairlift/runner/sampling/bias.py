"""Logit bias, allowed tokens, bad words and `min_tokens`."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from chairlift.errors import InvalidRequest
from chairlift.runner.executor import Logits
from chairlift.sampling import SamplingParams

NEVER = float("-inf")


class Bias:
    """The logit changes of one sequence that depend on its parameters and its output.

    The cost per step depends on the number of entries, not on the vocabulary. `params.bad_words` must be token ids. Bad words are only
    matched in the output, as in vLLM.
    """

    @staticmethod
    def needed(params: SamplingParams) -> bool:
        """Whether a request needs a Bias."""
        return bool(params.logit_bias or params.allowed_token_ids or params.bad_words or params.min_tokens)

    def __init__(self, params: SamplingParams, output: Sequence[int], ends: Sequence[int]) -> None:
        """`output` is the sequence's output so far, `ends` are the token ids at which it stops."""
        bias = params.logit_bias or {}
        self.tokens = np.array(list(bias), dtype=np.int64)
        self.values = np.array(list(bias.values()), dtype=np.float32)
        allowed = params.allowed_token_ids
        self.allowed = None if allowed is None else np.unique(np.array(allowed, dtype=np.int64))
        words = [[int(token) for token in word] for word in params.bad_words]
        self._singles = np.array([word[0] for word in words if len(word) == 1], dtype=np.int64)
        # Longer words, by the token before their last: the bytes of all tokens but the last, and that.
        self._words: dict[int, list[tuple[bytes, int]]] = {}
        for word in words:
            if len(word) > 1:
                self._words.setdefault(word[-2], []).append((array("i", word[:-1]).tobytes(), word[-1]))
        self._longest = max(map(len, words), default=0)
        self._output = array("i", output)
        self._ends = np.array(list(ends), dtype=np.int64)
        self._min_tokens_left = max(0, params.min_tokens - len(output))

    def add(self, token: int) -> None:
        """Adds the next token of the output."""
        self._output.append(token)
        self._min_tokens_left = max(0, self._min_tokens_left - 1)

    def banned(self) -> np.ndarray:
        """The tokens that are not allowed next."""
        words = self._last_tokens_of_words()
        return np.concatenate((words, self._ends)) if self._min_tokens_left else words

    def _last_tokens_of_words(self) -> np.ndarray:
        """The tokens that would complete a bad word."""
        if not self._words or not self._output:
            return self._singles
        recent = self._output[-self._longest :].tobytes()
        lasts = [last for start, last in self._words.get(self._output[-1], ()) if recent.endswith(start)]
        return np.concatenate((self._singles, np.array(lasts, dtype=np.int64)))

    def refusal(self, octets: np.ndarray | None) -> InvalidRequest | None:
        """Why no token can come next; None if one can. `octets` are those of `matcher.Masks` that the grammar allows, if there is one."""
        left, banned = self.allowed, self.banned()
        if octets is not None:
            by_grammar = np.flatnonzero(np.unpackbits(octets, bitorder="little"))
            if not by_grammar.size:
                return None  # the grammar has failed by itself
            left = by_grammar if left is None else np.intersect1d(left, by_grammar)
        if left is None or not np.isin(left, banned).all():
            return None  # without the two, the other fields name too few tokens to exclude all
        fields = {
            "allowed_token_ids": self.allowed is not None,
            "bad_words": np.isin(left, self._last_tokens_of_words()).any(),
            "min_tokens": self._min_tokens_left and np.isin(left, self._ends).any(),
            "the structured output": octets is not None,
        }
        names = " and ".join(name for name, excludes in fields.items() if excludes)
        return InvalidRequest(f"{names} together leave no token that could come next: leave one of them out, or let it allow more")


def apply(logits: Logits, biased: Sequence[tuple[int, Bias]], send: Callable[[np.ndarray], Any]) -> None:
    """Applies biases to the rows of logits [N, vocabulary] that have one. `send` brings an array to where the logits are."""

    def places(tokens: list[tuple[int, np.ndarray]]) -> tuple[Any, Any]:
        rows = np.repeat([i for i, _ in tokens], [len(ids) for _, ids in tokens])
        return send(rows), send(np.concatenate([ids for _, ids in tokens]))

    if only := [(i, bias.allowed) for i, bias in biased if bias.allowed is not None]:
        at = places(only)
        kept = logits[at]
        logits[send(np.array([i for i, _ in only]))] = NEVER
        logits[at] = kept
    if added := [(i, bias) for i, bias in biased if len(bias.tokens)]:
        values = send(np.concatenate([bias.values for _, bias in added]))
        logits[places([(i, bias.tokens) for i, bias in added])] += values
    if banned := [(i, tokens) for i, bias in biased if len(tokens := bias.banned())]:
        logits[places(banned)] = NEVER
