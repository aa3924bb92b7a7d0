"""Every route checks the length of its texts before it tokenizes them, and long texts are tokenized one request at a time."""

import asyncio
import json
import os
import re
import sys
import threading
from pathlib import Path

import httpx
import pytest
from scripted_engine import ScriptedEngine, WordTokenizer
from server_here import serving

import chairlift.chat
import chairlift.server
from chairlift.errors import InvalidRequest
from chairlift.server import tokenizing as tokenizing_module
from chairlift.server.tokenizing import LONG, MAX_CHARACTERS, NICE, Tokenizing

TEXT = "7" * (MAX_CHARACTERS + 1)
SAID = [{"role": "user", "content": TEXT}]
BODIES = {
    "/v1/completions": {"prompt": TEXT},
    "/v1/completions?several": {"prompt": ["a", TEXT]},
    "/v1/completions?truncated": {"prompt": TEXT, "truncate_prompt_tokens": 5},
    "/v1/chat/completions": {"messages": SAID},
    "/v1/chat/completions?truncated": {"messages": SAID, "truncate_prompt_tokens": 5},
    "/v1/chat/completions?many": {"messages": [{"role": "user", "content": "7" * 1000}] * 1100},
    "/v1/responses": {"input": TEXT},
    "/v1/messages": {"messages": SAID, "max_tokens": 5},
    "/v1/messages/count_tokens": {"messages": SAID},
    "/v1/responses/input_tokens": {"input": TEXT},
    "/v1/embeddings": {"input": ["a", TEXT]},
    "/v1/rerank": {"query": "a", "documents": ["b", TEXT]},
    "/api/generate": {"prompt": TEXT},
    "/api/chat": {"messages": SAID},
    "/api/embed": {"input": TEXT},
    "/api/embeddings": {"prompt": TEXT},
    "/tokenize": {"prompt": TEXT},
    "/tokenize?messages": {"messages": SAID},
    "/v1/sequences": {"prompt": TEXT},
    "/v1/sequences?messages": {"messages": SAID},
}


class RecordingTokenizer(WordTokenizer):
    """Keeps the lengths of the texts that it tokenized."""

    def __init__(self):
        super().__init__()
        self.lengths = []
        self.groups = []

    def encode_pieces(self, pieces, group=None):
        self.groups.append(group)
        return super().encode_pieces(pieces)

    def encode(self, text, *, add_special_tokens=True):
        self.lengths.append(len(text))
        return super().encode(text)


@pytest.fixture(scope="module")
def recorded():
    """A server that also computes embeddings, and its tokenizer."""
    engine = ScriptedEngine()
    engine.tokenizer = RecordingTokenizer()
    engine.describe(max_text_len=64, embedding_size=4)
    with serving(engine) as (base, _), httpx.Client(base_url=base, timeout=60) as client:
        yield client, engine.tokenizer


@pytest.mark.parametrize("filler", ["7", " "], ids=["digits", "spaces"])
@pytest.mark.parametrize("path", BODIES)
def test_a_text_that_is_too_long_is_neither_rendered_nor_tokenized(recorded, path, filler):
    client, tokenizer = recorded
    tokenizer.lengths.clear()
    tokenizer.rendered.clear()
    response = client.post(path, content=json.dumps(BODIES[path]).replace("7", filler), headers={"content-type": "application/json"})
    assert response.status_code == 400
    assert re.search("context_length|context length|context window|at most 1048576 (characters|are)", response.text), response.text
    assert path.startswith(("/api/", "/v1/rerank")) or response.json()["error"]["param"] in BODIES[path]
    assert sum(tokenizer.lengths) < 1000
    assert tokenizer.rendered == []


def test_an_appended_text_that_is_too_long_is_not_tokenized(recorded):
    client, tokenizer = recorded
    sequence = client.post("/v1/sequences", json={"prompt": "a"}).json()["id"]
    tokenizer.lengths.clear()
    assert client.post(f"/v1/sequences/{sequence}/append", json={"text": TEXT}).status_code == 400
    assert tokenizer.lengths == []
    client.delete(f"/v1/sequences/{sequence}")


