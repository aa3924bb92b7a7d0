"""Live sequences of a tiny random model: what they compute, what they answer, and which uses are refused."""

import math
import time
from types import SimpleNamespace

import pytest

from chairlift import LLM, InvalidRequest, SamplingParams, Scheduling, SequenceBusy, SequenceDropped, TooManySequences
from chairlift.engine.held_sequences import MAX_PER_TENANT

PROMPT = "The lift carries people up the mountain. It has forty chairs."
GREEDY = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True)
SAMPLED = SamplingParams(temperature=1.3, max_tokens=9, ignore_eos=True, seed=7)


@pytest.fixture(params=[True, False], ids=["prefix-cache", "no-cache"])
def llm(byte_model, request):
    sizes = {"num_kv_blocks": 64, "block_size": 8, "max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 256}
    with LLM(byte_model, load_format="dummy", enable_prefix_caching=request.param, **sizes) as llm:
        yield llm
        llm.engine.check()


def computed(llm):
    return llm.engine.stats().computed_tokens


def free(llm):
    return llm.engine.stats().free_blocks


def test_every_path_answers_as_a_plain_request_and_computes_only_new_tokens(llm):
    tokens, all_free = llm.tokenizer.encode(PROMPT), free(llm)
    with llm.open(PROMPT) as root:
        assert computed(llm) == len(tokens) - 1
        left, right = root.fork(2)
        left.append(" left")
        right.append(llm.tokenizer.encode(" right!"))
        before = computed(llm)
        outputs = llm.generate([left, right], [GREEDY, SAMPLED])
        appended = len(left.token_ids) + len(right.token_ids) - 2 * len(tokens) - 18
        assert computed(llm) - before == appended + 2 * 9  # each computes the last token, which the prompt left out, and 8 new ones
        second = left.generate(SAMPLED)
        paths = {left: [outputs[0], second], right: [outputs[1]], root: []}
        left_tokens, right_tokens = left.token_ids, right.token_ids
        assert root.token_ids == tokens
        assert root.score() == 0.0
        for path, parts in paths.items():
            assert path.token_ids[len(path.token_ids) - sum(len(part.token_ids) for part in parts) :] == [
                token for part in parts for token in part.token_ids
            ]
        scores = left.score(), right.score(mean=True)
        left.drop()
        right.drop()
        left.drop()
    assert free(llm) == all_free
    for path_tokens, params, parts in ((left_tokens, (GREEDY, SAMPLED), paths[left]), (right_tokens, (SAMPLED,), paths[right])):
        start, logprobs = len(path_tokens) - 9 * len(parts), []
        for one, part in zip(params, parts, strict=True):
            plain = llm.generate([path_tokens[:start]], SamplingParams(**{**vars_of(one), "logprobs": 0}))[0]
            assert (plain.token_ids, plain.text) == (part.token_ids, part.text)
            assert plain.logprobs == part.logprobs
            logprobs += [each.logprob for each in plain.logprobs]
            start += 9
        score = sum(logprobs)
        assert math.isclose(scores[0] if len(parts) == 2 else 9 * scores[1], score, rel_tol=1e-12)


def vars_of(params):
    return {name: getattr(params, name) for name in ("temperature", "max_tokens", "ignore_eos", "seed")}


def test_a_stream_that_is_closed_early_or_fails_to_start_leaves_the_sequence_as_it_was(llm):
    with llm.open(PROMPT) as sequence:
        stream = sequence.stream(GREEDY)
        first = next(stream)
        with pytest.raises(SequenceBusy):
            sequence.generate(GREEDY)
        with pytest.raises(SequenceBusy):
            sequence.append("more")
        (fork,) = sequence.fork()  # as it was before
        stream.close()
        assert sequence.token_ids == fork.token_ids == llm.tokenizer.encode(PROMPT)
        assert sequence.generate(GREEDY).token_ids == fork.generate(GREEDY).token_ids
        assert sequence.token_ids[len(llm.tokenizer.encode(PROMPT))] == first.token_ids[0]
        fork.drop()


def test_a_path_is_cut_between_two_steps(llm):
    with llm.open(PROMPT) as root:
        paths = root.fork(3)
        streams = [path.stream(SamplingParams(max_tokens=40, ignore_eos=True, seed=seed)) for seed, path in enumerate(paths)]
        for stream in streams:
            next(stream)
        before = free(llm)
        for path in paths[1:]:
            path.drop()
        assert free(llm) > before
        with pytest.raises(SequenceDropped):
            next(streams[1])
        assert sum(len(part.token_ids) for part in streams[0]) == 39
        paths[0].drop()


def test_a_new_priority_holds_for_a_running_generation(byte_model):
    sizes = {"num_kv_blocks": 64, "block_size": 8, "max_num_seqs": 1, "max_num_batched_tokens": 64, "max_model_len": 256}
    with LLM(byte_model, load_format="dummy", scheduling_policy="priority", **sizes) as llm, llm.open(PROMPT) as root:
        first, second = root.fork(2)
        streams = [path.stream(GREEDY) for path in (first, second)]
        next(streams[0])
        second.priority = -1
        whole = list(streams[1])
        assert whole[-1].timeline.priority == -1
        assert [part.finish_reason for part in streams[0]][-1] == "length"
        assert first.token_ids == second.token_ids


def test_a_sequence_is_rewound_and_goes_on_elsewhere(llm):
    with llm.open(PROMPT) as sequence:
        (fork,) = sequence.fork()
        whole = sequence.generate(GREEDY)
        fork.generate(GREEDY)
        fork.rewind(4)
        assert fork.score() == pytest.approx(sum(one.logprob for one in whole.logprobs[:5]), rel=1e-12)
        fork.append([17, 18, 19, 20, 21])
        before = computed(llm)
        output = fork.generate(GREEDY)
        assert computed(llm) - before <= 9 + 5 + 8  # a rewound sequence may lose the KV of its last partly filled block
        plain = llm.generate([fork.token_ids[:-9]], GREEDY)[0]
        assert output.token_ids == plain.token_ids
        with pytest.raises(InvalidRequest, match="count must be an integer from 0 to"):
            fork.rewind(1000)
        fork.drop()


def test_evicted_sequences_are_computed_again(llm):
    with llm.open(PROMPT) as sequence:
        (fork,) = sequence.fork()
        expected = fork.generate(GREEDY)
        fork.drop()
        llm.generate([[1] * 200, [2] * 200], SamplingParams(max_tokens=50, ignore_eos=True))  # needs nearly all blocks
        assert llm.engine.stats().preemptions_recompute == 0
        assert sequence.generate(GREEDY).token_ids == expected.token_ids


def test_wrong_uses_are_refused(llm):
    all_free = free(llm)
    alice = Scheduling(tenant="alice")
    with llm.open(PROMPT, scheduling=alice, lease=100) as sequence:
        with pytest.raises(InvalidRequest, match=r"would have .* tokens, and the context of this model has 256") as refused:
            sequence.append([1] * 256)
        assert refused.value.code == "context_length_exceeded"
        with pytest.raises(InvalidRequest, match="is not a token id"):
            sequence.append([100_000])
        with pytest.raises(InvalidRequest, match="belongs to another tenant"):
            llm.generate([sequence], GREEDY, scheduling=Scheduling(tenant="bob"))
        with pytest.raises(InvalidRequest, match="belongs to another tenant"):
            sequence.generate(GREEDY, scheduling=Scheduling(tenant="alice", cache_salt="other"))
        with pytest.raises(InvalidRequest, match="has one answer"):
            sequence.generate(SamplingParams(n=2))
        with pytest.raises(TooManySequences, match=f"a tenant may hold {MAX_PER_TENANT} sequences"):
            sequence.fork(100_000)
        for count in (0, -1, 1.5, None, "2"):
            with pytest.raises(InvalidRequest, match="count must be an integer from 1 "):
                sequence.fork(count)
        for count in (-1, 1.5, None, "2", 10**9):
            with pytest.raises(InvalidRequest, match="count must be an integer from 0 "):
                sequence.rewind(count)
        (fork,) = sequence.fork()  # the refused call has made none
        fork.drop()
        with llm.open("a", scheduling=Scheduling(tenant="bob")):
            pass
        assert sequence.generate(GREEDY).finish_reason == "length"
    for use in (sequence.fork, lambda: sequence.append("a"), lambda: sequence.generate(GREEDY), lambda: setattr(sequence, "priority", 1)):
        with pytest.raises(SequenceDropped):
            use()
    for lease in (0, None, "60", math.nan):
        with pytest.raises(InvalidRequest, match="lease must be"):
            llm.open(PROMPT, lease=lease)
    assert free(llm) == all_free
    assert llm.engine.usage()["tenants"]["alice"]["held"] == 0


def test_a_lease_ends(llm, monkeypatch):
    all_free = free(llm)
    sequence = llm.open(PROMPT, lease=30)
    clock = {"now": 0}
    monkeypatch.setattr("chairlift.engine.held_sequences.time", SimpleNamespace(monotonic=lambda: time.monotonic() + clock["now"]))
    clock["now"] += 20
    sequence.generate(GREEDY)
    clock["now"] += 20
    sequence.generate(GREEDY)
    clock["now"] += 40
    with pytest.raises(SequenceDropped, match="its lease has ended"):
        sequence.generate(GREEDY)
    llm.generate(["a"], GREEDY)  # an idle engine frees memory when it is used next
    assert free(llm) == all_free
    sequence.drop()
