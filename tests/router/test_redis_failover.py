"""A Redis whose replica takes over while a router serves: a warning, and not one failed request."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from dataclasses import replace

import pytest

from router.app import Router
from tests.redis_server import running_redis
from tests.router.support import House, router_settings
from tests.router.test_two_routers import REGISTRY, follow, knows, warned

pytestmark = pytest.mark.redis


async def test_a_replica_that_takes_over_is_a_warning_and_no_failed_request() -> None:
    with running_redis() as primary, running_redis() as replica:
        replica.follow(primary)
        url = f"redis://{primary.address},{replica.address}/0"
        async with AsyncExitStack() as stack:
            router = Router(router_settings(registry=replace(REGISTRY, url=url)))
            await router.start()
            stack.push_async_callback(router.stop)
            made = House(router)
            for add, name in ((made.add_prefill, "p0"), (made.add_decode, "d0")):
                stack.push_async_callback((await add(name, registry=REGISTRY)).stop)
            here, begun = router.address, asyncio.Event()
            await knows(here, 2)
            undisturbed = await follow(here, asyncio.Event())
            stream = asyncio.create_task(follow(here, begun))
            await begun.wait()
            primary.kill()
            assert "serving from the last known pool" in await warned(here, True)
            assert await follow(here, asyncio.Event()) == undisturbed, "nobody takes writes"
            replica.follow(None)
            await warned(here, False)
            assert await follow(here, asyncio.Event()) == undisturbed, "the replica does"
            await knows(here, 2)
            assert await stream == undisturbed
            await made.assert_nothing_held()
