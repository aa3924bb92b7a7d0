"""Readers of published request traces: arrival times, prompt and output lengths."""

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
"""Tokens of a block with a hash id in Mooncake's traces."""

MAX_TOKENS = 10**7
"""Tokens of a prompt or an output at most: as many as the longest contexts have."""

MAX_SECONDS = 1e9
"""The largest distance of a time from the first, in seconds: thirty years."""

_LARGEST_ID = 2**62

_MOONCAKE_TICK = 3.0
"""The rounding of Mooncake's times, in seconds."""

_JITTER = 0.005
"""The tolerance for times on ticks, in seconds; converted traces are not exact."""


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace."""

    arrival: float
    """Seconds since the trace's first request."""
    prompt_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...] | None = None
    """One number for each `hash_block` tokens of the prompt. Equal numbers mean equal tokens up to the end of that block.

    The last block can be partial.
    """
    client: str | None = None
    hash_block: int = HASH_BLOCK
    prompt: str | None = None
    """The prompt's text, if the trace has it."""
    model: str | None = None
    """The name of the requested model, if the trace has several."""


@dataclass(frozen=True)
class _Columns:
    """A CSV format: the names of its columns and the parser of its times."""

    arrival: str
    prompt: str
    output: str
    client: str = "client"
    time: Callable[[str], float] = float
    tick: float = 0.0
    """The rounding of times, in seconds; 0 if they are exact."""


def _timestamp(text: str) -> float:
    moment = datetime.fromisoformat(text)
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


_FORMATS = (
    _Columns("TIMESTAMP", "ContextTokens", "GeneratedTokens", time=_timestamp),
    _Columns("Timestamp", "Request tokens", "Response tokens", client="Session ID", tick=1.0),
    _Columns("arrival_s", "prompt_tokens", "output_tokens"),
)
"""Azure 2023 and 2024; BurstGPT; our own."""

_EXPECTED = (
    "expected a CSV file with the columns of Azure (TIMESTAMP,ContextTokens,GeneratedTokens), BurstGPT (Timestamp,Request tokens,Response "
    "tokens) or chairlift (arrival_s,prompt_tokens,output_tokens[,hash_ids][,client][,model]), a JSON Lines file of Mooncake "
    "(timestamp,input_length,output_length[,hash_ids][,model]), or a JSON file of ShareGPT (conversations); each may be gzipped"
)


def estimated_tokens(text: str) -> int:
    """An estimate of the tokens of a text without a tokenizer: one for four bytes."""
    return -(-len(text.encode("utf-8", "replace")) // 4)


def read(path: str | Path, tokens: Callable[[str], int] = estimated_tokens) -> list[TraceRequest]:
    """Reads a trace and returns its requests by arrival, the first at 0 s.

    The format is detected: CSV of Azure, BurstGPT or our own, Mooncake's JSON Lines, or ShareGPT's JSON, each plain or gzipped. Requests
    without output, which failed when the trace was recorded, are left out. Times that were rounded (Mooncake's to 3 s, BurstGPT's to 1 s)
    are spread evenly over the interval. ShareGPT has texts without times and lengths: its requests are the first question and answer of
    each conversation, at 0 s, counted with `tokens`. Raises InvalidTrace with the number of the faulty line.
    """
    try:
        with open_text(Path(path)) as file:
            requests = list(_requests(str(path), file, tokens))
    except (OSError, EOFError, zlib.error) as error:
        raise InvalidTrace(f"{path}: cannot be read ({getattr(error, 'strerror', None) or error})") from None
    except UnicodeDecodeError:
        raise InvalidTrace(f"{path}: is not text; {_EXPECTED}") from None
    if not requests:
        raise InvalidTrace(f"{path}: no request has a prompt and an output; {_EXPECTED}")
    requests.sort(key=lambda request: request.arrival)
    first = requests[0].arrival
    return [replace(request, arrival=request.arrival - first) for request in requests]


def open_text(path: Path) -> TextIO:
    """Opens a file of text, which may be gzipped and begin with a byte order mark."""
    with path.open("rb") as file:
        gzipped = file.read(2) == b"\x1f\x8b"
    # utf-8-sig removes a byte order mark.
    return gzip.open(path, "rt", encoding="utf-8-sig", newline="") if gzipped else path.open(encoding="utf-8-sig", newline="")


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
    columns = next((columns for columns in _FORMATS if {columns.arrival, columns.prompt, columns.output} <= set(header)), None)
    if columns is None:
        raise InvalidTrace(f"{name}, line 1: has the columns {','.join(header)!r:.100}; {_EXPECTED}")
    requests = _checked(name, _numbered(name, rows), lambda row: _from_row(columns, row))
    return _spread(requests, columns.tick) if columns.tick else requests


def _numbered(name: str, rows: csv.DictReader[str]) -> Iterator[tuple[int, Mapping[str, str]]]:
    try:
        for row in rows:
            yield rows.line_num, row
    except csv.Error as error:
        raise InvalidTrace(f"{name}, line {rows.line_num}: is no CSV: {error}") from None


def _from_row(columns: _Columns, row: Mapping[str, str]) -> TraceRequest:
    arrival = _read(columns.time, row, columns.arrival, "a time")
    lengths = _read(_whole, row, columns.prompt, "a whole number"), _read(_whole, row, columns.output, "a whole number")
    ids = _read(_ids, row, "hash_ids", "numbers with | between them") if row.get("hash_ids") else None
    return TraceRequest(arrival, *lengths, ids, row.get(columns.client) or None, model=row.get("model") or None)


def _from_json(line: str) -> TraceRequest:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"is no JSON: {error.msg} at column {error.colno}") from None
    except RecursionError:
        raise ValueError("is JSON nested too deeply") from None
    if not isinstance(row, dict):
        raise ValueError("expected a JSON object")
    arrival = _read(float, row, "timestamp", "milliseconds") / 1000
    lengths = _read(_whole, row, "input_length", "a whole number"), _read(_whole, row, "output_length", "a whole number")
    ids = _read(_listed, row, "hash_ids", "a list of numbers") if row.get("hash_ids") else None
    model = _read(_text, row, "model", "text") if row.get("model") else None
    return TraceRequest(arrival, *lengths, ids, model=model)


