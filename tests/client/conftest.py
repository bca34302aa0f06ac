"""Both clients, called in one way."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from pdserve.client import AsyncClient, Client
from tests.client.answers import Ask


@pytest.fixture(params=["async", "sync"])
def ask(request: pytest.FixtureRequest) -> Ask:
    """Calls a method of either client and returns its result; what `generate` yields comes as a list."""

    async def with_async(address: str, method: str, *args: Any, **options: Any) -> Any:
        async with AsyncClient(address) as client:
            if method == "generate":
                return [event async for event in client.generate(*args, **options)]
            return await getattr(client, method)(*args, **options)

    def with_sync(address: str, method: str, *args: Any, **options: Any) -> Any:
        with Client(address) as client:
            result = getattr(client, method)(*args, **options)
            return list(result) if method == "generate" else result

    async def in_thread(*args: Any, **options: Any) -> Any:
        return await asyncio.to_thread(with_sync, *args, **options)

    return with_async if request.param == "async" else in_thread
