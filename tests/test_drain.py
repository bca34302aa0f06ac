"""How a pod tells the workers that Ray runs in it to drain."""

from __future__ import annotations

import asyncio
import stat
import sys
from pathlib import Path

import pytest

from pdserve.drain import DrainDoor, drain_all, folder


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


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
    assert command.returncode == 0 and told.decode().strip() == "2 workers drained"
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
    (folder() / "dead.drain").touch()
    assert await drain_all(0.2) == (0, 1)
    never.set()
    assert await drain_all(30.0) == (1, 0)
    await slow.close()


async def test_without_a_worker_there_is_nothing_to_drain() -> None:
    assert await drain_all(1.0) == (0, 0)
