"""Pages that take another precision than they keep: torch's own cast, value by value, and nothing beside it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pdserve.engine.cache import PagedCache
from pdserve.engine.dtypes import cast_bytes, torch_dtype
from pdserve.engine.handover import SequenceSink, SequenceSource
from pdserve.engine.plan import EngineConfig
from pdserve.engine.staging import HostLane, Staging
from pdserve.errors import Internal
from tests.engine.tiny import spec

CASTS = [("fp32", "bf16"), ("fp16", "bf16"), ("fp16", "fp32"), ("bf16", "fp32")]
TOKENS = 14


def edge_values(dtype: torch.dtype) -> Tensor:
    """What a cast can get wrong: ties in both directions, both zeros, subnormals, the ends of every range."""
    numbers = [
        0.0, -0.0, 1.0, 1.00390625, 1.01171875, -1.00390625, 1.00390637, float("inf"), float("-inf"), float("nan"),
        1e-40, -1e-40, 1.1754942e-38, 6e-8, 65504.0, 65520.0, 70000.0,
        3.38e38, 3.3961775e38, 3.4028235e38, -3.4028235e38,
    ]  # fmt: skip
    return torch.tensor(numbers, dtype=torch.float64).to(dtype)


def values_of(name: str) -> Tensor:
    """[tokens, 4 heads, 8]: random bits with the edges among them."""
    kind = torch_dtype(name)
    generator = torch.Generator().manual_seed(1)
    bits = torch.randint(0, 256, (TOKENS * 32 * kind.itemsize,), dtype=torch.uint8, generator=generator)
    values = bits.view(kind).clone()
    edges = edge_values(kind)
    values[: len(edges)] = edges
    return values.view(TOKENS, 4, 8)


def raw(values: Tensor) -> memoryview:
    return memoryview(values.contiguous().view(torch.uint8).numpy().tobytes())


def check_cast(got: Tensor, values: Tensor) -> None:
    """Equal to torch's cast bit for bit, but for which NaN a NaN has become."""
    wanted = values.to(got.dtype)
    kind = torch.int16 if got.dtype.itemsize == 2 else torch.int32
    number = ~wanted.isnan()
    assert torch.equal(got.isnan(), wanted.isnan())
    assert torch.equal(got.view(kind)[number], wanted.view(kind)[number])


@pytest.mark.parametrize(("source", "target"), CASTS)
@pytest.mark.parametrize("order", ["hnd", "nhd"])
@pytest.mark.parametrize("on_host", [True, False])
def test_a_sink_casts_what_it_is_given(source: str, target: str, order: str, on_host: bool) -> None:
    # as many KV heads as tokens in a page: a swapped axis would pass every shape check
    config = EngineConfig(dtype="fp32", kv_dtype=target, pages=8, page_size=4, axis_order=order)
    cache = PagedCache(spec(heads=4, kv_heads=4), config)
    if not on_host:
        cache.staging = Staging(HostLane())  # as on a device, whose rows the host cannot see
    values, pages = values_of(source), (5, 1, 2, 7)
    sink = SequenceSink(cache, pages, 0, TOKENS, source)
    sink.write("k", 1, (0, 2), (0, TOKENS), raw(values[:, :2]))
    sink.write("k", 1, (2, 4), (0, 5), raw(values[:5, 2:]))
    sink.write("k", 1, (2, 4), (5, TOKENS), raw(values[5:, 2:]))
    read = b"".join(SequenceSource(cache, pages, 0, TOKENS).read("k", 1, (0, 4), (0, TOKENS)))
    got = torch.frombuffer(bytearray(read), dtype=torch_dtype(target)).view(TOKENS, 4, 8)
    check_cast(got, values)
    assert not bool(cache.storage[0].any()) and not bool(cache.storage[1, 1].any())


def test_a_narrow_value_rounds_to_the_nearest_and_ties_go_to_even() -> None:
    """By hand: bf16 keeps 8 bits of a number, so around 1 it knows steps of 1/128."""
    given = torch.tensor([1 + 1 / 256, 1 + 3 / 256, 1 + 1 / 256 + 2**-20, -(1 + 1 / 256), 3.4028235e38, -0.0])
    cast = torch.frombuffer(bytearray(cast_bytes(raw(given), torch.float32, torch.bfloat16)), dtype=torch.bfloat16)
    assert cast.tolist() == [1.0, 1 + 4 / 256, 1 + 2 / 256, -1.0, float("inf"), 0.0]
    assert cast.signbit().tolist() == [False, False, False, True, False, True]


def test_a_payload_of_the_receivers_size_is_not_taken_for_the_senders() -> None:
    """Half as many bytes as the sender's dtype needs are exactly what the receiver's would."""
    config = EngineConfig(dtype="fp32", kv_dtype="bf16", pages=8, page_size=4)
    sink = SequenceSink(PagedCache(spec(), config), (0, 1), 0, 8, "fp32")
    for size in (2 * 8 * 2, 2 * 8 * 4 - 2):
        with pytest.raises(Internal, match="bytes"):
            sink.write("k", 0, (0, 2), (0, 1), memoryview(bytes(size)))
    sink.write("k", 0, (0, 2), (0, 1), memoryview(bytes(2 * 8 * 4)))
