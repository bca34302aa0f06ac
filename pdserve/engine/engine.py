"""The engine: one model, one cache, and `step(plan)`. See docs/architecture.md for who calls it.

A step reads as: check the plan, lay it out as tensors, run the layers, take the logits. In
each layer K and V are written first, then announced (`on_layer`), then attention reads the
cache, so that a chunk and the tokens before it are read in the same way.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from cache_transfer.contract import WorkerContract
from pdserve.engine import attention, deterministic
from pdserve.engine.batch import Batch, Group, check_plan, lay_out
from pdserve.engine.cache import PagedCache
from pdserve.engine.dtypes import torch_dtype, wide
from pdserve.engine.loaded import LoadedModel
from pdserve.engine.model import Decoder
from pdserve.engine.plan import EngineConfig, StepCounters, StepOutput, StepPlan
from pdserve.engine.positions import RotaryTable
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
        if model.dtype != config.dtype:
            raise ConfigError(
                f"the model is in {model.dtype}, the engine in {config.dtype}",
                field="dtype",
                remedy="load the model in the engine's dtype",
            )
        check_tensors(model.spec, model.tensors)
        self.spec, self.config = model.spec, config
        self.name, self.digest = model.name, model.digest
        self.device = torch.device(config.device)
        self.dtype = torch_dtype(config.dtype)
        tensors = model.tensors
        if self.device.type != "cpu":
            tensors = {name: tensor.to(self.device) for name, tensor in tensors.items()}
        self.decoder = Decoder(model.spec, tensors, tiled=config.deterministic)
        self.cache = PagedCache(model.spec, config)
        rows = min(self.spec.context_limit, self.cache.capacity)
        rotary = self.spec.positions.kind == "rope"
        self.rotary = RotaryTable(self.spec.positions, rows, self.dtype, config.device) if rotary else None
        if config.deterministic:
            self._check_deterministic()

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
            planes=spec.planes(),
            vocab_size=spec.vocab_size,
            tokenizer_digest=tokenizer_digest,
            page_size=config.page_size,
            page_axis_order=config.axis_order,
            device=config.device,
            kv_dtype=self.cache.dtype_name,
            weight_dtype=config.dtype,
            activation_dtype=config.dtype,
            context_limit=min(context_limit or limit, limit),
            info={
                "torch": str(torch.__version__),
                "kernels": "plain" if config.deterministic else "fast",
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
        compares. Raises InvalidRequest or Internal before the first layer, Cancelled between
        layers; after either the pages' written range is undefined.
        """
        check_plan(plan, self.spec, self.cache)
        before = tuple(self.cache.written)
        with torch.inference_mode():
            batch = lay_out(plan, self.cache)
            if trace is not None:
                trace.plan, trace.batch = plan, batch
            x, counters = self._layers(batch, on_layer, cancelled, trace)
            scores = self.decoder_logits(x[batch.wanted_rows])
        out = torch.empty(scores.shape, dtype=wide(self.dtype), device=self.device)
        out.copy_(scores)  # outside inference mode: a sampler may change it in place
        written = tuple(after - at for after, at in zip(self.cache.written, before, strict=True))
        return StepOutput({key: out[first:end] for key, first, end in batch.wanted}, counters, written)

    def decoder_logits(self, x: Tensor) -> Tensor:
        """Rows of the residual stream [R, width] -> raw scores [R, vocab_size]."""
        if not x.shape[0]:
            return x.new_empty(0, self.spec.vocab_size)
        return self._rows(lambda rows: (self.decoder.logits(rows),), x)[0]

    def _layers(
        self,
        batch: Batch,
        on_layer: OnLayer | None,
        cancelled: Callable[[], bool] | None,
        trace: StepTrace | None,
    ) -> tuple[Tensor, StepCounters]:
        """The residual stream after the last layer, [T, width], and the work done."""
        decoder = self.decoder
        self.cache.clear(batch.stale)
        cos, sin = self._rotation(batch.positions)
        reads = {window: Reads(batch, window) for window in {self.spec.window(i) for i in range(self.spec.layers)}}
        (x,) = self._rows(lambda ids, at: (decoder.embed(ids, at),), batch.ids, batch.positions)
        counters = StepCounters()
        for layer in range(self.spec.layers):
            if cancelled is not None and cancelled():
                raise Cancelled(f"cancelled before layer {layer}", reason="CANCELLED")
            q, k, v = self._rows(lambda *r, at=layer: decoder.attention_inputs(at, *r), x, cos, sin)
            self.cache.write(layer, batch.slots, k, v)
            if on_layer is not None:
                on_layer(layer)
            read = reads[self.spec.window(layer)]
            o = self._attention(layer, q, batch, read)
            counters += StepCounters(k.shape[0], read.pairs * q.shape[1])
            (y,) = self._rows(lambda *r, at=layer: (decoder.attention_output(at, *r),), x, o)
            if trace is not None:
                trace.layers.append(LayerTrace(x, q, k, v, o, y, read.first, read.end))
            x = y
        return x, counters

    def _attention(self, layer: int, q: Tensor, batch: Batch, read: Reads) -> Tensor:
        """q [T, Hq, d] against the cached keys of each row's own sequence -> [T, Hq, d]."""
        scale, soft_cap = self.spec.scale, self.spec.soft_cap
        parts = []
        for number, group in enumerate(batch.groups):
            rows = slice(group.first_row, group.end_row)
            k, v = self.cache.gather(layer, group.index, group.batch)  # [Hkv, B, m, d]
            if self.config.deterministic:
                parts.append(self._attention_fixed(q[rows], k, v, read.first[rows], read.end[rows]))
            elif group.decode:
                k, v = k.to(q.dtype), v.to(q.dtype)
                parts.append(
                    attention.decode(q[rows], k, v, read.bias(number, group, q.dtype, k.shape[2]), scale, soft_cap)
                )
            else:
                k, v = k[:, 0, : group.keys].to(q.dtype), v[:, 0, : group.keys].to(q.dtype)
                parts.append(attention.prefill(q[rows], k, v, read.blocks(number, group, q.dtype), scale, soft_cap))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _attention_fixed(self, q: Tensor, k: Tensor, v: Tensor, first: Tensor, end: Tensor) -> Tensor:
        """Deterministic mode: one sequence after the other, in fp32 or float64."""
        accurate = wide(q.dtype)
        batch = k.shape[1]
        per = q.shape[0] // batch
        outputs = []
        for b in range(batch):
            rows = slice(b * per, (b + 1) * per)
            keys, values = k[:, b].to(accurate), v[:, b].to(accurate)
            out = deterministic.attend(
                q[rows].to(accurate), keys, values, first[rows], end[rows], self.spec.scale, self.spec.soft_cap
            )
            outputs.append(out.to(q.dtype))
        return torch.cat(outputs)

    def _rows(self, function: deterministic.RowFunction, *rows: Tensor) -> tuple[Tensor, ...]:
        """Applies a row-wise function: at once, or in fixed tiles in deterministic mode."""
        return deterministic.in_tiles(function, *rows) if self.config.deterministic else function(*rows)

    def _rotation(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        if self.rotary is not None:
            return self.rotary.rows(positions)
        none = torch.empty(positions.shape[0], 1, 0, dtype=self.dtype, device=self.device)
        return none, none

    def _check_deterministic(self) -> None:
        """Proves row independence on the first layer and the head: later layers have the same shapes."""
        spec, decoder = self.spec, self.decoder
        generator = torch.Generator().manual_seed(1)

        def sample(*shape: int) -> Tensor:
            values = torch.randn(deterministic.ROWS, *shape, generator=generator, dtype=wide(self.dtype))
            return values.to(self.dtype).to(self.device)

        with torch.inference_mode():
            cos, sin = self._rotation(torch.arange(deterministic.ROWS, device=self.device) % self.cache.capacity)
            x, o = sample(spec.width), sample(spec.heads, spec.head_dim)
            deterministic.check_rows("attention inputs", lambda *r: decoder.attention_inputs(0, *r), x, cos, sin)
            deterministic.check_rows("attention output", lambda *r: (decoder.attention_output(0, *r),), x, o)
            deterministic.check_rows("logits", lambda r: (decoder.logits(r),), x)
            keys = torch.randn(2, spec.kv_heads, 100, spec.head_dim, generator=generator, dtype=wide(self.dtype))
            end = torch.arange(deterministic.ROWS, device=self.device) * 6 + 1
            k, v = keys.to(self.device)
            deterministic.check_rows(
                "attention",
                lambda q, e: (deterministic.attend(q, k, v, e * 0, e, spec.scale, 0.0),),
                o.to(k.dtype),
                end,
            )


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

    def bias(self, number: int, group: Group, dtype: torch.dtype, keys: int) -> Tensor:
        """[B, 1, keys] of a decode group: 0 where the sequence's one query sees the key, else -inf."""
        made = self._biases.get(number)
        if made is None:
            rows = slice(group.first_row, group.end_row)
            visible = attention.visible_keys(self.first[rows], self.end[rows], keys)
            made = torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill(~visible, -torch.inf)
            self._biases[number] = made = made[:, None]
        return made
