"""Requests with many texts to embed leave room in the engine for the prompts of others."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from server_here import wait_until


@pytest.mark.parametrize(("text", "at_once"), [("held", 6), ("held" * 10, 5), ("held" * 100, 1)])
def test_texts_to_embed_are_in_the_engine_as_many_as_fill_two_steps(http, engine, text, at_once):
    engine.describe(max_num_seqs=3, max_num_batched_tokens=100, max_text_len=1000)
    with ThreadPoolExecutor() as pool:
        embeds = pool.submit(http.post, "/v1/embeddings", json={"input": [text] * 40})
        wait_until(lambda: engine.started >= at_once)
        assert http.post("/v1/completions", json={"prompt": "hello", "max_tokens": 1}).status_code == 200
        assert engine.started == at_once + 1
        engine.released = True
        assert [one["index"] for one in embeds.result().json()["data"]] == list(range(40))
    assert engine.started == 41
