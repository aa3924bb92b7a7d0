"""A server with several models, over scripted engines: routing, loading on demand, and what one model's failure does to the others."""

from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from scripted_engine import ScriptedEngine
from server_here import serving_models, wait_until

from chairlift.server.lifecycle import Lifecycle, ModelState
from chairlift.server.load_policy import LoadPolicy
from chairlift.server.model import ServedModel


@pytest.fixture
def several(request):
    """Address, service and engines of a server with the models `chat` (also `gpt-4o`), `small` and `third`."""
    limits = getattr(request, "param", {})
    engines = {name: ScriptedEngine() for name in ("chat", "small", "third")}
    models = [
        ServedModel(name, engine, ("gpt-4o",) if name == "chat" else (), keep_alive=300.0, lifecycle=Lifecycle(ModelState.UNLOADED))
        for name, engine in engines.items()
    ]
    with serving_models(models, policy=LoadPolicy(**limits)) as (base, service), httpx.Client(base_url=base, timeout=30) as http:
        yield http, service, engines


def ask(http, model=None, prompt="a", **fields):
    return http.post("/v1/completions", json={"prompt": prompt, "max_tokens": 3, **({"model": model} if model else {}), **fields})


def statuses(http):
    return {one["id"]: one["status"] for one in http.get("/v1/models").json()["data"]}


def test_a_request_goes_to_the_model_that_it_names(several):
    http, _, engines = several
    assert [ask(http, name).json()["model"] for name in ("small", "gpt-4o", None)] == ["small", "chat", "chat"]
    assert {name: engine.started for name, engine in engines.items()} == {"chat": 2, "small": 1, "third": 0}
    messages = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    for path, body in (
        ("/v1/chat/completions", messages),
        ("/v1/messages", messages),
        ("/v1/responses", {"input": "hi", "max_output_tokens": 2}),
        ("/api/chat", {"messages": messages["messages"], "stream": False, "options": {"num_predict": 2}}),
        ("/api/generate", {"prompt": "hi", "stream": False, "options": {"num_predict": 2}}),
    ):
        assert http.post(path, json={**body, "model": "third"}).json()["model"] == "third", path
    assert engines["third"].started == 5
    assert http.post("/tokenize", json={"prompt": "ab", "model": "small"}).json()["tokens"] == [97, 98]
    assert http.get("/tokenizer_info?model=small").status_code == 200


def test_an_unknown_name_lists_what_there_is(several):
    http, _, _ = several
    for refused in (ask(http, "gpt-5"), http.get("/v1/models/gpt-5"), http.get("/tokenizer_info?model=gpt-5")):
        error = refused.json()["error"]
        assert (refused.status_code, error["code"]) == (404, "model_not_found")
        assert "this server has 'chat', 'gpt-4o', 'small', 'third'" in error["message"]
    assert "this server has" in http.post("/api/chat", json={"model": "gpt-5"}).json()["error"]


def test_models_are_listed_in_anthropics_pages(several):
    for query, names, more in (
        ("limit=1000", ["chat", "gpt-4o", "small", "third"], False),
        ("limit=2", ["chat", "gpt-4o"], True),
        ("limit=2&after_id=gpt-4o", ["small", "third"], False),
        ("limit=2&before_id=third", ["gpt-4o", "small"], True),
        ("before_id=chat", [], False),
        ("after_id=small&before_id=gpt-4o", [], False),
    ):
        page = several[0].get(f"/v1/models?{query}").json()
        assert [one["id"] for one in page["data"]] == names, query
        assert [page["first_id"], page["last_id"], page["has_more"]] == [*((names[0], names[-1]) if names else (None, None)), more]
    for query in ("limit=0", "limit=1001", "limit=x", "after_id=zz", "before_id="):
        refused = several[0].get(f"/v1/models?{query}")
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, query.partition("=")[0])


def test_models_are_listed_with_their_state(several):
    http, _, engines = several
    assert statuses(http) == {"chat": "not loaded", "gpt-4o": "not loaded", "small": "not loaded", "third": "not loaded"}
    assert http.get("/ready").status_code == http.get("/health").status_code == 200
    engines["third"].fails = engines["small"].gated = True
    assert ask(http, "chat").status_code == 200
    assert ask(http, "third").status_code == 503
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(ask, http, "small")
        wait_until(lambda: statuses(http)["small"] == "loading")
        assert statuses(http) == {"chat": "loaded", "gpt-4o": "loaded", "small": "loading", "third": "failed"}
        assert http.get("/v1/models/gpt-4o").json()["root"] == "chat"
        assert [one["name"] for one in http.get("/api/ps").json()["models"]] == ["chat"]
        assert [one["name"] for one in http.get("/api/tags").json()["models"]] == ["chat", "gpt-4o", "small", "third"]
        engines["small"].gated = False
        assert waiting.result().status_code == 200


