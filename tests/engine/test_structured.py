"""Structured output with the real scheduler and sampler, and a tiny random model that would never write JSON by itself."""

import asyncio
import itertools
import json
import random
import re
import time
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue

import numpy as np
import pytest

from chairlift import LLM
from chairlift.engine.engine_request import EngineRequest
from chairlift.engine.frames import Abort, Add, Explain
from chairlift.engine.hosted_engine import HostedEngine
from chairlift.engine.stream import Stream, deliver
from chairlift.errors import InvalidRequest, QueueFull
from chairlift.grammar import grammars, trial, usage
from chairlift.grammar.grammar import Grammar, Matcher
from chairlift.grammar.source import ReasoningFormat, after_reasoning
from chairlift.grammar.usage import GrammarUsage
from chairlift.outputs import Timeline
from chairlift.sampling import ReasoningBudget, SamplingParams, StructuredOutput
from chairlift.scheduling import Scheduling
from chairlift.server.errors import api_error

PROMPT = [ord(letter) for letter in "Say it in JSON"]
PATTERN = r"([a-z]{1,4} ){2,6}[0-9]{2}"


@pytest.fixture(scope="module")
def make(byte_model):
    """Makes engines over the model, and ends what they started."""
    made = []

    def llm(**settings):
        roomy = {"num_kv_blocks": 400, "block_size": 8, "max_num_seqs": 8, "max_num_batched_tokens": 64}
        made.append(LLM(str(byte_model), load_format="dummy", **roomy | settings))
        return made[-1]

    yield llm
    for one in made:
        one.close()


@pytest.fixture(scope="module")
def llm(make):
    return make()


def bounded(kind, text="", **values):
    structure = StructuredOutput(kind, text if isinstance(text, str) else json.dumps(text))
    # The model likes to repeat itself: at temperature 1 many an answer would not end.
    return SamplingParams(**{"max_tokens": 120, "temperature": 4.0, "seed": 1, "structured_output": structure} | values)


def random_schema(source, depth=0):
    """A schema whose answers are short, of any kind that a client may send."""
    kinds = ["string", "integer", "boolean", "enum", "const", "pattern"] + ["object", "array", "anyOf", "$ref"] * (depth < 2)
    match source.choice(kinds if depth else ["object", "array", "anyOf"]):
        case "string":
            return {"type": "string", "minLength": 1, "maxLength": source.randint(1, 4)}
        case "integer":
            low = source.randint(-50, 50)
            return {"type": "integer", "minimum": low, "maximum": low + source.randint(0, 100)}
        case "enum":
            return {"enum": source.sample(["a", "é", 'q"', 1, 2.5, None, True], 3)}
        case "const":
            return {"const": source.choice(["x", 7, False])}
        case "pattern":
            return {"type": "string", "pattern": "^[ab]{2}[0-9]$"}
        case "object":
            properties = {name: random_schema(source, depth + 1) for name in source.sample("abcd", source.randint(1, 3))}
            required = source.sample(sorted(properties), source.randint(0, len(properties)))
            return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
        case "array":
            low = source.randint(0, 2)
            return {"type": "array", "items": random_schema(source, depth + 1), "minItems": low, "maxItems": low + 1}
        case "anyOf":
            return {"anyOf": [random_schema(source, depth + 1) for _ in range(2)]}
        case "$ref":
            return {"$ref": "#/$defs/word"}
    return {"type": "boolean"}


