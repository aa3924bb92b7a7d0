"""An HTTP server in a thread of the test."""

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import MappingProxyType


class Handler(BaseHTTPRequestHandler):
    """Answers without a log."""

    def body(self) -> bytes:
        """The request's body."""
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def reply(self, content: bytes = b"", status: int = 200, headers: Mapping[str, str] = MappingProxyType({})) -> None:
        """Sends a response. Without a Content-Length the end of the connection is its end."""
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *arguments: object) -> None: ...


@contextmanager
def local_server(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    """Serves with `handler` until the end of the block; yields the address, as `http://127.0.0.1:PORT`."""
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
