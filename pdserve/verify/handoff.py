"""The side `handoff`: a whole deployment in this process, and what it did to each prompt.

A router, a prefill and a decode worker, with real gRPC between them over loopback. The prompt is
computed by prefill's engine; K and V are read from the pages of decode, as they arrived; the first
logits are those that decode received, and the tokens those that its sampler chose.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import torch
from torch import Tensor

from cache_transfer.receiver import ReceivedLogits
from decode_worker.settings import DecodeSettings
from decode_worker.worker import DecodeWorker
from pdserve.client import AsyncClient
from pdserve.engine.observe import Observed, Part
from pdserve.errors import Internal, InvalidRequest, PdserveError
from pdserve.registry.settings import RegistrySettings
from pdserve.request import SamplingParams
from pdserve.verify.local import TracedEngine, shape_of
from pdserve.verify.models import Models, pages_for
from pdserve.verify.observing import Prompts, Run, described
from pdserve.verify.sides import Side
from prefill_worker.settings import PrefillSettings
from prefill_worker.worker import PrefillWorker
from router.app import Router
from router.settings import RouterSettings

ANSWER_S = 300.0  # for one prompt and its tokens
CHUNK = 256  # tokens of one prefill step unless the side says otherwise
_DTYPES = {"fp32": torch.float32, "float64": torch.float64}


def run_handoff(side: Side, prompts: Prompts, tokens: int, models: Models) -> Run:
    """`tokens` greedy tokens for every prompt, at least 2: decode's pages are seen when it computes.

    Raises what the workers refuse with, and ConfigError.
    """
    return asyncio.run(_run(side, prompts, max(2, tokens), models))


async def _run(side: Side, prompts: Prompts, tokens: int, models: Models) -> Run:
    room = 2 * len(prompts) * (max(map(len, prompts)) + tokens + side.engine.page_size)
    prefill, decode = (models.engine(side, pages_for(room, side.engine), TracedEngine) for _ in range(2))
    observed: list[Observed] = []
    error: PdserveError | None = None
    async with _Deployment(prefill, decode, side) as deployment:
        try:
            for prompt in prompts:
                observed.append(await deployment.answer(prompt, tokens))
        except InvalidRequest:
            raise
        except PdserveError as fault:  # a handoff between two sound workers of one model has no reason to fail
            error = fault
    contract = decode.contract()
    return Run(
        side=side,
        shape=shape_of(decode),
        observed=() if error else tuple(observed),
        contract=contract,
        broken=(*prefill.recording.broken, *decode.recording.broken),
        error=error,
        record=described(side, contract),
    )


@dataclass
class _Arrived:
    """The first logits of the handoff that came last."""

    logits: ReceivedLogits | None = None

    def take(self, key: str, logits: ReceivedLogits) -> None:
        self.logits = logits

    def scores(self) -> Tensor:
        if self.logits is None:
            raise Internal("no cache arrived at the decode worker", field="handoff")
        return torch.frombuffer(bytearray(self.logits.data), dtype=_DTYPES[self.logits.dtype])


class _Deployment:
    """Starts on entering, stops on leaving, after a failed start too."""

    def __init__(self, prefill: TracedEngine, decode: TracedEngine, side: Side) -> None:
        registry = RegistrySettings(heartbeat_s=0.5)
        self._engines = prefill, decode
        self._router = Router(RouterSettings(port=0, http_port=0, registry=registry))
        self._prefill = PrefillWorker(
            prefill,
            None,
            PrefillSettings(
                name="verify", registry=registry, chunk_tokens=side.chunk_tokens or CHUNK, max_running=1, grace_s=1.0
            ),
            self._router.registry,
        )
        self._decode = DecodeWorker(
            decode, None, DecodeSettings(name="verify", registry=registry, grace_s=1.0), self._router.registry
        )
        self._arrived = _Arrived()
        self._decode.pipeline.handoffs.on_verified = self._arrived.take

    async def __aenter__(self) -> _Deployment:
        try:
            await self._router.start()
            await self._prefill.start()
            await self._decode.start()
            await self._router.pool.refresh()
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._prefill.stop()
        await self._decode.stop()
        await self._router.stop()

    async def answer(self, prompt: tuple[int, ...], tokens: int) -> Observed:
        before = [set(engine.recording.parts) for engine in self._engines]
        self._arrived.logits = None
        sampling = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, seed=0)
        async with AsyncClient(self._router.address) as client:
            answer = await client.complete(token_ids=prompt, sampling=sampling, timeout_s=ANSWER_S)
        prefilled, decoded = (self._new(engine, seen) for engine, seen in zip(self._engines, before, strict=True))
        ids = (*prompt, *answer.ids[:-1])
        steps = self._engines[1].recording
        logits = [self._arrived.scores(), *(rows[-1] for rows in steps.logits[decoded[0]])]
        parts: list[Part] = [part for key in prefilled for part in self._engines[0].recording.parts[key]]
        return steps.observed([*parts, *steps.parts[decoded[0]]], ids, len(prompt), logits, answer.ids)

    @staticmethod
    def _new(engine: TracedEngine, before: set[str]) -> list[str]:
        """Keys of the sequences that ran since `before`: one, or one per attempt."""
        found = [key for key in engine.recording.parts if key not in before]
        if not found:
            raise Internal("a worker computed nothing", field="handoff")
        return found
