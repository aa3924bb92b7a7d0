import itertools
import math
import statistics

import pytest

from chairlift.bench import workload
from chairlift.bench.arrivals import arrivals, ramp
from chairlift.bench.traces import TraceRequest
from chairlift.tokenizer import Tokenizer


def test_arrivals_are_the_same_for_a_seed_and_end_when_they_should():
    times = arrivals(1000, 5.0, seed=3)
    assert times == arrivals(1000, 5.0, seed=3)
    assert times != arrivals(1000, 5.0, seed=4)
    assert times[0] == 0.0
    assert times == sorted(times)
    first_gap = 1000 / 5.0 - times[-1]
    assert 0 < first_gap < 3  # what was taken off so that the first comes at 0


@pytest.mark.parametrize("burstiness", [0.01, 1e-9, 1e6])
@pytest.mark.parametrize("count", [1, 3])
def test_the_burstiest_and_the_most_even_have_times(burstiness, count):
    for seed in range(200):
        times = arrivals(count, 2.0, burstiness, seed)
        assert times[0] == 0
        assert all(0 <= time <= count / 2.0 for time in times)


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gaps_are_as_bursty_as_asked(burstiness):
    times = arrivals(20000, 10.0, burstiness, seed=1)
    gaps = [after - before for before, after in itertools.pairwise(times)]
    assert statistics.fmean(gaps) == pytest.approx(0.1, rel=0.001)
    assert statistics.stdev(gaps) / statistics.fmean(gaps) == pytest.approx(1 / math.sqrt(burstiness), rel=0.05)


def test_a_metronome():
    assert arrivals(4, 2.0, math.inf) == [0.0, 0.5, 1.0, 1.5]


def test_ramps():
    assert ramp(3, 1.0, 4.0, exponential=True, burstiness=math.inf) == [0.0, 0.5, 0.75]
    assert ramp(3, 1.0, 4.0, burstiness=math.inf) == pytest.approx([0.0, 1 / 2.5, 1 / 2.5 + 1 / 4])
    assert ramp(20000, 10.0, 10.0, burstiness=4.0)[-1] == pytest.approx(2000, rel=0.02)
    assert ramp(50, 1.0, 4.0, seed=1) == ramp(50, 1.0, 4.0, seed=1)


def test_random_jobs():
    jobs = workload.random_jobs(200, 100, 10, range_ratio=0.5, prefix_len=7, seed=1)
    assert jobs == workload.random_jobs(200, 100, 10, range_ratio=0.5, prefix_len=7, seed=1)
    assert {job.output_tokens for job in jobs} == set(range(5, 16))
    assert min(job.prompt_tokens for job in jobs) >= 57
    assert max(job.prompt_tokens for job in jobs) <= 157
    prompts = [job.prompt().split() for job in jobs]
    assert [len(prompt) for prompt in prompts] == [job.prompt_tokens for job in jobs]
    assert len({tuple(prompt[:7]) for prompt in prompts}) == 1
    assert len({tuple(prompt[7:15]) for prompt in prompts}) == 200
    assert not {job.prompt() for job in jobs} & {job.prompt() for job in workload.random_jobs(200, 100, 10, range_ratio=0.5, seed=2)}


def test_equal_blocks_of_a_trace_are_equal_words():
    requests = [TraceRequest(0.0, 1100, 9, (1, 2, 3)), TraceRequest(3.0, 1030, 8, (1, 2, 4)), TraceRequest(6.0, 513, 7, (5, 3))]
    first, second, third = (job.prompt().split() for job in workload.trace_jobs(requests))
    assert [len(first), len(second), len(third)] == [1100, 1030, 513]
    assert first[:1024] == second[:1024]
    assert first[1024:1030] != second[1024:]
    assert first[:512] != third[:512]
    assert third[512] == first[1024]  # a block that is partly filled is the beginning of the whole one


def test_a_trace_without_blocks_shares_nothing_and_goes_by_faster():
    requests = [TraceRequest(1.0, 50, 9, client="a"), TraceRequest(3.0, 50, 8), TraceRequest(4.0, 1, 2, prompt="Why?")]
    jobs = workload.trace_jobs(requests[:2], speedup=2) + workload.trace_jobs(requests[2:], speedup=2)
    assert [(job.due, job.output_tokens, job.client) for job in jobs] == [(0.5, 9, "a"), (1.5, 8, None), (2.0, 2, None)]
    assert jobs[0].prompt() != jobs[1].prompt()
    assert jobs[2].prompt() == "Why?"


def test_times_and_concurrency():
    jobs = workload.random_jobs(2, 5, 5)
    assert [job.due for job in workload.with_due_times(jobs, [0.0, 2.0])] == [0.0, 2.0]
    assert [job.due for job in workload.as_fast_as_possible(jobs, None)] == [0.0, 0.0]
    assert [job.due for job in workload.as_fast_as_possible(jobs, 3)] == [None, None]


def test_too_long_ones_are_left_out():
    requests = [TraceRequest(0.0, 10, 5), TraceRequest(0.0, 10, 6)]
    assert workload.fitting(requests, 15) == requests[:1]
    assert workload.fitting(requests, None) == requests


def test_texts_are_drawn_by_the_seed():
    requests = [TraceRequest(0.0, 1, 2, prompt=str(number)) for number in range(1000)]
    first, again, second = ([job.text for job in workload.trace_jobs(requests, seed=seed)] for seed in (1, 1, 2))
    assert first == again
    assert sorted(first) == sorted(second) == sorted(request.prompt for request in requests)
    assert len(set(first[:100]) & set(second[:100])) < 40


def test_a_word_is_a_token(model_dir):
    tokenizer = Tokenizer(model_dir)
    assert len(set(workload.WORDS)) == len(workload.WORDS) > 200
    for job in workload.random_jobs(20, 40, 1):
        assert len(tokenizer.encode(job.prompt(), add_special_tokens=False)) == 40
    assert {len(tokenizer.encode(word, add_special_tokens=False)) for word in workload.WORDS} == {1}
