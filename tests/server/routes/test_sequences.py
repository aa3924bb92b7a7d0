"""Live sequences over HTTP: what the routes answer, who may use a sequence, and what is refused."""

import json
import threading
import time
from types import SimpleNamespace

import httpx
import pytest
from events import events
from scripted_engine import ScriptedEngine
from server_here import MODEL, serving, wait_until

from chairlift.cli.main import main
from chairlift.engine.frames import DropSequence, ForkSequence, SetPriority
from chairlift.server.observability.usage_log import UsageLog

KEYS = {"api_key": "alice=ka,bob=kb"}
URL = "/v1/sequences"


@pytest.fixture(scope="module")
def lasting_keys():
    engine = ScriptedEngine()
    with serving(engine, **KEYS) as (base, service):
        yield engine, base, service


@pytest.fixture
def engine(lasting_keys):
    """A scripted engine that serves the whole file, without the sequences of earlier tests."""
    engine = lasting_keys[0]
    engine.released = False
    yield engine
    engine.released = True


@pytest.fixture
def alice(lasting_keys, engine):
    yield from client(lasting_keys[1], "ka")


@pytest.fixture
def bob(lasting_keys, engine):
    yield from client(lasting_keys[1], "kb")


def client(base, key):
    with httpx.Client(base_url=base, timeout=30, headers={"authorization": f"Bearer {key}"}) as http:
        yield http
        for sequence in http.get(URL).json()["data"]:
            http.delete(f"{URL}/{sequence['id']}")


def opened(http, prompt="a b", **fields):
    response = http.post(URL, json={"prompt": prompt, **fields})
    assert response.status_code == 200, response.text
    return response.json()


def error(response):
    return response.status_code, response.json()["error"]["code"]


def test_a_sequence_is_opened_forked_appended_to_generated_rewound_and_dropped(alice, engine):
    root = opened(alice)
    assert root.keys() == {"id", "object", "created", "expires_at", "tokens", "generated_tokens", "score", "priority"}
    assert (root["object"], root["tokens"], root["generated_tokens"], root["score"]) == ("sequence", 3, 0, 0.0)
    assert abs(root["expires_at"] - time.time() - 600) < 30
    assert engine.seen[-1].max_tokens == 1  # it was computed
    forks = alice.post(f"{URL}/{root['id']}/fork", json={"n": 2}).json()["data"]
    assert isinstance(engine.frames[-1], ForkSequence)
    assert len(engine.frames[-1].forks) == len({root["id"], *(fork["id"] for fork in forks)}) - 1 == 2
    url = f"{URL}/{forks[0]['id']}"
    assert alice.post(f"{url}/append", json={"text": " c"}).json()["tokens"] == 5
    assert alice.post(f"{url}/append", json={"tokens": [32]}).json()["tokens"] == 6
    before = engine.started
    assert alice.post(f"{url}/append", json={"text": "d", "compute": True}).json()["tokens"] == 7
    assert engine.started == before + 1
    answer = alice.post(f"{url}/generate", json={"max_tokens": 4, "seed": 1}).json()
    assert answer["choices"][0] | {"stop_reason": None} == {
        **{"index": 0, "text": "a b c d ", "logprobs": None, "finish_reason": "length"},
        "stop_reason": None,
    }
    assert answer["usage"]["prompt_tokens"] == 7
    assert (answer["object"], answer["sequence"]["tokens"], answer["sequence"]["generated_tokens"]) == ("text_completion", 11, 4)
    assert answer["sequence"]["score"] == 4 * -0.75
    assert alice.get(url).json() == {**answer["sequence"], "text": "a b c da b c d "}
    rewound = alice.post(f"{url}/rewind", json={"count": 5}).json()
    assert (rewound["tokens"], rewound["generated_tokens"], rewound["score"]) == (6, 0, 0.0)
    assert [one["id"] for one in alice.get(URL).json()["data"]] == [root["id"], *(fork["id"] for fork in forks)]
    assert alice.delete(url).json() == {"id": forks[0]["id"], "object": "sequence", "deleted": True}
    assert isinstance(engine.frames[-1], DropSequence)
    assert error(alice.get(url)) == error(alice.delete(url)) == (404, "sequence_not_found")
    assert error(alice.post(f"{url}/fork")) == (404, "sequence_not_found")


