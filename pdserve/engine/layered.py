"""One step's way through the layers: all of them at once (`Engine.step`), or some at a time with other steps between.

In each layer K and V are written first, then announced (`on_layer`), then attention reads the cache, so that a chunk
and the tokens before it are read in the same way.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from pdserve.engine.adapters import Adapters
from pdserve.engine.batch import Batch, wanted_part
from pdserve.engine.cache import PagedCache
from pdserve.engine.native.path import NativePath, NativeStep
from pdserve.engine.plain import PlainPath, Reads
from pdserve.engine.plan import StepCounters, StepOutput
from pdserve.engine.spec import ModelSpec
from pdserve.engine.trace import LayerTrace, StepTrace
from pdserve.errors import Cancelled

OnLayer = Callable[[int], None]


class LayeredStep:
    """A step of a checked plan. Engine's thread only. `Engine.begin` makes it.

    Args:
        path: what computes its layers.
        output: makes the step's output of this, once all layers are done.
    """

    def __init__(
        self,
        path: PlainPath | NativePath,
        batch: Batch,
        spec: ModelSpec,
        cache: PagedCache,
        adapters: Adapters,
        trace: StepTrace | None,
        output: Callable[[LayeredStep], StepOutput],
    ) -> None:
        self.path, self.batch = path, batch
        self.done = 0
        """Layers that have run."""
        self.counters = StepCounters()
        """Their work."""
        self.written = [0] * len(cache.written)
        """Rows that each of them has stored."""
        self._spec, self._cache, self._trace, self._output = spec, cache, trace, output
        cache.clear(batch.stale)
        self.part = wanted_part(batch) if trace is None else None
        if self.part is not None and self.part[0].chunks:  # now: an adapter may be gone before the last layer
            self.part[0].adapters = adapters.rows(self.part[0].chunks, batch.ids.device)
        self._work = path.begin(batch, keep=trace is not None)
        self._reads = {window: Reads(batch, window) for window in {spec.window(i) for i in range(spec.layers)}}
        self.x = path.embed(batch)
        """The residual stream after the layers so far, [T, width]; after the last one of a `part` its rows alone."""

    def advance(self, end: int, on_layer: OnLayer | None = None, cancelled: Callable[[], bool] | None = None) -> None:
        """Runs the layers up to `end`, that one not included. Arguments and errors as of `Engine.step`."""
        before = tuple(self._cache.written)
        with torch.inference_mode():
            self._cache.join()
            if isinstance(self._work, NativeStep) and on_layer is None and cancelled is None and self._trace is None:
                self._at_once(self._work, min(end, self._spec.layers - (self.part is not None)))
            while self.done < end:
                if cancelled is not None and cancelled():
                    raise Cancelled(f"cancelled before layer {self.done}", reason="CANCELLED")
                self._layer(self.done, on_layer)
                self.done += 1
        for layer, (after, at) in enumerate(zip(self._cache.written, before, strict=True)):
            self.written[layer] += after - at

    def output(self) -> StepOutput:
        """What the step gives; all layers are done."""
        return self._output(self)

    def _at_once(self, work: NativeStep, end: int) -> None:
        """In one call, up to `end`."""
        if end <= self.done:
            return
        work.layers(self.x, self.done, end)
        pairs = sum(self._reads[self._spec.window(layer)].pairs for layer in range(self.done, end))
        self.counters += StepCounters(self.x.shape[0] * (end - self.done), pairs * self._spec.heads)
        self.done = end

    def _layer(self, layer: int, on_layer: OnLayer | None) -> None:
        x, work, spec = self.x, self._work, self._spec
        q, k, v = work.inputs(layer, x)
        if on_layer is not None:
            on_layer(layer)
        read = self._reads[spec.window(layer)]
        scored = q.shape[1] if spec.shape_of(layer).kv_heads else 0  # heads
        self.counters += StepCounters(k.shape[0], read.pairs * scored)
        if self.part is not None and layer == spec.layers - 1:
            self.x = self._last_rows(*self.part, q)
            return
        o = work.attend(layer, q, read)
        self.x = work.output(layer, x, o)
        if self._trace is not None:
            self._trace.layers.append(LayerTrace(x, q, k, v, o, self.x, read.first, read.end))

    def _last_rows(self, part: Batch, rows: Tensor, q: Tensor) -> Tensor:
        """From the whole step's q [T, Hq, d] what the last layer makes of the part's rows, [n, width]."""
        if not part.chunks:
            return self.x[:0]
        layer = self._spec.layers - 1
        work, x, q = self.path.begin(part, keep=False), self.x[rows], q[rows]
        return work.output(layer, x, work.attend(layer, q, Reads(part, self._spec.window(layer))))
