"""The engine: one model, one cache, and `step(plan)`. See docs/architecture.md for who calls it.

A step reads as: check the plan, lay it out as tensors, run the layers (layered.py), take the logits.
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
from pdserve.engine.batch import check_plan, lay_out
from pdserve.engine.cache import PagedCache
from pdserve.engine.dtypes import torch_dtype, wide
from pdserve.engine.graphs import open_graphs
from pdserve.engine.large_pages import trim_heap
from pdserve.engine.layered import LayeredStep, OnLayer
from pdserve.engine.loaded import LoadedModel
from pdserve.engine.model import Decoder
from pdserve.engine.native.choice import KernelCounters, Kernels
from pdserve.engine.native.path import NativePath
from pdserve.engine.plain import PlainPath
from pdserve.engine.plan import EngineConfig, StepOutput, StepPlan
from pdserve.engine.positions import rotary_tables
from pdserve.engine.trace import StepTrace
from pdserve.engine.weights import check_tensors
from pdserve.errors import Cancelled, ConfigError


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
        begun = self._begin(plan, trace)
        begun.advance(self.spec.layers, on_layer, cancelled)
        return begun.output()

    def begin(self, plan: StepPlan) -> LayeredStep:
        """A step whose layers run when the caller says so; other steps may run between them, if they write other pages.

        Raises what `step` raises before the first layer.
        """
        check_plan(plan, self.spec, self.cache)
        self.adapters.check(plan)
        return self._begin(plan, None)

    def _begin(self, plan: StepPlan, trace: StepTrace | None) -> LayeredStep:
        path = self._kernels.current()  # at each step: some weights are laid out here for kernels that came late
        if any(chunk.adapter is not None for chunk in plan.chunks):
            path = self._plain  # the kernels know no adapters; the other sequences of the step are computed there, too
        with torch.inference_mode():
            self.cache.join()
            batch = lay_out(plan, self.cache)
            batch.adapters = self.adapters.rows(batch.chunks, self.device)
            if trace is not None:
                trace.plan, trace.batch = plan, batch
            return LayeredStep(path, batch, self.spec, self.cache, self.adapters, trace, self._output)

    def _output(self, step: LayeredStep) -> StepOutput:
        part, batch = step.part, step.batch
        with torch.inference_mode():
            scores = self._logits(step.path, step.x if part else step.x[batch.wanted_rows])
        out = scores
        if scores.is_inference():  # a sampler may change it in place
            out = torch.empty(scores.shape, dtype=wide(self.dtype), device=self.device)
            out.copy_(scores)
        self._kernels.count(step.path)
        wanted = part[0].wanted if part else batch.wanted
        return StepOutput({key: out[first:end] for key, first, end in wanted}, step.counters, tuple(step.written))

    def decoder_logits(self, x: Tensor) -> Tensor:
        """Rows of the residual stream [R, width] -> raw scores [R, vocab_size]."""
        return self._logits(self._kernels.current(), x)

    def _logits(self, path: PlainPath | NativePath, x: Tensor) -> Tensor:
        return path.logits(x) if x.shape[0] else x.new_empty(0, self.spec.vocab_size)


def check_weights(config: EngineConfig) -> None:
    """Raises ConfigError for a way to store weights that is unknown, or that deterministic mode does not have."""
    if config.weights not in ("", "int8"):
        raise ConfigError(f"unknown weights {config.weights!r}", field="weights", remedy="use int8, or leave it empty")
    if config.weights and config.deterministic:
        raise ConfigError("deterministic mode has no int8", field="weights", remedy="leave one of them off")
