"""Log-probabilities in responses: OpenAI's formats for completions and chats, vLLM's for prompts."""

from __future__ import annotations

import sys
from codecs import getincrementaldecoder
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from chairlift.errors import InvalidRequest
from chairlift.outputs import TokenLogprobs
from chairlift.sampling import SamplingParams

if TYPE_CHECKING:
    from chairlift.tokenizer import Tokenizer

MAX_LOGPROBS = 1 << 18
"""Maximum log-probabilities in one response, of prompts as of answers: 128 k tokens with one alternative each; some 20 MB of JSON."""

LOWEST = -9999.0
"""Stands for minus infinity, which JSON cannot express. vLLM's value."""


def token_text(tokenizer: Tokenizer, token: int) -> str:
    """Returns a token's text; `bytes:\\\\\\\\xe2\\\\\\x98` for a part of a character, as OpenAI writes it."""
    piece = tokenizer.piece(token)
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)


def json_logprob(logprob: float) -> float:
    """Bounds a log-probability for JSON."""
    return max(logprob, LOWEST)


class CompletionLogprobs:
    """Builds the `logprobs` of a completion's choice: four lists with one entry for each token."""

    def __init__(self, tokenizer: Tokenizer, num_top: int, as_ids: bool) -> None:
        """`num_top` alternatives are shown for each token; `as_ids` writes tokens as `token_id:7`, which is unique."""
        self._tokenizer = tokenizer
        self._num_top = num_top
        self._as_ids = as_ids

    def json(self, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs | None], offsets: Sequence[int]) -> dict[str, list[Any]]:
        """Returns the lists for `tokens`; a token without log-probabilities, as a prompt's first, gets null."""
        return {
            "tokens": [self._name(token) for token in tokens],
            "token_logprobs": [None if one is None else json_logprob(one.logprob) for one in logprobs],
            "top_logprobs": [None if one is None else self._top(one) for one in logprobs],
            "text_offset": list(offsets),
        }

    def _top(self, one: TokenLogprobs) -> dict[str, float]:
        """Returns the top tokens and the token itself, which may not be among them."""
        top = {self._name(token): json_logprob(logprob) for token, logprob in one.top[: self._num_top]}
        top.setdefault(self._name(one.token), json_logprob(one.logprob))
        return top

    def _name(self, token: int) -> str:
        return f"token_id:{token}" if self._as_ids else token_text(self._tokenizer, token)


def check_prompt_logprobs(prompts: list[list[int]], params: SamplingParams) -> None:
    """Raises InvalidRequest if the prompts' log-probabilities are too many for one response."""
    if params.prompt_logprobs is None:
        return
    count = sum(map(len, prompts)) * params.n * (params.prompt_logprobs + 1)
    if count > MAX_LOGPROBS:
        message = f"the prompts' log-probabilities would be {count} numbers, at most {MAX_LOGPROBS} are given at once: ask for fewer"
        raise InvalidRequest(f"{message}, or for fewer answers, or send the prompts one by one", param="logprobs")


def max_tokens_with_logprobs(params: SamplingParams, prompts: int) -> int:
    """Returns the most tokens that each answer may have in a response that is not streamed, for a number of `prompts`."""
    if params.logprobs is None:
        return sys.maxsize
    return max(1, MAX_LOGPROBS // (prompts * params.num_sequences * (params.logprobs + 1)))


def prompt_logprobs_json(tokenizer: Tokenizer, logprobs: Sequence[TokenLogprobs | None], num_top: int) -> Iterator[dict[str, Any] | None]:
    """Yields vLLM's `prompt_logprobs`: for each token the top `num_top` and the token itself, by id."""
    return (None if one is None else _ranked(tokenizer, one, num_top) for one in logprobs)


def _ranked(tokenizer: Tokenizer, one: TokenLogprobs, num_top: int) -> dict[str, Any]:
    ranks = {token: (logprob, rank) for rank, (token, logprob) in enumerate(one.top[:num_top], 1)}
    ranks[one.token] = one.logprob, one.rank
    return {
        str(token): {"logprob": json_logprob(logprob), "rank": rank, "decoded_token": token_text(tokenizer, token)}
        for token, (logprob, rank) in ranks.items()
    }


def text_offsets(tokenizer: Tokenizer, tokens: Sequence[int], text: str) -> list[int]:
    """Returns the offset in characters at which each of `tokens` begins in `text`; a token that is not shown there has no width."""
    decoder = getincrementaldecoder("utf-8")("replace")
    at, offsets = 0, []
    strips = tokenizer.strips_first_space
    for token in tokens:
        offsets.append(at)
        piece = decoder.decode(tokenizer.piece(token))
        if strips and piece.startswith(" "):
            piece, strips = piece[1:], False
        if text.startswith(piece, at):
            at += len(piece)
    return offsets


def chat_logprobs_json(tokenizer: Tokenizer, logprobs: Iterable[TokenLogprobs], num_top: int, as_ids: bool) -> Iterator[dict[str, Any]]:
    """Yields OpenAI's `logprobs.content` of a chat: each token with its bytes and its top alternatives."""

    def entry(token: int, logprob: float) -> dict[str, Any]:
        text = f"token_id:{token}" if as_ids else token_text(tokenizer, token)
        return {"token": text, "logprob": json_logprob(logprob), "bytes": list(tokenizer.piece(token))}

    return (entry(one.token, one.logprob) | {"top_logprobs": [entry(*other) for other in one.top[:num_top]]} for one in logprobs)
