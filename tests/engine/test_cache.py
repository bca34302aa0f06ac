"""The paged cache as the transfer sees it: canonical bytes in and out of any layout, bit for bit."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from cache_transfer.pages import KVSource, PageSink
from pdserve.engine.cache import PagedCache
from pdserve.engine.handover import SequenceSink, SequenceSource
from pdserve.engine.plan import EngineConfig
from pdserve.engine.staging import HostLane, Staging
from pdserve.errors import ConfigError, Internal
from tests.engine.tiny import spec

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "float64": torch.float64}
PAGES = (5, 1, 2, 7)


def make(dtype: str = "bf16", order: str = "hnd", page_size: int = 4, pages: int = 8) -> PagedCache:
    # as many KV heads as tokens in a page: a swapped axis would pass every shape check
    return PagedCache(
        spec(heads=4, kv_heads=4), EngineConfig(dtype=dtype, pages=pages, page_size=page_size, axis_order=order)
    )


def odd_values(dtype: str, tokens: int) -> Tensor:
    """[tokens, 4 heads, 8] with NaN payloads, -0.0, infinities, subnormals: random bits."""
    torch.manual_seed(tokens)
    kind = DTYPES[dtype]
    size = torch.empty(0, dtype=kind).element_size()
    bits = torch.randint(0, 256, (tokens, 4, 8 * size), dtype=torch.uint8)
    values = bits.view(kind)
    values[0, 0, :4] = torch.tensor([float("nan"), -0.0, float("-inf"), 1e-40], dtype=torch.float64).to(kind)
    return values


def payload(values: Tensor) -> bytes:
    return values.contiguous().view(torch.uint8).numpy().tobytes()


def joined(pieces: Sequence[memoryview]) -> bytes:
    return b"".join(pieces)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("order", ["hnd", "nhd"])
def test_bytes_round_trip_for_every_range(dtype: str, order: str) -> None:
    cache, values = make(dtype, order), odd_values(dtype, 14)
    sink: PageSink = SequenceSink(cache, PAGES, 0, 14)
    for plane in ("k", "v"):
        for layer in range(3):
            sink.write(plane, layer, (0, 2), (0, 14), memoryview(payload(values[:, 0:2])))
            sink.write(plane, layer, (2, 4), (0, 9), memoryview(payload(values[:9, 2:4])))
            sink.write(plane, layer, (2, 4), (9, 14), memoryview(payload(values[9:, 2:4])))
    source: KVSource = SequenceSource(cache, PAGES, 0, 14)
    for heads in ((0, 4), (1, 2), (1, 3)):
        for tokens in ((0, 14), (3, 4), (2, 11), (13, 14), (4, 8)):
            expected = payload(values[tokens[0] : tokens[1], heads[0] : heads[1]])
            assert joined(source.read("v", 2, heads, tokens)) == expected, (heads, tokens)


@pytest.mark.parametrize("order, heads", [("hnd", (2, 3)), ("nhd", (0, 4))])
def test_reads_share_memory_where_the_layout_allows(order: str, heads: tuple[int, int]) -> None:
    cache = make("bf16", order)
    pieces = cache.read_pieces("k", 0, heads, (0, 16), PAGES)
    assert len(pieces) == 3  # pages 1 and 2 are neighbours
    cache.storage.view(torch.uint8).fill_(7)
    assert joined(pieces) == b"\x07" * len(joined(pieces))


def test_write_lands_where_attention_gathers() -> None:
    values = odd_values("fp32", 14).nan_to_num(1.0, 2.0, 3.0)
    for order in ("hnd", "nhd"):
        cache = make("fp32", order)
        cache.write_rows("k", 1, cache.rows(cache.shape("k", 0), (0, 4), (0, 14), PAGES), memoryview(payload(values)))
        k, v = cache.sequence(1, PAGES, 14)
        assert torch.equal(k, values.transpose(0, 1)) and not bool(v.any())
        other = make("fp32", order)
        other.write(1, torch.tensor(other.slots((0, 14), PAGES)), values, torch.zeros_like(values))
        assert torch.equal(other.storage, cache.storage)


def test_pieces_of_one_layout_fill_another() -> None:
    values = odd_values("bf16", 14)
    source, target = make("bf16", "hnd", 4), make("bf16", "nhd", 3)
    source.write_rows("k", 0, source.rows(source.shape("k", 0), (0, 4), (0, 14), PAGES), memoryview(payload(values)))
    for head in range(4):
        moved = joined(source.read_pieces("k", 0, (head, head + 1), (0, 14), PAGES))
        target.write_rows(
            "k", 0, target.rows(target.shape("k", 0), (head, head + 1), (0, 14), (4, 3, 2, 1, 0)), memoryview(moved)
        )
    assert joined(target.read_pieces("k", 0, (0, 4), (0, 14), (4, 3, 2, 1, 0))) == payload(values)


def test_a_sink_clears_the_tail_of_its_last_page_only() -> None:
    for order in ("hnd", "nhd"):
        cache = make("fp32", order)
        cache.storage.fill_(float("nan"))
        SequenceSink(cache, PAGES, 4, 14)
        k, _ = cache.sequence(0, PAGES, 16)
        assert bool(k[:, :14].isnan().all()) and not bool(k[:, 14:].any())


def test_addresses_stay_and_sizes_add_up() -> None:
    cache = make("bf16")
    address = cache.storage.data_ptr()
    cache.write(0, torch.tensor([3]), torch.ones(1, 4, 8), torch.ones(1, 4, 8))
    cache.clear(torch.tensor([3]))
    assert cache.storage.data_ptr() == address
    assert cache.nbytes == 3 * 2 * (8 + 1) * 4 * 4 * 8 * 2  # layers, planes, pages and pad, tokens, heads, dim, bytes


@pytest.mark.parametrize(
    "plane, layer, heads, tokens",
    [
        ("w", 0, (0, 4), (0, 4)),
        ("k", 3, (0, 4), (0, 4)),
        ("k", -1, (0, 4), (0, 4)),
        ("k", 0, (0, 5), (0, 4)),
        ("k", 0, (2, 2), (0, 4)),
        ("k", 0, (0, 4), (0, 17)),
        ("k", 0, (0, 4), (4, 4)),
        ("k", 0, (0, 4), (-1, 4)),
    ],
)
def test_ranges_out_of_bounds_are_refused(
    plane: str, layer: int, heads: tuple[int, int], tokens: tuple[int, int]
) -> None:
    cache = make()
    with pytest.raises(Internal):
        cache.read_pieces(plane, layer, heads, tokens, PAGES)
    room = memoryview(bytearray(16 * max(0, heads[1] - heads[0]) * max(0, tokens[1] - tokens[0])))  # the right size
    for copy in (cache.write_rows, cache.read_rows):
        with pytest.raises(Internal):
            copy(plane, layer, cache.rows(cache.shape("k", 0), heads, tokens, PAGES), room)


def test_sequences_refuse_what_is_not_theirs() -> None:
    cache = make()
    with pytest.raises(Internal, match="outside"):
        SequenceSource(cache, PAGES, 0, 9).read("k", 0, (0, 4), (8, 10))
    with pytest.raises(Internal, match="outside"):
        SequenceSink(cache, PAGES, 4, 9).write("k", 0, (0, 1), (3, 5), memoryview(bytes(32)))
    with pytest.raises(Internal, match="payload"):
        SequenceSink(cache, PAGES, 0, 9).write("k", 0, (0, 1), (3, 5), memoryview(bytes(31)))
    with pytest.raises(Internal):
        SequenceSink(cache, PAGES, 0, 17)
    with pytest.raises(Internal, match="page"):
        SequenceSink(cache, (8,), 0, 4).write("k", 0, (0, 1), (0, 4), memoryview(bytes(64)))


def test_config_is_checked() -> None:
    with pytest.raises(ConfigError, match="axis_order"):
        make(order="dhn")
    with pytest.raises(ConfigError, match="page_size"):
        make(page_size=0)
    with pytest.raises(ConfigError, match="kv_dtype"):
        PagedCache(spec(), EngineConfig(kv_dtype="int3"))


@pytest.mark.parametrize("order", ["hnd", "nhd"])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("heads", [(0, 1), (0, 2), (1, 2)])
def test_a_device_reads_and_writes_the_same_rows_and_no_others(order: str, dtype: str, heads: tuple[int, int]) -> None:
    config = EngineConfig(dtype=dtype, pages=8, page_size=4, axis_order=order)
    host, device = PagedCache(spec(), config), PagedCache(spec(), config)
    host.storage.copy_(torch.randn(host.storage.shape, generator=torch.Generator().manual_seed(3)))
    device.storage.copy_(host.storage)
    device.staging = Staging(HostLane())  # as on a device, whose rows the host cannot see
    rows = host.rows(host.shape("k", 0), heads, (1, 9), (5, 2, 7))
    size = rows.index.size * rows.row_bytes
    read, read_device = bytearray(size), bytearray(size)
    host.read_rows("k", 1, rows, memoryview(read))
    device.read_rows("k", 1, rows, memoryview(read_device))
    assert read == read_device
    payload = memoryview(bytes(range(256)) * (size // 256 + 1))[:size]
    host.write_rows("v", 2, rows, payload)
    device.write_rows("v", 2, rows, payload)
    assert torch.equal(host.storage.view(torch.uint8), device.storage.view(torch.uint8))
