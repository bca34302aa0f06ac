"""From a URL to a registry."""

from __future__ import annotations

import os
from urllib.parse import urlsplit

from pdserve.errors import ConfigError
from pdserve.registry.client import RpcRegistry
from pdserve.registry.login import redis_url
from pdserve.registry.memory import MemoryRegistry
from pdserve.registry.records import Registry
from pdserve.registry.redis import RedisRegistry
from pdserve.registry.redis_url import SCHEMES, parse
from pdserve.registry.settings import RegistrySettings
from pdserve.rpc.settings import RpcSettings, check_plaintext


def open_registry(url: str, settings: RegistrySettings | None = None, rpc: RpcSettings | None = None) -> Registry:
    """The registry at `url` (see RegistrySettings.url). Connects later, on first use.

    Args:
        url: takes the place of `settings.url`.
        settings: timeout and, for Redis, key prefix, user, password and TLS files.
        rpc: how to reach a grpc:// registry; also says whether plaintext may leave this machine.

    Raises ConfigError for a URL that cannot be used.
    """
    settings = settings or RegistrySettings()
    rpc = rpc or RpcSettings()
    parts = urlsplit(url)
    if parts.scheme == "memory":
        return MemoryRegistry()
    if parts.scheme == "grpc":
        return RpcRegistry(parts.netloc, settings.timeout_s, rpc)
    if parts.scheme in SCHEMES:
        login = redis_url(url, settings, os.environ)
        registry = RedisRegistry(login, settings.key_prefix, settings.timeout_s, sentinel_login=settings.sentinel_login)
        place = parse(url)
        for host, _ in () if place.tls else place.hosts:
            check_plaintext(host, rpc)
        return registry
    raise ConfigError(
        f"{parts.scheme or url.partition(':')[0]!r} is not a kind of registry",
        reason="BAD_URL",
        field="registry.url",
        remedy="use memory://, grpc://HOST:PORT, redis://HOST:PORT/DATABASE, rediss://... or redis+sentinel://...",
    )


def describe_url(url: str) -> str:
    """The URL without secrets, for status pages and logs."""
    parts = urlsplit(url)
    if parts.scheme == "memory":
        return "memory"
    return str(parse(url)) if parts.scheme in SCHEMES else f"{parts.scheme}://{parts.netloc}"
