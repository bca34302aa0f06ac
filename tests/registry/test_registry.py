"""One suite over every registry: memory, Redis, and both behind gRPC."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pdserve.errors import NotFound
from pdserve.registry.records import DRAINING, READY, STARTING, Load
from tests.registry.conftest import Harness
from tests.registry.records import FIRST_BOOT, SECOND_BOOT, record

SHORT = 0.5  # seconds


async def ids(harness: Harness) -> list[str]:
    return [live.record.worker_id for live in await harness.registry.snapshot()]


async def test_a_record_comes_back_whole(harness: Harness) -> None:
    await harness.registry.register(record())
    (live,) = await harness.registry.snapshot()
    assert live.record == record()
    assert 0.0 < live.lease_left_s <= 20.0


async def test_an_empty_registry_has_an_empty_snapshot(harness: Harness) -> None:
    assert await harness.registry.snapshot() == ()


async def test_snapshots_are_ordered_by_worker_id(harness: Harness) -> None:
    for name in ("c", "a", "b"):
        await harness.registry.register(record(name))
    assert await ids(harness) == ["a", "b", "c"]


async def test_a_heartbeat_carries_state_and_load_and_nothing_else(harness: Harness) -> None:
    await harness.registry.register(record(state=STARTING))
    await harness.registry.heartbeat("decode-a", FIRST_BOOT, DRAINING, Load(running=9))
    (live,) = await harness.registry.snapshot()
    assert live.record == replace(record(), state=DRAINING, load=Load(running=9))


async def test_registering_again_replaces_the_earlier_incarnation(harness: Harness) -> None:
    await harness.registry.register(record(model="old"))
    await harness.registry.register(record(model="new", incarnation=SECOND_BOOT))
    (live,) = await harness.registry.snapshot()
    assert live.record == record(model="new", incarnation=SECOND_BOOT)
    with pytest.raises(NotFound) as caught:
        await harness.registry.heartbeat("decode-a", FIRST_BOOT, READY, Load())
    assert caught.value.reason == "NOT_REGISTERED"
    await harness.registry.heartbeat("decode-a", SECOND_BOOT, READY, Load())


async def test_an_earlier_incarnation_cannot_deregister_its_successor(harness: Harness) -> None:
    await harness.registry.register(record(incarnation=SECOND_BOOT))
    await harness.registry.deregister("decode-a", FIRST_BOOT)
    assert await ids(harness) == ["decode-a"]
    await harness.registry.deregister("decode-a", SECOND_BOOT)
    assert await ids(harness) == []
    await harness.registry.deregister("decode-a", SECOND_BOOT)


async def test_heartbeats_of_unknown_workers_are_not_found(harness: Harness) -> None:
    with pytest.raises(NotFound):
        await harness.registry.heartbeat("nobody", FIRST_BOOT, READY, Load())
    assert await ids(harness) == []


async def test_a_record_ends_with_its_lease(harness: Harness) -> None:
    await harness.registry.register(record("brief", lease_s=SHORT))
    await harness.registry.register(record("long"))
    assert await ids(harness) == ["brief", "long"]
    await harness.pass_time(SHORT * 1.5)
    assert await ids(harness) == ["long"]
    with pytest.raises(NotFound):
        await harness.registry.heartbeat("brief", FIRST_BOOT, READY, Load())
    await harness.registry.register(record("brief", lease_s=SHORT))
    assert await ids(harness) == ["brief", "long"]


async def test_heartbeats_renew_the_lease(harness: Harness) -> None:
    lease = 1.0
    await harness.registry.register(record(lease_s=lease))
    for _ in range(3):  # longer than one lease in all
        await harness.pass_time(lease * 3 / 8)
        await harness.registry.heartbeat("decode-a", FIRST_BOOT, READY, Load())
        (live,) = await harness.registry.snapshot()
        assert lease / 2 < live.lease_left_s <= lease
