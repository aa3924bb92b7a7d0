"""What a model can run: completes and checks the parameters of requests, before an engine gets them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from chairlift.errors import ContextExceeded, InvalidRequest
from chairlift.sampling import SamplingParams, check_bad_words

if TYPE_CHECKING:
    from chairlift.engine.engine_info import EngineInfo
    from chairlift.tokenizer import Tokenizer


def validate(prompt: Sequence[int], params: SamplingParams, info: EngineInfo) -> SamplingParams:
    """Returns the parameters with `max_tokens` filled in. Raises InvalidRequest if the model cannot run the request.

    For the prompt's token ids see `check_tokens`, for `bad_words` `encode_bad_words`.
    """
    if not len(prompt):
        raise InvalidRequest("The prompt is empty: at least one token is needed.", param="prompt")
    max_tokens = _token_for_embedding(len(prompt), info) if params.embed else _room_for_answer(len(prompt), params, info)
    vocabulary = info.vocab_size
    words = [token for word in params.bad_words if not isinstance(word, str) for token in word]
    for name, tokens in (("logit_bias", params.logit_bias), ("allowed_token_ids", params.allowed_token_ids), ("bad_words", words)):
        if tokens and (largest := max(tokens)) >= vocabulary:
            raise InvalidRequest(f"{name} has token {largest}, but this model's token ids are 0 to {vocabulary - 1}", param=name)
    for name, count in (("logprobs", params.logprobs), ("prompt_logprobs", params.prompt_logprobs)):
        if count is not None and count > vocabulary:
            raise InvalidRequest(f"{name} must be at most {vocabulary}, the number of tokens that this model has", param=name)
    # A copy is checked anew, which takes 10 us: a request may have thousands of texts.
    return params if params.max_tokens == max_tokens else replace(params, max_tokens=max_tokens)


def check_tokens(tokens: Iterable[int], info: EngineInfo, param: str) -> None:
    """Raises InvalidRequest for `param` unless all are token ids of the model. A million take 30 ms."""
    vocabulary = info.vocab_size
    for token in tokens:
        if type(token) is not int or not 0 <= token < vocabulary:
            message = f"{token!r:.50} in {param} is not a token id: token ids are integers from 0 to {vocabulary - 1}"
            raise InvalidRequest(message, param=param)


def _room_for_answer(prompt: int, params: SamplingParams, info: EngineInfo) -> int:
    """Returns the most tokens of an answer to a prompt of this length. Raises InvalidRequest."""
    check_generates(info)
    limit = info.max_model_len
    room = limit - prompt
    max_tokens = max(room, 1) if params.max_tokens is None else params.max_tokens
    if max_tokens > room:
        raise ContextExceeded(
            f"This model's maximum context length is {limit} tokens. However, you requested {prompt + max_tokens} tokens "
            f"({prompt} in the prompt, {max_tokens} in the completion). Please reduce the length of the prompt or completion.",
            param="prompt",
            limit=limit,
            prompt=prompt,
            answer=max_tokens,
        )
    return max_tokens


def _token_for_embedding(prompt: int, info: EngineInfo) -> int:
    """Returns the number of tokens that end an embedding's request: one. Raises InvalidRequest."""
    limit = check_embeds(info)
    if prompt > limit:
        message = f"This model's maximum context length is {limit} tokens for an embedding, and the input has {prompt}."
        raise ContextExceeded(message, param="input", limit=limit, prompt=prompt)
    return 1


def check_generates(info: EngineInfo) -> None:
    """Raises InvalidRequest if the model computes only embeddings or scores."""
    _check_no_scores(info)
    if not info.generates:
        message = "this model computes embeddings and generates no text: use /v1/embeddings (in Python: LLM.embed)"
        raise InvalidRequest(message, param="model", code="unsupported")


def check_embeds(info: EngineInfo) -> int:
    """Returns the most tokens of a text to embed. Raises InvalidRequest if the model computes no embeddings."""
    if info.max_text_len is None:
        message = "this model generates text and computes no embeddings here: use an encoder, or a decoder with code of Chairlift's own"
        raise InvalidRequest(message, param="model", code="unsupported")
    return info.max_text_len


def check_scores(info: EngineInfo) -> str:
    """Returns what becomes of the model's numbers: see `relevance`. Raises InvalidRequest if it does not score pairs of texts."""
    if info.score is None:
        raise InvalidRequest("this model does not score pairs of texts: use a cross-encoder", param="model", code="unsupported")
    return info.score


def _check_no_scores(info: EngineInfo) -> None:
    if info.score is not None:
        message = "this model only scores pairs of texts: use /v1/rerank (in Python: LLM.score)"
        raise InvalidRequest(message, param="model", code="unsupported")


def relevance(number: float, kind: str) -> float:
    """Returns the score of a pair of texts, of a classifier's number; `kind` is sigmoid or identity."""
    return number if kind == "identity" else 1 / (1 + math.exp(-max(number, -700.0)))


def check_dimensions(dimensions: int | None, info: EngineInfo) -> int:
    """Returns the most tokens of a text to embed. Raises InvalidRequest unless embeddings can be shortened to this many numbers.

    None keeps all numbers.
    """
    limit = check_embeds(info)
    _check_no_scores(info)
    if dimensions is not None:
        most = info.embedding_size
        if type(dimensions) is not int or not 1 <= dimensions <= most:
            raise InvalidRequest(f"dimensions must be an integer from 1 to {most}, got {dimensions!r:.50}", param="dimensions")
    return limit


def encode_bad_words(params: SamplingParams, tokenizer: Tokenizer) -> SamplingParams:
    """Returns the parameters with the texts of `bad_words` encoded, both as they are and after a space.

    The tokens that the model never samples become bad words, too. Raises InvalidRequest for more words than a caller may have.
    """
    check_bad_words(params.bad_words)
    suppressed = () if params.embed else tokenizer.suppressed_token_ids
    if not suppressed and not any(isinstance(word, str) for word in params.bad_words):
        return params
    words: dict[tuple[int, ...], None] = {}
    line = tokenizer.encode("\n", add_special_tokens=False) if tokenizer.strips_first_space else None
    for word in params.bad_words:
        if isinstance(word, str):
            bare = word.lstrip(" ")
            found = [_tokens_within(tokenizer, text, line) for text in (bare, " " + bare)]
        else:
            found = [word]
        words.update(dict.fromkeys(filter(None, found)))
    words.update(dict.fromkeys((token,) for token in suppressed))
    return replace(params, bad_words=tuple(words))


def _tokens_within(tokenizer: Tokenizer, text: str, line: list[int] | None) -> tuple[int, ...]:
    """Returns the tokens of a text within another one: without the space that some tokenizers put before the first word.

    `line` has the tokens of a line break if the tokenizer is one of these.
    """
    if line is not None:
        tokens = tokenizer.encode("\n" + text, add_special_tokens=False)
        if tokens[: len(line)] == line:
            return tuple(tokens[len(line) :])
    return tuple(tokenizer.encode(text, add_special_tokens=False))
