"""An engine in this process, and requests that callers without an event loop wait for."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import signal
import sys
import threading
import time
import types
import weakref
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Generator, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from chairlift.engine.engine_client import EngineClient
from chairlift.engine.frames import Abort, Frame, Rejected, StepOutputs
from chairlift.engine.held_sequences import COMPUTE, LEASE, HeldSequences
from chairlift.engine.hosted_engine import HostedEngine
from chairlift.engine.live_sequence import LiveSequence
from chairlift.engine.stream import Stream
from chairlift.engine.validation import encode_bad_words
from chairlift.errors import EngineClosed, EngineDead
from chairlift.sampling import MAX_SEQUENCES, SamplingParams
from chairlift.scheduling import Scheduling

if TYPE_CHECKING:
    from types import FrameType

    from chairlift.config import EngineConfig
    from chairlift.engine.arguments import Prompt
    from chairlift.engine.engine import Engine
    from chairlift.engine.engine_info import EngineInfo
    from chairlift.engine.engine_request import EngineRequest
    from chairlift.outputs import RequestOutput
    from chairlift.tokenizer import Tokenizer

SAVE_SECONDS = 3.0
"""Most seconds that `close` spends on writing KV to `--prefix-cache-dir`."""
LONGEST_SLEEP = 0.1
"""Maximum seconds between checks for an interrupt while the engine waits."""

T = TypeVar("T")


class LocalEngine(EngineClient):
    """The client of an engine in this process. Its coroutines need no event loop: `wait` steps the engine until they have ended.

    Threads may share it: their requests run in the same batches.
    """

    def __init__(self, config: EngineConfig, engine: Engine, tokenizer: Tokenizer, info: EngineInfo) -> None:
        super().__init__(config, itertools.count(1, MAX_SEQUENCES), HeldSequences)
        self._info, self._tokenizer = info, tokenizer
        self._engine: Engine | None = engine
        self._hosted = HostedEngine(engine, self._on_frame, _put_nothing)
        self._frames: deque[Frame | EngineRequest] = deque()  # to the engine; each Abort has sequences to leave
        self._lock = threading.Lock()  # held for each use of the engine
        self._delivering = threading.Lock()  # held while tokens are given to streams or taken from one
        self.forked = False
        """Whether this is a copy in a child process, which has none of the engine's threads. Its locks may be held for ever."""
        _engines.add(self)

    @property
    def engine(self) -> Engine:
        """The engine. Raises EngineClosed after `close` and after a fork."""
        self.check_process()
        if self._engine is None:
            raise EngineClosed("the LLM is closed: make a new one")
        return self._engine

    def close(self) -> None:
        """Ends the engine and frees its memory. Open requests raise EngineClosed. May be called repeatedly. Does nothing after a fork."""
        if self.forked:
            return
        with self._lock:
            engine, self._engine = self._engine, None
            streams, self._streams = set(self._streams.values()), {}
        for stream in streams:
            stream.fail(EngineClosed("the LLM is closed: make a new one"))
        if engine is not None:
            engine.save_prefixes(SAVE_SECONDS)
            self._hosted.close()

    def check_ready(self) -> None:
        """Raises EngineClosed after `close` and after a fork."""
        _ = self.engine

    def check_process(self) -> None:
        """Raises EngineClosed after a fork."""
        if self.forked:
            raise EngineClosed("the LLM was made in another process: make a new one after the fork")

    def tell(self, frame: Frame) -> None:
        """Sends a frame to the engine, which gets it between two steps. Does nothing after `close`."""
        if self._engine is not None:
            self._frames.append(frame)
            self._handle_if_free()

    @contextlib.contextmanager
    def between_steps(self) -> Iterator[Engine]:
        """Yields the engine between two steps."""
        self.check_process()
        with self._lock:
            self._handle_frames()
            yield self.engine

    async def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Tokenizes a prompt."""
        return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def hold(self, prompt_token_ids: Sequence[int], scheduling: Scheduling, lease: float = LEASE) -> LiveSequence:
        """Returns a prompt as a live sequence, which is not computed yet. Raises InvalidRequest, TooManySequences and EngineClosed."""
        self.check_ready()
        self.validate(prompt_token_ids, COMPUTE)
        self._sequences.expire()
        return LiveSequence(self, self._sequences, prompt_token_ids, scheduling, lease)

    def make(self, prompt: Prompt, params: SamplingParams, scheduling: Scheduling, *, whole: bool = False) -> Stream:
        """Makes a request: see `prepare`, which does not wait here."""
        try:
            self.prepare(prompt, params, scheduling, whole=whole).send(None)
        except StopIteration as end:
            stream: Stream = end.value
            return stream
        raise AssertionError("`prepare` waits")

    def wait(self, coroutine: Coroutine[Any, None, T]) -> T:
        """Steps the engine until a coroutine of this client has ended. Returns its result."""
        return self.wait_all([coroutine])[0]

    def wait_all(
        self,
        coroutines: Sequence[Coroutine[Any, None, T]],
        on_step: Callable[[int], None] = lambda tokens: None,
        on_end: Callable[[int, T], None] = lambda index, result: None,
        on_error: Callable[[int, BaseException], None] = lambda index, error: None,
    ) -> list[T]:
        """Steps the engine until all coroutines have ended, which run side by side. Returns their results in order.

        `on_step` is called after each step with its number of tokens, `on_end` with the index and the result of a coroutine that has ended,
        and `on_error` with the index and the error of one that has failed, which ends all.
        """
        results: dict[int, T] = {}
        waiting: dict[_Stream, int] = {}
        ready: deque[_Stream] = deque()
        running = set(range(len(coroutines)))

        def resume(index: int) -> None:
            try:
                stream = coroutines[index].send(None)
            except BaseException as end:
                running.remove(index)
                if not isinstance(end, StopIteration):
                    on_error(index, end)
                    raise
                results[index] = end.value
                on_end(index, end.value)
                return
            waiting[stream] = index
            stream.wait_in(ready)

        try:
            self.check_process()
            with _interrupts_held() as interrupted:
                for index in range(len(coroutines)):
                    if not interrupted.is_set():
                        resume(index)
                while running and not interrupted.is_set():
                    tokens = self._step(ready)
                    while ready:
                        if (waiting_index := waiting.pop(ready.popleft(), None)) is not None:
                            resume(waiting_index)
                    on_step(tokens)
                if interrupted.is_set():
                    raise KeyboardInterrupt
        finally:
            for index in running:
                with contextlib.suppress(_Abandoned):
                    coroutines[index].throw(_Abandoned())
        return [results[index] for index in range(len(coroutines))]

    def iterate(self, outputs: AsyncGenerator[T, None]) -> Generator[T, None, None]:
        """Yields what an asynchronous generator of this client yields, and closes it."""
        try:
            with contextlib.suppress(StopAsyncIteration):
                while True:
                    yield self.wait(_coroutine(anext(outputs)))
        finally:
            with contextlib.suppress(StopIteration):
                outputs.aclose().send(None)

    async def _encode_bad_words(self, params: SamplingParams) -> SamplingParams:
        return encode_bad_words(params, self.tokenizer)

    def _seeded(self, params: SamplingParams) -> SamplingParams:
        """Leaves the seed to the engine, because no other engine goes on with the request."""
        return params

    def _stream(self, prompt_token_ids: Sequence[int], params: SamplingParams, scheduling: Scheduling, **rest: Any) -> Stream:
        stream = _Stream(self.tokenizer, next(self._tags), prompt_token_ids, params, scheduling, **rest)
        stream.delivering = self._delivering
        return stream

    def _deliver(self, step: StepOutputs) -> None:
        with self._delivering:
            super()._deliver(step)

    async def _add(self, request: EngineRequest) -> None:
        self._frames.append(request)
        self._handle_if_free()

    def _abort(self, frame: Abort) -> None:
        self._hosted.handle(frame)

    def _leave(self, tags: Iterable[int], *, stopped: bool = False) -> None:
        """Aborts sequences that have not ended; `stopped` if a stop string was found.

        The garbage collector may close a stream while this thread holds the lock. The next step then aborts its request.
        """
        if present := [tag for tag in tags if tag in self._streams]:
            self._frames.append(Abort(present, stopped))  # behind their request, if another thread's step keeps that from the engine
            self._handle_if_free()

    def _step(self, ready: deque[_Stream]) -> int:
        """Runs a step, unless `ready` has a request already, maybe from another thread's step. Returns the number of new tokens."""
        self._sequences.expire()
        with self._lock:
            self._handle_frames()
            if ready:
                return 0
            report = self.engine.step()
            if report is not None:
                self._deliver(report)
                return len(report.finishes)
            seconds = self.engine.wakes_in()
        if seconds is None:
            raise EngineDead(f"the engine found nothing to run, with {len(self._streams)} requests open")
        time.sleep(min(seconds, LONGEST_SLEEP))
        return 0

    def _handle_if_free(self) -> None:
        """Handles frames now, unless the engine is in use: its user does that before the next step."""
        if not self.forked and self._lock.acquire(blocking=False):
            try:
                self._handle_frames()
            finally:
                self._lock.release()

    def _handle_frames(self) -> None:
        """Passes frames to the engine. It waits until a request is prepared, so that none runs before others are rejected."""
        if self._engine is None:
            return
        while self._frames:
            match frame := self._frames.popleft():
                case Abort(tags, stopped):
                    super()._leave(tags, stopped=stopped)
                case _:
                    self._hosted.handle(frame)
        while not self._streams and self._engine.has_work:
            self._engine.step()  # a step may be in flight although no request waits for it

    def _on_frame(self, frame: Frame) -> None:
        assert isinstance(frame, Rejected)  # nothing else is asked for
        self._reject(frame)


