"""Products by the kernels, for the native path and for plain torch: models that the kernels do not know as a whole, and
steps in which a row has an adapter.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from ctypes import byref
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from pdserve.engine.experts import Expert, Experts
from pdserve.engine.large_pages import Room, trim_heap
from pdserve.engine.layer_extras import Beside, LayerInputs, OwnInput
from pdserve.engine.model import Decoder
from pdserve.engine.native import library as c
from pdserve.engine.native.packed import PackedLinear, PackedRows, packed
from pdserve.engine.parts import Linear, QuantizedLinear
from pdserve.engine.plan import EngineConfig
from pdserve.errors import Internal

KINDS = ("fp32", "bf16")
_ROUTERS = ("router", "shared_router")  # stay in torch: few outputs, and in int8 models the only exact ones
_NESTED = (Expert, Experts, Beside, OwnInput, LayerInputs)


def why_none(config: EngineConfig) -> str:
    """What keeps every product of a configuration from the kernels, in words; empty: nothing does."""
    if config.deterministic:
        return "deterministic mode"
    if config.device != "cpu":
        return f"device {config.device}"
    if config.dtype not in KINDS:
        return f"dtype {config.dtype}"
    return ""


class Products:
    """Packs a decoder's weights, and multiplies with them. One engine's, in its thread."""

    def __init__(self, library: ctypes.CDLL, decoder: Decoder) -> None:
        self._library, self._dtype = library, decoder.embedding.dtype
        self._kind = QuantizedLinear if decoder.quantized else Linear
        types = {"x_bf16": self._dtype == torch.bfloat16, "w_int8": decoder.quantized}
        # Sizes of one product's scratch: a tile may be a head, of the native path's q, k and v.
        self._model = c.Model(width=1, heads=1, kv_heads=1, head_dim=decoder.spec.head_dim, ffn=1, **types)
        self._scratch = torch.empty(0, dtype=torch.uint8)
        self._room = Room()
        self.packed_bytes = 0  # so far

    def pack(self, decoder: Decoder, first: Callable[[Any], Any] = lambda layer: layer) -> Iterator[None]:
        """Replaces every product of the decoder that is not packed yet, a layer at a time: no more is there twice.

        `first` packs what a layer wants in another way. Stops after each layer, and each of what is around them.
        Whenever it stops, for an error, too, the decoder is whole: plain torch computes with either kind of product.
        """
        for index, layer in enumerate(decoder.layers):
            decoder.layers[index] = self._packed_parts(first(layer))
            del layer
            trim_heap()  # of what the layer was before
            yield
        for name in ("in_proj", "inputs", "out_proj", "head"):
            setattr(decoder, name, self._packed_part(getattr(decoder, name)))
            trim_heap()
            yield
        head = decoder.head
        if decoder.spec.tied_head and not decoder.quantized and isinstance(head, PackedLinear):
            decoder.embedding = PackedRows(head.kept[0], (head.matrices[0].outputs, head.matrices[0].inputs))

    def packed(self, product: object, parts: int = 1, group: int = 0) -> PackedLinear:
        """Raises Internal for what is not a product in torch."""
        if not isinstance(product, Linear | QuantizedLinear):
            raise Internal("a product that is padded, packed or not there", field="kernels")
        made = packed(product, self._apply, self._room, c.pair(self._library, self._dtype), parts, group)
        self.packed_bytes += sum(tensor.nbytes for tensor in made.kept)
        return made

    def _packed_part(self, part: Any) -> Any:
        if isinstance(part, self._kind):
            return self.packed(part)
        if isinstance(part, _NESTED):
            return self._packed_parts(part)
        return tuple(map(self._packed_part, part)) if isinstance(part, tuple) else part

    def _packed_parts(self, parts: Any) -> Any:
        names = [field.name for field in fields(parts) if field.name not in _ROUTERS]
        return replace(parts, **{name: self._packed_part(getattr(parts, name)) for name in names})

    def _apply(self, matrix: c.Matrix, x: Tensor) -> Tensor:
        """x [T, inputs] -> [T, outputs]."""
        if x.dtype != self._dtype or x.shape[1] != matrix.inputs:
            raise Internal(f"{list(x.shape)} of {x.dtype} for {matrix.inputs} inputs of {self._dtype}", field="kernels")
        x, rows, threads = x.contiguous(), x.shape[0], torch.get_num_threads()
        out = torch.empty(rows, matrix.outputs, dtype=x.dtype)
        if not rows:
            return out
        self._model.width = matrix.inputs
        need = self._library.pdserve_scratch_bytes(byref(self._model), 0, 0, 0, threads) + 64
        if self._scratch.numel() < need:
            with torch.inference_mode(False):
                self._scratch = torch.empty(need, dtype=torch.uint8)
        start = self._scratch.data_ptr()
        step = c.Step(rows=rows, threads=threads, scratch=start + -start % 64)
        self._library.pdserve_linear(byref(self._model), byref(step), byref(matrix), x.data_ptr(), out.data_ptr())
        return out
