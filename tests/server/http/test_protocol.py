import contextlib
import json
import os
import socket
import ssl
import time
from types import SimpleNamespace

import httpx
import pytest
from raw_connection import connected, rest
from scripted_engine import ScriptedEngine
from server_here import serving, wait_until

from chairlift.errors import InvalidSetting
from chairlift.server.http import connections
from chairlift.server.http import protocol as protocol
from chairlift.server.http.sockets import PortTaken, check_certificate, open_path


def requested(sock, request):
    """The answer to a request, which is a JSON object."""
    sock.sendall(request)
    got = b""
    while not got.endswith(b"}"):
        got += sock.recv(65536)
    return got


GET = b"GET /live HTTP/1.1\r\nhost: localhost\r\n"


@pytest.fixture
def hurried(monkeypatch):
    monkeypatch.setattr(protocol, "HEADERS_SECONDS", 0.3)


def test_who_says_nothing_is_sent_away(hurried, base):
    with connected(base) as sock:
        assert rest(sock) == b""


@pytest.mark.parametrize("before", [b"", GET + b"\r\n"], ids=["first", "second"])
def test_headers_that_never_end(hurried, base, before):
    with connected(base) as sock:
        if before:
            assert requested(sock, before).startswith(b"HTTP/1.1 200")
        sock.sendall(GET + b"x-a:")
        with contextlib.suppress(OSError):
            for _ in range(100):  # a byte now and then is no excuse
                sock.settimeout(0.05)
                with contextlib.suppress(TimeoutError):
                    if (got := rest(sock)).startswith(b"HTTP"):
                        break
                sock.sendall(b"a")
    assert got.startswith(b"HTTP/1.1 408 Request Timeout\r\n")
    assert json.loads(got.partition(b"\r\n\r\n")[2])["error"]["code"] == "request_timeout"


def test_408_reaches_a_client_that_is_still_sending(hurried, base):
    with connected(base) as sock:
        sock.sendall(GET + b"x-a:")
        assert sock.recv(1, socket.MSG_PEEK)  # it has come
        for _ in range(3):  # to a connection that has ended, the second fails: the system answers the first with a reset
            sock.sendall(b"a")
            time.sleep(0.01)
        got = rest(sock, may_reset=False)
    assert got.startswith(b"HTTP/1.1 408 ")


def test_a_connection_between_two_requests_may_rest(hurried, base):
    with connected(base) as sock, connected(base) as silent:
        assert requested(sock, GET + b"\r\n").startswith(b"HTTP/1.1 200")
        assert rest(silent) == b""  # the time is over for one that was opened later
        assert requested(sock, GET + b"\r\n").startswith(b"HTTP/1.1 200")


def test_a_body_that_nobody_reads_has_an_end(hurried, base):
    with connected(base) as sock:
        assert requested(sock, b"POST /nothing HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1000\r\n\r\n").startswith(b"HTTP/1.1 404")
        sock.sendall(b"a")
        assert rest(sock) == b""


def test_what_is_no_http_is_told_in_the_usual_form(base):
    with connected(base) as sock:
        sock.sendall(b"\x16\x03\x01\x02\x00\x01\r\n\r\n")
        got = rest(sock)
    assert got.startswith(b"HTTP/1.1 400 ")
    assert json.loads(got.partition(b"\r\n\r\n")[2])["error"]["code"] == "invalid_http"


def test_headers_have_a_number(base, http):
    assert http.get("/live", headers={f"x-{i}": "a" for i in range(100)}).status_code == 200
    answer = http.get("/live", headers={f"x-{i}": "a" for i in range(200)})
    assert (answer.status_code, answer.json()["error"]["code"]) == (431, "too_many_headers")


def test_headers_have_a_size(base, http):
    assert http.get("/live", headers={"x": "a" * 15_000}).status_code == 200
    with connected(base) as sock:
        sock.sendall(GET + b"x: " + b"a" * (protocol.HEADER_BYTES + protocol.READ_BYTES))
        assert rest(sock).startswith(b"HTTP/1.1 400 ")
    assert protocol.HEADER_BYTES * connections.MAX_CONNECTIONS <= 256 << 20


