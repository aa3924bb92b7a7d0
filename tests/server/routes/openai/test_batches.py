"""Files and batches, with OpenAI's own client."""

import asyncio
import contextlib
import json
import time

import httpx
import openai
import pytest
from raw_connection import connected
from scripted_engine import ScriptedEngine
from server_here import MODEL, serving, wait_until

from chairlift.errors import QueueFull
from chairlift.scheduling import BACKGROUND
from chairlift.server.batch import input as batch_input
from chairlift.server.batch import runner
from chairlift.server.batch.call import Reply
from chairlift.server.errors import unavailable
from chairlift.server.http import body
from chairlift.server.http.responses import to_json_bytes
from chairlift.server.storage import batches, files

KEYS = "alice=a,bob=b"


@pytest.fixture
def engine():
    return ScriptedEngine()


@pytest.fixture
def server(engine, tmp_path):
    with serving(engine, KEYS, data_dir=str(tmp_path / "data"), max_data_size=100_000) as running:
        yield running


def client_of(base, key):
    return openai.OpenAI(base_url=f"{base}/v1", api_key=key, max_retries=0, timeout=30, _strict_response_validation=True)


@pytest.fixture
def alice(server):
    with client_of(server[0], "a") as client:
        yield client


@pytest.fixture
def bob(server):
    with client_of(server[0], "b") as client:
        yield client


def line(name, prompt="one two three", url="/v1/completions", method="POST", **fields):
    body = {"prompt": prompt, "max_tokens": 3, **fields}
    return json.dumps({"custom_id": name, "method": method, "url": url, "body": body})


def upload(client, *lines, name="in.jsonl"):
    return client.files.create(file=(name, "\n".join(lines).encode()), purpose="batch")


def start(client, *lines, endpoint="/v1/completions", **fields):
    return client.batches.create(input_file_id=upload(client, *lines).id, endpoint=endpoint, completion_window="24h", **fields)


def ended(client, batch):
    wait_until(lambda: client.batches.retrieve(batch.id).status in ("completed", "failed", "expired", "cancelled"))
    return client.batches.retrieve(batch.id)


def lines_of(client, id):
    return [json.loads(text) for text in client.files.content(id).text.splitlines()]


def test_a_batch_is_answered_as_online_requests_are(alice, engine):
    batch = start(alice, line("a"), "", line("b", max_tokens=0), line("c", prompt="boom boom"), line("d"), metadata={"night": "1"})
    assert (batch.object, batch.endpoint, batch.metadata) == ("batch", "/v1/completions", {"night": "1"})
    batch = ended(alice, batch)
    assert (batch.status, batch.errors) == ("completed", None)
    assert (batch.request_counts.total, batch.request_counts.completed, batch.request_counts.failed) == (4, 2, 2)
    assert batch.created_at <= batch.in_progress_at <= batch.finalizing_at <= batch.completed_at < batch.expires_at
    good, bad = lines_of(alice, batch.output_file_id), lines_of(alice, batch.error_file_id)
    assert [answer["custom_id"] for answer in good] == ["a", "d"]
    assert [(answer["custom_id"], answer["response"]["status_code"], answer["error"]) for answer in bad] == [
        ("b", 400, None),
        ("c", 500, None),
    ]
    assert good[0]["response"]["body"]["choices"][0]["text"] == "one two three "
    assert good[0]["response"]["status_code"] == 200
    assert len({answer["id"] for answer in good + bad}) == 4
    assert bad[0]["response"]["body"]["error"]["param"] == "max_tokens"
    # They ran in the background, for their tenant.
    assert {(one.priority, one.tenant) for one in engine.scheduled} == {(BACKGROUND, "alice")}
    output = alice.files.retrieve(batch.output_file_id)
    assert (output.purpose, output.bytes) == ("batch_output", len(alice.files.content(output.id).content))


