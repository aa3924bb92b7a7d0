"""The product's engine over a runner that answers as a prompt's words say: bytes are tokens, and the answer repeats the words."""

# ruff: noqa: SLF001 - it looks into the engine that it drives

import asyncio
import struct
from array import array
from collections.abc import AsyncGenerator, Coroutine, Sequence
from concurrent.futures import Future
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import numpy as np

from chairlift import _core
from chairlift.chat_template import ChatTemplate
from chairlift.checkpoint.info import CheckpointInfo
from chairlift.config import EngineConfig
from chairlift.engine import clock
from chairlift.engine.engine import Engine
from chairlift.engine.engine_request import EngineRequest
from chairlift.engine.frames import Frame, Load
from chairlift.engine.replicated_engine import ReplicatedEngine
from chairlift.engine.same_process import SameProcess
from chairlift.engine.stats import Stats
from chairlift.errors import EngineDead, InvalidRequest, ModelNotFound, QueueFull
from chairlift.outputs import RequestOutput, Timeline
from chairlift.runner.buffers import Sampled, StepBuffers, StepSizes
from chairlift.runner.interface import NewSequence
from chairlift.runner.null_runner import NullRunner
from chairlift.sampling import SamplingParams
from chairlift.scheduling import Scheduling

END = 0
"""The token that ends an answer."""
BYTES = 256
EMBEDDING = [1.0, 0.0, 0.0, 0.0]
PAUSE_SECONDS = 0.01
"""What a step of a "slow" prompt takes, and how often is looked whether those that wait may go on."""
HOUR = 3_600_000_000
CACHED = {"cached_tokens": 3, "own_cached_tokens": 1}
"""The prompt's tokens that `shown` may have in the cache: those that all know of, and those that the tenant does."""
STOPPED = "the engine has stopped"
_WORDS: list[bytes] = []
_TOKENS: dict[str, int] = {}


def word_token(word: str) -> int:
    """The token that is this word of an answer. Its number is above those of bytes."""
    if word not in _TOKENS:
        _WORDS.append(word.encode())
        _TOKENS[word] = BYTES + len(_TOKENS)
    return _TOKENS[word]


