"""The engine for asyncio programs: it runs in a child process, and every request is an async iterator."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Self

from chairlift import errors
from chairlift.checkpoint.locate import locate
from chairlift.config import EngineConfig, engine_config
from chairlift.engine import frames
from chairlift.engine.exit_watch import ExitWatch
from chairlift.engine.frames import (
    Abort,
    Add,
    Alive,
    BadFrame,
    Config,
    Explain,
    Explained,
    Fatal,
    Frame,
    Phase,
    Ready,
    Rejected,
    Snapshot,
    SnapshotRequest,
    Step,
    Stop,
)
from chairlift.engine.heartbeat import Heartbeat
from chairlift.engine.prompt import Prompt, text_or_ids
from chairlift.engine.request import deliver, spelled, validate
from chairlift.engine.stream import Stream
from chairlift.engine.table import log_decisions, warn_of_short_context
from chairlift.errors import ChairliftError, DeadlineMissed, EngineClosed, EngineDead, InvalidRequest
from chairlift.outputs import RequestOutput, Timeline
from chairlift.sampling import MAX_SEQUENCES, SamplingParams
from chairlift.scheduling import Scheduling
from chairlift.tokenizer import Tokenizer

log = logging.getLogger("chairlift")

STOP_SECONDS = 5.0
"""How long the engine gets to end by itself before it is killed."""
REMEMBERED = 10_000
"""How many requests can be asked about by the ids that their callers gave them; the engine remembers as many sequences that ended."""


class AsyncEngine:
    """An engine in a child process, for one event loop.

    `settings` are the fields of `EngineConfig`. Use it with `async with`, or call `start` and `close`.
    """

    tokenizer: Tokenizer
    """Set by `start`."""
    facts: dict[str, Any]
    """The engine's limits and the model's; empty until it is ready, and the former ones while it starts again."""

    _command: ClassVar[tuple[str, ...]] = ("-m", "chairlift.engine.process")

    def __init__(self, config: EngineConfig | None = None, **settings: Any) -> None:
        self.config = engine_config("AsyncEngine", settings, config)
        self.facts = {}
        self._stats: dict[str, Any] = {}
        self.on_end: Callable[[], None] | None = None
        """Called as soon as an engine that was ready is known to have ended by itself, before its requests hear of that."""
        self._tags = itertools.count(1, MAX_SEQUENCES)  # a request's sequences are numbered on from its tag
        self._remembered: dict[str, range] = {}
        self._questions = itertools.count(1)
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._streams: dict[int, Stream] = {}
        self._phases: dict[str, float] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._reading: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None
        self._journals = itertools.count()
        self._death: EngineDead | None = EngineDead("the engine has not been started")
        self._started = False
        self._ended = asyncio.Event()

    @property
    def alive(self) -> bool:
        """Whether the engine's process is there, starting or ready."""
        return self._death is None

    @property
    def ready(self) -> bool:
        """Whether requests are taken."""
        return self.alive and self._started

    async def start(self, since: float | None = None) -> None:
        """Starts the process and returns when the model is ready, with a line in the log for each phase.

        `since` (of `time.perf_counter`) is where the reported time begins, if not here. Raises what stopped it:
        ModelNotFound, UnsupportedModel, OutOfMemory, EngineDead.
        """
        began = time.perf_counter() if since is None else since
        if self._process is not None:
            raise RuntimeError("the engine has been started already; close it first")
        self._stats, self._phases, self._remembered, self._started = {}, {}, {}, False
        self._is_ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._pulse = Heartbeat(self._kill)
        self._exit_watch = ExitWatch(asyncio.get_running_loop(), self._process_exits)
        # First of all, since importing torch is most of the wait: the model is looked for meanwhile.
        sock = self._spawn()
        self._ended.clear()
        try:
            self._reader, self._writer = await asyncio.open_connection(sock=sock)
            self._reading = asyncio.create_task(self._read())
            directory = await asyncio.to_thread(locate, self.config.model, self.config.revision, self.config.cache_dir)
            self._write(Config(dataclasses.asdict(dataclasses.replace(self.config, model=str(directory), journal=self._next_journal()))))
            tokenizer = asyncio.to_thread(Tokenizer, directory, self.config.tokenizer)
            self.tokenizer, _ = await asyncio.gather(tokenizer, self._is_ready)
        except BaseException:
            await self.close()
            raise
        self.facts["model"] = self.config.model
        self._started = True
        self._watching = asyncio.create_task(self._pulse.watch())
        self._log_start(time.perf_counter() - began)

    async def close(self) -> None:
        """Ends the engine; open requests raise EngineClosed. May be called at any time, and again."""
        process, self._process = self._process, None
        if process is None:
            return
        self._fail(EngineClosed("the engine was closed"))
        reading, self._reading = self._reading, None
        try:
            if self._stats:
                self._write(Stop())
            else:
                process.kill()  # it is still importing or loading, and would hear nothing until that is done
            await asyncio.to_thread(process.wait, STOP_SECONDS)
        except subprocess.TimeoutExpired:
            log.warning("the engine did not stop within %.0f s: killing it", STOP_SECONDS)
        finally:
            process.kill()  # it ignores SIGTERM, which is its parent's business
            process.wait()
            if reading is not None:
                reading.cancel()
                self._writer.close()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    async def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a prompt, without holding up the event loop."""
        return await asyncio.to_thread(self.tokenizer.encode, text, add_special_tokens=add_special_tokens)

    def validate(self, prompt_token_ids: list[int], params: SamplingParams) -> SamplingParams:
        """The parameters with `max_tokens` filled in; raises InvalidRequest for what the model can't take."""
        return validate(prompt_token_ids, params, self.facts)

    def default_params(self, **settings: Any) -> SamplingParams:
        """Sampling settings as the checkpoint recommends them (`--generation-config`), with `settings` above them."""
        return SamplingParams(**{**self.facts.get("default_sampling", {}), **settings})

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        scheduling: Scheduling | None = None,
        *,
        request_id: str | None = None,
        on_start: Callable[[], None] | None = None,
        spent: Mapping[str, float] | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Runs one request; yields what is new of its answers, by `index`, and `finish_reason` with the last of each.

        Where only the `n` best are kept, they come whole at the end. Leaving the iterator early aborts the request: at once when it
        is closed or cancelled, so wrap it in `contextlib.aclosing` where the loop may end before the request does. `request_id` is for
        `explain`; `on_start` is called once, when the engine begins the first answer; `spent` has the states of the request's timeline
        before this call, with their seconds: its times and deadlines count from there. Raises InvalidRequest or QueueFull before
        anything, and RequestFailed, OutOfMemory, DeadlineMissed or EngineDead at any time.
        """
        called = time.monotonic_ns() // 1000
        before = {state: int(seconds * 1e6) for state, seconds in (spent or {}).items()}
        self._check_alive()
        given = text_or_ids(prompt)
        prompt_token_ids = await self.encode(given) if isinstance(given, str) else given
        params, scheduling = self.default_params() if params is None else params, scheduling or Scheduling()
        for name, one, kind in (("params", params, SamplingParams), ("scheduling", scheduling, Scheduling)):
            if not isinstance(one, kind):
                raise InvalidRequest(f"{name} must be {kind.__name__}, got {one!r:.50}", param=name)
        if params.bad_words:
            params = await asyncio.to_thread(spelled, params, self.tokenizer)
        params = self.validate(prompt_token_ids, params)
        stream = Stream(self.tokenizer, next(self._tags), prompt_token_ids, params, (called - sum(before.values())) / 1e6)
        stream.on_start = on_start
        self._check_alive()
        if request_id is not None:
            self._remember(request_id, stream.tags)
        self._streams.update(dict.fromkeys(stream.tags, stream))
        missed = False
        try:
            packed = frames.pack_fields(params), frames.pack_fields(scheduling)
            submitted = time.monotonic_ns() // 1000
            before["tokenize"] = before.get("tokenize", 0) + submitted - called
            self._write(Add(stream.tags.start, frames.pack_tokens(prompt_token_ids), *packed, submitted, before))
            with contextlib.suppress(ConnectionError):  # the stream hears of it, in better words
                await self._writer.drain()
            while not stream.over:
                outputs = await stream.next()
                if stream.some_over:
                    self._leave(stream.finished(), stopped=True)
                for output in outputs:
                    if output.finish_reason == "deadline":
                        missed, output.finish_reason = True, None
                    if output.finish_reason is not None or output.token_ids or output.text:
                        yield output
        finally:
            self._leave(stream.tags)
        if missed:
            raise DeadlineMissed(
                f"the request was dropped after {stream.num_tokens} tokens of output, since it missed its deadline or would surely have "
                "missed it: allow more time, or ask for fewer tokens",
                prompt_tokens=len(prompt_token_ids),
                completion_tokens=stream.num_tokens,
            )

    async def explain(self, request_id: str) -> list[Timeline]:
        """What became of a request's time, one ledger a sequence of it, also while it runs; empty for one that is not remembered."""
        self._check_alive()
        return await self.explain_sequences(self._remembered.get(request_id, ()))

    async def explain_sequences(self, tags: Sequence[int]) -> list[Timeline]:
        """The same by the engine's numbers of sequences; those that are not remembered are left out."""
        found: list[Timeline] = await self._ask(lambda ask: Explain(ask, list(tags))) if tags else []
        return found

    async def look(self) -> dict[str, Any]:
        """The engine's rows, queue, blocks and newest steps (see `Scheduler.snapshot`), with `names`: (tag, request id) of those there."""
        snapshot: dict[str, Any] = await self._ask(SnapshotRequest)
        seen = {one["tag"] for one in [*snapshot["running"], *snapshot["waiting"]]}
        return snapshot | {"names": [(tag, name) for name, tags in self._remembered.items() for tag in tags if tag in seen]}

    async def ended(self) -> None:
        """Returns when the engine has ended, however it came to that."""
        await self._ended.wait()

    @property
    def stuck(self) -> tuple[str, float] | None:
        """The stage in which the engine has been stuck, and for how many seconds; None while it gets on. See `Heartbeat.stuck`."""
        return self._pulse.stuck if self.alive else None

    def stats(self) -> dict[str, Any]:
        """The newest counters from the engine, a fraction of a second old while it works; empty before it is ready."""
        return self._stats

    async def _ask(self, question: Callable[[int], Frame]) -> Any:
        """What the engine answers to the question that carries a number."""
        self._check_alive()
        ask = next(self._questions)
        self._answers[ask] = asyncio.get_running_loop().create_future()
        try:
            self._write(question(ask))
            return await self._answers[ask]
        finally:
            del self._answers[ask]

    def _answer(self, ask: int, answer: Any) -> None:
        """Hands an answer to whoever asked, unless nobody waits any more."""
        if (asking := self._answers.get(ask)) is not None and not asking.done():
            asking.set_result(answer)

    def _leave(self, tags: Iterable[int], *, stopped: bool = False) -> None:
        """Forgets sequences, and has the engine do so with those that still run there; `stopped` if a stop string was found."""
        left = [tag for tag in tags if self._streams.pop(tag, None) is not None]
        if left and self.alive:
            self._write(Abort(left, stopped))

    def _remember(self, request_id: str, tags: range) -> None:
        self._remembered.pop(request_id, None)  # the newest come last
        self._remembered[request_id] = tags
        if len(self._remembered) > REMEMBERED:
            del self._remembered[next(iter(self._remembered))]

    def _check_alive(self) -> None:
        if self._death is not None:
            raise EngineDead(str(self._death))
        if not self._started:
            raise EngineDead("the engine is not ready yet")

    def _spawn(self) -> socket.socket:
        """Starts the child and returns the parent's end of their socket.

        To be called in the event loop's own thread: the child is killed when the thread that started it ends.
        """
        ours, theirs = socket.socketpair()
        # The child finds modules where this process does, and not in its working directory.
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        command = [sys.executable, "-P", *self._command, str(theirs.fileno()), self.config.load_format]
        # Ctrl-C in a terminal reaches the child too, which has no handler before its imports are done: it inherits the blocked signal.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            with theirs:
                self._process = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], env={**os.environ, "PYTHONPATH": path}
                )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        self._death = None
        return ours

    def _kill(self) -> None:
        if self._process is not None:
            self._process.kill()

    def _next_journal(self) -> str | None:
        """Where an engine records; one that is started again must not write over what the one that died left."""
        number = next(self._journals)
        return f"{self.config.journal}.{number}" if self.config.journal and number else self.config.journal

    def _write(self, frame: Frame) -> None:
        self._writer.write(frames.encode(frame))

    async def _read(self) -> None:
        """Takes frames from the engine until its end."""
        death: ChairliftError | None = None
        try:
            while (frame := await frames.read(self._reader)) is not None:
                match frame:
                    case Step():
                        if frame.stats:
                            self._stats = {**self._stats, **frame.stats}
                        if not self._is_ready.done():  # the first one says that the engine waits for work
                            self._is_ready.set_result(None)
                        for stream in deliver(frame, self._streams):
                            stream.wake()
                    case Rejected():
                        if (rejected := self._streams.get(frame.tag)) is not None:
                            for tag in rejected.tags:
                                self._streams.pop(tag, None)
                            rejected.reject(frame)
                    case Explained():
                        self._answer(frame.ask, [Timeline.read(ledger) for ledger in frame.ledgers])
                    case Snapshot():
                        self._answer(frame.ask, frame.snapshot)
                    case Alive():
                        self._pulse.hear(frame)
                    case Phase():
                        log.info("phase %s %.2f s", frame.name, frame.seconds)
                        self._phases[frame.name] = frame.seconds
                    case Ready():
                        self.facts = frame.facts
                        self._exit_watch.watch(frame.sentinels)
                    case Fatal():
                        death = _death(frame)
                    case _:
                        raise BadFrame(f"an engine sends no such frame: {frame!r:.100}")
        except OSError:
            pass  # a reset is an end too
        except Exception as error:  # without a reader nothing moves: whatever it is, it is the end
            log.exception("reading from the engine failed")
            death = EngineDead(f"the connection to the engine's process broke: {type(error).__name__}: {error}")
        process = self._process
        if process is None:  # closed on purpose
            return
        self._process_exits()
        if death is None:
            # The socket closes a little before the process is gone.
            with contextlib.suppress(subprocess.TimeoutExpired):
                await asyncio.to_thread(process.wait, 1.0)
            death = EngineDead(f"the engine's process ended unexpectedly ({_exit_words(process.returncode)})")
        process.kill()
        if self._started:  # else `start` raises it
            log.error("engine dead: %s", death)
        self._fail(death)

    def _process_exits(self) -> None:
        """Takes no more requests. Those that are open end when the socket has, and it is known what the process died of."""
        if self._process is not None and self._death is None:
            self._death = EngineDead("the engine's process has ended")
            if self._started and self.on_end is not None:
                self.on_end()

    def _fail(self, death: ChairliftError) -> None:
        """Marks the engine as dead, and ends every open request and question."""
        self._death = death if isinstance(death, EngineDead) else EngineDead(str(death))
        for stream in self._streams.values():
            stream.fail(type(self._death)(str(death)))
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(type(self._death)(str(death)))
        self._streams.clear()
        self._ended.set()
        self._exit_watch.close()
        if self._watching is not None:
            self._watching.cancel()
        if not self._is_ready.done():
            self._is_ready.set_exception(death)
            self._is_ready.exception()  # so that asyncio does not complain where nobody waits for it

    def _log_start(self, total: float) -> None:
        """Says what was decided, and where the time went: what the engine did not name was starting its process and talking to it."""
        parts = {name: round(seconds, 2) for name, seconds in self._phases.items()}
        parts = {"process": round(total, 2) - sum(parts.values()), **parts}
        log.info("phase process %.2f s", parts["process"])
        log_decisions(self.facts["model"], self.facts["decisions"])
        warn_of_short_context(self.config, self.facts)
        log.info("ready in %.2f s: %s", total, " + ".join(f"{name} {seconds:.2f}" for name, seconds in parts.items()))


def _death(frame: Fatal) -> ChairliftError:
    """The engine's last words as the exception they were, if it is one of ours."""
    kind = getattr(errors, frame.error, None)
    if isinstance(kind, type) and issubclass(kind, ChairliftError):
        return kind(frame.message)
    return EngineDead(f"the engine's process ended: {frame.error}: {frame.message}")


def _exit_words(code: int | None) -> str:
    if code is None:
        return "it does not answer"
    return f"killed by signal {-code}" if code < 0 else f"exit status {code}"
