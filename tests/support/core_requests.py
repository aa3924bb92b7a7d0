"""Adds requests to a scheduler without an engine."""

from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any

from chairlift import _core
from chairlift.engine.engine_request import EngineRequest
from chairlift.scheduling import Scheduling


def add(
    core: _core.Scheduler, tag: int, prompt: Iterable[int], new: int, stop: Sequence[int], now: int, *, salt: bytes = b"", **scheduling: Any
) -> int:
    """Adds a request for `new` tokens, which `SamplingParams` may not allow. Returns the handle of its sequence."""
    sampling: Any = SimpleNamespace(num_sequences=1, max_tokens=new, stop_token_ids=list(stop), ignore_eos=True, verifiable=True)
    [(_, seq)] = core.add(EngineRequest.of(tag, prompt, sampling, Scheduling(**scheduling)), now, salt)
    return seq