def _whole(value: Any) -> int:
    """A whole number from JSON or text. Raises ValueError for a fraction, which `int` would truncate."""
    if isinstance(value, float) and not value.is_integer():
        raise ValueError
    return int(value)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError
    return value


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


def _checked(name: str, rows: Iterable[tuple[int, Row]], parse: Callable[[Row], TraceRequest]) -> Iterator[TraceRequest]:
    """Parses and checks numbered lines. Leaves out requests that failed."""
    first: float | None = None
    for number, row in rows:
        try:
            request = parse(row)
            first = request.arrival if first is None else first
            if not abs(request.arrival - first) <= MAX_SECONDS:  # also rejects NaN
                raise ValueError(f"times must be finite, and at most {MAX_SECONDS:g} s from the first, got {request.arrival:g} s")
            if not (0 <= request.prompt_tokens <= MAX_TOKENS and 0 <= request.output_tokens <= MAX_TOKENS):
                raise ValueError(f"lengths must be from 0 to {MAX_TOKENS:,} tokens")
            if any(not 0 <= one < _LARGEST_ID for one in request.hash_ids or ()):
                raise ValueError("hash ids must be from 0 to 2**62")
        except ValueError as error:
            raise InvalidTrace(f"{name}, line {number}: {error}") from None
        if request.prompt_tokens and request.output_tokens:
            yield request


def _spread(requests: Iterable[TraceRequest], tick: float) -> Iterator[TraceRequest]:
    """Spreads the requests of each tick evenly over it, in the file's order. Equal times, and those not on ticks, stay as they are."""
    ticks: dict[int, list[TraceRequest]] = {}
    for request in requests:
        ticks.setdefault(round(request.arrival / tick), []).append(request)
    on_ticks = all(abs(request.arrival - number * tick) <= _JITTER for number, same_tick in ticks.items() for request in same_tick)
    if len(ticks) < 2 or not on_ticks:
        return itertools.chain.from_iterable(ticks.values())
    return (
        replace(request, arrival=(number + index / len(same_tick)) * tick)
        for number, same_tick in ticks.items()
        for index, request in enumerate(same_tick)
    )


def _sharegpt(name: str, text: str, tokens: Callable[[str], int]) -> Iterator[TraceRequest]:
    """The first question and answer of each conversation that has both."""
    try:
        conversations = json.loads(text)
    except json.JSONDecodeError as error:
        raise InvalidTrace(f"{name}, line {error.lineno}: is no JSON: {error.msg}") from None
    except RecursionError:
        raise InvalidTrace(f"{name}: is JSON nested too deeply") from None
    for number, conversation in enumerate(conversations, 1):
        try:
            turns = [turn["value"] for turn in conversation["conversations"][:2]]
            if not all(isinstance(turn, str) for turn in turns):
                raise TypeError
        except (KeyError, TypeError):
            raise InvalidTrace(f"{name}, conversation {number}: expected `conversations`, a list of turns with a `value`") from None
        if len(turns) == 2 and all(turns):
            yield TraceRequest(0.0, tokens(turns[0]), tokens(turns[1]), prompt=turns[0])
