import json
import logging
import os
import re

import httpx
import pytest
from scripted_engine import ScriptedEngine
from server_here import serving

from chairlift.cli import main
from chairlift.process_log import LogHandler
from chairlift.server.observability.logs import JsonFormatter, redact_query
from chairlift.server.observability.request_context import CURRENT_REQUEST, RequestContext


@pytest.fixture
def lines():
    """What the server logs, as parsed JSON."""
    found = []

    class Keep(logging.Handler):
        def emit(self, record):
            found.append(json.loads(JsonFormatter().format(record)))

    handler, root = Keep(), logging.getLogger()
    before = root.level
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    yield found
    root.removeHandler(handler)
    root.setLevel(before)


@pytest.mark.parametrize("length", [100, 50_000])
def test_a_log_that_nobody_reads_stops_nothing(monkeypatch, length):
    monkeypatch.setattr("chairlift.process_log._PATIENCE_MS", 0)
    reader, writer = os.pipe()
    with open(reader, "rb", 0) as pipe, open(writer, "w") as stream:
        handler = LogHandler(stream)
        for _ in range(2000):
            handler.emit(logging.makeLogRecord({"msg": "x" * length}))
        assert b"lost" not in pipe.read(1 << 20)
        handler.emit(logging.makeLogRecord({"msg": "last"}))
        lost, last = pipe.read(1 << 20).splitlines()[-2:]
    assert re.fullmatch(rb"the log was not read, and [0-9]+ lines of it are lost", lost)
    assert last == b"last"


def test_a_log_that_is_closed_while_nobody_reads_it_stops_nothing(monkeypatch):
    monkeypatch.setattr("chairlift.process_log._PATIENCE_MS", 0)
    monkeypatch.setattr(logging, "raiseExceptions", False)
    reader, writer = os.pipe()
    with open(reader, "rb", 0) as pipe, open(writer, "w") as stream:
        handler = LogHandler(stream)
        for _ in range(100):
            handler.emit(logging.makeLogRecord({"msg": "x" * 1000}))
        assert b"lost" not in pipe.read(1 << 20)
    handler.emit(logging.makeLogRecord({"msg": "last"}))


def test_every_line_about_a_request_has_its_id_and_none_has_its_prompt(lines):
    with serving(ScriptedEngine()) as (base, _), httpx.Client(base_url=base) as http:
        http.post("/v1/completions", json={"prompt": "a secret bug", "max_tokens": 5}, headers={"x-request-id": "first"})
        answer = http.post("/v1/completions", json={"prompt": "a secret", "max_tokens": 2})
        http.get("/v1/nowhere", headers={"x-request-id": "third"})
    access = [line for line in lines if line["logger"] == "uvicorn.access"]
    assert [line["request_id"] for line in access] == ["first", answer.headers["x-request-id"], "third"]
    assert [(line["method"], line["path"], line["status"]) for line in access][1:] == [
        ("POST", "/v1/completions", 200),
        ("GET", "/v1/nowhere", 404),
    ]
    failed = [line for line in lines if "exception" in line]
    assert [line["request_id"] for line in failed] == ["first"]
    assert "RuntimeError" in failed[0]["exception"]
    assert "secret bug" not in json.dumps(lines)
    assert "a secret" not in json.dumps(lines)


def test_a_refused_request_has_its_id_in_the_log_too(lines):
    with serving(ScriptedEngine(), "sk-1") as (base, _):
        httpx.get(base + "/v1/models", headers={"x-request-id": "stranger"})
    assert [(line["request_id"], line["status"]) for line in lines if line["logger"] == "uvicorn.access"] == [("stranger", 401)]


QUERIES = {
    "/v1/models": "/v1/models",
    "/v1/models?api_key=sk-1": "/v1/models?api_key=[redacted]",
    "/v1/models?key=sk-1&step=3&token=a=b": "/v1/models?key=[redacted]&step=[redacted]&token=[redacted]",
    "/v1/models?sk-1": "/v1/models?[redacted]",
    "/v1/models?sk-1=": "/v1/models?[redacted]",
    "/v1/models?a=1?api_key=sk-1": "/v1/models?a=[redacted]",
    "/v1/models?": "/v1/models?",
}


@pytest.mark.parametrize(("path", "logged"), QUERIES.items())
def test_the_access_log_hides_what_stands_in_a_query(path, logged):
    record = logging.LogRecord(
        "uvicorn.access", logging.INFO, "x.py", 1, '%s - "%s %s HTTP/%s" %d', ("127.0.0.1:1", "GET", path, "1.1", 200), None
    )
    assert redact_query(record)
    assert record.getMessage() == f'127.0.0.1:1 - "GET {logged} HTTP/1.1" 200'
    assert json.loads(JsonFormatter().format(record))["path"] == logged


def test_the_access_log_cuts_long_paths_and_methods():
    arguments = "127.0.0.1:1", "G" * 9000, "/v1/" + "a" * 9000, "1.1", 404
    record = logging.LogRecord("uvicorn.access", logging.INFO, "x.py", 1, '%s - "%s %s HTTP/%s" %d', arguments, None)
    assert redact_query(record)
    assert len(record.getMessage()) < 2200


def test_a_line_is_one_line_of_plain_facts():
    record = logging.LogRecord("chairlift", logging.WARNING, "x.py", 1, "two\nlines of %s", ("ä",), None)
    text = JsonFormatter().format(record)
    line = json.loads(text)
    assert "\n" not in text
    assert (line["level"], line["logger"], line["message"]) == ("warning", "chairlift", "two\nlines of ä")
    assert line["time"].endswith("+00:00")
    assert line.keys() == {"time", "level", "logger", "message"}
    token = CURRENT_REQUEST.set(RequestContext("mine"))
    assert json.loads(JsonFormatter().format(record))["request_id"] == "mine"
    CURRENT_REQUEST.reset(token)


def test_the_flag_makes_the_whole_log_json(monkeypatch, capsys):
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [])
    monkeypatch.setenv("CHAIRLIFT_LOG_FORMAT", "json")
    assert main.main(["serve", "--port", "0", "--api-key-file", "/nothing"]) == 2
    logging.getLogger("somebody").error("hello")
    assert json.loads(capsys.readouterr().err.splitlines()[-1])["message"] == "hello"
