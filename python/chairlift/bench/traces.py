"""Request traces as their publishers wrote them: when requests came, and how long they and their answers were."""

from __future__ import annotations

import csv
import gzip
import itertools
import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO, TypeVar

from chairlift.errors import InvalidTrace

Row = TypeVar("Row")

HASH_BLOCK = 512
"""Tokens that a hash id of a Mooncake trace stands for."""

MOST_TOKENS = 10**7
"""Tokens of a prompt or an output at most: as many as the longest contexts have."""

LONGEST = 1e9
"""Seconds that a time may lie from that of the first line: thirty years."""

_LARGEST_ID = 2**62

_MOONCAKE_TICK = 3.0
"""Seconds that Mooncake's times were rounded to."""

_JITTER = 0.005
"""Seconds by which such times may lie beside the tick, after they went through other hands."""


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace."""

    arrival: float
    """Seconds since the trace's first request."""
    prompt_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...] | None = None
    """One number for each `hash_block` tokens of the prompt: equal ones mean equal content up to and including that block.

    The last block may be partly filled.
    """
    client: str | None = None
    hash_block: int = HASH_BLOCK
    prompt: str | None = None
    """The prompt's text, where the trace has it."""


@dataclass(frozen=True)
class _Columns:
    """A CSV form: which column has what, and how times are written."""

    arrival: str
    prompt: str
    output: str
    client: str = "client"
    time: Callable[[str], float] = float
    tick: float = 0.0
    """Seconds that times were rounded to; 0 where they were not."""


def _moment(text: str) -> float:
    moment = datetime.fromisoformat(text)
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


_FORMS = (
    _Columns("TIMESTAMP", "ContextTokens", "GeneratedTokens", time=_moment),
    _Columns("Timestamp", "Request tokens", "Response tokens", client="Session ID", tick=1.0),
    _Columns("arrival_s", "prompt_tokens", "output_tokens"),
)
"""Azure 2023 and 2024; BurstGPT; our own."""

_EXPECTED = (
    "expected a CSV file with the columns of Azure (TIMESTAMP,ContextTokens,GeneratedTokens), BurstGPT (Timestamp,Request tokens,Response "
    "tokens) or chairlift (arrival_s,prompt_tokens,output_tokens[,hash_ids][,client]), a JSON Lines file of Mooncake "
    "(timestamp,input_length,output_length[,hash_ids]), or a JSON file of ShareGPT (conversations); each may be gzipped"
)


def estimated_tokens(text: str) -> int:
    """About how many tokens a text has where no tokenizer is at hand: one for each four bytes."""
    return -(-len(text.encode("utf-8", "replace")) // 4)


def read(path: str | Path, tokens: Callable[[str], int] = estimated_tokens) -> list[TraceRequest]:
    """The requests of a trace by arrival, the first at 0 s.

    The form is told by the content: CSV of Azure, BurstGPT or our own, Mooncake's JSON Lines, ShareGPT's JSON; plain or gzipped.
    Requests without output (they failed when the trace was taken) are left out. Times that were rounded to ticks, Mooncake's to 3 s and
    BurstGPT's to 1 s, are spread evenly over the tick. ShareGPT has texts but no times and no lengths: each conversation's first question
    and answer, all at 0 s, counted with `tokens`. Raises InvalidTrace with the line at fault.
    """
    try:
        with _open(Path(path)) as file:
            requests = list(_requests(str(path), file, tokens))
    except (OSError, EOFError, zlib.error) as error:
        raise InvalidTrace(f"{path}: cannot be read ({getattr(error, 'strerror', None) or error})") from None
    except UnicodeDecodeError:
        raise InvalidTrace(f"{path}: is not text; {_EXPECTED}") from None
    if not requests:
        raise InvalidTrace(f"{path}: has no request with a prompt and an output; {_EXPECTED}")
    requests.sort(key=lambda request: request.arrival)
    first = requests[0].arrival
    return [replace(request, arrival=request.arrival - first) for request in requests]


def _open(path: Path) -> TextIO:
    with path.open("rb") as file:
        packed = file.read(2) == b"\x1f\x8b"
    # A byte order mark is no part of the first column's name.
    return gzip.open(path, "rt", encoding="utf-8-sig", newline="") if packed else path.open(encoding="utf-8-sig", newline="")


def _requests(name: str, file: TextIO, tokens: Callable[[str], int]) -> Iterator[TraceRequest]:
    first = file.readline()
    whole = itertools.chain([first], file)
    match first.lstrip()[:1]:
        case "[":
            return _sharegpt(name, "".join(whole), tokens)
        case "{":
            lines = ((number, line) for number, line in enumerate(whole, 1) if line.strip())
            return _spread(_checked(name, lines, _from_json), _MOONCAKE_TICK)
        case _:
            return _csv(name, whole)


def _csv(name: str, lines: Iterable[str]) -> Iterator[TraceRequest]:
    rows = csv.DictReader(lines, strict=True)
    try:
        header = rows.fieldnames or ()
    except csv.Error as error:
        raise InvalidTrace(f"{name}, line 1: is no CSV: {error}") from None
    form = next((form for form in _FORMS if {form.arrival, form.prompt, form.output} <= set(header)), None)
    if form is None:
        raise InvalidTrace(f"{name}, line 1: has the columns {','.join(header)!r:.100}; {_EXPECTED}")
    requests = _checked(name, _numbered(name, rows), lambda row: _from_row(form, row))
    return _spread(requests, form.tick) if form.tick else requests


def _numbered(name: str, rows: csv.DictReader[str]) -> Iterator[tuple[int, Mapping[str, str]]]:
    try:
        for row in rows:
            yield rows.line_num, row
    except csv.Error as error:
        raise InvalidTrace(f"{name}, line {rows.line_num}: is no CSV: {error}") from None


def _from_row(form: _Columns, row: Mapping[str, str]) -> TraceRequest:
    arrival = _read(form.time, row, form.arrival, "a time")
    lengths = _read(_whole, row, form.prompt, "a whole number"), _read(_whole, row, form.output, "a whole number")
    ids = _read(_ids, row, "hash_ids", "numbers with | between them") if row.get("hash_ids") else None
    return TraceRequest(arrival, *lengths, ids, row.get(form.client) or None)


def _from_json(line: str) -> TraceRequest:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"is no JSON: {error.msg} at column {error.colno}") from None
    except RecursionError:
        raise ValueError("is JSON in too many brackets") from None
    if not isinstance(row, dict):
        raise ValueError("expected a JSON object")
    arrival = _read(float, row, "timestamp", "milliseconds") / 1000
    lengths = _read(_whole, row, "input_length", "a whole number"), _read(_whole, row, "output_length", "a whole number")
    ids = _read(_listed, row, "hash_ids", "a list of numbers") if row.get("hash_ids") else None
    return TraceRequest(arrival, *lengths, ids)


