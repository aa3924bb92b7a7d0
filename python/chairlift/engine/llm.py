"""The engine for scripts and notebooks. It runs in the caller's process."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import sys
import time
from collections.abc import Callable, Coroutine, Generator, Iterable, Iterator, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeGuard, TypeVar, Unpack

from chairlift.checkpoint.locate import locate
from chairlift.checkpoint.model_name import shown
from chairlift.config import DEFAULT_MODEL
from chairlift.engine.arguments import ChatOptions, Message, Prompt, document_settings, engine_config, listed, sampling
from chairlift.engine.async_live_sequence import AsyncLiveSequence
from chairlift.engine.engine_info import log_decisions, warn_of_short_context
from chairlift.engine.engine_settings import Settings
from chairlift.engine.held_sequences import LEASE
from chairlift.engine.live_sequence import LiveSequence
from chairlift.engine.local_engine import LocalEngine
from chairlift.engine.validation import check_dimensions, check_scores, relevance
from chairlift.errors import InvalidRequest, RequestFailed
from chairlift.outputs import RequestOutput
from chairlift.sampling import EMBED, SamplingParams
from chairlift.scheduling import Scheduling
from chairlift.tokenizer import Tokenizer

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from rich.progress import Progress

    from chairlift.engine.chat import Chat
    from chairlift.engine.engine import Engine
    from chairlift.engine.engine_info import EngineInfo

log = logging.getLogger("chairlift")

LONG_WORK = 1.0
"""Seconds of work after which the progress bar appears."""


@document_settings
class LLM:
    """A model in this process: no child process, no server, no `__main__` guard.

    Use it with `with`, or call `close`. Threads may share it: their requests run in the same batches. A process that was forked since
    cannot use it: its calls raise EngineClosed. Raises ModelNotFound or UnsupportedModel, InvalidSetting for a setting's value, or
    TypeError for an unknown setting.
    """

    tokenizer: Tokenizer
    """Encodes and decodes texts."""
    info: EngineInfo
    """The model and its limits."""

    def __init__(self, model: str | os.PathLike[str] = DEFAULT_MODEL, **settings: Unpack[Settings]) -> None:
        from chairlift.engine.engine import Engine  # imports torch; `from chairlift import LLM` stays fast

        self.config = engine_config("LLM", {"model": model, **settings})
        model = self.config.model
        directory = locate(model, self.config.revision, self.config.cache_dir)
        self.tokenizer = Tokenizer(directory, self.config.tokenizer, self.config.chat_template)
        engine = Engine(dataclasses.replace(self.config, model=str(directory)), _log_phase)
        self.info = dataclasses.replace(engine.info, model=shown(model))
        log_decisions(self.info)
        warn_of_short_context(self.config, self.info)
        self._local = LocalEngine(self.config, engine, self.tokenizer, self.info)

    @property
    def engine(self) -> Engine:
        """The engine, for its `stats`. Raises EngineClosed after `close`."""
        return self._local.engine

    def close(self) -> None:
        """Ends the engine and frees the model's memory. Open streams raise EngineClosed. May be called repeatedly."""
        self._local.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def open(self, prompt: Prompt, *, scheduling: Scheduling | None = None, lease: float = LEASE) -> LiveSequence:
        """Computes a prompt and returns it as a live sequence, which can be forked, appended to and generated from.

        It is dropped if it is not used for `lease` seconds. Raises InvalidRequest, QueueFull, or TooManySequences for the tenant of
        `scheduling`.
        """
        sequence = self._local.wait(self._local.open(prompt, scheduling=scheduling, lease=lease))
        assert isinstance(sequence, LiveSequence)  # see `LocalEngine.hold`
        return sequence

    def generate(
        self,
        prompts: Prompt | LiveSequence | Iterable[Prompt | LiveSequence],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        scheduling: Scheduling | Sequence[Scheduling] | None = None,
        progress: bool | None = None,
    ) -> list[RequestOutput]:
        """Completes each prompt (see `Prompt`) or live sequence. Returns one whole output for each prompt, in their order.

        With `n` answers the output is the first of them, and its `outputs` has all. `params`, which may be called `sampling_params`, and
        `scheduling` are one value for all prompts, or one per prompt; `params` defaults to `default_params`. `progress` shows or hides a
        bar; by default it appears on a terminal when the work takes over a second. Raises InvalidRequest, with the prompt's index, or
        QueueFull, before any prompt runs. A request that fails later has `finish_reason` "error", one that misses its deadline
        "deadline"; neither affects the others.
        """
        self._local.check_ready()
        many = [prompts] if isinstance(prompts, LiveSequence) else listed(prompts)
        each, treated = self._one_each(len(many), sampling(params, sampling_params), scheduling)
        requests: list[tuple[Callable[[], Coroutine[Any, None, list[RequestOutput]]], SamplingParams]] = []
        for index, (prompt, one, own) in enumerate(zip(many, each, treated, strict=True)):
            with _naming(index):
                if isinstance(prompt, LiveSequence):
                    prompt.check_engine(self._local)
                    valid = self._local.validate(prompt.token_ids, prompt.params(one))
                    requests.append((partial(_continued, prompt, one, own), valid))
                else:
                    stream = self._local.make(prompt, one, own, whole=True)
                    requests.append((partial(self._local.collect, stream), stream.params))
        with _Bar([(valid.max_tokens or 0) * valid.num_sequences for _, valid in requests], progress) as bar:
            each_outputs = self._local.wait_all([run() for run, _ in requests], bar.advance, bar.end, _name)
        texts = [one if isinstance(one, str) else one.get("prompt") if isinstance(one, Mapping) else None for one in many]
        return [
            dataclasses.replace(first, prompt=text, others=tuple(others))
            for text, (first, *others) in zip(texts, each_outputs, strict=True)
        ]

    def embed(
        self,
        texts: Prompt | Iterable[Prompt],
        *,
        dimensions: int | None = None,
        scheduling: Scheduling | Sequence[Scheduling] | None = None,
        progress: bool | None = None,
    ) -> NDArray[np.float32]:
        """Computes the embedding of each text (see `Prompt`): float32 [texts, dimensions], vectors of length 1 unless the model's are not.

        `dimensions` keeps the first numbers of each and scales them to length 1, for models that were trained for it. Other arguments and
        errors as in `generate`. Raises RequestFailed if a text gets no embedding: it missed its deadline, or its result is not finite.
        """
        import numpy as np

        check_dimensions(dimensions, self.info)
        rows = _embeddings(self.generate(texts, EMBED, scheduling=scheduling, progress=progress))
        embeddings = np.array(rows, dtype=np.float32).reshape(-1, self.info.embedding_size)[:, :dimensions]
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
        self,
        prompt: Prompt | LiveSequence,
        params: SamplingParams | None = None,
        *,
        sampling_params: SamplingParams | None = None,
        scheduling: Scheduling | None = None,
    ) -> Generator[RequestOutput, None, None]:
        """Completes one prompt or live sequence. Yields increments of its `n` outputs, by `index`; the last of each has a `finish_reason`.

        With `best_of`, the `n` best outputs are yielded whole at the end. Closing the generator, or leaving its loop, aborts the request.
        Several streams may be open: each runs while any of them is read. Errors as in `generate`.
        """
        [one], [own] = self._one_each(1, sampling(params, sampling_params), scheduling)
        if isinstance(prompt, LiveSequence):
            prompt.check_engine(self._local)
            return prompt.stream(one, scheduling=own)
        return self._local.iterate(self._local.run(self._local.make(prompt, one, own)))

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        scheduling: Scheduling | Sequence[Scheduling] | None = None,
        progress: bool | None = None,
    ) -> list[RequestOutput]:
        """Answers one or several conversations, rendered with the model's chat template. Returns one output for each.

        Messages, `tools` and `tool_choice` are as in OpenAI's API. The outputs have the answer in `text`, and apart from it `reasoning` and
        `tool_calls`. An answer without a `max_tokens` may fill the context. `chat_template_kwargs` are further inputs of the template, like
        `enable_thinking`. With `continue_final_message` the model goes on with the last message. Other arguments as in `generate`.
        """
        options = ChatOptions(tools, tool_choice, chat_template_kwargs, add_generation_prompt, continue_final_message)
        conversations: list[Any] = list(messages) if isinstance(messages, list | tuple) and not _is_conversation(messages) else [messages]
        each, given = self._one_each(len(conversations), sampling(params, sampling_params), scheduling)
        chats = []
        for index, (conversation, one) in enumerate(zip(conversations, each, strict=True)):
            with _naming(index):
                chats.append(self._chat(conversation, one, options))
        prompts, params = [chat.prompt for chat in chats], [chat.params for chat in chats]
        treated = [chat.scheduling(own) for chat, own in zip(chats, given, strict=True)]
        outputs = self.generate(prompts, params, scheduling=treated, progress=progress)
        return [chat.separate(output) for chat, output in zip(chats, outputs, strict=True)]

    def stream_chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        sampling_params: SamplingParams | None = None,
        scheduling: Scheduling | None = None,
    ) -> Generator[RequestOutput, None, None]:
        """Answers one conversation as `chat` does, in increments as `stream` does. The last increment has the tool calls."""
        options = ChatOptions(tools, tool_choice, chat_template_kwargs, add_generation_prompt, continue_final_message)
        [one], [own] = self._one_each(1, sampling(params, sampling_params), scheduling)
        chat = self._chat(messages, one, options)
        return _separated(chat, self.stream(chat.prompt, chat.params, scheduling=chat.scheduling(own)))

    def load_lora_adapter(self, name: str, path: str | os.PathLike[str]) -> None:
        """Loads the LoRA adapter `path`, a directory or a GGUF file, for requests with `SamplingParams(lora=name)`. Needs `enable_lora`.

        Raises InvalidRequest if the name is in use, InvalidSetting for its rank, and UnsupportedModel for unusable files.
        """
        adapter = self.engine.read_adapter(os.fspath(path))
        with self._local.between_steps() as engine:
            engine.load_adapter(name, adapter)

    def unload_lora_adapter(self, name: str) -> None:
        """Frees an adapter's memory. Raises InvalidRequest if it is not loaded, or while requests use it."""
        with self._local.between_steps() as engine:
            engine.unload_adapter(name)

    def default_params(self, **settings: Any) -> SamplingParams:
        """Returns the checkpoint's recommended sampling parameters (`--generation-config`), overridden by `settings`."""
        return self._local.default_params(**settings)

    def _one_each(self, count: int, params: Any, scheduling: Any) -> tuple[list[SamplingParams], list[Scheduling]]:
        """Returns the parameters of each of `count` prompts. Raises InvalidRequest."""
        params = self.default_params() if params is None else params
        return _one_each("params", SamplingParams, params, count), _one_each("scheduling", Scheduling, scheduling, count)

    def _chat(self, conversation: object, params: SamplingParams, options: ChatOptions) -> Chat:
        from chairlift.engine.chat import Chat  # imports pydantic

        if not _is_conversation(conversation):
            raise InvalidRequest("a conversation is a list of messages, each with `role` and `content`", param="messages")
        return Chat(self.tokenizer, self.info, conversation, params, options)


