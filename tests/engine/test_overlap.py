"""One step in flight or two: the answers are the same, whatever is asked and whatever goes wrong."""

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
from lazy_engine import POLICIES, Form, clock, compare, directory, lazy, live, make, script

from chairlift import LLM, SamplingParams
from chairlift.engine import engine as engine_module
from chairlift.runner.build import build_runner
from chairlift.runner.torch_backend import TorchBackend
from chairlift.sampling import StructuredOutput
from chairlift.sim.replay import Recording

pytestmark = pytest.mark.slow

SCRIPTS = 15


def test_answers_are_the_same_with_one_step_in_flight_and_with_two(make, clock, tmp_path, caplog):
    seen: Counter[str | None] = Counter()
    for seed in range(SCRIPTS):
        source, requested = random.Random(seed), script(seed)
        settings = {
            "scheduling_policy": POLICIES[seed % len(POLICIES)],
            "num_kv_blocks": source.choice([13, 16, 40]),
            "swap_space": source.choice([0, 2**14]),
            "enable_prefix_caching": seed % 5 > 0,
        }
        reported = []
        for overlaps in (False, True):
            journal = tmp_path / f"{seed} {overlaps}"
            engine = make(overlaps, journal=str(journal), **settings)
            reported.append(live(engine, requested, clock))
            seen += Counter({name: getattr(engine.stats(), name) for name in ("preemptions_recompute", "preemptions_swap") if overlaps})
            engine.close()
            replay = Recording(str(journal)).replay()
            assert replay.differs_at is None
            assert set(replay.result.requests["tag"]) == set(reported[0])
        seen += Counter(one.finish for one in reported[1].values())
        compare(reported)
        for one in (one for one in requested if one.params.structured_output is not None and one.tag in reported[1]):
            form, answer = Form(one.form[0], -5), reported[1][one.tag]
            for token in answer.tokens[: -1 if answer.finish == "error" else None]:
                form.accept(token)
        failing = sum(one.form[1] > 0 and one.params.structured_output is not None for one in requested)
        assert sum("grammar failed" in record.getMessage() for record in caplog.records) <= 2 * failing
        caplog.clear()
    assert min(seen[what] for what in ("preemptions_recompute", "preemptions_swap", "stop", "length", "error", "deadline", "left")) > 2, (
        seen
    )


def test_a_step_that_fails_takes_the_one_before_along_and_nothing_else(make, clock, monkeypatch):
    requested = [one for one in script(3) if one.scheduling.deadline_ms == 1e8]
    expected = live(make(True), requested, clock)
    for failing in ("launch", "sample", "collect"):
        engine = make(True)
        with monkeypatch.context() as broken:
            calls, call = [0], getattr(engine.runner, failing)

            def fail(*given: object, calls: list[int] = calls, call: Callable = call) -> object:
                calls[0] += 1
                if calls[0] == 6:
                    raise MemoryError
                return call(*given)

            broken.setattr(engine.runner, failing, fail)
            with pytest.raises(MemoryError):
                live(engine, [replace(one, after=0) for one in requested], clock)
        assert not engine.has_work
        engine.check()
        assert engine.stats().free_blocks == engine.stats().total_blocks
        # What it finds in the cache was computed.
        assert live(engine, requested, clock) == expected


def test_a_model_in_torch_answers_the_same_and_keeps_to_forms(byte_model, monkeypatch):
    forms = {"json": '{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}', "regex": "[a-c]{3,9}[0-9]", "": ""}
    prompt = [ord(letter) for letter in "Say it in JSON"]
    params = [
        SamplingParams(
            max_tokens=16,
            temperature=2.0 * (index % 2),
            seed=index,
            logprobs=2,
            presence_penalty=0.5 * (index % 3),
            stop=("q",),
            structured_output=StructuredOutput(kind, text) if kind else None,
        )
        for index, (kind, text) in enumerate([*forms.items()] * 3)
    ]
    outputs = []
    for overlaps in (False, True):

        def runner(config, directory, eos, on_phase, overlaps=overlaps):
            return build_runner(config, directory, on_phase, partial(TorchBackend, overlaps=overlaps))

        monkeypatch.setattr(engine_module, "_build_runner", runner)
        llm = LLM(str(byte_model), load_format="dummy", device="cpu", num_kv_blocks=60, block_size=8, max_num_seqs=4)
        outputs.append(llm.generate([prompt[: 14 - index] for index in range(len(params))], params))
        assert not llm.engine.has_work
        llm.close()
    for one, two in zip(*outputs, strict=True):
        assert (one.token_ids, one.text, one.finish_reason) == (two.token_ids, two.text, two.finish_reason)
        # Who else is in a step may change the last bit.
        assert [token.logprob for token in one.logprobs] == pytest.approx([token.logprob for token in two.logprobs], abs=1e-4)