def test_a_stream_that_nobody_reads_is_cut(monkeypatch):
    monkeypatch.setattr(protocol, "STALL_SECONDS", 0.3)
    engine = ScriptedEngine(max_model_len=1 << 20, num_kv_blocks=1 << 16)
    body = json.dumps({"prompt": "word" * 1000, "max_tokens": 1_000_000, "stream": True}).encode()
    with serving(engine) as (base, service), connected(base, SO_RCVBUF=4096) as sock:
        sock.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
            b"content-length: %d\r\n\r\n" % len(body) + body
        )
        wait_until(lambda: engine.left_early == 1)
        assert engine.finished == 0
        wait_until(lambda: service.open == service.admission.open == 0)


class Clock:
    """A loop in virtual time, and the transport of a client that reads `rate` bytes a second."""

    def __init__(self):
        self.now, self.aborted_at, self.size = 0.0, None, 0
        self.connection = connection = object.__new__(protocol.HttpProtocol)
        connection.transport = connection._raw_transport = connection.loop = self
        connection.flow = SimpleNamespace(pause_writing=lambda: None, resume_writing=lambda: None)
        connection._patience, connection._stall_timer = protocol.STALL_SECONDS, None

    def time(self):
        return self.now

    def get_write_buffer_size(self):
        return self.size

    def abort(self):
        self.aborted_at = self.now

    def call_later(self, seconds, call):
        self.timer = SimpleNamespace(when=lambda: at, cancel=lambda: None, call=call)
        at = self.now + seconds
        return self.timer

    def read(self, size, rate):
        """Lets the client read what was written when the system's buffers were full; returns whether it was cut."""
        self.size = size
        self.connection.pause_writing()
        if self.timer.when() < (end := self.now + size / rate):
            self.now = self.timer.when()
            self.timer.call()
        else:
            self.now = end
            self.connection.resume_writing()
        return self.aborted_at is not None


def test_who_reads_slowly_is_not_cut():
    clock = Clock()
    assert not any(clock.read(size, 8192) for size in (1 << 20, 300, 300, 10 << 20) * 20)
    assert clock.now > 3000
    assert not any(clock.read(300, 300 / 0.05) for _ in range(1000))
    assert clock.read(300, 300 / 200)


def test_who_reads_as_slowly_as_possible_is_cut():
    clock = Clock()
    while not clock.read(300, 300 / 59):
        assert clock.now < 100
    assert clock.now < 61


def answered(base, request):
    """The status line and the body of the answer to a request, whose connection then ends."""
    with connected(base) as sock:
        sock.sendall(request)
        head, _, body = rest(sock).partition(b"\r\n\r\n")
    return head.partition(b"\r\n")[0].decode(), body


@pytest.mark.parametrize(
    ("target", "host", "status"),
    [
        ("http://localhost/v1/models", "localhost", "200 OK"),
        ("HTTP://127.0.0.1:8000/v1/models?a=b", "localhost", "200 OK"),
        ("https://localhost/v1/models/", "localhost", "200 OK"),
        ("http://localhost", "localhost", "200 OK"),
        ("http://localhost?a", "localhost", "200 OK"),
        # The target's host counts, whatever the header says.
        ("http://localhost/v1/models", "evil.example", "200 OK"),
        ("http://evil.example/v1/models", "localhost", "403 Forbidden"),
        ("http://localhost@evil.example/v1/models", "localhost", "404 Not Found"),
        ("http:///v1/models", "localhost", "404 Not Found"),
        ("ftp://localhost/v1/models", "localhost", "404 Not Found"),
        ("http://localhost/v1/model", "localhost", "404 Not Found"),
        ("v1/models", "localhost", "404 Not Found"),
        ("*", "localhost", "404 Not Found"),
    ],
)
def test_a_target_may_have_absolute_form(base, target, host, status):
    line, body = answered(base, f"GET {target} HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n\r\n".encode())
    assert line == f"HTTP/1.1 {status}"
    assert json.loads(body)


def test_a_post_in_absolute_form(base):
    body = b'{"prompt": "a", "max_tokens": 1}'
    head = b"POST http://localhost/v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    line, answer = answered(base, head + b"connection: close\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
    assert (line, json.loads(answer)["choices"][0]["text"]) == ("HTTP/1.1 200 OK", "a ")