@pytest.mark.parametrize(
    ("path", "body", "count"),
    [
        ("/tokenize", {"prompt": "7" * LONG * 2}, LONG * 2),
        ("/tokenize", {"messages": [{"role": "user", "content": "7" * LONG * 2}]}, LONG * 2),
        ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "7" * LONG * 2}]}, LONG * 2),
        ("/v1/responses/input_tokens", {"input": "7" * LONG * 2}, LONG * 2),
        ("/v1/completions", {"prompt": "7" * LONG * 2, "truncate_prompt_tokens": 5, "max_tokens": 1}, 5),
    ],
)
def test_a_text_beyond_the_context_can_be_counted_and_truncated(recorded, path, body, count):
    said = recorded[0].post(path, json=body).json()
    assert count in (said.get("count"), said.get("input_tokens"), said.get("usage", {}).get("prompt_tokens"))


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/sequences"])
def test_tokens_of_a_request_with_a_salt_are_not_kept(recorded, path):
    client, tokenizer = recorded
    tokenizer.groups.clear()
    for salt in ({}, {"cache_salt": "secret"}):
        body = {"messages": [{"role": "user", "content": "a"}]} | salt | ({} if "sequences" in path else {"max_tokens": 1})
        assert client.post(path, json=body).status_code == 200
    assert tokenizer.groups == ["", None]


def test_no_module_of_the_server_tokenizes_by_itself():
    own = {"tokenizing.py"}
    found = [
        f"{path.name}: {line.strip()}"
        for package in (chairlift.server, chairlift.chat)
        for path in Path(package.__file__).parent.rglob("*.py")
        if path.name not in own
        for line in path.read_text().splitlines()
        if re.search(r"(tokenizer|engine)\.(encode|encode_pieces|render|chat|prepare)\(", line)
    ]
    allowed = ("encode(mark,", "encode(forced,")  # marks of the model's formats
    assert [line for line in found if not any(text in line for text in allowed)] == []
    assert len(found) == len(allowed)


class SlowTokenizer(WordTokenizer):
    """Counts how many texts it tokenizes at once."""

    def __init__(self):
        super().__init__()
        self.lock = threading.Lock()
        self.now = self.most = 0

    def encode(self, text, *, add_special_tokens=True):
        with self.lock:
            self.now += 1
            self.most = max(self.most, self.now)
        threading.Event().wait(0.01)
        with self.lock:
            self.now -= 1
        return [len(text)]


def test_long_texts_are_tokenized_one_by_one_and_short_ones_pass_them():
    async def main():
        tokenizer, tokenizing = SlowTokenizer(), Tokenizing()
        long = [tokenizing.encode("", tokenizer, ["7" * LONG, "7"], 10 * LONG) for _ in range(4)]
        long += [tokenizing.chat("", tokenizer, [{"role": "user", "content": "7" * (LONG + 1)}], {}, 10 * LONG) for _ in range(4)]
        running = [asyncio.ensure_future(one) for one in long]
        assert await tokenizing.encode("", tokenizer, ["77"], 10) == [[2]]
        assert not all(one.done() for one in running)
        assert await asyncio.gather(*running) == [[[LONG], [1]]] * 4 + [[LONG + 1]] * 4
        assert tokenizer.most <= 2

    asyncio.run(main())


@pytest.mark.skipif(sys.platform != "linux", reason="threads have a priority of their own on Linux only")
def test_long_texts_have_a_lower_priority_than_running_requests():
    class Asked(WordTokenizer):
        def encode(self, text, *, add_special_tokens=True):
            return [os.getpriority(os.PRIO_PROCESS, 0)]

    async def priorities():
        tokenizing = Tokenizing()
        return [await tokenizing.encode("", Asked(), [text], 10 * LONG) for text in ("7", "7" * (LONG + 1))]

    usual = os.getpriority(os.PRIO_PROCESS, 0)
    assert asyncio.run(priorities()) == [[[usual]], [[min(19, usual + NICE)]]]


def test_the_memory_of_a_long_text_is_returned(monkeypatch):
    returned = []
    monkeypatch.setattr(tokenizing_module, "trim", lambda: returned.append(tokenizer.now))

    async def main():
        for text in ("7", "7" * (LONG + 1)):
            await tokenizing.encode("", tokenizer, [text], 10 * LONG)

    tokenizer, tokenizing = SlowTokenizer(), Tokenizing()
    asyncio.run(main())
    assert returned == [0]


class OrderedTokenizer(WordTokenizer):
    """Renders a long text of each conversation, and records whose texts it rendered and tokenized."""

    def __init__(self):
        super().__init__()
        self.order = {"render": [], "encode": []}

    def render(self, messages, **variables):
        self.order["render"].append(messages[0]["content"])
        threading.Event().wait(0.005)
        return [(messages[0]["content"] * (LONG + 1), False)]

    def encode_pieces(self, pieces, group=None):
        self.order["encode"].append(pieces[0][0][0])
        threading.Event().wait(0.005)
        return []


