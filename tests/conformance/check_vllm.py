"""The client of `vllm bench serve`: one file of vLLM's sources, as its sdist on PyPI has it."""

import asyncio
import importlib.util
import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import aiohttp
import pytest

VERSION = "0.33.0"
FILE = f"vllm-{VERSION}/vllm/benchmarks/lib/endpoint_request_func.py"
REQUESTS = 64


@pytest.fixture(scope="module")
def client(record_testsuite_property, key):
    """The module; its sdist is fetched once, and not installed, which would need torch and a compiler."""
    cache = Path(os.environ["CONFORMANCE_CACHE"])
    if not (cache / FILE).exists():
        fetch = [sys.executable, "-m", "unearth", f"vllm=={VERSION}", "--no-binary", "--download", str(cache)]
        found = json.loads(subprocess.run(fetch, check=True, capture_output=True, text=True).stdout)
        with tarfile.open(found["local_path"]) as sdist:
            sdist.extract(FILE, cache, filter="data")
        os.unlink(found["local_path"])
    record_testsuite_property("version", VERSION)
    os.environ["OPENAI_API_KEY"] = key  # it reads the key there
    spec = importlib.util.spec_from_file_location("endpoint_request_func", cache / FILE)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # for its dataclasses
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("backend", "route"),
    [("openai", "completions"), ("vllm", "completions"), ("openai-chat", "chat/completions"), ("openai-responses", "responses")],
)
def test_a_load(client, quick, model, backend, route):
    def one(i, session):
        requested = client.RequestFuncInput(
            prompt=f"{i} times the quick brown fox",
            api_url=f"{quick}/v1/{route}",
            prompt_len=7,
            output_len=24,
            model=model,
            ignore_eos=True,
            request_id=f"bench-{backend}-{i}",
        )
        return client.ASYNC_REQUEST_FUNCS[backend](requested, session)

    async def load():
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=16)) as session:
            return await asyncio.gather(*(one(i, session) for i in range(REQUESTS)))

    answers = asyncio.run(load())
    assert [answer.error for answer in answers if not answer.success] == []
    assert {answer.output_tokens for answer in answers} == {24}
    assert all(answer.generated_text and answer.ttft > 0 and answer.prompt_len > 0 for answer in answers)


def test_token_ids_as_a_prompt(client, quick, model):
    async def one():
        async with aiohttp.ClientSession() as session:
            requested = client.RequestFuncInput([5, 6, 7], f"{quick}/v1/completions", 3, 8, model, ignore_eos=True)
            return await client.async_request_openai_completions(requested, session)

    answer = asyncio.run(one())
    assert (answer.success, answer.prompt_len, answer.output_tokens) == (True, 3, 8)
