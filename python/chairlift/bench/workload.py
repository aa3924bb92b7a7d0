"""The requests of a benchmark: their lengths, due times and prompts of random words."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from chairlift.bench.traces import TraceRequest

_TEXT = """
time year people way day man thing woman life child world school state family student group country problem hand part place case week
company system program question work government number night point home water room mother area money story fact month lot right study
book eye job word business issue side kind head house service friend father power hour game line end member law car city community name
president team minute idea body information back parent face others level office door health person art war history party result change
reason research girl moment air teacher force education foot boy age policy music market sense nation plan college interest death
experience effect use class control field development role rate heart drug show leader light voice wife mind price report decision son
view relationship town road arm difference value building action season tax director position player record paper space ground form
event official matter center site project activity star table need court oil cost industry figure street image phone data picture
practice piece land product doctor wall patient worker news test movie north love support technology step baby computer type film tree
source hair window culture brother energy period course summer plant term letter condition choice rule daughter south floor material
population call hospital church risk fire future bank share century focus dog fish sound order red green blue white black small large
early young important public good new first last long great little own other old big high different next best better free true full
special easy
"""

WORDS = tuple(_TEXT.split())
"""Words that are one token each in common vocabularies, with and without a leading space.

A server may add tokens (beginning of text, chat template); its responses have the exact count.
"""

Piece = tuple[str, int]
"""A seed and a number of words. Equal pieces are equal text."""


@dataclass(frozen=True, slots=True)
class Job:
    """A request to send."""

    prompt_tokens: int
    output_tokens: int
    """`max_tokens` of the request."""
    pieces: tuple[Piece, ...] = ()
    text: str | None = None
    """The prompt's text; without it, the prompt is made of the pieces."""
    due: float | None = None
    """Seconds after the start at which the request is sent; None: as soon as the concurrency limit allows."""
    client: str | None = None
    """The field `user` of the request."""
    tenant: str = ""
    tier: str = "default"

    def prompt(self) -> str:
        """The prompt's text."""
        return " ".join(words(*piece) for piece in self.pieces) if self.text is None else self.text


# Enough for the shared blocks of a trace: 10 MiB.
@lru_cache(maxsize=4096)
def words(seed: str, count: int) -> str:
    """`count` words, determined by the seed. A shorter text is a prefix of a longer one with the same seed."""
    return " ".join(random.Random(seed).choices(WORDS, k=count))


def random_jobs(count: int, input_len: int, output_len: int, *, range_ratio: float = 0.0, prefix_len: int = 0, seed: int = 0) -> list[Job]:
    """Requests of random words with uniform lengths from `[len * (1 - range_ratio), len * (1 + range_ratio)]`.

    All share a prefix of `prefix_len` words, in addition to `input_len`, as in vLLM.
    """
    generator = random.Random(seed)

    def length(mean: int) -> int:
        return max(1, generator.randint(int(mean * (1 - range_ratio)), int(mean * (1 + range_ratio))))

    jobs = []
    for index in range(count):
        own, output = length(input_len), length(output_len)
        prefix = ((f"{seed} prefix", prefix_len),) if prefix_len else ()
        jobs.append(Job(prefix_len + own, output, (*prefix, (f"{seed} {index}", own))))
    return jobs


def trace_jobs(requests: Sequence[TraceRequest], *, seed: int = 0, speedup: float = 1.0) -> list[Job]:
    """A trace's requests at their times divided by `speedup`. Blocks with equal hash ids become equal words.

    Texts, which have no times, are shuffled by the seed (as in vLLM), so that the first N are a sample.
    """
    if any(request.prompt is not None for request in requests):
        requests = random.Random(f"order {seed}").sample(requests, len(requests))
    return [
        Job(
            request.prompt_tokens,
            request.output_tokens,
            () if request.prompt is not None else _pieces(request, f"{seed} {index}", seed),
            request.prompt,
            request.arrival / speedup,
            request.client,
        )
        for index, request in enumerate(requests)
    ]


def _pieces(request: TraceRequest, own: str, seed: int) -> tuple[Piece, ...]:
    """The pieces of a prompt: its blocks, and a unique piece for the rest."""
    pieces, remaining = [], request.prompt_tokens
    for block in request.hash_ids or ():
        if remaining > 0:
            pieces.append((f"{seed} block {block}", min(remaining, request.hash_block)))
            remaining -= request.hash_block
    return (*pieces, (own, remaining)) if remaining > 0 else tuple(pieces)


def with_due_times(jobs: Sequence[Job], times: Sequence[float]) -> list[Job]:
    """The same requests at `times`, in seconds after the start."""
    return [replace(job, due=time) for job, time in zip(jobs, times, strict=True)]


def as_fast_as_possible(jobs: Sequence[Job], max_concurrency: int | None) -> list[Job]:
    """The same requests, each sent as soon as `max_concurrency` allows, or all at the start."""
    return [replace(job, due=0.0 if max_concurrency is None else None) for job in jobs]


def fitting(requests: Sequence[TraceRequest], longest: int | None) -> list[TraceRequest]:
    """The requests with at most `longest` tokens of prompt and output."""
    return [request for request in requests if longest is None or request.prompt_tokens + request.output_tokens <= longest]