def test_a_model_that_cannot_be_loaded_disturbs_no_other(several):
    http, _, engines = several
    engines["small"].fails = True
    refused = ask(http, "small")
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "model_load_failed")
    assert int(refused.headers["retry-after"]) >= 1
    assert ask(http, "small").status_code == 503
    assert engines["small"].starts == 1  # it is not tried again at once
    assert ask(http, "chat").status_code == 200
    assert http.get("/health").status_code == 200


def test_a_dead_engine_is_restarted_alone(several):
    http, service, engines = several
    assert ask(http, "small").status_code == 200
    assert ask(http, "chat", "once0").status_code == 200
    assert (engines["chat"].starts, engines["small"].starts) == (2, 1)
    assert [model.lifecycle.restarts for model in service.models] == [1, 0, 0]


@pytest.mark.parametrize("several", [{"max_loaded": 1}], indirect=True)
def test_a_model_in_use_is_not_unloaded(several):
    http, _, engines = several
    with ThreadPoolExecutor(3) as threads:
        running = threads.submit(ask, http, "chat", "held")
        wait_until(lambda: engines["chat"].started == 1)
        waiting = threads.submit(ask, http, "small")
        wait_until(lambda: http.get("/dashboard/data").json()["models"][1]["requests"] == 1)
        chat, small, _ = http.get("/dashboard/data?model=small").json()["models"]
        assert (chat["status"], chat["requests"], chat["unload_in_seconds"]) == ("loaded", 1, None)  # in use
        assert (small["status"], small["waiting"], small["aliases"]) == ("not loaded", 1, [])
        assert ask(http, "chat").status_code == 200  # a loaded model serves on
        assert engines["small"].starts == 0
        engines["chat"].released = True
        assert running.result().status_code == waiting.result().status_code == 200
    assert not engines["chat"].alive
    assert statuses(http)["chat"] == "not loaded"


@pytest.mark.parametrize("several", [{"max_loaded": 1}], indirect=True)
def test_an_idle_live_sequence_does_not_keep_its_model_loaded(several):
    http, service, _ = several
    url = f"/v1/sequences/{http.post('/v1/sequences', json={'prompt': 'ab', 'model': 'chat'}).json()['id']}"
    for use in (("generate", {"max_tokens": 2}), ("append", {"text": " c", "compute": True}), ("fork", {"n": 1})):
        assert ask(http, "small").status_code == 200
        assert statuses(http) == {"chat": "not loaded", "gpt-4o": "not loaded", "small": "loaded", "third": "not loaded"}
        # What needs no engine loads nothing.
        assert http.post(f"{url}/append", json={"text": " b"}).status_code == http.get(url).status_code == 200
        assert http.patch(url, json={"priority": 1}).status_code == 200
        assert statuses(http)["chat"] == "not loaded"
        tokens = http.get(url).json()["tokens"]
        answer = http.post(f"{url}/{use[0]}", json=use[1])
        assert answer.status_code == 200, answer.text
        assert statuses(http)["chat"] == "loaded"
        assert http.get(url).json()["tokens"] == tokens + 2 * (use[0] != "fork")
    assert http.post(f"{url}/generate", json={"max_tokens": 2}).json()["model"] == "chat"
    other = http.post(f"{url}/generate", json={"max_tokens": 2, "model": "small"})
    assert "belongs to the model chat" in other.json()["error"]["message"]
    assert http.delete(url).status_code == 200
    wait_until(lambda: service.loader.uses(service.find("chat")) == 0)


@pytest.mark.parametrize("several", [{"max_loaded": 1}], indirect=True)
def test_a_running_live_sequence_keeps_its_model(several):
    http, _, engines = several
    url = f"/v1/sequences/{http.post('/v1/sequences', json={'prompt': 'paused a', 'model': 'chat'}).json()['id']}"
    with ThreadPoolExecutor(2) as threads:
        running = threads.submit(http.post, f"{url}/generate", json={"max_tokens": 4})
        wait_until(lambda: engines["chat"].started == 2)
        waiting = threads.submit(ask, http, "small")
        wait_until(lambda: http.get("/dashboard/data").json()["models"][1]["requests"] == 1)
        assert engines["small"].starts == 0
        engines["chat"].released = True
        assert running.result().status_code == waiting.result().status_code == 200