def valid(value, schema):
    """Whether a value is as the schemas above have it."""
    match schema:
        case {"enum": values}:
            return any(type(value) is type(one) and value == one for one in values)
        case {"const": one}:
            return type(value) is type(one) and value == one
        case {"$ref": _}:
            return isinstance(value, str) and value.isalpha() and len(value) <= 3
        case {"anyOf": schemas}:
            return any(valid(value, one) for one in schemas)
        case {"type": "string", "pattern": pattern}:
            return isinstance(value, str) and re.fullmatch(pattern, value) is not None
        case {"type": "string"}:
            return isinstance(value, str) and schema["minLength"] <= len(value) <= schema["maxLength"]
        case {"type": "integer"}:
            return type(value) is int and schema["minimum"] <= value <= schema["maximum"]
        case {"type": "array"}:
            return isinstance(value, list) and schema["minItems"] <= len(value) <= schema["maxItems"] and all_valid(value, schema)
        case {"type": "object", "properties": properties}:
            named = isinstance(value, dict) and {*schema["required"]} <= value.keys() <= properties.keys()
            return named and all(valid(inner, properties[name]) for name, inner in value.items())
    return isinstance(value, bool)


def all_valid(values, schema):
    return all(valid(value, schema["items"]) for value in values)


@pytest.mark.slow
def test_fifty_schemas_are_kept_to_side_by_side(llm):
    source = random.Random(7)
    schemas = [random_schema(source) | {"$defs": {"word": {"type": "string", "pattern": "^[a-z]{1,3}$"}}} for _ in range(50)]
    outputs = llm.generate([PROMPT] * 50, [bounded("json", schema, seed=index) for index, schema in enumerate(schemas)])
    ended = [(schema, output.text) for schema, output in zip(schemas, outputs, strict=True) if output.finish_reason == "stop"]
    assert {output.finish_reason for output in outputs} <= {"stop", "length"}
    assert len(ended) > 30
    assert [(schema, text) for schema, text in ended if not valid(json.loads(text), schema)] == []


def test_every_kind_of_form_is_kept_to_and_ends_the_answer(llm):
    wanted = [
        bounded("regex", PATTERN),
        bounded("choice", ["yes", "né"]),
        bounded("grammar", 'start: "a" start "b" | "c"'),
        bounded("json_object"),
    ]
    regex, choice, grammar, anything = llm.generate([PROMPT] * 4, wanted)
    assert re.fullmatch(PATTERN, regex.text)
    assert choice.text in ("yes", "né")
    assert re.fullmatch("a*cb*", grammar.text)
    assert grammar.text.count("a") == grammar.text.count("b")
    assert isinstance(json.loads(anything.text), dict) if anything.finish_reason == "stop" else anything.text.startswith("{")
    assert [output.finish_reason for output in (regex, choice, grammar)] == ["stop"] * 3
    assert all(output.token_ids[-1] in llm.tokenizer.eos_token_ids for output in (regex, choice, grammar))


def test_each_of_several_answers_keeps_to_the_form_by_itself(llm):
    outputs = llm.generate(PROMPT, bounded("regex", PATTERN, n=3))[0].outputs
    assert all(re.fullmatch(PATTERN, output.text) for output in outputs)
    assert len({output.text for output in outputs}) > 1


def test_a_stop_string_ends_an_answer_within_its_form(llm):
    [output] = llm.generate(PROMPT, bounded("regex", "[a-c]{60}", stop=("b",)))
    assert (output.finish_reason, output.stop_reason) == ("stop", "b")
    assert re.fullmatch("[ac]*", output.text)


def test_neighbours_without_a_form_are_bit_identical(llm):
    free = [SamplingParams(max_tokens=24, seed=9), SamplingParams(max_tokens=24, temperature=0.0, logprobs=2)]
    alone = [llm.generate(PROMPT, one)[0] for one in free]
    mixed = llm.generate([PROMPT] * 4, [bounded("json_object", max_tokens=24), free[0], bounded("regex", PATTERN), free[1]])
    assert [(one.token_ids, one.logprobs) for one in alone] == [(one.token_ids, one.logprobs) for one in mixed[1::2]]


def test_an_answer_goes_on_in_its_form_after_it_lost_its_blocks(make, llm):
    wanted = [bounded("regex", "[a-z]{30,40}( [0-9]{2}){2}", seed=seed) for seed in range(6)]
    roomy = llm.generate([PROMPT] * 6, wanted)
    tight = make(num_kv_blocks=22, max_model_len=160)
    outputs = tight.generate([PROMPT] * 6, wanted)
    assert sum(output.preemptions for output in outputs) > 0
    assert [output.token_ids for output in outputs] == [output.token_ids for output in roomy]