def test_a_stream_is_that_of_completions(alice):
    url = f"{URL}/{opened(alice)['id']}"
    response = alice.post(
        f"{url}/generate", json={"max_tokens": 2, "stream": True, "logprobs": 0, "stream_options": {"include_usage": True}}
    )
    *chunks, done = events(response)
    assert done is None
    assert [chunk["choices"][0]["text"] for chunk in chunks[:-1]] == ["a ", "b "]
    assert chunks[0]["choices"][0]["logprobs"]["token_logprobs"] == [-0.75]
    assert chunks[-1]["usage"]["total_tokens"] == 5
    assert alice.get(url).json()["tokens"] == 5


def test_messages_are_rendered_and_the_fields_of_the_opening_hold_for_all_generations(alice, engine):
    sequence = opened(alice, None, messages=[{"role": "user", "content": "hi"}], priority=3, cache_salt="s", lease_seconds=60)
    assert (sequence["tokens"], sequence["priority"]) == (2, 3)
    assert abs(sequence["expires_at"] - time.time() - 60) < 30
    url = f"{URL}/{sequence['id']}"
    (fork,) = alice.post(f"{url}/fork").json()["data"]
    assert alice.patch(url, json={"priority": 2}).json()["priority"] == 2
    # It counts towards no limit of the tenant, so its body is small, and unread for an unknown sequence.
    large = {"priority": 2, "metadata": "x" * (16 << 10)}
    assert error(alice.patch(url, json=large)) == (413, "request_too_large")
    assert error(alice.patch(f"{URL}/seq-0", json=large)) == (404, "sequence_not_found")
    for one, priority in ((url, 2), (f"{URL}/{fork['id']}", 3)):
        assert alice.post(f"{one}/generate", json={"max_tokens": 1, "deadline_ms": 9e5}).status_code == 200
        used = engine.scheduled[-1]
        assert (used.tenant, used.priority, used.cache_salt, used.deadline_ms) == ("alice", priority, "s", 9e5)


def test_another_tenants_sequence_is_as_unknown_as_any(alice, bob):
    url = f"{URL}/{opened(alice)['id']}"
    unknown = bob.get(f"{URL}/seq-{'0' * 32}")
    assert error(unknown) == (404, "sequence_not_found")
    for response in (
        bob.get(url),
        bob.delete(url),
        bob.patch(url, json={"priority": 1}),
        *(bob.post(f"{url}/{verb}", json={"text": "a", "count": 0}) for verb in ("fork", "append", "rewind", "generate")),
    ):
        assert (response.status_code, response.json()) == (404, unknown.json())
    assert bob.get(URL).json()["data"] == []
    assert alice.get(url).status_code == 200


def test_while_it_is_generated_a_sequence_can_be_forked_and_dropped_and_nothing_else(alice, engine):
    url = f"{URL}/{opened(alice, 'paused x')['id']}"
    with alice.stream("POST", f"{url}/generate", json={"max_tokens": 9, "stream": True}) as response:
        lines = response.iter_lines()
        next(lines)
        for verb, fields in (("generate", {}), ("append", {"text": "a"}), ("rewind", {"count": 1})):
            assert error(alice.post(f"{url}/{verb}", json=fields)) == (409, "sequence_busy")
        assert alice.get(url).json()["expires_at"] is None
        assert alice.patch(url, json={"priority": 7}).json()["priority"] == 7
        assert engine.frames[-1] == SetPriority(engine.tags[-1], 7)
        (fork,) = alice.post(f"{url}/fork", json={}).json()["data"]
        assert fork["tokens"] == 8
        assert alice.delete(url).status_code == 200
        engine.released = True
        assert '"code":"sequence_dropped"' in list(lines)[-2]
    assert alice.get(f"{URL}/{fork['id']}").json()["tokens"] == 8


def test_a_client_that_leaves_ends_its_generation_and_keeps_its_sequence(alice, engine):
    url = f"{URL}/{opened(alice, 'paused x')['id']}"
    before = engine.left_early
    with alice.stream("POST", f"{url}/generate", json={"max_tokens": 9, "stream": True}) as response:
        next(response.iter_lines())
    wait_until(lambda: engine.left_early == before + 1)
    engine.released = True
    wait_until(lambda: alice.get(url).json()["expires_at"] is not None)
    assert alice.get(url).json()["tokens"] == 8
    assert alice.post(f"{url}/generate", json={"max_tokens": 3}).json()["sequence"]["tokens"] == 11