def test_chats_and_responses_are_other_endpoints(alice):
    chat = json.dumps(
        {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": [{"role": "user", "content": "hi"}]}}
    )
    batch = ended(alice, start(alice, chat, endpoint="/v1/chat/completions"))
    assert lines_of(alice, batch.output_file_id)[0]["response"]["body"]["object"] == "chat.completion"
    response = json.dumps({"custom_id": "1", "method": "POST", "url": "/v1/responses", "body": {"input": "hi", "max_output_tokens": 16}})
    batch = ended(alice, start(alice, response, endpoint="/v1/responses"))
    assert lines_of(alice, batch.output_file_id)[0]["response"]["body"]["object"] == "response"


def test_a_request_cannot_leave_the_background_or_stream(alice, engine):
    batch = ended(alice, start(alice, line("a", priority=-5), line("b", service_tier="priority"), line("c", stream=True)))
    assert {one.priority for one in engine.scheduled} == {BACKGROUND}
    assert batch.request_counts.completed == 2
    [refused] = lines_of(alice, batch.error_file_id)
    assert "streamed" in refused["response"]["body"]["error"]["message"]


def test_batches_take_no_place_in_the_queue_and_a_bounded_number_runs(alice, engine, server):
    batch = start(alice, *(line(str(number), prompt="held") for number in range(30)))
    wait_until(lambda: engine.started == 8)
    service = server[1]
    assert (service.admission.open, service.admission.waiting, service.open) == (0, 0, 0)
    assert alice.completions.create(model=MODEL, prompt="online", max_tokens=1).choices[0].text == "online "
    assert engine.started == 9
    engine.released = True
    assert ended(alice, batch).request_counts.completed == 30


def test_tenants_take_turns(alice, bob, engine, server):
    lifecycle = server[1].default.lifecycle
    lifecycle.loading()
    held = [line(str(number), prompt="held") for number in range(8)]
    batches = [start(alice, *held) for _ in range(3)]
    last = start(bob, *held)
    wait_until(lambda: bob.batches.retrieve(last.id).status == "in_progress")
    lifecycle.ready()
    start(alice, "{")  # wakes the runner
    wait_until(lambda: engine.started == 8)
    assert sorted(one.tenant for one in engine.scheduled) == ["alice"] * 4 + ["bob"] * 4
    engine.released = True
    for client, batch in [*((alice, batch) for batch in batches), (bob, last)]:
        ended(client, batch)


def test_a_tenant_runs_as_many_as_its_limit_allows(engine, tmp_path):
    keys = tmp_path / "keys.toml"
    keys.write_text('[alice]\nkey = "a"\nmax_requests = 2\n[bob]\nkey = "b"\n')
    held = [line(str(number), prompt="held") for number in range(8)]
    with (
        serving(engine, api_key_file=str(keys), data_dir=str(tmp_path / "data")) as (base, _),
        client_of(base, "a") as alice,
        client_of(base, "b") as bob,
    ):
        batches = [(alice, start(alice, *held)), (alice, start(alice, *held)), (bob, start(bob, *held))]
        wait_until(lambda: engine.started == 8)
        assert sorted(one.tenant for one in engine.scheduled) == ["alice"] * 2 + ["bob"] * 6
        assert alice.completions.create(model=MODEL, prompt="online", max_tokens=1).choices[0].text == "online "
        engine.released = True
        assert [ended(client, batch).request_counts.completed for client, batch in batches] == [8, 8, 8]


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("{", "invalid_json_line"),
        ("[1]", "invalid_json_line"),
        ('{"custom_id": "\\ud800"}', "invalid_json_line"),
        ("\ufeff" + line("x"), "invalid_json_line"),
        (line("a"), "duplicate_custom_id"),
        (line(""), "invalid_custom_id"),
        (line("x" * 513), "invalid_custom_id"),
        (line("x\n"), "invalid_custom_id"),
        (line("x", method="GET"), "invalid_method"),
        (line("x", url="/v1/embeddings"), "invalid_url"),
        (line("x", url="/v1/chat/completions"), "invalid_url"),
        (line("x", url="/v1/../state"), "invalid_url"),
        ('{"custom_id": "x", "method": "POST", "url": "/v1/completions", "body": []}', "invalid_body"),
        (line("x", prompt="y" * (2 << 20)), "line_too_long"),
    ],
)
def test_a_faulty_line_fails_the_batch_and_is_named(tmp_path, text, code):
    path = tmp_path / "input"
    path.write_text(line("a") + "\n" + text + "\n" + line("last") + "\n")
    requests, errors = batch_input.read_input(path, "/v1/completions", 2 << 20)
    assert [(error["code"], error["line"]) for error in errors] == [(code, 2)]
    assert len(errors[0]["message"]) < 300
    assert [request.line for request in requests] == [1, 3], "the lines after a long one are found"
    assert batch_input.read_request(path, requests[1])[1]["max_tokens"] == 3


