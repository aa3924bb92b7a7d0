"""A connection on which tests send what no client library would."""

import contextlib
import socket

import httpx


def connected(base: str, **options: int) -> socket.socket:
    """A connection to the server at an address, with options of the socket by their names."""
    url = httpx.URL(base)
    sock = socket.socket()
    for name, value in options.items():
        sock.setsockopt(socket.SOL_SOCKET, getattr(socket, name), value)
    sock.settimeout(30)
    sock.connect((url.host, url.port))
    return sock


def rest(sock: socket.socket, *, may_reset: bool = True) -> bytes:
    """All that comes until the server closes the connection, or resets it if it may."""
    got = b""
    with contextlib.suppress(*[ConnectionResetError] * may_reset):
        while piece := sock.recv(65536):
            got += piece
    return got
