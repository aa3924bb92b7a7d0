"""The names of timeline states and preemption reasons are the core's."""

from pathlib import Path

import chairlift
from chairlift import _core
from chairlift.timeline import PREEMPTION_REASONS, SERVING_RULES, STATES, WAITING, describe_state

PACKAGE = Path(chairlift.__file__).parent


def test_every_state_of_the_core_is_described_and_no_other():
    assert sorted(STATES) == sorted(_core.TIMELINE_STATES)
    assert "does not know" in describe_state("wait_for_godot").meaning


def test_every_waiting_state_says_what_it_waits_for():
    assert [name for name in WAITING if not STATES[name].waits_for] == []


def test_every_preemption_reason_of_the_core_is_described():
    assert tuple(PREEMPTION_REASONS) == _core.PREEMPTION_REASONS


def test_every_serving_rule_of_the_core_is_described():
    assert tuple(SERVING_RULES) == _core.SERVING_RULES


def test_the_documentation_has_every_state_and_every_serving_rule():
    text = (PACKAGE.parent.parent / "docs/scheduling/timeline.md").read_text()
    assert [name for name in (*STATES, *SERVING_RULES) if f"`{name}`" not in text] == []
