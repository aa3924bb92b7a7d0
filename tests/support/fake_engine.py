"""An engine without a model, for tests of what stands around it; `python -m fake_engine FD` runs it as the child process.

A request's tokens count up from the first token of its prompt, those of its further answers from 100 above the one before. The
prompts below make it misbehave.
"""

import asyncio
import os
import signal
import struct
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

from chairlift.engine import process
from chairlift.engine.engine_info import EngineInfo
from chairlift.engine.frames import StepOutputs
from chairlift.engine.stats import Stats
from chairlift.errors import InvalidRequest, QueueFull

REFUSED, CRASHING, DYING, HANGING, FAILING, BROKEN, FULL, LATE, PATIENT, PANICKING = range(900_001, 900_011)
"""LATE is dropped for its deadline after three tokens, or before the first; PATIENT gets nothing before the engine's time has come."""
PATIENCE = 0.05
EOS = 7
ENDLESS = 1_000_000_000
"""The `max_tokens` of requests that no test lives to see the end of."""
INFO = EngineInfo(
    model="fake",
    max_model_len=2 * ENDLESS,
    vocab_size=1_000_000,
    num_kv_blocks=10,
    block_size=16,
    max_num_seqs=64,
    eos_token_ids=[EOS],
    determinism="batch-invariant",
    decisions=[["context length", "2000000000 tokens", "what the model was made for"], ["KV cache", "160 tokens", "a guess"]],
)


def timeline(tag, finish="length", **changes):
    """An account as the core gives it: half a second in the queue, half for the first token, two for the others."""
    account = {
        "tag": tag,
        "finish": finish,
        "arrived": 1_000_000,
        "submitted": 1_000_000,
        "started": 1_500_000,
        "first_token": 2_000_000,
        "ended": 4_000_000,
        "prompt_tokens": 1,
        "cached_tokens": 16,
        "own_cached_tokens": 8,
        "lost_hit_tokens": 0,
        "output_tokens": 3,
        "computed_tokens": 4,
        "recomputed_tokens": 2,
        "draft_tokens": 0,
        "accepted_draft_tokens": 0,
        "preemptions": 1,
        "swaps": 0,
        "block_us": 7_000_000,
        "compute_ns": 2_000_000_000,
        "energy_uj": None,
        "tenant": "",
        "priority": 0,
        "tier": "default",
        "limit": "blocks",
        "preempted_by": [9],
        "preempted_for": {"kv_blocks": 1},
        "states": {"wait_blocks": 500_000, "prefill": 500_000, "decode": 2_000_000},
    }
    return account | changes


@dataclass
class FakeReport:
    entries: list = field(default_factory=list)
    started: list = field(default_factory=list)
    ended: list = field(default_factory=list)

    def outputs(self):
        tags, tokens, finishes, logprobs = zip(*self.entries, strict=True) if self.entries else ((), (), (), ())
        count = len(tags)
        arrays = struct.pack(f"<{count}Q", *tags), struct.pack(f"<{count}i", *tokens), bytes(finishes), struct.pack(f"<{count}f", *logprobs)
        return StepOutputs(*arrays, self.started, self.ended)


