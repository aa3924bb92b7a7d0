"""The engine for scripts and notebooks. It runs in the caller's process."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeGuard, TypeVar

from chairlift.checkpoint.locate import locate
from chairlift.checkpoint.model_name import shown
from chairlift.config import DEFAULT_MODEL
from chairlift.engine.arguments import Prompt, document_settings, engine_config, listed, text_or_ids
from chairlift.engine.engine_info import log_decisions, warn_of_short_context
from chairlift.engine.held_sequences import COMPUTE, LEASE, HeldSequences
from chairlift.engine.live_sequence import LiveSequence
from chairlift.engine.request import (
    Request,
    check_dimensions,
    check_scores,
    default_params,
    deliver,
    encode_bad_words,
    joined,
    relevance,
    validate,
)
from chairlift.errors import EngineClosed, EngineDead, InvalidRequest, RequestFailed
from chairlift.outputs import RequestOutput
from chairlift.sampling import EMBED, MAX_SEQUENCES, SamplingParams
from chairlift.scheduling import Scheduling
from chairlift.tokenizer import Tokenizer

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from rich.progress import Progress

    from chairlift.engine.loop import Engine

log = logging.getLogger("chairlift")

SAVE_SECONDS = 3.0
"""Most seconds that `close` spends on writing KV to `--prefix-cache-dir`."""
LONG_WORK = 1.0
"""Seconds of work after which the progress bar appears."""

LONGEST_SLEEP = 0.1
"""Maximum seconds between checks for an interrupt while the engine waits."""

Result = TypeVar("Result")

Message = Mapping[str, Any]


@document_settings
class LLM:
    """A model in this process: no child process, no server, no `__main__` guard.

    Use it with `with`, or call `close`. Threads may share it: their requests run in the same batches. Raises ModelNotFound or
    UnsupportedModel, InvalidSetting for a setting's value, or TypeError for an unknown setting.
    """

    def __init__(self, model: str | os.PathLike[str] = DEFAULT_MODEL, **settings: Any) -> None:
        from chairlift.engine.loop import Engine  # imports torch; `from chairlift import LLM` stays fast

        self.config = engine_config("LLM", {"model": model, **settings})
        model = self.config.model
        directory = locate(model, self.config.revision, self.config.cache_dir)
        self.tokenizer = Tokenizer(directory, self.config.tokenizer, self.config.chat_template)
        self._engine: Engine | None = Engine(dataclasses.replace(self.config, model=str(directory)), _log_phase)
        self.info = dataclasses.replace(self._engine.info, model=shown(model))
        log_decisions(self.info)
        warn_of_short_context(self.config, self.info)
        self._tags = itertools.count(1, MAX_SEQUENCES)  # a request's sequences have consecutive tags
        self._requests: dict[int, _Request] = {}  # by tag, those that have not ended
        self._unused: deque[tuple[int, bool]] = deque()  # tags to abort, and whether a stop string ended them
        self._held = HeldSequences(lambda: self.info)
        self._lock = threading.Lock()  # held for each use of the engine and of `_held`

    @property
    def engine(self) -> Engine:
        """The engine, for its `stats`. Raises EngineClosed after `close`."""
        if self._engine is None:
            raise EngineClosed("the LLM is closed: make a new one")
        return self._engine

    def close(self) -> None:
        """Ends the engine and frees the model's memory. Open streams raise EngineClosed. May be called repeatedly."""
        with self._lock:
            engine, self._engine = self._engine, None
            self._requests.clear()
        if engine is not None:
            engine.save_prefixes(SAVE_SECONDS)
            engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def open(self, prompt: Prompt, *, scheduling: Scheduling | None = None, lease: float = LEASE) -> LiveSequence:
        """Computes a prompt and returns it as a live sequence, which can be forked, appended to and generated from.

        It is dropped if it is not used for `lease` seconds. Raises InvalidRequest, QueueFull, or TooManySequences for the tenant of
        `scheduling`.
        """
        given, scheduling = text_or_ids(prompt), scheduling or Scheduling()
        tokens = self.tokenizer.encode(given) if isinstance(given, str) else given
        validate(tokens, COMPUTE, self.info)
        sequence = self._call(lambda engine: LiveSequence(self, self._call, self._held, tokens, scheduling, lease))
        try:
            sequence.compute()
        except BaseException:
            sequence.drop()
            raise
        return sequence

    def compute(self, sequence: LiveSequence, prompt: list[int]) -> None:
        """Computes the tokens of a live sequence, of which the engine may hold some already. For `LiveSequence`."""
        news: deque[_Request] = deque()
        params = validate(prompt, COMPUTE, self.info)
        request = _Request(self.tokenizer, next(self._tags), prompt, params, sequence.scheduling, news, sequence)
        (output,) = self._run([request], news, False)
        if output.finish_reason not in ("stop", "length"):
            raise RequestFailed(f"the sequence could not be computed: {output.finish_reason}")

    def abort(self, tag: int) -> None:
        """Ends a running sequence by its tag."""
        self._leave([tag])

    def generate(
        self,
        prompts: Prompt | LiveSequence | Iterable[Prompt | LiveSequence],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        scheduling: Scheduling | Sequence[Scheduling] | None = None,
        progress: bool | None = None,
    ) -> list[RequestOutput]:
        """Completes each prompt (see `Prompt`) or live sequence. Returns whole outputs in the order of the prompts, `n` for each.

        `params` and `scheduling` are one value for all prompts, or one per prompt; `params` defaults to `default_params`. `progress` shows
        or hides a bar; by default it appears on a terminal when the work takes over a second. Raises InvalidRequest, with the prompt's
        index, or QueueFull, before any prompt runs. A request that fails later has `finish_reason` "error", one that misses its deadline
        "deadline"; neither affects the others.
        """
        many = [prompts] if isinstance(prompts, LiveSequence) else listed(prompts)
        each = _one_each("params", SamplingParams, self.default_params() if params is None else params, len(many))
        treated = _one_each("scheduling", Scheduling, scheduling, len(many))
        news: deque[_Request] = deque()
        requests = []
        with contextlib.ExitStack() as busy:
            for index, (prompt, one, own) in enumerate(zip(many, each, treated, strict=True)):
                with _naming(index):
                    if isinstance(prompt, LiveSequence):
                        requests.append(self._continuation(prompt, busy.enter_context(prompt.generating()), one, own, news))
                    else:
                        requests.append(self._request(prompt, one, own, news))
            return self._run(requests, news, progress)

    def embed(
        self,
        texts: Prompt | Iterable[Prompt],
        *,
        dimensions: int | None = None,
        scheduling: Scheduling | Sequence[Scheduling] | None = None,
        progress: bool | None = None,
    ) -> NDArray[np.float32]:
        """Computes the embedding of each text (see `Prompt`): float32 [texts, dimensions], vectors of length 1.

        `dimensions` keeps the first numbers of each and scales them to length 1, for models that were trained for it. Other arguments and
        errors as in `generate`. Raises RequestFailed if a text gets no embedding: it missed its deadline, or its result is not finite.
        """
        import numpy as np

        check_dimensions(dimensions, self.info)
        embeddings = np.array(_embeddings(self.generate(texts, EMBED, scheduling=scheduling, progress=progress)), dtype=np.float32)
        embeddings = embeddings[:, :dimensions]
        return embeddings if dimensions is None else embeddings / np.linalg.norm(embeddings, axis=1, keepdims=True)

    def score(self, query: str, documents: Sequence[str]) -> list[float]:
        """Returns how relevant each document is to the query, computed by a classifier of pairs of texts (a cross-encoder).

        Raises InvalidRequest for another model, and otherwise as `embed`.
        """
        kind = check_scores(self.info)
        pairs = [self.tokenizer.encode_pair(query, document) for document in documents]
        params = [dataclasses.replace(EMBED, second_text=second) for _, second in pairs]
        numbers = _embeddings(self.generate([ids for ids, _ in pairs], params))
        return [relevance(number, kind) for (number,) in numbers]

    def stream(
        self, prompt: Prompt | LiveSequence, params: SamplingParams | None = None, *, scheduling: Scheduling | None = None
    ) -> Generator[RequestOutput, None, None]:
        """Completes one prompt or live sequence. Yields increments of its `n` outputs, by `index`; the last of each has a `finish_reason`.

        With `best_of`, the `n` best outputs are yielded whole at the end. Closing the generator, or leaving its loop, aborts the request.
        Several streams may be open: each runs while any of them is read. Errors as in `generate`.
        """
        one_params = _one_each("params", SamplingParams, self.default_params() if params is None else params, 1)
        treated = _one_each("scheduling", Scheduling, scheduling, 1)
        if isinstance(prompt, LiveSequence):
            return self._stream_live(prompt, one_params[0], treated[0])
        news: deque[_Request] = deque()
        return self._stream(self._request(prompt, one_params[0], treated[0], news), news)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        scheduling: Scheduling | Sequence[Scheduling] | None = None,
        progress: bool | None = None,
    ) -> list[RequestOutput]:
        """Answers one or several conversations, rendered with the model's chat template. Other arguments as in `generate`."""
        conversations: list[Any] = list(messages) if isinstance(messages, list | tuple) and not _is_conversation(messages) else [messages]
        prompts = []
        for index, conversation in enumerate(conversations):
            with _naming(index):
                prompts.append(self._render(conversation))
        return self.generate(prompts, params, scheduling=scheduling, progress=progress)

    def stream_chat(
        self, messages: Sequence[Message], params: SamplingParams | None = None, *, scheduling: Scheduling | None = None
    ) -> Generator[RequestOutput, None, None]:
        """Answers one conversation, rendered with the model's chat template, in increments as `stream` does."""
        return self.stream(self._render(messages), params, scheduling=scheduling)

    def load_lora_adapter(self, name: str, path: str | os.PathLike[str]) -> None:
        """Loads the LoRA adapter in the directory `path`, for requests with `SamplingParams(lora=name)`. Needs `enable_lora`.

        Raises InvalidRequest if the name is in use, InvalidSetting for its rank, and UnsupportedModel for unusable files.
        """
        adapter = self.engine.read_adapter(os.fspath(path))
        self._call(lambda engine: engine.load_adapter(name, adapter))

    def unload_lora_adapter(self, name: str) -> None:
        """Frees an adapter's memory. Raises InvalidRequest if it is not loaded, or while requests use it."""
        self._call(lambda engine: engine.unload_adapter(name))

    def default_params(self, **settings: Any) -> SamplingParams:
        """Returns the checkpoint's recommended sampling parameters (`--generation-config`), overridden by `settings`."""
        return default_params(self.info, settings)

    def _render(self, conversation: object) -> list[int]:
        if not _is_conversation(conversation):
            raise InvalidRequest("a conversation is a list of messages, each with `role` and `content`", param="messages")
        return self.tokenizer.chat([dict(message) for message in conversation])

    def _call(self, function: Callable[[Engine], Result]) -> Result:
        """Calls a function with the engine between two steps."""
        with self._lock:
            engine = self.engine
            self._held.expire(engine)
            return function(engine)

    def _continuation(
        self, sequence: LiveSequence, prompt: list[int], params: SamplingParams, scheduling: Scheduling, news: deque[_Request]
    ) -> _Request:
        """A request that continues a live sequence, with that one's scheduling parameters unless its caller gives others."""
        own = sequence.scheduling
        if scheduling == Scheduling():
            scheduling = own
        if (scheduling.tenant, scheduling.cache_salt) != (own.tenant, own.cache_salt):
            raise InvalidRequest("this live sequence belongs to another tenant or cache_salt", param="scheduling", code="not_owner")
        params = validate(prompt, encode_bad_words(sequence.params(params), self.tokenizer), self.info)
        return _Request(self.tokenizer, next(self._tags), prompt, params, scheduling, news, sequence)

    def _request(self, prompt: Prompt, params: SamplingParams, scheduling: Scheduling, news: deque[_Request]) -> _Request:
        given = text_or_ids(prompt)
        prompt_token_ids = self.tokenizer.encode(given) if isinstance(given, str) else given
        params = validate(prompt_token_ids, encode_bad_words(params, self.tokenizer), self.info)
        return _Request(self.tokenizer, next(self._tags), prompt_token_ids, params, scheduling, news)

    def _run(self, requests: list[_Request], news: deque[_Request], progress: bool | None) -> list[RequestOutput]:
        """Runs validated requests to their ends, or aborts them all."""
        outputs = {
            request.tags[choice]: RequestOutput("", [], request.prompt_token_ids, index=choice)
            for request in requests
            for choice in range(request.params.n)
        }
        open_requests = set(requests)
        with self._added(requests), _Bar(requests, progress) as bar, _interrupts_held() as interrupted:
            while open_requests:
                tokens = self._step(news)
                for request in open_requests:
                    request.check_dropped()
                for request in _drain(news):
                    # Text is decoded once at the end, unless stop strings must be matched.
                    if not request.params.stop and any(tag in self._requests for tag in request.tags):
                        continue
                    for part in request.take():
                        tag = request.tags[part.index]
                        outputs[tag] = joined(outputs[tag], part)
                    self._leave(request.finished(), stopped=True)
                    if request.over and request in open_requests:
                        open_requests.remove(request)
                        bar.end(request)
                bar.advance(tokens)
                if interrupted.is_set():
                    raise KeyboardInterrupt
        return list(outputs.values())

    def _stream_live(self, sequence: LiveSequence, params: SamplingParams, scheduling: Scheduling) -> Generator[RequestOutput, None, None]:
        news: deque[_Request] = deque()
        with sequence.generating() as prompt:
            yield from self._stream(self._continuation(sequence, prompt, params, scheduling, news), news)

    def _stream(self, request: _Request, news: deque[_Request]) -> Generator[RequestOutput, None, None]:
        with self._added([request]):
            while not request.over:
                with _interrupts_held() as interrupted:
                    self._step(news)
                if interrupted.is_set():
                    raise KeyboardInterrupt
                news.clear()
                request.check_dropped()
                parts = request.take()
                self._leave(request.finished(), stopped=True)
                for part in parts:
                    if part.finish_reason is not None or part.token_ids or part.text:
                        yield part

    @contextlib.contextmanager
    def _added(self, requests: list[_Request]) -> Iterator[None]:
        """Adds the requests to the engine and, at the end, aborts those that have not ended."""
        try:
            with self._lock:
                self._abort_unused()
                for index, request in enumerate(requests):
                    with _naming(index):
                        sent = request.begin()
                        self.engine.add(sent, stored=self.engine.read_prefix(sent))
                    self._requests.update(dict.fromkeys(request.tags, request))
            yield
        finally:
            self._leave(tag for request in requests for tag in request.tags)

    def _step(self, news: deque[_Request]) -> int:
        """Runs a step, unless `news` has a request already from another thread's step. Returns the number of new tokens."""
        with self._lock:
            self._abort_unused()
            if news:
                return 0
            self._held.expire(self.engine)
            report = self.engine.step()
            if report is not None:
                for request in deliver(report, self._requests):
                    request.news.append(request)
                return len(report.finishes)
            seconds = self.engine.wakes_in()
        if seconds is None:
            raise EngineDead(f"the engine found nothing to run, with {len(self._requests)} requests open")
        time.sleep(min(seconds, LONGEST_SLEEP))
        return 0

    def _leave(self, tags: Iterable[int], *, stopped: bool = False) -> None:
        """Aborts sequences that have not ended; `stopped` if a stop string was found.

        The garbage collector may close a stream while this thread holds the lock. The next step then aborts its request.
        """
        self._unused.extend((tag, stopped) for tag in tags if tag in self._requests)
        if self._unused and self._lock.acquire(blocking=False):
            try:
                self._abort_unused()
            finally:
                self._lock.release()

    def _abort_unused(self) -> None:
        for tag, stopped in _drain(self._unused):
            if self._requests.pop(tag, None) is not None and self._engine is not None:
                self._engine.abort(tag, stopped=stopped)
        while self._engine is not None and not self._requests and self._engine.has_work:
            self._engine.step()  # a step may be in flight although no request waits for it


