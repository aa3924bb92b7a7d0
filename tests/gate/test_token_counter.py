"""Prompts that are counted with the upstream's tokenizer."""

import asyncio
import json
import time
from pathlib import Path

import httpx
import numpy as np
import pytest
from gate_here import Server, gate_here
from tokenizers import Tokenizer as Backend
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from chairlift.errors import ModelNotFound
from chairlift.gate import token_counter
from chairlift.gate.prompt import MAX_PARTS, read_body, read_prompt, tokens
from chairlift.gate.token_counter import TokenCounter
from chairlift.server.tokenizing import LONG, Tokenizing
from chairlift.server.work import CURRENT_WORK, Work
from chairlift.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer with a token for each word."""
    backend = Backend(WordLevel({f"w{number}": number for number in range(100_000)} | {"?": 100_000}, unk_token="?"))
    backend.pre_tokenizer = WhitespaceSplit()
    folder = tmp_path_factory.mktemp("words")
    backend.save(str(folder / "tokenizer.json"))
    return folder


def read(folder, **body):
    return asyncio.run(TokenCounter(Tokenizer(folder), Tokenizing()).tokens("a", read_body(json.dumps(body).encode()).parts))


def test_a_prompt_has_the_tokens_of_its_text_and_one_that_goes_on_continues_it(folder):
    first = {"role": "user", "content": " ".join(f"w{number}" for number in range(1000))}
    turn = read(folder, messages=[first])
    assert turn.dtype == np.int32
    assert 998 <= len(turn) <= 1002  # bytes would count 1,500
    assert (turn < token_counter.VOCABULARY).all()
    longer = read(folder, messages=[first, {"role": "assistant", "content": "w1\nw2"}])
    assert np.array_equal(longer[: len(turn)], turn)
    assert 2 <= len(longer) - len(turn) <= 4  # a line break is none of \ and n


def test_token_ids_are_counted_as_they_are(folder):
    assert read(folder, prompt=[1, 2, 70_000]).tolist() == [1, 2, 70_000 % token_counter.VOCABULARY]


def test_what_is_too_long_for_the_tokenizer_is_counted_by_bytes(folder, monkeypatch):
    monkeypatch.setattr(token_counter, "MAX_CHARACTERS", 200)
    short, long = "w1 w2", "w1 " * 100
    begun = read(folder, system=short)
    whole = read(folder, system=short, prompt=long)
    assert 2 <= len(begun) <= 4
    assert np.array_equal(whole, np.concatenate([begun, tokens([json.dumps(long).encode()])]))


def test_many_small_messages_are_few_parts(folder):
    raw = json.dumps({"messages": [{}, *[1] * 100_000]}).encode()
    assert len(read_body(raw).parts) == MAX_PARTS + 1
    # Their number counts, so that they have a turn.
    lengths = []

    class Turns(Tokenizing):
        async def in_turn(self, group, length, encode):
            lengths.append(length)
            return await super().in_turn(group, length, encode)

    parts = read_body(json.dumps({"messages": [{}, *[1] * 1000]}).encode()).parts
    asyncio.run(TokenCounter(Tokenizer(folder), Turns()).tokens("a", parts))
    assert lengths[0] > LONG


def test_an_image_counts_as_little_as_without_a_tokenizer(folder):
    image = "data:image/png;base64," + "aGVsbG8 "[:7] * 5000
    content = [{"type": "image_url", "image_url": {"url": image}}]
    raw = json.dumps({"messages": [{"role": "user", "content": content}]}).encode()
    assert 250 <= len(read(folder, messages=[{"role": "user", "content": content}])) <= 270
    assert 256 <= len(read_prompt(raw).tokens) <= 290
    other = raw.replace(b"aGVsbG8", b"aGVsbG9", 1)
    assert not np.array_equal(read_prompt(raw).tokens, read_prompt(other).tokens)


def test_a_text_that_the_tokenizer_cannot_read_is_counted_by_bytes(tmp_path, caplog):
    backend = Backend(WordLevel({"a": 0}))
    backend.pre_tokenizer = WhitespaceSplit()
    backend.save(str(tmp_path / "tokenizer.json"))
    for _ in range(2):
        assert np.array_equal(read(tmp_path, prompt="b c"), tokens([b'"b c"']))
    assert "bytes are counted" in caplog.text


def busy():
    """Takes 10 ms of CPU time, and returns how much it was."""
    began = time.thread_time()
    while (taken := time.thread_time() - began) < 0.01:
        pass
    return taken


def test_the_gate_counts_with_it_from_the_first_request_on(folder):
    async def main():
        async def answer(request):
            await request.send("200 OK", b"{}")

        text = " ".join(["w12345"] * 700)
        async with (
            Server(answer, kv_blocks=512).running() as server,
            gate_here(server.url, tokenizer=str(folder)) as base,
            httpx.AsyncClient(base_url=base) as http,
        ):
            assert (await http.post("/v1/completions", json={"prompt": text}, headers={"x-request-id": "one"})).status_code == 200
            explained = (await http.get("/v1/requests/one/explain")).json()["sequences"][0]
            assert 700 <= explained["prompt_tokens"] <= 702
            # What threads do is counted for the request that they do it for.
            CURRENT_WORK.set(work := Work())
            taken = await asyncio.to_thread(busy)
            assert work.seconds >= taken

    asyncio.run(main())


def test_a_path_without_a_tokenizer_ends_the_start(tmp_path):
    async def main():
        async with gate_here("http://127.0.0.1:1", tokenizer=str(tmp_path)):
            pass

    with pytest.raises(ModelNotFound, match=r"has no tokenizer\.json"):
        asyncio.run(main())
