"""Memory for weights and cache: aligned, zero, and taken when it is said to be."""

from __future__ import annotations

import mmap

import pytest
import torch

from pdserve.engine.large_pages import LARGE_PAGE, LINE, Room, touch, zeros
from pdserve.engine.plan import Chunk
from pdserve.errors import ConfigError
from tests.engine.tiny import prompt, run, tiny_engine


@pytest.mark.parametrize("count", [1, LARGE_PAGE - 1, 3 * LARGE_PAGE + 5])
def test_it_begins_at_a_large_page_and_is_zero(count: int) -> None:
    memory = zeros(count)
    assert memory.shape == (count,) and memory.untyped_storage().nbytes() == count
    assert memory.data_ptr() % LARGE_PAGE == 0
    assert not memory.any()
    memory.fill_(7)
    assert memory.sum() == 7 * count


def test_more_than_there_is_is_a_memory_error() -> None:
    for count in (1 << 50, 1 << 70):
        with pytest.raises(MemoryError):
            zeros(count)
        with pytest.raises(MemoryError):
            Room().take((count,), torch.uint8)


def test_a_pool_that_there_is_no_memory_for_names_the_pages() -> None:
    with pytest.raises(ConfigError, match="no memory for") as raised:
        tiny_engine(pages=1 << 50)
    assert raised.value.field == "pages" and raised.value.remedy


def test_a_kernel_without_large_pages_gives_small_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    class Refusing(mmap.mmap):
        def madvise(self, *arguments: int) -> None:
            raise OSError(22, "Invalid argument")  # as Linux says it, built without transparent huge pages

    monkeypatch.setattr(mmap, "mmap", Refusing)
    memory = zeros(5)
    assert memory.data_ptr() % LARGE_PAGE == 0 and not memory.any()


def test_tensors_of_a_room_share_no_byte_and_begin_at_a_line() -> None:
    room = Room()
    shapes = [(3, 5), (1,), (700, 1000), (17,), (2048, 2048), (9,)]
    taken = [room.take(shape, torch.float32) for shape in shapes]
    for number, tensor in enumerate(taken):
        tensor.fill_(number)
    for number, (tensor, shape) in enumerate(zip(taken, shapes, strict=True)):
        assert tensor.shape == shape and tensor.is_contiguous() and tensor.data_ptr() % LINE == 0
        assert bool((tensor == number).all())


def resident(memory: torch.Tensor) -> int:
    """KiB that the mapping around a tensor holds, by the kernel's count."""
    at, inside = memory.data_ptr(), False
    with open("/proc/self/smaps") as maps:
        for line in maps:
            if "-" in line.split()[0]:
                first, end = (int(part, 16) for part in line.split()[0].split("-"))
                inside = first <= at < end
            elif inside and line.startswith("Rss:"):
                return int(line.split()[1])
    raise AssertionError("no mapping has it")


def test_touching_takes_the_memory_and_leaves_what_is_in_it() -> None:
    memory = zeros(8 * LARGE_PAGE)
    memory[5 * LARGE_PAGE] = 9
    before = resident(memory)
    touch(memory)
    assert resident(memory) >= 8 * LARGE_PAGE // 1024 > before
    assert memory[5 * LARGE_PAGE] == 9 and memory.sum() == 9


def test_preparing_an_engine_changes_no_answer() -> None:
    engine, other = tiny_engine(), tiny_engine()
    plan = prompt(6)
    first = run(engine, Chunk("r", plan, 0, (0, 1))).logits["r"]
    engine.prepare()  # after a step, too: what the cache holds stays
    again = run(engine, Chunk("r", (plan[0],), 6, (0, 1))).logits["r"]
    run(other, Chunk("r", plan, 0, (0, 1)))
    assert torch.equal(again, run(other, Chunk("r", (plan[0],), 6, (0, 1))).logits["r"])
    assert torch.isfinite(first).all()