class _Request(Request):
    """A request that is put into its caller's queue when it has new tokens."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        tag: int,
        prompt_token_ids: list[int],
        params: SamplingParams,
        scheduling: Scheduling,
        news: deque[_Request],
        sequence: LiveSequence | None = None,
    ) -> None:
        super().__init__(tokenizer, tag, prompt_token_ids, params, scheduling, sequence=sequence)
        self.news = news

    def check_dropped(self) -> None:
        """Raises SequenceDropped if its live sequence was dropped."""
        if self.sequence is not None:
            self.sequence.check_dropped()


class _Bar:
    """A progress bar that appears if the work takes long. Its total is the maximum number of tokens."""

    def __init__(self, requests: Sequence[Request], wanted: bool | None) -> None:
        self._requests = len(requests)
        self._most = sum(map(_most_tokens, requests))
        self._allowed = sys.stderr.isatty() if wanted is None else wanted
        self._patience = 0.0 if wanted else LONG_WORK
        self._began = time.monotonic()
        self._done = self._tokens = self._spared = 0
        self._progress: Progress | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._progress is not None:
            self._progress.stop()

    def advance(self, tokens: int) -> None:
        """Counts a step's tokens and updates the bar."""
        self._tokens += tokens
        seconds = time.monotonic() - self._began
        if not self._allowed or seconds < self._patience:
            return
        if self._progress is None:
            self._progress = _open_progress(self._most)
        note = f"{self._done}/{self._requests} requests, {self._tokens / max(seconds, 1e-9):.0f} tokens/s"
        self._progress.update(self._progress.task_ids[0], completed=self._tokens + self._spared, note=note)

    def end(self, request: Request) -> None:
        """Counts an ended request and the tokens that it did not use."""
        self._done += 1
        self._spared += _most_tokens(request) - request.num_tokens