def several(outputs):
    """All answers to all prompts."""
    return [answer for output in outputs for answer in output.outputs]


def test_a_budget_ends_the_reasoning_of_each_answer_and_a_form_follows(make, llm):
    end = tuple(llm.tokenizer.encode("</think>"))
    grammar = after_reasoning(
        StructuredOutput("regex", PATTERN), ReasoningFormat("<think>", "</think>"), {}, llm.tokenizer.eos_token_ids, opened=True
    )
    structure = grammar._replace(budget=ReasoningBudget(20, "", "</think>", end))
    wanted = [SamplingParams(max_tokens=120, temperature=2.0, seed=seed, n=2, structured_output=structure) for seed in range(3)]
    roomy = several(llm.generate([PROMPT] * 3, wanted))
    for output in roomy:
        reasoning, answer = output.text.split("</think>")
        assert 20 <= len(llm.tokenizer.encode(reasoning)) <= 23  # a character may need more tokens to its end
        assert re.fullmatch(rf"\s*{PATTERN}", answer)
        assert output.finish_reason == "stop"
    tight = several(make(num_kv_blocks=22, max_model_len=160).generate([PROMPT] * 3, wanted))
    assert sum(output.preemptions for output in tight) > 0
    assert [output.token_ids for output in tight] == [output.token_ids for output in roomy]
    drafting = make(speculative_config={"method": "auto", "num_speculative_tokens": 4})
    drafts = several(drafting.generate([PROMPT] * 3, wanted))
    assert [output.token_ids for output in drafts] == [output.token_ids for output in roomy]


def test_a_grammar_that_fails_on_the_way_fails_alone(llm, monkeypatch):
    class Failing(Matcher):
        def mask(self, bitmask, index):
            super().mask(bitmask, index)
            raise ValueError("too many states")

    free = SamplingParams(max_tokens=12, seed=9)
    alone = llm.generate(PROMPT, free)[0].token_ids
    with monkeypatch.context() as broken:
        broken.setattr(Grammar, "matcher", lambda self, budget, charge: Failing(self._template, self._template.copy(), self.usage))
        failed, other = llm.generate([PROMPT] * 2, [bounded("json_object"), free])
    assert (failed.finish_reason, failed.token_ids) == ("error", [])
    assert other.token_ids == alone


def request(tenant, params, tag=1):
    return EngineRequest.of(tag, PROMPT, params, Scheduling(tenant=tenant))


def answers(llm, *requests):
    """Runs requests of tenants, (tenant, params), side by side. Returns the token ids of each, or the error that its client gets."""
    streams, running = [], {}
    for number, (tenant, params) in enumerate(requests):
        stream = Stream(llm.tokenizer, 1000 * (number + 1), PROMPT, params, arrived=0.0)
        llm.engine.add(request(tenant, params, stream.tags.start))
        streams.append(stream)
        running.update(dict.fromkeys(stream.tags, stream))
    while running:
        step = llm.engine.step()
        if step is not None:
            deliver(step, running)
    llm.engine.step()
    results = []
    for stream in streams:
        stream.wake()
        try:
            results.append([output.token_ids for output in asyncio.run(stream.next())])
        except InvalidRequest as error:
            results.append(error)
    return results


