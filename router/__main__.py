"""`python -m router`: one router in this process, until SIGTERM or SIGINT drains it."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from dataclasses import replace

from pdserve.rpc.process import parser, run, serve, set_up_logs
from router.app import Router
from router.settings import DISAGGREGATE, RouterSettings


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status; see `pdserve.rpc.process.run`."""
    parse = parser("router", "Gateway gRPC and OpenAI HTTP of pdserve.")
    parse.add_argument("--host", help="interface to listen on (default: loopback)")
    parse.add_argument("--port", type=int, help="port of the gRPC gateway; 0 takes any free one")
    parse.add_argument("--http-port", type=int, help="port of the OpenAI HTTP API; 0 takes any free one")
    parse.add_argument("--disaggregate", choices=DISAGGREGATE, help="who computes prompts (default: always)")
    options = parse.parse_args(arguments)

    async def serve_router(stopping: asyncio.Event) -> None:
        settings = _settings(options)
        set_up_logs(options, settings.telemetry, "router")
        router = Router(settings)
        await serve(router, lambda: f"router ready: grpc {router.address} http http://{router.http_address}", stopping)

    return run("router", options, serve_router)


def _settings(options: argparse.Namespace) -> RouterSettings:
    """The configuration file's [router], with the flags on top."""
    settings = RouterSettings()
    if options.config:
        # Imported only on request: it knows the settings of every package, this one included.
        from pdserve.config import load_config

        settings = load_config(options.config).router
    given = {"host": options.host, "port": options.port, "http_port": options.http_port}
    given["disaggregate"] = options.disaggregate
    settings = replace(settings, **{name: value for name, value in given.items() if value is not None})
    if options.registry is not None:
        settings = replace(settings, registry=replace(settings.registry, url=options.registry))
    return settings


if __name__ == "__main__":
    sys.exit(main())
