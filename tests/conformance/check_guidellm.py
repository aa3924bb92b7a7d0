"""guidellm: a load of synthetic prompts, each request streamed, with usage in every chunk."""

import json
import os
import subprocess
import sys

import pytest

REQUESTS = 20


@pytest.mark.parametrize(
    ("route", "profile"),
    [
        ("/v1/chat/completions", "concurrent,streams=4"),
        ("/v1/completions", "throughput,max_concurrency=16"),
        ("/v1/responses", "synchronous"),
    ],
)
def test_a_load(quick, key, model, tmp_path, route, profile):
    report = tmp_path / "report.json"
    command = [sys.executable, "-m", "guidellm", "run"]
    command += ["--backend", f"kind=openai_http,target={quick},model={model},api_key={key},request_format={route}"]
    command += ["--profile", f"kind={profile}", "--constraint", f"kind=max_requests,count={REQUESTS}"]
    command += ["--tokenizer", f"kind=hf_auto,model={os.environ['CHAIRLIFT_MODEL_DIR']}"]
    command += ["--data", "kind=synthetic_text,prompt_tokens=64,output_tokens=32"]
    command += ["--disable-progress", "--output", f"kind=json,path={report}"]
    environ = os.environ | {"HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    [benchmark] = json.loads(report.read_text())["benchmarks"]
    requests = benchmark["requests"]
    assert (len(requests["successful"]), requests["errored"], requests["incomplete"]) == (REQUESTS, [], [])
    assert {request["output_tokens"] for request in requests["successful"]} == {32}