class WordTokenizer:
    """Bytes are the tokens of prompts, and words those of answers."""

    special_token_ids = eos_token_ids = frozenset({END})
    special_tokens = {"eos_token": "<eos>"}  # noqa: RUF012
    strips_first_space = False
    num_closing_tokens = 0
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
        return b"".join(self.piece(token) for token in ids if token or not skip_special_tokens).decode(errors="replace")

    def piece(self, token: int) -> bytes:
        return bytes([token]) if token < BYTES else b"".join(_WORDS[token - BYTES : token - BYTES + 1])

    def min_tokens(self, text: str) -> int:
        return -(-len("".join(text.split())) // self.longest_token)

    def render(self, messages: list[dict[str, str]], **variables: object) -> list[tuple[str, bool]]:
        self.rendered.append((messages, variables))
        if messages[-1]["content"] == "bad template":
            raise InvalidRequest("the chat template refuses these messages", param="messages")
        return [(" ".join(message["content"] for message in messages), False)]

    def encode_pieces(self, pieces: list[tuple[str, bool]], group: str | None = None) -> list[int]:
        return [token for text, _ in pieces for token in self.encode(text)]


def answer(prompt: str, tokens: int, index: int = 0) -> str:
    """What the engine says to `prompt`, as the answer of that index."""
    return "".join(f"{one} " for one in islice(cycle(prompt.split()), index, index + tokens))


@dataclass
class Answer:
    """A sequence in the runner: the words that steer it, and what it says."""

    tag: int
    index: int
    text: str
    params: SamplingParams
    tokens: list[int] | None
    """All of its tokens; None if it repeats the prompt's words."""
    words: list[str] = field(init=False)
    position: int = 0
    """That of the prompt's last token."""
    prompt: Any = None
    said: int = 0
    late_at: int = 2

    def __post_init__(self) -> None:
        self.words = self.text[:1000].split() or ["nothing"]  # a text without spaces is not repeated whole

    def token(self, i: int) -> int:
        if self.tokens is not None:
            return self.tokens[i] if i < len(self.tokens) else END
        return word_token("" if i == 1 and "split" in self.text else f"{self.words[(i + self.index) % len(self.words)]} ")


class ScriptedRunner(NullRunner):
    """Says the answers of its sequences, which are known by their seeds."""

    has_logprobs = True
    client: "ScriptedEngine"
    answers: dict[int, Answer]
    slots: dict[int, Answer]

    def add_request(self, slot: int, sequence: NewSequence) -> None:
        self.slots[slot] = self.answers[sequence.seed]
        self.slots[slot].position, self.slots[slot].prompt = sequence.prompt_len - 1, sequence.prompt

    def launch(self, buffer_index: int, sizes: StepSizes) -> Sampled:
        buffers = self.buffers[buffer_index]
        sampled = Sampled(np.zeros(sizes.samples, np.int32), np.full(sizes.samples, -0.75, np.float32), {}, [], {})
        for at, slot in enumerate(buffers.sample_slots[: sizes.samples].tolist()):
            one = self.slots[slot]
            one.said = int(buffers.positions[buffers.sample_at[at]]) - one.position
            sampled.tokens[at] = self._sample(one, at, sampled)
            one.said += 1
        self._score_prompts(buffers, sizes, sampled)
        return sampled

    def collect(self, step: Sampled) -> Sampled:
        return step

    def _sample(self, one: Answer, at: int, sampled: Sampled) -> int:
        i, text, params = one.said, one.text, one.params
        if "die" in text.split() or f"dies{i}" in text or (f"once{i}" in text and not self.client.deaths):
            self.client.deaths += 1
            raise EngineDead(STOPPED)
        if i == 2 and "stuck" in text:
            sampled.refusals[at] = InvalidRequest("nothing can follow").packed()
        if i == 2 and ("boom" in text or "stuck" in text):
            return -1
        if params.embed:
            sampled.details[at] = array("f", EMBEDDING).tobytes()
            return _core.NO_TOKEN
        if params.logprobs is not None:
            sampled.details[at] = scored(one.token(i), params.logprobs)
        return one.token(i)

    def _score_prompts(self, buffers: StepBuffers, sizes: StepSizes, sampled: Sampled) -> None:
        counts = np.diff(buffers.query_starts[: sizes.seqs + 1]).tolist()
        for slot, count, after in zip(buffers.batch_slots.tolist(), counts, buffers.context_lens.tolist(), strict=False):
            prompt = self.slots[slot].prompt
            if prompt is not None and (positions := prompt.take(after - count, after)):
                tokens = prompt.tokens[positions.start + 1 : positions.stop + 1].tolist()
                sampled.prompts.append((prompt.tag, b"".join(scored(token, prompt.count) for token in tokens)))


def scored(token: int, count: int) -> bytes:
    """A token that is the third likeliest, behind 120 and 121, or less likely if fewer were asked for."""
    top = ((120, -0.25), (121, -0.5), (token, -0.75), *((122 + i, -1.0) for i in range(17)))[:count]
    tokens, logprobs = zip(*top, strict=True) if top else ((), ())
    return struct.pack(f"<ifi{count}i{count}f", token, -0.75, 3, *tokens, *logprobs)


class ScriptedCore(Engine):
    """The engine's side: what the words of a prompt do before and between steps."""

    def __init__(self, client: "ScriptedEngine", *arguments: Any) -> None:
        super().__init__(*arguments)
        self.client, self.info = client, replace(self.info, **client.described)
        self.runner.__class__ = ScriptedRunner
        self.runner.client, self.runner.answers, self.runner.slots = client, {}, {}
        self._held: list[EngineRequest] = []
        self._slow_until = 0.0

    def add(self, request: EngineRequest, on_prepared: Any = None) -> None:
        prompt, params, scheduling = memoryview(request.prompt).cast("i").tolist(), request.sampling, request.scheduling
        whole = self.client.text(prompt)
        text = whole if self.client.steered else ""
        if "full" in text:
            raise QueueFull("4 requests are waiting, as many as may", retry_after=2.3)
        if "late" in text and scheduling.ttft_deadline_ms is None:
            scheduling = replace(scheduling, deadline_ms=HOUR / 2000)
        # No adapter is loaded, and what one has computed is not for others.
        if self.client.cached or params.lora:
            scheduling = replace(scheduling, cache_salt=str(hash((self.client.cached, params.lora, scheduling.cache_salt))))
        sampling = replace(params, seed=request.tag, structured_output=None, lora=None)
        request = replace(request, sampling=sampling, scheduling=scheduling)
        self._sequences.add(request, clock.now(), preparation="grammar" if "held" in text else None)
        said = self.client.said(whole)
        for index, tag in enumerate(request.tags):
            one = Answer(tag, index, text, params, said, late_at=2 if request.scheduling.ttft_deadline_ms is None else 0)
            self.runner.answers[hash((request.tag, index)) if index else tag] = one
        if "held" in text:
            self._held.append(request)

    def _live(self) -> list[Answer]:
        """The answers that have not ended and may run."""
        answers = self.runner.answers
        for seed in [seed for seed, one in answers.items() if self._sequences.get(one.tag) is None]:
            del answers[seed]
        return [one for one in answers.values() if self.client.released or "held" not in one.text]

    def _waits(self) -> bool:
        live = self._live()
        paused = bool(live) and not self.client.released and all("paused" in one.text and one.said >= 2 for one in live)
        return paused or self.client.unread() or (clock.now() < self._slow_until and any("slow" in one.text for one in live))

    def step(self) -> Any:
        for request in self._held if self.client.released else ():
            self._sequences.prepare(request, None, clock.now())
        self._held = [] if self.client.released else [one for one in self._held if self._sequences.live(one)]
        if self._waits():
            return None
        self._slow_until = clock.now() + PAUSE_SECONDS * 1e6
        return super().step()

    def _expire(self, now: int) -> Any:
        late = any("late" in one.text and one.said >= one.late_at for one in self._live())
        return super()._expire(now + HOUR if late else now)

    def wakes_in(self) -> float | None:
        if not self._waits():
            return PAUSE_SECONDS if self._held else super().wakes_in()
        return 0.0 if self.client.unread() else PAUSE_SECONDS


class ScriptedProcess(SameProcess):
    """Hosts the engine's side in the event loop."""

    def __init__(self, client: "ScriptedEngine") -> None:
        super().__init__(partial(ScriptedCore, client))
        self._client = client

    async def _load(self, load: Load) -> None:
        self._client.starts += 1
        try:
            await self._client.before_start()
        except ModelNotFound as error:
            self._fail(error)
        else:
            await super()._load(load)

    async def close(self) -> None:
        """Ends the engine, also one that will never have loaded."""
        if self._loading is not None:
            self._loading.cancel()
        await super().close()

    def call(self, coroutine: Coroutine[Any, Any, Any]) -> Future[Any]:
        """Runs a coroutine in the event loop, from another thread."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    async def die(self) -> None:
        self._fail(EngineDead(STOPPED))


class ScriptedEngine(ReplicatedEngine):
    """An engine of the product in the event loop, which tests can look into.

    Words in a prompt steer it: "slow" takes 10 ms a token, "boom" fails after two tokens, "stuck" does so because of its own fields,
    "die" ends it, "dies2" does so after two tokens, "once2" only if nothing has ended it before, "bug" fails as it never should, "split"
    gives a token without text, as half a character does, "full" finds a full queue, "late" misses its deadline (that for the first token
    if it has one, else after two tokens), "held" waits until it is `released`, "paused" does so after two tokens, as soon as nothing else
    runs. What follows "SAY:" is the answer, three characters a token, and then the token that ends it. Each further one of n answers
    begins one word later.
    """

    host = ScriptedProcess
    steered = True
    """Whether words in a prompt do that."""

    def __init__(self, **settings: Any) -> None:
        small = {"max_model_len": 2048, "num_kv_blocks": 8192, "max_num_seqs": 128, "speculative_config": {"method": "off"}}
        model = str(Path(__file__).with_name("scripted_model"))
        config = EngineConfig(**{"model": model, "load_format": "none", **small, **settings})
        super().__init__(config, [self.host(self)])
        self.one = self.replicas[0].engine
        self.one._read_tokenizer = lambda directory: self._words
        self._stats, self.one.stats = self.one.stats, self._counted
        self._words: Any = WordTokenizer()
        self.described: dict[str, Any] = {
            "digest": "ab" * 32,
            "fingerprint": None,  # no other engine goes on with its answers
            "checkpoint": CheckpointInfo("LlamaForCausalLM", 134_515_008, "gguf", "Q4_1", 96_577_024),
            "embedding_size": 64,
            "max_num_seqs": 8,  # that many requests of a batch run at a time
            "num_bytes": 10**9,
            "decisions": [["device", "cpu", "there is no other"]],
        }
        self.starts = 0
        self.forget()

    def forget(self) -> None:
        """Forgets what it was asked, and does as it did at first."""
        self.started = self.left_early = self.finished = self.deaths = 0
        self.seen: list[SamplingParams] = []
        self.scheduled: list[Scheduling] = []
        self.named: list[str] = []
        self.spent: list[dict[str, float]] = []
        self.prompts: list[list[int]] = []
        self.tags: list[int] = []
        self.frames: list[Frame] = []
        self.released = self.gated = self.fails = False
        self.cached = 0
        """Requests find in the prefix cache what those with the same number have left there."""
        self.counters: dict[str, Any] = {}
        """The engine's counters, if it is to have others than its own."""
        self.timelines: dict[str, list[Timeline]] = {}
        """What `explain` tells of requests that are to have other timelines than their own."""
        self.others: list[Timeline] = []
        """The timelines of sequences that this engine never had."""
        self.expected_wait_ms: int | None = None
        """How long requests that have not ended are told to wait for their session's turn."""
        self.shown: dict[str, Any] = {}
        """What outputs have in the place of their own fields, and in `timeline`, what their timelines have."""

    async def before_start(self) -> None:
        """Is done before each start: it waits while the engine is `gated`, and raises if it `fails`."""
        while self.gated:
            await asyncio.sleep(PAUSE_SECONDS)
        if self.fails:
            raise ModelNotFound("there is no such model")

    def text(self, prompt: list[int]) -> str:
        # What this takes of the event loop is not the server's.
        return b"".join(map(self.tokenizer.piece, prompt if len(prompt) < 100_000 else prompt[:1000])).decode(errors="replace")

    def said(self, text: str) -> list[int] | None:
        """The tokens that answer a prompt; None if its words are repeated."""
        _, told, said = text.partition("SAY:")
        return [*(word_token(said[at : at + 3]) for at in range(0, len(said), 3)), END] if told else None

    def describe(self, **changes: Any) -> None:
        """Changes what the server knows of the engine."""
        self.described |= changes
        if self.ready:
            self.one._info, self._info = (replace(info, **changes) for info in (self.one.info, self.info))

    @property
    def tokenizer(self) -> Any:
        return super().tokenizer if self.starts else self._words

    @tokenizer.setter
    def tokenizer(self, tokenizer: Any) -> None:
        self._words = tokenizer
        if self.starts:
            self.one._tokenizer = tokenizer

    def _counted(self) -> Stats:
        # An engine has counted nothing before its first start.
        return Stats(**self.counters) if self.counters and self.one.info.model else self._stats()

    async def explain(self, request_id: str) -> list[Timeline]:
        told = self.timelines.get(request_id) or await super().explain(request_id)
        if self.expected_wait_ms is None:
            return told
        return [replace(one, expected_wait_ms=self.expected_wait_ms) if one.finish is None else one for one in told]

    async def explain_sequences(self, tags: Sequence[int]) -> list[Timeline]:
        return [one for one in self.others if one.tag in tags] or await super().explain_sequences(tags)

    def unread(self) -> bool:
        """Whether a stream has tokens: each is read alone, as one is that takes a device some time."""
        return any(stream.num_untaken and not stream._whole_only for stream in set(self.one._streams.values()))

    def tell(self, frame: Frame) -> None:
        self.frames.append(frame)
        super().tell(frame)

    def stop(self) -> None:
        """Ends it as if it had died, from another thread."""
        self.one.process.call(self.one.process.die()).result()

    def restart(self) -> Future[None]:
        """Starts it again after its end, from another thread."""

        async def again() -> None:
            await self.one.close()
            await self.start()

        return self.one.process.call(again())

    def _seeded(self, params: SamplingParams) -> SamplingParams:
        return params  # tests compare them

    def run(self, stream: Any, **arguments: Any) -> AsyncGenerator[RequestOutput, None]:
        self.started += 1
        self.seen.append(stream.params)
        self.scheduled.append(stream.scheduling)
        self.named.append(arguments.get("request_id"))
        self.spent.append(arguments.get("spent"))
        self.prompts.append(stream.prompt_token_ids)
        self.tags.append(stream.tags.start)
        return self._noted(stream, super().run(stream, **arguments))

    async def _noted(self, stream: Any, outputs: AsyncGenerator[RequestOutput, None]) -> AsyncGenerator[RequestOutput, None]:
        bug, over = self.steered and "bug" in self.text(stream.prompt_token_ids), 0
        try:
            async with aclosing(outputs):
                async for output in outputs:
                    if bug and stream.num_tokens > 2:
                        raise RuntimeError('File "/usr/lib/secret.py" object at 0x7f0000001234')
                    over += output.finish_reason is not None
                    self._show(output)
                    yield output
        finally:
            self.finished += over == stream.params.n
            self.left_early += over < stream.params.n

    def _show(self, output: RequestOutput) -> None:
        for name, value in self.shown.items():
            forked = output.index and name in CACHED  # a fork finds the whole prompt computed
            if (own := getattr(output, name)) is not None and not forked:
                setattr(output, name, replace(own, **value) if name == "timeline" else value)
