"""A whole small installation in one process: real router, real workers, a tokenizer trained here."""

from __future__ import annotations

import asyncio
import functools
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, trainers

from cache_transfer.contract import Endpoint, PositionScheme, WorkerContract
from decode_worker.settings import DecodeSettings
from decode_worker.worker import DecodeWorker
from pdserve.engine.loaded import LoadedModel
from pdserve.engine.plan import EngineConfig
from pdserve.registry.records import DECODE, READY, Load, WorkerRecord
from pdserve.registry.settings import RegistrySettings
from pdserve.request import SamplingParams
from pdserve.rpc.events import Finish, HandoffRecord, TokenBatch
from pdserve.rpc.settings import RpcSettings
from pdserve.tokenizer import Bundle
from pdserve.v1 import worker_pb2, worker_pb2_grpc
from prefill_worker.settings import PrefillSettings
from prefill_worker.worker import PrefillWorker
from router.app import Router
from router.backlog import Event
from router.gate import Member, group_key
from router.jobs import Job
from router.pool import Pool
from router.request import Ask, TokenPrompt
from router.settings import RouterSettings
from tests.engine.tiny import spec, tiny_model

VOCAB = 320
CONTEXT = 256
LONG_CONTEXT = 8192
MODEL = "tiny"
TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<|a|>{% endif %}"
)
ENGINE = EngineConfig(dtype="fp32", pages=64, page_size=4)
REGISTRY = RegistrySettings(lease_s=3.0, heartbeat_s=0.1, timeout_s=2.0)


@functools.cache
def bundle() -> Bundle:
    """A byte-level BPE with all 256 bytes; every id of it is below VOCAB."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=["<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(["the cat sat on the mat and the dog sat on the log " * 4], trainer)
    return Bundle(
        tokenizer_json=backend.to_str(),
        chat_template=TEMPLATE,
        special_tokens={},
        vocab_size=backend.get_vocab_size(),
    )


@functools.cache
def model(seed: int = 0, context: int = CONTEXT) -> LoadedModel:
    return tiny_model(spec(vocab_size=VOCAB, context_limit=context, layers=2), seed=seed)


def contract(**changes: Any) -> WorkerContract:
    """A contract of a small model, with some fields changed."""
    plain = WorkerContract(
        model_digest=b"m" * 32,
        positions=PositionScheme(kind="rope", theta=10000.0, dims=8),
        attention=model().spec.attention_scheme(),
        planes=model().spec.planes(),
        vocab_size=VOCAB,
        tokenizer_digest=b"t" * 32,
        page_size=16,
        page_axis_order="hnd",
        device="cpu",
        kv_dtype="fp32",
        weight_dtype="fp32",
        activation_dtype="fp32",
        context_limit=CONTEXT,
    )
    return replace(plain, **changes)


def record(worker_id: str, role: str, of: WorkerContract | None = None, **changes: Any) -> WorkerRecord:
    """A ready worker's record; its incarnation is made from its name."""
    given: dict[str, Any] = {
        "worker_id": worker_id,
        "role": role,
        "incarnation": worker_id.encode().ljust(16, b"-"),
        "state": READY,
        "model": MODEL,
        "endpoints": (Endpoint("127.0.0.1:1"),),
        "transfer": (Endpoint("127.0.0.1:1"),) if role == DECODE else (),
        "contract": of or contract(),
        "load": Load(pages_total=64, waiting_limit=8),
        "lease_s": 5.0,
    }
    return WorkerRecord(**(given | changes))


def member(worker_id: str, role: str, of: WorkerContract | None = None, **changes: Any) -> Member:
    made = record(worker_id, role, of, **changes)
    digest = made.contract.digest()
    return Member(made, group_key(made.contract, digest), digest)


