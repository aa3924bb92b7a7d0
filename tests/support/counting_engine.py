"""The real engine with a runner that counts, for tests of its clients; `python -m counting_engine FD` runs it as the child process.

A request's tokens count up from the first token of its prompt, those of its further answers from 100 above the one before. The
prompts below make it misbehave.
"""

import asyncio
import os
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from chairlift.engine import clock, engine, process
from chairlift.errors import InvalidRequest, QueueFull
from chairlift.runner.buffers import Sampled
from chairlift.runner.null_runner import NullRunner

REFUSED, CRASHING, DYING, HANGING, FAILING, BROKEN, FULL, LATE, PANICKING = range(900_001, 900_010)
"""LATE takes half an hour for its third token, which is longer than `DEADLINE`."""
DEADLINE = 600_000.0
EOS = 7
ENDLESS = 1_000_000
"""The `max_tokens` of requests that no test lives to see the end of."""
VOCABULARY = 1_000_000
MODEL = Path(__file__).with_name("counting_model")
PATIENT = {"batching": "dynamic", "static_batch_size": 2, "batch_timeout_ms": 50.0}
"""The settings of an engine that lets a request wait for another one."""
_TIME = SimpleNamespace(now=clock.now, skew=0)


class CountingRunner(NullRunner):
    """A runner whose next token is the one after the last. No engine goes on with the answers of another one."""

    batch_invariant = False

    def __init__(self, config, directory, ends):
        super().__init__(config, directory, ends)
        self.answers = {}
        """The index of each answer, by its seed."""
        self._slots = np.zeros((3, self.max_num_seqs), dtype=np.int64)
        """Of each slot: the first token, the position before it, and the index of the answer or, if it is not ranked, -1."""

    def add_request(self, slot, sequence):
        index = self.answers.get(sequence.seed, 0)
        self._slots[:, slot] = sequence.tokens[0] + 100 * index, sequence.prompt_len - 1, index if sequence.params.ranked else -1

    def launch(self, buffer_index, sizes):
        buffers = self.buffers[buffer_index]
        running = self._slots[0, buffers.batch_slots[: sizes.seqs]]
        if CRASHING in running:
            raise ZeroDivisionError("a bug in the model")
        if PANICKING in running:
            raise BaseException("as the core's panics are")
        if DYING in running:
            os.kill(os.getpid(), signal.SIGKILL)
        if HANGING in running:
            print("hanging", flush=True)
            time.sleep(3600)
        first, before, index = self._slots[:, buffers.sample_slots[: sizes.samples]]
        tokens = first + buffers.positions[buffers.sample_at[: sizes.samples]] - before
        if LATE + 2 in tokens[first == LATE]:
            _TIME.skew += 1_800_000_000
        # The third answer of five is the best, then the second, the fourth, the first, the fifth.
        logprobs = np.where(index < 0, 0.0, -abs(index - 1.9))
        return np.where(first == FAILING, -1, tokens).astype(np.int32), logprobs.astype(np.float32)

    def collect(self, step):
        return Sampled(*step, {}, [], {})


class CountingEngine(engine.Engine):
    """The engine, which notes what it gets."""

    step_seconds = 0.0

    def __init__(self, config, on_phase=lambda name, seconds: None, hash_key=b""):
        if config.seed == 13:
            raise InvalidRequest("an unlucky seed")
        while config.seed == 14 and os.path.exists(os.environ["COUNTING_ENGINE_GATE"]):
            time.sleep(0.01)
        on_phase("weights", 0.25)
        settings = {"load_format": "none", "num_kv_blocks": 2 * ENDLESS // config.block_size, "speculative_config": {"method": "off"}}
        super().__init__(replace(config, model=str(MODEL), **settings), on_phase, hash_key)
        self.info = replace(self.info, model=config.model)
        self.aborted, self.scheduling, self.sampling = [], [], []
        self.steps = 0

    @property
    def running(self):
        return self.stats().running + self.stats().waiting

    def add(self, request, on_prepared=None):
        tag, params, first = request.tag, request.sampling, memoryview(request.prompt).cast("i")[0]
        if first == REFUSED:
            raise InvalidRequest("it can never fit: needs 12 blocks of 10", param="prompt", code="never_fits")
        if first == BROKEN:
            raise RuntimeError("not foreseen")
        if first == FULL:
            raise QueueFull("4 requests wait, and no more may", retry_after=2.5)
        self.scheduling.append(request.scheduling)
        self.sampling.append(params)
        self.runner.answers |= {hash((tag, index)) if index else tag: index for index in range(params.num_sequences)}
        super().add(replace(request, sampling=replace(params, seed=tag, structured_output=None)), on_prepared)

    def abort(self, tag, *, stopped=False):
        self.aborted.append(tag)
        return super().abort(tag, stopped=stopped)

    def step(self):
        self.steps += 1
        outputs = super().step()
        time.sleep(self.step_seconds)
        return outputs

    def stats(self):
        # The core counts aborted requests nowhere: this engine counts them as expired.
        return replace(super().stats(), expired=len(self.aborted), steps=self.steps)

    def close(self):
        super().close()
        print("closed", file=sys.stderr)


class CharacterTokenizer:
    """One token a character, and back."""

    eos_token_ids = special_token_ids = frozenset({EOS})
    strips_first_space = False
    vocab_size = VOCABULARY
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


def install(set=setattr):
    """Puts the engine, its runner and the tokenizer in the places of the real ones, in this process and in those of its engines."""
    from chairlift.engine import client, llm
    from chairlift.engine.engine_process import EngineProcess

    for module in (client, llm):
        set(module, "locate", lambda model, *_: Path("/models") / model)
        set(module, "Tokenizer", CharacterTokenizer)
    set(EngineProcess, "command", ("-m", "counting_engine"))
    install_engine(set)


def install_engine(set=setattr):
    """Does so with the engine alone."""
    set(engine, "Engine", CountingEngine)
    set(engine, "NullRunner", CountingRunner)
    set(clock, "now", lambda: _TIME.now() + _TIME.skew)
    set(_TIME, "skew", 0)


def text_of(start, count):
    return "".join(map(chr, range(start, start + count)))


async def _be_a_parent():
    """Holds an engine that hangs in a step; killed by the test."""
    from chairlift.engine.client import AsyncEngine

    install()
    async with AsyncEngine() as engine:
        async for _ in engine.generate([HANGING]):
            pass


def hurry(seconds, set=setattr):
    """Shortens the intervals of the watchdog and the heartbeat to `seconds`. Child processes do the same with COUNTING_ENGINE_HURRY."""
    from chairlift.engine import heartbeat, step_loop, watchdog

    for module in (heartbeat, step_loop, watchdog):
        set(module, "CHECK_SECONDS", seconds / 5)
    set(watchdog, "STUCK_SECONDS", seconds)
    set(heartbeat, "SILENT_AFTER", seconds)


if __name__ == "__main__":
    if sys.argv[1] == "parent":
        asyncio.run(_be_a_parent())
    install_engine()
    if seconds := os.environ.get("COUNTING_ENGINE_HURRY"):
        hurry(float(seconds))
        CountingEngine.step_seconds = 0.002  # watchdogs in a hurry need some time to themselves
    if file := os.environ.get("COUNTING_ENGINE_PID"):
        Path(file).write_text(str(os.getpid()))
    os._exit(process.main(int(sys.argv[1]), lambda: CountingEngine))