def _whole(value: Any) -> int:
    """A number of JSON or of a text; raises ValueError for one with a fraction, which `int` would cut off."""
    if isinstance(value, float) and not value.is_integer():
        raise ValueError
    return int(value)


def _ids(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split("|")))


def _listed(ids: Any) -> tuple[int, ...]:
    if not isinstance(ids, list):
        raise TypeError
    return tuple(map(_whole, ids))


def _read(kind: Callable[[Any], Row], row: Mapping[str, Any], name: str, expected: str) -> Row:
    if row.get(name) is None:
        raise ValueError(f"{name} is missing")
    try:
        return kind(row[name])
    except (ValueError, TypeError, OverflowError):
        raise ValueError(f"{name} is {row[name]!r:.40}, expected {expected}") from None


def _checked(name: str, rows: Iterable[tuple[int, Row]], made: Callable[[Row], TraceRequest]) -> Iterator[TraceRequest]:
    """The requests that `made` makes of numbered lines, without those that failed."""
    first: float | None = None
    for number, row in rows:
        try:
            request = made(row)
            first = request.arrival if first is None else first
            if not abs(request.arrival - first) <= LONGEST:  # nor if one is not finite
                raise ValueError(f"times must be finite, and at most {LONGEST:g} s from the first, got {request.arrival:g} s")
            if not (0 <= request.prompt_tokens <= MOST_TOKENS and 0 <= request.output_tokens <= MOST_TOKENS):
                raise ValueError(f"lengths must be from 0 to {MOST_TOKENS:,} tokens")
            if any(not 0 <= one < _LARGEST_ID for one in request.hash_ids or ()):
                raise ValueError("hash ids must be from 0 to 2**62")
        except ValueError as error:
            raise InvalidTrace(f"{name}, line {number}: {error}") from None
        if request.prompt_tokens and request.output_tokens:
            yield request


def _spread(requests: Iterable[TraceRequest], tick: float) -> Iterator[TraceRequest]:
    """Moves the requests of each tick apart, evenly over the tick, in the file's order; leaves times that are on no ticks."""
    ticks: dict[int, list[TraceRequest]] = {}
    for request in requests:
        ticks.setdefault(round(request.arrival / tick), []).append(request)
    if any(abs(request.arrival - number * tick) > _JITTER for number, together in ticks.items() for request in together):
        return itertools.chain.from_iterable(ticks.values())
    return (
        replace(request, arrival=(number + place / len(together)) * tick)
        for number, together in ticks.items()
        for place, request in enumerate(together)
    )


def _sharegpt(name: str, text: str, tokens: Callable[[str], int]) -> Iterator[TraceRequest]:
    """The first question and answer of each conversation that has both."""
    try:
        conversations = json.loads(text)
    except json.JSONDecodeError as error:
        raise InvalidTrace(f"{name}, line {error.lineno}: is no JSON: {error.msg}") from None
    except RecursionError:
        raise InvalidTrace(f"{name}: is JSON in too many brackets") from None
    for number, conversation in enumerate(conversations, 1):
        try:
            turns = [turn["value"] for turn in conversation["conversations"][:2]]
            if not all(isinstance(turn, str) for turn in turns):
                raise TypeError
        except (KeyError, TypeError):
            raise InvalidTrace(f"{name}, conversation {number}: expected `conversations`, a list of turns with a `value`") from None
        if len(turns) == 2 and all(turns):
            yield TraceRequest(0.0, tokens(turns[0]), tokens(turns[1]), prompt=turns[0])
