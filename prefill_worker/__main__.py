"""`python -m prefill_worker`: one prefill worker in this process, until SIGTERM or SIGINT drains it."""

from __future__ import annotations

import argparse
import asyncio
import logging
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from pdserve.engine.load import load_model, model_path
from pdserve.errors import ConfigError, Internal, PdserveError
from pdserve.registry.open import open_registry
from pdserve.registry.records import Registry
from pdserve.tokenizer import load_bundle
from prefill_worker.settings import PrefillSettings
from prefill_worker.worker import PrefillWorker


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0 after a drain, 1 for a fault while running, 2 for what the operator can correct."""
    options = _parser().parse_args(arguments)
    logging.basicConfig(level=options.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        asyncio.run(serve(settings_of(options)))
    except PdserveError as error:
        sys.stderr.write(f"prefill_worker: {error}\n")
        return 1 if isinstance(error, Internal) else 2
    return 0


async def serve(settings: PrefillSettings) -> None:
    """Loads the model, serves, and drains on the first signal. Raises what loading and start() raise."""
    settings.check()
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    registry = _registry(settings)
    try:
        path = model_path(settings.model)
        model = await asyncio.to_thread(load_model, path, settings.engine.dtype, settings.engine.device)
        bundle = await asyncio.to_thread(load_bundle, path)
        worker = PrefillWorker(model, bundle, settings, registry)
        del model  # the engine holds the weights; nothing else needs the checkpoint
        address = await worker.start()
        sys.stdout.write(f"prefill worker ready: {address}\n")
        sys.stdout.flush()
        try:
            await _first(stopping, worker.broken)
            await worker.drain()
        finally:
            await worker.stop()
        if worker.broken.is_set():
            raise Internal("the worker failed", remedy="see its log")
    finally:
        if registry is not None:
            await registry.close()


def settings_of(options: argparse.Namespace) -> PrefillSettings:
    """The configuration file's [prefill], with the flags on top."""
    settings = PrefillSettings()
    if options.config:
        # Imported only on request: it knows the settings of every package, this one included.
        from pdserve.config import load_config

        settings = load_config(options.config).prefill
    names = ("model", "name", "worker_id", "host", "port", "advertise")
    settings = replace(settings, **_given(options, names))
    engine = replace(settings.engine, **_given(options, ("dtype", "pages", "page_size", "threads")))
    settings = replace(settings, engine=engine)
    if options.registry is not None:
        settings = replace(settings, registry=replace(settings.registry, url=options.registry))
    if not settings.model:
        raise ConfigError("no model is named", field="model", remedy="give --model PATH, or --model smollm2")
    return settings


def _given(options: argparse.Namespace, names: tuple[str, ...]) -> dict[str, Any]:
    return {name: getattr(options, name) for name in names if getattr(options, name) is not None}


def _registry(settings: PrefillSettings) -> Registry | None:
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
    parser = argparse.ArgumentParser(prog="python -m prefill_worker", description="A prefill worker of pdserve.")
    parser.add_argument("--config", metavar="FILE", help="TOML file; see its [prefill] section")
    parser.add_argument("--model", metavar="PATH", help='checkpoint directory or file; "smollm2": the packaged model')
    parser.add_argument("--name", help="served model name (default: the checkpoint's own)")
    parser.add_argument("--worker-id", metavar="ID", help="name in the registry (default: a random one)")
    parser.add_argument("--host", help="interface to listen on (default: loopback)")
    parser.add_argument("--port", type=int, help="port to listen on; 0 takes any free one")
    parser.add_argument("--advertise", metavar="HOST:PORT", help="address that others reach this worker by")
    parser.add_argument("--registry", metavar="URL", help="grpc://HOST:PORT or redis://HOST:PORT/DATABASE")
    parser.add_argument(
        "--dtype", choices=("bf16", "fp32", "fp16", "float64"), help="of weights, activations and cache"
    )
    parser.add_argument("--pages", type=int, help="pages of the cache pool")
    parser.add_argument("--page-size", type=int, help="tokens of a page")
    parser.add_argument("--threads", type=int, help="threads that compute one step")
    parser.add_argument("--log-level", default="warning", choices=("debug", "info", "warning", "error"))
    return parser


if __name__ == "__main__":
    sys.exit(main())
