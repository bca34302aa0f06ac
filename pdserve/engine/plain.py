"""One step in plain torch: what every other path is compared with, and what runs where there is none.

A step's parts, in the order in which the engine calls them for each layer: `inputs` (norm, q, k and v, and k and v into
the cache), `attend`, `output`; at the end `logits`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from pdserve.engine import attention, deterministic
from pdserve.engine.adapters import Add
from pdserve.engine.batch import Batch, Group
from pdserve.engine.cache import PagedCache
from pdserve.engine.dtypes import wide
from pdserve.engine.model import Decoder
from pdserve.engine.positions import RotaryTable, alibi_slopes
from pdserve.engine.weights import layer_tensors


class StepWork(Protocol):
    """The parts of one step. All tensors are in the model's dtype; rows are the step's T tokens, in batch order."""

    def inputs(self, layer: int, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [T, width] -> q [T, Hq, d], k and v [T, Hkv, d]; k and v are in the cache's pages afterwards."""
        ...

    def attend(self, layer: int, q: Tensor, read: Reads) -> Tensor:
        """q [T, Hq, d] against the cached keys of each row's own sequence -> [T, Hq, d]; q itself without any keys."""
        ...

    def output(self, layer: int, x: Tensor, o: Tensor) -> Tensor:
        """The layer's input x [T, width] and what attention gave, o [T, Hq, d] -> the layer's output [T, width]."""
        ...


class PlainPath:
    """Makes the steps of one engine in torch. In deterministic mode row-wise functions run in fixed tiles."""

    def __init__(self, decoder: Decoder, cache: PagedCache, rotary: Sequence[RotaryTable | None]) -> None:
        """rotary: per layer; None: it rotates nothing."""
        self.decoder, self.cache, self.tables = decoder, cache, tuple(rotary)
        self.rotary = self.tables[0]  # of models whose layers all have one
        self.slopes = alibi_slopes(decoder.spec, str(decoder.embedding.device))
        self.deterministic = decoder.tiled

    def begin(self, batch: Batch, keep: bool) -> StepWork:
        """keep: no tensor that a part returns is ever written over."""
        return _PlainStep(self, batch)

    def embed(self, batch: Batch) -> Tensor:
        """The residual stream before the first layer, [T, width]."""
        return self.rows(lambda ids, at: (self.decoder.embed(ids, at),), batch.ids, batch.positions)[0]

    def layer_inputs(self, batch: Batch) -> tuple[Tensor, ...]:
        """What each layer adds for itself, [T, layers, width of it]; nothing for most models."""
        if self.decoder.inputs is None:
            return ()
        return self.rows(self.decoder.layer_inputs, batch.ids, batch.positions)

    def logits(self, x: Tensor) -> Tensor:
        """x [R, width] -> raw scores [R, vocab_size]."""
        return self.rows(lambda rows: (self.decoder.logits(rows),), x)[0]

    def rows(self, function: deterministic.RowFunction, *rows: Tensor) -> tuple[Tensor, ...]:
        """Applies a row-wise function: at once, or in fixed tiles in deterministic mode."""
        return deterministic.in_tiles(function, *rows) if self.deterministic else function(*rows)

    def rotation(self, table: RotaryTable | None, positions: Tensor) -> tuple[Tensor, Tensor]:
        """positions [T] -> cos, sin [T, 1, dims]; dims 0: no rotation."""
        if table is not None:
            return table.rows(positions)
        embedding = self.decoder.embedding
        none = torch.empty(positions.shape[0], 1, 0, dtype=embedding.dtype, device=embedding.device)
        return none, none

    def check_deterministic(self) -> None:
        """Proves row independence on the head and one layer of each kind: others have the same shapes.

        Raises Internal if it does not hold on this build of torch.
        """
        spec, decoder, weights = self.decoder.spec, self.decoder, self.decoder.embedding
        generator = torch.Generator().manual_seed(1)

        def sample(*shape: int) -> Tensor:
            values = torch.randn(deterministic.ROWS, *shape, generator=generator, dtype=wide(weights.dtype))
            return values.to(weights.dtype).to(weights.device)

        with torch.inference_mode():
            places = torch.arange(deterministic.ROWS, device=weights.device)
            x = sample(spec.width)
            deterministic.check_rows("logits", lambda r: (decoder.logits(r),), x)
            own = (sample(spec.layer_input_width),) if spec.layer_input_width else ()
            if own:
                deterministic.check_rows("layer inputs", decoder.layer_inputs, places % spec.vocab_size, places)
            kinds = {(self.tables[i], tuple(layer_tensors(spec, i).items())): i for i in range(spec.layers)}
            for layer in kinds.values():
                shape, sinks = spec.shape_of(layer), decoder.layers[layer].sinks
                cos, sin = self.rotation(self.tables[layer], places % self.cache.capacity)
                inputs, output = partial(decoder.attention_inputs, layer), partial(decoder.attention_output, layer)
                deterministic.check_rows("attention inputs", inputs, x, cos, sin)
                o = sample(shape.heads, shape.head_dim)
                deterministic.check_rows(
                    "attention output", lambda x, o, *own, output=output: (output(x, o, None, *own),), x, o, *own
                )
                if not shape.kv_heads or shape.kernel:
                    continue
                k, v = (sample(shape.kv_heads, 7, shape.head_dim).transpose(0, 1).flatten(1, 2) for _ in "kv")
                attend = partial(
                    deterministic.attend,
                    scale=spec.scale_of(layer),
                    soft_cap=spec.soft_cap,
                    slopes=self.slopes,
                    sinks=sinks,
                )
                deterministic.check_rows(
                    "attention", lambda q, e, k=k, v=v, attend=attend: (attend(q, k, v, e * 0, e),), o, places * 6 + 1
                )