def test_a_group_of_tenants_does_not_wait_for_all_that_another_has_sent():
    async def main():
        tokenizer, tokenizing = OrderedTokenizer(), Tokenizing()
        await asyncio.gather(
            *(tokenizing.chat(group, tokenizer, [{"role": "user", "content": group}], {}, 10 * LONG) for group in "a" * 20 + "b")
        )
        for order in tokenizer.order.values():
            assert (len(order), order.index("b") < 6) == (21, True), order

    asyncio.run(main())


def test_a_request_that_is_cancelled_keeps_the_turn_of_its_group_while_it_is_rendered():
    class BlockedTokenizer(OrderedTokenizer):
        unblock = threading.Event()

        def render(self, messages, **variables):
            pieces = super().render(messages)
            self.unblock.wait(60)
            return pieces

    async def main():
        tokenizer, tokenizing = BlockedTokenizer(), Tokenizing()
        chats = [tokenizing.chat("a", tokenizer, [{"role": "user", "content": said}], {}, 10 * LONG) for said in ("c", "d")]
        cancelled, other = map(asyncio.ensure_future, chats)
        while not tokenizer.order["render"]:
            await asyncio.sleep(0.001)
        cancelled.cancel()
        await asyncio.wait([other], timeout=0.05)
        assert tokenizer.order["render"] == ["c"]
        tokenizer.unblock.set()
        await other
        assert tokenizer.order["render"] == ["c", "d"]

    asyncio.run(main())


def test_what_templates_leave_out_of_an_answer_does_not_count_before_rendering():
    async def main(role):
        tokenizer = OrderedTokenizer()
        messages = [{"role": "user", "content": "a"}, {"role": role, "content": "7" * 10 * LONG}]
        await Tokenizing().chat("", tokenizer, messages, {}, LONG)
        return tokenizer.order["render"]

    assert asyncio.run(main("assistant")) == ["a"]
    with pytest.raises(InvalidRequest, match="which are at least 81921 tokens"):
        asyncio.run(main("user"))


@pytest.mark.parametrize(
    ("must_fit", "limit", "most"), [(True, 10, MAX_CHARACTERS), (True, 1 << 19, 1 << 21), (False, 1 << 19, MAX_CHARACTERS)]
)
def test_white_space_counts_by_characters(must_fit, limit, most):
    async def main(length):
        [tokens] = await Tokenizing().encode("", WordTokenizer(), [" " * length], limit, must_fit=must_fit)
        return len(tokens)

    assert asyncio.run(main(most)) == most
    with pytest.raises(InvalidRequest, match=f"at most {most} are tokenized") as caught:
        asyncio.run(main(most + 1))
    assert caught.value.code == "context_length_exceeded"


def test_a_request_that_is_cancelled_leaves_the_line_and_frees_no_place():
    async def main():
        tokenizer, tokenizing = SlowTokenizer(), Tokenizing()
        for _ in range(8):
            waiting = asyncio.ensure_future(tokenizing.encode("", tokenizer, ["7" * (LONG + 1)], 10 * LONG))
            await asyncio.sleep(0.002)
            waiting.cancel()
        await tokenizing.encode("", tokenizer, ["7" * (LONG + 1)], 10 * LONG)
        assert tokenizer.most == 1

    asyncio.run(main())


@pytest.mark.parametrize("name", ["must_fit", "limit", "tokenizer", "text"])
def test_a_variable_of_a_template_may_have_any_name(recorded, name):
    body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1, "chat_template_kwargs": {name: 1}}
    response = recorded[0].post("/v1/chat/completions", json=body)
    assert response.status_code == 200
    assert recorded[1].rendered[-1][1] == {name: 1}


def test_a_text_is_refused_only_if_its_tokens_surely_are_too_many():
    async def main(text):
        return await Tokenizing().encode("", WordTokenizer(), [text], 10)

    assert asyncio.run(main("7" * 40)) == [[55] * 40]
    with pytest.raises(InvalidRequest, match=r"has 41 characters, which are at least 11 tokens") as caught:
        asyncio.run(main("7" * 41))
    assert (caught.value.param, caught.value.code) == ("prompt", "context_length_exceeded")
