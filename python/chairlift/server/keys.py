"""API keys, their tenants and what each may see, from `--api-key`, `--api-key-file` and `--operator-key`."""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
import stat
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from chairlift.config import LARGEST_WEIGHT
from chairlift.errors import InvalidSetting
from chairlift.scheduling import TENANT, TIERS, Scheduling
from chairlift.server.toml_file import line_of, read_text

logger = logging.getLogger(__name__)

# A key may end in base64 padding; a tenant's name has no "=".
_NAMED_KEY = re.compile(rf"({TENANT.pattern})=([^=].*)")

_LIMITS = ("weight", "max_queued", "max_requests")
_SETTINGS = ("key", "keys", *_LIMITS, "group", "tiers", "operator")
_MAX_LIMIT = 2**31 - 1

MIN_KEY_LENGTH = 16
"""Characters of the shortest key that causes no warning."""

HIDDEN_TENANT = "another"
"""The name that a tenant sees in place of other tenants' names."""

RESERVED_NAMES = frozenset({HIDDEN_TENANT, "none", "other"})
"""Names that no tenant may have, because metrics and explanations give them to several tenants."""

Reader = str | None
"""Who may see what: a tenant sees its own requests, and None, the operator, sees all."""


def sees(reader: Reader, tenant: str) -> bool:
    """Whether `reader` may see the requests of `tenant`."""
    return reader is None or reader == tenant


def visible_name(reader: Reader, tenant: str) -> str:
    """Returns the name of `tenant` as `reader` sees it."""
    return tenant if sees(reader, tenant) or not tenant else HIDDEN_TENANT


@dataclass(frozen=True, slots=True)
class Tenant:
    """A tenant and its limits; "" is the anonymous tenant, and None means no limit."""

    name: str = ""
    weight: int | None = None
    """Its weight under the policy `fair`."""
    max_queued: int | None = None
    """Maximum waiting requests."""
    max_requests: int | None = None
    """Maximum open requests, waiting or running."""
    has_key: bool = False
    """Whether it has a key of its own. Clients name other tenants as they like."""
    cache_group: str | None = None
    """The group of tenants with which it shares cached prompts: `Keys` sets it where none was declared."""
    tiers: frozenset[str] = frozenset()
    """The service tiers that it was granted."""
    operator: bool = False
    """Whether it sees the requests of all tenants and the metrics of the whole server."""

    @property
    def group(self) -> str:
        """Its name, or "" for all tenants without a key of their own: the name for limits that invented tenants must not evade."""
        return self.name if self.has_key else ""

    @property
    def paced_as(self) -> str | None:
        """The group for which the server's own work is counted, None for operators: `Pacing.turn`."""
        return None if self.operator else self.group

    def scheduling(self, tier: str) -> Scheduling:
        """The scheduling parameters of its requests of a tier, before those that a request sets."""
        return Scheduling(tenant=self.name, tier=tier, cache_group=self.cache_group or "", limit_group=self.group)

    @property
    def reader(self) -> Reader:
        """What it may see."""
        return None if self.operator else self.name


class Keys:
    """All API keys of a server, stored as digests."""

    def __init__(self, tenants: Iterable[tuple[str, Tenant]] = ()) -> None:
        """`tenants` are pairs of a key and its tenant."""
        pairs = list(tenants)
        self._has_groups = any(tenant.cache_group is not None for _, tenant in pairs)
        self._digests = [(_digest(key.encode()), self._grouped(tenant)) for key, tenant in pairs]
        self._by_name = {tenant.name: tenant for _, tenant in self._digests if tenant.name}

    def __bool__(self) -> bool:
        """Whether the server requires a key."""
        return bool(self._digests)

    def __iter__(self) -> Iterator[Tenant]:
        """Yields each named tenant once."""
        return iter(self._by_name.values())

    @property
    def of_owner(self) -> bool:
        """Whether all keys are the operator's and none has a name: those of a server's owner, who names tenants as they like."""
        return all(tenant.operator and not tenant.name for _, tenant in self._digests)

    @property
    def groups(self) -> frozenset[str]:
        """The tenants' `group`s: the names of those with a key of their own, and "" if there is a key without a name."""
        return frozenset(tenant.group for _, tenant in self._digests)

    def named(self, name: str) -> Tenant:
        """Returns the tenant of this name, which may have no key."""
        return self._by_name.get(name) or self._grouped(Tenant(name))

    def tenant(self, key: bytes) -> Tenant | None:
        """Returns the tenant of this key, None for an unknown key."""
        digest = _digest(key)
        # Compare all keys in constant time, so that the time reveals nothing about them.
        matches = [tenant for known, tenant in self._digests if hmac.compare_digest(digest, known)]
        return matches[0] if matches else None

    def _grouped(self, tenant: Tenant) -> Tenant:
        """Returns a tenant with its group. If groups are declared, a tenant without one has a group of its own, which none can declare."""
        if tenant.cache_group is not None:
            return tenant
        return replace(tenant, cache_group=f"={tenant.name}" if self._has_groups else "")


def read_keys(text: str | None, file: str | None = None, operator: str | None = None) -> Keys:
    """Reads the keys of `--api-key` (`text`: KEY, or NAME=KEY,NAME=KEY), `--api-key-file` and `--operator-key`; raises InvalidSetting.

    A KEY without a name belongs to no tenant. It is the operator's only if the server has no other kind of key. The file is TOML with
    one table for each tenant. Logs a warning for a file that other users may read and for short keys.
    """
    keys: dict[str, Tenant] = {}
    file_keys = _file_keys(file) if file is not None else []
    named = {tenant.name: tenant for _, _, tenant in file_keys}
    entries = [] if text is None else list(_split_keys(text))
    sole = operator is None and not named and not any(name for name, _ in entries)
    for name, key in entries:
        _add_key(keys, "--api-key", key, named.get(name) or Tenant(name, has_key=bool(name), operator=sole))
    if operator is not None:
        _add_key(keys, "--operator-key", operator, Tenant(operator=True))
    for where, key, tenant in file_keys:
        _add_key(keys, where, key, tenant)
    _warn(keys, file)
    return Keys(keys.items())