_engines: weakref.WeakSet[LocalEngine] = weakref.WeakSet()


def _disown() -> None:
    """Marks all engines in a forked process. Their memory is never freed there: that would wait for threads of the other process."""
    for engine in _engines:
        engine.forked = True
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(engine))


os.register_at_fork(after_in_child=_disown)


class _Stream(Stream):
    """A request whose reader waits in `LocalEngine.wait_all`."""

    raises = False
    max_taken = max_taken_singly = sys.maxsize
    delivering: threading.Lock
    _ready: deque[_Stream] | None = None

    def take(self, most: int = sys.maxsize) -> list[RequestOutput]:
        """See `Stream.take`. Another thread's step may bring tokens, before or after it."""
        with self.delivering:
            return super().take(most)

    def wait_in(self, ready: deque[_Stream]) -> None:
        """Appends the stream to `ready` when it has news, which may be now."""
        self._ready = ready
        if self._news:  # since it was read, because another thread ran a step
            self._wake_reader()

    async def _give_way(self) -> None:
        """Does nothing: a reader takes all tokens at once, so that only another thread's step can have left some."""

    def _wait(self) -> Awaitable[None]:
        return _pause(self)

    def _wake_reader(self) -> None:
        ready, self._ready = self._ready, None
        if ready is not None:
            ready.append(self)


class _Abandoned(BaseException):
    """Ends a coroutine whose caller does not wait for it any more. GeneratorExit would not reach the generators that it reads."""


def _put_nothing(done: object) -> None:
    raise AssertionError(f"a request or an adapter of this process was prepared by another thread: {done!r:.100}")


@types.coroutine
def _pause(stream: _Stream) -> Generator[_Stream, None, None]:
    """Suspends the coroutine until its stream has news."""
    yield stream


async def _coroutine(awaitable: Awaitable[T]) -> T:
    return await awaitable


@contextlib.contextmanager
def _interrupts_held() -> Iterator[threading.Event]:
    """Sets the event on Ctrl-C instead of raising, so that every step completes. A second Ctrl-C raises as usual."""
    pressed = threading.Event()
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield pressed  # another thread or the caller's own handler receives Ctrl-C
        return

    def hold(number: int, frame: FrameType | None) -> None:
        if pressed.is_set():
            raise KeyboardInterrupt
        pressed.set()

    signal.signal(signal.SIGINT, hold)
    try:
        yield pressed
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
