"""Prints, as JSON, which modules the first request of each route imports on the event loop: name of the request → modules.

A program of its own, because a test's process has imported most of what a server may import late.
"""

import http.client
import json
import sys
import tempfile
import threading
from pathlib import Path

from confused_bodies import BASES
from scripted_engine import ScriptedEngine
from server_here import serving

from chairlift.server.app import routes

JSON = {"content-type": "application/json"}
FORM = {"content-type": "multipart/form-data; boundary=x"}
UPLOAD = (
    '--x\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    '--x\r\ncontent-disposition: form-data; name="file"; filename="a.jsonl"\r\n\r\n'
    '{"custom_id":"1","method":"POST","url":"/v1/completions","body":{"prompt":"a","max_tokens":1}}\r\n--x--\r\n'
)


def main() -> None:
    """Sends a request to each route, and one for a stream to those that take a body."""
    engine = ScriptedEngine()
    engine.describe(max_text_len=64, embedding_size=4)
    imported: list[str] = []
    found: dict[str, list[str]] = {}
    with tempfile.TemporaryDirectory() as directory, serving(engine, data_dir=Path(directory)) as (base, _):
        connection = http.client.HTTPConnection(base.removeprefix("http://"), timeout=30)
        workers = [thread.ident for thread in threading.enumerate() if thread.name.startswith("asyncio_")]
        loop = {thread.ident for thread in threading.enumerate()} - {threading.get_ident(), *workers}

        def watch(event: str, arguments: tuple[object, ...]) -> None:
            if event == "import" and threading.get_ident() in loop:
                imported.append(str(arguments[0]))

        def call(method: str, path: str, body: object = None, headers: dict[str, str] = JSON) -> str:
            connection.request(method, path, json.dumps(body) if isinstance(body, dict) else body, headers)
            with connection.getresponse() as answer:
                data = answer.read()
            found[f"{answer.status} {method} {path} {body}"] = imported[:]
            imported.clear()
            return str(json.loads(data).get("id")) if answer.headers.get("content-type") == "application/json" else ""

        call("GET", "/live")  # the client's own first imports are made
        sys.addaudithook(watch)
        file = call("POST", "/v1/files", UPLOAD, FORM)
        call("POST", "/v1/batches", {"input_file_id": file, "endpoint": "/v1/completions", "completion_window": "24h"})
        call("GET", f"/v1/files/{file}/content")
        for route in routes():
            for method in sorted((route.methods or set()) - {"HEAD"}):
                id = call("POST", "/v1/sequences", {"prompt": "a"}) if "/sequences/" in route.path else file
                path = route.path.replace("{id}", id).replace("{name:path}", "x")
                body = BASES.get(route.path) if method == "POST" else None
                call(method, path, body)
                if body is not None:
                    call(method, path, {**body, "stream": True})
        connection.close()
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
