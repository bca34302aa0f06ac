"""Parts of the service that keep records of what they do, and that a test can hold still.

They are subclasses and a listener; the work is done by the real parts.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from cache_transfer.pages import PageSink
from cache_transfer.receiver import ReceivedLogits, ReceiveReport, ReceiverHost
from cache_transfer.tickets import Claim
from pdserve.engine.engine import Engine
from pdserve.engine.layered import OnLayer
from pdserve.engine.loaded import LoadedModel
from pdserve.engine.plan import EngineConfig, StepCounters, StepOutput, StepPlan
from pdserve.engine.spec import ModelSpec
from pdserve.errors import PdserveError
from pdserve.telemetry.context import TraceContext, current
from tests.engine.tiny import TINY, tiny_model

WAIT_S = 20.0  # for anything that must happen; the machine may be busy


@dataclass(frozen=True)
class Step:
    """One engine step that ran to its end."""

    plan: StepPlan
    logits: dict[str, Tensor]  # as StepOutput's, but safe from samplers
    counters: StepCounters


class WatchedEngine(Engine):
    """A real engine that remembers its steps, and that can be held still inside of one. Make it on the test's loop."""

    def __init__(self, model: LoadedModel, config: EngineConfig) -> None:
        super().__init__(model, config)
        self.steps: list[Step] = []
        self.layers_begun = 0
        self.inside = asyncio.Event()
        """A step stands still, after it has written K and V of the layer in question."""
        self._layer = 0
        self._loop = asyncio.get_running_loop()
        self._open = threading.Event()
        self._open.set()

    @contextmanager
    def held(self, layer: int = 0) -> Iterator[None]:
        """Steps stand still meanwhile, in that layer."""
        self._layer = layer
        self.inside.clear()
        self._open.clear()
        try:
            yield
        finally:
            self.let_go()

    def let_go(self) -> None:
        self._open.set()

    @property
    def counters(self) -> StepCounters:
        """Work of all steps so far."""
        return sum((step.counters for step in self.steps), StepCounters())

    def step(self, plan: StepPlan, *, on_layer: OnLayer | None = None, **options: Any) -> StepOutput:
        def watched(layer: int) -> None:
            self.layers_begun += 1
            if on_layer is not None:
                on_layer(layer)
            if layer >= self._layer and not self._open.is_set():
                self._loop.call_soon_threadsafe(self.inside.set)
                assert self._open.wait(WAIT_S), "the test never let go"

        output = super().step(plan, on_layer=watched, **options)
        logits = {key: rows.clone() for key, rows in output.logits.items()}
        self.steps.append(Step(plan, logits, output.counters))
        return output


class WatchedHost:
    """Hears what the receiver tells the decode worker, and passes it on."""

    def __init__(self, host: ReceiverHost) -> None:
        self.logits: dict[str, ReceivedLogits] = {}
        """First-step logits by the router's request id, exactly as they came off the wire."""
        self.traces: list[TraceContext | None] = []
        """Whose span each push was below."""
        self._host = host

    async def grant(self, claim: Claim) -> PageSink:
        self.traces.append(current().trace)
        return await self._host.grant(claim)

    def verified(self, claim: Claim, logits: ReceivedLogits, report: ReceiveReport) -> None:
        self._host.verified(claim, logits, report)
        self.logits[claim.request_id.partition("#")[0]] = logits

    def aborted(self, claim: Claim, error: PdserveError) -> None:
        self._host.aborted(claim, error)


def engine(of: ModelSpec = TINY, dtype: str = "fp32", seed: int = 0, **config: Any) -> WatchedEngine:
    """A deterministic one with pages of 4 tokens, unless `config` says otherwise."""
    given = {"pages": 128, "page_size": 4, "deterministic": True, **config}
    return WatchedEngine(tiny_model(of, dtype, seed), EngineConfig(dtype=dtype, **given))
