"""Four honest tenants beside four hostile ones, on a real server with the default model: do their answers and their latency stay the same?

    python benches/soak.py --seconds 3600      writes benches/results/soak.md; `make soak` does it
    python benches/soak.py --seconds 60 --out FILE

First each honest answer is computed alone, then the honest tenants run by themselves, then beside those of `hostile_tenants.py`. The exit
status is 1 if an honest answer differs or fails, if a p99 of the time between two tokens is above 1.5 times that without the hostile
tenants plus one step, if a callback of the event loop, its lag or the memory is above its bound, if the metrics do not say so, if a kind of
hostile requests did not reach the server, if requests, descriptors or threads are left when all tenants have gone, or if the server ends.
Everything is on this machine, over loopback, and ends with the command.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import itertools
import json
import os
import re
import secrets
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from statistics import quantiles
from typing import Any

from hostile_tenants import SENT, TENANTS
from pages import RESULTS, ROOT, machine
from servers import server

RATIO = 1.5
"""How much longer the p99 of the time between two tokens may be, beside one step."""
CALLBACK = 0.02
"""Seconds of CPU time that the event loop's longest callback may take."""
LAG = 0.1
"""Seconds by which 99 % of the event loop's timers may be late, on cores that the engine and the hostile tenants use too."""
ALONE = (10.0, 120.0)
"""Fewest and most seconds without the hostile tenants; in between, a tenth of those with them."""
MEMORY = 2160
"""MiB that server and engine may hold: 1,024 of KV, 512 of grammars, 300 of a text that is tokenized, 320 of model and programs."""
LEFT = 16
"""How many descriptors, and threads, the server and its engine may have more at the end than before the hostile tenants came."""
REST = 150.0
"""Most seconds until all that the hostile tenants left has ended. Their live sequences have leases of a minute."""
LOOK_SECONDS = 5.0
"""Interval of looks at the server's metrics and memory."""
TIMEOUT = 300.0
"""Seconds after which an honest answer counts as lost."""
FLAGS = ["--scheduling-policy", "fair", "--max-num-seqs", "6", "--max-num-batched-tokens", "24", "--target-itl-ms", "15"]
FLAGS += ["--max-num-queued-reqs", "200", "--max-data-size", "64M", "--kv-cache-memory-bytes", "1G"]
"""The bound is some 35 ms. A step of eight streams takes 17 ms beside the hostile tenants, and 2 % of such steps 32; one of six takes 15,
and 2 % of them 27. Without a target for the ITL, a step of 24 tokens beside a long prompt takes 39 ms by itself."""
MAX_REQUESTS = 8
"""Each tenant's limit of open requests."""
PROMPTS = (
    "The capital of France is",
    "Once upon a time there was a small dragon who",
    "def fibonacci(n):",
    "List three fruits and their colours:",
    "The quick brown fox jumps over the lazy dog. Again:",
)
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}},
    "required": ["name", "age"],
}
GREEDY: dict[str, Any] = {"temperature": 0, "seed": 7}


def _completion(prompt: str) -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": 60, "ignore_eos": True, "logprobs": 1, **GREEDY}


