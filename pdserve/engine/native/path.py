"""One step by the native kernels: the same parts as plain.py, one call into the library for each part of a layer."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import byref
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from pdserve.engine.batch import Batch
from pdserve.engine.cache import PagedCache
from pdserve.engine.dtypes import wide
from pdserve.engine.model import Decoder
from pdserve.engine.native import library as c
from pdserve.engine.native.packed import PackedLinear
from pdserve.engine.native.products import KINDS, Products, why_none
from pdserve.engine.parts import Norm, Product
from pdserve.engine.plain import Reads
from pdserve.engine.plan import EngineConfig
from pdserve.engine.positions import RotaryTable
from pdserve.engine.spec import ModelSpec
from pdserve.errors import Internal

# The fields of a spec that the kernels read; one that sets any other, or one of these to a value that is not listed,
# is computed in plain torch. So what is added to ModelSpec is declined until it is added here.
_FIELDS = frozenset({
    "vocab_size", "width", "layers", "heads", "kv_heads", "head_dim", "ffn_width", "context_limit", "positions", "norm",
    "norm_eps", "norm_scale", "norm_shift", "norm_order", "final_norm", "mlp", "activation", "qkv_bias",
    "attn_out_bias", "mlp_bias", "head_bias", "qk_norm", "tied_head", "embed_width", "projection_bias",
    "attention_scale", "sliding_window", "soft_cap", "bos_id", "eos_ids",
    "embed_norm", "embed_scale",  # torch embeds for the kernels, too
})  # fmt: skip
_VALUES = {
    "norm": ("rms", "layer"),
    "norm_order": ("pre", "post"),
    "mlp": ("gated", "plain"),
    "activation": tuple(c.ACTIVATIONS),
}
_POSITIONS = ("rope", "learned", "none")


def why_not(spec: ModelSpec, config: EngineConfig) -> str:
    """What keeps a model or configuration from the native path, in words; empty: nothing does."""
    if reason := why_none(config):
        return reason
    if (config.kv_dtype or config.dtype) not in KINDS:
        return f"kv_dtype {config.kv_dtype}"
    if spec.out_width:
        return "an output projection before the head"
    if spec.positions.kind not in _POSITIONS:
        return f"positions of kind {spec.positions.kind}"
    for name, value in spec.unusual().items():
        if name not in _FIELDS or value not in _VALUES.get(name, (value,)):
            return f"{name} = {value if isinstance(value, str | int | float) else '...'}"
    return ""


class NativePath:
    """Makes the steps of one engine by the kernels. Holds pointers into the decoder's weights and the cache.

    The decoder's weights are packed: see `layer_packer`.
    """

    def __init__(self, library: ctypes.CDLL, decoder: Decoder, cache: PagedCache, rotary: RotaryTable | None) -> None:
        self.library, self.decoder, self.cache, self.rotary = library, decoder, cache, rotary
        self._kept: list[Tensor] = []  # copies that the structs point into
        self.dtype = decoder.embedding.dtype
        self.model = self._model(decoder.spec)
        self.scratch = torch.empty(0, dtype=torch.uint8)
        layers = [self._layer(index) for index in range(decoder.spec.layers)]
        self.layers = (c.Layer * len(layers))(*layers)
        self.layer_refs = [byref(layer) for layer in self.layers]
        self.final_norm = self._norm(decoder.final_norm)
        self.head = _matrix(decoder.head)

    def begin(self, batch: Batch, keep: bool) -> NativeStep:
        return NativeStep(self, batch, keep)

    def embed(self, batch: Batch) -> Tensor:
        return self.decoder.embed(batch.ids, batch.positions).contiguous()

    def logits(self, x: Tensor) -> Tensor:
        """x [R, width] -> raw scores [R, vocab_size] in fp32, never rounded to the activations' precision."""
        with torch.inference_mode(False):  # a sampler may change it in place
            out = torch.empty(x.shape[0], self.head.outputs, dtype=wide(x.dtype))
        x = x.contiguous()
        step = self.step(x.shape[0], 0, 0)
        self.library.pdserve_logits(
            byref(self.model), byref(step), byref(self.final_norm), byref(self.head), x.data_ptr(), out.data_ptr()
        )
        return out

    def step(self, rows: int, ones: int, longest: int) -> c.Step:
        """A step's struct with enough scratch memory, which stays allocated for the next."""
        threads = torch.get_num_threads()
        need = self.library.pdserve_scratch_bytes(byref(self.model), rows, ones, longest, threads) + 64
        if self.scratch.numel() < need:
            with torch.inference_mode(False):
                self.scratch = torch.empty(need, dtype=torch.uint8)
        start = self.scratch.data_ptr()
        return c.Step(rows=rows, threads=threads, scratch=start + -start % 64)

    def _model(self, spec: ModelSpec) -> c.Model:
        cache, dims = self.cache, spec.positions.dims if self.rotary is not None else 0
        slots = (cache.pages + 1) * cache.page_size
        d = spec.head_dim
        head_stride, slot_stride = (slots * d, d) if cache.heads_first else (d, spec.kv_heads * d)
        return c.Model(
            width=spec.width,
            heads=spec.heads,
            kv_heads=spec.kv_heads,
            head_dim=d,
            ffn=spec.ffn_width,
            rotary_dims=dims,
            post_norm=spec.norm_order == "post",
            gated=spec.mlp == "gated",
            activation=c.ACTIVATIONS[spec.activation],
            x_bf16=self.dtype == torch.bfloat16,
            w_int8=self.decoder.quantized,
            kv_bf16=cache.dtype == torch.bfloat16,
            page_size=cache.page_size,
            scale=spec.scale,
            soft_cap=spec.soft_cap,
            head_stride=head_stride,
            slot_stride=slot_stride,
            cos=self.rotary.cos.data_ptr() if self.rotary is not None else None,
            sin=self.rotary.sin.data_ptr() if self.rotary is not None else None,
        )

    def _layer(self, index: int) -> c.Layer:
        layer, planes = self.decoder.layers[index], self.cache.planes[index]
        *gate, up = layer.up.matrices if isinstance(layer.up, PackedLinear) else ()
        return c.Layer(
            attn_norm=self._norm(layer.attn_norm),
            q_norm=self._norm(layer.q_norm),
            k_norm=self._norm(layer.k_norm),
            mlp_norm=self._norm(layer.mlp_norm),
            qkv=_matrix(layer.qkv),
            o=_matrix(layer.o),
            gate=gate[0] if gate else c.Matrix(),
            up=up,
            down=_matrix(layer.down),
            k_pages=planes["k"].data_ptr(),
            v_pages=planes["v"].data_ptr(),
            window=self.decoder.spec.window(index),
        )

    def _norm(self, norm: Norm | None) -> c.Norm:
        if norm is None:
            return c.Norm()
        return c.Norm(self._fp32(norm.scale), self._fp32(norm.shift), norm.eps, c.KINDS[norm.kind])

    def _fp32(self, tensor: Tensor | None) -> int | None:
        """The address of a small parameter in fp32."""
        if tensor is None:
            return None
        self._kept.append(tensor.detach().float().contiguous())
        return self._kept[-1].data_ptr()


