"""`python -m decode_worker`: one decode worker in this process, until SIGTERM or SIGINT drains it."""

from __future__ import annotations

import argparse
import asyncio
import logging
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from decode_worker.settings import DecodeSettings
from decode_worker.worker import DecodeWorker
from pdserve.engine.load import load_model, model_path
from pdserve.errors import ConfigError, Internal, PdserveError
from pdserve.registry.open import open_registry
from pdserve.registry.records import Registry
from pdserve.tokenizer import load_bundle

_WORKER_FLAGS = (
    ("--model", str, "PATH", 'checkpoint directory or file; "smollm2": the packaged model'),
    ("--name", str, "NAME", "served model name (default: the checkpoint's own)"),
    ("--worker-id", str, "ID", "name in the registry (default: a random one)"),
    ("--host", str, "HOST", "interface to listen on (default: loopback)"),
    ("--port", int, "PORT", "port of the Decode service; 0 takes any free one"),
    ("--transfer-port", int, "PORT", "port of the Transfer service; 0 takes any free one"),
    ("--advertise", str, "HOST:PORT", "address that others reach the Decode service by"),
    ("--advertise-transfer", str, "HOST:PORT", "address that prefill workers reach the Transfer service by"),
)
_ENGINE_FLAGS = (
    ("--dtype", str, "TYPE", "of weights, activations and cache: bf16, fp32, fp16 or float64"),
    ("--pages", int, "N", "pages of the cache pool"),
    ("--page-size", int, "TOKENS", "tokens of a page"),
    ("--threads", int, "N", "threads that compute one step"),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0 after a drain, 1 for a fault while running, 2 for what the operator can correct."""
    options = _parser().parse_args(arguments)
    logging.basicConfig(level=options.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        asyncio.run(serve(settings_of(options)))
    except PdserveError as error:
        sys.stderr.write(f"decode_worker: {error}\n")
        return 1 if isinstance(error, Internal) else 2
    return 0


async def serve(settings: DecodeSettings) -> None:
    """Loads the model, serves, and drains on the first signal. Raises what loading and start() raise."""
    settings.check()
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    registry = _registry(settings)
    try:
        worker = await _load(settings, registry)
        await worker.start()
        try:
            sys.stdout.write(f"decode worker ready: {worker.address} transfer {worker.transfer_address}\n")
            sys.stdout.flush()
            await _first(stopping, worker.broken)
            await worker.drain()
        finally:
            await worker.stop()
        if worker.broken.is_set():
            raise Internal("the worker failed", remedy="see its log")
    finally:
        if registry is not None:
            await registry.close()


def settings_of(options: argparse.Namespace) -> DecodeSettings:
    """The configuration file's [decode], with the flags on top. Raises ConfigError."""
    settings = DecodeSettings()
    if options.config:
        # Imported only on request: it knows the settings of every package, this one included.
        from pdserve.config import load_config

        settings = load_config(options.config).decode
    engine = replace(settings.engine, **_given(options, _ENGINE_FLAGS))
    settings = replace(settings, engine=engine, **_given(options, _WORKER_FLAGS))
    if options.registry is not None:
        settings = replace(settings, registry=replace(settings.registry, url=options.registry))
    if not settings.model:
        raise ConfigError("no model is named", field="model", remedy="give --model PATH, or --model smollm2")
    return settings


async def _load(settings: DecodeSettings, registry: Registry | None) -> DecodeWorker:
    path = model_path(settings.model)
    model = await asyncio.to_thread(load_model, path, settings.engine.dtype, settings.engine.device)
    bundle = await asyncio.to_thread(load_bundle, path)
    return DecodeWorker(model, bundle, settings, registry)


def _given(options: argparse.Namespace, flags: tuple[tuple[str, type, str, str], ...]) -> dict[str, Any]:
    names = [flag.removeprefix("--").replace("-", "_") for flag, _, _, _ in flags]
    return {name: getattr(options, name) for name in names if getattr(options, name) is not None}


def _registry(settings: DecodeSettings) -> Registry | None:
    """None for memory://: a registry in this process would be read by nobody else."""
    if settings.registry.url == "memory://":
        return None
    return open_registry(settings.registry.url, settings.registry, settings.rpc)


async def _first(*events: asyncio.Event) -> None:
    """Returns when one of the events is set."""
    waits = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m decode_worker", description="A decode worker of pdserve.")
    parser.add_argument("--config", metavar="FILE", help="TOML file; see its [decode] section")
    for flag, kind, metavar, text in (*_WORKER_FLAGS, *_ENGINE_FLAGS):
        parser.add_argument(flag, type=kind, metavar=metavar, help=text)
    parser.add_argument("--registry", metavar="URL", help="grpc://HOST:PORT or redis://HOST:PORT/DATABASE")
    parser.add_argument("--log-level", default="warning", choices=("debug", "info", "warning", "error"))
    return parser


if __name__ == "__main__":
    sys.exit(main())
