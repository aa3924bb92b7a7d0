"""The requests that every engine gets: lengths, arrivals and prompts are the same on every machine."""

from __future__ import annotations

import hashlib
import json
import math
import pydoc_data.topics
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

REQUESTS = 64
PROMPT, PROMPT_SIGMA, PROMPT_RANGE = 96, 0.8, (16, 512)
OUTPUT, OUTPUT_SIGMA, OUTPUT_RANGE = 64, 0.7, (8, 256)


@dataclass(frozen=True)
class Request:
    """One request: `prompt` ids, how many tokens of `output` it must give, and its `arrival` in seconds at one request a second.

    `extra` are fields of its body, such as another model.
    """

    prompt: list[int]
    output: int
    arrival: float
    extra: dict[str, Any] = field(default_factory=dict)


def workload(tokenizer: Path, count: int = REQUESTS, seed: int = 0) -> list[Request]:
    """`count` requests, of which the first 64 are always the same; `tokenizer` is a tokenizer.json.

    Prompts are English text: parts of Python's own reference. Those of the first 64 do not overlap, so that no two share a prefix. Others
    begin elsewhere in the same parts.
    """
    ids = english(tokenizer)
    stride, rounds = len(ids) // REQUESTS, -(-count // REQUESTS)
    assert stride >= PROMPT_RANGE[1], "the text is too short for prompts that do not overlap"
    requests: list[Request] = []
    for turn in range(rounds):
        random = np.random.default_rng(seed + turn)
        prompts = _lengths(random, PROMPT, PROMPT_SIGMA, PROMPT_RANGE)
        outputs = _lengths(random, OUTPUT, OUTPUT_SIGMA, OUTPUT_RANGE)
        gaps = random.exponential(1, REQUESTS)
        arrivals = requests[-1].arrival + np.cumsum(gaps) if requests else np.cumsum(gaps) - gaps[0]
        first = (stride - PROMPT_RANGE[1]) * turn // rounds
        for i in range(REQUESTS):
            start = i * stride + first
            requests.append(Request(ids[start : start + int(prompts[i])], int(outputs[i]), float(arrivals[i])))
    return requests[:count]


def english(tokenizer: Path) -> list[int]:
    """The tokens of Python's own reference, some 110,000."""
    text = re.sub(r"[*=\-~^]{4,}", "", "\n\n".join(pydoc_data.topics.topics.values()))
    return Tokenizer.from_file(str(tokenizer)).encode(text, add_special_tokens=False).ids


def _lengths(random: np.random.Generator, median: int, sigma: float, limits: tuple[int, int]) -> np.ndarray:
    return np.clip(np.rint(random.lognormal(math.log(median), sigma, REQUESTS)), *limits).astype(int)


def fingerprint(requests: list[Request]) -> str:
    """A short name of exactly these requests: results of others do not belong beside theirs."""
    return hashlib.sha256(json.dumps([[r.prompt, r.output, r.arrival] for r in requests]).encode()).hexdigest()[:12]


def useful_share(requests: list[Request], batch: int) -> float:
    """What part of the decoded tokens is of use when whole batches run until their longest answer ends."""
    outputs = [request.output for request in requests]
    batches = [outputs[i : i + batch] for i in range(0, len(outputs), batch)]
    return sum(outputs) / sum(len(b) * max(b) for b in batches)
