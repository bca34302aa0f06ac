"""Attention over pages by a kernel that somebody else keeps, where one is installed: FlashInfer, for CUDA devices.

A kernel serves a model only after it has given what the plain reference gives, on this device and on pages of this
layout: `choose` compares the two before an engine serves. Otherwise, and everywhere else, the reference serves, and
`why` says what the reason is.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from pdserve.engine import attention
from pdserve.engine.cache import PagedCache
from pdserve.engine.spec import ModelSpec

HEAD_DIMS = (64, 128, 256)
DTYPES = (torch.float16, torch.bfloat16)
_WORKSPACE_BYTES = 128 << 20
_CHECKED = 3  # sequences of the comparison
_TOLERANCE = 2e-2  # both sides round to sixteen bits


class Kernel(Protocol):
    """Attention of one query each of a fixed number of sequences; its addresses never change."""

    def plan(self, table: Tensor, seen: Tensor) -> None:
        """Before each step, in host memory: table [sequences, pages] of page numbers, seen [sequences] keys."""
        ...

    def attend(self, layer: int, q: Tensor) -> Tensor:
        """q [sequences, Hq, d] -> [sequences, Hq, d], on the device; may be recorded."""
        ...


MakeKernel = Callable[[int, int], Kernel]
"""Sequences and pages of each -> a kernel for as many."""


@dataclass(frozen=True)
class Choice:
    make: MakeKernel | None
    why: str  # the kernel's name, or why there is none


def choose(spec: ModelSpec, cache: PagedCache) -> Choice:
    """The kernel for decode steps of this model over this cache. Writes to the cache's first pages and clears them."""
    why = _why_not(spec, cache)
    if why:
        return Choice(None, why)
    try:
        library = importlib.import_module("flashinfer")
    except ImportError as error:
        return Choice(None, f"no kernel installed ({error})")
    workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=cache.storage.device)

    def make(sequences: int, pages: int) -> Kernel:
        return FlashInfer(library, workspace, spec, cache, sequences, pages)

    try:
        difference = compare(make, spec, cache)
    except Exception as failure:  # noqa: BLE001 - foreign code on a foreign device: whatever it raises, we do without
        return Choice(None, f"flashinfer failed: {type(failure).__name__}: {failure}")
    if not difference < _TOLERANCE:  # so written that a NaN is refused
        return Choice(None, f"flashinfer differs from the reference by {difference:.2g}")
    return Choice(make, "flashinfer")


def _why_not(spec: ModelSpec, cache: PagedCache) -> str:
    if cache.storage.device.type != "cuda":
        return f"device {cache.storage.device.type}"
    if cache.dtype not in DTYPES:
        return f"kv_dtype {cache.dtype_name}"
    if spec.head_dim not in HEAD_DIMS:
        return f"heads of {spec.head_dim}"
    if spec.layer_shapes:
        return "layers of unequal shapes"
    if spec.kv_layers:
        return "layers that read another's cache"
    if spec.positions.kind == "alibi":
        return "ALiBi"
    if spec.attention_sinks:
        return "attention sinks"
    if len({spec.window(layer) for layer in range(spec.layers)}) > 1:
        return "windows that differ between layers"
    return ""


def compare(make: MakeKernel, spec: ModelSpec, cache: PagedCache) -> float:
    """The largest relative error of a kernel against the reference, over random pages of the first layer.

    Writes to the cache's first pages, and clears them.
    """
    device, size = cache.storage.device, cache.page_size
    pages = min(3, cache.pages // _CHECKED)
    if not pages:
        return float("nan")
    slots = torch.arange(_CHECKED * pages * size, device=device)
    generator = torch.Generator().manual_seed(1)

    def sample(rows: int, heads: int) -> Tensor:
        return torch.randn(rows, heads, spec.head_dim, generator=generator).to(cache.dtype).to(device)

    try:
        cache.write(0, slots, sample(len(slots), spec.kv_heads), sample(len(slots), spec.kv_heads))
        table = torch.arange(_CHECKED * pages).view(_CHECKED, pages).flip(0)
        seen = torch.tensor([pages * size, pages * size - size // 2, 1])
        q = sample(_CHECKED, spec.heads)
        kernel = make(_CHECKED, pages)
        kernel.plan(table, seen)
        found, wanted = kernel.attend(0, q), []
        for row in range(_CHECKED):
            keys = int(seen[row])
            k, v = cache.sequence(0, table[row].tolist(), keys)
            at = torch.arange(keys, device=device)
            window = spec.window(0)
            visible = (at >= (keys - window if window else 0))[None]
            wanted.append(attention.attend(q[row : row + 1], k, v, visible, spec.scale, spec.soft_cap))
        expected = torch.cat(wanted).double()
        return float((found.double() - expected).abs().max() / expected.abs().max())
    finally:
        cache.clear(slots)
        cache.written[0] -= len(slots)


class FlashInfer:
    """flashinfer's batch decode over our pages, in buffers of its own so that a graph may hold it."""

    def __init__(
        self, library: Any, workspace: Tensor, spec: ModelSpec, cache: PagedCache, sequences: int, pages: int
    ) -> None:
        self._spec, self._cache = spec, cache
        device, layout = cache.storage.device, "HND" if cache.heads_first else "NHD"
        self._wrapper = library.BatchDecodeWithPagedKVCacheWrapper(
            workspace,
            layout,
            use_cuda_graph=True,
            paged_kv_indptr_buffer=torch.zeros(sequences + 1, dtype=torch.int32, device=device),
            paged_kv_indices_buffer=torch.zeros(sequences * pages, dtype=torch.int32, device=device),
            paged_kv_last_page_len_buffer=torch.zeros(sequences, dtype=torch.int32, device=device),
        )
        self._pages = [page_views(cache, layer) for layer in range(cache.layers)]

    def plan(self, table: Tensor, seen: Tensor) -> None:
        spec, cache = self._spec, self._cache
        window = spec.window(0)
        self._wrapper.plan(
            *page_lists(table, seen, cache.page_size),
            spec.heads,
            spec.kv_heads,
            spec.head_dim,
            cache.page_size,
            pos_encoding_mode="NONE",
            window_left=window - 1 if window else -1,
            logits_soft_cap=spec.soft_cap or None,
            q_data_type=cache.dtype,
            kv_data_type=cache.dtype,
            sm_scale=spec.scale,
        )

    def attend(self, layer: int, q: Tensor) -> Tensor:
        out: Tensor = self._wrapper.run(q.contiguous(), self._pages[layer])
        return out


def page_lists(table: Tensor, seen: Tensor, page_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Pages as one list: where each sequence's begin [sequences + 1], the pages, tokens in each last page. int32."""
    held = (seen + page_size - 1) // page_size
    begin = torch.cat([torch.zeros(1, dtype=torch.int64), held.cumsum(0)])
    pages = torch.cat([row[:count] for row, count in zip(table, held.tolist(), strict=True)])
    return begin.int(), pages.int(), (seen - (held - 1) * page_size).int()


def page_views(cache: PagedCache, layer: int) -> tuple[Tensor, Tensor]:
    """K and V of one layer: [pages, Hkv, page_size, d] (hnd) or [pages, page_size, Hkv, d] (nhd); views, no copy."""
    k, v = cache.planes[layer].values()
    size, d = cache.page_size, k.shape[-1]
    if cache.heads_first:
        k, v = (plane.view(len(plane), -1, size, d).transpose(0, 1) for plane in (k, v))
    else:
        k, v = (plane.view(-1, size, plane.shape[1], d) for plane in (k, v))
    return k, v