def test_an_opening_that_fails_holds_nothing(alice):
    assert error(alice.post(URL, json={"prompt": "full xx"})) == (503, "queue_full")
    assert alice.get(URL).json()["data"] == []
    url = f"{URL}/{opened(alice)['id']}"
    alice.post(f"{url}/append", json={"text": " boom"})
    assert error(alice.post(f"{url}/generate", json={"max_tokens": 5})) == (500, "request_failed")
    assert alice.get(url).json()["tokens"] == 8


def test_invented_tenants_leave_room_for_others(monkeypatch):
    monkeypatch.setattr("chairlift.engine.held_sequences.MAX_HELD", 256)
    monkeypatch.setattr("chairlift.server.sequences.MAX_INVENTED", 192)

    def fill(http, tenants):
        """Lets invented tenants hold all that the server allows; returns how many they hold."""
        held = 0
        for number in range(tenants):
            headers = {"x-tenant-id": f"t{number}"}
            answer = http.post(URL, json={"prompt": "a"}, headers=headers)
            if answer.status_code != 200:
                assert error(answer) == (429, "too_many_sequences")
                break
            held += 1
            for count in (16, 4, 4, 1, 1):
                forked = http.post(f"{URL}/{answer.json()['id']}/fork", json={"n": count}, headers=headers)
                held += len(forked.json().get("data", []))
        return held

    with serving(ScriptedEngine()) as (base, service), httpx.Client(base_url=base, timeout=30) as http:
        victim = {"x-tenant-id": "victim"}
        assert 96 < fill(http, 16) < 192
        assert http.post(URL, json={"prompt": "a"}, headers=victim).status_code == 200
        assert fill(http, 100) < 96
        assert http.post(URL, json={"prompt": "a"}).status_code == 200
        service.sequences.drop_all()
        assert fill(http, 16) > 96
    with serving(ScriptedEngine(), api_key="alice=ka,kb") as (base, _), httpx.Client(base_url=base, timeout=30) as http:
        http.headers["authorization"] = "Bearer kb"
        assert 96 < fill(http, 100) <= 192
        opened(http)
        http.headers["authorization"] = "Bearer ka"
        url = f"{URL}/{opened(http)['id']}"
        assert http.post(f"{url}/fork", json={"n": 20}).status_code == 200


def test_a_tenant_leaves_as_much_as_it_holds(alice, bob, engine, monkeypatch):
    monkeypatch.setattr("chairlift.engine.held_sequences.MAX_HELD", 16)
    url = f"{URL}/{opened(alice)['id']}"
    assert alice.post(f"{url}/fork", json={"n": 7}).status_code == 200
    assert error(alice.post(f"{url}/fork", json={"n": 1})) == (429, "too_many_sequences")
    assert bob.post(f"{URL}/{opened(bob)['id']}/fork", json={"n": 3}).status_code == 200


def test_what_a_sequence_holds_is_billed(monkeypatch, tmp_path, capsys):
    now = [1000.0]
    monkeypatch.setattr("chairlift.engine.held_sequences.time", SimpleNamespace(monotonic=lambda: now[0]))
    with serving(ScriptedEngine()) as (base, service), httpx.Client(base_url=base, timeout=30) as http:
        service.usage_log = UsageLog(str(tmp_path))
        url = f"{URL}/{opened(http, 'abc', priority=2)['id']}"
        now[0] += 10
        http.post(f"{url}/append", json={"text": "de"})
        now[0] += 100
        [fork] = http.post(f"{url}/fork", json={"n": 1}).json()["data"]
        http.post(f"{url}/rewind", json={"count": 4})
        now[0] += 200
        monkeypatch.setattr("time.time", lambda: 5e9)  # somebody sets the clock
        assert http.delete(url).status_code == 200
        now[0] += 7
        short = opened(http, "abc")
        now[0] += 0.3
        for one in (fork, short):
            assert http.delete(f"{URL}/{one['id']}").status_code == 200
    records = [json.loads(line) for file in tmp_path.iterdir() for line in file.read_text().splitlines()]
    assert short["id"] not in {record["id"] for record in records}
    held = {record["id"]: record["held_token_seconds"] for record in records if "held_token_seconds" in record}
    assert max(record["seconds"] for record in records if record["id"] in held) < 3600
    assert held == {url.rpartition("/")[2]: 3 * 10 + 5 * 100 + 1 * 200, fork["id"]: 5 * 207.3}
    assert {(one["finish"][0], one["priority"], one["model"], one["tier"]) for one in records if one["id"] in held} == {
        ("dropped", 2, MODEL, "default")
    }
    assert main(["usage", str(tmp_path), "--by", "tenant", "--json"]) == 0
    [sums] = json.loads(capsys.readouterr().out)
    assert (sums["held_token_seconds"], sums["requests"]) == (730 + 1036.5, len(records) - 2)