def test_a_failed_batch_says_why_and_runs_nothing(alice, engine):
    batch = ended(alice, start(alice, line("a"), "{", line("b")))
    assert (batch.status, batch.errors.data[0].line, batch.errors.data[0].code) == ("failed", 2, "invalid_json_line")
    assert (batch.output_file_id, batch.failed_at is None, engine.started) == (None, False, 0)
    assert ended(alice, start(alice, "")).errors.data[0].code == "empty_file"


def test_an_input_has_a_largest_number_of_requests(tmp_path, monkeypatch):
    monkeypatch.setattr(batch_input, "MAX_REQUESTS", 3)
    path = tmp_path / "input"
    path.write_text("\n".join(line(str(number)) for number in range(4)))
    assert batch_input.read_input(path, None, 1000)[1][0]["code"] == "too_many_requests"


def test_a_cancelled_batch_keeps_its_answers(alice, engine):
    batch = start(alice, line("a"), *(line(str(number), prompt="held") for number in range(20)))
    wait_until(lambda: alice.batches.retrieve(batch.id).request_counts.completed == 1)
    wait_until(lambda: engine.started == 9)  # that one and the eight that run at once
    assert alice.batches.cancel(batch.id).status in ("cancelling", "cancelled")
    batch = ended(alice, batch)
    assert (batch.status, batch.request_counts.completed, batch.request_counts.failed) == ("cancelled", 1, 20)
    assert [answer["custom_id"] for answer in lines_of(alice, batch.output_file_id)] == ["a"]
    errors = lines_of(alice, batch.error_file_id)
    assert [answer["custom_id"] for answer in errors] == [str(number) for number in range(20)]
    assert {(answer["response"], answer["error"]["code"]) for answer in errors} == {(None, "batch_cancelled")}
    wait_until(lambda: engine.left_early == 8)
    with pytest.raises(openai.ConflictError, match="is cancelled"):
        alice.batches.cancel(batch.id)


def test_an_expired_batch_keeps_its_answers(alice, monkeypatch):
    batch = start(alice, line("a"), line("b", prompt="held"))
    wait_until(lambda: alice.batches.retrieve(batch.id).request_counts.completed == 1)
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() + batches.WINDOW_SECONDS)
    start(alice, line("wakes"))
    batch = ended(alice, batch)
    assert (batch.status, batch.request_counts.failed) == ("expired", 1)
    assert lines_of(alice, batch.error_file_id)[0]["error"]["code"] == "batch_expired"


def test_a_request_that_the_server_cannot_serve_is_tried_three_times(alice, monkeypatch):
    tried = []

    async def refuse(app, admission, registry, tenant, url, body, engine_started):
        tried.append(body)
        return Reply(503, "r", to_json_bytes(unavailable("the engine died", "engine_dead", 1).envelope), 1)

    monkeypatch.setattr(runner, "call", refuse)
    batch = ended(alice, start(alice, line("a")))
    assert (batch.request_counts.failed, len(tried)) == (1, 3)
    assert lines_of(alice, batch.error_file_id)[0]["response"]["status_code"] == 503


