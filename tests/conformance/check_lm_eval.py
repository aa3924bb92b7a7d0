"""lm-evaluation-harness over completions and chats, with tasks of ours; it gets the tokenizer from the server too."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

TASKS = Path(__file__).parent / "lm_eval_tasks"


@pytest.fixture
def evaluate(tmp_path, real, key, model):
    """Runs `lm_eval` on tasks; returns the results and the samples by task."""

    def run(kind, route, *tasks, more=()):
        arguments = f"model={model},base_url={real}/v1/{route},auth_token={key},num_concurrent=2,max_retries=1,max_length=2048"
        if kind == "local-completions":
            arguments += ",tokenizer_backend=remote"
        environ = os.environ | {"OPENAI_API_KEY": key, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(tmp_path)}
        command = [sys.executable, "-m", "lm_eval", "run", "--model", kind, "--model_args", arguments, "--tasks", ",".join(tasks)]
        command += ["--include_path", str(TASKS), "--output_path", str(tmp_path / "out"), "--log_samples", *more]
        done = subprocess.run(command, capture_output=True, text=True, env=environ, cwd=TASKS, timeout=900)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
        [results] = (tmp_path / "out").rglob("results_*.json")
        samples = {
            task: [
                json.loads(line) for path in (tmp_path / "out").rglob(f"samples_{task}_*.jsonl") for line in path.read_text().splitlines()
            ]
            for task in tasks
        }
        return json.loads(results.read_text())["results"], samples

    return run


def test_completions(evaluate):
    results, samples = evaluate("local-completions", "completions", "choices", "numbers", "story")
    assert results["choices"]["acc,none"] == 1
    # What transformers computes for the same tokens, in float32.
    for sample in samples["choices"]:
        assert [float(response[0][0]) for response in sample["resps"]] == pytest.approx(sample["doc"]["logprobs"], abs=0.01)
    for sample in samples["story"]:
        assert float(sample["resps"][0][0]) == pytest.approx(sample["doc"]["logprob"], abs=0.05)
    assert results["numbers"]["exact_match,stripped"] == 1


def test_chats(evaluate):
    _, samples = evaluate("local-chat-completions", "chat/completions", "numbers", more=("--apply_chat_template",))
    assert len(samples["numbers"]) == 3
    assert all(isinstance(sample["resps"][0][0], str) for sample in samples["numbers"])
