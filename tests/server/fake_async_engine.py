"""An engine without a model, and a real HTTP server around it: bytes are tokens, and the answer repeats the prompt's words."""

import asyncio
import itertools
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager

import uvicorn

from chairlift.engine.request import validate
from chairlift.errors import EngineDead, InvalidRequest, RequestFailed
from chairlift.outputs import RequestOutput, Timing
from chairlift.sampling import SamplingParams
from chairlift.server.app import build
from chairlift.server.metrics import Metrics
from chairlift.server.service import Service

MODEL = "org/fake-model"


class FakeTokenizer:
    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def chat(self, messages: list[dict[str, str]]) -> list[int]:
        if messages[-1]["content"] == "bad template":
            raise InvalidRequest("the chat template refuses these messages", param="messages")
        return self.encode(" ".join(message["content"] for message in messages))


class FakeEngine:
    """What the server uses of AsyncEngine.

    Words in a prompt steer it: "slow" takes 10 ms a token, "boom" fails after two tokens as the engine would,
    "die" ends it, "bug" fails as it never should, "split" gives an increment without text, as half a character does.
    """

    def __init__(self) -> None:
        self.tokenizer = FakeTokenizer()
        self.facts = {"max_model_len": 2048, "vocab_size": 256}
        self.alive = self.ready = True
        self.started = self.left_early = self.finished = 0
        self.seen: list[SamplingParams] = []
        self.counters: dict[str, int] = {}
        self.end = asyncio.Event()

    async def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text)

    def validate(self, prompt: list[int], params: SamplingParams) -> SamplingParams:
        return validate(prompt, params, self.facts)

    def stats(self) -> dict[str, int]:
        return self.counters

    async def ended(self) -> None:
        await self.end.wait()

    async def close(self) -> None:
        self.alive = self.ready = False
        self.end.set()

    async def generate(self, prompt: list[int], params: SamplingParams) -> AsyncIterator[RequestOutput]:
        self.started += 1
        self.seen.append(params)
        text = bytes(prompt).decode()
        words = itertools.cycle(text.split() or ["nothing"])
        done = False
        try:
            for i in range(params.max_tokens):
                await asyncio.sleep(0.01 if "slow" in text else 0)
                if "die" in text.split():
                    await self.close()
                if not self.alive:
                    raise EngineDead("the engine has stopped")
                if i == 2 and "boom" in text:
                    raise RequestFailed("the model gave no usable answer for this request")
                if i == 2 and "bug" in text:
                    raise RuntimeError('File "/usr/lib/secret.py" object at 0x7f0000001234')
                done = i + 1 == params.max_tokens
                if i == 1 and "split" in text:
                    yield RequestOutput("", [1], prompt)
                    continue
                timing = Timing(0.001, 0.002, 0.003) if done else None
                yield RequestOutput(f"{next(words)} ", [1], prompt, "length" if done else None, cached_tokens=3 * done, timing=timing)
        finally:
            if done:
                self.finished += 1
            else:
                self.left_early += 1


def answer(prompt: str, tokens: int) -> str:
    """What the fake engine says to `prompt`."""
    words = itertools.cycle(prompt.split())
    return "".join(f"{next(words)} " for _ in range(tokens))


@contextmanager
def serving(engine: FakeEngine, api_key: str | None = None) -> Iterator[tuple[str, Service]]:
    """A server on a free loopback port, in a thread: yields its address and its service."""
    service = Service(engine, MODEL, Metrics(MODEL, engine.stats))
    server = uvicorn.Server(
        uvicorn.Config(build(service, api_key), port=0, http="h11", ws="none", lifespan="off", log_config=None, timeout_graceful_shutdown=1)
    )
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    wait_until(lambda: server.started)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}", service
    finally:
        server.should_exit = True
        thread.join(10)


def wait_until(condition, seconds: float = 20.0) -> None:
    """Returns as soon as `condition()` holds; the time is a guard, not a measurement."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.01)