def _chat(prompt: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": prompt}], "max_tokens": 60, **GREEDY}


HONEST: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "alice": [("/v1/completions", {**_completion(prompt), "stream": True}) for prompt in PROMPTS],
    "bob": [("/v1/chat/completions", {**_chat(prompt), "stream": True}) for prompt in PROMPTS],
    "carol": [
        ("/v1/completions", _completion(PROMPTS[0])),
        ("/v1/chat/completions", _chat(PROMPTS[3])),
        (
            "/v1/chat/completions",
            {**_chat(PROMPTS[1]), "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}},
        ),
        ("/v1/embeddings", {"input": PROMPTS[4]}),
    ],
    "dave": [("/v1/completions", {**_completion(PROMPTS[1] * 12), "stream": True, "max_tokens": 90})],
}
"""What each honest tenant asks for, in turn. Those of a route that refuses the model are left out."""
LEFT_OUT = (400, 404)
"""The statuses of such a route. Any other error is a fault."""


@dataclass
class Answer:
    """What must be the same each time, and how long it took."""

    status: int
    content: object
    gaps: list[float] = field(default_factory=list)
    """Seconds between two events of a stream."""


def ask(port: int, key: str, path: str, body: dict[str, Any]) -> Answer:
    """One honest request. A connection that breaks is an answer with the status 0."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT)
    try:
        connection.request("POST", path, json.dumps(body), {"authorization": f"Bearer {key}", "content-type": "application/json"})
        response = connection.getresponse()
        if response.status != 200 or not body.get("stream"):
            document = json.loads(response.read())
            return Answer(response.status, document.get("choices", document.get("data", document)))
        parts, gaps, last = list[Any](), list[float](), None
        while line := response.readline():
            if not line.startswith(b"data: {"):
                continue
            now = time.perf_counter()
            gaps += [] if last is None else [now - last]
            last = now
            parts += json.loads(line[6:]).get("choices") or ["no choices"]
        return Answer(200, _whole(parts), gaps)
    except (OSError, ValueError, http.client.HTTPException) as error:
        return Answer(0, f"{type(error).__name__}: {error}")
    finally:
        connection.close()


def _whole(parts: list[Any]) -> dict[str, Any]:
    """The text, the log-probabilities and the end of a stream, however its tokens were divided among events."""
    text, numbers, finish = "", list[Any](), None
    for part in parts:
        if not isinstance(part, dict):
            return {"broken": part}
        text += part.get("text") or (part.get("delta") or {}).get("content") or ""
        numbers += (part.get("logprobs") or {}).get("token_logprobs") or []
        finish = part.get("finish_reason") or finish
    return {"text": text, "logprobs": numbers, "finish": finish}


class Honest:
    """An honest tenant's requests, one after the other, and what became of them."""

    def __init__(self, name: str, port: int, key: str) -> None:
        self.name = name
        self._port, self._key = port, key
        self._known: list[tuple[str, dict[str, Any], object]] = []
        self.left_out: list[str] = []
        self.clear()

    def clear(self) -> None:
        """Forgets all figures."""
        self.answers = 0
        self.gaps: list[float] = []
        self.faults: list[str] = []

    def learn(self) -> None:
        """Computes the answers. To be called while nothing else runs."""
        for path, body in HONEST[self.name]:
            answer = ask(self._port, self._key, path, body)
            if answer.status == 200:
                self._known.append((path, body, answer.content))
            elif answer.status not in LEFT_OUT:
                self._fail(path, answer)
            else:
                self.left_out.append(f"{self.name}'s {path}: {answer.status}")

    def run(self, ends: float, pause: float) -> None:
        """Asks until then, with pauses of so many seconds, and compares."""
        for path, body, known in itertools.cycle(self._known):
            answer = ask(self._port, self._key, path, body)
            self.answers += 1
            self.gaps += answer.gaps
            if answer.status != 200:
                self._fail(path, answer)
            elif answer.content != known:
                self.faults.append(f"{path}: other bits: {str(answer.content)[:120]}")
            if time.monotonic() + pause >= ends:
                return
            time.sleep(pause)

    def _fail(self, path: str, answer: Answer) -> None:
        self.faults.append(f"{path}: {answer.status} {str(answer.content)[:120]}")

    @property
    def p99(self) -> float | None:
        """Of the seconds between two events, None without streams."""
        return quantiles(self.gaps, n=100)[98] if len(self.gaps) > 1 else None


@dataclass(frozen=True)
class Held:
    """What the server and its engines hold at a moment."""

    descriptors: int
    threads: int
    requests: int
    """Sequences that run, wait, or are held as live ones."""


REQUESTS = ("num_requests_running", "num_requests_waiting", "num_requests_swapped", "num_held_sequences_by_tenant")
"""The metrics that count them."""


class Watch:
    """Looks at the server's metrics and memory."""

    def __init__(self, port: int, key: str, pid: int) -> None:
        self._port, self._key, self._pid = port, key, pid
        self.memories: list[int] = []
        """At each look, MiB."""
        self.longest_callback: tuple[float, str] | None = None
        self.silent = 0
        """Looks that got no answer."""

    def run(self, ended: threading.Event) -> None:
        """Looks until the event."""
        while not ended.wait(LOOK_SECONDS):
            self.memories.append(self.memory())
            text = self.metrics()
            self.silent += not text
            for name, seconds in re.findall(
                r'^chairlift_event_loop_longest_callback_seconds\{.*callback="([^"]*)".*\} (\S+)$', text, re.MULTILINE
            ):
                self.longest_callback = max(self.longest_callback or (0.0, ""), (float(seconds), name))

    def memory(self) -> int:
        """Resident MiB of the server and its engines."""
        total = 0
        for process in self._processes():
            with contextlib.suppress(OSError, IndexError):
                total += int((process / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        return total >> 20

    def held(self) -> Held:
        """What they hold now."""
        descriptors = threads = 0
        for process in self._processes():
            with contextlib.suppress(OSError):
                descriptors += len(list((process / "fd").iterdir()))
                threads += len(list((process / "task").iterdir()))
        return Held(descriptors, threads, int(sum(_sum(self.metrics(), f"chairlift_{name}") for name in REQUESTS)))

    def rest(self) -> Held:
        """What they hold when all requests have ended, or cannot be waited for any longer."""
        ends = time.monotonic() + REST
        while (held := self.held()).requests and time.monotonic() < ends:
            time.sleep(LOOK_SECONDS)
        return held

    def _processes(self) -> list[Path]:
        children = Path(f"/proc/{self._pid}/task/{self._pid}/children").read_text().split()
        return [Path("/proc", str(pid)) for pid in (self._pid, *children)]

    def metrics(self) -> str:
        """The page, empty if it does not come."""
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=30)
        try:
            connection.request("GET", "/metrics", headers={"authorization": f"Bearer {self._key}"})
            return connection.getresponse().read().decode()
        except (OSError, http.client.HTTPException):
            return ""
        finally:
            connection.close()

    def step(self) -> tuple[float, float]:
        """Steps so far, and their seconds."""
        text = self.metrics()
        return _sum(text, "chairlift_engine_steps_total"), _sum(text, "chairlift_engine_step_seconds_total")

    def lag(self) -> dict[float, float]:
        """How many timers were late by at most so many seconds; empty where the server does not measure it."""
        found = re.findall(r'^chairlift_event_loop_lag_seconds_bucket\{.*le="([^"]+)".*\} (\S+)$', self.metrics(), re.MULTILINE)
        return {float(bound): float(count) for bound, count in found}


def _sum(text: str, name: str) -> float:
    return sum(float(value) for value in re.findall(rf"^{name}(?:\{{.*\}})? (\S+)$", text, re.MULTILINE))


def late(before: dict[float, float], after: dict[float, float], share: float = 0.99) -> float | None:
    """A bound of the lag that this share of the timers kept between two looks."""
    counts = {bound: count - before.get(bound, 0.0) for bound, count in after.items()}
    total = counts.get(float("inf"), 0.0)
    return min((bound for bound, count in counts.items() if count >= share * total), default=None) if total else None


def left(before: Held, after: Held) -> list[str]:
    """What the tenants left behind, though they have gone."""
    found = [f"{after.requests} requests are left"] if after.requests else []
    for name in ("descriptors", "threads"):
        if (more := getattr(after, name) - getattr(before, name)) > LEFT:
            found.append(f"{more} {name} are left")
    return found


def broken(watch: Watch, lag: float | None, hostile: dict[str, Counter[str]], alive: bool) -> list[str]:
    """The bounds that are not of one honest tenant and were not kept."""
    found = [] if alive else ["the server ended"]
    if watch.silent:
        found.append(f"{watch.silent} looks at `/metrics` got no answer")
    if watch.longest_callback is None or lag is None:
        found.append("the longest callback and the lag were not measured")
    if watch.longest_callback is not None and watch.longest_callback[0] > CALLBACK:
        found.append("the longest callback")
    if lag is not None and lag > LAG:
        found.append("the lag")
    if max(watch.memories, default=0) > MEMORY:
        found.append("the memory")
    return found + [f"{kind} did not reach the server" for kind, statuses in hostile.items() if not any(map(_reached, statuses))]


def _reached(status: str) -> bool:
    """Whether the server looked at more of a hostile request with this status than its key."""
    return status in SENT or (status.isdecimal() and status not in ("401", "403"))


def together(tenants: list[Honest], seconds: float, pause: float) -> None:
    """Runs the honest tenants side by side."""
    ends = time.monotonic() + seconds
    threads = [threading.Thread(target=one.run, args=(ends, pause)) for one in tenants]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def soak(seconds: float, pause: float) -> tuple[list[str], bool]:
    """Runs everything. Returns the lines of the result and whether all bounds were kept."""
    load = os.getloadavg()[0]  # of other work, which makes the figures worthless
    names = ["operator", *HONEST, *(f"eve{number}" for number in range(len(TENANTS)))]
    key = {name: secrets.token_hex(16) for name in names}
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        command = [sys.executable, "-m", "chairlift", "serve", "--port", "{port}", "--api-key-file", str(_key_file(directory, key))]
        command += ["--data-dir", str(directory / "data"), *FLAGS]
        with server(command, log=directory / "log") as (port, process):
            tenants = [Honest(name, port, key[name]) for name in HONEST]
            watch = Watch(port, key["operator"], process.pid)
            for one in tenants:
                one.learn()
            before = watch.step()
            together(tenants, min(max(ALONE[0], seconds / 10), ALONE[1]), pause)
            between = watch.step()
            step = _mean_step(before, between)
            alone = {one.name: (one.answers, one.p99, list(one.faults)) for one in tenants}
            memory, lag, held = watch.memory(), watch.lag(), watch.rest()
            for one in tenants:
                one.clear()
            output = _beside_hostile(tenants, watch, port, [key[name] for name in names[-len(TENANTS) :]], seconds, pause)
            rest = watch.rest()
            lags, slower = late(lag, watch.lag()), _mean_step(between, watch.step())
            alive = process.poll() is None
        log = (directory / "log").read_bytes()
    counts = {kind: Counter(statuses) for kind, statuses in json.loads(output).items()}
    unkept = broken(watch, lags, counts, alive) + left(held, rest)
    lines = _head(load, seconds, pause, step)
    for one in tenants:
        row, good = _of_a_tenant(one, alone[one.name], step)
        unkept += [] if good else [one.name]
        lines.append(row)
    lines += ["", f"- a step of the engine: {step * 1e3:.1f} ms alone, {slower * 1e3:.1f} ms beside them, on average"]
    lines += [*_of_the_server(watch, memory, lags, len(log), alive), f"- held before them: {_words(held)}; after them: {_words(rest)}"]
    lines += ["", "| hostile requests | statuses |", "|---|---|"]
    lines += [f"| {kind} | {', '.join(f'{count} x {status}' for status, count in sorted(one.items()))} |" for kind, one in counts.items()]
    if left_out := [text for one in tenants for text in one.left_out]:
        lines += ["", f"Left out, because the server refused them alone: {'; '.join(left_out)}."]
    if faults := [f"- {one.name} {fault}" for one in tenants for fault in (*alone[one.name][2], *one.faults)]:
        lines += ["", "The first faults:", "", *faults[:10]]
    verdict = f"no ({'; '.join(unkept)})" if unkept else "yes"
    return [*lines, "", f"All bounds kept: {verdict}.", ""], not unkept


def _beside_hostile(tenants: list[Honest], watch: Watch, port: int, keys: list[str], seconds: float, pause: float) -> bytes:
    """Runs the tenants and the watch beside the hostile tenants with these keys. Returns what the hostile ones print."""
    ended = threading.Event()
    watching = threading.Thread(target=watch.run, args=(ended,))
    watching.start()
    command = [sys.executable, str(ROOT / "benches/hostile_tenants.py"), str(port), str(seconds), str(pause)]
    with subprocess.Popen([*command, *keys], stdout=subprocess.PIPE) as hostile:
        try:
            together(tenants, seconds, pause)
            output, _ = hostile.communicate(timeout=TIMEOUT)
        finally:
            hostile.kill()
            ended.set()
    watching.join()
    return output


def _head(load: float, seconds: float, pause: float, step: float) -> list[str]:
    """The beginning of the result: how it was measured, and the head of the table of tenants."""
    return [
        "# Honest tenants beside hostile ones",
        "",
        f"{time.strftime('%Y-%m-%d')}, {machine()}; {_versions()}; load average before: {load:.1f}.",
        f"The default model for {seconds:.0f} s; `{' '.join(FLAGS)}`, and at most {MAX_REQUESTS} open requests of each tenant.",
        f"Each thread of a tenant waits {pause:g} s between two requests. A stream's",
        f"bound is {RATIO} times its p99 of the time between two events without the hostile tenants, plus the mean step of that time",
        f"({step * 1e3:.1f} ms). An answer is right if its text and the log-probabilities of completions are those computed alone.",
        "",
        "| tenant | answers | wrong or failed | p99 alone, ms | p99 beside them, ms | bound, ms | longest, ms | kept |",
        "|---|---|---|---|---|---|---|---|",
    ]


def _key_file(directory: Path, key: dict[str, str]) -> Path:
    """Writes the file of the keys, by the names of the operator and the tenants."""
    file = directory / "keys.toml"
    file.touch(0o600)
    limits = {name: "operator = true" if name == "operator" else f"max_requests = {MAX_REQUESTS}" for name in key}
    file.write_text("".join(f'[{name}]\nkey = "{key[name]}"\n{limits[name]}\n' for name in key))
    return file


def _of_a_tenant(one: Honest, alone: tuple[int, float | None, list[str]], step: float) -> tuple[str, bool]:
    """An honest tenant's row, and whether its bounds were kept. `alone` are its answers, p99 and faults without the hostile ones."""
    answers, before, faults = alone
    bound = None if before is None else RATIO * before + step
    late_tokens = bound is not None and (one.p99 is None or one.p99 > bound)
    good = not one.faults and not faults and not late_tokens and one.answers > 0
    longest = max(one.gaps, default=None)
    times = " | ".join("-" if value is None else f"{value * 1e3:.0f}" for value in (before, one.p99, bound, longest))
    return f"| {one.name} | {answers} + {one.answers} | {len(faults) + len(one.faults)} | {times} | {'yes' if good else 'no'} |", good


def _of_the_server(watch: Watch, memory: int, lags: float | None, log_bytes: int, alive: bool) -> list[str]:
    """What the server's own figures say."""
    callback = "not measured by this server"
    lag = "not measured by this server" if lags is None else f"99 % of timers were late by at most {lags * 1e3:g} ms"
    most = max(watch.memories)
    if watch.longest_callback is not None:
        callback = f"{watch.longest_callback[0] * 1e3:.0f} ms of CPU ({watch.longest_callback[1] or 'none above 5 ms'})"
    return [
        f"- the event loop's longest callback: {callback}; at most {CALLBACK * 1e3:g} ms are allowed",
        f"- its lag: {lag}; at most {LAG * 1e3:g} ms are allowed",
        f"- looks at `/metrics` without an answer in 30 s: {watch.silent}; none is allowed",
        f"- memory of server and engine: {memory} MiB alone, at most {most} MiB beside them; at most {MEMORY} MiB are allowed",
        f"- memory at the end of each tenth of the time: {', '.join(map(str, _tenths(watch.memories)))} MiB",
        f"- log: {log_bytes / 1e6:.1f} MB; the server {'ran on' if alive else 'ENDED'}",
    ]


def _tenths(values: list[int]) -> list[int]:
    return [values[(len(values) * tenth - 1) // 10] for tenth in range(1, 11)] if len(values) >= 10 else values


def _words(held: Held) -> str:
    return f"{held.descriptors} descriptors, {held.threads} threads, {held.requests} requests"


def _mean_step(before: tuple[float, float], after: tuple[float, float]) -> float:
    return (after[1] - before[1]) / max(1.0, after[0] - before[0])


def _versions() -> str:
    import chairlift

    revision = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    return f"Chairlift {chairlift.__version__}, commit {revision or 'unknown'}"


def main() -> int:
    """Runs it, writes the result, and returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3600.0, help="duration beside the hostile tenants (default: 3600)")
    parser.add_argument("--pause", type=float, default=0.05, help="seconds between two requests of a tenant's thread (default: 0.05)")
    parser.add_argument("--out", type=Path, default=RESULTS / "soak.md", help="where the result is written")
    args = parser.parse_args()
    lines, kept = soak(args.seconds, args.pause)
    args.out.write_text("\n".join(lines))
    print("\n".join(lines))
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
