"""The names of timeline states are the core's, wherever they stand."""

from pathlib import Path

import chairlift
from chairlift import _core
from chairlift.server.observability import engine_metrics, explanation, status_line
from chairlift.timeline import STATES, WAITING, described

PACKAGE = Path(chairlift.__file__).parent


def test_every_state_of_the_core_is_described_and_no_other():
    assert sorted(STATES) == sorted(_core.TIMELINE_STATES)
    assert "does not know" in described("wait_for_godot").meaning


def test_every_state_is_in_sentences_and_every_waiting_one_on_the_dashboard():
    works = {"prefill", "prefill_shared", "decode", "decode_shared"}
    assert set(explanation._WAITS) == set(STATES) - works
    assert set(explanation._FOR) == set(STATES) - works - {"recompute"}
    page = (PACKAGE / "server/routes/ops/static/dashboard.html").read_text()
    table = page.partition("const CAUSES = {")[2].partition("};")[0]
    assert all(f"{name}: [" in table for name in WAITING)


def test_every_reason_for_a_preemption_is_counted_and_told():
    assert engine_metrics.PREEMPTIONS == _core.PREEMPTION_REASONS
    assert tuple(status_line._PREEMPTED_FOR) == tuple(explanation._PREEMPTED_FOR) == _core.PREEMPTION_REASONS


def test_the_documentation_has_every_state():
    text = (PACKAGE.parent.parent / "docs/scheduling/timeline.md").read_text()
    assert [name for name in STATES if f"`{name}`" not in text] == []
