"""A server that does what a prompt's words say, and notes what it saw."""

import asyncio
import json
import os
import signal
import threading
from contextlib import asynccontextmanager, contextmanager

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


class Scripted:
    """What the words of a prompt do.

    `refuse`: 429. `loading`: 503 the first two times. `error`: one in the stream. `drop`: the connection breaks after two pieces.
    `cut`: the stream just ends. `silent`: never answers. `three`: three tokens a piece. `untold`: no usage. `garbage`: no HTTP.
    `gather`: answers when two have asked. `broken`: 500. `torn`: an event that is no JSON. `odd`: counts that are no numbers.
    `backwards`: a chunk of negative size. `die`: the server is gone, and all connections. `interrupt`: as if somebody pressed Ctrl-C.
    """

    def __init__(self):
        self.bodies, self.connections, self.open, self.most_open = [], 0, 0, 0
        self.gathered = asyncio.Event()
        self.server, self.writers = None, set()

    @asynccontextmanager
    async def serving(self):
        """Its address, on the event loop of the test."""
        self.server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        try:
            yield f"http://127.0.0.1:{self.server.sockets[0].getsockname()[1]}"
        finally:
            self.server.close()

    @contextmanager
    def elsewhere(self):
        """The same on a loop and in a thread of its own, for what runs loops itself."""
        ready, ended, found = threading.Event(), threading.Event(), []

        async def run():
            async with self.serving() as url:
                found.append(url)
                ready.set()
                await asyncio.to_thread(ended.wait)

        thread = threading.Thread(target=asyncio.run, args=(run(),))
        thread.start()
        ready.wait()
        try:
            yield found[0]
        finally:
            ended.set()
            thread.join()

    async def _serve(self, reader, writer):
        self.connections += 1
        self.writers.add(writer)
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
        if "die" in words:
            self.server.close()
            for other in self.writers:
                other.transport.abort()
            return False
        if "interrupt" in words:
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.sleep(60)
        if "broken" in words:
            said = b'{"error": {"message": "out of\\nmemory"}}'
            writer.write(b"HTTP/1.1 500 Internal Server Error\r\ncontent-length: %d\r\n\r\n" % len(said) + said)
            return True
        if "garbage" in words:
            writer.write(b"SMTP ready\r\n\r\n")
            return False
        if "refuse" in words:
            said = b'{"error": {"message": "2 requests are waiting, as many as may"}}'
            writer.write(b"HTTP/1.1 429 Too Many Requests\r\nretry-after: 1\r\ncontent-length: %d\r\n\r\n" % len(said) + said)
            return True
        writer.write(HEAD)
        if "backwards" in words:
            writer.write(b"-5\r\nhello\r\n")
            await asyncio.sleep(60)
        if "torn" in words:
            data = b'data: {"choices": [{"te\n\n'
            writer.write(b"%x\r\n%s\r\n" % (len(data), data))
        if "odd" in words:
            self._event(writer, {"choices": [], "usage": {"prompt_tokens": None, "completion_tokens": []}})
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
