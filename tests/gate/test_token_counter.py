"""Prompts that are counted with the upstream's tokenizer."""

import asyncio
import json
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
from chairlift.gate.prompt import tokens
from chairlift.gate.token_counter import TokenCounter
from chairlift.server.tokenizing import Tokenizing
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
    counter = TokenCounter(Tokenizer(folder), Tokenizing())
    return asyncio.run(counter.read("a", json.dumps(body).encode())).tokens


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


def test_a_prompt_that_is_too_long_for_the_tokenizer_is_counted_by_bytes(folder, monkeypatch):
    monkeypatch.setattr(token_counter, "MAX_CHARACTERS", 100)
    text = "w1 " * 100
    assert np.array_equal(read(folder, prompt=text), tokens([json.dumps(text).encode()]))


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

    asyncio.run(main())


def test_a_path_without_a_tokenizer_ends_the_start(tmp_path):
    async def main():
        async with gate_here("http://127.0.0.1:1", tokenizer=str(tmp_path)):
            pass

    with pytest.raises(ModelNotFound, match=r"has no tokenizer\.json"):
        asyncio.run(main())
