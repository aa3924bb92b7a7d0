"""One change of settings is proposed if it certainly helps, and harms nobody."""

import numpy as np
import pytest

from chairlift.sim import proposal
from chairlift.sim.groups import LENGTH
from chairlift.sim.proposal import MIN_REQUESTS, Proposals, candidates, propose

HOUR = 3600 * 10**6
SLOTS, TURNS, KV = {"max_num_seqs": 8}, {"session_turns": "off"}, {"num_kv_blocks": 125}
RECORDED = {"scheduling_policy": "fcfs", "session_turns": "named", "num_kv_blocks": 100, "max_num_seqs": 4, "max_num_batched_tokens": 32}
DTYPE = [(name, "<i8") for name in ("tag", "finish", "arrived", "first_token", "ended", "output_tokens")] + [("tenant", "O")]


def requests(ttft=1.0, gap=0.1, *, count=600, tenants=("a", "b", "c")):
    """Requests over an hour; `ttft` may have one value in seconds for each."""
    rows = np.zeros(count, DTYPE)
    rows["tag"], rows["finish"], rows["output_tokens"] = np.arange(count), LENGTH, 11
    rows["arrived"] = np.arange(count) * HOUR // count
    rows["first_token"] = rows["arrived"] + (np.broadcast_to(ttft, count) * 1e6).astype(int)
    rows["ended"] = rows["first_token"] + (np.broadcast_to(gap, count) * 1e7).astype(int)
    rows["tenant"] = np.resize(np.array(tenants, object), count)
    return rows


def later(rows):
    """The requests an hour later, with other tags."""
    for name in ("arrived", "first_token", "ended"):
        rows[name] += HOUR
    rows["tag"] += 600
    return rows


def proposed(after, changes=(SLOTS,), *, before=None, recorded=None):
    before = requests() if before is None else before
    return propose(changes, [before, *after], before if recorded is None else recorded, 0, HOUR)


def test_a_change_that_serves_everyone_sooner_is_proposed_with_its_interval():
    ttft = np.where(np.arange(600) < 300, 0.4, 0.6)
    found = proposed([requests(ttft)])
    assert found["settings"] == "max_num_seqs=8"
    figure = found["figures"]["ttft_p99_s"]
    assert (figure["before"], figure["after"], figure["change"]) == (1.0, 0.6, pytest.approx(-0.4))
    assert found["figures"]["ttft_p50_s"]["low"] == pytest.approx(-0.6)
    assert found["figures"]["ttft_p50_s"]["high"] == pytest.approx(-0.4)
    assert "TTFT p99 1 s to 600 ms (-40%" in found["text"]
    assert "TPOT" not in found["text"], "it does not change"


def test_nothing_is_proposed_if_the_effect_is_within_its_uncertainty():
    # In one slice of twelve requests wait, and the change would help there alone.
    slow = np.where(np.arange(600) < 50, 20.0, 1.0)
    assert proposed([requests(np.minimum(slow, 10.0))], before=requests(slow))["settings"] is None
    # In each slice some wait.
    slow = np.where(np.arange(600) % 12 == 0, 20.0, 1.0)
    assert proposed([requests(np.minimum(slow, 10.0))], before=requests(slow))["settings"] == "max_num_seqs=8"
    assert proposed([requests(0.97)])["settings"] is None, "too small"


def test_the_simulators_own_error_is_part_of_the_uncertainty():
    assert proposed([requests(0.85)], recorded=requests(1.05))["settings"] == "max_num_seqs=8"
    found = proposed([requests(0.85)], recorded=requests(1.3))
    assert found["settings"] is None
    assert "none of 1 changes" in found["text"]


@pytest.mark.parametrize(
    "harmed",
    [
        requests(np.where(np.arange(600) % 50 == 0, 1.1, 0.5)),
        requests(0.5, 0.21),
        requests(0.5)[:-20],
    ],
    ids=["the slowest", "the time between tokens", "some that never end"],
)
def test_a_change_that_harms_somebody_is_not_proposed(harmed):
    assert proposed([requests(0.5)])["settings"] is not None
    assert proposed([harmed])["settings"] is None


def test_a_change_that_harms_a_tenant_is_not_proposed():
    def waits(a, b, c):
        return requests(np.resize([a, b, b, c], 600), tenants=("a", "b", "b", "c"))

    before = waits(1.0, 1.0, 5.0)
    assert proposed([waits(1.0, 0.5, 4.0)], before=before)["settings"] == "max_num_seqs=8"
    assert proposed([waits(1.5, 0.5, 4.0)], before=before)["settings"] is None


def test_the_largest_certain_gain_is_proposed_and_more_memory_only_if_nothing_else_helps():
    assert proposed([requests(0.8), requests(0.6), requests(0.2)], (SLOTS, TURNS, KV))["settings"] == "session_turns=off"
    assert proposed([requests(1.0), requests(2.0), requests(0.2)], (SLOTS, TURNS, KV))["settings"] == "num_kv_blocks=125"


def test_few_requests_or_few_simulated_ones_say_nothing():
    few = requests(count=MIN_REQUESTS - 1)
    assert "too few requests" in proposed([requests(0.5, count=len(few))], before=few)["text"]
    assert "of which 80% were simulated" in proposed([requests(0.5)], before=requests()[:480], recorded=requests())["text"]
    burst = requests(count=3600)[:1000]
    assert proposed([requests(0.5, count=3600)], before=burst)["settings"] is None, "they came in less than half of the hour"


def test_answers_of_one_token_have_no_time_between_tokens():
    before, after = requests(), requests(0.5)
    before["output_tokens"] = after["output_tokens"] = 1
    found = proposed([after], before=before)
    assert found["settings"] == "max_num_seqs=8"
    assert found["figures"]["time_per_output_token_p99_s"]["change"] == 0


def test_one_is_made_for_each_hour_once_its_last_requests_have_ended():
    proposals = Proposals([SLOTS])
    first, second = requests(), later(requests())
    settled = HOUR + proposal.SETTLE_SECONDS * 1e6
    proposals.add([first, requests(0.5), first])
    assert proposals.next(settled - 1) is None
    assert proposals.next(settled)["settings"] == "max_num_seqs=8"
    assert proposals.next(settled) is None
    proposals.add([second, second, second])
    assert proposals.next(settled + HOUR)["requests"] == 600
    assert proposals.next(settled + 2 * HOUR)["requests"] == 0


def test_of_many_requests_the_same_part_is_kept_in_all_runs(monkeypatch):
    monkeypatch.setattr(proposal, "MAX_REQUESTS", 250)
    proposals = Proposals([SLOTS])
    for part in range(6):
        rows = slice(100 * part, 100 * part + 100)
        proposals.add([requests()[rows], requests(0.5)[rows][::-1], requests()[rows]])
    found = proposals.next(HOUR + proposal.SETTLE_SECONDS * 1e6)
    assert (found["settings"], found["requests"], found["covered"]) == ("max_num_seqs=8", 150, 1.0)
    quiet = later(requests(count=200))
    proposals.add([quiet, quiet, quiet])
    assert proposals.next(2 * HOUR + proposal.SETTLE_SECONDS * 1e6)["requests"] == 200, "all of a quiet hour are kept"


def test_a_policy_that_keeps_a_promise_is_not_exchanged():
    assert {"scheduling_policy": "shortest"} in candidates(RECORDED)
    assert not [one for one in candidates(RECORDED | {"scheduling_policy": "fair"}) if "scheduling_policy" in one]
    assert all(len(one) == 1 and one.items().isdisjoint(RECORDED.items()) for one in candidates(RECORDED))
