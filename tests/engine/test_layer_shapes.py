"""Caches whose layers differ in heads and head_dim, or have none: the bytes, and the steps that make them."""

from __future__ import annotations

from dataclasses import replace
from itertools import zip_longest
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cache_transfer.contract import CachePlane, PositionScheme, diff, refusals
from pdserve.engine.cache import PagedCache
from pdserve.engine.checks import ALL, TOLERANCES, check_step, check_written, relative_error
from pdserve.engine.graphs import DecodeGraphs
from pdserve.engine.handover import SequenceSink, SequenceSource
from pdserve.engine.plan import Chunk, EngineConfig, StepPlan
from pdserve.engine.spec import LayerShape, shape_fields
from pdserve.engine.trace import StepTrace
from pdserve.errors import Internal
from tests.engine.tiny import ROPE, prompt, run, spec, tiny_engine

NONE = LayerShape(0, 0, 0)
MIXED = (LayerShape(4, 2, 8), NONE, LayerShape(4, 1, 16), LayerShape(4, 2, 8), LayerShape(4, 0, 8))
UNLIKE: dict[str, Any] = {"layers": 5, "layer_shapes": MIXED, "layer_ffn": (48, 48, 16, 0, 48)}
NO_POSITIONS = PositionScheme(kind="none")
CONVOLUTIONS: dict[str, Any] = {
    "layer_shapes": (LayerShape(1, 1, 32, 3), LayerShape(4, 2, 8), LayerShape(1, 1, 32, 5)),
    "sliding_window": (3, 0, 5),
    "layer_positions": (NO_POSITIONS, ROPE, NO_POSITIONS),
}
PAGES = 12
TOKENS = 17

shapes = st.one_of(
    st.just(NONE),
    st.just(LayerShape(1, 1, 11, 3)),
    st.builds(lambda heads, dim: LayerShape(heads, heads, dim), st.integers(1, 4), st.integers(1, 9)),
)
several = st.lists(shapes, min_size=1, max_size=5).filter(lambda found: any(shape.kv_heads for shape in found))


def make(layers: tuple[LayerShape, ...], order: str, page_size: int, dtype: str = "bf16") -> PagedCache:
    of = spec(layers=len(layers), **shape_fields(layers))
    return PagedCache(of, EngineConfig(dtype=dtype, pages=PAGES, page_size=page_size, axis_order=order))


def cut(draw: st.DataObject, end: int) -> list[tuple[int, int]]:
    """[0, end) in pieces."""
    at = sorted(draw.draw(st.sets(st.integers(1, end), max_size=2)) - {end})
    return list(zip([0, *at], [*at, end], strict=True))


@settings(max_examples=40, deadline=None)
@given(several, st.sampled_from(["hnd", "nhd"]), st.integers(2, 7), st.data())
def test_bytes_of_any_shapes_round_trip_between_any_layouts(
    layers: list[LayerShape], order: str, page_size: int, draw: st.DataObject
) -> None:
    """Written in pieces of heads and tokens, read in others, into another layout, and as attention gathers them."""
    source, target = make(tuple(layers), order, page_size), make(tuple(layers), "hnd" if order == "nhd" else "nhd", 3)
    pages = tuple(draw.draw(st.permutations(range(PAGES))))
    sink, here = SequenceSink(source, pages, 0, TOKENS), SequenceSource(source, pages, 0, TOKENS)
    there, copied = SequenceSink(target, pages, 0, TOKENS), SequenceSource(target, pages, 0, TOKENS)
    written = {}
    for layer, shape in enumerate(layers):
        for number, plane in enumerate(shape.planes):
            size = (TOKENS, plane.heads, plane.head_dim * 2)
            values = np.random.default_rng(10 * layer + number).integers(0, 128, size, np.uint8)  # finite in bf16
            written[plane.name, layer] = values
            for heads in cut(draw, plane.heads):
                for tokens in cut(draw, TOKENS):
                    piece = np.ascontiguousarray(values[slice(*tokens), slice(*heads)])
                    sink.write(plane.name, layer, heads, tokens, piece.data.cast("B"))
    for (plane_name, layer), values in written.items():
        for heads in cut(draw, values.shape[1]):
            for tokens in cut(draw, TOKENS):
                wanted = values[slice(*tokens), slice(*heads)].tobytes()
                assert b"".join(here.read(plane_name, layer, heads, tokens)) == wanted
                room = bytearray(len(wanted))
                here.read_into(plane_name, layer, heads, tokens, memoryview(room))
                assert room == wanted
                there.write(plane_name, layer, heads, tokens, memoryview(room))
        assert b"".join(copied.read(plane_name, layer, (0, values.shape[1]), (0, TOKENS))) == values.tobytes()
    for layer in range(len(layers)):
        names = [plane.name for plane in layers[layer].planes]
        for name, found in zip_longest(names, source.sequence(layer, pages, TOKENS)):
            if name is None:
                assert found.shape[0] == 0
                continue
            bits = found.transpose(0, 1).contiguous().view(torch.uint8)
            assert torch.equal(bits.flatten(1), torch.from_numpy(written[name, layer]).flatten(1))