def test_a_request_waits_as_long_as_the_server_is_overloaded(alice, engine, monkeypatch):
    waits, sleep, run = [], asyncio.sleep, engine.run

    async def sleep_at_once(seconds):
        if seconds < 1:
            await sleep(seconds)
        else:
            waits.append(seconds)

    async def run_at_last(*args, **kwargs):
        if len(waits) < 5:
            raise QueueFull("4 requests are waiting, as many as may", retry_after=2.3)
        async for output in run(*args, **kwargs):
            yield output

    monkeypatch.setattr(asyncio, "sleep", sleep_at_once)
    monkeypatch.setattr(engine, "run", run_at_last)
    batch = ended(alice, start(alice, line("a")))
    assert (batch.request_counts.completed, batch.request_counts.failed) == (1, 0)
    assert waits == [3] * 5


def test_a_request_that_names_no_model_of_the_server_is_answered_after_a_503(alice, monkeypatch):
    seen, call = [], runner.call

    async def refuse_once(app, admission, registry, tenant, url, body, engine_started):
        if body in seen:
            return await call(app, admission, registry, tenant, url, body, engine_started)
        seen.append(body)
        return Reply(503, "r", to_json_bytes(unavailable("the model is still loading", "not_ready", 1).envelope))

    monkeypatch.setattr(runner, "call", refuse_once)
    batch = ended(alice, start(alice, line("a", model="nobody"), line("b", model=["x"]), line("c")))
    assert [answer["response"]["status_code"] for answer in lines_of(alice, batch.error_file_id)] == [404, 400]
    assert [answer["custom_id"] for answer in lines_of(alice, batch.output_file_id)] == ["c"]


def test_a_batch_and_its_lines_are_charged_to_their_tenant_until_an_engine_starts_them(server, alice, monkeypatch):
    pacing, turns = server[1].pacing, []
    turn = pacing.turn

    @contextlib.asynccontextmanager
    async def recorded(group, work, *, background=False):
        calls = []
        async with turn(group, work, background=background) as engine_started:
            yield lambda: calls.append(engine_started())
        turns.extend([(group, work.seconds > 0, len(calls))] * background)

    monkeypatch.setattr(pacing, "turn", recorded)
    batch = ended(alice, start(alice, line("a"), line("b", max_tokens=0)))
    assert (batch.request_counts.completed, batch.request_counts.failed) == (1, 1)
    assert sorted(turns) == [("alice", True, 0), ("alice", True, 0), ("alice", True, 1)]


@pytest.mark.parametrize(("looks", "status"), [(0, "validating"), (3, "in_progress")])
def test_a_batch_waits_for_its_tenants_share_and_holds_up_no_other(server, alice, bob, monkeypatch, looks, status):
    """The tenant owes nothing at the first `looks`."""
    left = looks

    def must_wait(group):
        nonlocal left
        left -= group == "alice"
        return group == "alice" and left < 0

    monkeypatch.setattr(server[1].pacing, "must_wait", must_wait)
    monkeypatch.setattr(runner, "_RETRY_SECONDS", 0.1)
    batch = start(alice, *(line(str(number)) for number in range(20)))
    assert ended(bob, start(bob, line("b"))).status == "completed"
    assert alice.batches.retrieve(batch.id).status == status
    left = 1000
    assert ended(alice, batch).request_counts.completed == 20


def test_a_batch_goes_on_as_soon_as_what_its_request_was_expected_to_take_is_given_back(server, alice, engine, monkeypatch):
    pacing, expected = server[1].pacing, []

    @contextlib.asynccontextmanager
    async def turn(group, work, *, background=False):
        expected.append(group)
        try:
            yield expected.clear
        finally:
            expected.clear()

    monkeypatch.setattr(pacing, "turn", turn)
    monkeypatch.setattr(pacing, "must_wait", lambda group: group in expected)
    monkeypatch.setattr(runner, "_RETRY_SECONDS", 3600.0)
    batch = start(alice, *(line(str(number), prompt="paused") for number in range(3)))
    wait_until(lambda: engine.started == 3)
    engine.released = True
    assert ended(alice, batch).request_counts.completed == 3


def test_a_refused_request_of_a_batch_is_not_remembered_as_one_that_begins(server, alice):
    ended(alice, start(alice, *(line(str(number), max_tokens=0) for number in range(5))))
    assert not server[1].registry._preparing  # noqa: SLF001


