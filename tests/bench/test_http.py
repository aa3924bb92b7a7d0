import pytest

from chairlift.bench.http import Address, Events, Malformed, Response
from chairlift.errors import InvalidSetting

CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nX-A: b\r\n\r\n5\r\nhello\r\n6;x=y\r\n world\r\n0\r\nx: y\r\n\r\n"
SIZED = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 429 Too Many\r\ncontent-length: 11\r\n\r\nhello world"
UNTIL_CLOSE = b"HTTP/1.0 200 OK\r\nserver: old\r\n\r\nhello world"
EMPTY = b"HTTP/1.1 204 No Content\r\n\r\n"


@pytest.mark.parametrize("whole", [CHUNKED, SIZED, UNTIL_CLOSE])
@pytest.mark.parametrize("size", [1, 2, 3, 7, 50, 1000])
def test_an_answer_is_read_however_it_is_cut(whole, size):
    response = Response()
    body = b"".join(response.feed(whole[at : at + size]) for at in range(0, len(whole), size))
    assert body == b"hello world"
    assert response.status == (429 if whole is SIZED else 200)
    assert response.done == response.reusable == (whole is not UNTIL_CLOSE)
    response.close()
    assert response.done


@pytest.mark.parametrize("whole", [CHUNKED, SIZED])
def test_an_answer_that_breaks_off_is_not_done(whole):
    response = Response()
    response.feed(whole[:-1])
    response.close()
    assert not response.done


def test_an_empty_answer_is_done_at_once():
    response = Response()
    assert response.feed(EMPTY) == b""
    assert response.done


def test_a_server_may_ask_to_close():
    response = Response()
    response.feed(b"HTTP/1.1 200 OK\r\nConnection: close\r\ncontent-length: 0\r\n\r\n")
    assert response.done
    assert not response.reusable


@pytest.mark.parametrize(
    "bad", [b"SSH-2.0-OpenSSH\r\n\r\n", b"HTTP/2 200\r\n\r\n", CHUNKED.replace(b"5\r\nhello", b"x\r\nhello"), b"x" * 70000]
)
def test_what_is_no_http_is_told(bad):
    with pytest.raises(Malformed):
        Response().feed(bad)


@pytest.mark.parametrize("size", [1, 4, 100])
def test_events(size):
    whole = b': ping\n\ndata: {"a": 1}\n\ndata:[DONE]\r\n\r\nevent: x\ndata: {"b"'
    events = Events()
    assert [event for at in range(0, len(whole), size) for event in events.feed(whole[at : at + size])] == [b'{"a": 1}', b"[DONE]"]
    assert events.feed(b": 2}\n") == [b'{"b": 2}']


def test_addresses():
    assert Address.parse("http://127.0.0.1:8000") == Address("127.0.0.1", 8000, "", False)
    assert Address.parse("https://api.example.com/openai/") == Address("api.example.com", 443, "/openai", True)
    assert Address.parse("http://[::1]:80").authority == "[::1]:80"
    for bad in ("localhost:8000", "ftp://a", "http://:80", "http://a:99999"):
        with pytest.raises(InvalidSetting, match="expected something like"):
            Address.parse(bad)
