"""A shadow says what a running server would have done, from its journal."""

import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from journals import watched

from chairlift import Policy
from chairlift.cli.replay_settings import apply
from chairlift.errors import InvalidSetting
from chairlift.sim import proposal, shadow
from chairlift.sim.policy import use
from chairlift.sim.shadow import Shadow

FAIR = {"scheduling_policy": "fair"}


class Clocks:
    """Time and CPU time in seconds, as a test sets them."""

    def __init__(self):
        self.time, self.used = 1.0, 0.0


@pytest.fixture(scope="module")
def day():
    return watched(requests=400)


@pytest.fixture
def journal(tmp_path, day):
    path = tmp_path / "day.journal"
    path.write_bytes(day.journal)
    return path


def begin(path, changes=FAIR, clocks=None):
    clocks = clocks or Clocks()
    return Shadow(path, lambda recorded: apply(recorded, changes), now=lambda: clocks.time, cpu=lambda: clocks.used)


def document(path, changes=FAIR):
    one = begin(path, changes)
    one.work()
    return one.document()


def test_it_says_what_another_policy_would_have_done_to_each_tenant(journal, day):
    seen = document(journal)
    assert seen["covered"] == 1.0
    assert seen["runs"]["recorded"]["requests"] == seen["runs"]["simulated"]["requests"] == 400
    few, many = seen["tenants"]["few"], seen["tenants"]["many"]
    assert few["shadow"]["ttft_p50_s"] < few["simulated"]["ttft_p50_s"] / 20, "few requests go before many"
    assert many["shadow"]["ttft_p50_s"] > 1.2 * many["simulated"]["ttft_p50_s"]
    assert not seen["sessions"]
    # The recorded run is the server's own, and the simulated one is close to it.
    ttft = [one["first_token"] - one["submitted"] for one in day.timelines if one["first_token"] is not None]
    recorded, simulated = seen["runs"]["recorded"], seen["runs"]["simulated"]
    assert recorded["ttft_p50_s"] == np.percentile(ttft, 50, method="inverted_cdf") / 1e6
    assert recorded["preemptions"] == sum(one["preemptions"] for one in day.timelines) > 0
    cached, prompt = (sum(one[name] for one in day.timelines if one["first_token"]) for name in ("cached_tokens", "prompt_tokens"))
    assert recorded["cached_share"] == cached / prompt
    for name in ("ttft_p50_s", "ttft_p99_s", "time_per_output_token_p50_s", "cached_share"):
        assert simulated[name] == pytest.approx(recorded[name], rel=0.02), name


def test_a_larger_batch_is_simulated_too(journal):
    seen = document(journal, {"max_num_seqs": 16})["runs"]
    assert seen["shadow"]["ttft_p50_s"] < seen["simulated"]["ttft_p50_s"] / 2
    unchanged = document(journal, {"max_num_seqs": 4})["runs"]
    assert unchanged["shadow"] == unchanged["simulated"]


def test_sessions_are_told_apart_and_their_bound_can_be_tried(tmp_path):
    path = tmp_path / "sessions.journal"
    path.write_bytes(watched(requests=200, sessions=4).journal)
    seen = document(path, {"session_turns": "off"})
    assert sorted(seen["sessions"]) == ["few/s1", "few/s3", *(f"many/s{number}" for number in range(4))]
    assert sum(one["recorded"]["requests"] for one in seen["sessions"].values()) == 200
    assert seen["runs"]["shadow"] != seen["runs"]["simulated"]


def test_pieces_of_a_journal_give_what_the_whole_file_gives(journal, day, tmp_path):
    path = tmp_path / "growing.journal"
    path.write_bytes(day.journal[:7])
    one, at, written = begin(path), 7, 0
    one.work()
    with path.open("ab") as file:
        while at < len(day.journal):
            file.write(day.journal[at : at + 1237])
            file.flush()
            at, written = at + 1237, written + 1
            one.work()
    assert written > 20
    pieces, whole = one.document(), document(journal)
    assert pieces["runs"]["recorded"] == whole["runs"]["recorded"]
    # Steps take the times that the server had learned by then.
    assert pieces["runs"]["shadow"] == pytest.approx(whole["runs"]["shadow"], rel=1e-3)


@pytest.mark.parametrize(("answer", "reported"), [(lambda: 1 / 0, "division by zero"), (lambda: -1, "rank() returned -1")])
def test_a_policy_that_raises_or_returns_nonsense_is_reported_and_replaced(journal, answer, reported):
    class Broken(Policy):
        def rank(self, request):
            return answer()

    seen = document(journal, {"scheduling_policy": use(Broken())})
    assert reported in seen["failure"]
    assert seen["runs"]["shadow"] == seen["runs"]["simulated"], "by arrival, as recorded"


def test_a_policy_that_never_returns_is_interrupted(journal, monkeypatch):
    monkeypatch.setattr(shadow, "SLICE_CPU_SECONDS", 0.05)

    class Endless(Policy):
        def rank(self, request):
            while True:
                pass

    seen = document(journal, {"scheduling_policy": use(Endless())})
    assert "took more than 0.05 s" in seen["failure"]
    assert seen["runs"]["shadow"]["requests"] == 400


