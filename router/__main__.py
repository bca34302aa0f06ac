"""`python -m router`: one router in this process, until SIGTERM or SIGINT drains it."""

from __future__ import annotations

import argparse
import asyncio
import logging
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace

from pdserve.errors import ConfigError, PdserveError
from router.app import Router
from router.settings import RouterSettings


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the process's exit status: 0 after a drain, 2 for a configuration that cannot work, 1 otherwise."""
    options = _parser().parse_args(arguments)
    logging.basicConfig(level=options.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        asyncio.run(serve(settings_of(options)))
    except PdserveError as error:
        sys.stderr.write(f"router: {error}\n")
        return 2 if isinstance(error, ConfigError) else 1
    return 0


async def serve(settings: RouterSettings) -> None:
    """Starts a router, says where it listens, and drains it on the first signal. Raises what start() raises."""
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    router = Router(settings)
    await router.start()
    sys.stdout.write(f"router ready: grpc {router.address} http http://{router.http_address}\n")
    sys.stdout.flush()
    try:
        await stopping.wait()
        await router.drain()
    finally:
        await router.stop()


def settings_of(options: argparse.Namespace) -> RouterSettings:
    """The configuration file's [router], with the flags on top."""
    settings = RouterSettings()
    if options.config:
        # Imported only on request: it knows the settings of every package, this one included.
        from pdserve.config import load_config

        settings = load_config(options.config).router
    given = {"host": options.host, "port": options.port, "http_port": options.http_port}
    settings = replace(settings, **{name: value for name, value in given.items() if value is not None})
    if options.registry is not None:
        settings = replace(settings, registry=replace(settings.registry, url=options.registry))
    return settings


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m router", description="Gateway gRPC and OpenAI HTTP of pdserve.")
    parser.add_argument("--config", metavar="FILE", help="TOML file; see its [router] section")
    parser.add_argument("--host", help="interface to listen on (default: loopback)")
    parser.add_argument("--port", type=int, help="port of the gRPC gateway; 0 takes any free one")
    parser.add_argument("--http-port", type=int, help="port of the OpenAI HTTP API; 0 takes any free one")
    parser.add_argument("--registry", metavar="URL", help="memory://, grpc://HOST:PORT or redis://HOST:PORT/DATABASE")
    parser.add_argument("--log-level", default="warning", choices=("debug", "info", "warning", "error"))
    return parser


if __name__ == "__main__":
    sys.exit(main())
