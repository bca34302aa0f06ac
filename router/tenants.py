"""Tenants and their API keys, as an operator configures them. Standard library only.

    [[router.tenants]]
    name = "acme"
    keys_env = "ACME_KEYS"             # a variable that holds the keys, between blanks
    keys_file = "/run/secrets/acme"    # or a file that does
    keys = ["sha256:..."]              # or the keys themselves; here and there a digest may stand for a key
    requests_per_minute = 60           # and what its callers may use together; see Tenant
    tokens_per_minute = 100000
    concurrent = 8
    models = ["small"]

A key is a secret: here it exists only on its way to its SHA-256 digest, and no error names it. Where keys are kept,
their digests will do, as `printf %s KEY | sha256sum` tells them: sha256:HEX.
Variables and files are read by the router that starts, not by whoever else reads the configuration.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from pdserve.errors import ConfigError, shown

MIN_KEY = 16  # characters: a shorter secret can be guessed
MAX_KEY = 512
MAX_NAME = 256
DIGEST = "sha256:"  # begins what stands for a key
_WORDS = ("name", "keys_env", "keys_file")
_LIMITS = ("requests_per_minute", "tokens_per_minute", "concurrent")
_KNOWN = (*_WORDS, "keys", *_LIMITS, "models")


@dataclass(frozen=True)
class Tenant:
    """Callers who share caches, and no others."""

    name: str
    """Part of every cache identity; not a secret."""

    keys: tuple[bytes, ...] = field(default=(), repr=False)
    """SHA-256 of each API key that is written down in the configuration."""

    keys_env: str = ""
    """Environment variable with more keys, between blanks."""

    keys_file: str = ""
    """File with more keys, between blanks or line breaks."""

    requests_per_minute: int = 0
    """Requests begun, over all routers; 0: no limit."""

    tokens_per_minute: int = 0
    """Prompt and output tokens, over all routers; 0: no limit. A request counts with all that it may put out, and
    what it did not is given back at its end."""

    concurrent: int = 0
    """Requests in flight, over all routers; 0: no limit."""

    models: tuple[str, ...] = ()
    """Models, and adapters as MODEL:ADAPTER, that its callers may name; a model stands for its adapters, too.
    Empty: all."""

    @property
    def limited(self) -> bool:
        """Whether routers have anything of it to count together."""
        return bool(self.requests_per_minute or self.tokens_per_minute or self.concurrent)

    def may_use(self, model: str, adapter: str) -> bool:
        return not self.models or model in self.models or f"{model}:{adapter}" in self.models

    @classmethod
    def of(cls, name: str, *keys: str) -> Self:
        """A tenant with these API keys. Raises ConfigError for one that cannot be used, by its place."""
        return cls(name, tuple(_digests(keys, "router.tenants.keys")))

    def digests(self, where: str, environment: Mapping[str, str]) -> Iterator[bytes]:
        """SHA-256 of every key. Raises ConfigError for a source that cannot be read, or holds no or unusable keys."""
        yield from self.keys
        for place, text in _sources(self.keys_env, self.keys_file, where, environment):
            yield from _digests(text.split(), place)


def digest_of(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


def check_tenants(tenants: Sequence[Tenant]) -> None:
    """Raises ConfigError for a tenant without a name or a source of keys, with another's name or too long a one."""
    names: set[str] = set()
    for number, tenant in enumerate(tenants):
        where = f"router.tenants[{number}]"
        if not tenant.name:
            raise ConfigError("it has no name", field=f"{where}.name", remedy="give it one")
        if len(tenant.name) > MAX_NAME:
            raise ConfigError(
                "its name is too long", field=f"{where}.name", remedy=f"use at most {MAX_NAME} characters"
            )
        if tenant.name in names:
            raise ConfigError(
                f"there is another tenant {shown(tenant.name)}", field=f"{where}.name", remedy="use each name once"
            )
        names.add(tenant.name)
        if not (tenant.keys or tenant.keys_env or tenant.keys_file):
            raise ConfigError(
                f"tenant {shown(tenant.name)} has no API key",
                field=f"{where}.keys",
                remedy="give keys, keys_env or keys_file",
            )


def known_keys(tenants: Sequence[Tenant], environment: Mapping[str, str]) -> dict[bytes, str]:
    """Digest of every key -> the name of its tenant. Reads variables and files.

    Raises ConfigError as `Tenant.digests`, and for a key that two tenants have, or one has twice.
    """
    known: dict[bytes, str] = {}
    for number, tenant in enumerate(tenants):
        where = f"router.tenants[{number}]"
        for digest in tenant.digests(where, environment):
            if digest in known:
                raise ConfigError(
                    f"a key of tenant {shown(tenant.name)} is given a second time, first for {shown(known[digest])}",
                    reason="DUPLICATE_KEY",
                    field=f"{where}.keys",
                    remedy="give every tenant keys of its own",
                )
            known[digest] = tenant.name
    return known


