"""How a pod tells the workers that Ray runs in it to drain."""

from __future__ import annotations

import asyncio
import os
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from pdserve.drain import DrainDoor, drain_all, folder


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


def killed_workers_door(name: str = "dead.drain") -> Path:
    path = folder() / name
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
    return path


async def test_every_worker_here_drains_before_the_command_returns() -> None:
    drained: list[str] = []

    async def drain(name: str) -> None:
        drained.append(name)

    doors = [DrainDoor(lambda: drain("prefill")), DrainDoor(lambda: drain("decode"))]
    for door in doors:
        await door.open()
    assert stat.S_IMODE(folder().stat().st_mode) == 0o700, "nobody else may knock"
    command = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "pdserve.cli", "drain", "--timeout-s", "30", stdout=asyncio.subprocess.PIPE
    )
    told, _ = await command.communicate()
    assert command.returncode == 0 and told.decode().strip() == "workers drained: 2"
    assert sorted(drained) == ["decode", "prefill"]
    for door in doors:
        await door.close()
        await door.close()
    assert not list(folder().iterdir())


async def test_a_worker_that_takes_too_long_is_said_and_one_that_died_is_not_waited_for() -> None:
    never = asyncio.Event()

    async def hang() -> None:
        await never.wait()

    slow = DrainDoor(hang)
    await slow.open()
    dead = killed_workers_door()
    assert await drain_all(0.2) == (0, 1)
    assert slow.path.exists() and not dead.exists()
    never.set()
    assert await drain_all(30.0) == (1, 0)
    await slow.close()


async def test_what_a_killed_worker_leaves_goes_when_the_next_one_opens() -> None:
    drained = asyncio.Event()

    async def drain() -> None:
        drained.set()

    first, second = DrainDoor(drain), DrainDoor(drain)
    await first.open()
    dead = killed_workers_door()
    await second.open()
    assert sorted(folder().iterdir()) == sorted([first.path, second.path]) and not dead.exists()
    assert not drained.is_set(), "looking whether somebody is there is no knock"
    for door in (first, second):
        await door.close()
    assert not list(folder().iterdir())


async def test_a_door_that_was_being_made_goes_with_its_process_only() -> None:
    async def drain() -> None: ...

    with subprocess.Popen([sys.executable, "-c", ""]) as gone:
        gone.wait()
    folder().mkdir(mode=0o700)
    dead = killed_workers_door(f"{gone.pid}-0a1b2c3d")
    others = [killed_workers_door(name) for name in (f"{os.getpid()}-0a1b2c3d", "1-0a1b2c3d", "somebody else's")]
    door = DrainDoor(drain)
    await door.open()
    assert not dead.exists() and sorted(folder().iterdir()) == sorted([*others, door.path])
    await door.close()


async def test_without_a_worker_there_is_nothing_to_drain() -> None:
    assert await drain_all(1.0) == (0, 0)
