"""Tokens and their log-probabilities as clients read them: OpenAI's form for completions, vLLM's for prompts."""

from __future__ import annotations

from codecs import getincrementaldecoder
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from chairlift.errors import InvalidRequest
from chairlift.outputs import TokenLogprobs
from chairlift.sampling import SamplingParams

if TYPE_CHECKING:
    from chairlift.tokenizer import Tokenizer

MAX_SCORED = 1 << 18
"""Log-probabilities of prompts' tokens in one answer: those of 128 k tokens and the likeliest beside each."""

LOWEST = -9999.0
"""What stands for a probability of 0: JSON has no infinity. vLLM's number."""


def spelled(tokenizer: Tokenizer, token: int) -> str:
    """A token's text; `bytes:\\\\xe2\\\\x98` for one that is part of a character, as OpenAI spells it."""
    piece = tokenizer.piece(token)
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)


def finite(logprob: float) -> float:
    """A log-probability that JSON can say."""
    return max(logprob, LOWEST)


class Columns:
    """The `logprobs` of a completion's choice: four lists with one entry a token."""

    def __init__(self, tokenizer: Tokenizer, likeliest: int, as_ids: bool) -> None:
        """So many of the `likeliest` are shown for each; `as_ids` writes tokens as `token_id:7`, which no two share."""
        self._tokenizer = tokenizer
        self._likeliest = likeliest
        self._as_ids = as_ids

    def json(self, tokens: Sequence[int], found: Sequence[TokenLogprobs | None], offsets: Sequence[int]) -> dict[str, list[Any]]:
        """The columns for `tokens`, of which one where nothing was `found`, as for a prompt's first, is null."""
        return {
            "tokens": [self._name(token) for token in tokens],
            "token_logprobs": [None if one is None else finite(one.logprob) for one in found],
            "top_logprobs": [None if one is None else self._top(one) for one in found],
            "text_offset": list(offsets),
        }

    def _top(self, one: TokenLogprobs) -> dict[str, float]:
        """The likeliest and the token itself, which need not be among them."""
        top = {self._name(token): finite(logprob) for token, logprob in one.top[: self._likeliest]}
        top.setdefault(self._name(one.token), finite(one.logprob))
        return top

    def _name(self, token: int) -> str:
        return f"token_id:{token}" if self._as_ids else spelled(self._tokenizer, token)


def check_scored(prompts: list[list[int]], params: SamplingParams) -> None:
    """Raises InvalidRequest if the prompts' log-probabilities would be too many for one answer."""
    if params.prompt_logprobs is None:
        return
    wanted = sum(map(len, prompts)) * params.n * (params.prompt_logprobs + 1)
    if wanted > MAX_SCORED:
        message = f"the prompts' log-probabilities would be {wanted} numbers, at most {MAX_SCORED} are given at once: ask for fewer"
        raise InvalidRequest(f"{message}, or for fewer answers, or send the prompts one by one", param="logprobs")


def of_prompt(tokenizer: Tokenizer, found: Sequence[TokenLogprobs | None], likeliest: int) -> list[dict[str, Any] | None]:
    """vLLM's `prompt_logprobs`: for each token so many of the likeliest and itself, by id."""
    return [None if one is None else _ranked(tokenizer, one, likeliest) for one in found]


def _ranked(tokenizer: Tokenizer, one: TokenLogprobs, likeliest: int) -> dict[str, Any]:
    ranks = {token: (logprob, rank) for rank, (token, logprob) in enumerate(one.top[:likeliest], 1)}
    ranks[one.token] = one.logprob, one.rank
    return {
        str(token): {"logprob": finite(logprob), "rank": rank, "decoded_token": spelled(tokenizer, token)}
        for token, (logprob, rank) in ranks.items()
    }


def places(tokenizer: Tokenizer, tokens: Sequence[int], text: str) -> list[int]:
    """Where in `text` each of its `tokens` begins, in characters; one that is not shown there takes no room."""
    decoder = getincrementaldecoder("utf-8")("replace")
    at, found = 0, []
    strips = tokenizer.strips_first_space
    for token in tokens:
        found.append(at)
        piece = decoder.decode(tokenizer.piece(token))
        if strips and piece.startswith(" "):
            piece, strips = piece[1:], False
        if text.startswith(piece, at):
            at += len(piece)
    return found


def of_chat(tokenizer: Tokenizer, found: Sequence[TokenLogprobs], likeliest: int, as_ids: bool) -> list[dict[str, Any]]:
    """OpenAI's `logprobs.content` of a chat: each token with its bytes, and so many of the likeliest beside it."""

    def entry(token: int, logprob: float) -> dict[str, Any]:
        text = f"token_id:{token}" if as_ids else spelled(tokenizer, token)
        return {"token": text, "logprob": finite(logprob), "bytes": list(tokenizer.piece(token))}

    return [entry(one.token, one.logprob) | {"top_logprobs": [entry(*other) for other in one.top[:likeliest]]} for one in found]
