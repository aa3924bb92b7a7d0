"""Reads the keys and tiers of a server and opens its socket, for `serve` and `gate`."""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from chairlift.config import EngineConfig
from chairlift.directories import private_directory
from chairlift.server.config import ServerConfig

if TYPE_CHECKING:
    import socket

    from chairlift.server.keys import Keys
    from chairlift.server.tiers import ServiceTiers

log = logging.getLogger("chairlift")


class Access(NamedTuple):
    """The keys of a server's tenants, and the tiers that they may use."""

    keys: Keys
    tiers: ServiceTiers

    @classmethod
    def read(cls, server: ServerConfig) -> Access:
        """Reads the files that the settings name, and creates the directories. Raises InvalidSetting."""
        from chairlift.server.keys import read_keys
        from chairlift.server.tiers import read_tiers

        for flag, directory in (("--usage-log", server.usage_log), ("--data-dir", server.data_dir)):
            if directory is not None:
                private_directory(flag, directory)
        keys = read_keys(server.api_key, server.api_key_file, server.operator_key)
        return cls(keys, read_tiers(server.tiers).granted(keys))

    def weighted(self, config: EngineConfig) -> EngineConfig:
        """The engine's settings with the weights of tenants and tiers; those of the command line win."""
        weights = {tenant.name: tenant.weight for tenant in self.keys if tenant.weight is not None}
        tenant_weights = {**weights, **(config.tenant_weights or {})} or None
        return replace(config, tenant_weights=tenant_weights, tier_weights={**self.tiers.weights, **(config.tier_weights or {})})

    def listen(self, server: ServerConfig, served: str) -> AbstractContextManager[socket.socket]:
        """Opens the port or the Unix socket; warns if a network can use `served` without keys. Raises InvalidSetting and PortTaken."""
        from chairlift.server.http.sockets import check_certificate, is_loopback, open_path, open_port

        if server.ssl_certfile is not None:
            check_certificate(server.ssl_certfile, server.ssl_keyfile)
        listener = open_port(server.host, server.port) if server.uds is None else open_path(server.uds, 0o660)
        if not self.keys and server.uds is None and not is_loopback(server.host):
            log.warning("no API key is set: any host that reaches %s can use %s; see --api-key-file, --api-key", server.host, served)
        return listener
