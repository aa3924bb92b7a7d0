"""An engine without a model, and a real HTTP server around it: bytes are tokens, and the answer repeats the prompt's words."""

import asyncio
import itertools
import socket
import threading
import time
from array import array
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import uvicorn

from chairlift.chat_template import ChatTemplate
from chairlift.checkpoint.info import CheckpointInfo
from chairlift.config import EngineConfig
from chairlift.engine.engine_info import EngineInfo
from chairlift.engine.engine_process import EngineProcess
from chairlift.engine.frames import Frame
from chairlift.engine.held_sequences import HeldSequence
from chairlift.engine.model_client import ModelClient
from chairlift.engine.replica import Replica
from chairlift.engine.stats import Stats
from chairlift.errors import ChairliftError, DeadlineMissed, EngineClosed, EngineDead, InvalidRequest, QueueFull, RequestFailed
from chairlift.outputs import RequestOutput, Timeline, Timing, TokenLogprobs
from chairlift.sampling import SamplingParams
from chairlift.scheduling import Scheduling
from chairlift.server.app import application, guarded
from chairlift.server.batch.runner import BatchRunner
from chairlift.server.config import ServerConfig
from chairlift.server.http.protocol import HttpProtocol, HttpServer
from chairlift.server.keys import read_keys
from chairlift.server.lifecycle import ModelState
from chairlift.server.load_policy import LoadPolicy
from chairlift.server.model import ServedModel
from chairlift.server.service import Service
from chairlift.server.storage.storage import Storage
from chairlift.server.tiers import ServiceTiers

MODEL = "org/fake-model"