def test_a_grammar_that_takes_too_much_time_ends_its_sequences_alone(llm, monkeypatch):
    slow = bounded("regex", "[a-z]{50}slow", n=2, structured_output=StructuredOutput("regex", "[a-z]{50}slow", "guided_regex"))
    free, form = SamplingParams(max_tokens=12, seed=9), bounded("regex", "[a-z]{30}")
    alone = answers(llm, ("alice", free), ("alice", form))
    with monkeypatch.context() as changed:
        changed.setattr(grammars, "GrammarUsage", partial(GrammarUsage, processor_clock=itertools.count(0, 0.04).__next__))
        llm.engine.compile(request("eve", slow)).result(60)
    refused, *others = answers(llm, ("eve", slow), ("alice", free), ("alice", form))
    assert others == alone
    assert (refused.code, refused.param) == ("grammar_timeout", "guided_regex")
    reported = api_error(refused)
    assert (reported.status, reported.envelope["error"]["code"]) == (400, "grammar_timeout")
    assert "make it simpler" in reported.envelope["error"]["message"]


@pytest.mark.parametrize(("seconds", "turns"), [(0.0, ["eve", "alice", "eve", "alice"]), (1.0, ["eve", "alice", "alice", "eve"])])
def test_the_time_of_a_tenants_masks_counts_as_service(make, monkeypatch, seconds, turns):
    """eve's requests have fewer tokens than alice's. Both wait until the end, so that nobody's count is lifted."""
    monkeypatch.setattr(usage, "GRAMMAR_SECONDS", 1e6)
    monkeypatch.setattr(grammars, "TENANT_SECONDS", 1e6)
    monkeypatch.setattr(grammars, "GrammarUsage", partial(GrammarUsage, processor_clock=itertools.count(0, seconds).__next__))
    llm = make(scheduling_policy="vtc", max_num_seqs=1, enable_prefix_caching=False)
    form, free = bounded("regex", "[a-z]{30}", max_tokens=10), SamplingParams(max_tokens=12, ignore_eos=True)
    llm.engine.compile(request("eve", form)).result(60)
    tenants = ["eve", "eve", "alice", "alice"]
    for tag, tenant in enumerate(tenants):
        llm.engine.add(request(tenant, form if tenant == "eve" else free, tag))
    started = []
    while llm.engine.has_work:
        if (step := llm.engine.step()) is not None:
            started += [tenants[tag] for tag, *_ in step.started]
    assert started == turns


def test_a_lexer_that_one_tenant_has_used_up_is_not_that_of_another(make, monkeypatch):
    monkeypatch.setattr(trial, "MAX_LEXER_STATES", 300)
    monkeypatch.setattr(usage, "GRAMMAR_SECONDS", 1e6)
    llm = make()
    hot = bounded("regex", r"(.|\n)*[a-m](.|\n){16}end", n=4, max_tokens=60)
    short = bounded("regex", r"(.|\n)*[a-m](.|\n){16}end", max_tokens=3, temperature=0.0)
    [before] = answers(llm, ("alice", short))
    eve, beside = answers(llm, ("eve", hot), ("alice", short))
    assert eve.code == "grammar_too_complex"
    assert beside == before
    assert answers(llm, ("alice", short), ("eve", short)) == [before, before]


def test_tenants_without_keys_share_the_limits_on_grammars(make):
    form = bounded("regex", "[ab]{3}")
    engine = make().engine

    def compiled(tenant, group):
        return id(engine.compile(EngineRequest.of(1, PROMPT, form, Scheduling(tenant=tenant, limit_group=group))))

    assert len({compiled(tenant, "") for tenant in ("invented", "another", "")}) == 1
    assert len({compiled("alice", "alice"), compiled("bob", "bob"), compiled("invented", "")}) == 3
    assert len({compiled(tenant, None) for tenant in ("anyone", "another")}) == 2, "LLM's caller names the tenants"


def test_what_is_refused_names_its_field_before_anything_runs(llm):
    wrong = SamplingParams(structured_output=StructuredOutput("regex", "(", "guided_regex"))
    with pytest.raises(InvalidRequest, match=r"prompt 1: guided_regex cannot be used: .*unclosed group") as refused:
        llm.generate([PROMPT] * 2, [bounded("json_object"), wrong])
    assert refused.value.param == "guided_regex"
    assert not llm.engine.has_work


