"""The engine: one model, one cache, and `step(plan)`. See docs/architecture.md for who calls it.

A step reads as: check the plan, lay it out as tensors, run the layers, take the logits. In
each layer K and V are written first, then announced (`on_layer`), then attention reads the
cache, so that a chunk and the tokens before it are read in the same way.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from cache_transfer.contract import WorkerContract
from pdserve import __version__
from pdserve.engine.adapter_files import Base
from pdserve.engine.adapters import Adapters
from pdserve.engine.batch import Batch, check_plan, lay_out
from pdserve.engine.cache import PagedCache
from pdserve.engine.dtypes import torch_dtype, wide
from pdserve.engine.graphs import open_graphs
from pdserve.engine.large_pages import trim_heap
from pdserve.engine.loaded import LoadedModel
from pdserve.engine.model import Decoder
from pdserve.engine.native.choice import KernelCounters, Kernels
from pdserve.engine.native.path import NativePath, NativeStep
from pdserve.engine.plain import PlainPath, Reads
from pdserve.engine.plan import EngineConfig, StepCounters, StepOutput, StepPlan
from pdserve.engine.positions import rotary_tables
from pdserve.engine.trace import LayerTrace, StepTrace
from pdserve.engine.weights import check_tensors
from pdserve.errors import Cancelled, ConfigError

OnLayer = Callable[[int], None]


class Engine:
    """Runs plans one at a time, in the thread that calls it. Owns weights and cache.

    Raises on construction: CheckpointError for a model it cannot run, ConfigError for a
    config that does not fit, Internal if deterministic mode does not hold on this build.
    """

    def __init__(self, model: LoadedModel, config: EngineConfig) -> None:
        if config.dtype == "auto":
            config = replace(config, dtype=model.dtype)
        if model.dtype != config.dtype:
            raise ConfigError(
                f"the model is in {model.dtype}, the engine in {config.dtype}",
                field="dtype",
                remedy="load the model in the engine's dtype",
            )
        check_weights(config)
        check_tensors(model.spec, model.tensors)
        self.spec, self.config = model.spec, config
        self.name, self.digest = model.name, model.digest
        self.device = torch.device(config.device)
        self.dtype = torch_dtype(config.dtype)
        tensors = model.tensors
        if self.device.type != "cpu":
            tensors = {name: tensor.to(self.device) for name, tensor in tensors.items()}
        quantized = config.weights == "int8"
        self.decoder = Decoder(model.spec, tensors, tiled=config.deterministic, quantized=quantized)
        self.cache = PagedCache(model.spec, config)
        rows = min(self.spec.context_limit, self.cache.capacity)
        rotary = rotary_tables(self.spec, rows, self.dtype, config.device)
        self._plain = PlainPath(self.decoder, self.cache, rotary)
        self.rotary = self._plain.rotary
        if config.deterministic:
            self._plain.check_deterministic()
        self._kernels = Kernels(self._plain, config)
        self.graphs = open_graphs(self._plain, config)
        self.adapters = Adapters(tiled=config.deterministic)
        self.base = Base(model.spec, model.sources, self.dtype, self.device, config.deterministic)
        """What an adapter for this engine must fit."""

    @property
    def kernels(self) -> KernelCounters:
        """Which kernels serve, and how many steps each path has run."""
        return self._kernels.counters

    def prepare(self) -> None:
        """Lays the weights out for the kernels before anybody steps the engine, and takes the memory of the page pool;
        otherwise its steps do. Gives back what loading left in the heap.

        Raises ConfigError under kernels = native when there is no memory for it.
        """
        self._kernels.prepare()
        trim_heap()
        self.cache.touch()

    def contract(self, tokenizer_digest: bytes = b"", context_limit: int = 0) -> WorkerContract:
        """What this engine promises about every cache it makes or takes.

        Args:
            context_limit: tokens per sequence that are served, if fewer than model and pool allow; 0: no fewer.
        """
        spec, config = self.spec, self.config
        limit = min(spec.context_limit, self.cache.capacity)
        return WorkerContract(
            model_digest=self.digest,
            positions=spec.positions,
            attention=spec.attention_scheme(),
            layer_positions=spec.layer_positions,
            planes=spec.planes(),
            vocab_size=spec.vocab_size,
            tokenizer_digest=tokenizer_digest,
            page_size=config.page_size,
            page_axis_order=config.axis_order,
            device=config.device,
            kv_dtype=self.cache.dtype_name,
            weight_dtype=config.weights or config.dtype,
            activation_dtype=config.dtype,
            context_limit=min(context_limit or limit, limit),
            info={
                "pdserve": __version__,
                "torch": str(torch.__version__),
                "kernels": self._kernels.describe() + (f", {self.graphs.describe()}" if self.graphs else ""),
                "deterministic": str(config.deterministic).lower(),
                "threads": str(config.threads),
            },
        )

    def step(
        self,
        plan: StepPlan,
        *,
        on_layer: OnLayer | None = None,
        cancelled: Callable[[], bool] | None = None,
        trace: StepTrace | None = None,
    ) -> StepOutput:
        """Runs every chunk of the plan through all layers; writes its K and V into its pages.

        on_layer(layer) is called, in this thread, as soon as K and V of that layer are final
        for every chunk. cancelled() is asked between layers. trace collects what `checks`
        compares. Raises InvalidRequest, NotFound or Internal before the first layer, Cancelled between
        layers; after either the pages' written range is undefined.
        """
        check_plan(plan, self.spec, self.cache)
        self.adapters.check(plan)
        if self.graphs is not None and on_layer is None and trace is None and self.graphs.takes(plan):
            if cancelled is not None and cancelled():
                raise Cancelled("cancelled before the first layer", reason="CANCELLED")
            return self.graphs.step(plan)
        before = tuple(self.cache.written)
        # The kernels know no adapters: a step with any runs in plain torch, the other sequences in it, too.
        path = self._plain if any(chunk.adapter is not None for chunk in plan.chunks) else self._kernels.current()
        with torch.inference_mode():
            batch = lay_out(plan, self.cache)
            batch.adapters = self.adapters.rows(batch.chunks, self.device)
            if trace is not None:
                trace.plan, trace.batch = plan, batch
            x, counters = self._layers(path, batch, on_layer, cancelled, trace)
            scores = self._logits(path, x[batch.wanted_rows])
        out = scores
        if scores.is_inference():  # a sampler may change it in place
            out = torch.empty(scores.shape, dtype=wide(self.dtype), device=self.device)
            out.copy_(scores)
        self._kernels.count(path)
        written = tuple(after - at for after, at in zip(self.cache.written, before, strict=True))
        return StepOutput({key: out[first:end] for key, first, end in batch.wanted}, counters, written)

    def decoder_logits(self, x: Tensor) -> Tensor:
        """Rows of the residual stream [R, width] -> raw scores [R, vocab_size]."""
        return self._logits(self._kernels.current(), x)

    def _logits(self, path: PlainPath | NativePath, x: Tensor) -> Tensor:
        return path.logits(x) if x.shape[0] else x.new_empty(0, self.spec.vocab_size)

    def _layers(
        self,
        path: PlainPath | NativePath,
        batch: Batch,
        on_layer: OnLayer | None,
        cancelled: Callable[[], bool] | None,
        trace: StepTrace | None,
    ) -> tuple[Tensor, StepCounters]:
        """The residual stream after the last layer, [T, width], and the work done."""
        self.cache.join()
        self.cache.clear(batch.stale)
        work = path.begin(batch, keep=trace is not None)
        reads = {window: Reads(batch, window) for window in {self.spec.window(i) for i in range(self.spec.layers)}}
        x = path.embed(batch)
        if isinstance(work, NativeStep) and on_layer is None and cancelled is None and trace is None:
            work.layers(x)
            rows = x.shape[0] * self.spec.layers
            pairs = sum(reads[self.spec.window(layer)].pairs for layer in range(self.spec.layers))
            return x, StepCounters(rows, pairs * self.spec.heads)
        counters = StepCounters()
        for layer in range(self.spec.layers):
            if cancelled is not None and cancelled():
                raise Cancelled(f"cancelled before layer {layer}", reason="CANCELLED")
            q, k, v = work.inputs(layer, x)
            if on_layer is not None:
                on_layer(layer)
            read = reads[self.spec.window(layer)]
            o = work.attend(layer, q, read)
            scored = q.shape[1] if self.spec.shape_of(layer).kv_heads else 0  # heads
            counters += StepCounters(k.shape[0], read.pairs * scored)
            y = work.output(layer, x, o)
            if trace is not None:
                trace.layers.append(LayerTrace(x, q, k, v, o, y, read.first, read.end))
            x = y
        return x, counters


def check_weights(config: EngineConfig) -> None:
    """Raises ConfigError for a way to store weights that is unknown, or that deterministic mode does not have."""
    if config.weights not in ("", "int8"):
        raise ConfigError(f"unknown weights {config.weights!r}", field="weights", remedy="use int8, or leave it empty")
    if config.weights and config.deterministic:
        raise ConfigError("deterministic mode has no int8", field="weights", remedy="leave one of them off")