@dataclass
class House:
    """A started router and its workers."""

    router: Router
    prefills: list[PrefillWorker] = field(default_factory=list)
    decodes: list[DecodeWorker] = field(default_factory=list)

    @property
    def workers(self) -> Sequence[PrefillWorker | DecodeWorker]:
        return [*self.prefills, *self.decodes]

    async def add_prefill(self, worker_id: str, of: LoadedModel | None = None, **changes: Any) -> PrefillWorker:
        given: dict[str, Any] = {"worker_id": worker_id, "name": MODEL, "engine": ENGINE, "registry": REGISTRY}
        settings = PrefillSettings(**(given | changes))
        worker = PrefillWorker(of or model(), bundle(), settings, self.router.registry)
        self.prefills.append(worker)
        await worker.start()
        await self.router.pool.refresh()
        return worker

    async def add_decode(self, worker_id: str, of: LoadedModel | None = None, **changes: Any) -> DecodeWorker:
        given: dict[str, Any] = {"worker_id": worker_id, "name": MODEL, "engine": ENGINE, "registry": REGISTRY}
        settings = DecodeSettings(**(given | changes))
        worker = DecodeWorker(of or model(), bundle(), settings, self.router.registry)
        self.decodes.append(worker)
        await worker.start()
        await self.router.pool.refresh()
        return worker

    async def generate(self, ids: Sequence[int], **sampling: Any) -> list[Event]:
        """All events of one request through the router's own parts."""
        ask = Ask(TokenPrompt(tuple(ids)), SamplingParams(**({"temperature": 0.0} | sampling)), want_record=True)
        request = await self.router.intake.take(ask)
        return [event async for event in self.router.orchestrator.generate(request)]

    def member(self, worker_id: str) -> Member:
        return next(m for m in self.router.pool.members() if m.id == worker_id)

    def make_look_busy(self, worker_id: str) -> Job:
        """Placement prefers any other worker, until the job is given to `pool.end`."""
        job = self.router.pool.begin(self.member(worker_id), 100_000, 100_000)
        job.started = float("inf")  # no report of the worker will ever contain it
        return job

    async def add_ghost(self, worker_id: str, role: str, address: str = "", **changes: Any) -> None:
        """Registers a worker as compatible as the real ones; nobody listens, unless `address` says who."""
        with socket.create_server(("127.0.0.1", 0)) as unused:
            address = address or f"127.0.0.1:{unused.getsockname()[1]}"
        real = self.prefills[0] if self.prefills else self.decodes[0]
        endpoint = (Endpoint(address),)
        ghost = record(worker_id, role, real.contract, **({"endpoints": endpoint, "lease_s": 60.0} | changes))
        await self.router.registry.register(ghost)
        await self.router.pool.refresh()

    async def remove_ghost(self, worker_id: str) -> None:
        await self.router.registry.deregister(worker_id, self.member(worker_id).record.incarnation)
        await self.router.pool.refresh()

    async def decodes_reachable(self) -> None:
        await self.assert_reachable(self.decodes)

    async def assert_reachable(self, workers: Sequence[PrefillWorker | DecodeWorker] = ()) -> None:
        """One round trip to every worker."""
        for worker in workers or self.workers:
            stub: Any = worker_pb2_grpc.WorkerStub(self.router.channels.get(worker.address))
            assert (await stub.Describe(worker_pb2.DescribeRequest(), timeout=5)).worker_id == worker.worker_id

    async def assert_nothing_held(self, timeout_s: float = 10.0) -> None:
        """Every page of every worker is free or cached, soon, as Worker/Accounts tells it."""
        for worker in self.workers:
            stub: Any = worker_pb2_grpc.WorkerStub(self.router.channels.get(worker.address))
            try:
                async with asyncio.timeout(timeout_s):
                    while (accounts := await stub.Accounts(worker_pb2.AccountsRequest(), timeout=5)).holdings:
                        continue
            except TimeoutError:
                raise AssertionError(f"{worker.worker_id} still holds {accounts.holdings}") from None
            assert accounts.intact and not accounts.pages_held, accounts
            assert accounts.pages_free + accounts.pages_cached == accounts.pages_total
        assert self.router.orchestrator.active == 0


def router_settings(**changes: Any) -> RouterSettings:
    given: dict[str, Any] = {"port": 0, "http_port": 0, "refresh_s": 0.05, "registry": REGISTRY, "rpc": RpcSettings()}
    return RouterSettings(**(given | changes))


@asynccontextmanager
async def house(prefills: int = 1, decodes: int = 1, **settings: Any) -> AsyncIterator[House]:
    """Starts everything; at the end nothing may be held. Then stops it."""
    router = Router(router_settings(**settings))
    made = House(router)
    await router.start()
    try:
        for number in range(prefills):
            await made.add_prefill(f"p{number}")
        for number in range(decodes):
            await made.add_decode(f"d{number}")
        yield made
        await made.assert_nothing_held()
    finally:
        for worker in made.workers:
            await worker.stop()
        await router.stop()


def ids_of(events: Sequence[Event]) -> tuple[int, ...]:
    return tuple(token for event in events if isinstance(event, TokenBatch) for token in event.ids)


def finish_of(events: Sequence[Event]) -> Finish:
    (finish,) = [event for event in events if isinstance(event, Finish)]
    assert events[-1] is finish
    return finish


def record_of(events: Sequence[Event]) -> HandoffRecord:
    (found,) = [event for event in events if isinstance(event, HandoffRecord)]
    return found


def ready(pool: Pool) -> list[str]:
    """Ids of the workers of MODEL in rotation."""
    return [m.id for m in pool.ready(MODEL)]
