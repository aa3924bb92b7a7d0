"""Keeps the tokens of long texts, so that the unchanged beginning of a conversation is not tokenized again."""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Callable
from threading import Lock

MAX_BYTES = 64 << 20
"""Memory for tokens, of 4 bytes. All groups have equal shares."""
MAX_GROUPS = 64
"""Groups whose tokens are kept: the last that sent something."""
MIN_CHARACTERS = 256
"""Length of a text above which its tokens are kept. Shorter ones are tokenized as fast as they are found."""
_ENTRY_BYTES = 200
"""Memory for a text besides its tokens: the texts themselves are not kept."""

_Tokens = OrderedDict[bytes, "array[int]"]


class TokenCache:
    """The tokens of texts, by group. Groups do not see each other's texts, nor whether another group sent a text. It is thread-safe."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._lock = Lock()
        self._groups: OrderedDict[str, _Tokens] = OrderedDict()
        self._sizes: dict[str, int] = {}

    def tokens(self, group: str, kind: str, text: str, encode: Callable[[str], list[int]]) -> list[int]:
        """Returns `encode(text)`, kept from an earlier call of the group with the same `kind` and text if there was one."""
        if len(text) < MIN_CHARACTERS:
            return encode(text)
        key = hashlib.blake2b(f"{kind}:{text}".encode(), digest_size=16).digest()
        with self._lock:
            kept = self._groups[group].get(key) if group in self._groups else None
            if kept is not None:
                self._groups.move_to_end(group)
                self._groups[group].move_to_end(key)
        if kept is not None:
            return kept.tolist()
        ids = encode(text)
        with self._lock:
            self._keep(group, key, array("I", ids))
        return ids

    @property
    def size(self) -> int:
        """Bytes in use."""
        return sum(self._sizes.values())

    def _keep(self, group: str, key: bytes, ids: array[int]) -> None:
        entries = self._groups.setdefault(group, OrderedDict())
        self._groups.move_to_end(group)
        if key not in entries:
            entries[key] = ids
            self._sizes[group] = self._sizes.get(group, 0) + _bytes(ids)
        while len(self._groups) > MAX_GROUPS:
            oldest, _ = self._groups.popitem(last=False)
            del self._sizes[oldest]
        share = self._max_bytes // len(self._groups)
        for name, kept in self._groups.items():
            while self._sizes[name] > share:
                _, dropped = kept.popitem(last=False)
                self._sizes[name] -= _bytes(dropped)


def _bytes(ids: array[int]) -> int:
    return _ENTRY_BYTES + ids.itemsize * len(ids)
