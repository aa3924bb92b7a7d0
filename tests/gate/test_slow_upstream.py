"""What the gate believes of an upstream that computes prompts slowly, one after the other."""

import contextlib
from types import SimpleNamespace

import pytest

from chairlift.config import EngineConfig
from chairlift.engine import clock as engine_clock
from chairlift.engine import estimated_engine
from chairlift.engine.engine_request import EngineRequest
from chairlift.engine.estimated_engine import HEADROOM, EstimatedEngine
from chairlift.engine.frames import Answering
from chairlift.gate import estimates as gate_estimates
from chairlift.gate.admission import Admitted
from chairlift.gate.answer import Answer
from chairlift.gate.estimates import Estimates
from chairlift.gate.model_files import write_model_files
from chairlift.sampling import SamplingParams

BLOCKS, PROMPT, PROMPTS = 64, 400, 2
TOKEN_SECONDS = 0.004
"""What a token of a prompt takes at the upstream."""


@pytest.fixture
def clock(monkeypatch):
    clock = SimpleNamespace(seconds=1000.0)
    clock.monotonic = lambda: clock.seconds
    clock.monotonic_ns = lambda: round(clock.seconds * 1e9)
    for module in (engine_clock, estimated_engine, gate_estimates):
        monkeypatch.setattr(module, "time", clock)
    return clock


def test_prompts_that_the_upstream_still_computes_do_not_fill_the_kv_of_the_gate(clock, tmp_path):
    write_model_files(tmp_path, 1024)
    sizes = {"block_size": 16, "num_kv_blocks": HEADROOM * BLOCKS, "max_num_seqs": 8, "max_model_len": 1024, "max_num_batched_tokens": 264}
    engine = EstimatedEngine(EngineConfig(model=str(tmp_path), load_format="none", speculative_config={"method": "off"}, **sizes))
    learned = Estimates(BLOCKS * 16, 16, HEADROOM * BLOCKS)
    held = [Admitted(0, PROMPT, 0, on_first_token=lambda: None) for _ in range(PROMPTS)]
    running = contextlib.ExitStack()
    for tag, one in enumerate(held, 1):
        engine.add(EngineRequest.of(tag, [tag] * PROMPT, SamplingParams(max_tokens=1024 - PROMPT, temperature=0.0)))
        running.enter_context(learned.running(one))
    began, told = clock.seconds, clock.seconds
    while clock.seconds < began + PROMPTS * PROMPT * TOKEN_SECONDS - 0.01:
        clock.seconds += 0.005
        for tag, one in enumerate(held, 1):
            due = began + tag * PROMPT * TOKEN_SECONDS
            if one.answer is None and clock.seconds >= due:
                one.answer = Answer("text/event-stream", sent=began)
                learned.observe_first(began, due, PROMPT)
                engine.learn(Answering(tag))
        if clock.seconds - told >= 1.0:
            told = clock.seconds
            engine.learn(learned.frame())
        if not engine.wakes_in():
            engine.step()
    stats = engine.stats()
    assert stats.preemptions == 0
    assert stats.running == PROMPTS
    assert stats.used_tokens <= PROMPTS * (PROMPT + 25)
    running.close()
    engine.close()