def test_a_client_that_leaves_waits_no_longer(several):
    http, service, engines = several
    engines["small"].gated = True
    with pytest.raises(httpx.ReadTimeout):
        http.post("/v1/completions", json={"prompt": "a", "model": "small"}, timeout=0.2)
    wait_until(lambda: service.loader.uses(service.find("small")) == 0)
    engines["small"].gated = False
    assert ask(http, "small").status_code == 200
    wait_until(lambda: service.loader.uses(service.find("small")) == 0)


def test_ollamas_clients_load_and_unload(several):
    http, service, engines = several
    loaded = http.post("/api/generate", json={"model": "small:latest"}).json()
    assert (loaded["model"], loaded["done_reason"], engines["small"].starts) == ("small", "load", 1)
    assert http.post("/api/generate", json={"model": "small", "keep_alive": 0}).json()["done_reason"] == "unload"
    wait_until(lambda: not engines["small"].alive)
    body = {"model": "small", "prompt": "a", "stream": False, "keep_alive": 0}
    answer = http.post("/api/generate", json=body).json()
    assert 0 < answer["load_duration"] <= answer["total_duration"] - answer["prompt_eval_duration"] - answer["eval_duration"]
    wait_until(lambda: not engines["small"].alive)
    assert http.post("/api/generate", json={**body, "keep_alive": -1}).status_code == 200
    assert service.loader.seconds_until_unload(service.find("small")) == float("inf")
    refused = http.post("/api/generate", json={**body, "keep_alive": "soon"})
    assert (refused.status_code, "keep_alive must be" in refused.json()["error"]) == (400, True)


KEYED = "tom=key-of-tom-0123456789,own=key-of-own-0123456789"


def test_only_the_operator_shortens_a_shared_model_s_stay():
    model = ServedModel("chat", ScriptedEngine(), keep_alive=300.0, lifecycle=Lifecycle(ModelState.UNLOADED))
    operator = "key-of-operator-0123456789"
    with serving_models([model], api_key=KEYED, operator_key=operator) as (base, service), httpx.Client(base_url=base, timeout=30) as http:

        def generate(key, keep_alive, **fields):
            body = {"model": "chat", "stream": False, "keep_alive": keep_alive, **fields}
            response = http.post("/api/generate", json=body, headers={"authorization": f"Bearer {key}"})
            wait_until(lambda: service.loader.uses(model) == 0)
            return response.json()["done_reason"], round(service.loader.seconds_until_unload(model), -2)

        tenant = "key-of-tom-0123456789"
        assert generate(operator, 700) == ("load", 700)
        assert generate(tenant, 0) == ("load", 700)
        for keep_alive, seconds in ((0, 300), ("1s", 300), ("10m", 600), (-1, float("inf"))):
            assert generate(tenant, keep_alive, prompt="a")[1] == seconds
        assert generate(operator, 400, prompt="a")[1] == 400
        assert model.engine.alive
        assert generate(operator, 0)[0] == "unload"
        wait_until(lambda: not model.engine.alive)


def test_without_keys_a_named_tenant_may_unload(several):
    http, _, engines = several
    body = {"model": "small", "keep_alive": 0}
    assert ask(http, "small").status_code == 200
    assert http.post("/api/generate", json=body, headers={"x-tenant-id": "tom"}).json()["done_reason"] == "unload"
    wait_until(lambda: not engines["small"].alive)


def test_the_log_tells_once_what_is_on_disk(several, caplog):
    http, _, engines = several
    engines["small"].describe(disk_cache="kv has 3 blocks, 2 of 100 MB")
    with caplog.at_level("INFO", "chairlift"):
        for _ in range(3):
            ask(http, "small")
    assert [line for line in caplog.messages if "disk" in line] == ["prefix cache on disk: kv has 3 blocks, 2 of 100 MB"]


def test_metrics_have_the_name_of_the_model(several):
    http, _, _ = several
    ask(http, "small")
    ask(http, "chat")
    text = http.get("/metrics").text
    lines = [line for line in text.splitlines() if line.startswith("chairlift_request_success_total")]
    counts = {name: sum(float(line.split()[-1]) for line in lines if f'model_name="{name}"' in line) for name in ("chat", "small", "third")}
    assert counts == {"chat": 1, "small": 1, "third": 0}
    assert text.count("# HELP chairlift_request_success_total") == 1


def test_a_request_is_explained_by_its_model(several):
    http, _, _ = several
    ask(http, "chat")
    answer = ask(http, "small").json()
    assert http.get(f"/v1/requests/{answer['id']}/explain").json()["id"] == answer["id"]
