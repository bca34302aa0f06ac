"""What `python -m prefill_worker`, `python -m decode_worker` and the Ray replicas share: opening a worker."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol, TypeVar

from pdserve.engine.checkpoint_files import CheckpointFiles
from pdserve.engine.load import load_model, model_path
from pdserve.engine.loaded import LoadedModel
from pdserve.engine.plan import EngineConfig
from pdserve.engine.rope_scaling import within
from pdserve.errors import ConfigError
from pdserve.registry.open import open_registry
from pdserve.registry.records import Registry
from pdserve.registry.settings import RegistrySettings
from pdserve.rpc.process import Service, parser, run, serve, set_up_logs
from pdserve.rpc.settings import RpcSettings
from pdserve.telemetry.settings import TelemetrySettings
from pdserve.tokenizer import Bundle, load_bundle

Flags = Sequence[tuple[str, Callable[[str], Any], str, str]]  # name, type, metavar, help


def adapter_paths(text: str) -> dict[str, str]:
    """NAME=PATH,NAME=PATH. Raises ValueError."""
    pairs = [pair.partition("=") for pair in text.split(",")]
    if not all(name and path for name, _, path in pairs):
        raise ValueError(text)
    return {name: path for name, _, path in pairs}


WORKER_FLAGS: Flags = (
    ("--model", str, "PATH", 'checkpoint directory or file; "smollm2": the packaged model'),
    ("--name", str, "NAME", "served model name (default: the checkpoint's own)"),
    ("--worker-id", str, "ID", "name in the registry (default: a random one)"),
    ("--adapters", adapter_paths, "NAME=PATH,...", "LoRA adapters to serve from the start"),
    ("--adapter-root", str, "PATH", "directory under which adapters may be loaded later (default: none may)"),
    ("--host", str, "HOST", "interface to listen on (default: loopback)"),
    ("--port", int, "PORT", "port to listen on; 0 takes any free one"),
    ("--advertise", str, "HOST:PORT", "address that others reach this worker by"),
    ("--metrics-host", str, "HOST", "interface of the metrics page (default: loopback)"),
    ("--metrics-port", int, "PORT", "port of the metrics page; 0 takes any free one, -1 none"),
)
ENGINE_FLAGS: Flags = (
    ("--dtype", str, "TYPE", "of weights and cache: fp32, bf16, fp16, float64, or auto: the checkpoint's own"),
    ("--pages", int, "N", "pages of the cache pool"),
    ("--page-size", int, "TOKENS", "tokens of a page"),
    ("--threads", int, "N", "threads that compute one step"),
)


class WorkerSettings(Protocol):
    """What the settings of both workers have."""

    @property
    def model(self) -> str: ...
    @property
    def engine(self) -> EngineConfig: ...
    @property
    def context_limit(self) -> int: ...
    @property
    def rpc(self) -> RpcSettings: ...
    @property
    def registry(self) -> RegistrySettings: ...
    @property
    def telemetry(self) -> TelemetrySettings: ...
    def check(self) -> None: ...


class Worker(Service, Protocol):
    worker_id: str


S = TypeVar("S", bound=WorkerSettings)
W = TypeVar("W", bound=Worker)
Build = Callable[[LoadedModel, Bundle | None, S, Registry | None], W]


async def open_worker(build: Build[S, W], settings: S, registry: Registry | None) -> W:
    """Loads the model of `settings` and builds a worker on the running loop, not yet started.

    Loading is done in a thread, so that the loop goes on. The engine takes the weights over and
    nothing else keeps them. Raises CheckpointError and ConfigError.
    """
    settings.check()
    path, engine = model_path(settings.model), settings.engine
    files = CheckpointFiles(engine.keep_digests)
    model = await asyncio.to_thread(load_model, path, engine.dtype, engine.device, files)
    model = replace(model, spec=within(model.spec, settings.context_limit))
    bundle = await asyncio.to_thread(load_bundle, path)
    return build(model, bundle, settings, registry)


def open_worker_registry(settings: WorkerSettings) -> Registry | None:
    """None for memory://: a registry in this process would be read by nobody else."""
    if settings.registry.url == "memory://":
        return None
    return open_registry(settings.registry.url, settings.registry, settings.rpc)


def worker_main(
    name: str,
    description: str,
    section: Callable[[str | None], S],
    build: Build[S, W],
    ready: Callable[[W], str],
    flags: Flags = (),
    arguments: Sequence[str] | None = None,
) -> int:
    """A worker's whole process; returns its exit status.

    Args:
        section: reads the worker's settings from a configuration file (None: defaults).
        ready: the line to print once the worker serves.
        flags: what this worker has besides WORKER_FLAGS and ENGINE_FLAGS.
    """
    flags = (*WORKER_FLAGS, *flags)
    parse = parser(name, description)
    for flag, kind, metavar, text in (*flags, *ENGINE_FLAGS):
        parse.add_argument(flag, type=kind, metavar=metavar, help=text)
    options = parse.parse_args(arguments)

    async def main(stopping: asyncio.Event) -> None:
        settings = _with_flags(section(options.config), options, flags)
        set_up_logs(options, settings.telemetry, name)
        registry = open_worker_registry(settings)
        try:
            worker = await open_worker(build, settings, registry)
            set_up_logs(options, settings.telemetry, name, worker.worker_id)
            await serve(worker, lambda: ready(worker), stopping)
        finally:
            if registry is not None:
                await registry.close()

    return run(name, options, main)


def _with_flags(settings: S, options: argparse.Namespace, flags: Flags) -> S:
    """The settings with the flags on top. Raises ConfigError when no model is named."""
    changes = _given(options, flags) | {"engine": replace(settings.engine, **_given(options, ENGINE_FLAGS))}
    if options.registry is not None:
        changes["registry"] = replace(settings.registry, url=options.registry)
    settings = replace(settings, **changes)  # type: ignore[type-var]
    if not settings.model:
        raise ConfigError("no model is named", field="model", remedy="give --model PATH, or --model smollm2")
    return settings


def _given(options: argparse.Namespace, flags: Flags) -> dict[str, Any]:
    names = [flag.removeprefix("--").replace("-", "_") for flag, _, _, _ in flags]
    return {name: getattr(options, name) for name in names if getattr(options, name) is not None}
