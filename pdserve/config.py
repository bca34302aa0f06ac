"""One TOML file for a whole deployment; every section belongs to the dataclass it names.

    [model]      path, name                      which model both pools serve
    [engine]     EngineConfig                    precision, pages, threads; [prefill.engine] and
                                                 [decode.engine] override single keys
    [rpc]        RpcSettings                     message size, keepalive, timeouts, plaintext; [rpc.tls] certificates
    [registry]   RegistrySettings                where workers announce themselves
    [prefill]    PrefillSettings                 [decode]  DecodeSettings
    [router]     RouterSettings                  [pools]   PoolSettings
    [scaling]    ScalingSettings                 how the pools follow their load
    [telemetry]  TelemetrySettings               traces and logs of every part
    [[router.tenants]]  Tenant                   who may call, by API key

Each key is documented where its dataclass is. An unknown or mistyped key is a ConfigError
that names it.
"""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from decode_worker.settings import DecodeSettings
from pdserve.engine.plan import EngineConfig
from pdserve.errors import ConfigError, not_allowed
from pdserve.registry.records import DECODE, PREFILL
from pdserve.registry.settings import RegistrySettings
from pdserve.rpc.settings import RpcSettings, TlsSettings
from pdserve.scaling.plan import Cost, Plan, make_plan
from pdserve.scaling.settings import ScalingSettings
from pdserve.telemetry.settings import TelemetrySettings
from prefill_worker.settings import PrefillSettings
from router.settings import RouterSettings
from router.tenants import first_key, read_tenants

T = TypeVar("T")
Table = Mapping[str, Any]

PACKAGED_MODEL = "smollm2"
_PORTS = re.compile(r"[1-9][0-9]{0,4}-[1-9][0-9]{0,4}")
DTYPES = ("fp32", "bf16", "fp16", "float64")


@dataclass(frozen=True)
class ModelSettings:
    """The model that both pools serve."""

    path: str = PACKAGED_MODEL
    """Hugging Face directory, .gguf file or ModelSpec checkpoint; "smollm2" is the packaged model."""

    name: str = ""
    """Name that clients ask for; empty: the checkpoint's own."""

    adapters: dict[str, str] = field(default_factory=dict)
    """LoRA adapters that both pools serve from the start: { name = "directory" }."""

    adapter_root: str = ""
    """Directory, on every worker's machine, under which `pdserve adapters load` finds adapters; empty: it may not."""


@dataclass(frozen=True)
class PoolSettings:
    """How many workers Ray runs, and what it reserves for each."""

    prefill: int = 1
    """Prefill replicas."""

    decode: int = 1
    """Decode replicas."""

    prefill_cpus: float = 1.0
    """Logical CPUs that Ray reserves per prefill replica."""

    decode_cpus: float = 1.0
    """Logical CPUs that Ray reserves per decode replica."""

    prefill_gpus: float = 0.0
    """GPUs per prefill replica."""

    decode_gpus: float = 0.0
    """GPUs per decode replica."""

    prefill_resources: dict[str, float] = field(default_factory=dict)
    """Custom Ray resources per prefill replica, such as { prefill_node = 0.01 }: where it may run."""

    decode_resources: dict[str, float] = field(default_factory=dict)
    """Custom Ray resources per decode replica."""

    routers: int = 1
    """Routers where the router is a Serve deployment, too; several need a Redis registry."""

    router_cpus: float = 1.0
    """Logical CPUs that Ray reserves per router that is a Serve deployment."""

    ports: str = ""
    """Ports that replicas may listen on, such as "8500-8599": one per prefill worker, two per decode worker, and one
    for a metrics page that is not for this machine alone; empty: any free ones. Keep clear of those of Ray's own
    workers (10002-19999 where `ray start` was told nothing else). Ports named in [prefill] or [decode] come first."""

    ray_address: str = ""
    """Ray cluster to join; empty: start a local one, which is stopped at the end."""

    ready_timeout_s: float = 300.0
    """Seconds that the pools may take until every replica is ready."""

    def check(self) -> None:
        """Raises ConfigError naming the first setting that cannot work."""
        for name in ("prefill", "decode", "routers"):
            if getattr(self, name) < 1:
                raise ConfigError("a pool needs a replica", field=f"pools.{name}", remedy="use 1 or more")
        for name in ("prefill_cpus", "decode_cpus", "router_cpus", "prefill_gpus", "decode_gpus"):
            if getattr(self, name) < 0:
                raise ConfigError("cannot be negative", field=f"pools.{name}", remedy="use 0 or more")
        for name in ("prefill_resources", "decode_resources"):
            if any(share <= 0 for share in getattr(self, name).values()):
                raise ConfigError("resources are above 0", field=f"pools.{name}", remedy="leave out the others")
        if self.ports and not _PORTS.fullmatch(self.ports):
            raise ConfigError(f"{self.ports!r} is not a range", field="pools.ports", remedy='write "8500-8599"')


@dataclass(frozen=True)
class Config:
    model: ModelSettings = field(default_factory=ModelSettings)
    prefill: PrefillSettings = field(default_factory=PrefillSettings)
    decode: DecodeSettings = field(default_factory=DecodeSettings)
    router: RouterSettings = field(default_factory=RouterSettings)
    pools: PoolSettings = field(default_factory=PoolSettings)
    scaling: ScalingSettings = field(default_factory=ScalingSettings)

    def plan(self) -> Plan:
        """What the pools may take. Raises ConfigError when the budget does not hold what [pools] asks for."""
        p = self.pools
        return make_plan(
            {PREFILL: p.prefill, DECODE: p.decode},
            {PREFILL: Cost(p.prefill_cpus, p.prefill_gpus), DECODE: Cost(p.decode_cpus, p.decode_gpus)},
            self.scaling,
        )