@pytest.mark.parametrize(
    ("version", "status"),
    [("1.1", 200), ("1.0", 200), ("1.2", 200), ("9.9", 505), ("2.0", 505), ("0.9", 505), ("3.0", 505), ("11.1", 400), ("x", 400)],
)
def test_versions_of_http(base, version, status):
    line, body = answered(base, f"GET /live HTTP/{version}\r\nhost: localhost\r\nconnection: close\r\n\r\n".encode())
    assert line.split()[:2] == ["HTTP/1.1", str(status)]
    if status == 505:
        assert json.loads(body)["error"]["code"] == "http_version_not_supported"


LARGE = 8 << 20
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"


@contextlib.contextmanager
def sending(base, head, body):
    """A connection on which the whole request was sent before anything was read; what it is like to wait for nobody."""
    with connected(base) as sock:
        sock.sendall(head)
        for at in range(0, len(body), 1 << 16):
            sock.sendall(body[at : at + (1 << 16)])
        yield sock


def chunked(body):
    return b"%x\r\n" % len(body) + body + b"\r\n0\r\n\r\n"


@pytest.mark.parametrize("form", ["length", "chunked", "no end"])
def test_413_reaches_a_client_that_is_still_sending(base, server, form):
    body = b" " * LARGE
    head = HEAD + (
        b"content-length: %d\r\n\r\n" % (LARGE * (2 if form == "no end" else 1))
        if form != "chunked"
        else b"transfer-encoding: chunked\r\n\r\n"
    )
    with sending(base, head, chunked(body) if form == "chunked" else body) as sock:
        got = rest(sock, may_reset=False)
    assert got.startswith(b"HTTP/1.1 413 ")
    assert b"connection: close" in got.lower()
    error = json.loads(got.partition(b"\r\n\r\n")[2])["error"]
    assert error["code"] == "request_too_large"
    wait_until(lambda: server[1].open == server[1].admission.open == 0)


def in_chunks(body, size):
    parts = [body[at : at + size] for at in range(0, len(body), size)]
    return b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"


def test_a_proposal_of_http_2_is_passed_over(base):
    """Java's client sends one with each request. uvicorn's other protocol loses the body then."""
    body = b'{"prompt": "a", "max_tokens": 1}'
    with connected(base) as sock:
        for _ in range(2):
            head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n"
            head += b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAEAAEAAAAIAAAAA\r\n\r\n"
            reply = requested(sock, head + b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body))
            assert reply.startswith(b"HTTP/1.1 200 ")


def test_a_body_in_many_small_chunks_is_refused(base, server):
    body = b" " * 100_000
    with sending(base, HEAD + b"transfer-encoding: chunked\r\n\r\n", in_chunks(body, 1)) as sock:
        got = rest(sock)
    assert got.startswith(b"HTTP/1.1 400 ")
    assert b"too many small chunks: send at least 64 bytes" in got
    wait_until(lambda: server[1].open == server[1].admission.open == 0)


@pytest.mark.parametrize(("length", "size"), [(1000, 1), (500_000, 64), (1 << 20, 1000)])
def test_a_body_in_chunks_of_usual_sizes_is_read(base, length, size):
    body = json.dumps({"model": None, "prompt": "a", "max_tokens": 1}).encode().ljust(length)
    with sending(base, HEAD + b"connection: close\r\ntransfer-encoding: chunked\r\n\r\n", in_chunks(body, size)) as sock:
        assert rest(sock).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/models"])
def test_401_reaches_a_client_that_is_still_sending(path):
    with serving(ScriptedEngine(), "sk-1") as (base, _):
        head = HEAD.replace(b"/v1/completions", path.encode()) + b"content-length: %d\r\n\r\n" % LARGE
        with sending(base, head, b" " * LARGE) as sock:
            got = rest(sock, may_reset=False)
    assert got.startswith(b"HTTP/1.1 401 ")


def test_400_reaches_a_client_that_is_still_sending(base):
    with sending(base, b"no http\r\n\r\n", b"x" * LARGE) as sock:
        got = rest(sock, may_reset=False)
    assert got.startswith(b"HTTP/1.1 400 ")


def test_a_client_that_does_not_stop_sending_is_cut(monkeypatch, base):
    monkeypatch.setattr(protocol, "LINGER_SECONDS", 0.3)
    with connected(base) as sock, contextlib.suppress(ConnectionResetError, BrokenPipeError):
        sock.sendall(HEAD + b"content-length: 1000000000000\r\n\r\n")
        while True:  # it would go on for ever, or until the send times out
            sock.sendall(b" " * 65536)


