"""API keys and their tenants: from `--api-key`, and from the file of `--api-key-file`."""

from __future__ import annotations

import hashlib
import hmac
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chairlift.config import LARGEST_WEIGHT
from chairlift.errors import InvalidSetting

TENANT = re.compile(r"[A-Za-z0-9._:-]{1,64}")
"""What a tenant may be called."""

# A key may end in the padding of base64, which is no name's.
_NAMED_KEY = re.compile(rf"({TENANT.pattern})=([^=].*)")

_SETTINGS = ("key", "keys", "weight", "max_queued", "max_requests")
_MOST = 2**31 - 1

ANOTHER = "another"
"""The name that a tenant sees instead of another tenant's."""


@dataclass(frozen=True, slots=True)
class Tenant:
    """Whose requests they are, and what the tenant may do; "" is nobody's name, and None no limit."""

    name: str = ""
    weight: int | None = None
    """Its share under the policy `fair`."""
    max_queued: int | None = None
    """Requests that may wait at a time."""
    max_requests: int | None = None
    """Requests that may wait or run at a time."""


class Keys:
    """All keys of a server, of which only digests are kept."""

    def __init__(self, tenants: Iterable[tuple[str, Tenant]] = ()) -> None:
        """`tenants` are pairs of a key and whose it is."""
        self._digests = [(_digest(key.encode()), tenant) for key, tenant in tenants]

    def __bool__(self) -> bool:
        """Whether any key is wanted."""
        return bool(self._digests)

    def __iter__(self) -> Iterator[Tenant]:
        """The tenants that have a name, each once."""
        return iter({tenant.name: tenant for _, tenant in self._digests if tenant.name}.values())

    def tenant(self, given: bytes) -> Tenant | None:
        """Whose key this is; None if it is nobody's."""
        digest = _digest(given)
        # All are compared, whichever fits: the time says nothing about which are near.
        fitting = [tenant for known, tenant in self._digests if hmac.compare_digest(digest, known)]
        return fitting[0] if fitting else None


def read_keys(text: str | None, file: str | None = None) -> Keys:
    """The keys of `--api-key` (`text`: KEY, or NAME=KEY,NAME=KEY) and those of `--api-key-file`; raises InvalidSetting.

    A KEY without a name is of no tenant's. The file is TOML, with one table a tenant.
    """
    found: dict[str, Tenant] = {}
    filed = _file_keys(file) if file is not None else []
    tenants = {tenant.name: tenant for _, _, tenant in filed}
    for name, key in [] if text is None else _named(text):
        _enter(found, "--api-key", key, tenants.get(name) or Tenant(name))
    for where, key, tenant in filed:
        _enter(found, where, key, tenant)
    return Keys(found.items())


def is_key_list(text: str) -> bool:
    """Whether `--api-key` would read several keys, or a key with a tenant's name, in this."""
    return "," in text or _NAMED_KEY.fullmatch(text) is not None


def _enter(found: dict[str, Tenant], where: str, key: str, tenant: Tenant) -> None:
    """Adds a key; no message may show one."""
    if not key or key != key.strip() or not key.isprintable():
        raise InvalidSetting(f"{where}: a key must not be empty, begin or end with a space, or have control characters")
    if key in found:
        raise InvalidSetting(f"{where}: the same key is there twice; give each tenant its own")
    found[key] = tenant


def _named(text: str) -> Iterator[tuple[str, str]]:
    for entry in text.split(","):
        named = _NAMED_KEY.fullmatch(entry)
        yield (named[1], named[2]) if named else ("", entry)


def _file_keys(file: str) -> list[tuple[str, str, Tenant]]:
    """What a file says: where, the key, and its tenant."""
    flag = f"--api-key-file {file}"
    try:
        tables = tomllib.loads(Path(file).expanduser().read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidSetting(f"{flag}: it cannot be read: {error.strerror}") from None
    except tomllib.TOMLDecodeError as error:
        # Of the parser's message only the place is sure to hold no key.
        place = re.search(r" \(at [^()]*\)$", str(error))
        raise InvalidSetting(f'{flag}: it is not TOML{place[0] if place else ""}; write [NAME] and below it key = "..."') from None
    except UnicodeDecodeError:
        raise InvalidSetting(f"{flag}: it is not UTF-8 text") from None
    if not tables:
        raise InvalidSetting(f'{flag}: it has no keys; write [NAME] and below it key = "..."')
    return [(where, key, tenant) for name, table in tables.items() for where, key, tenant in _tenant_keys(flag, name, table)]


def _tenant_keys(flag: str, name: str, table: Any) -> Iterator[tuple[str, str, Tenant]]:
    if not TENANT.fullmatch(name) or not isinstance(table, Mapping):
        # What stands there may be a key in the wrong place: it is not shown.
        raise InvalidSetting(f"{flag}: expected one table a tenant, [NAME], with a name of 1 to 64 letters, digits and . _ : -")
    where = f"{flag}: [{name}]"
    if unknown := [setting for setting in table if setting not in _SETTINGS]:
        shown = unknown[0] if re.fullmatch(r"[a-z_]{1,32}", unknown[0]) else "something else"
        raise InvalidSetting(f"{where} has {shown}; it may have {', '.join(_SETTINGS)}")
    keys = [*([table["key"]] if "key" in table else []), *_list(table.get("keys", []))]
    if not keys or not all(isinstance(key, str) for key in keys):
        raise InvalidSetting(f'{where} needs key = "...", or keys = ["...", "..."]')
    limits = {setting: _limit(where, setting, table.get(setting)) for setting in _SETTINGS[2:]}
    tenant = Tenant(name, **limits)
    for key in keys:
        yield where, key, tenant


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [None]


def _limit(where: str, setting: str, value: Any) -> int | None:
    most = LARGEST_WEIGHT if setting == "weight" else _MOST
    if value is None or (type(value) is int and 1 <= value <= most):
        return value
    raise InvalidSetting(f"{where}: {setting} must be a whole number from 1 to {most}")


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