def test_a_line_has_no_more_values_than_a_body(alice, monkeypatch):
    monkeypatch.setattr(body, "MAX_VALUES", 100)
    batch = ended(alice, start(alice, line("a", prompt=[[]] * 100)))
    assert (batch.status, batch.errors.data[0].line) == ("failed", 1)
    assert "objects, arrays and fields" in batch.errors.data[0].message


@pytest.mark.parametrize("status", ["validating", "finishing"])
def test_a_batch_that_cannot_go_on_holds_up_no_other(server, alice, bob, monkeypatch, caplog, status):
    """Its input is gone, or its output cannot be written."""
    storage = server[1].storage
    monkeypatch.setattr(runner, "_RETRY_SECONDS", 0.1)
    if status == "validating":
        file = upload(alice, line("a"))
        storage.files.path(file.id).unlink()
        assert (
            ended(alice, alice.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")).status
            == "failed"
        )

        def read_input(path, *rest):
            if b'"custom_id": "stuck"' in path.read_bytes():
                raise OSError("input/output error")
            return batch_input.read_input(path, *rest)

        monkeypatch.setattr(runner, "read_input", read_input)
    else:
        write = storage.batches.finish

        async def finish(batch, *rest):
            if batch.tenant == "alice":
                raise OSError("no space left on device")
            await write(batch, *rest)

        monkeypatch.setattr(storage.batches, "finish", finish)
    stuck = start(alice, line("stuck"))
    assert ended(bob, start(bob, line("b"))).request_counts.completed == 1
    assert alice.batches.retrieve(stuck.id).status == ("validating" if status == "validating" else "in_progress")
    monkeypatch.undo()
    assert ended(alice, stuck).status == "completed"
    reason = "input/output error" if status == "validating" else "no space left on device"
    assert f"{stuck.id} waits for 0.1 s: {reason}" in caplog.text
    assert "Traceback" not in caplog.text


def test_an_upload_that_cannot_be_stored_says_what_to_do(server, alice, monkeypatch):
    async def begin(tenant):
        upload = await kept(tenant)

        async def finish(*rest):
            raise OSError("no space left on device")

        monkeypatch.setattr(upload, "finish", finish)
        return upload

    files = server[1].storage.files
    kept = files.begin
    monkeypatch.setattr(files, "begin", begin)
    with pytest.raises(
        openai.APIStatusError, match=r"could not be stored: delete files of /v1/files, or free space where --data-dir is"
    ) as refused:
        upload(alice.with_options(max_retries=0), line("a"))
    assert (refused.value.status_code, refused.value.code) == (507, "insufficient_storage")


def test_files_are_listed_and_deleted(alice):
    ids = [upload(alice, line(str(number)), name=f"{number}.jsonl").id for number in range(5)]
    assert [file.id for file in alice.files.list()] == ids[::-1]
    assert [file.id for file in alice.files.list(limit=2)] == ids[::-1], "the client asks for further pages"
    assert [file.filename for file in alice.files.list(order="asc").data] == [f"{number}.jsonl" for number in range(5)]
    assert alice.files.list(purpose="batch_output").data == []
    assert alice.files.delete(ids[0]).deleted
    for call in (alice.files.retrieve, alice.files.content, alice.files.delete):
        with pytest.raises(openai.NotFoundError, match="no such file"):
            call(ids[0])
    batches = [start(alice, line("a")).id for _ in range(3)]
    assert [batch.id for batch in alice.batches.list(limit=2)] == batches[::-1]


def test_a_file_that_a_batch_reads_stays(alice, engine):
    batch = start(alice, line("a", prompt="held"))
    with pytest.raises(openai.ConflictError, match=batch.id):
        alice.files.delete(batch.input_file_id)
    engine.released = True
    ended(alice, batch)
    assert alice.files.delete(batch.input_file_id).deleted


def test_files_expire(alice, monkeypatch):
    expires = {"anchor": "created_at", "seconds": 3600}
    file = alice.files.create(file=("x", b"x"), purpose="batch", expires_after=expires)
    assert file.expires_at == file.created_at + 3600
    batch = ended(alice, start(alice, line("a"), output_expires_after=expires))
    output = alice.files.retrieve(batch.output_file_id)
    assert output.expires_at == output.created_at + 3600
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() + 3600)
    with pytest.raises(openai.NotFoundError):
        alice.files.retrieve(file.id)
    with pytest.raises(openai.BadRequestError, match="expires_after"):
        alice.files.create(file=("x", b"x"), purpose="batch", expires_after={"anchor": "created_at", "seconds": 1})


