"""Opens listening sockets, before anything slow, so that an address in use is reported at once."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import socket
import stat
import sys
from collections.abc import Iterator

from chairlift.errors import ChairliftError, InvalidSetting

GONE_SECONDS = 60, 15, 4
"""TCP keep-alive: seconds of silence before the first probe, seconds between probes, and unanswered probes that end the connection.

An answer may be silent for longer: a long queue and a long prompt take minutes.
"""


class PortTaken(ChairliftError):
    """The server cannot listen on the address."""


def end_if_gone(connection: socket.socket) -> None:
    """Lets a TCP connection fail if the other machine is gone, as after a power cut: then no packet says so. Listeners pass it on."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform == "darwin":
        idle = socket.TCP_KEEPALIVE
    else:
        idle = socket.TCP_KEEPIDLE
    for option, value in zip((idle, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT), GONE_SECONDS, strict=True):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)


def open_port(host: str, port: int) -> socket.socket:
    """Listens on `host:port` for TCP (0: any free port); raises PortTaken."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        end_if_gone(listener)
        listener.bind(address)
        listener.listen()  # immediately: until then others may bind the same port
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        is_in_use = isinstance(error, OSError) and error.errno == errno.EADDRINUSE
        remedy = "--port 0 takes any free port" if is_in_use else "--host and --port name an address of this machine"
        raise PortTaken(f"cannot listen on {host}:{port}: {reason} ({remedy})") from None
    return listener


@contextlib.contextmanager
def open_path(path: str, mode: int) -> Iterator[socket.socket]:
    """Listens on a Unix socket at `path` with permissions `mode`, and removes it after the block; raises PortTaken.

    Replaces the socket of a dead process.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        _remove_stale_socket(path)
        before = os.umask(0o777 & ~mode)  # permissions apply from creation on
        try:
            listener.bind(path)
        finally:
            os.umask(before)
        listener.listen()  # immediately: a socket without listener looks stale to others
    except OSError as error:
        listener.close()
        raise PortTaken(f"cannot listen on the Unix socket {path}: {error.strerror or error}") from None
    own = _identity(path)
    with listener:
        try:
            yield listener
        finally:
            with contextlib.suppress(FileNotFoundError):
                if _identity(path) == own:  # the file may have been removed, and another server may listen there
                    os.unlink(path)


def _identity(path: str) -> tuple[int, int]:
    """Tells a socket from one that is made later: that may get the number of a file that was removed."""
    found = os.stat(path)
    return found.st_ino, found.st_mtime_ns


def _remove_stale_socket(path: str) -> None:
    """Removes a socket that no process listens on."""
    try:
        if not stat.S_ISSOCK(os.stat(path).st_mode):
            raise FileExistsError(errno.EEXIST, "there is a file of that name")
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe, contextlib.suppress(BlockingIOError):
            probe.setblocking(False)  # a server whose queue of connections is full is in use
            probe.connect(path)
    except FileNotFoundError:
        return
    except ConnectionRefusedError:
        os.unlink(path)
    else:
        raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))


def check_certificate(certfile: str, keyfile: str | None) -> None:
    """Raises InvalidSetting unless these are a certificate and its private key."""
    import ssl  # not before the engine's process has started

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(certfile, keyfile, password=lambda: "")  # without this, OpenSSL prompts on the terminal
    except (OSError, ValueError) as error:
        files = certfile if keyfile is None else f"{certfile} with --ssl-keyfile {keyfile}"
        reason = getattr(error, "reason", None) or getattr(error, "strerror", None) or error
        hint = "a certificate and its private key in PEM format, without a password, are needed"
        if keyfile is None:
            hint += " (--ssl-keyfile names the key if it is in a file of its own)"
        raise InvalidSetting(f"--ssl-certfile {files}: {reason}: {hint}") from None


def is_loopback(host: str) -> bool:
    """Whether a host name or address is reachable only from this machine."""
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def address(listener: socket.socket, *, tls: bool = False) -> str:
    """Returns the URL of the API for a server that listens there."""
    if listener.family == socket.AF_UNIX:
        return f"the Unix socket {listener.getsockname()}"
    host, port = listener.getsockname()[:2]
    return f"http{'s' if tls else ''}://{f'[{host}]' if ':' in host else host}:{port}/v1"