def test_a_tenant_can_hold_a_limited_number(alice, bob, engine, monkeypatch):
    monkeypatch.setattr("chairlift.engine.held_sequences.MAX_PER_TENANT", 10)
    url = f"{URL}/{opened(alice)['id']}"
    frames = len(engine.frames)
    assert alice.post(f"{url}/fork", json={"n": 100_000}).json()["error"]["param"] == "n"
    assert error(alice.post(f"{url}/fork", json={"n": 1024})) == (429, "too_many_sequences")
    assert len(engine.frames) == frames
    statuses = [alice.post(f"{url}/fork", json={"n": 3}).status_code for _ in range(4)]
    assert statuses == [200, 200, 200, 429]
    refused = alice.post(URL, json={"prompt": "a"})
    assert error(refused) == (429, "too_many_sequences")
    assert 0 < int(refused.headers["retry-after"]) <= 600
    assert len(alice.get(URL).json()["data"]) == 10
    assert opened(bob)["tokens"] == 3


def test_many_forks_at_once_stay_within_the_limit(alice, monkeypatch):
    monkeypatch.setattr("chairlift.engine.held_sequences.MAX_PER_TENANT", 50)
    url = f"{URL}/{opened(alice)['id']}"
    statuses = []

    def fork():
        with httpx.Client(base_url=alice.base_url, headers=alice.headers, timeout=30) as http:
            statuses.extend(http.post(f"{url}/fork", json={"n": 5}).status_code for _ in range(4))

    threads = [threading.Thread(target=fork) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(statuses) == [200] * 9 + [429] * 7
    assert len(alice.get(URL).json()["data"]) == 46


@pytest.mark.parametrize(
    ("verb", "body", "param"),
    [
        ("fork", {"n": 0}, "n"),
        ("fork", {"n": "3"}, "n"),
        ("append", {}, "text"),
        ("append", {"text": "a", "tokens": [1]}, "text"),
        ("append", {"text": 5}, "text"),
        ("append", {"text": "x" * 2045}, "text"),
        ("append", {"tokens": ["a"]}, "tokens[0]"),
        ("append", {"tokens": [65536]}, "tokens"),
        ("append", {"tokens": [2**70]}, "tokens"),
        ("rewind", {}, "count"),
        ("rewind", {"count": -1}, "count"),
        ("rewind", {"count": 3}, "count"),
        ("generate", {"prompt": "a"}, "prompt"),
        ("generate", {"n": 2}, "n"),
        ("generate", {"echo": True}, "echo"),
        ("generate", {"priority": 1}, "priority"),
        ("generate", {"max_tokens": 2046}, "prompt"),
        ("generate", {"temperature": "hot"}, "temperature"),
        ("", {}, "prompt"),
        ("", {"prompt": ""}, "prompt"),
        ("", {"prompt": 5}, "prompt"),
        ("", {"prompt": ["a"]}, "prompt"),
        ("", {"prompt": "a", "messages": []}, "prompt"),
        ("", {"prompt": "a" * 2048}, "prompt"),
        ("", {"prompt": "a", "lease_seconds": 0}, "lease_seconds"),
        ("", {"prompt": "a", "lease_seconds": 1e6}, "lease_seconds"),
    ],
)
def test_wrong_bodies_are_refused_and_change_nothing(alice, verb, body, param):
    sequence = opened(alice)
    response = alice.post(f"{URL}/{sequence['id']}/{verb}" if verb else URL, json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param), response.text
    now = alice.get(URL).json()["data"]
    assert [one | {"expires_at": 0} for one in now] == [sequence | {"expires_at": 0}]


def test_a_lease_ends(alice):
    sequence = opened(alice, lease_seconds=0.05)
    time.sleep(0.06)
    assert error(alice.get(f"{URL}/{sequence['id']}")) == (404, "sequence_not_found")
    assert alice.get(URL).json()["data"] == []