def read_tenants(tables: object) -> tuple[Tenant, ...]:
    """The tenants of a configuration file. Raises ConfigError by place; no error shows a value that may be a key."""
    tenants = []
    for where, table in _tables(tables):
        given: dict[str, Any] = {name: _word(table, name, where) for name in _WORDS}
        given |= {name: _limit(table, name, where) for name in _LIMITS}
        keys = tuple(_digests(_texts(table, "keys", where), f"{where}.keys"))
        tenants.append(Tenant(keys=keys, models=tuple(_texts(table, "models", where)), **given))
    check_tenants(tenants)
    return tuple(tenants)


def first_key(tables: object, environment: Mapping[str, str]) -> str:
    """One of the keys themselves, for the operator's own calls; empty when only digests are there, or none. Raises as
    `read_tenants`."""
    for where, table in _tables(tables):
        words = (_word(table, "keys_env", where), _word(table, "keys_file", where))
        sources = _sources(*words, where, environment)
        for key in (*_texts(table, "keys", where), *(key for _, text in sources for key in text.split())):
            if not key.startswith(DIGEST):
                return key
    return ""


def _tables(tables: object) -> Iterator[tuple[str, Mapping[str, Any]]]:
    if not isinstance(tables, (list, tuple)) or not all(isinstance(table, Mapping) for table in tables):
        raise ConfigError("it is not a list of tables", field="router.tenants", remedy="write [[router.tenants]]")
    for number, table in enumerate(tables):
        where = f"router.tenants[{number}]"
        for name in table:
            if name not in _KNOWN:
                raise ConfigError("unknown key", field=f"{where}.{name}", remedy=f"known keys: {', '.join(_KNOWN)}")
        yield where, table


def _word(table: Mapping[str, Any], name: str, where: str) -> str:
    value = table.get(name, "")
    if not isinstance(value, str):
        raise ConfigError("it is not a text", field=f"{where}.{name}", remedy="put it in quotes")
    return value


def _limit(table: Mapping[str, Any], name: str, where: str) -> int:
    value = table.get(name, 0)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ConfigError("it is not a number", field=f"{where}.{name}", remedy="use 1 or more; 0 sets no limit")
    return value


def _texts(table: Mapping[str, Any], name: str, where: str) -> list[str]:
    texts = table.get(name, [])
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise ConfigError("it is not a list of texts", field=f"{where}.{name}", remedy=f'write {name} = ["..."]')
    return texts


def _sources(variable: str, file: str, where: str, environment: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """(place, text) of the variable and the file, as far as they are given."""
    if variable:
        place = f"{where}.keys_env"
        if not environment.get(variable, "").split():
            raise ConfigError(
                f"the environment variable {shown(variable)} is not set, or empty",
                field=place,
                remedy="set it to the tenant's API keys, with blanks between them",
            )
        yield place, environment[variable]
    if file:
        place = f"{where}.keys_file"
        text = _read(file, place)
        if not text.split():
            raise ConfigError(f"{file} holds no API key", field=place, remedy="write one key a line")
        yield place, text


def _read(file: str, place: str) -> str:
    remedy = "name a text file that the router may read"
    try:
        return Path(file).read_text()
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror}", field=place, remedy=remedy) from error
    except UnicodeDecodeError:
        # Not chained: the error it would show holds the file's content.
        raise ConfigError(f"{file} is not a text", field=place, remedy=remedy) from None


def _digest(text: str, where: str) -> bytes:
    if re.fullmatch(r"[0-9a-fA-F]{64}", text):
        return bytes.fromhex(text)
    raise ConfigError(
        "what follows sha256: is no digest", field=where, remedy="write what `printf %s KEY | sha256sum` prints"
    )


def _digests(keys: Sequence[str], place: str) -> Iterator[bytes]:
    for number, key in enumerate(keys):
        where = f"{place}[{number}]"
        if key.startswith(DIGEST):
            yield _digest(key.removeprefix(DIGEST), where)
            continue
        if not MIN_KEY <= len(key) <= MAX_KEY:
            raise ConfigError(
                f"the key has {len(key)} characters",
                field=where,
                remedy=f"use {MIN_KEY} to {MAX_KEY}, such as `openssl rand -hex 24` prints",
            )
        if not all("!" <= character <= "~" for character in key):
            raise ConfigError(
                "the key has blanks or other characters that a header cannot carry",
                field=where,
                remedy="use ASCII letters, digits and signs",
            )
        yield digest_of(key)
