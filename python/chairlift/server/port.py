"""The listening socket, opened before anything slow so that a port in use is said at once."""

from __future__ import annotations

import socket

from chairlift.errors import ChairliftError


class PortTaken(ChairliftError):
    """The address to listen on cannot be had."""


def open_port(host: str, port: int) -> socket.socket:
    """Binds `host:port` (0: any free one) for TCP; raises PortTaken."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise PortTaken(f"cannot listen on {host}:{port}: {reason} (--port 0 takes any free port)") from None
    return listener
