"""Plans for agents on synthetic machines: the number of sessions whose KV and computing fit."""

import json
from pathlib import Path

import pytest

from chairlift.cli import main
from chairlift.config import EngineConfig
from chairlift.errors import InvalidSetting
from chairlift.sim.devices import Profile
from chairlift.sim.sessions_plan import SessionsPlan, SessionsTarget, plan_sessions
from chairlift.sim.steps import StepTime

BLOCK, TURNS, TOKENS, THINK = 64, 24, 256, 4.0
LONGEST = TURNS * TOKENS
# A step takes 1 ms, and a prompt token 2 ms: a turn takes half a second.
STEP = StepTime(((0.0, 1_000.0), (1.0, 3_000.0)))


@pytest.fixture
def trace(tmp_path: Path) -> str:
    """One session whose prompts grow by TOKENS in each turn, in blocks of its own."""
    rows = [[0, THINK * at, THINK, 0, 0, "s", TOKENS * (at + 1), 5, 2, "t", 0, min(at, 1), TOKENS * at // BLOCK] for at in range(TURNS)]
    (tmp_path / "s.jsonl").write_text(json.dumps({"block": BLOCK, "threads": [{}], "requests": rows}) + "\n")
    return str(tmp_path / "s.jsonl")


def machine(blocks: int, step: StepTime = STEP, error: float = 0.0) -> Profile:
    sizes = {
        "max_num_batched_tokens": 256,
        "max_num_seqs": 64,
        "num_kv_blocks": blocks,
        "block_size": BLOCK,
        "max_model_len": LONGEST + 10,
    }
    return Profile(name="made up", model="M", step=step, sizes=sizes, errors={"p50": error})


def plan(trace: str, on: Profile, **more: object) -> SessionsPlan:
    return plan_sessions(trace, device=on, config=EngineConfig(), longest_think=THINK, duration=900.0, **more)


def test_as_many_agents_fit_as_their_contexts(trace: str) -> None:
    # With all KV that they want, agents wait for computing; with KV for three longest contexts, for that.
    ample, tight = plan(trace, machine(100 * LONGEST // BLOCK)), plan(trace, machine(3 * LONGEST // BLOCK))
    assert 3 <= tight.agents < ample.agents / 2
    assert tight.sensitivity["kv"] > tight.agents
    assert tight.sensitivity["slots"] == tight.agents
    assert ample.sensitivity["compute"] > ample.agents == ample.sensitivity["kv"]
    at = next(one for one in tight.points if one["users"] == tight.agents)
    assert at["slowdown"] <= 2.0 < tight.points[-1]["slowdown"]


def test_a_laxer_target_and_uncertain_steps(trace: str) -> None:
    on = machine(3 * LONGEST // BLOCK, error=0.3)
    strict, lax = plan(trace, on), plan(trace, on, target=SessionsTarget(slowdown=6.0))
    assert strict.low <= strict.agents <= strict.high
    assert lax.agents > strict.agents
    assert lax.low < lax.agents < lax.high


def test_what_cannot_be_planned_is_refused(trace: str) -> None:
    with pytest.raises(InvalidSetting, match="longer --duration"):
        plan_sessions(trace, device=machine(3000), duration=30.0)
    with pytest.raises(InvalidSetting, match="a single agent take"):
        plan_sessions(trace, device=machine(3000), config=EngineConfig(enable_prefix_caching=False), longest_think=THINK, duration=900.0)
    with pytest.raises(InvalidSetting, match="above 1"):
        SessionsTarget(slowdown=1.0)


def test_the_command_says_it_in_words_and_json(trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "here.json"
    machine(3 * LONGEST // BLOCK).save(file)
    command = ["plan", "--sessions", trace, "--modelled-device", str(file), "--duration", "900", "--max-think-time", "4"]
    assert main.main([*command, "--json"]) == 0
    raw = json.loads(capsys.readouterr().out)
    assert main.main(command) == 0
    reported = capsys.readouterr().out
    assert f"M on made up: {raw['agents']} agents ({raw['low']} to {raw['high']})" in reported
    assert "95 % of the sessions take at most 2 times as long as alone" in reported
    for wrong in (["--ttft-ms", "5"], ["--input-len", "5"], ["--report", "a.html"]):
        assert main.main([*command, *wrong]) == 2
    assert main.main(["plan", "--slowdown", "3"]) == 2
    assert "it is for --sessions" in capsys.readouterr().err
