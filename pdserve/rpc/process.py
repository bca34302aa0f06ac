"""A service as a process of its own: signals, one ready line, one line per error, an exit status.

start() --ready line--> serving --SIGTERM, SIGINT, or the end of standard input--> drain() --> stop() --> exit

Each of these steps is bounded by the service. What is left then cannot be ended from inside: a
thread that hangs in a step or a driver, which Python would wait for without limit at exit. So
the process ends by force, with status 1: `HUNG_S` after stop() if the service knows of such a
thread, else `EXIT_S` after it.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

from pdserve.errors import CheckpointError, ConfigError, Internal, PdserveError
from pdserve.telemetry import logs
from pdserve.telemetry.settings import LOG_FORMATS, LOG_LEVELS, TelemetrySettings

log = logging.getLogger(__name__)

EXIT_S = 10.0  # for connections to close and threads to end, once the service has stopped
HUNG_S = 0.5  # the same where one thread is known never to end


class Service(Protocol):
    """What a router and the workers have in common."""

    broken: asyncio.Event  # a background task died of a fault of ours
    hung: bool  # after stop(): a thread of it is left that does not end

    async def start(self) -> Any: ...

    async def drain(self) -> None: ...

    async def stop(self) -> None: ...


def parser(name: str, description: str) -> argparse.ArgumentParser:
    """The flags that every service has."""
    made = argparse.ArgumentParser(prog=f"python -m {name}", description=description)
    made.add_argument("--config", metavar="FILE", help="TOML file; `pdserve config` prints every key")
    made.add_argument("--registry", metavar="URL", help="memory://, grpc://HOST:PORT or redis://HOST:PORT/DATABASE")
    made.add_argument("--log-level", choices=LOG_LEVELS, help="default: telemetry.log_level of the configuration")
    made.add_argument("--log-format", choices=LOG_FORMATS, help="default: telemetry.log_format of the configuration")
    made.add_argument(
        "--stop-with-stdin", action="store_true", help="also stop when standard input ends, as when the parent dies"
    )
    return made


def run(name: str, options: argparse.Namespace, main: Callable[[asyncio.Event], Coroutine[Any, Any, None]]) -> int:
    """Runs `main(stopping)` to its end.

    Returns the exit status: 0 after a drain, 2 for what the operator can correct (configuration,
    model), 1 for any other failure; the error is one line on standard error.
    """
    set_up_logs(options, TelemetrySettings(), name)  # until the configuration is read
    try:
        asyncio.run(_until_stopped(main, options.stop_with_stdin))
    except PdserveError as error:
        sys.stderr.write(f"{name}: {error}\n")
        return 2 if isinstance(error, (ConfigError, CheckpointError)) else 1
    return 0


def set_up_logs(options: argparse.Namespace, settings: TelemetrySettings, name: str, worker: str = "") -> None:
    """The process's log as the flags say, or else as the settings do. `name`: of its module."""
    part = name.removesuffix("_worker")
    logs.configure(settings, part, worker, level=options.log_level or "", style=options.log_format or "")


async def serve(service: Service, ready: Callable[[], str], stopping: asyncio.Event) -> None:
    """Starts a service, prints its ready line, and drains it once told to stop.

    Raises what start() raises, and Internal when the service broke while it ran.
    """
    try:
        await service.start()
        sys.stdout.write(f"{ready()}\n")
        sys.stdout.flush()
        await _first(stopping, service.broken)
        await service.drain()
    finally:
        await service.stop()
    _exit_by_force_after(HUNG_S if service.hung else EXIT_S)
    if service.broken.is_set():
        raise Internal("the service failed", remedy="see its log")


def _exit_by_force_after(seconds: float) -> None:
    """Ends the process then, unless it has ended by itself before."""

    def force() -> None:
        left = [thread.name for thread in threading.enumerate() if not thread.daemon]
        log.critical("the process does not end by itself, threads left: %s", ", ".join(left))
        logging.shutdown()
        sys.stdout.flush()
        os._exit(1)

    timer = threading.Timer(seconds, force)
    timer.daemon = True
    timer.start()


async def _until_stopped(main: Callable[[asyncio.Event], Coroutine[Any, Any, None]], stop_with_stdin: bool) -> None:
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    if stop_with_stdin:
        loop.add_reader(sys.stdin, _read_to_end, stopping)
    try:
        await main(stopping)
    finally:
        if stop_with_stdin:
            loop.remove_reader(sys.stdin)


def _read_to_end(stopping: asyncio.Event) -> None:
    if not os.read(sys.stdin.fileno(), 4096):
        asyncio.get_running_loop().remove_reader(sys.stdin)
        stopping.set()


async def _first(*events: asyncio.Event) -> None:
    """Returns when one of the events is set."""
    waits = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
