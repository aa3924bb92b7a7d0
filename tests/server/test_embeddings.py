"""Embeddings over HTTP: the openai client and Ollama's routes, through the server's and the engine's processes, to a tiny encoder."""

import asyncio
import base64
import os
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import openai
import pytest
import tiny_encoders
from openai.types import CreateEmbeddingResponse
from prometheus_client.parser import text_string_to_metric_families
from pydantic import TypeAdapter
from server_here import wait_until

LONG = "abcdefghij " * 20


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of `chairlift serve` with a tiny encoder, a tiny cross-encoder and a short queue."""
    directory: Path = tmp_path_factory.mktemp("bert")
    tiny_encoders.write("Bert", directory / "bert")
    tiny_encoders.write("BertForSequenceClassification", directory / "ranker")
    models = [f"{name}={directory / name}" for name in ("bert", "ranker")]
    flags = ["--port", "0", "--max-num-seqs", "4", "--max-num-queued-reqs", "300"]
    command = [sys.executable, "-m", "chairlift.cli.main", "serve", *models, *flags]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}) as process:
        log = []
        for line in process.stderr or ():
            log.append(line)
            if "listening on " in line:
                break
        try:
            assert "listening on " in log[-1], "".join(log)
            threading.Thread(target=lambda: log.extend(process.stderr or ()), daemon=True).start()
            yield log[-1].split("listening on ")[1].strip().removesuffix("/v1")
            process.terminate()
            assert process.wait(60) == 0, "".join(log)
        finally:
            process.kill()


@pytest.fixture(scope="module")
def http(base: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=base, timeout=60) as client:
        yield client


def embed(http: httpx.Client, **fields: object) -> httpx.Response:
    return http.post("/v1/embeddings", json={"model": "bert", **fields})


def test_all_forms_of_input_and_output_agree(base: str, http: httpx.Client) -> None:
    with openai.OpenAI(base_url=f"{base}/v1", api_key="any", max_retries=0) as client:
        decoded = client.embeddings.create(model="bert", input=["abc", "d e f"])  # asks for base64
    answer = embed(http, input=["abc", "d e f"], encoding_format="float", user="me").json()
    TypeAdapter(CreateEmbeddingResponse).validate_python(answer, strict=True)
    vectors = [one["embedding"] for one in answer["data"]]
    assert [one.embedding for one in decoded.data] == vectors
    assert [one.index for one in decoded.data] == [0, 1]
    assert answer["usage"] == {"prompt_tokens": 10, "total_tokens": 10}
    assert answer["model"] == "bert"
    ids = http.post("/tokenize", json={"prompt": "abc"}).json()["tokens"]
    assert embed(http, input=ids).json()["data"][0]["embedding"] == vectors[0]
    assert [one["embedding"] for one in embed(http, input=[ids, ids]).json()["data"]] == [vectors[0]] * 2
    packed = base64.b64decode(embed(http, input="abc", encoding_format="base64").json()["data"][0]["embedding"])
    assert list(struct.unpack("<48f", packed)) == vectors[0]
    short = embed(http, input="abc", dimensions=7).json()["data"][0]["embedding"]
    assert np.allclose(short, np.array(vectors[0][:7]) / np.linalg.norm(vectors[0][:7]))


def test_ollama_s_routes_shorten_long_texts(http: httpx.Client) -> None:
    expected = [one["embedding"] for one in embed(http, input=["abc", "d"]).json()["data"]]
    answer = http.post("/api/embed", json={"model": "bert:latest", "input": ["abc", "d"], "keep_alive": "5m"}).json()
    assert answer["embeddings"] == expected
    assert answer["prompt_eval_count"] == 8
    assert answer["model"] == "bert"
    assert http.post("/api/embeddings", json={"model": "bert", "prompt": "abc"}).json() == {"embedding": expected[0]}
    for nothing in ("", []):
        assert http.post("/api/embed", json={"model": "bert:latest", "input": nothing}).json() == {"model": "bert", "embeddings": []}
    assert http.post("/api/embeddings", json={"model": "bert", "prompt": ""}).json() == {"embedding": []}
    ids = http.post("/tokenize", json={"prompt": LONG}).json()["tokens"]
    kept = ids[: tiny_encoders.LONGEST - 1] + ids[-1:]
    shortened = http.post("/api/embed", json={"model": "bert", "input": LONG}).json()["embeddings"]
    assert shortened == [embed(http, input=kept).json()["data"][0]["embedding"]]
    refused = http.post("/api/embed", json={"model": "bert", "input": LONG, "truncate": False})
    assert refused.status_code == 400
    assert "input length exceeds the context length of 40 tokens" in refused.json()["error"]
    assert http.post("/api/show", json={"model": "bert"}).json()["capabilities"] == ["embedding"]


@pytest.mark.parametrize(
    ("fields", "status", "message"),
    [
        ({"input": []}, 400, "input must be"),
        ({"input": ["a", ""]}, 200, ""),  # [CLS] and [SEP] are a text
        ({"input": [1, "a"]}, 400, "input must be"),
        ({"input": [[4], []]}, 400, "input must be"),
        ({"input": [64]}, 400, '"param": "input"'),
        ({"input": [-1]}, 400, "not a token id"),
        ({"input": ["a", LONG]}, 400, "Input 1 has 202"),
        ({"input": ["a"] * 2049}, 400, "2049 inputs"),
        ({"input": "a", "dimensions": 0}, 400, "dimensions must be"),
        ({"input": "a", "dimensions": 49}, 400, "dimensions must be"),
        ({"input": "a", "encoding_format": "int8"}, 400, "encoding_format"),
        ({"input": "a", "model": "gpt"}, 404, "does not exist"),
        ({}, 400, "input is missing"),
        ({"input": ["a"] * 1000}, 400, "at most 600 may wait: send fewer"),
    ],
)
def test_bad_requests_get_clear_errors(http: httpx.Client, fields: dict[str, object], status: int, message: str) -> None:
    answer = embed(http, **fields)
    assert (answer.status_code, message in answer.text) == (status, True), answer.text


def test_rerank_orders_documents_by_their_cosine_with_the_query(http: httpx.Client) -> None:
    texts = ["fedcba", "abc abc", "abd", "abc"]
    query, *documents = (np.array(one["embedding"]) for one in embed(http, input=["abc", *texts]).json()["data"])
    cosines = [float(query @ document) for document in documents]
    best = sorted(range(4), key=lambda index: -cosines[index])
    assert best[0] == 3  # the document that equals the query
    answer = http.post("/v1/rerank", json={"model": "bert", "query": "abc", "documents": texts}).json()
    assert [one["index"] for one in answer["results"]] == best
    assert np.allclose([one["relevance_score"] for one in answer["results"]], [cosines[index] for index in best], atol=1e-5)
    assert [one["document"]["text"] for one in answer["results"]] == [texts[index] for index in best]
    assert answer["usage"]["total_tokens"] > 0
    asked = {"query": "abc", "documents": [{"text": "abd"}, "abc"], "top_n": 1, "return_documents": False}
    for path in ("/rerank", "/v2/rerank"):
        [result] = http.post(path, json=asked).json()["results"]
        assert (result["index"], sorted(result)) == (1, ["index", "relevance_score"])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"documents": ["a"]}, "query is missing"),
        ({"query": "a"}, "documents is missing"),
        ({"query": "", "documents": ["a"]}, "query"),
        ({"query": "a", "documents": []}, "1 to 2047 texts"),
        ({"query": "a", "documents": "b"}, "1 to 2047 texts"),
        ({"query": "a", "documents": ["b"] * 2048}, "1 to 2047 texts"),
        ({"query": "a", "documents": ["b", 5]}, "document 1 must be"),
        ({"query": "a", "documents": [{"title": "b"}]}, "document 0 must be"),
        ({"query": "a", "documents": ["b", LONG]}, "Document 1 has 202"),
        ({"query": LONG, "documents": ["b"]}, "The query has 202"),
        ({"query": "a", "documents": ["b"], "top_n": 0}, "top_n"),
    ],
)
def test_bad_rankings_get_clear_errors(http: httpx.Client, fields: dict[str, object], message: str) -> None:
    answer = http.post("/v1/rerank", json={"model": "bert", **fields})
    assert (answer.status_code, message in answer.text) == (400, True), answer.text


def test_rerank_with_a_cross_encoder(http: httpx.Client, tmp_path: Path) -> None:
    oracle = tiny_encoders.write("BertForSequenceClassification", tmp_path)  # the same weights
    texts = ["fedcba", "abc abc", "x", "abd"]
    answer = http.post("/v1/rerank", json={"model": "ranker", "query": "abc", "documents": texts}).json()
    expected = [tiny_encoders.score(oracle, "abc", text) for text in texts]
    best = sorted(range(4), key=lambda index: -expected[index])
    assert [one["index"] for one in answer["results"]] == best
    assert np.allclose([one["relevance_score"] for one in answer["results"]], [expected[index] for index in best], atol=1e-5)
    assert answer["usage"]["total_tokens"] == sum(len(tiny_encoders.tokenizer().encode("abc", text).ids) for text in texts)
    long = http.post("/v1/rerank", json={"model": "ranker", "query": "abc", "documents": ["b", LONG * 3]})
    assert (long.status_code, "The query with document 1 has" in long.text) == (400, True), long.text
    refused = http.post("/v1/embeddings", json={"model": "ranker", "input": "abc"})
    assert (refused.status_code, "use /v1/rerank" in refused.text) == (400, True), refused.text
    refused = http.post("/v1/completions", json={"model": "ranker", "prompt": "abc"})
    assert (refused.status_code, "use /v1/rerank" in refused.text) == (400, True), refused.text
    assert [model["tasks"] for model in http.get("/v1/models").json()["data"]] == [["embed"], ["score"]]


def test_the_server_says_that_it_only_embeds(http: httpx.Client) -> None:
    model, _ = http.get("/v1/models").json()["data"]
    assert model["tasks"] == ["embed"]
    assert model["max_model_len"] == 40
    message = {"role": "user", "content": "a"}
    for path, body in [
        ("/v1/chat/completions", {"messages": [message]}),
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/responses", {"input": "a"}),
        ("/v1/messages", {"messages": [message], "max_tokens": 5}),
        ("/api/chat", {"messages": [message]}),
    ]:
        answer = http.post(path, json={"model": "bert", **body})
        assert answer.status_code == 400, path
        assert "generates no text: use /v1/embeddings" in answer.text, path


def test_many_clients_are_counted_and_one_that_leaves_frees_its_places(base: str, http: httpx.Client) -> None:
    def metric(name: str) -> float:
        families = text_string_to_metric_families(http.get("/metrics").text)
        return sum(sample.value for family in families for sample in family.samples if sample.name == f"chairlift_{name}")

    before = metric("request_success_total")

    async def test() -> list[httpx.Response]:
        async with httpx.AsyncClient(base_url=base, timeout=60) as client:
            leaving = asyncio.create_task(client.post("/v1/embeddings", json={"input": ["abc"] * 200}))
            await asyncio.sleep(0.01)
            leaving.cancel()
            bodies = [{"input": ["abc", "d" * size], "request_id": f"r{size}"} for size in range(1, 9)]
            return await asyncio.gather(*(client.post("/v1/embeddings", json=body) for body in bodies))

    answers = asyncio.run(test())
    assert [answer.status_code for answer in answers] == [200] * 8
    assert len({str(answer.json()["data"][0]["embedding"]) for answer in answers}) == 1
    explained = http.get("/v1/requests/r3/explain").json()
    assert len(explained["sequences"]) == 2
    wait_until(lambda: metric("request_success_total") - before >= 16)  # the text may be a moment old
    wait_until(lambda: metric("num_requests_waiting") + metric("num_requests_running") == 0)
    assert metric("prompt_tokens_total") > 0
    assert metric("generation_tokens_total") == metric("request_generation_tokens_sum") == 0
