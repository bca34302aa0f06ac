"""The fault matrix, a test for each cell: `-k decode-hang` runs some; `make faults` prints figures."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.e2e.faults.cell import run
from tests.e2e.faults.house import House, open_house
from tests.e2e.faults.table import CELLS, Cell, Fault

pytestmark = [pytest.mark.slow, pytest.mark.redis, pytest.mark.asyncio(loop_scope="module")]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def house(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[House]:
    async with open_house(tmp_path_factory.mktemp("faults"), relays=False) as made:
        yield made


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def house_with_relays(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[House]:
    async with open_house(tmp_path_factory.mktemp("slow"), relays=True) as made:
        yield made


def _cells(*, slow: bool) -> list[object]:
    return [pytest.param(cell, id=cell.name) for cell in CELLS if (cell.fault is Fault.SLOW) == slow]


async def _check(house: House, cell: Cell) -> None:
    try:
        await run(house, cell)
    except BaseException as error:
        error.add_note(house.logs())
        await house.repair()
        raise


@pytest.mark.parametrize("cell", _cells(slow=False))
async def test_a_part_that_dies_hangs_or_starts_anew(house: House, cell: Cell) -> None:
    await _check(house, cell)


@pytest.mark.parametrize("cell", _cells(slow=True))
async def test_a_slow_network(house_with_relays: House, cell: Cell) -> None:
    await _check(house_with_relays, cell)
