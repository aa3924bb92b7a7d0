"""The increments of requests: joins those of a choice, and passes on those that a step brings."""

from __future__ import annotations

import logging
import struct
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from chairlift.outputs import RequestOutput, TokenLogprobs

if TYPE_CHECKING:
    from chairlift.engine.frames import StepOutputs
    from chairlift.engine.stream import Stream

log = logging.getLogger("chairlift")

_PARTS = 256
"""Increments of a choice that are kept before they are joined."""


def add_part(parts: list[RequestOutput], part: RequestOutput) -> None:
    """Adds the next increment of a choice. From time to time all are joined: small ones take much memory, joining each much time."""
    parts.append(part)
    if len(parts) >= _PARTS:
        parts[:] = [joined(parts)]


def joined(parts: Sequence[RequestOutput]) -> RequestOutput:
    """A choice's increments as one output."""
    last = parts[-1]
    return replace(
        last,
        text="".join([part.text for part in parts]),
        token_ids=[token for part in parts for token in part.token_ids],
        logprobs=None if last.logprobs is None else [one for part in parts for one in part.logprobs or ()],
        text_offsets=None if last.text_offsets is None else [one for part in parts for one in part.text_offsets or ()],
        prompt_logprobs=next((part.prompt_logprobs for part in parts if part.prompt_logprobs is not None), None),
    )


def deliver(step: StepOutputs, requests: dict[int, Stream]) -> list[Stream]:
    """Adds a step's tokens to `requests`, by tag, and removes ended tags. Returns the requests with news.

    Unknown tags belong to aborted requests; their tokens are dropped.
    """
    touched: dict[int, Stream] = {}
    for tag, *admission in step.started:
        if (request := requests.get(tag)) is not None:
            request.choice(tag).start(*admission)
            if (on_start := request.on_start) is not None:
                request.on_start = None
                on_start()
    for timeline in step.ended:
        tag = timeline["tag"]
        if (request := requests.get(tag)) is not None and request.choice(tag).end(timeline):
            touched[request.tags.start] = request
            del requests[tag]
    for tag, lines in step.prompts:
        request = requests.get(tag)
        if request is not None and request.prompt_logprobs is not None and request.params.prompt_logprobs is not None:
            request.prompt_logprobs += TokenLogprobs.read(lines, request.params.prompt_logprobs)
    details, refusals = step.details, step.refusals
    count = len(step.finishes)
    tags, tokens = struct.unpack(f"<{count}Q", step.tags), struct.unpack(f"<{count}i", step.tokens)
    logprobs = struct.unpack(f"<{count}f", step.logprobs) if step.logprobs else (0.0,) * count
    for tag, token, logprob, finish in zip(tags, tokens, logprobs, step.finishes, strict=True):
        if (request := requests.get(tag)) is None:
            continue
        choice = request.choice(tag)
        try:
            choice.feed(token, logprob, finish, details.get(tag), refusals.get(tag))
        except Exception:  # a defect that one request meets must not end the others
            log.exception("sequence %d ends with an error, because its output cannot be read", tag)
            choice.fail()
        touched[request.tags.start] = request
        if finish:
            del requests[tag]
    for tag in step.starved:
        if (request := requests.pop(tag, None)) is not None:
            request.choice(tag).starve()
            touched[request.tags.start] = request
    return list(touched.values())