def test_tenants_see_only_their_own(alice, bob):
    batch = ended(alice, start(alice, line("a")))
    assert (bob.files.list().data, bob.batches.list().data) == ([], [])
    for id in (batch.input_file_id, batch.output_file_id):
        for call in (bob.files.retrieve, bob.files.content, bob.files.delete):
            with pytest.raises(openai.NotFoundError):
                call(id)
        with pytest.raises(openai.NotFoundError):
            bob.files.list(after=id)
        with pytest.raises(openai.NotFoundError):
            bob.batches.create(input_file_id=id, endpoint="/v1/completions", completion_window="24h")
    for call in (bob.batches.retrieve, bob.batches.cancel):
        with pytest.raises(openai.NotFoundError):
            call(batch.id)
    with pytest.raises(openai.NotFoundError):
        bob.batches.list(after=batch.id)
    unknown = alice.batches.retrieve
    with pytest.raises(openai.NotFoundError, match="no such batch"):
        unknown("batch_0")
    assert len(alice.files.list().data) == 2


@pytest.mark.parametrize("name", ["../../etc/passwd", "/etc/passwd", "..", "a\x00b", "%2e%2e%2f", "x\r\ny: z", "C:\\x", "é\U0001f600"])
def test_names_are_never_paths(server, tmp_path, name):
    with httpx.Client(base_url=server[0], headers={"authorization": "Bearer a"}) as http:
        reply = http.post("/v1/files", data={"purpose": "batch"}, files={"file": (name, b"x")})
        assert reply.status_code == 200
        assert http.get(f"/v1/files/{reply.json()['id']}/content").content == b"x"
    assert sorted(path.name.split("-")[0] for path in (tmp_path / "data").rglob("*")) == [
        *("chairlift.sqlite3", "chairlift.sqlite3", "file", "files", "reserve"),
    ]


def test_a_file_that_is_deleted_as_its_content_is_asked_for_is_not_found(server, tmp_path):
    with httpx.Client(base_url=server[0], headers={"authorization": "Bearer a"}) as http:
        id = http.post("/v1/files", data={"purpose": "batch"}, files={"file": ("a", b"x")}).json()["id"]
        (tmp_path / "data/files" / id).unlink()
        reply = http.get(f"/v1/files/{id}/content")
    assert (reply.status_code, reply.json()["error"]["code"]) == (404, "file_not_found")


@pytest.mark.parametrize("id", ["..%2f..%2fchairlift.sqlite3", "..", "%2e%2e", "file-%00", "file-' OR 1=1 --", "\U0001f600", "x" * 5000])
def test_ids_are_never_paths(server, id):
    with httpx.Client(base_url=server[0], headers={"authorization": "Bearer a"}) as http:
        for path in (f"/v1/files/{id}", f"/v1/files/{id}/content", f"/v1/batches/{id}"):
            reply = http.get(path)
            assert reply.status_code in (404, 405), path
            assert len(reply.text) < 400


def stored(tmp_path):
    return [path.name for path in (tmp_path / "data" / "files").iterdir()]