class FakeEngine:
    step_seconds = 0.0
    overlaps = False
    in_flight = False
    shared_blocks = None

    def __init__(self, config, on_phase=lambda name, seconds: None, hash_key=b""):
        if config.seed == 13:
            raise InvalidRequest("an unlucky seed")
        while config.seed == 14 and os.path.exists(os.environ["FAKE_ENGINE_GATE"]):
            time.sleep(0.01)
        on_phase("weights", 0.25)
        self.info = INFO
        self.running = {}
        self.aborted = []
        self.steps = 0
        self.scheduling, self.sampling = [], []
        self.ready_at = 0.0
        self.served, self.charged = {}, []

    @property
    def has_work(self):
        return bool(self.running)

    def next_step(self):
        return None

    def take_service(self):
        self.served, served = {}, self.served
        return served

    def charge_external(self, service):
        self.charged.append(dict(service))

    def save_prefixes(self, seconds):
        pass

    def add(self, request, on_prepared=None):
        first, params = memoryview(request.prompt).cast("i")[0], request.sampling
        if first == REFUSED:
            raise InvalidRequest("it can never fit: needs 12 blocks of 10", param="prompt", code="never_fits")
        if first == BROKEN:
            raise RuntimeError("not foreseen")
        if first == FULL:
            raise QueueFull("4 requests wait, and no more may", retry_after=2.5)
        if first == PATIENT:
            self.ready_at = time.monotonic() + PATIENCE
        self.scheduling.append(request.scheduling)
        self.sampling.append(params)
        for index in range(params.num_sequences):
            self.running[request.tag + index] = [first + 100 * index, 0, params, index]

    def abort(self, tag, *, stopped=False):
        self.aborted.append(tag)
        return self.running.pop(tag, None) is not None

    def step(self):
        self.steps += 1
        self.stage = "run", time.monotonic()
        if not self.running or time.monotonic() < self.ready_at:
            return None
        time.sleep(self.step_seconds)
        report = FakeReport()
        for tag, entry in list(self.running.items()):
            start, count, params, index = entry
            if start == CRASHING:
                raise ZeroDivisionError("a bug in the model")
            if start == PANICKING:
                raise BaseException("as the core's panics are")
            if start == DYING:
                os.kill(os.getpid(), signal.SIGKILL)
            if start == HANGING:
                print("hanging", flush=True)
                time.sleep(3600)
            if start == LATE and count == min(3, params.max_tokens - 1):
                del self.running[tag]
                times = {} if count else {"started": None, "first_token": None}
                report.ended.append(timeline(tag, "deadline", **times))
                continue
            if count == 0:
                report.started.append((tag, 16, 8, 500_000))
            entry[1] += 1
            token = start + count
            stops = {*params.stop_token_ids} | (set() if params.ignore_eos else {EOS})
            finish = 3 if start == FAILING else 1 if token in stops else 2 if count + 1 == params.max_tokens else 0
            # The third answer of five is the best, then the second, the fourth, the first, the fifth.
            report.entries.append((tag, -1 if finish == 3 else token, finish, -abs(index - 1.9) if params.ranked else 0.0))
            if finish:
                del self.running[tag]
                report.ended.append(timeline(tag, ("stop", "length", "error")[finish - 1]))
        return report.outputs()

    def wakes_in(self):
        return max(0.0, self.ready_at - time.monotonic()) if self.running else None

    def explain(self, tag):
        return timeline(tag, None if tag in self.running else "length")

    def snapshot(self):
        seen = {"running": [{"tag": tag} for tag in self.running], "waiting": [], "kv_map": b"", "steps": [], "now_us": 0}
        return seen | {"stats": {"running": len(self.running)}}

    def stats(self):
        # The core counts aborted requests nowhere: this engine counts them as expired.
        return Stats(running=len(self.running), expired=len(self.aborted), steps=self.steps)

    def usage(self):
        return {"tenants": {"": {"running": len(self.running)}}, "classes": {0: {}}}

    def close(self):
        print("closed", file=sys.stderr)


class FakeTokenizer:
    """One token a character, and back."""

    eos_token_ids = special_token_ids = frozenset({EOS})
    strips_first_space = False
    vocab_size = INFO.vocab_size
    longest_token = 1
    suppressed_token_ids = ()

    def __init__(self, directory=Path(), source=None, chat_template=None):
        self.directory = directory

    def prepare(self):
        pass

    def encode(self, text, *, add_special_tokens=True):
        return [ord(character) for character in text]

    def piece(self, token):
        return chr(token % 0xD800).encode()  # from there on come surrogates, which are no text

    def min_tokens(self, text):
        return len(text)

    control_texts = ()
    template = SimpleNamespace(source="", uses=lambda variable: False)

    def decode(self, ids, *, skip_special_tokens=True):
        return b"".join(map(self.piece, ids)).decode()

    def chat(self, messages, **variables):
        return self.encode(messages[-1]["content"])


def fake(monkeypatch):
    """Puts the fakes in the places of the model's directory, tokenizer and process."""
    from chairlift.engine import client, llm
    from chairlift.engine.engine_process import EngineProcess

    for module in (client, llm):
        monkeypatch.setattr(module, "locate", lambda model, *_: Path("/models") / model)
        monkeypatch.setattr(module, "Tokenizer", FakeTokenizer)
    monkeypatch.setattr(EngineProcess, "command", ("-m", "fake_engine"))


def text_of(start, count):
    return "".join(map(chr, range(start, start + count)))


async def _be_a_parent():
    """Holds an engine that hangs in a step; killed by the test."""
    import pytest

    from chairlift.engine.client import AsyncEngine

    fake(pytest.MonkeyPatch())
    async with AsyncEngine() as engine:
        async for _ in engine.generate([HANGING]):
            pass


def hurry(seconds, set=setattr):
    """Shortens the intervals of the watchdog and the heartbeat to `seconds`. Child processes do the same with FAKE_ENGINE_HURRY."""
    from chairlift.engine import heartbeat, step_loop, watchdog

    for module in (heartbeat, step_loop, watchdog):
        set(module, "CHECK_SECONDS", seconds / 5)
    set(watchdog, "STUCK_SECONDS", seconds)
    set(heartbeat, "SILENT_AFTER", seconds)


if __name__ == "__main__":
    if sys.argv[1] == "parent":
        asyncio.run(_be_a_parent())
    if seconds := os.environ.get("FAKE_ENGINE_HURRY"):
        hurry(float(seconds))
        FakeEngine.step_seconds = 0.002  # watchdogs in a hurry need some time to themselves
    if file := os.environ.get("FAKE_ENGINE_PID"):
        Path(file).write_text(str(os.getpid()))
    os._exit(process.main(int(sys.argv[1]), lambda: FakeEngine))