def load_config(path: str | Path | None = None, overrides: Table | None = None) -> Config:
    """Reads a TOML file (None: all defaults); `overrides` are tables that win over it.

    Raises:
        ConfigError: unreadable file, unknown key, value of the wrong type or out of range.
    """
    return parse_config(merge(read_tables(path), overrides or {}))


def read_tables(path: str | Path | None) -> Table:
    if path is None:
        return {}
    try:
        return tomllib.loads(Path(path).read_text())
    except OSError as error:
        raise ConfigError(
            f"cannot read {path}: {error.strerror}", field="config", remedy="give the path of a TOML file"
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not TOML: {error}", field="config", remedy="correct the line it names") from error


def parse_config(tables: Table) -> Config:
    sections = ("model", "engine", "rpc", "registry", "prefill", "decode", "router", "pools", "scaling", "telemetry")
    _refuse_unknown("", tables, sections)
    for name, table in tables.items():
        if not isinstance(table, Mapping):
            raise ConfigError("is a section, not a value", field=name, remedy=f"write [{name}] and its keys below")

    model = _section(ModelSettings, "model", tables.get("model", {}))
    rpc = _rpc(tables.get("rpc", {}))
    of_router, of_worker = (replace(rpc, tls=rpc.tls.of_role(role)) for role in ("router", "worker"))
    registry = _section(RegistrySettings, "registry", tables.get("registry", {}))
    telemetry = _section(TelemetrySettings, "telemetry", tables.get("telemetry", {}))
    shared = {"registry": registry, "telemetry": telemetry}
    _engine("engine", tables.get("engine", {}))

    def worker(cls: type[T], name: str) -> T:
        table = dict(tables.get(name, {}))
        own = table.pop("engine", {})
        engine = _engine(f"{name}.engine", merge(tables.get("engine", {}), own))
        given = shared | {"rpc": of_worker, "engine": engine}
        return _section(cls, name, table, given | _of_model(model))

    return Config(
        model=model,
        prefill=worker(PrefillSettings, "prefill"),
        decode=worker(DecodeSettings, "decode"),
        router=_router(tables.get("router", {}), shared | {"rpc": of_router}),
        pools=_section(PoolSettings, "pools", tables.get("pools", {})),
        scaling=_section(ScalingSettings, "scaling", tables.get("scaling", {})),
    )


def _of_model(model: ModelSettings) -> dict[str, Any]:
    """What both pools take from [model]."""
    return {"model": model.path, "name": model.name, "adapters": model.adapters, "adapter_root": model.adapter_root}


def _engine(section: str, table: Table) -> EngineConfig:
    settings = _section(EngineConfig, section, table)
    for name, known in (("dtype", (*DTYPES, "auto")), ("kv_dtype", ("", *DTYPES)), ("axis_order", ("hnd", "nhd"))):
        value = getattr(settings, name)
        if value not in known:
            remedy = f"use one of {', '.join(filter(None, known))}"
            raise ConfigError(f"{value!r} is not known", field=f"{section}.{name}", remedy=remedy)
    for name in ("pages", "page_size", "threads"):
        if getattr(settings, name) < 1:
            raise not_allowed(section, name, getattr(settings, name), "1 or more")
    return settings


def _rpc(table: Table) -> RpcSettings:
    plain = {key: value for key, value in table.items() if key != "tls"}
    return _section(RpcSettings, "rpc", plain, {"tls": _section(TlsSettings, "rpc.tls", table.get("tls", {}))})


def operator_key(path: str | Path | None) -> str:
    """One of the API keys of a file's tenants, for the operator's own calls; empty: the router asks for none."""
    return first_key(_tenants(read_tables(path).get("router", {})), os.environ)


def _router(table: Table, shared: Mapping[str, Any]) -> RouterSettings:
    """Tenants hold secrets, so they are read where no error shows a value."""
    plain = {key: value for key, value in table.items() if key != "tenants"}
    return _section(RouterSettings, "router", plain, {**shared, "tenants": read_tenants(_tenants(table))})


def _tenants(router: Table) -> object:
    return router.get("tenants", ())


def merge(base: Table, over: Table) -> dict[str, Any]:
    """`base` with the keys of `over` laid on top, table by table."""
    merged = dict(base)
    for key, value in over.items():
        inner = merged.get(key)
        both = isinstance(value, Mapping) and isinstance(inner, Mapping)
        merged[key] = merge(inner, value) if both else value  # type: ignore[arg-type]
    return merged


def _section(cls: type[T], name: str, table: Table, given: Mapping[str, Any] | None = None) -> T:
    """Builds one settings dataclass; keys in `given` come from other sections, not from this one."""
    given = given or {}
    known = [f.name for f in fields(cls) if f.name not in given]  # type: ignore[arg-type]
    _refuse_unknown(name, table, known)
    try:
        settings = TypeAdapter(cls).validate_python({**table, **given}, strict=False)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join([name, *(str(part) for part in first["loc"])])
        raise ConfigError(f"{first['input']!r}: {first['msg'].lower()}", field=key, remedy="correct it") from error
    check = getattr(settings, "check", None)
    if check is not None:
        check()
    return settings


def _refuse_unknown(section: str, table: Table, known: list[str] | tuple[str, ...]) -> None:
    for key in table:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            remedy = f"did you mean {near[0]}?" if near else f"known keys: {', '.join(known)}"
            raise ConfigError("unknown key", field=f"{section}.{key}" if section else key, remedy=remedy)
