"""A server behind a gate, and its clients, in virtual time: requests go to it directly or through the gate's own engine and estimates."""

import contextlib
import heapq
import itertools
import random
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np

from chairlift.config import EngineConfig
from chairlift.engine.engine_request import EngineRequest
from chairlift.engine.estimated_engine import HEADROOM, EstimatedEngine
from chairlift.engine.frames import Answering
from chairlift.gate.admission import Admitted
from chairlift.gate.estimates import Estimates
from chairlift.gate.model_files import VOCABULARY, write_model_files
from chairlift.sampling import SamplingParams
from chairlift.scheduling import Scheduling

BLOCK = 16
CONTEXT = 8192


@dataclass(slots=True)
class Sent:
    """A request of a client."""

    session: int
    prompt: int
    """Tokens of the prompt, of which the server has `cached`."""
    cached: int
    output: int
    sent: float
    tenant: str = ""
    on_first: object = lambda: None
    on_end: object = lambda: None
    left: int = 0
    """Tokens of the prompt that are not computed."""
    events: int = 0


class World:
    """The clock and what happens when."""

    def __init__(self):
        self.now = 1000.0
        self.monotonic = lambda: self.now
        self.monotonic_ns = lambda: round(self.now * 1e9)
        self._events, self._numbers = [], itertools.count()

    def after(self, seconds, call):
        heapq.heappush(self._events, (self.now + seconds, next(self._numbers), call))

    def run(self, seconds, gate=None):
        """Lets so much time pass."""
        end = self.now + seconds
        while self.now < end:
            wakes = None if gate is None else gate.work()
            at = min(end, self._events[0][0] if self._events else end)
            if wakes is not None and self.now + wakes < at:
                self.now += wakes + 1e-6
                continue
            self.now = max(self.now, at)
            while self._events and self._events[0][0] <= self.now:
                heapq.heappop(self._events)[2]()


class Server:
    """Computes up to `batch` tokens of prompts in a step, in the order in which they came, beside one token of each answer."""

    def __init__(self, world, slots, token_seconds, step_seconds=0.01, batch=2048):
        self._world, self._slots, self._batch = world, slots, batch
        self._token_seconds, self._step_seconds = token_seconds, step_seconds
        self.running, self.waiting = [], []
        self._stepping = False

    def submit(self, one):
        one.left = one.prompt - one.cached
        self.waiting.append(one)
        if not self._stepping:
            self._step()

    @property
    def left(self):
        """Tokens of prompts that it has still to compute."""
        return sum(one.left for one in (*self.running, *self.waiting))

    def _step(self):
        while self.waiting and len(self.running) < self._slots:
            self.running.append(self.waiting.pop(0))
        self._stepping = bool(self.running)
        if not self._stepping:
            return
        room, computed, decoding = self._batch, [], [one for one in self.running if not one.left]
        for one in self.running:
            if one.left and room:
                tokens = min(one.left, room)
                room -= tokens
                computed.append((one, tokens))
        took = self._step_seconds + (self._batch - room) * self._token_seconds
        self._world.after(took, lambda: self._end(computed, decoding))

    def _end(self, computed, decoding):
        for one, tokens in computed:
            one.left -= tokens
        for one in [*decoding, *(one for one, _ in computed if not one.left)]:
            one.events += 1
            if one.events == 1:
                one.on_first()
            if one.events == one.output:
                self.running.remove(one)
                one.on_end()
        self._step()


