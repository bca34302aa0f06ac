"""Names, versions and users of one worker's adapters; the engine's own store, and adapters that change nothing."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from cache_transfer.encoding import sha256
from pdserve.engine.adapters import Adapter, Adapters
from pdserve.errors import CheckpointError, Exhausted, InvalidRequest, NotFound, PermissionDenied, Refused
from pdserve.registry.records import NamedAdapter
from pdserve.worker.adapters import AdapterShelf

LINGER_S = 1000.0


def digest(name: str) -> bytes:
    return sha256("adapter", name)


class Rig:
    """A shelf, who uses what, and how often routers were told."""

    def __init__(self, root: str = "", limit: int = 4) -> None:
        self.store = Adapters(tiled=False)
        self.users: list[bytes | None] = [None]
        self.told = 0
        self.shelf = AdapterShelf(self.store, self.read, lambda: self.users, self.announce, root, limit, LINGER_S)

    def read(self, path: Path) -> Adapter:
        """A version is its path's last part."""
        if path.name == "bad":
            raise CheckpointError("it is bad", field="path", reason="MISSING_FILE")
        return Adapter(digest(path.name), {}, rank=1, size=8)

    async def announce(self) -> None:
        self.told += 1

    async def load(self, name: str, version: str) -> None:
        await self.shelf.load(name, Path(version))

    def names(self) -> list[tuple[str, bytes]]:
        return [(each.name, each.digest) for each in self.shelf.named()]

    async def closing(self, version: str) -> None:
        """Until the version takes no new requests."""
        async with asyncio.timeout(5):
            while digest(version) in self.shelf:
                await asyncio.sleep(0)


async def test_names_stand_for_versions() -> None:
    rig = Rig()
    await rig.load("b", "one")
    await rig.load("a", "two")
    await rig.load("c", "one")
    assert rig.shelf.named() == tuple(NamedAdapter(n, digest(v)) for n, v in (("a", "two"), ("b", "one"), ("c", "one")))
    assert len(rig.store) == 2
    assert digest("one") in rig.shelf and digest("three") not in rig.shelf
    assert rig.told == 3


async def test_the_same_content_again_changes_nothing() -> None:
    rig = Rig()
    await rig.load("a", "one")
    before = rig.shelf.status()
    await rig.load("a", "one")
    assert rig.shelf.status() == before


async def test_a_replaced_version_stays_while_it_is_used_and_a_while_longer() -> None:
    rig = Rig()
    await rig.load("a", "one")
    await rig.load("a", "two")
    assert rig.names() == [("a", digest("two")), ("", digest("one"))]
    rig.users = [digest("one")]
    now = time.monotonic()
    rig.shelf.reap(now + 10 * LINGER_S)
    assert digest("one") in rig.shelf
    rig.users = []
    rig.shelf.reap(now + 10.5 * LINGER_S)
    assert digest("one") in rig.shelf, "unused for half of the time"
    rig.shelf.reap(now + 11.5 * LINGER_S)
    assert rig.names() == [("a", digest("two"))]
    assert digest("one") not in rig.store


async def test_a_replaced_version_can_come_back() -> None:
    rig = Rig()
    for version in ("one", "two", "one"):
        await rig.load("a", version)
    assert rig.names() == [("a", digest("one")), ("", digest("two"))]
    rig.shelf.reap(time.monotonic() + 2 * LINGER_S)
    assert rig.names() == [("a", digest("one"))]


async def test_a_version_with_two_names_stays_when_one_is_gone() -> None:
    rig = Rig()
    await rig.load("a", "one")
    await rig.load("b", "one")
    rig.users = [digest("one")]
    await rig.shelf.unload("a", 0.0)
    assert rig.names() == [("b", digest("one"))]
    await rig.load("b", "two")
    assert ("", digest("one")) in rig.names()


async def test_unloading_waits_until_nobody_uses_it() -> None:
    rig = Rig()
    await rig.load("a", "one")
    rig.users = [digest("one"), digest("one")]
    unloading = asyncio.create_task(rig.shelf.unload("a", 60.0))
    await rig.closing("one")
    assert not rig.names()
    assert [(each.name, each.users) for each in rig.shelf.status()] == [("", 2)]
    with pytest.raises(Refused) as busy:
        await rig.load("b", "one")
    assert busy.value.reason == "ADAPTER_CLOSING"
    rig.users = [digest("one")]
    rig.shelf.reap(time.monotonic() + 2 * LINGER_S)
    await asyncio.sleep(0)
    assert not unloading.done() and digest("one") in rig.store
    rig.users = []
    rig.shelf.reap(time.monotonic())
    await unloading
    assert not rig.shelf.status() and not len(rig.store)


async def test_what_is_still_used_after_the_wait_stays_as_it_was() -> None:
    rig = Rig()
    await rig.load("a", "one")
    rig.users = [digest("one")]
    with pytest.raises(Refused, match="adapter 'a' is still used; requests: 1") as busy:
        await rig.shelf.unload("a", 0.0)
    assert busy.value.reason == "ADAPTER_IN_USE" and busy.value.retryable
    assert rig.names() == [("a", digest("one"))]


async def test_an_unloading_that_is_given_up_leaves_everything_as_it_was() -> None:
    rig = Rig()
    await rig.load("a", "one")
    rig.users = [digest("one")]
    unloading = asyncio.create_task(rig.shelf.unload("a", 60.0))
    await rig.closing("one")
    unloading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await unloading
    assert rig.names() == [("a", digest("one"))]


async def test_a_name_may_be_given_away_while_its_version_is_unloaded() -> None:
    rig = Rig()
    await rig.load("a", "one")
    rig.users = [digest("one")]
    unloading = asyncio.create_task(rig.shelf.unload("a", 60.0))
    await rig.closing("one")
    await rig.load("a", "two")
    unloading.cancel()
    await asyncio.gather(unloading, return_exceptions=True)
    assert rig.names() == [("a", digest("two")), ("", digest("one"))]


async def test_what_cannot_be_is_refused() -> None:
    rig = Rig(limit=2)
    for name in ("", "a b", "model:a", "a\n", "x" * 129):
        with pytest.raises(InvalidRequest) as bad:
            await rig.load(name, "one")
        assert bad.value.reason == "INVALID_ADAPTER_NAME"
    with pytest.raises(NotFound, match="'a'"):
        await rig.shelf.unload("a", 0.0)
    with pytest.raises(CheckpointError):
        await rig.load("a", "bad")
    await rig.load("a", "one")
    await rig.load("a", "two")
    with pytest.raises(Exhausted, match="replaced ones") as full:
        await rig.load("b", "three")
    assert full.value.reason == "ADAPTERS_FULL" and not full.value.retryable
    assert rig.names() == [("a", digest("two")), ("", digest("one"))]


async def test_a_callers_path_leads_nowhere_else(tmp_path: Path) -> None:
    (tmp_path / "adapters" / "one").mkdir(parents=True)
    (tmp_path / "secret").mkdir()
    (tmp_path / "adapters" / "link").symlink_to(tmp_path / "secret")
    rig = Rig(str(tmp_path / "adapters"))
    assert rig.shelf.locate("one") == rig.shelf.locate(str(tmp_path / "adapters" / "one"))
    for path in ("../secret", str(tmp_path / "secret"), "link", "/etc"):
        with pytest.raises(PermissionDenied) as refused:
            rig.shelf.locate(path)
        assert refused.value.reason == "ADAPTER_PATH"
    with pytest.raises(PermissionDenied) as off:
        Rig().shelf.locate("one")
    assert off.value.reason == "ADAPTERS_OFF"