def layer_packer(products: Products, spec: ModelSpec) -> Callable[[Any], Any]:
    """For `Products.pack`: q, k and v head by head, gate and up apart; the rest is packed as any product."""
    gated = spec.mlp == "gated"

    def packed(layer: Any) -> Any:
        qkv = products.packed(layer.qkv, group=spec.head_dim)
        return replace(layer, qkv=qkv, up=products.packed(layer.up, parts=1 + gated))

    return packed


def _matrix(product: Product | None) -> c.Matrix:
    if not isinstance(product, PackedLinear):
        raise Internal("a weight that is not packed", field="kernels")
    return product.matrices[0]


class NativeStep:
    """`keep`: every layer's tensors stay as they are, for a trace; otherwise the next layer writes over them."""

    def __init__(self, path: NativePath, batch: Batch, keep: bool) -> None:
        self._keep = keep
        self._room: tuple[Tensor, Tensor, Tensor, Tensor] | None = None
        self._path, self._library, self._cache, self._spec = path, path.library, path.cache, path.decoder.spec
        lengths = [len(chunk.ids) for chunk in batch.chunks]
        tables = [chunk.pages[: -(-(chunk.start + len(chunk.ids)) // path.cache.page_size)] for chunk in batch.chunks]
        first_row = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
        table_at = torch.tensor([0, *accumulate(map(len, tables))], dtype=torch.int32)
        pages = torch.tensor([page for table in tables for page in table], dtype=torch.int32)
        self._held = (batch, first_row, table_at, pages)  # the struct points into them
        ones = [chunk for chunk in batch.chunks if len(chunk.ids) == 1]
        longest = max((chunk.start + 1 for chunk in ones), default=0)
        self._step = path.step(sum(lengths), len(ones), longest)
        self._scratch = path.scratch  # other steps between this one's layers may need, and make, a larger one
        self._step.sequences = len(lengths)
        self._step.slots, self._step.positions = batch.slots.data_ptr(), batch.positions.data_ptr()
        self._step.places, self._step.first_row = batch.places.data_ptr(), first_row.data_ptr()
        self._step.tables, self._step.table_at = pages.data_ptr(), table_at.data_ptr()
        self._model, self._ref = byref(path.model), byref(self._step)

    def layers(self, x: Tensor, first: int, end: int) -> None:
        """Those from `first` to before `end`, in place, in one call: a step that nobody watches needs no Python between
        its layers.
        """
        self._room = q, k, v, o = self._room or self._new_room(x)
        at = [tensor.data_ptr() for tensor in (x, q, k, v, o)]
        stored = (ctypes.c_int32 * (end - first))()
        layers = self._path.layer_refs[first]  # and those after it, side by side
        self._library.pdserve_layers(self._model, layers, end - first, self._ref, *at, stored)
        for layer, rows in enumerate(stored, first):
            self._cache.written[layer] += rows

    def inputs(self, layer: int, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v, _ = self._room = self._new_room(x) if self._keep or self._room is None else self._room
        self._library.pdserve_attention_inputs(
            self._model, self._path.layer_refs[layer], self._ref, x.data_ptr(), q.data_ptr(), k.data_ptr(), v.data_ptr()
        )
        self._cache.written[layer] += self._step.stored
        return q, k, v

    def attend(self, layer: int, q: Tensor, read: Reads) -> Tensor:
        out = torch.empty_like(q) if self._room is None else self._room[3]
        self._library.pdserve_attention(
            self._model, self._path.layer_refs[layer], self._ref, q.data_ptr(), out.data_ptr()
        )
        return out

    def output(self, layer: int, x: Tensor, o: Tensor) -> Tensor:
        out = torch.empty_like(x) if self._keep else x
        self._library.pdserve_attention_output(
            self._model, self._path.layer_refs[layer], self._ref, x.data_ptr(), o.data_ptr(), out.data_ptr()
        )
        return out

    def _new_room(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """q, k, v and what attention gives."""
        spec, rows = self._spec, x.shape[0]
        q, o = (torch.empty(rows, spec.heads, spec.head_dim, dtype=x.dtype) for _ in range(2))
        k, v = (torch.empty(rows, spec.kv_heads, spec.head_dim, dtype=x.dtype) for _ in range(2))
        return q, k, v, o