class FakeTokenizer:
    special_token_ids = frozenset({0})
    special_tokens = {"eos_token": "<eos>"}  # noqa: RUF012
    strips_first_space = False
    num_closing_tokens = 0
    eos_token_ids = frozenset({0})
    suppressed_token_ids = ()
    template_source = "{{ messages }}"
    control_texts = ("<|end|>", "<eos>")
    longest_token = 4

    def __init__(self) -> None:
        self.template = ChatTemplate({"default": "{{ messages }}{{ tools }}{{ documents }}<tool_call>"}, {})
        self.rendered: list[tuple[list[dict[str, object]], dict[str, object]]] = []

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode())

    def decode(self, ids: list[int], *, skip_special_tokens: bool = True) -> str:
        return bytes(i for i in ids if i or not skip_special_tokens).decode(errors="replace")

    def piece(self, token: int) -> bytes:
        return bytes([token])

    def min_tokens(self, text: str) -> int:
        return -(-len("".join(text.split())) // self.longest_token)

    def render(self, messages: list[dict[str, str]], **variables: object) -> list[tuple[str, bool]]:
        self.rendered.append((messages, variables))
        if messages[-1]["content"] == "bad template":
            raise InvalidRequest("the chat template refuses these messages", param="messages")
        return [(" ".join(message["content"] for message in messages), False)]

    def encode_pieces(self, pieces: list[tuple[str, bool]], group: str | None = None) -> list[int]:
        return [token for text, _ in pieces for token in self.encode(text)]


@dataclass
class FakeStream:
    prompt: list[int]
    params: SamplingParams
    scheduling: Scheduling
    sequence: HeldSequence | None = None
    num_received: int = 0
    """Tokens of the answers that are kept; those of discarded answers are added at the end."""
    error: ChairliftError | None = None
    """Why a held request ends."""

    def fail(self, error: ChairliftError) -> None:
        self.error = error

    def timelines(self) -> list[Timeline]:
        return []


class FakeEngine(ModelClient):
    """What the server uses of AsyncEngine.

    Words in a prompt steer it: "slow" takes 10 ms a token, "boom" fails after two tokens as the engine would,
    "die" ends it, "dies2" does so after two tokens, "once2" only if nothing has ended it before,
    "bug" fails as it never should, "split" gives an increment without text, as half a character does,
    "full" finds a full queue, "late" misses its deadline (that for the first token if it has one, else after two tokens),
    "held" waits until it is `released`, "paused" does so after two tokens. What follows "SAY:" is the answer, three
    characters at a time. Each further one of n answers begins one word later.
    """

    info: EngineInfo = EngineInfo(
        model=MODEL,
        digest="ab" * 32,
        checkpoint=CheckpointInfo("LlamaForCausalLM", 134_515_008, "gguf", "Q4_1", 96_577_024),
        determinism="batch-invariant",
        max_model_len=2048,
        embedding_size=64,
        vocab_size=256,
        max_num_seqs=8,
        num_bytes=10**9,
        decisions=[["device", "cpu", "there is no other"]],
    )
    tokenizer = None

    def __init__(self) -> None:
        super().__init__(EngineConfig(), itertools.count(1))
        self.tokenizer = FakeTokenizer()
        self.adapters: dict[str, str] = {}
        self.alive = self.ready = True
        self.process = EngineProcess()  # is not started
        self.replicas = [Replica(0, self)]
        self.open_sequences = 0
        self.on_end: Callable[[], None] | None = None
        self.end_with = EngineDead
        self.stuck: tuple[str, float] | None = None
        self.started = self.left_early = self.finished = self.deaths = 0
        self.seen: list[SamplingParams] = []
        self.scheduled: list[Scheduling] = []
        self.named: list[str] = []
        self.spent: list[dict[str, float]] = []
        self.timelines: dict[str, list[Timeline]] = {}
        self.released = False
        self.expected_wait_ms: int | None = None
        """How long requests wait for their session's turn before they end."""
        self.counters: dict[str, Any] = {}
        self.others: list[Timeline] = []
        self.energy_joules: float | None = None
        self.looks = 0
        self.snapshot: dict[str, Any] = {
            "running": [],
            "waiting": [],
            "waiting_by_tier": {},
            "steps": [],
            "kv_map": b"",
            "blocks_per_cell": 1,
            "now_us": 0,
            "names": [],
        }
        self.end = asyncio.Event()
        self.frames: list[Frame] = []

    def check_ready(self) -> None:
        """`run` looks by itself."""

    def tell(self, frame: Frame) -> None:
        self.frames.append(frame)

    def describe(self, **changes: Any) -> None:
        """Changes what the server knows of the engine."""
        self.info = replace(self.info, **changes)

    def stats(self) -> Stats:
        return Stats(**self.counters)

    async def explain(self, request_id: str) -> list[Timeline]:
        waits = [] if self.expected_wait_ms is None else [timeline(finish=None, expected_wait_ms=self.expected_wait_ms)]
        return self.timelines.get(request_id, waits)

    async def explain_sequences(self, tags: list[int]) -> list[Timeline]:
        return [timeline for timeline in self.others if timeline.tag in tags]

    async def take_snapshot(self) -> dict[str, Any]:
        self.looks += 1
        steps = [{"step": self.looks, **step} for step in self.snapshot["steps"]]
        return {**self.snapshot, "steps": steps, "stats": self.stats().pack()}

    async def ended(self) -> None:
        await self.end.wait()

    async def close(self) -> None:
        if self.alive:
            self.end_with = EngineClosed
        self.stop()

    def stop(self) -> None:
        was_alive, self.alive, self.ready = self.alive, False, False
        self.end.set()
        if self.on_end is not None and self.end_with is EngineDead:
            self.replicas[0].restarts += was_alive
            self.on_end()

    def abort_dropped(self, tag: int) -> None:
        """`run` looks by itself."""

    def _seeded(self, params: SamplingParams) -> SamplingParams:
        return params  # tests compare them

    def _stream(self, prompt_token_ids: list[int], params: SamplingParams, scheduling: Scheduling, **rest: Any) -> "FakeStream":
        return FakeStream(prompt_token_ids, params, scheduling, rest["sequence"])

    async def run(
        self,
        stream: "FakeStream",
        *,
        request_id: str,
        on_start: Callable[[], None],
        spent: dict[str, float],
        session: str | None = None,
    ) -> AsyncIterator[RequestOutput]:
        prompt, params, scheduling = stream.prompt, stream.params, stream.scheduling
        self.started += 1
        self.seen.append(params)
        self.scheduled.append(scheduling)
        self.named.append(request_id)
        self.spent.append(spent)
        if stream.sequence is not None:
            stream.sequence.continued_by(self.started)
        outputs: list[RequestOutput] = []
        # What this takes of the event loop is not the server's.
        text = bytes(prompt if len(prompt) < 100_000 else prompt[:1000]).decode(errors="replace")
        said = text.partition("SAY:")[2]
        done = False
        try:
            if "full" in text:
                raise QueueFull("4 requests are waiting, as many as may", retry_after=2.3)
            while "held" in text and not self.released:
                await asyncio.sleep(0.01)
                if stream.error is not None:
                    raise stream.error
            on_start()
            if params.embed:
                yield RequestOutput("", [], prompt, "stop", embedding=array("f", [1.0, 0.0, 0.0, 0.0]), queued=0.001)
                return
            for i in range(params.max_tokens):
                await asyncio.sleep(0.01 if "slow" in text else 0)
                while "paused" in text and i >= 2 and self.alive and not self.released:
                    await asyncio.sleep(0.01)
                if "die" in text.split() or f"dies{i}" in text or (f"once{i}" in text and not self.deaths):
                    self.deaths += 1
                    self.stop()
                if not self.alive:
                    raise self.end_with("the engine has stopped")
                if stream.sequence is not None:
                    stream.sequence.check_dropped()
                if "late" in text and i == (2 if scheduling.ttft_deadline_ms is None else 0):
                    counts = {"prompt_tokens": len(prompt), "completion_tokens": i * params.num_sequences}
                    raise DeadlineMissed("the deadline was missed", **counts)
                if i == 2 and "boom" in text:
                    raise RequestFailed("the model gave no usable answer for this request")
                if i == 2 and "bug" in text:
                    raise RuntimeError('File "/usr/lib/secret.py" object at 0x7f0000001234')
                reason = "stop" if said and len(said) <= 3 * i + 3 else "length" if i + 1 == params.max_tokens else None
                done = reason is not None
                for index in range(params.n):
                    if i == 1 and "split" in text:
                        yield RequestOutput("", [1], prompt, index=index, queued=0.001)
                        continue
                    word = said[3 * i : 3 * i + 3] if said else _word(text, i + index)
                    output = RequestOutput(word, [1], prompt, reason, index=index, queued=0.001)
                    if params.logprobs is not None:
                        output.logprobs = [scored(1, params.logprobs)]
                        output.text_offsets = [sum(len(_word(text, j + index)) for j in range(i))]
                    if params.prompt_logprobs is not None and i == index == 0:
                        output.prompt_logprobs = [None, *(scored(token, params.prompt_logprobs) for token in prompt[1:])]
                    # A fork finds the whole prompt computed.
                    output.cached_tokens = len(prompt) if index else 3
                    output.own_cached_tokens = len(prompt) if index else 1
                    if done:
                        output.timing = Timing(0.001, 0.001, 0.002, 0.003)
                        if "drafted" in text:
                            output.timeline = timeline(draft_tokens=5, accepted_draft_tokens=2)
                        elif self.energy_joules is not None:
                            output.timeline = timeline(energy_joules=self.energy_joules)
                    stream.num_received += 1
                    outputs.append(output)
                    if done and stream.sequence is not None:
                        stream.sequence.finish(outputs)
                    yield output
                if done:
                    break
        finally:
            tenant, priority = scheduling.tenant, scheduling.priority
            self.timelines[request_id] = [timeline(tenant=tenant, priority=priority) for _ in range(params.num_sequences)]
            if done:
                stream.num_received += (params.num_sequences - params.n) * (i + 1)
                self.finished += 1
            else:
                self.left_early += 1


def scored(token: int, likeliest: int) -> TokenLogprobs:
    """A token that is the third likeliest, behind 120 and 121, or less likely if fewer were asked for."""
    top = ((120, -0.25), (121, -0.5), (token, -0.75))
    return TokenLogprobs(token, -0.75, 3, top[:likeliest])


def timeline(**changes: object) -> Timeline:
    """The timeline of a request that waited a while, ran and ended."""
    return replace(
        Timeline(
            tag=1,
            finish="length",
            arrived=100.0,
            submitted=100.0,
            started=101.5,
            first_token=101.75,
            ended=102.0,
            prompt_tokens=5,
            cached_tokens=0,
            own_cached_tokens=0,
            lost_hit_tokens=0,
            output_tokens=3,
            computed_tokens=7,
            recomputed_tokens=0,
            draft_tokens=0,
            accepted_draft_tokens=0,
            preemptions=0,
            swaps=0,
            block_seconds=0.5,
            compute_seconds=0.25,
            energy_joules=None,
            tenant="",
            priority=0,
            tier="default",
            limit=None,
            preempted_by=(),
            preempted_for={},
            states={"wait_blocks": 1.5, "prefill": 0.25, "decode": 0.25},
        ),
        **changes,
    )


def answer(prompt: str, tokens: int, index: int = 0) -> str:
    """What the fake engine says to `prompt`, as the answer of that index."""
    return "".join(_word(prompt, i + index) for i in range(tokens))


def _word(prompt: str, i: int) -> str:
    words = prompt[:1000].split() or ["nothing"]  # a text without spaces is not repeated whole
    return f"{words[i % len(words)]} "


class _PromptServer(HttpServer):
    """The server, which notices within 10 ms that it should exit. uvicorn takes 0.2 s, most of the time of most tests."""

    async def main_loop(self) -> None:
        """Serves until `should_exit`."""
        while not await self.on_tick(0):
            await asyncio.sleep(0.01)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Gives open requests a second to end."""
        for server in self.servers:
            server.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()
        with suppress(TimeoutError):
            async with asyncio.timeout(1):
                while self.server_state.connections or self.server_state.tasks:
                    await asyncio.sleep(0.01)
        for task in self.server_state.tasks:
            task.cancel()


@contextmanager
def serving(engine: FakeEngine, api_key: str | None = None, **settings: Any) -> Iterator[tuple[str, Service]]:
    """A server on a free loopback port, in a thread, with `settings` of ServerConfig: yields its address and its service."""
    model = ServedModel(MODEL, engine)
    with serving_models([model], api_key, **settings) as (base, service):
        yield base, service


@contextmanager
def serving_models(
    models: Sequence[ServedModel], api_key: str | None = None, *, policy: LoadPolicy | None = None, **settings: Any
) -> Iterator[tuple[str, Service]]:
    """As `serving`, with several models. Those with the state `STARTING` are ready."""
    config = ServerConfig(api_key=api_key, **settings)
    keys = read_keys(config.api_key, config.api_key_file, config.operator_key)
    service = Service(models, policy=policy, tiers=ServiceTiers().granted(keys), exact_history=config.exact_history)
    for model in models:
        if model.lifecycle.state is ModelState.STARTING:
            service.loader.serve_started(model)
    if config.data_dir is not None:
        service.storage = Storage(config.data_dir, config.max_data_size)
    app, keys = application(service, config.max_body_size), read_keys(config.api_key, config.api_key_file, config.operator_key)
    server = _PromptServer(
        uvicorn.Config(
            guarded(app, config, keys),
            ssl_certfile=config.ssl_certfile,
            ssl_keyfile=config.ssl_keyfile,
            port=0,
            http=HttpProtocol,
            ws="none",
            lifespan="off",
            log_config=None,
        )
    )

    service.metrics_page.pause = 0.0

    async def run() -> None:
        service.loop_monitor.start()
        batches = None
        if service.storage is not None:
            runner = BatchRunner(app, service, service.storage, config.max_body_size, keys)
            batches = asyncio.create_task(runner.run())
        await server.serve()
        if batches is not None:
            batches.cancel()
            await asyncio.gather(batches, return_exceptions=True)
            service.storage.close()
        service.loop_monitor.stop()

    thread = threading.Thread(target=lambda: asyncio.run(run()), daemon=True)
    thread.start()
    wait_until(lambda: server.started)
    try:
        yield f"http{'s' if config.ssl_certfile else ''}://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}", service
    finally:
        server.should_exit = True
        thread.join(10)


def wait_until(condition, seconds: float = 20.0) -> None:
    """Returns as soon as `condition()` holds; the time is a guard, not a measurement."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.01)