def test_half_an_upload_leaves_nothing(server, alice, tmp_path):
    head = b"POST /v1/files HTTP/1.1\r\nhost: 127.0.0.1\r\nauthorization: Bearer a\r\ncontent-type: multipart/form-data; boundary=B\r\n"
    part = b'--B\r\ncontent-disposition: form-data; name="file"; filename="x"\r\n\r\n' + b"x" * 50_000
    for _ in range(3):
        with connected(server[0]) as connection:
            connection.sendall(head + b"content-length: 99000\r\n\r\n" + part)
            wait_until(lambda: server[1].open == 1)
        wait_until(lambda: server[1].open == 0)
    assert stored(tmp_path) == []
    # A form that ends without its last boundary is not a file either.
    with connected(server[0]) as connection:
        connection.sendall(head + b"content-length: %d\r\n\r\n" % len(part) + part)
        assert "its last boundary" in connection.makefile().read()
    assert alice.files.list().data == []
    # The space is free again: 90 kB of the 100 kB that may be used.
    assert upload(alice, "x" * 90_000).bytes == 90_000
    with pytest.raises(openai.BadRequestError, match="max-data-size") as refusal:
        upload(alice, "x" * 20_000)
    assert refusal.value.code == "file_quota_exceeded"
    assert len(stored(tmp_path)) == 1


def test_a_batch_whose_answers_do_not_fit_says_so(alice, tmp_path):
    batch = ended(alice, start(alice, *(line(str(number), prompt="x" * 1000, n=8, echo=True) for number in range(15))))
    assert (batch.status, batch.request_counts.total) == ("completed", 15)
    assert 0 < batch.request_counts.completed < 15
    errors = lines_of(alice, batch.error_file_id)
    assert len(errors) == batch.request_counts.failed
    assert {one["error"]["code"] for one in errors} == {"file_quota_exceeded"}
    assert sum(path.stat().st_size for path in (tmp_path / "data" / "files").iterdir()) <= 100_000


def test_uploads_leave_space_for_the_answers_of_others(alice, bob, engine):
    batch = start(alice, *(line(str(number), prompt="held", n=8) for number in range(10)))
    wait_until(lambda: engine.started == 8)
    other = upload(bob, line("b"))

    def fill(size):
        while True:
            upload(bob, "x" * size)

    for size in (10_000, 1000, 100):
        with pytest.raises(openai.BadRequestError, match="for uploads"):
            fill(size)
    refused = ended(bob, bob.batches.create(input_file_id=other.id, endpoint="/v1/completions", completion_window="24h"))
    assert refused.errors.data[0].code == "file_quota_exceeded"
    engine.released = True
    counts = ended(alice, batch).request_counts
    assert (counts.completed, counts.failed) == (10, 0)


def test_a_tenant_has_a_largest_number_of_files_and_batches(alice, bob, engine, monkeypatch):
    monkeypatch.setattr(files, "MAX_FILES", 3)
    monkeypatch.setattr(batches, "MAX_OPEN_BATCHES", 2)
    ids = [upload(alice, line("a", prompt="held")).id for _ in range(3)]
    with pytest.raises(openai.BadRequestError, match="3 files"):
        upload(alice, line("a"))
    other = upload(bob, line("a"))
    monkeypatch.setattr(files, "MAX_ALL_FILES", 4)
    with pytest.raises(openai.BadRequestError, match="4 files, the limit"):
        upload(bob, line("a"))
    bob.files.delete(other.id)
    upload(bob, line("a"))
    create = alice.batches.create
    with pytest.raises(openai.BadRequestError, match="3 files"):  # the outputs would be more
        create(input_file_id=ids[0], endpoint="/v1/completions", completion_window="24h")
    monkeypatch.setattr(files, "MAX_FILES", 4)
    monkeypatch.setattr(files, "MAX_ALL_FILES", 5)
    for id in ids[:2]:
        create(input_file_id=id, endpoint="/v1/completions", completion_window="24h")
    with pytest.raises(openai.BadRequestError, match="2 batches"):
        create(input_file_id=ids[2], endpoint="/v1/completions", completion_window="24h")
    engine.released = True


