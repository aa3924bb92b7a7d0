"""Chairlift: LLM inference with continuous batching.

`LLM` runs a model in this process. `AsyncEngine` runs a model in a child process, for asyncio programs. `simulate` simulates the engine
on a trace. `import chairlift` imports nothing else: public names are imported at their first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from chairlift import errors as errors
    from chairlift._core import Candidate as Candidate
    from chairlift.config import DEFAULT_MODEL as DEFAULT_MODEL
    from chairlift.config import EngineConfig as EngineConfig
    from chairlift.engine.arguments import Message as Message
    from chairlift.engine.arguments import Prompt as Prompt
    from chairlift.engine.async_live_sequence import AsyncLiveSequence as AsyncLiveSequence
    from chairlift.engine.client import AsyncEngine as AsyncEngine
    from chairlift.engine.engine_info import EngineInfo as EngineInfo
    from chairlift.engine.engine_process import EngineProcess as EngineProcess
    from chairlift.engine.live_sequence import LiveSequence as LiveSequence
    from chairlift.engine.llm import LLM as LLM
    from chairlift.engine.stats import Stats as Stats
    from chairlift.errors import ChairliftError as ChairliftError
    from chairlift.errors import ContextExceeded as ContextExceeded
    from chairlift.errors import DeadlineMissed as DeadlineMissed
    from chairlift.errors import EngineClosed as EngineClosed
    from chairlift.errors import EngineDead as EngineDead
    from chairlift.errors import InvalidRequest as InvalidRequest
    from chairlift.errors import InvalidSetting as InvalidSetting
    from chairlift.errors import InvalidTrace as InvalidTrace
    from chairlift.errors import ModelNotFound as ModelNotFound
    from chairlift.errors import OutOfMemory as OutOfMemory
    from chairlift.errors import QueueFull as QueueFull
    from chairlift.errors import RequestFailed as RequestFailed
    from chairlift.errors import SequenceBusy as SequenceBusy
    from chairlift.errors import SequenceDropped as SequenceDropped
    from chairlift.errors import TooManySequences as TooManySequences
    from chairlift.errors import UnsupportedModel as UnsupportedModel
    from chairlift.errors import WaitTooLong as WaitTooLong
    from chairlift.outputs import RequestOutput as RequestOutput
    from chairlift.outputs import Timeline as Timeline
    from chairlift.outputs import Timing as Timing
    from chairlift.outputs import TokenLogprobs as TokenLogprobs
    from chairlift.outputs import ToolCall as ToolCall
    from chairlift.sampling import SamplingParams as SamplingParams
    from chairlift.sampling import StructuredOutput as StructuredOutput
    from chairlift.scheduling import BACKGROUND as BACKGROUND
    from chairlift.scheduling import Scheduling as Scheduling
    from chairlift.sim.policy import Policy as Policy
    from chairlift.sim.report import plot as plot
    from chairlift.sim.result import Result as Result
    from chairlift.sim.run import simulate as simulate
    from chairlift.tokenizer import Tokenizer as Tokenizer

    __version__: str

_NAMES = {
    "engine.llm": "LLM",
    "engine.client": "AsyncEngine",
    "engine.engine_process": "EngineProcess",
    "engine.live_sequence": "LiveSequence",
    "engine.async_live_sequence": "AsyncLiveSequence",
    "sampling": "SamplingParams StructuredOutput",
    "scheduling": "Scheduling BACKGROUND",
    "sim.run": "simulate",
    "sim.policy": "Policy",
    "_core": "Candidate",
    "sim.report": "plot",
    "sim.result": "Result",
    "outputs": "RequestOutput ToolCall TokenLogprobs Timeline Timing",
    "config": "EngineConfig DEFAULT_MODEL",
    "engine.engine_info": "EngineInfo",
    "engine.stats": "Stats",
    "tokenizer": "Tokenizer",
    "engine.arguments": "Prompt Message",
    "errors": "ChairliftError ContextExceeded DeadlineMissed EngineClosed EngineDead InvalidRequest InvalidSetting InvalidTrace "
    "ModelNotFound OutOfMemory QueueFull RequestFailed SequenceBusy SequenceDropped TooManySequences UnsupportedModel WaitTooLong",
}
"""The public names, by their modules."""
_HOMES = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = [*_HOMES, "errors"]


def __getattr__(name: str) -> Any:
    """Imports a public name at its first use."""
    if name in _HOMES:
        value = getattr(import_module(f"chairlift.{_HOMES[name]}"), name)
    elif name == "errors":
        return import_module("chairlift.errors")
    elif name == "__version__":
        value = _version()
    else:
        raise AttributeError(f"module 'chairlift' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "__version__"})


def _version() -> str:
    from chairlift import _core  # the distribution is called chairlift or chairlift-cpu

    return _core.__version__