def test_a_server_that_ends_does_not_wait_for_a_client_that_is_still_sending():
    with serving(ScriptedEngine()) as (base, _):
        sock = connected(base)
        sock.sendall(HEAD + b"content-length: 1000000000\r\n\r\n")
        assert sock.recv(12) == b"HTTP/1.1 413"
    with sock:
        rest(sock)


def test_the_limit_of_a_body_is_a_flag():
    with serving(ScriptedEngine(), max_body_size=100) as (base, _), httpx.Client(base_url=base) as http:

        def ask(length):
            body = json.dumps({"prompt": "a", "max_tokens": 1, "user": ""})
            padded = body.replace('""', '"' + "x" * (length - len(body)) + '"')
            assert len(padded) == length
            return http.post("/v1/completions", content=padded, headers={"content-type": "application/json"})

        assert [ask(length).status_code for length in (100, 101)] == [200, 413]
        assert "100 bytes" in ask(101).json()["error"]["message"]
        pieces = http.post("/v1/completions", content=iter([b" " * 60] * 2), headers={"content-type": "application/json"})
        assert pieces.status_code == 413
    with serving(ScriptedEngine(), max_body_size=16 << 20) as (base, _):
        body = json.dumps({"prompt": "a", "max_tokens": 1, "user": "x" * (3 << 20)})
        assert httpx.post(f"{base}/v1/completions", content=body, headers={"content-type": "application/json"}).status_code == 200


def test_https(certificate):
    cert, key = certificate
    check_certificate(cert, key)
    trusted = ssl.create_default_context(cafile=cert)
    with serving(ScriptedEngine(), ssl_certfile=cert, ssl_keyfile=key) as (base, _):
        assert base.startswith("https://")
        with httpx.Client(base_url=base, verify=trusted) as http:
            assert http.get("/live").status_code == 200
            body = {"prompt": "a b c", "max_tokens": 50, "stream": True}
            assert http.post("/v1/completions", json=body).text.endswith("data: [DONE]\n\n")


def test_files_that_are_no_certificate(certificate, tmp_path):
    cert, key = certificate
    for files in ((cert, None), (key, key), (cert, str(tmp_path / "nothing")), (__file__, None)):
        with pytest.raises(InvalidSetting, match=f"--ssl-certfile {files[0]}.*: a certificate and its private key"):
            check_certificate(*files)


def test_a_unix_socket_is_for_its_user_alone(tmp_path):
    path = tmp_path / "socket"
    with open_path(str(path), 0o600):
        assert path.stat().st_mode & 0o777 == 0o600
        with pytest.raises(PortTaken, match="in use"), open_path(str(path), 0o600):
            pass
    assert not path.exists()
    with socket.socket(socket.AF_UNIX) as busy, socket.socket(socket.AF_UNIX) as waits:
        busy.bind(str(path))
        busy.listen(0)
        waits.connect(str(path))
        with pytest.raises(PortTaken, match="in use"), open_path(str(path), 0o600):
            pass
    path.unlink()
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    with open_path(str(path), 0o600):  # nobody listens at it any more
        pass
    with open_path(str(path), 0o600) as listener:
        listener.close()  # so that the next server may get a file of the same number
        next_server = open_path(str(path), 0o600)
        next_server.__enter__()
        os.utime(path, (0, 0))  # it is made at another time
    assert path.exists(), "it is another server's by now"
    next_server.__exit__(None, None, None)
    (tmp_path / "file").write_text("mine")
    with pytest.raises(PortTaken, match="there is a file of that name"), open_path(str(tmp_path / "file"), 0o600):
        pass
    assert (tmp_path / "file").exists()
    with pytest.raises(PortTaken, match="too long"), open_path(str(tmp_path / ("a" * 200)), 0o600):
        pass


def test_reading_a_body_counts_for_its_request(server, base, monkeypatch):
    counted, turn = [], server[1].pacing.turn

    def spied(group, work):
        counted.append(work)
        return turn(group, work)

    monkeypatch.setattr(server[1].pacing, "turn", spied)
    with httpx.Client(base_url=base) as client:  # one connection
        for size in (1, 1 << 20):
            client.post("/v1/completions", content=b"{" * size, headers={"content-type": "application/json"})
    small, large = (work.seconds for work in counted)
    assert small > 0
    assert large > 0.0005  # 64 reads
