"""POST /tokenize and /detokenize, GET /tokenizer_info."""

from __future__ import annotations

import asyncio
from typing import Annotated

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from chairlift.engine.validation import check_tokens
from chairlift.errors import InvalidRequest
from chairlift.server.chat.completion import prompt_of
from chairlift.server.chat.request import PromptOrMessages
from chairlift.server.http.body import beside, read_fields
from chairlift.server.http.responses import Json, LargeJson, ignored_header
from chairlift.server.model import ServedModel
from chairlift.server.schema.fields import Fields
from chairlift.server.schema.logprobs import token_text
from chairlift.server.service import service_of
from chairlift.server.tokenizing import MAX_CHARACTERS

MAX_TOKENS = 1 << 18


class TokenizeRequest(PromptOrMessages):
    """POST /tokenize: a text, or a conversation as in /v1/chat/completions."""

    prompt: Annotated[str, Field(max_length=MAX_CHARACTERS)] | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Fields):
    """POST /detokenize."""

    tokens: Annotated[list[int], Field(max_length=MAX_TOKENS, fail_fast=True)]


async def tokenize(request: Request) -> Response:
    """Returns the tokens of a text or a conversation, and their number."""
    body, ignored = await read_fields(request, TokenizeRequest, queued=False)
    model = await service_of(request).use(request, body.model)
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequest("send either a prompt or messages", param="prompt")
    if body.prompt is None:
        tokens = await prompt_of(request, model, await beside(request, body.chat), must_fit=False)
    else:
        tokens = await model.encode(request, body.prompt, must_fit=False, add_special_tokens=body.add_special_tokens is not False)
    # The response may be a megabyte: serialize it in a thread.
    return await asyncio.to_thread(_tokens_response, model, tokens, bool(body.return_token_strs), ignored_header(ignored))


def _tokens_response(model: ServedModel, tokens: list[int], with_texts: bool, headers: dict[str, str]) -> Response:
    tokenizer = model.engine.tokenizer
    strings = [token_text(tokenizer, token) for token in tokens] if with_texts else None
    limit = model.engine.info.max_model_len
    return LargeJson({"count": len(tokens), "max_model_len": limit, "tokens": tokens, "token_strs": strings}, headers=headers)


async def detokenize(request: Request) -> Response:
    """Returns the text of tokens, including control tokens."""
    body, ignored = await read_fields(request, DetokenizeRequest, queued=False)
    model = await service_of(request).use(request, body.model)
    await beside(request, check_tokens, body.tokens, model.engine.info, "tokens")
    text = await asyncio.to_thread(model.engine.tokenizer.decode, body.tokens, skip_special_tokens=False)
    return Json({"prompt": text}, headers=ignored_header(ignored))


async def tokenizer_info(request: Request) -> Response:
    """Returns the control tokens and the chat template, for clients that render conversations themselves."""
    service = service_of(request)
    service.check_admission()
    request.state.ticket.admit(queued=False)
    model = await service.use(request, request.query_params.get("model"))
    tokenizer = model.engine.tokenizer
    return Json(
        {
            **tokenizer.special_tokens,
            "eos_token_ids": sorted(tokenizer.eos_token_ids),
            "vocab_size": model.engine.info.vocab_size,
            "model_max_length": model.engine.info.max_model_len,
            "chat_template": tokenizer.template_source,
        }
    )