def test_one_allocation_holds_each_shape_once_and_alike_layers_together() -> None:
    cache = make(MIXED, "hnd", 4, "fp32")
    slots = (PAGES + 1) * 4
    assert cache.nbytes == slots * 4 * (2 * 2 * 2 * 8 + 2 * 1 * 16)
    parts = [plane for found in cache.planes for plane in found.values()]
    assert {part.untyped_storage().data_ptr() for part in parts} == {cache.storage.untyped_storage().data_ptr()}
    assert all(part.data_ptr() % 64 == 0 for part in parts) and not cache.planes[1] and not cache.planes[4]
    alike = make((LayerShape(4, 2, 8),) * 3, "nhd", 4, "fp32")
    assert alike.storage.shape == (3, 2, slots, 2, 8) and shape_fields(MIXED[:1] * 3)["layer_shapes"] == ()


@pytest.mark.parametrize("order", ["hnd", "nhd"])
def test_pages_are_cleared_and_copied_in_every_layer(order: str) -> None:
    cache = make(MIXED, order, 4, "fp32")
    cache.storage.copy_(torch.arange(cache.storage.numel()).view_as(cache.storage))
    cache.copy_page(3, 7)
    cache.clear(torch.tensor([20, 21, 22, 23]))
    for layer in (0, 2, 3):
        source, target, cleared = (cache.sequence(layer, (page,), 4) for page in (3, 7, 5))
        for at in range(2):
            assert torch.equal(source[at], target[at]) and bool(source[at].all()) and not bool(cleared[at].any())


@pytest.mark.parametrize("of", [UNLIKE, CONVOLUTIONS], ids=["unlike", "convolutions"])
def test_every_check_holds(of: dict[str, Any]) -> None:
    engine = tiny_engine(spec(**of))
    plan = StepPlan((Chunk("a", prompt(9), 0, (3, 1, 4), "all"), Chunk("b", (5,), 0, (0,))))
    trace = StepTrace()
    output = engine.step(plan, trace=trace)
    check_written(plan, output)
    check_step(engine, trace, output, ALL)
    assert output.written == (10,) * engine.spec.layers
    if of is UNLIKE:
        assert output.counters.score_pairs == 3 * 4 * (9 * 10 // 2 + 1)  # of three layers, four heads each


def test_a_convolution_that_reads_a_wrong_row_is_found() -> None:
    engine = tiny_engine(spec(**CONVOLUTIONS))
    plan, trace = StepPlan((Chunk("a", prompt(9), 0, (3, 1, 4), "all"),)), StepTrace()
    output = engine.step(plan, trace=trace)
    engine.cache.planes[0]["conv"][0, 3 * 4 + 1] += 1.0  # after it was read
    with pytest.raises(Internal, match="layer 0, a") as error:
        check_step(engine, trace, output, frozenset({"attention_reference"}))
    assert error.value.reason == "attention_reference"


def test_a_recorded_step_equals_a_plain_one() -> None:
    outputs = []
    for graphs in (False, True):
        engine = tiny_engine(spec(**UNLIKE), pages=32)
        tables = ((5, 1, 9, 2), (0, 3, 4, 6))
        for n, pages in enumerate(tables):
            run(engine, Chunk(str(n), prompt(6 + n, seed=n), 0, pages, "none"))
        engine.graphs = DecodeGraphs(engine._plain, lambda work: work) if graphs else None
        outputs.append(run(engine, *(Chunk(str(n), (7 + n,), 6 + n, pages) for n, pages in enumerate(tables))))
    for key, scores in outputs[0].logits.items():
        assert relative_error(outputs[1].logits[key], scores) < TOLERANCES["fp32"]
    assert outputs[0].counters == outputs[1].counters and outputs[0].written == outputs[1].written


def test_a_convolutions_cache_is_never_taken_for_attentions() -> None:
    """The model's digest aside: its plane has a name of its own, and its length is the window."""
    ours = tiny_engine(spec(**CONVOLUTIONS)).contract()
    assert ours.planes[0] == (CachePlane("conv", 1, 32),)
    attends = replace(ours, planes=((CachePlane("k", 1, 32),), *ours.planes[1:]))
    longer = replace(ours, attention=replace(ours.attention, sliding_window=(4, 0, 5)))
    for other, codes in (
        (attends, {"PLANES[0]", "PLANES[0].conv.heads", "PLANES[0].conv.head_dim", "PLANES[0].k.heads",
                   "PLANES[0].k.head_dim"}),
        (longer, {"ATTENTION.sliding_window"}),
    ):  # fmt: skip
        assert {found.code for found in refusals(diff(ours, other), allow_lossy=True)} == codes


def test_the_contract_says_what_each_layer_caches() -> None:
    contract = tiny_engine(spec(**UNLIKE)).contract()
    pair = (CachePlane("k", 2, 8), CachePlane("v", 2, 8))
    assert contract.planes == (pair, (), (CachePlane("k", 1, 16), CachePlane("v", 1, 16)), pair, ())