@pytest.mark.parametrize("field", [{"ignore_eos": True}, {"min_tokens": 3}])
def test_what_contradicts_the_end_of_a_form_is_refused(field):
    with pytest.raises(InvalidRequest, match="which says where the answer ends") as refused:
        bounded("json_object", **field)
    assert refused.value.param in field


def test_a_request_waits_for_its_grammar_in_the_queue_beside_the_others(make, monkeypatch):
    engine, inbox, replies, compiling = make().engine, SimpleQueue(), [], {}
    grammar = engine.compile(EngineRequest.of(1, PROMPT, bounded("regex", "[ab]{9}")))

    def compile_later(request):
        structure = request.sampling.structured_output
        return None if structure is None else compiling.setdefault(structure.text, Future())

    monkeypatch.setattr(engine, "compile", compile_later)
    hosted = HostedEngine(engine, replies.append, inbox.put)
    sent = time.monotonic_ns() // 1000

    def drain(*frames):
        for frame in frames:
            inbox.put(frame)
        while not inbox.empty():
            hosted.handle(inbox.get())

    def add(tag, text=None):
        params = bounded("regex", text, max_tokens=3) if text else SamplingParams(max_tokens=3)
        return Add(tag, EngineRequest.of(tag, PROMPT, params, submitted=sent, spent={"receive": 250_000}).pack())

    def run():
        """The tags that get tokens until there is nothing to run."""
        served = set()
        while (report := engine.step()) is not None:
            engine.check()
            served |= set(np.frombuffer(report.tags, np.uint64).tolist())
        return served

    drain(add(1, "slow"), add(2), add(3, "wrong"), add(4, "slow"), add(5, "left"))
    assert engine.stats().waiting == 5
    assert run() == {2}
    assert engine.has_work
    assert engine.wakes_in() is None
    drain(Explain(7, [1, 99]))
    [timeline] = replies.pop().timelines
    reported = Timeline.read(timeline)
    assert (reported.tag, reported.finish, reported.prompt_tokens, reported.states["receive"]) == (1, None, len(PROMPT), 0.25)
    assert reported.states["grammar"] > 0
    assert reported.arrived == pytest.approx(sent / 1e6 - 0.25)
    assert {one["tag"]: one["state"] for one in engine.snapshot()["waiting"]} == dict.fromkeys((1, 3, 4, 5), "grammar")
    drain(Abort([4]), Abort([5]))
    assert compiling["left"].cancelled(), "no request waits for it any more"
    assert not compiling["slow"].cancelled()
    compiling["wrong"].set_exception(InvalidRequest("no good", param="regex"))
    drain()
    [rejected] = replies
    assert (rejected.tag, rejected.error, rejected.param) == (3, "InvalidRequest", "structured_outputs")
    assert "cannot be used: no good" in rejected.message
    compiling["slow"].set_result(grammar.result(60))
    drain(add(6, "slow"))
    assert run() == {1, 6}
    states = Timeline.read(engine.explain(1)).states
    assert (states["receive"], states["grammar"] > 0) == (0.25, True)
    assert not engine.has_work


def test_a_request_that_waits_for_its_grammar_counts_in_the_queue(make, monkeypatch):
    engine = make(max_num_queued_reqs=2).engine
    compiling = Future()
    monkeypatch.setattr(engine, "compile", lambda request: compiling if request.sampling.structured_output else None)
    form = bounded("regex", "[ab]{3}")
    engine.add(EngineRequest.of(1, PROMPT, form), lambda go_on: None)
    engine.add(EngineRequest.of(2, PROMPT, SamplingParams(max_tokens=1)))
    with pytest.raises(QueueFull):
        engine.add(EngineRequest.of(3, PROMPT, form), lambda go_on: None)
    assert not compiling.cancelled(), "the first request waits for it"
    assert engine.abort(1)
    assert compiling.cancelled()
    engine.add(EngineRequest.of(3, PROMPT, SamplingParams(max_tokens=1)))
