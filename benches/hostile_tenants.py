"""Four tenants that try to stall, crowd out or exhaust a server, for `soak.py`; each in threads, of which each makes one kind of request.

    python benches/hostile_tenants.py PORT SECONDS PAUSE KEY KEY KEY KEY    prints a JSON object: kind → status → number of requests

All kinds are bounded: in time by TIMEOUT, in number by PAUSE, the seconds between two requests of a thread, and each reads at most
ANSWER_BYTES of an answer.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import random
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

TIMEOUT = 60.0
"""Seconds after which an answer is not waited for any longer."""
ANSWER_BYTES = 1 << 20
LONG = "0123456789" * 200_000
"""2 MB of the text that is slowest to tokenize."""
IDLE_SOCKETS = 200
SENT = ("left", "opened")
"""What counts as the status of requests that wait for none, and of connections that send none."""


class Attacker:
    """A thread's connection details and its random choices."""

    def __init__(self, port: int, key: str, seed: int) -> None:
        self.port, self.random = port, random.Random(seed)
        self._key = key
        self.statuses: Counter[str] = Counter()

    def ask(self, method: str, path: str, body: object = None, **headers: str) -> Any:
        """Sends one request and counts its status. Returns the parsed answer, None if it is not JSON or too long."""
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        headers = {"authorization": f"Bearer {self._key}", "content-type": "application/json", **headers}
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=TIMEOUT)
        try:
            connection.request(method, path, data, headers)
            response = connection.getresponse()
            self.statuses[str(response.status)] += 1
            return json.loads(response.read(ANSWER_BYTES))
        except ValueError:
            return None
        except (OSError, http.client.HTTPException) as error:
            self.statuses[type(error).__name__] += 1
            return None
        finally:
            connection.close()

    def post(self, path: str, body: object) -> Any:
        return self.ask("POST", path, body)


GRAMMARS = (
    "start: s\ns: s s | s s s | A\nA: /[A-Z]/",
    "start: s\ns: s s | s s s | A\nA: /[a-z ]/",
    "start: s\ns: s s s s s | s s | A\nA: /[a-z]/",
    "start: s+\ns: A? s? A? | A\nA: /./",
)


def ambiguous_grammar(attacker: Attacker) -> None:
    grammar = attacker.random.choice(GRAMMARS).replace("/[", f"/[{attacker.random.choice('xyz')}")
    body = {"prompt": "ABC", "n": attacker.random.choice([1, 8, 32]), "max_tokens": 40, "temperature": 1.5}
    attacker.post("/v1/completions", {**body, "structured_outputs": {"grammar": grammar}})


def lexer_states(attacker: Attacker) -> None:
    regex = rf"(.|\n)*[a-{attacker.random.choice('jklmn')}](.|\n){{16}}end"
    body = {"prompt": "Tell me", "n": 8, "max_tokens": 60, "temperature": 2}
    attacker.post("/v1/completions", {**body, "structured_outputs": {"regex": regex}})


