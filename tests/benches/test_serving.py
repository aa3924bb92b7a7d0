"""What benches/serving.py makes of its runs: which stand in one table, and which peer ours are compared with."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import serving
from peers import results
from peers.orders import spans
from peers.summary import compare, grid, table

BENCHES = Path(__file__).parents[2] / "benches"


def record(peer: str, commit: str = "c1", machine: str = "m1", tokens: int = 10) -> dict[str, Any]:
    answer = {"due": 0.0, "times": [0.5, 1.0], "tokens": tokens, "prompt_tokens": 5, "text": "", "error": ""}
    return {
        "workload": "w",
        "commit": commit,
        "machine": {"cpu": machine, "cores": 2, "memory_gib": 24},
        "peer": peer,
        "mode": "offline",
        "repeat": 0,
        "failed": 0,
        "shares": {"others": 0.0, "peer": 1.0, "client": 0.0},
        "answers": [answer],
    }


def test_a_table_has_runs_of_one_commit_and_one_machine() -> None:
    runs = [record("chairlift", "c0"), record("vllm_f32", machine="m2"), record("vllm_bf16"), record("chairlift")]
    assert [run["peer"] for run in results.latest(runs, "w")] == ["vllm_bf16", "chairlift"]
    assert results.latest(runs, "other workload") == []
    assert results.key(runs[0]) != results.key(runs[3])


def test_ours_is_compared_with_the_quickest_peer_asked_the_same_way_whatever_its_arithmetic() -> None:
    speeds = {
        "chairlift_exact": 250.0,
        "chairlift_int8": 450.0,
        "chairlift_exact_in_process": 280.0,
        "vllm_f32": 180.0,
        "vllm_bf16": 395.0,
        "llama_q8_0": 118.0,
        "openvino_f32": 256.0,
        "openvino_bf16": 513.0,
    }
    found = {line.ours: line for line in compare(speeds)}
    assert found["chairlift_exact"].best == ("vllm_bf16", 395.0)
    assert found["chairlift_exact"].alike == ("vllm_f32", 180.0)
    assert found["chairlift_int8"].best == ("vllm_bf16", 395.0)
    assert found["chairlift_int8"].alike == ("llama_q8_0", 118.0)
    assert found["chairlift_exact_in_process"].best == ("openvino_bf16", 513.0)
    assert found["chairlift_exact_in_process"].alike == ("openvino_f32", 256.0)


def test_a_row_without_any_peer_is_not_compared() -> None:
    assert compare({"chairlift": 250.0, "chairlift_in_process": 280.0, "vllm_bf16": 395.0})[0].ours == "chairlift"
    assert len(compare({"chairlift": 250.0, "chairlift_in_process": 280.0, "vllm_bf16": 395.0})) == 1
    assert table({"chairlift": 250.0}) == []


def test_the_grid_has_each_engine_in_its_best_setting() -> None:
    speeds = {
        "chairlift_exact": 250.0,
        "chairlift_exact_in_process": 280.0,
        "llama_q4_1": 83.0,
        "llama_q8_0": 118.0,
        "openvino_bf16": 513.0,
    }
    assert grid(speeds)[2:] == [
        "| Chairlift | 250 / 280 |  |  |",
        "| OpenVINO GenAI |  | - / 513 |  |",
        "| llama.cpp |  |  | 118 / - |",
    ]


def test_what_a_call_took_is_counted_to_its_end() -> None:
    assert spans([1.0, 0.5], [2.0, 3.0], 3.4) == [[1.0, 2.0], [0.5, 3.4]]


def test_an_engine_without_a_server_answers_orders_and_its_prints_stay_apart(tmp_path: Path) -> None:
    script = tmp_path / "engine.py"
    script.write_text(
        "import os\nfrom orders import serve\n\n"
        "def load():\n    print('loading'); os.write(1, b'from C\\n')\n"
        "    return lambda order: ([[0.1] * n for n in order['outputs']], [[7] * n for n in order['outputs']])\n\n"
        "serve(load)\n"
    )
    order = json.dumps({"prompts": [[1], [2]], "outputs": [1, 2], "arrivals": [0.0, 0.0]})
    done = subprocess.run(
        [sys.executable, str(script)],
        input=order + "\n",
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": str(BENCHES / "peers")},
    )
    ready, reply = done.stdout.splitlines()
    assert ready == "ready"
    assert json.loads(reply) == {"times": [[0.1], [0.1, 0.1]], "tokens": [[7], [7, 7]]}
    assert "loading" in done.stderr
    assert "from C" in done.stderr


def test_every_row_of_the_committed_table_is_a_peer() -> None:
    assert set(serving.TABLE) <= set(serving.PEERS)
    wanted = serving.Wanted(serving.TABLE, 2, 1)
    planned = list(serving.plan(wanted, set(), ("w", "c1", "m1")))
    assert [peer for repeat, peer, _ in planned if repeat == 1] == list(reversed(serving.TABLE))
    assert {mode for repeat, _, modes in planned for mode in modes if repeat == 1} == {"offline"}
    done = {(("w", "c1", "m1"), peer, mode, repeat) for repeat, peer, modes in planned for mode in modes}
    assert list(serving.plan(wanted, done, ("w", "c1", "m1"))) == []
    assert list(serving.plan(wanted, done, ("w", "c2", "m1"))) == planned
