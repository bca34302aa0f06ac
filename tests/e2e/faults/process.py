"""One process of the installation, forked in milliseconds from a server that has imported everything.

The fork server has made neither a thread nor anything of gRPC, so what it forks is as good as a
process of its own. The child serves until it is killed, or until its parent is gone.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import multiprocessing
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from decode_worker.settings import DecodeSettings
from decode_worker.worker import DecodeWorker
from pdserve.worker_main import open_worker_registry
from prefill_worker.settings import PrefillSettings
from prefill_worker.worker import PrefillWorker
from router.app import Router
from router.settings import RouterSettings
from tests.e2e.faults.points import Points, watch_decode, watch_prefill, watch_router
from tests.e2e.stack import pause
from tests.engine.tiny import tiny_model

Settings = PrefillSettings | DecodeSettings | RouterSettings

START_S = 60.0  # the first start imports torch
END_S = 10.0

_FORK = multiprocessing.get_context("forkserver")
_FORK.set_forkserver_preload(["__main__", __name__])


@dataclass(frozen=True)
class Plan:
    """What a child is to be."""

    name: str
    settings: Settings
    log: Path


class Child:
    """The parent's hold on one child. start() -> running -> kill().

    Args:
        on_message: told of everything it says unasked: ("reached", step), ("pair", prefill, decode).
    """

    def __init__(self, plan: Plan, on_message: Callable[[Child, tuple[Any, ...]], None]) -> None:
        self.name = plan.name
        self._plan = plan
        self._on_message = on_message
        self._pipe, self._its_pipe = _FORK.Pipe()
        self._process = _FORK.Process(target=_child, args=(self._its_pipe, plan), name=plan.name, daemon=True)
        self._answers: asyncio.Queue[tuple[Any, ...]] = asyncio.Queue()
        self._held = False

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    async def start(self) -> None:
        """Returns once it serves. Raises AssertionError with its log if it does not."""
        await asyncio.to_thread(self._process.start)
        self._its_pipe.close()
        asyncio.get_running_loop().add_reader(self._pipe.fileno(), self._read)
        assert await self._answer(START_S) == ("ready",), f"{self.name} did not start:\n{self.log_tail()}"

    async def arm(self, step: str) -> None:
        await self._order("arm", step)

    async def disarm(self) -> None:
        await self._order("disarm")

    def go(self) -> None:
        """Lets go what stands still at a point."""
        self._pipe.send(("go",))

    async def stop(self) -> None:
        """SIGSTOP; returns once nothing of it runs."""
        os.kill(self.pid, signal.SIGSTOP)
        async with asyncio.timeout(END_S):
            while not _stopped(self.pid):
                await pause(0.001)

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    async def kill(self) -> None:
        """SIGKILL; returns once it is gone. Idempotent."""
        if self._pipe.closed:
            return
        if self._process.pid is not None:
            self._process.kill()
            await asyncio.to_thread(self._process.join, END_S)
        asyncio.get_running_loop().remove_reader(self._pipe.fileno())
        self._pipe.close()
        assert not self._process.is_alive()

    def log_tail(self, characters: int = 4000) -> str:
        return self._plan.log.read_text()[-characters:] if self._plan.log.exists() else ""

    async def _order(self, *message: object) -> None:
        self._pipe.send(message)
        assert await self._answer(END_S) == ("noted",)

    async def _answer(self, within_s: float) -> tuple[Any, ...]:
        try:
            async with asyncio.timeout(within_s):
                return await self._answers.get()
        except TimeoutError:
            raise AssertionError(f"{self.name} does not answer:\n{self.log_tail()}") from None

    def _read(self) -> None:
        try:
            message = self._pipe.recv()
        except (EOFError, ConnectionResetError):
            asyncio.get_running_loop().remove_reader(self._pipe.fileno())
            self._answers.put_nowait(("gone",))
            return
        if message[0] in ("ready", "noted"):
            self._answers.put_nowait(message)
        else:
            self._on_message(self, message)


def _stopped(pid: int) -> bool:
    """Whether every thread of a process has the state T of proc(5)."""
    stats = [(task / "stat").read_text() for task in Path(f"/proc/{pid}/task").iterdir()]
    return all(stat.rpartition(")")[2].split()[0] in "Tt" for stat in stats)


# -- in the child ------------------------------------------------------------------------------


def _child(pipe: Connection, plan: Plan) -> None:
    # A child that is stopped cannot see its parent go. The number is PR_SET_PDEATHSIG, from linux/prctl.h.
    ctypes.CDLL(None).prctl(1, int(signal.SIGKILL))
    logging.basicConfig(
        filename=plan.log,
        level=logging.INFO,
        format=f"%(asctime)s.%(msecs)03d {plan.name} %(levelname)s %(name)s: %(message)s",
        datefmt="%H:%M:%S",
    )
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    asyncio.run(_serve(pipe, plan.settings))


async def _serve(pipe: Connection, settings: Settings) -> None:
    points = Points(pipe)
    service = _build(points, settings)  # kept: a server that nobody holds is closed
    await service.start()
    points.tell("ready")
    await points.gone.wait()
    os._exit(0)


def _build(points: Points, settings: Settings) -> Any:
    if isinstance(settings, RouterSettings):
        watch_router(points)
        return Router(settings)
    torch.set_num_threads(1)
    model, registry = tiny_model(), open_worker_registry(settings)
    if isinstance(settings, PrefillSettings):
        watch_prefill(points)
        return PrefillWorker(model, None, settings, registry)
    watch_decode(points)
    return DecodeWorker(model, None, settings, registry)