Item = TypeVar("Item")


def _drain(queue: deque[Item]) -> Iterator[Item]:
    """Removes and yields the items of a queue."""
    while queue:
        yield queue.popleft()


def _embeddings(outputs: Sequence[RequestOutput]) -> list[Sequence[float]]:
    """Returns the numbers of each output. Raises RequestFailed if one has none."""
    if failed := [f"{index} ({output.finish_reason})" for index, output in enumerate(outputs) if output.embedding is None]:
        raise RequestFailed(f"texts without an embedding: {', '.join(failed)}")
    return [output.embedding for output in outputs if output.embedding is not None]


def _most_tokens(request: Request) -> int:
    return (request.params.max_tokens or 0) * request.params.num_sequences


def _open_progress(total: int) -> Progress:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("generating"), BarColumn(), TextColumn("{task.fields[note]}"), TimeRemainingColumn())
    progress = Progress(*columns, console=Console(stderr=True))
    progress.add_task("", total=total, note="")
    progress.start()
    return progress


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


@contextlib.contextmanager
def _naming(index: int) -> Iterator[None]:
    """Adds the prompt's index to an error."""
    try:
        yield
    except InvalidRequest as error:
        error.args = (f"prompt {index}: {error}",)
        raise


T = TypeVar("T", SamplingParams, Scheduling)


def _one_each(name: str, kind: type[T], given: T | Sequence[T] | None, count: int) -> list[T]:
    """Returns the value for each of `count` prompts: one for all, one per prompt, or the default."""
    each: list[Any] = list(given) if isinstance(given, list | tuple) else [kind() if given is None else given] * count
    for one in each:
        if not isinstance(one, kind):
            hint = f": write {kind.__name__}(**{name})" if isinstance(one, Mapping) else ""
            raise InvalidRequest(f"{name} must be {kind.__name__}, got {one!r:.50}{hint}", param=name)
    if len(each) != count:
        raise InvalidRequest(f"{count} prompts and {len(each)} {name}: give one for all, or one each", param=name)
    return each


def _is_conversation(messages: object) -> TypeGuard[Sequence[Message]]:
    return isinstance(messages, Sequence) and len(messages) > 0 and isinstance(messages[0], Mapping)


def _log_phase(name: str, seconds: float) -> None:
    log.info("phase %s %.2f s", name, seconds)
