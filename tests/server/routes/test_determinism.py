"""Every answer says whether it depends on what else the engine had to do, and in what format activations are multiplied."""

import pytest
from events import events, objects

ASKED = {
    "/v1/completions": {"prompt": "a b", "max_tokens": 2},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a b"}], "max_tokens": 2},
    "/v1/responses": {"input": "a b", "max_output_tokens": 2},
    "/v1/messages": {"messages": [{"role": "user", "content": "a b"}], "max_tokens": 2},
}


@pytest.fixture(params=["batch-invariant", "best-effort"])
def said(request, engine):
    engine.describe(determinism=request.param, arithmetic="int16")
    return request.param, "int16"


def computed(head):
    return head["determinism"], head["arithmetic"]


@pytest.mark.parametrize("route", ASKED)
def test_a_whole_answer_says_what_the_engine_does(http, said, route):
    assert computed(http.post(route, json=ASKED[route]).json()) == said


@pytest.mark.parametrize("route", ["/v1/completions", "/v1/chat/completions"])
def test_so_does_every_chunk_of_openai_s_streams(http, said, route):
    *chunks, _ = events(http.post(route, json={**ASKED[route], "stream": True}))
    assert len(chunks) >= 2
    assert set(map(computed, chunks)) == {said}


@pytest.mark.parametrize(
    ("route", "types", "inside"),
    [("/v1/responses", {"response.created", "response.incomplete"}, "response"), ("/v1/messages", {"message_start"}, "message")],
)
def test_so_do_the_events_that_carry_an_answer_s_head(http, said, route, types, inside):
    reported = objects(http.post(route, json={**ASKED[route], "stream": True}).text)
    heads = {event["type"]: event[inside] for event in reported if event["type"] in types}
    assert heads.keys() == types
    assert set(map(computed, heads.values())) == {said}


def test_so_does_the_list_of_models(http, said):
    assert [model["arithmetic"] for model in http.get("/v1/models").json()["data"]] == [said[1]]
