"""Large responses are serialized and sent in pieces that together are the JSON of the whole."""

import asyncio
import json
import math
from itertools import pairwise

import pytest

from chairlift.server.errors import ApiError
from chairlift.server.http.responses import Json, LargeJson, Pieces, Rows, json_pieces, to_json_bytes

CONTENTS = [
    {},
    [],
    None,
    "é",
    {"a": []},
    {5: 1},
    {"a": {}, 'é"': [[], {}]},
    list(range(1000)),
    [1.5, math.inf, None] * 100,
    [{"a": list(range(100))}] * 3,
    {"choices": [{"logprobs": {"tokens": ["a"] * 65, "top": [{"a": 1}] * 65}}]},
    [[1], {"a": 2}, 3, "x"],
]


@pytest.mark.parametrize("content", CONTENTS, ids=range(len(CONTENTS)))
def test_pieces_are_the_json_of_the_whole(content):
    assert b"".join(json_pieces(content)) == to_json_bytes(content)


@pytest.mark.parametrize("content", ["a\u2028b", {"\u2029": ["\x85é\u2027"]}, {"choices": [{"delta": {"content": "\u2028" * 3}}]}])
def test_no_line_ends_within_an_object(content):
    text = to_json_bytes(content).decode()
    assert (text.splitlines(), json.loads(text)) == ([text], content)


@pytest.mark.parametrize("count", [0, 1, 64, 65, 1000])
def test_rows_are_made_as_they_are_serialized(count):
    made = 0

    def rows():
        nonlocal made
        for made in range(1, count + 1):
            yield {"a": made}

    pieces, seen = [], [0]
    for piece in json_pieces({"content": Rows(rows), "b": 1}):
        pieces.append(piece)
        seen.append(made)
    assert json.loads(b"".join(pieces)) == {"content": [{"a": number} for number in range(1, count + 1)], "b": 1}
    assert max(after - before for before, after in pairwise(seen)) <= 64
    assert list(Rows(rows)) == [{"a": number} for number in range(1, count + 1)]


async def sent(response):
    messages = []

    async def send(message):
        messages.append(message)

    await response({"type": "http"}, None, send)
    return messages


@pytest.mark.parametrize("pieces", [[], [b"a"], [b"a", b"bc", b"d"]])
def test_pieces_are_read_while_they_are_sent(pieces):
    async def read():
        for piece in pieces:
            yield piece

    head, *bodies = asyncio.run(sent(Pieces(read(), 7, "text/plain", {"x": "y"})))
    assert {(b"x", b"y"), (b"content-length", b"7")} <= set(head["headers"])
    assert [(one["body"], one["more_body"]) for one in bodies] == [*((piece, True) for piece in pieces), (b"", False)]


def test_an_error_before_the_first_piece_is_the_response():
    async def read():
        raise ApiError(404, "gone")
        yield b""

    with pytest.raises(ApiError):
        asyncio.run(sent(Pieces(read(), 7, "text/plain", {})))


@pytest.mark.parametrize("size", [1, 1 << 18, (1 << 20) + 1])
def test_a_large_response_is_sent_in_pieces_and_is_that_of_a_small_one(size):
    content = {"a": "b" * size}
    messages = asyncio.run(sent(LargeJson(content, headers={"x": "y"})))
    head, whole = asyncio.run(sent(Json(content, headers={"x": "y"})))
    assert messages[0] == head
    assert b"".join(message["body"] for message in messages[1:]) == whole["body"]
    assert max(len(message["body"]) for message in messages[1:]) <= 1 << 18
    assert [message["more_body"] for message in messages[1:]] == [True] * (len(messages) - 2) + [False]