class Gate:
    """Passes requests on as the gate does."""

    def __init__(self, world, server, directory, kv_tokens, slots, **settings):
        write_model_files(directory, CONTEXT)
        blocks = kv_tokens // BLOCK
        sizes = {"block_size": BLOCK, "num_kv_blocks": HEADROOM * blocks, "max_num_seqs": slots, "max_num_batched_tokens": 256 + slots}
        config = EngineConfig(model=str(directory), load_format="none", speculative_config={"method": "off"}, **sizes, **settings)
        self.engine, self.estimates = EstimatedEngine(config), Estimates(kv_tokens, BLOCK, HEADROOM * blocks)
        self._world, self._server, self._tags = world, server, itertools.count(1)
        self._sent = {}
        self.backlogs = []
        """The tokens that the server had still to compute each time when a prompt was passed on."""
        self._tell()

    def _tell(self):
        self.engine.learn(self.estimates.frame())
        self._world.after(1.0, self._tell)

    def submit(self, one):
        tag = next(self._tags)
        self._sent[tag] = one
        tokens = (np.arange(one.prompt) + one.session * 10_007) % VOCABULARY
        params = SamplingParams(max_tokens=CONTEXT - one.prompt, temperature=0.0)
        scheduling = Scheduling(tenant=one.tenant, session=f"s{one.session}")
        self.engine.add(EngineRequest(tag, tokens.astype("<i4").tobytes(), params, scheduling))

    def work(self):
        """Runs the steps that are due. Returns the seconds to the next one."""
        while (outputs := self.engine.step()) is not None:
            for tag, cached, *_ in outputs.started:
                self._pass_on(tag, cached)
        return self.engine.wakes_in()

    def _pass_on(self, tag, cached):
        one, passed = self._sent.pop(tag, None), self._world.now
        if one is None:
            return  # it was preempted
        self.backlogs.append(self._server.left)
        held, running = Admitted(0, one.prompt, cached, on_first_token=lambda: None), contextlib.ExitStack()
        held.answer = one
        running.enter_context(self.estimates.running(held))
        on_first, on_end = one.on_first, one.on_end

        def first():
            self.estimates.observe_first(passed, self._world.now, one.prompt - cached)
            self.engine.learn(Answering(tag))
            on_first()

        def end():
            running.close()
            self.engine.abort(tag, stopped=True)
            on_end()

        one.on_first, one.on_end = first, end
        self._server.submit(one)


@dataclass
class Seen:
    """What clients saw."""

    ended: int = 0
    first: list = field(default_factory=list)
    """Seconds from a request to its first token."""


class Agents:
    """Agents that go on with their conversations after pauses of at most `pause` seconds, until they have 6,000 tokens and begin anew."""

    def __init__(self, world, to, number, pause, seed, tenant="", new=(100, 700), output=(10, 80)):
        """A turn adds so many tokens to the prompt and gets so many."""
        self._world, self._to, self._pause, self._tenant, self._new, self._output = world, to, pause, tenant, new, output
        self._random, self._sessions, self.seen = random.Random(seed), itertools.count(seed * 1000), Seen()
        for _ in range(number):
            world.after(self._random.uniform(0, pause), lambda: self._turn(next(self._sessions), 0))

    def _turn(self, session, known):
        if known > 6000:
            session, known = next(self._sessions), 0
        prompt = known + self._random.randint(*self._new) + (1000 if not known else 0)
        one = Sent(session, prompt, known, self._random.randint(*self._output), self._world.now, self._tenant)
        one.on_first = lambda: self.seen.first.append(self._world.now - one.sent)
        one.on_end = lambda: self._ended(one)
        self._to.submit(one)

    def _ended(self, one):
        self.seen.ended += 1
        known = one.prompt + one.output
        self._world.after(self._random.uniform(0, self._pause), lambda: self._turn(one.session, known))


class LongPrompts:
    """Clients that send new long prompts, one after the other."""

    def __init__(self, world, to, number, prompt, tenant):
        self._world, self._to, self._prompt, self._tenant = world, to, prompt, tenant
        self._sessions = itertools.count(1 << 21)
        for _ in range(number):
            self._send()

    def _send(self):
        one = Sent(next(self._sessions), self._prompt, 0, 5, self._world.now, self._tenant)
        one.on_end = self._send
        self._to.submit(one)


class EverySecond:
    """A client that sends a new prompt every second."""

    def __init__(self, world, to, prompt, tenant):
        self._world, self._to, self._prompt, self._tenant = world, to, prompt, tenant
        self._sessions, self.seen = itertools.count(1 << 20), Seen()
        world.after(0.5, self._send)

    def _send(self):
        one = Sent(next(self._sessions), self._prompt, 0, 10, self._world.now, self._tenant)
        one.on_first = lambda: self.seen.first.append(self._world.now - one.sent)
        self._to.submit(one)
        self._world.after(1.0, self._send)


def patched(monkeypatch, world):
    """Puts the world's clock into all modules that read one."""
    from chairlift.engine import clock, estimated_engine
    from chairlift.gate import estimates

    for module in (clock, estimated_engine, estimates):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=world.monotonic, monotonic_ns=world.monotonic_ns))
