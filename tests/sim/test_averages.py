"""Averages over time and the most of a run: of every step and every replica, by hand and by the requests' own accounts."""

import pytest
from traces import CONV, workload

from chairlift.bench.traces import TraceRequest
from chairlift.sim.result import Result
from chairlift.sim.run import run
from chairlift.sim.steps import StepTime
from chairlift.sim.workload import Workload

LIMITS = {"num_kv_blocks": 1001, "block_size": 16, "max_num_batched_tokens": 512, "max_num_seqs": 16, "max_model_len": 8192}
STEP = StepTime(((0.0, 1000.0), (1.0, 1100.0)))
"""A millisecond, and a tenth of one for each token."""


def of(*lines: tuple[float, int, int], replicas: int = 1) -> Result:
    """The result of requests by their arrivals, prompts and outputs."""
    return run(Workload.of([TraceRequest(*line) for line in lines]), LIMITS, STEP, replicas=replicas)


def test_averages_weigh_each_step_by_its_time_and_leave_pauses_out() -> None:
    # 1.5 ms and 1.1 ms alone; 1.6 ms beside the second's prompt; 1.1 ms of the second alone; a pause; 1.5 ms of the third.
    figures = of((0, 5, 3), (0.002, 5, 2), (0.010, 5, 1)).figures()
    busy = 1500 + 1100 + 1600 + 1100 + 1500
    assert figures["steps"] == 5
    assert figures["batch_mean"] == (busy + 1600) / busy
    assert figures["batch_max"] == 2
    assert figures["kv_used_mean"] == (busy + 1600) / (busy * 1000), "each holds one block of the thousand"
    assert figures["kv_used_max"] == 2 / 1000


def test_all_replicas_count() -> None:
    # The first has two short requests: 2.0 and 1.2 ms with both. The second has a long one: 11 and 1.1 ms, with 7 blocks.
    result = of((0, 5, 2), (0, 100, 2), (0, 5, 2), replicas=2)
    figures = result.figures()
    assert figures["batch_mean"] == (2 * 3200 + 12100) / (3200 + 12100)
    assert figures["batch_max"] == 2
    assert figures["kv_used_mean"] == (2 * 3200 + 7 * 12100) / ((3200 + 12100) * 1000)
    assert figures["kv_used_max"] == 7 / 1000
    assert [one.figures()["kv_used_max"] for one in result.replicas] == [2 / 1000, 7 / 1000]


@pytest.mark.parametrize("settings", [{}, {"num_kv_blocks": 401}, {"scheduling_policy": "shortest", "num_kv_blocks": 401}])
def test_blocks_over_time_are_those_of_the_requests_accounts(settings: dict[str, object]) -> None:
    step = 20_000
    result = run(workload(CONV).first(300).faster(2), LIMITS | settings, StepTime.constant(step))
    figures = result.figures()
    total, busy = result.stats["total_blocks"], result.steps * step
    assert figures["kv_used_mean"] * busy * total == pytest.approx(result.requests["block_us"].sum()), "no two share anything"
    assert figures["batch_mean"] * busy <= sum(result.requests["ended"] - result.requests["started"])
    assert figures["kv_used_max"] * total == pytest.approx(max(result.timeline["blocks"]), abs=total * 0.1)
    assert figures["kv_used_max"] * total >= max(result.timeline["blocks"])
    assert figures["preemptions_recompute"] > 0, "what is lost and held again counts too"


def test_a_timeline_falls_to_nothing_in_a_pause() -> None:
    line = of((0, 5, 20), (1, 5, 1)).timeline
    assert line["time"].tolist() == sorted(line["time"])
    ends = 1500 + 19 * 1100
    [pause] = line[(line["time"] >= ends) & (line["time"] < 1_000_000)]
    assert pause["time"] == ends
    assert not any(pause[name] for name in ("batch", "tokens", "running", "waiting", "blocks"))
    assert (line["batch"][line["time"] < ends] == 1).all()