class _PlainStep:
    def __init__(self, path: PlainPath, batch: Batch) -> None:
        self._path, self._batch = path, batch
        self._rotations = {table: path.rotation(table, batch.positions) for table in set(path.tables)}
        self._decoder, self._cache = path.decoder, path.cache
        self._adapters = batch.adapters
        self._which = () if batch.adapters is None else (batch.adapters.which,)
        self._inputs = path.layer_inputs(batch)

    def inputs(self, layer: int, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        def inputs(x: Tensor, cos: Tensor, sin: Tensor, *which: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            return self._decoder.attention_inputs(layer, x, cos, sin, self._add(layer, *which))

        q, k, v = self._path.rows(inputs, x, *self._rotations[self._path.tables[layer]], *self._which)
        self._cache.write(layer, self._batch.slots, k, v)
        return q, k, v

    def attend(self, layer: int, q: Tensor, read: Reads) -> Tensor:
        spec, parts, sinks = self._decoder.spec, [], self._decoder.layers[layer].sinks
        convolution = self._decoder.layers[layer].conv
        if convolution is not None:
            last = self._cache.tokens(layer, self._batch.before(read.window))  # [T, L, 1, width]
            return q * convolution(last[:, :, 0].to(q.dtype))[:, None]
        if not spec.shape_of(layer).kv_heads:
            return q
        scale = spec.scale_of(layer)
        for number, group in enumerate(self._batch.groups):
            rows = slice(group.first_row, group.end_row)
            k, v = self._cache.gather(spec.kv_layer(layer), group.tables, group.batch)  # [Hkv, B, m, d]
            if self._path.deterministic:
                parts.append(self._attend_fixed(q[rows], k, v, read.first[rows], read.end[rows], scale, sinks))
            elif group.decode:
                k, v = k.to(q.dtype), v.to(q.dtype)
                bias = read.bias(number, group, q.dtype, k.shape[2], self._path.slopes)
                parts.append(attention.decode(q[rows], k, v, bias, scale, spec.soft_cap, sinks))
            else:
                k, v = k[:, 0, : group.keys].to(q.dtype), v[:, 0, : group.keys].to(q.dtype)
                blocks = read.blocks(number, group, q.dtype)
                heads = self._path.slopes, sinks
                parts.append(attention.prefill(q[rows], k, v, blocks, scale, spec.soft_cap, *heads))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def output(self, layer: int, x: Tensor, o: Tensor) -> Tensor:
        own = tuple(inputs[:, layer] for inputs in self._inputs)

        def output(x: Tensor, o: Tensor, *more: Tensor) -> tuple[Tensor]:
            add = self._add(layer, *more[len(own) :])
            return (self._decoder.attention_output(layer, x, o, add, *more[: len(own)]),)

        return self._path.rows(output, x, o, *own, *self._which)[0]

    def _add(self, layer: int, *which: Tensor) -> Add | None:
        """What the adapters of these rows add to the layer's products."""
        return self._adapters.at(layer, *which) if self._adapters is not None else None

    def _attend_fixed(
        self, q: Tensor, k: Tensor, v: Tensor, first: Tensor, end: Tensor, scale: float, sinks: Tensor | None
    ) -> Tensor:
        """Deterministic mode: one sequence after the other, in fp32 or float64."""
        accurate, spec = wide(q.dtype), self._decoder.spec
        batch = k.shape[1]
        per = q.shape[0] // batch
        outputs = []
        for b in range(batch):
            rows = slice(b * per, (b + 1) * per)
            keys, values = k[:, b].to(accurate), v[:, b].to(accurate)
            own, heads = (q[rows].to(accurate), keys, values, first[rows], end[rows]), (self._path.slopes, sinks)
            out = deterministic.attend(*own, scale, spec.soft_cap, *heads)
            outputs.append(out.to(q.dtype))
        return torch.cat(outputs)


class Reads:
    """What each row may read under one sliding window; masks are made once and serve every layer."""

    def __init__(self, batch: Batch, window: int) -> None:
        self.first, self.end = batch.bounds(window)
        attention.check_visible(self.first, self.end)
        self.pairs = int((self.end - self.first).sum())  # visible (query, key) pairs per query head
        self.window = window
        self._blocks: dict[int, list[attention.QueryBlock]] = {}
        self._biases: dict[int, Tensor] = {}

    def blocks(self, number: int, group: Group, dtype: torch.dtype) -> list[attention.QueryBlock]:
        """The query blocks of a prefill group."""
        if number not in self._blocks:
            rows = slice(group.first_row, group.end_row)
            self._blocks[number] = attention.query_blocks(self.first[rows], self.end[rows], dtype)
        return self._blocks[number]

    def bias(self, number: int, group: Group, dtype: torch.dtype, keys: int, slopes: Tensor | None = None) -> Tensor:
        """[B, 1, keys] of a decode group: 0 where the sequence's one query sees the key, else -inf.

        With ALiBi slopes [Hkv, group] a query head's slope times the key's distance is added: [Hkv, B, group, keys].
        """
        made = self._biases.get(number)
        if made is None:
            rows = slice(group.first_row, group.end_row)
            visible = attention.visible_keys(self.first[rows], self.end[rows], keys)
            made = torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill(~visible, -torch.inf)
            made = made[:, None]
            if slopes is not None:
                distance = torch.arange(keys, device=made.device) - (self.end[rows, None] - 1)  # [B, keys]
                made = made + attention.alibi(slopes, distance, dtype).transpose(1, 2)
            self._biases[number] = made
        return made