def test_a_file_has_a_largest_size(alice, monkeypatch, tmp_path):
    monkeypatch.setattr(files, "MAX_FILE_BYTES", 1000)
    with pytest.raises(openai.APIStatusError, match="larger than 1000") as refusal:
        upload(alice, "x" * 1001)
    assert (refusal.value.status_code, stored(tmp_path)) == (413, [])


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ({"data": {"purpose": "batch"}, "files": {"other": ("x", b"x")}}, "named 'file'"),
        ({"data": {"purpose": "batch"}, "files": [("file", ("x", b"x")), ("file", ("y", b"y"))]}, "unexpected file"),
        ({"data": {"purpose": "batch", "file": "x"}, "files": {"z": ("", b"")}}, "file"),
        ({"data": {}, "files": {"file": ("x", b"x")}}, "purpose must be 'batch'"),
        ({"data": {"purpose": "vision"}, "files": {"file": ("x", b"x")}}, "purpose must be 'batch'"),
        ({"data": {"purpose": "b" * 5000}, "files": {"file": ("x", b"x")}}, "longer than 4096"),
        ({"data": {f"f{number}": "x" for number in range(20)}, "files": {"file": ("x", b"x")}}, "more than 16 parts"),
        ({"data": {"purpose": "batch"}, "files": {"file": ("x" * 300, b"x")}}, "name is longer"),
        ({"json": {"purpose": "batch"}}, "multipart/form-data"),
        ({"content": b"--B\r\nx", "headers": {"content-type": "multipart/form-data; boundary=B"}}, "malformed"),
        ({"content": b"", "headers": {"content-type": "multipart/form-data; boundary=B"}}, "last boundary"),
        ({"content": b"", "headers": {"content-type": f"multipart/form-data; boundary={'B' * 300}"}}, "Boundary length 300"),
    ],
)
def test_faulty_forms_are_refused(server, tmp_path, form, message):
    with httpx.Client(base_url=server[0]) as http:
        headers = {"authorization": "Bearer a", **form.pop("headers", {})}
        reply = http.post("/v1/files", headers=headers, **form)
    assert reply.status_code in (400, 415)
    assert message in reply.json()["error"]["message"]
    assert stored(tmp_path) == []


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"endpoint": "/v1/embeddings"}, "no embeddings"),
        ({"endpoint": "/v1/models"}, "endpoint must be one of"),
        ({"completion_window": "1h"}, "must be '24h'"),
        ({"metadata": {str(number): "" for number in range(17)}}, "metadata"),
        ({"metadata": {"a": 1}}, "metadata"),
        ({"output_expires_after": {"anchor": "x", "seconds": 3600}}, "output_expires_after"),
        ({"input_file_id": None}, "input_file_id"),
    ],
)
def test_faulty_batches_are_refused(server, alice, fields, message):
    body = {"input_file_id": upload(alice, line("a")).id, "endpoint": "/v1/completions", "completion_window": "24h"}
    reply = httpx.post(f"{server[0]}/v1/batches", json=body | fields, headers={"authorization": "Bearer a"})
    assert reply.status_code == 400
    assert message in reply.json()["error"]["message"]


def test_a_restart_goes_on_where_it_was(tmp_path):
    settings = {"data_dir": str(tmp_path / "data")}
    engine = ScriptedEngine()
    with serving(engine, **settings) as (base, _), client_of(base, "any") as client:
        batch = start(client, *(line(f"{number}") for number in range(300)), *(line(f"h{number}", prompt="held") for number in range(20)))
        kept = upload(client, "x").id
        wait_until(lambda: client.batches.retrieve(batch.id).request_counts.completed == 300)
    (tmp_path / "data" / "files" / "file-1.part").write_bytes(b"half of an upload")
    again = ScriptedEngine()
    with serving(again, **settings) as (base, _), client_of(base, "any") as client:
        assert client.files.content(kept).content == b"x"
        again.released = True
        assert ended(client, batch).request_counts.completed == 320
        assert again.started == 20, "answered requests are not run again"
        names = [answer["custom_id"] for answer in lines_of(client, client.batches.retrieve(batch.id).output_file_id)]
        assert names == [*(f"{number}" for number in range(300)), *(f"h{number}" for number in range(20))]
    assert "file-1.part" not in stored(tmp_path)


def test_without_a_data_directory_the_routes_name_the_flag():
    with serving(ScriptedEngine()) as (base, _), client_of(base, "any") as client:
        for call in (client.files.list, client.batches.list, lambda: upload(client, "x"), lambda: client.batches.retrieve("x")):
            with pytest.raises(openai.BadRequestError, match="--data-dir"):
                call()
