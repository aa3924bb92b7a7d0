"""What can go wrong, as types: every error that a caller of chairlift may want to catch."""

from __future__ import annotations


class ChairliftError(Exception):
    """The base of every error that chairlift raises on purpose."""


class InvalidRequest(ChairliftError, ValueError):
    """A request that cannot be served as asked; the message says what is allowed.

    `param` names the field at fault as an API client knows it, `code` is a stable word for programs.
    """

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class InvalidSetting(ChairliftError, ValueError):
    """A setting that cannot work with this model on this machine; the message has the flag and the numbers."""


class InvalidTrace(ChairliftError, ValueError):
    """A request trace that cannot be read; the message has the line at fault and what was expected there."""


class ModelNotFound(ChairliftError):
    """No model of that name could be found or fetched; the message names the ways out."""


class UnsupportedModel(ChairliftError):
    """The checkpoint is of a kind that chairlift cannot run or read."""


class RequestFailed(ChairliftError):
    """The model gave no usable answer for this one request (logits that are not finite, say)."""


class OutOfMemory(ChairliftError):
    """A device has too little memory, for the model or, for now, for one request; the message says what to do."""


class QueueFull(ChairliftError):
    """As many requests wait as may wait; `retry_after` is how many seconds a new one would wait now."""

    def __init__(self, message: str, *, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class DeadlineMissed(ChairliftError):
    """A request was dropped because it missed, or would surely miss, its deadline; its token counts say what was used till then."""

    def __init__(self, message: str, *, prompt_tokens: int, completion_tokens: int) -> None:
        super().__init__(message)
        self.prompt_tokens = prompt_tokens
        self.completion_tokens = completion_tokens


class EngineDead(ChairliftError):
    """The engine's process ended; requests in flight are lost, and new ones are refused."""


class EngineClosed(EngineDead):
    """The engine was ended on purpose before this request was done."""