class _Bar:
    """A progress bar that appears if the work takes long. Its total is the maximum number of tokens."""

    def __init__(self, most: Sequence[int], wanted: bool | None) -> None:
        """`most` has the maximum number of tokens of each request."""
        self._most = most
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
            self._progress = _open_progress(sum(self._most))
        note = f"{self._done}/{len(self._most)} requests, {self._tokens / max(seconds, 1e-9):.0f} tokens/s"
        self._progress.update(self._progress.task_ids[0], completed=self._tokens + self._spared, note=note)

    def end(self, index: int, outputs: Sequence[RequestOutput]) -> None:
        """Counts an ended request and the tokens that it did not use."""
        self._done += 1
        self._spared += max(0, self._most[index] - sum(len(output.token_ids) for output in outputs))


def _separated(chat: Chat, outputs: Generator[RequestOutput, None, None]) -> Generator[RequestOutput, None, None]:
    """Separates the parts of a stream's increments."""
    with contextlib.closing(outputs):
        for output in outputs:
            yield chat.separate(output)


def _embeddings(outputs: Sequence[RequestOutput]) -> list[Sequence[float]]:
    """Returns the numbers of each output. Raises RequestFailed if one has none."""
    if failed := [f"{index} ({output.finish_reason})" for index, output in enumerate(outputs) if output.embedding is None]:
        raise RequestFailed(f"texts without an embedding: {', '.join(failed)}")
    return [output.embedding for output in outputs if output.embedding is not None]


async def _continued(sequence: LiveSequence, params: SamplingParams, scheduling: Scheduling) -> list[RequestOutput]:
    """Generates from a live sequence, side by side with other requests."""
    return [await AsyncLiveSequence.generate(sequence, params, scheduling=scheduling)]


def _open_progress(total: int) -> Progress:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("generating"), BarColumn(), TextColumn("{task.fields[note]}"), TimeRemainingColumn())
    progress = Progress(*columns, console=Console(stderr=True))
    progress.add_task("", total=total, note="")
    progress.start()
    return progress


def _name(index: int, error: BaseException) -> None:
    """Adds the prompt's index to an error of its request."""
    if isinstance(error, InvalidRequest):
        error.args = (f"prompt {index}: {error}",)


@contextlib.contextmanager
def _naming(index: int) -> Iterator[None]:
    """Adds the prompt's index to an error."""
    try:
        yield
    except InvalidRequest as error:
        _name(index, error)
        raise


Kind = TypeVar("Kind", SamplingParams, Scheduling)


def _one_each(name: str, kind: type[Kind], given: Kind | Sequence[Kind] | None, count: int) -> list[Kind]:
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
