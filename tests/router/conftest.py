"""A router with a pair of workers, OpenAI's client and plain HTTP in front of it, once for each module; a clock."""

from __future__ import annotations

from collections.abc import AsyncIterator

import httpx
import pytest
import pytest_asyncio
from openai import AsyncOpenAI

from tests.clock import Clock
from tests.router.support import House, house


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def made() -> AsyncIterator[House]:
    """A module with other settings has its own."""
    async with house() as it:
        yield it


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(made: House) -> AsyncIterator[AsyncOpenAI]:
    url = f"http://{made.router.http_address}/v1"
    async with AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=20) as it:
        yield it


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def http(made: House) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=f"http://{made.router.http_address}", timeout=20) as it:
        yield it


@pytest.fixture
def clock() -> Clock:
    return Clock()
