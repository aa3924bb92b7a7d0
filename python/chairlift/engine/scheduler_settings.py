"""Converts the engine's flags to the scheduler's settings and back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from chairlift.config import EngineConfig

if TYPE_CHECKING:
    from fractions import Fraction


@dataclass(frozen=True, slots=True)
class _Conversion:
    """A flag, and the conversions between it and its setting. Both functions take a value and the number of KV blocks."""

    flag: str
    encode: Callable[[Any, int], Any] = lambda value, blocks: value
    decode: Callable[[Any, int], Any] = lambda value, blocks: value

    @property
    def setting(self) -> str:
        """The name of the setting. Times are flags in milliseconds and settings in microseconds."""
        return self.flag.removesuffix("_ms")


def _fraction(numerator: int, denominator: int) -> Fraction:
    from fractions import Fraction  # only a journal needs it

    return Fraction(numerator, denominator)


def _microseconds(milliseconds: float | Fraction | None, blocks: int) -> int | None:
    return None if milliseconds is None else int(milliseconds * 1000)


def _milliseconds(microseconds: int | None, blocks: int) -> Fraction | None:
    # Fractions convert back to the same integers.
    return None if microseconds is None else _fraction(microseconds, 1000)


_CONVERSIONS = (
    _Conversion("max_num_seqs"),
    _Conversion("max_num_batched_tokens"),
    _Conversion("max_model_len"),
    _Conversion("num_kv_blocks"),
    _Conversion("enable_prefix_caching"),
    _Conversion(
        "watermark",
        encode=lambda share, blocks: int(share * (blocks - 1)),
        decode=lambda watermark, blocks: _fraction(watermark, blocks - 1),
    ),
    _Conversion("kv_reservation"),
    _Conversion("scheduling_policy"),
    _Conversion("batching"),
    _Conversion("static_batch_size"),
    _Conversion(
        "batch_timeout_ms",
        encode=lambda milliseconds, blocks: _microseconds(milliseconds or 0, blocks),
        decode=lambda timeout, blocks: _milliseconds(timeout or None, blocks),
    ),
    _Conversion("max_num_queued_reqs"),
    _Conversion("max_num_queued_tokens"),
    _Conversion("queue_ageing_ms", _microseconds, _milliseconds),
    _Conversion("target_itl_ms", _microseconds, _milliseconds),
    _Conversion(
        "background_slowdown",
        encode=lambda times, blocks: round(times * 100),
        decode=lambda hundredths, blocks: _fraction(hundredths, 100),
    ),
    _Conversion("gather_ms", _microseconds, _milliseconds),
    _Conversion("session_turns"),
    _Conversion("max_session_wait_ms", _microseconds, _milliseconds),
)

FLAGS = tuple(one.flag for one in _CONVERSIONS)
"""The flags that are scheduler settings and that a replay can change. It cannot change `block_size`."""

HOST = ("host_blocks", "swap_ns_per_block", "state_slots", "state_tokens", "experts", "experts_used")
"""Settings without a flag: host blocks that --swap-space holds, nanoseconds to copy one, slots for recurrent states, tokens whose KV takes
as much memory as a state, experts of a layer and those that a token uses."""


def of_config(config: EngineConfig, **sizes: Any) -> dict[str, Any]:
    """The settings of `_core.Scheduler`. `sizes` are block_size, the flags whose values depend on the machine, and `HOST`, else 0."""
    values = {flag: getattr(config, flag) for flag in FLAGS} | dict.fromkeys(HOST, 0) | sizes
    return of_flags(values) | {"block_size": sizes["block_size"]}


def of_flags(flags: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of `_core.Scheduler` without block_size, for values of all `FLAGS` and `HOST`."""
    blocks = flags["num_kv_blocks"]
    return {one.setting: one.encode(flags[one.flag], blocks) for one in _CONVERSIONS} | {name: flags[name] for name in HOST}


def to_flags(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The values of `FLAGS` and `HOST` for the settings of a scheduler."""
    blocks = settings["num_kv_blocks"]
    flags = {one.flag: one.decode(settings[one.setting], blocks) for one in _CONVERSIONS} | {name: settings[name] for name in HOST}
    # A size that equals the default is treated as the default.
    if flags["static_batch_size"] == settings["max_num_seqs"]:
        flags["static_batch_size"] = None
    return flags
