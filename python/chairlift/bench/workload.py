"""What a load consists of: requests with their lengths, and prompts that are made of plain words."""

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
"""Words that common vocabularies have a token for, with a space before them and without: so many words are as many tokens.

What a server adds (a beginning of text, a chat template) comes on top; what it counted is in its answers.
"""

Piece = tuple[str, int]
"""A seed and how many words are drawn with it: equal pieces are equal text."""


@dataclass(frozen=True, slots=True)
class Job:
    """One request to be sent."""

    prompt_tokens: int
    output_tokens: int
    """The most tokens that the answer may have."""
    pieces: tuple[Piece, ...] = ()
    text: str | None = None
    """The prompt where it is given; else it is made of the pieces."""
    due: float | None = None
    """Seconds after the start at which it is sent; None: as soon as a seat is free."""
    client: str | None = None

    def prompt(self) -> str:
        """The prompt's text."""
        return " ".join(words(*piece) for piece in self.pieces) if self.text is None else self.text


# As many as a trace's common beginnings may have blocks: 10 MiB.
@lru_cache(maxsize=4096)
def words(seed: str, count: int) -> str:
    """`count` words, the same for the same seed in every process; a shorter draw is the beginning of a longer one."""
    return " ".join(random.Random(seed).choices(WORDS, k=count))


def random_jobs(count: int, input_len: int, output_len: int, *, range_ratio: float = 0.0, prefix_len: int = 0, seed: int = 0) -> list[Job]:
    """Requests of random words whose lengths are drawn evenly from `[len * (1 - range_ratio), len * (1 + range_ratio)]`.

    All begin with the same `prefix_len` words, which come on top of `input_len`, as in vLLM.
    """
    draw = random.Random(seed)

    def length(mean: int) -> int:
        return max(1, draw.randint(int(mean * (1 - range_ratio)), int(mean * (1 + range_ratio))))

    jobs = []
    for index in range(count):
        own, output = length(input_len), length(output_len)
        prefix = ((f"{seed} prefix", prefix_len),) if prefix_len else ()
        jobs.append(Job(prefix_len + own, output, (*prefix, (f"{seed} {index}", own))))
    return jobs


def trace_jobs(requests: Sequence[TraceRequest], *, seed: int = 0, speedup: float = 1.0) -> list[Job]:
    """A trace's requests at their times, `speedup` times as fast; blocks of equal hash id become equal words.

    Texts, which have no times, come in an order that the seed draws (as in vLLM): what is cut from its beginning is a sample.
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
    """The blocks that a prompt is made of; what has no block is the prompt's own."""
    pieces, left = [], request.prompt_tokens
    for block in request.hash_ids or ():
        if left > 0:
            pieces.append((f"{seed} block {block}", min(left, request.hash_block)))
            left -= request.hash_block
    return (*pieces, (own, left)) if left > 0 else tuple(pieces)


def due(jobs: Sequence[Job], times: Sequence[float]) -> list[Job]:
    """The same requests at other times, seconds after the start."""
    return [replace(job, due=time) for job, time in zip(jobs, times, strict=True)]


def at_once(jobs: Sequence[Job], seats: int | None) -> list[Job]:
    """The same requests as fast as they may be sent: each when one of `seats` is free, or all at the start."""
    return [replace(job, due=0.0 if seats is None else None) for job in jobs]


def fitting(requests: Sequence[TraceRequest], longest: int | None) -> list[TraceRequest]:
    """Those whose prompt and output are at most `longest` tokens together."""
    return [request for request in requests if longest is None or request.prompt_tokens + request.output_tokens <= longest]
