"""Simon Willison's `llm`, as its user types it; the models come from its extra-openai-models.yaml."""

import json
import os
import subprocess
import sys

import pytest

MODELS = """
- model_id: {name}-chat
  model_name: {model}
  api_base: {base}/v1
  api_key_name: chairlift
  supports_tools: true
  supports_schema: true
- model_id: {name}-text
  model_name: {model}
  api_base: {base}/v1
  api_key_name: chairlift
  completion: true
"""


@pytest.fixture(scope="module")
def llm(tmp_path_factory, quick, real, model, key):
    """Runs `llm` with these arguments; returns what it prints."""
    home = tmp_path_factory.mktemp("llm")
    texts = [MODELS.format(name=name, model=model, base=base) for name, base in (("quick", quick), ("real", real))]
    (home / "extra-openai-models.yaml").write_text("".join(texts))
    (home / "keys.json").write_text(json.dumps({"chairlift": key}))

    def run(*arguments, fails=False):
        environ = os.environ | {"LLM_USER_PATH": str(home)}
        done = subprocess.run([sys.executable, "-m", "llm", *arguments], capture_output=True, text=True, env=environ, timeout=300)
        assert bool(done.returncode) == fails, done.stderr
        return done.stderr if fails else done.stdout

    return run


def test_it_knows_the_models(llm):
    listed = llm("models")
    assert all(name in listed for name in ("quick-chat", "quick-text", "real-chat"))


def test_a_prompt_streams_what_it_gives_whole(llm):
    prompt = ("prompt", "-m", "quick-chat", "Say hello.", "-s", "Be brief.", "-o", "max_tokens", "30")
    assert llm(*prompt) == llm(*prompt, "--no-stream") != "\n"


def test_a_conversation_goes_on(llm):
    llm("prompt", "-m", "quick-chat", "Say hello.", "-o", "max_tokens", "5")
    assert llm("prompt", "-c", "Again.", "-o", "max_tokens", "5").strip()
    logged = json.loads(llm("logs", "-n", "2", "--json"))
    assert {one["conversation_id"] for one in logged} == {logged[0]["conversation_id"]}
    assert [one["output_tokens"] for one in logged] == [5, 5]
    assert logged[1]["input_tokens"] > logged[0]["input_tokens"] > 0


def test_a_completion(llm):
    assert llm("prompt", "-m", "quick-text", "Once upon", "-o", "max_tokens", "8").strip()


def test_a_refusal_is_told(llm):
    assert "maximum context length" in llm("prompt", "-m", "quick-chat", "word " * 2000, fails=True)


def test_a_schema(llm):
    schema = {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"], "additionalProperties": False}
    answer = llm(
        *("prompt", "-m", "real-chat", "What is the capital of France? Answer in JSON.", "--schema", json.dumps(schema)),
        *("-o", "max_tokens", "40", "-o", "temperature", "0"),
    )
    assert json.loads(answer).keys() == {"city"}


@pytest.mark.parametrize("stream", [(), ("--no-stream",)])
def test_tools_may_be_offered(llm, stream):
    functions = "def add(a: int, b: int) -> int:\n    'Adds two numbers.'\n    return a + b\n"
    # Whether so small a model calls them is its own affair: `llm` fails if it is refused or cannot read the answer.
    llm("prompt", "-m", "real-chat", "What is 2 + 2?", "--functions", functions, "-o", "max_tokens", "40", "--td", *stream)
