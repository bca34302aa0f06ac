"""Recorded decode steps and staged copies on a CPU: everything but the recording and the pinned memory itself.

A "recording" that only returns its work runs the same padded step at the same addresses; HostLane does at once what a
stream would do later, and LateLane does it as late as it may, which shows a wait that is missing.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cache_transfer.contract import PositionScheme
from pdserve.engine import paged
from pdserve.engine.attention import attend
from pdserve.engine.cache import PagedCache
from pdserve.engine.checks import TOLERANCES, check_written, relative_error
from pdserve.engine.engine import Engine
from pdserve.engine.graphs import BATCHES, DecodeGraphs, Work, bucket
from pdserve.engine.plan import Chunk, EngineConfig, StepOutput, StepPlan
from pdserve.engine.spec import ModelSpec
from pdserve.engine.staging import Done, HostLane, Staging
from pdserve.errors import Internal
from tests.engine import oracle
from tests.engine.tiny import TINY, prompt, run, spec, tiny_engine, tiny_model

FAMILIES: dict[str, ModelSpec] = {
    "plain llama": TINY,
    "windows and a soft cap": spec(sliding_window=(0, 5, 70), soft_cap=2.0),
    "attention sinks": spec(attention_sinks=True, sliding_window=(5, 0, 5)),
    "inputs of each layer, a cache that two read": spec(layer_input_width=5, kv_layers=(0, 1, 1), v_norm=True),
    "alibi": spec(positions=PositionScheme(kind="alibi", dims=4)),
    "learned positions, layer norm": spec(
        positions=PositionScheme(kind="learned", dims=512), norm="layer", norm_shift=True, mlp="plain"
    ),
}
LENGTHS = (70, 3, 16, 31, 40)


def as_it_is(work: Work) -> Work:
    return work


def filled(of: ModelSpec, **config: Any) -> tuple[Engine, list[tuple[int, ...]]]:
    """An engine with five sequences in its pages."""
    engine = tiny_engine(of, pages=120, **config)
    tables = [tuple(range(n * 24, n * 24 + 24))[::-1] for n in range(len(LENGTHS))]
    for n, (length, pages) in enumerate(zip(LENGTHS, tables, strict=True)):
        run(engine, Chunk(str(n), prompt(length, seed=n), 0, pages, "none"))
    return engine, tables


def decode(engine: Engine, tables: list[tuple[int, ...]], count: int, step: int) -> StepOutput:
    chunks = [Chunk(str(n), (7 + n + step,), LENGTHS[n] + step, tables[n]) for n in range(count)]
    plan = StepPlan(tuple(chunks))
    output = engine.step(plan)
    check_written(plan, output)
    return output


@pytest.mark.parametrize("order", ["hnd", "nhd"])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_padded_step_at_fixed_addresses_gives_what_a_plain_step_gives(name: str, order: str) -> None:
    of = FAMILIES[name]
    (plain, tables), (graphed, _) = (filled(of, axis_order=order) for _ in range(2))
    graphed.graphs = graphs = DecodeGraphs(graphed._plain, as_it_is)
    for step in range(6):  # 3, 16 and 31 cross into a new page
        wanted, found = (decode(engine, tables, 5, step) for engine in (plain, graphed))
        assert found.counters == wanted.counters and found.written == wanted.written
        for key, scores in wanted.logits.items():
            assert relative_error(found.logits[key], scores) < TOLERANCES["fp32"], (key, step)
            found.logits[key][0, 3] -= 1.0  # a sampler may
    assert graphs.steps == 6 and graphs.recorded == 1  # five in a bucket of eight, 18 and 19 pages in one of 32
    size = plain.cache.page_size
    for layer in (*plain.cache.planes, *graphed.cache.planes):
        for plane in layer.values():
            assert not plane.narrow(1 if order == "hnd" else 0, plain.cache.pad * size, size).any()
    assert relative_error(graphed.cache.storage, plain.cache.storage) < TOLERANCES["fp32"]


def test_a_recorded_step_equals_a_decoder_written_apart() -> None:
    engine, tables = filled(TINY)
    engine.graphs = DecodeGraphs(engine._plain, as_it_is)
    found = decode(engine, tables, 2, 0)
    for n in range(2):
        expected = oracle.logits(tiny_model(TINY), (*prompt(LENGTHS[n], seed=n), 7 + n))[-1:]
        assert relative_error(found.logits[str(n)], expected) < TOLERANCES["fp32"]


def test_few_graphs_serve_every_number_of_sequences_and_prompts_are_never_recorded() -> None:
    engine, tables = filled(TINY)
    engine.graphs = graphs = DecodeGraphs(engine._plain, as_it_is)
    for count in (1, 2, 3, 4, 5, 4, 3, 1):
        decode(engine, tables, count, 0)
    assert graphs.steps == 8 and graphs.recorded == 4 <= graphs.most
    run(engine, Chunk("0", (1, 2), 70, tables[0]), Chunk("1", (3,), 3, tables[1]))
    assert graphs.steps == 8
    assert [bucket(n, BATCHES) for n in (1, 3, 9, 128, 129)] == [1, 4, 16, 128, None]


class LateLane(HostLane):
    """Does nothing until somebody waits for it."""

    def __init__(self) -> None:
        self.todo: list[Work] = []

    def queue(self, work: Any) -> Done:
        self.todo.append(work)
        return self

    def wait(self) -> None:
        while self.todo:
            self.todo.pop(0)()

    def join(self) -> None:
        self.wait()


@pytest.mark.parametrize("lane", [HostLane, LateLane])
@pytest.mark.parametrize("order", ["hnd", "nhd"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_staged_rows_are_those_of_the_pages_however_late_a_copy_is(
    lane: type[HostLane], order: str, dtype: str
) -> None:
    config = EngineConfig(dtype=dtype, pages=12, page_size=4, axis_order=order)
    staged = PagedCache(TINY, config, Staging(lane(), buffers=2, buffer_bytes=200))  # a few rows a buffer
    plain = PagedCache(TINY, config)
    pages, tokens = (7, 2, 9), (1, 11)
    for layer in range(TINY.layers):
        for heads in ((0, 1), (1, 2), (0, 2)):
            size = 10 * (heads[1] - heads[0]) * 8 * plain.storage.element_size()
            payload = bytearray((layer * 31 + heads[0] * 17 + n) % 101 for n in range(size))
            for cache in (staged, plain):
                cache.write_rows(
                    "v", layer, cache.rows(cache.shape("k", 0), heads, tokens, pages), memoryview(bytes(payload))
                )
            payload[:] = bytes(size)  # the caller's memory is its own again
            read = [b"".join(cache.read_pieces("v", layer, heads, tokens, pages)) for cache in (staged, plain)]
            assert read[0] == read[1] != bytes(size)
    staged.join()
    assert torch.equal(staged.storage, plain.storage)


def test_a_step_comes_after_the_rows_that_a_handoff_brought() -> None:
    sender, tables = filled(TINY)
    receiver = tiny_engine(TINY, pages=120)
    receiver.cache = receiver._plain.cache = PagedCache(TINY, receiver.config, Staging(LateLane()))
    for layer in range(TINY.layers):
        for plane in ("k", "v"):
            payload = b"".join(sender.cache.read_pieces(plane, layer, (0, 2), (0, 70), tables[0]))
            rows = receiver.cache.rows(receiver.cache.shape("k", 0), (0, 2), (0, 70), tables[0])
            receiver.cache.write_rows(plane, layer, rows, memoryview(payload))
    chunk = Chunk("0", (9,), 70, tables[0])
    assert torch.equal(run(receiver, chunk).logits["0"], run(sender, chunk).logits["0"])


def test_a_row_that_fits_no_buffer_is_refused() -> None:
    cache = PagedCache(TINY, EngineConfig(pages=4), Staging(HostLane(), buffer_bytes=16))
    with pytest.raises(Internal, match="buffer"):
        cache.write_rows("k", 0, cache.rows(cache.shape("k", 0), (0, 1), (0, 1), (0,)), memoryview(bytes(32)))


@pytest.mark.parametrize("order", ["hnd", "nhd"])
def test_the_pages_that_a_kernel_is_given_hold_each_sequence(order: str) -> None:
    engine, tables = filled(TINY, axis_order=order)
    seen = torch.tensor(LENGTHS)
    table = torch.tensor([pages + (engine.cache.pad,) * 6 for pages in tables])
    begin, pages, last = paged.page_lists(table, seen, engine.cache.page_size)
    k, v = paged.page_views(engine.cache, 1)
    assert k.data_ptr() == engine.cache.storage[1, 0].data_ptr() and k.dtype == engine.cache.dtype
    for n, length in enumerate(LENGTHS):
        mine = pages[begin[n] : begin[n + 1]].long()
        assert (len(mine) - 1) * engine.cache.page_size + last[n] == length
        for views, wanted in zip((k, v), engine.cache.sequence(1, tables[n], length), strict=True):
            rows = views[mine] if order == "nhd" else views[mine].transpose(1, 2)  # [pages, page_size, Hkv, d]
            assert torch.equal(rows.flatten(0, 1)[:length].transpose(0, 1), wanted)


class Reference:
    """The plain reference as a kernel; `scale` other than the model's makes it one that is wrong."""

    def __init__(self, of: ModelSpec, cache: PagedCache, scale: float) -> None:
        self._spec, self._cache, self._scale = of, cache, scale

    def plan(self, table: torch.Tensor, seen: torch.Tensor) -> None:
        self._rows = list(zip(table.tolist(), seen.tolist(), strict=True))

    def attend(self, layer: int, q: torch.Tensor) -> torch.Tensor:
        out = []
        for row, (pages, keys) in enumerate(self._rows):
            k, v = self._cache.sequence(layer, pages, keys)
            out.append(attend(q[row : row + 1], k, v, torch.ones(1, keys, dtype=torch.bool), self._scale))
        return torch.cat(out)


def test_a_kernel_is_compared_with_the_reference_before_it_serves() -> None:
    engine, tables = filled(TINY)
    fresh = tiny_engine(TINY)
    right, wrong = (
        paged.compare(lambda *_, scale=scale: Reference(TINY, fresh.cache, scale), TINY, fresh.cache)
        for scale in (TINY.scale, 0.5 * TINY.scale)
    )
    assert right < 1e-5 < paged._TOLERANCE < wrong
    assert not fresh.cache.storage.any() and fresh.cache.written == [0, 0, 0]
    assert paged.choose(TINY, fresh.cache).why == "device cpu"
    wanted = decode(engine, tables, 5, 0)
    engine.graphs = DecodeGraphs(
        engine._plain, as_it_is, lambda *_: Reference(TINY, engine.cache, TINY.scale), "reference"
    )
    for key, scores in decode(engine, tables, 5, 0).logits.items():
        assert relative_error(scores, wanted.logits[key]) < TOLERANCES["fp32"]
    assert "reference" in engine.graphs.describe() and "graphs" in engine.contract().info["kernels"]
