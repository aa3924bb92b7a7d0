"""A server that does what a prompt's words say, on the event loop of the test, and notes what it saw."""

import asyncio
import json
from contextlib import asynccontextmanager

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


class Scripted:
    """What the words of a prompt do.

    `refuse`: 429. `loading`: 503 the first two times. `error`: one in the stream. `drop`: the connection breaks after two pieces.
    `cut`: the stream just ends. `silent`: never answers. `three`: three tokens a piece. `untold`: no usage. `garbage`: no HTTP.
    `gather`: answers when two have asked.
    """

    def __init__(self):
        self.bodies, self.connections, self.open, self.most_open = [], 0, 0, 0
        self.gathered = asyncio.Event()

    @asynccontextmanager
    async def serving(self):
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        try:
            yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        finally:
            server.close()

    async def _serve(self, reader, writer):
        self.connections += 1
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                length = next((int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")), 0)
                if head.startswith(b"GET /v1/models"):
                    body = json.dumps({"data": [{"id": "scripted", "max_model_len": 1000}]}).encode()
                    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
                    continue
                body = json.loads(await reader.readexactly(length))
                self.bodies.append({**body, "head": head.decode()})
                self.open += 1
                self.most_open = max(self.most_open, self.open)
                try:
                    if not await self._answer(body, writer):
                        return
                finally:
                    self.open -= 1
        except (asyncio.IncompleteReadError, asyncio.CancelledError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _answer(self, body, writer):
        """Whether the connection lives on."""
        words = (body["prompt"] if "prompt" in body else body["messages"][0]["content"]).split()
        if "silent" in words:
            await asyncio.sleep(60)
        if "gather" in words:
            if self.open == 2:
                self.gathered.set()
            await self.gathered.wait()
        if "loading" in words and len(self.bodies) <= 2:
            writer.write(b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 0\r\n\r\n")
            return True
        if "garbage" in words:
            writer.write(b"SMTP ready\r\n\r\n")
            return False
        if "refuse" in words:
            said = b'{"error": {"message": "2 requests are waiting, as many as may"}}'
            writer.write(b"HTTP/1.1 429 Too Many Requests\r\nretry-after: 1\r\ncontent-length: %d\r\n\r\n" % len(said) + said)
            return True
        writer.write(HEAD)
        tokens, each = body["max_tokens"], 3 if "three" in words else 1
        for sent in range(0, tokens, each):
            if sent >= 2 and "drop" in words:
                writer.transport.abort()
                return False
            if sent >= 2 and "error" in words:
                self._event(writer, {"error": {"message": "the engine has stopped"}})
                break
            self._event(writer, {"choices": [{"index": 0, "text": "x" * each, "finish_reason": None}]})
            await asyncio.sleep(0)
        else:
            if "cut" not in words:
                self._event(writer, {"choices": [{"index": 0, "text": "", "finish_reason": "length"}]})
            if "untold" not in words:
                self._event(writer, {"choices": [], "usage": {"prompt_tokens": len(words) + 1, "completion_tokens": tokens}})
        writer.write(b"0\r\n\r\n")
        return True

    @staticmethod
    def _event(writer, event):
        data = b"data: " + json.dumps(event).encode() + b"\n\n"
        writer.write(b"%x\r\n%s\r\n" % (len(data), data))
