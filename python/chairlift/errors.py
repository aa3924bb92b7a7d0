"""Exceptions that callers of chairlift may want to catch."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pydantic import ValidationError

_MAX_LINE = 800

_brief = reprlib.Repr()
_brief.maxstring = _brief.maxother = _brief.maxlong = 60


class ChairliftError(Exception):
    """Base class of all exceptions that chairlift raises on purpose."""


class InvalidRequest(ChairliftError, ValueError):
    """A request is invalid; the message says what is allowed.

    `param` is the field at fault as an API client knows it, `code` is a stable identifier for programs.
    """

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code

    def packed(self) -> bytes:
        """The message and the code, for `unpacked`."""
        return json.dumps([str(self), self.code]).encode()

    @staticmethod
    def unpacked(packed: bytes, param: str | None) -> InvalidRequest:
        """The error with this message and code, for a field."""
        message, code = json.loads(packed)
        return InvalidRequest(message, param=param, code=code)

    @staticmethod
    def from_validation(error: ValidationError, root: str = "") -> InvalidRequest:
        """The first of pydantic's errors, with the field's path as the caller wrote it, from `root` on."""
        first = error.errors(include_url=False, include_context=False)[0]
        # A step may be a name of the caller's own, which may have megabytes.
        names = [step if isinstance(step, int) or len(step) <= 64 else f"{step[:64]}…" for step in first["loc"][:16]]
        steps = [f"[{name}]" if isinstance(name, int) else f".{name}" for name in names]
        path = (root + "".join(steps)).lstrip(".")
        if first["type"] == "missing":
            return InvalidRequest(f"{path} is missing", param=path)
        _, should, wanted = first["msg"].replace(" after validation", "").partition(" should ")
        fault = f"it should {wanted}" if should else first["msg"]
        return InvalidRequest(f"{path} is invalid: {fault}, got {brief(first['input'])}", param=path)


class ContextExceeded(InvalidRequest):
    """A prompt, or a prompt with its answer, is longer than the context.

    `limit` is the context in tokens, `prompt` are those of the prompt (at least) and `answer` those that it asked for.
    """

    def __init__(self, message: str, *, param: str, limit: int, prompt: int, answer: int = 0) -> None:
        super().__init__(message, param=param, code="context_length_exceeded")
        self.limit, self.prompt, self.answer = limit, prompt, answer


class SequenceDropped(InvalidRequest):
    """A live sequence was dropped, or its lease has ended."""

    def __init__(self, message: str) -> None:
        super().__init__(message, param="sequence", code="sequence_dropped")


class SequenceBusy(InvalidRequest):
    """A live sequence is being generated."""

    def __init__(self, message: str) -> None:
        super().__init__(message, param="sequence", code="sequence_busy")


class TooManySequences(InvalidRequest):
    """A tenant, or all tenants together, hold as many live sequences as they may.

    `retry_after` is the time in seconds until the first of their leases ends; None if all are in use.
    """

    def __init__(self, message: str, *, retry_after: float | None) -> None:
        super().__init__(message, param="sequence", code="too_many_sequences")
        self.retry_after = retry_after


class InvalidSetting(ChairliftError, ValueError):
    """A setting cannot work with this model on this machine; the message has the flag and the numbers."""


class InvalidTrace(ChairliftError, ValueError):
    """A request trace cannot be read; the message has the line at fault and the expected content."""


class ModelNotFound(ChairliftError):
    """No model of that name could be found or downloaded; the message says what to try."""


class UnsupportedModel(ChairliftError):
    """chairlift cannot read or run this kind of checkpoint.

    The message may quote the checkpoint, so it is made one line of printable characters that is not too long.
    """

    def __init__(self, message: str) -> None:
        line = "".join(character if character.isprintable() else " " for character in message)
        super().__init__(line if len(line) <= _MAX_LINE else f"{line[: _MAX_LINE // 2]} ... {line[-_MAX_LINE // 2 :]}")


class RequestFailed(ChairliftError):
    """The model gave no usable output for this one request, for example non-finite logits."""


class OutOfMemory(ChairliftError):
    """A device has too little memory, for the model or temporarily for a request; the message says what to do."""


class QueueFull(ChairliftError):
    """The queue is full; `retry_after` is the expected wait of a new request in seconds."""

    def __init__(self, message: str, *, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class WaitTooLong(ChairliftError):
    """A request would wait for its session's turn for longer than its client wants; `retry_after` is the expected wait in seconds."""

    def __init__(self, message: str, *, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class DeadlineMissed(ChairliftError):
    """A request was dropped because it missed, or would certainly miss, its deadline; the token counts are what it used."""

    def __init__(self, message: str, *, prompt_tokens: int, completion_tokens: int) -> None:
        super().__init__(message)
        self.prompt_tokens = prompt_tokens
        self.completion_tokens = completion_tokens


class EngineDead(ChairliftError):
    """The engine's process ended; running requests are lost and new ones are refused."""


class EngineClosed(EngineDead):
    """The engine was shut down before the request was complete."""


class RequestMoved(EngineDead):
    """An engine that will be restarted has given up the request: another engine goes on with it."""


@contextmanager
def writing(path: object, hint: str = "") -> Iterator[None]:
    """Raises InvalidSetting, with `hint`, if the block cannot write the file."""
    try:
        yield
    except OSError as error:
        raise InvalidSetting(f"{path}: cannot be written ({error.strerror}){hint}") from None


def pip_install(extra: str) -> str:
    """The command that adds the packages of `extra` to the installed distribution: chairlift, or chairlift-cpu, which has no torch."""
    return f"pip install '{'chairlift-cpu' if _is_without_torch() else 'chairlift'}[{extra}]'"


def pip_install_with_torch(extra: str = "") -> str:
    """The command that installs torch and what comes with it, and `extra`. Both distributions own the same files: the other one goes."""
    name = f"'chairlift[{extra}]'" if extra else "chairlift"
    return f"{'pip uninstall -y chairlift-cpu && ' if _is_without_torch() else ''}pip install {name}"


def _is_without_torch() -> bool:
    from importlib import metadata  # takes as long to import as all of this package's errors

    try:
        metadata.distribution("chairlift-cpu")
    except metadata.PackageNotFoundError:
        return False
    return True


def brief(value: object) -> str:
    """Abbreviates a caller's value to about 60 characters a piece, so that an error is not longer than the request."""
    return _brief.repr(value)[:100]


def did_you_mean(name: str, known: Iterable[str], similarity: float = 0.75) -> str:
    """`: did you mean NAME?` with the most similar of the `known` names; empty if none has this `similarity`, 0 to 1.

    The default is the similarity of two words of four letters that differ in a swap.
    """
    from difflib import get_close_matches  # only an error needs it

    near = get_close_matches(name, list(known), 1, similarity)
    return f": did you mean {near[0]}?" if near else ""
