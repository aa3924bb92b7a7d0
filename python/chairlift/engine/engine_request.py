"""A request as an engine gets it: made once by the client, sent as it is, and given to the scheduler as one value."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple, Self

from chairlift.sampling import SamplingParams
from chairlift.scheduling import Scheduling

_PACKED_AT_ONCE = 4096


class ResumedChoice(NamedTuple):
    """What an engine that ended had done for a choice. Times are microseconds after the request's arrival."""

    choice: int
    """Its number among the request's choices."""
    answer: bytes
    """Its tokens so far, as int32 little-endian."""
    cached_tokens: int
    own_cached_tokens: int
    submitted: int
    started: int
    first_token: int | None


class Continues(NamedTuple):
    """The held sequence that a request continues. The engine opens one for an unknown handle."""

    handle: int
    tokens: int
    """Number of leading tokens of the prompt that are the sequence's."""


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """A request. Its sequences get `tag` and the numbers after it, which must be unused."""

    tag: int
    prompt: bytes
    """Token ids as int32 little-endian."""
    sampling: SamplingParams
    scheduling: Scheduling = field(default_factory=Scheduling)
    submitted: int | None = None
    """When the client sent it, in microseconds of the monotonic clock; None for the time at which the engine reads it. The engine may read
    it much later, after a long step."""
    spent: Mapping[str, int] = field(default_factory=dict)
    """Microseconds in each timeline state before it was sent. Its timeline and its deadlines start that much earlier."""
    resumed: Sequence[ResumedChoice] = ()
    """The unfinished choices of a request that another engine lost: each goes on after its last token. Empty for a new request."""
    continues: Continues | None = None
    """Set if it continues a held sequence of the same tenant and salt. It then has one answer, and leaves its KV to the sequence."""

    @property
    def tags(self) -> range:
        """The tags of its sequences."""
        return range(self.tag, self.tag + self.sampling.num_sequences)

    @classmethod
    def of(cls, tag: int, prompt: Iterable[int], sampling: SamplingParams, scheduling: Scheduling | None = None, **rest: Any) -> Self:
        """A request with a prompt of these token ids."""
        return cls(tag, pack_tokens(prompt), sampling, scheduling or Scheduling(), **rest)

    def pack(self) -> dict[str, Any]:
        """Its fields as msgpack takes them."""
        return {**_fields(self), "sampling": _fields(self.sampling), "scheduling": _fields(self.scheduling)}

    @classmethod
    def unpack(cls, packed: Mapping[str, Any]) -> Self:
        """The request of `pack`. Raises InvalidRequest for a field out of bounds."""
        parts = {
            "sampling": SamplingParams(**packed["sampling"]),
            "scheduling": Scheduling(**packed["scheduling"]),
            "resumed": tuple(ResumedChoice(*choice) for choice in packed["resumed"]),
            "continues": None if packed["continues"] is None else Continues(*packed["continues"]),
        }
        return cls(**{**packed, **parts})


def pack_tokens(tokens: Iterable[int]) -> bytes:
    """Token ids as int32 little-endian. Fast for an `array("i")`."""
    if isinstance(tokens, array) and tokens.typecode == "i":
        return tokens.tobytes()
    values = tuple(tokens)
    # One call for a million takes twice as long as many for some thousand each.
    parts = (values[start : start + _PACKED_AT_ONCE] for start in range(0, len(values), _PACKED_AT_ONCE))
    return b"".join([struct.pack(f"<{len(part)}i", *part) for part in parts])


def _fields(item: EngineRequest | SamplingParams | Scheduling) -> dict[str, Any]:
    return {one.name: getattr(item, one.name) for one in fields(item)}


def shared_salt(cache_salt: str | None, adapter: bytes | None) -> bytes:
    """The salt of prefix cache entries and held sequences under a caller's `cache_salt` and the hash of an adapter's files.

    Keys and values depend on the adapter. Byte 254 is not valid UTF-8, so no caller's salt can be equal to that of an adapter.
    """
    salt = (cache_salt or "").encode()
    return salt if adapter is None else b"\xfe" + adapter + salt