def _warn(keys: Iterable[str], file: str | None) -> None:
    """Logs what makes keys easy to find out."""
    if file is not None and (mode := stat.S_IMODE(Path(file).expanduser().stat().st_mode)) & 0o077:
        logger.warning("--api-key-file %s may be read by other users of the machine (mode %o): chmod 600 it", file, mode)
    if short := sum(len(key) < MIN_KEY_LENGTH for key in keys):
        hint = "can be guessed: make keys with 'openssl rand -hex 32'"
        logger.warning("%d API key(s) of fewer than %d characters %s", short, MIN_KEY_LENGTH, hint)


def is_key_list(text: str) -> bool:
    """Whether `--api-key` would read this as several keys, or as a key with a tenant's name."""
    return "," in text or _NAMED_KEY.fullmatch(text) is not None


def _add_key(keys: dict[str, Tenant], where: str | _Place, key: str, tenant: Tenant) -> None:
    """Adds a key. Error messages never contain a key."""
    if not key or key != key.strip() or not key.isprintable():
        raise InvalidSetting(f"{where}: a key must not be empty, begin or end with a space, or have control characters")
    if key in keys:
        raise InvalidSetting(f"{where}: the same key is there twice; give each tenant its own")
    if tenant.name in RESERVED_NAMES:
        raise InvalidSetting(f"{where}: no tenant may be called {tenant.name}; the metrics use this name")
    keys[key] = tenant


def _split_keys(text: str) -> Iterator[tuple[str, str]]:
    for entry in text.split(","):
        match = _NAMED_KEY.fullmatch(entry)
        yield (match[1], match[2]) if match else ("", entry)


@dataclass(frozen=True, slots=True, repr=False)
class _Place:
    """The place of a tenant, or of one of its settings, in a key file. Only the text of an error needs the line, which is searched then."""

    flag: str
    text: str
    name: str
    setting: str | None = None

    def __str__(self) -> str:
        return f"{self.flag}{line_of(self.text, self.name, self.setting)}: [{self.name}]"


def _file_keys(file: str) -> list[tuple[_Place, str, Tenant]]:
    """Reads (location, key, tenant) entries from a key file."""
    import tomllib  # only a file needs it

    flag = f"--api-key-file {file}"
    try:
        text = read_text(flag, file)
        tables = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        # The parser's message may quote a key; only its position is safe to show.
        position = re.search(r" \(at [^()]*\)$", str(error))
        raise InvalidSetting(f'{flag}: it is not TOML{position[0] if position else ""}; write [NAME] and below it key = "..."') from None
    if not tables:
        raise InvalidSetting(f'{flag}: it has no keys; write [NAME] and below it key = "..."')
    return [(where, key, tenant) for name, table in tables.items() for where, key, tenant in _tenant_keys(flag, text, name, table)]


def _tenant_keys(flag: str, text: str, name: str, table: Any) -> Iterator[tuple[_Place, str, Tenant]]:
    if not TENANT.fullmatch(name) or not isinstance(table, Mapping):
        # The name may be a misplaced key: it is not shown.
        raise InvalidSetting(
            f"{flag}{line_of(text, name)}: expected one table a tenant, [NAME], with a name of 1 to 64 letters, digits and . _ : -"
        )

    at = partial(_Place, flag, text, name)
    if unknown := [setting for setting in table if setting not in _SETTINGS]:
        shown = unknown[0] if re.fullmatch(r"[a-z_]{1,32}", unknown[0]) else "an unknown setting"
        raise InvalidSetting(f"{at(unknown[0])} has {shown}; it may have {', '.join(_SETTINGS)}")
    keys = [*([table["key"]] if "key" in table else []), *_list(table.get("keys", []))]
    if not keys or not all(isinstance(key, str) for key in keys):
        raise InvalidSetting(f'{at()} needs key = "...", or keys = ["...", "..."]')
    limits = {setting: _limit(at(setting), setting, table.get(setting)) for setting in _LIMITS}
    operator = table.get("operator", False)
    if not isinstance(operator, bool):
        raise InvalidSetting(f"{at('operator')}: operator must be true or false")
    group = table.get("group")
    if group is not None and not (isinstance(group, str) and TENANT.fullmatch(group)):
        raise InvalidSetting(f"{at('group')}: group must be a name of 1 to 64 letters, digits and . _ : -")
    tiers = table.get("tiers", [])
    if not isinstance(tiers, list) or any(tier not in TIERS for tier in tiers):
        raise InvalidSetting(f"{at('tiers')}: tiers must be a list of {', '.join(TIERS)}")
    tenant = Tenant(name, **limits, has_key=True, cache_group=group, tiers=frozenset(tiers), operator=operator)
    for key in keys:
        yield at(), key, tenant


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [None]


def _limit(where: _Place, setting: str, value: Any) -> int | None:
    maximum = LARGEST_WEIGHT if setting == "weight" else _MAX_LIMIT
    if value is None or (type(value) is int and 1 <= value <= maximum):
        return value
    raise InvalidSetting(f"{where}: {setting} must be a whole number from 1 to {maximum}")


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