def abandoned_grammars(attacker: Attacker) -> None:
    """Grammars that take long to compile, whose client does not wait."""
    words = "|".join(f"({attacker.random.random()})" for _ in range(200))
    body = json.dumps({"prompt": "A", "max_tokens": 4, "structured_outputs": {"regex": f"({words}){{2,40}}"}}).encode()
    status = "left"
    try:
        with socket.create_connection(("127.0.0.1", attacker.port), TIMEOUT) as sock:
            head = f"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\nauthorization: Bearer {attacker._key}\r\n"
            sock.sendall(f"{head}content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body)
            sock.settimeout(0.2)
            with contextlib.suppress(TimeoutError):
                status = sock.recv(len("HTTP/1.1 200"))[-3:].decode() or "closed"
    except OSError as error:
        status = type(error).__name__
    attacker.statuses[status] += 1


def long_chat(attacker: Attacker) -> None:
    routes = {
        "/v1/chat/completions": {"messages": [{"role": "user", "content": LONG}], "max_tokens": 1},
        "/v1/messages/count_tokens": {"model": "m", "messages": [{"role": "user", "content": LONG}]},
        "/v1/completions": {"prompt": LONG, "max_tokens": 1, "truncate_prompt_tokens": 10},
        "/v1/embeddings": {"input": LONG},
        "/api/embed": {"input": LONG},
    }
    path = attacker.random.choice(list(routes))
    attacker.post(path, routes[path])


def tokenize_flood(attacker: Attacker) -> None:
    attacker.post("/tokenize", {"prompt": LONG[: attacker.random.choice([1000, 100_000, 1_000_000])]})


def many_logprobs(attacker: Attacker) -> None:
    """More than a server allows, or as many answers with a few."""
    top, tokens = attacker.random.choice([(20, 200), (1, 100)])
    body = {"messages": [{"role": "user", "content": "Tell me a story."}], "n": 64, "max_tokens": tokens, "ignore_eos": True}
    attacker.post("/v1/chat/completions", {**body, "logprobs": True, "top_logprobs": top})


def long_prompts(attacker: Attacker) -> None:
    words = " ".join(attacker.random.choices(["the", "of", "and", "to", "in", "is", "that", "it"], k=1500))
    attacker.post("/v1/completions", {"prompt": words, "max_tokens": 64, "ignore_eos": True, "n": 4})


def files(attacker: Attacker) -> None:
    """Uploads a file, and deletes it many times at once."""
    if (name := _upload(attacker, b"x" * (1 << 20))) is not None:
        threads = [threading.Thread(target=attacker.ask, args=("DELETE", f"/v1/files/{name}")) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def batches(attacker: Attacker) -> None:
    """A backlog of background work."""
    body = {"prompt": "Once upon a time", "max_tokens": 100, "ignore_eos": True}
    line = {"method": "POST", "url": "/v1/completions", "body": body}
    lines = "\n".join(json.dumps({"custom_id": str(number), **line}) for number in range(100)).encode()
    if (name := _upload(attacker, lines)) is not None:
        order = {"input_file_id": name, "endpoint": "/v1/completions", "completion_window": "24h"}
        if isinstance(made := attacker.post("/v1/batches", order), dict) and "id" in made:
            time.sleep(10)
            attacker.post(f"/v1/batches/{made['id']}/cancel", {})


def idle_sockets(attacker: Attacker) -> None:
    """Connections that say nothing, or half a request."""
    with contextlib.ExitStack() as stack:
        for number in range(IDLE_SOCKETS):
            try:
                sock = stack.enter_context(socket.create_connection(("127.0.0.1", attacker.port), 1))
                sock.sendall(b"GET /live HTTP/1.1\r\nhost: x\r\n" if number % 2 else b"")
            except OSError:
                attacker.statuses["refused"] += 1
                continue
            attacker.statuses["opened"] += 1
        time.sleep(3)


def scrapes(attacker: Attacker) -> None:
    for path in ("/metrics", "/dashboard/data", "/v1/models"):
        attacker.ask("GET", path)


def live_sequences(attacker: Attacker) -> None:
    """Opens and forks live sequences, generates from some, and leaves them all."""
    made = attacker.post("/v1/sequences", {"prompt": f"{attacker.random.random()} " + "word " * 300, "lease_seconds": 60})
    if isinstance(made, dict) and "id" in made:
        attacker.post(f"/v1/sequences/{made['id']}/fork", {"n": 16})
        attacker.post(f"/v1/sequences/{made['id']}/generate", {"max_tokens": 64})


def refusals(attacker: Attacker) -> None:
    """Bodies that are refused, with long names and values."""
    attacker.post("/v1/chat/completions", {"messages": [], "metadata": {"k" * 1_000_000: 1}})
    attacker.post("/v1/completions", {"prompt": "a", "logit_bias": {"5": 10**300}})


def _upload(attacker: Attacker, content: bytes) -> str | None:
    edge = "edgeedgeedge"
    part = f'--{edge}\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    part += f'--{edge}\r\ncontent-disposition: form-data; name="file"; filename="f.jsonl"\r\ncontent-type: text/plain\r\n\r\n'
    body = part.encode() + content + f"\r\n--{edge}--\r\n".encode()
    made = attacker.ask("POST", "/v1/files", body, **{"content-type": f"multipart/form-data; boundary={edge}"})
    return str(made["id"]) if isinstance(made, dict) and "id" in made else None


Kind = Callable[[Attacker], None]
TENANTS: tuple[tuple[Kind, ...], ...] = (
    (ambiguous_grammar, ambiguous_grammar, lexer_states, abandoned_grammars),
    (long_chat, long_chat, long_chat, tokenize_flood),
    (files, batches, idle_sockets, refusals),
    (many_logprobs, long_prompts, scrapes, live_sequences),
)
"""What each tenant does, each kind in a thread of its own."""


def attack(port: int, seconds: float, pause: float, keys: list[str]) -> dict[str, Counter[str]]:
    """Lets all tenants go on for so long. Returns how often each kind got which status."""
    ends = time.monotonic() + seconds
    running: list[tuple[Kind, Attacker, threading.Thread]] = []

    def run(kind: Kind, attacker: Attacker) -> None:
        while time.monotonic() < ends:
            kind(attacker)
            time.sleep(pause)

    for kind, attacker in _attackers(port, keys):
        thread = threading.Thread(target=run, args=(kind, attacker), daemon=True)
        thread.start()
        running.append((kind, attacker, thread))
    counts: dict[str, Counter[str]] = {}
    for kind, attacker, thread in running:
        thread.join(max(0.0, ends + 2 * TIMEOUT - time.monotonic()))  # a kind makes at most some requests in a row
        counts.setdefault(kind.__name__, Counter()).update(attacker.statuses)
    return counts


def _attackers(port: int, keys: list[str]) -> Iterator[tuple[Kind, Attacker]]:
    for number, (key, kinds) in enumerate(zip(keys, TENANTS, strict=True)):
        for which, kind in enumerate(kinds):
            yield kind, Attacker(port, key, 100 * number + which)


if __name__ == "__main__":
    os.nice(19)  # in truth they are on machines of their own
    print(json.dumps(attack(int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3]), sys.argv[4:])))
