"""The sockets to listen on, opened before anything slow so that one in use is said at once."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import socket
import ssl
import stat
from collections.abc import Iterator

from chairlift.errors import ChairliftError, InvalidSetting

IDLE_SECONDS = 60
"""After so long without a word the system asks whether the other machine is still there."""


class PortTaken(ChairliftError):
    """The address to listen on cannot be had."""


def open_port(host: str, port: int) -> socket.socket:
    """Listens on `host:port` (0: any free one) for TCP; raises PortTaken."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Connections inherit it: a machine that was switched off says no goodbye.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if hasattr(socket, "TCP_KEEPIDLE"):
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, IDLE_SECONDS)
        listener.bind(address)
        listener.listen()  # at once: until one listens, others may bind the same port
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise PortTaken(f"cannot listen on {host}:{port}: {reason} (--port 0 takes any free port)") from None
    return listener


@contextlib.contextmanager
def open_path(path: str, mode: int) -> Iterator[socket.socket]:
    """Listens on a Unix socket at `path` with these permissions, and removes it after the block; raises PortTaken.

    One that a dead process left is replaced.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        _clear(path)
        before = os.umask(0o777 & ~mode)  # from its first moment on
        try:
            listener.bind(path)
        finally:
            os.umask(before)
        listener.listen()  # at once: where nobody listens, the next to start takes it for a dead one's
    except OSError as error:
        listener.close()
        raise PortTaken(f"cannot listen on the Unix socket {path}: {error.strerror or error}") from None
    with listener:
        try:
            yield listener
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)


def _clear(path: str) -> None:
    """Removes a socket at which nobody listens."""
    try:
        if not stat.S_ISSOCK(os.stat(path).st_mode):
            raise FileExistsError(errno.EEXIST, "there is a file of that name")
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.connect(path)
    except FileNotFoundError:
        return
    except ConnectionRefusedError:
        os.unlink(path)
    else:
        raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))


def check_certificate(certfile: str, keyfile: str | None) -> None:
    """Raises InvalidSetting unless these are a certificate and its private key."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(certfile, keyfile, password=lambda: "")  # without, a terminal would be asked
    except (OSError, ValueError) as error:
        files = certfile if keyfile is None else f"{certfile} with --ssl-keyfile {keyfile}"
        reason = getattr(error, "reason", None) or getattr(error, "strerror", None) or error
        wanted = "a certificate and its private key in PEM format, without a password, are needed"
        if keyfile is None:
            wanted += " (--ssl-keyfile names the key if it is in a file of its own)"
        raise InvalidSetting(f"--ssl-certfile {files}: {reason}: {wanted}") from None


def is_loopback(host: str) -> bool:
    """Whether a name or address is this machine's own, which others cannot reach."""
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def address(listener: socket.socket, *, tls: bool = False) -> str:
    """Where clients find the API of a server that listens there."""
    if listener.family == socket.AF_UNIX:
        return f"the Unix socket {listener.getsockname()}"
    host, port = listener.getsockname()[:2]
    return f"http{'s' if tls else ''}://{f'[{host}]' if ':' in host else host}:{port}/v1"