def test_a_long_simulation_is_not_interrupted(journal, monkeypatch):
    monkeypatch.setattr(shadow, "SLICE_CPU_SECONDS", 1e-6)

    class Core:
        """Takes CPU time until the timer has run out, outside of a policy."""

        def __init__(self, core):
            self._core = core

        def __getattr__(self, name):
            return getattr(self._core, name)

        def advance(self, requests):
            more = self._core.advance(requests)
            while more and signal.getitimer(signal.ITIMER_PROF)[0]:
                pass
            return more

    one = begin(journal)
    one._advance(one._file.read(shadow.SLICE_BYTES))  # noqa: SLF001
    one._core = Core(one._core)  # noqa: SLF001
    one.work()
    seen = one.document()
    assert (seen["runs"]["recorded"]["requests"], seen["covered"], seen["failure"]) == (400, 1.0, None)


def test_it_keeps_nothing_of_the_time_in_which_nothing_ends(journal):
    clocks = Clocks()
    one = begin(journal, clocks=clocks)
    one.work()
    counts = []
    for _ in range(3):
        seen, clocks.time = one.document(), clocks.time + 10
        counts.append((seen["runs"]["recorded"]["requests"], *(len(parts) for parts in one._rows.values())))  # noqa: SLF001
    assert counts == [(400, 1, 1, 1)] * 3


def test_the_figures_of_an_idle_server_expire(journal):
    clocks = Clocks()
    one = begin(journal, clocks=clocks)
    one.work()
    assert one.document()["runs"]["recorded"]["requests"] == 400
    clocks.time += shadow.WINDOW_SECONDS + 1
    one.work()
    assert one.document()["runs"]["recorded"]["requests"] == 0


def test_it_proposes_a_change_of_settings_for_the_hour(tmp_path, monkeypatch):
    monkeypatch.setattr(proposal, "HOUR_SECONDS", 1.4)
    monkeypatch.setattr(proposal, "SETTLE_SECONDS", 2.87)
    path = tmp_path / "slots.journal"
    settings = {"requests": 400, "num_kv_blocks": 200}
    day = watched(**settings, max_num_seqs=2)
    path.write_bytes(day.journal)
    one = begin(path)
    assert one.document()["proposal"] is None
    one.work()
    found = one.document()["proposal"]
    assert found["settings"] == "max_num_seqs=4", "requests wait for one of two slots"
    assert found["covered"] == 1.0
    ttft = found["figures"]["ttft_p50_s"]
    assert ttft["change"] < -0.3
    # The server with this setting serves the same requests about as soon as predicted: their outputs are drawn in another order.
    served = {
        one["tag"]: one["first_token"] - one["submitted"] for one in watched(**settings, max_num_seqs=4).timelines if one["first_token"]
    }
    answered = [one["tag"] for one in day.timelines if one["finish"] in ("stop", "length")]
    assert np.median([served[tag] for tag in answered]) / 1e6 == pytest.approx(ttft["after"], rel=0.12)
    assert max(figure["simulator_error"] for figure in found["figures"].values()) < 0.02
    page = (Path(__file__).parents[2] / "docs/lab.md").read_text()
    assert f"Proposal: {found['text']}." in " ".join(page.split())


def test_a_tag_may_be_used_twice(tmp_path):
    path = tmp_path / "twice.journal"
    path.write_bytes(watched(requests=100, tag_of=lambda number: number // 2).journal)
    seen = document(path)
    assert seen["covered"] == 1.0
    assert 80 < seen["runs"]["simulated"]["requests"] <= 100


def test_it_takes_two_hundredths_of_a_core_and_says_what_it_left_out(journal, monkeypatch):
    monkeypatch.setattr(shadow, "SLICE_BYTES", 2000)
    clocks, advance, cost = Clocks(), vars(Shadow)["_advance"], 0.03

    def expensive(one, data):
        clocks.used += cost
        return advance(one, data)

    monkeypatch.setattr(Shadow, "_advance", expensive)
    one = begin(journal, clocks=clocks)
    while one.document()["runs"]["recorded"]["requests"] < 400:
        clocks.time += 5.0
        one.work()
        assert clocks.used <= shadow.CPU_SHARE * (clocks.time - 1.0) + cost
        assert clocks.time < 1000
    seen = one.document()
    assert 0 < seen["covered"] < 1, "what came while it was behind was left out"
    assert seen["runs"]["shadow"]["requests"] < 400
    clocks.time += 100
    one.work()
    assert one.document()["behind_s"] == 0


def test_it_goes_on_with_the_journal_of_a_restarted_engine(journal, day):
    one = begin(journal)
    one.work()
    journal.with_name("day.journal.1").write_bytes(watched(requests=30).journal)
    one.work()
    assert one.document()["runs"]["recorded"]["requests"] == 30


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("replaced", [False, True])
def test_it_begins_again_with_the_journal_of_a_restarted_server(journal, number, replaced):
    clocks = Clocks()
    one = begin(journal, clocks=clocks)
    one.work()
    if number:
        journal.with_name("day.journal.1").write_bytes(watched(requests=30).journal)
        one.work()
    new = watched(requests=12, max_num_seqs=2).journal
    if replaced:
        journal.rename(journal.with_name("old"))
    journal.write_bytes(new[:300])
    os.utime(journal, (time.time() + 1, time.time() + 1))
    one.work()
    journal.write_bytes(new)
    clocks.time += 1
    one.work()
    assert one.document()["runs"]["recorded"]["requests"] == 12


def test_what_is_no_journal_is_refused(tmp_path):
    with pytest.raises(InvalidSetting, match="cannot be read"):
        begin(tmp_path / "none")
    (tmp_path / "text").write_text("hello\n" * 20)
    with pytest.raises(InvalidSetting, match="this is no journal"):
        begin(tmp_path / "text").work()
