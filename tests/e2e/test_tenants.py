"""Tenants never share: one prompt, two callers, and what each side of the transfer found again.

Same tenant and other tenant are always asked in pairs: the first must find its prefix, or the
second's finding nothing would prove nothing.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc
import httpx
import pytest
import pytest_asyncio

from cache_transfer.contract import HandoffIdentity, cache_identity, prompt_digest
from cache_transfer.pages import PageSink
from cache_transfer.tickets import Claim
from pdserve.client import AsyncClient, Completion
from pdserve.request import SamplingParams
from pdserve.v1 import gateway_pb2
from router.prefixes import chain
from router.tenants import Tenant
from tests.e2e.stack import Stack, Worker, alone, pair
from tests.e2e.watched import WatchedHost, engine
from tests.engine.tiny import prompt
from tests.router.support import MODEL, house

pytestmark = pytest.mark.asyncio(loop_scope="module")

KEYS = {name: f"sk-{name}-0123456789abcdef" for name in ("acme", "zeta")}
TENANTS = tuple(Tenant.of(name, key) for name, key in KEYS.items())
GREEDY = SamplingParams(temperature=0, max_tokens=4, seed=0, ignore_eos=True)
LENGTH, PREFILL_PAGE, DECODE_PAGE = 41, 8, 5
FOUND = (40, 40)  # tokens that a second request finds: whole pages of 8 at prefill, of 5 at decode


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def made() -> AsyncIterator[Stack]:
    async with pair(engine(page_size=PREFILL_PAGE), engine(page_size=DECODE_PAGE), tenants=TENANTS) as it:
        yield it


async def ask(made: Stack, tenant: str, ids: tuple[int, ...], **options: Any) -> Completion:
    async with AsyncClient(made.router.address, api_key=KEYS[tenant]) as client:
        return await client.complete(token_ids=ids, sampling=GREEDY, want_record=True, **options)


def found(completion: Completion) -> tuple[int, int]:
    """Prompt tokens that prefill and decode held already."""
    record = completion.record
    assert record is not None
    cached = record.prompt_tokens - record.computed_tokens
    assert completion.usage.cached_prompt_tokens == cached
    return cached, record.prompt_tokens - record.sent_tokens


async def test_the_same_tenant_finds_its_prefix_and_another_does_not(made: Stack) -> None:
    ids = prompt(LENGTH, seed=1)
    answers = [(tenant, await ask(made, tenant, ids)) for tenant in ("acme", "acme", "zeta", "zeta", "acme")]
    assert [found(answer) for _, answer in answers] == [(0, 0), FOUND, (0, 0), FOUND, FOUND]
    expected = alone(ids, GREEDY)
    for _, answer in answers:
        assert answer.ids == expected.ids
        assert made.first_logits(answer) == expected.first_logits
    # Cold is cold: the other tenant's request cost and sent exactly what the very first one did. (Not in as many
    # frames: how many rows one takes depends on how far the engine is ahead of the sender.)
    (_, first), (_, other) = answers[0], answers[2]
    assert first.record is not None and other.record is not None
    assert other.record.bytes_sent == first.record.bytes_sent
    assert other.usage == first.usage


def identities(worker: Worker) -> set[bytes]:
    return {page.link.identity for page in worker.blocks._cached.values()}


async def test_both_indexes_keep_pages_under_the_tenants_own_identity(made: Stack) -> None:
    before = [identities(worker) for worker in made.workers]
    await ask(made, "zeta", prompt(LENGTH, seed=2))
    for worker, known in zip(made.workers, before, strict=True):
        of = {name: cache_identity(worker.contract, None, name) for name in (*KEYS, "default")}
        assert identities(worker) - known <= {of["zeta"]} and of["zeta"] in identities(worker)
        assert of["default"] not in identities(worker)
        assert len(set(of.values())) == 3


async def test_the_router_remembers_prefixes_by_tenant(made: Stack) -> None:
    ids = prompt(LENGTH, seed=3)
    await ask(made, "acme", ids)
    contract = made.prefills[0].contract.digest()
    memory = made.router.orchestrator.prefixes
    held = {name: memory.held_tokens(chain(ids, contract, None, name)) for name in (*KEYS, "default")}
    assert held == {
        "acme": {worker.incarnation: 32 for worker in made.workers},  # one whole block of it
        "zeta": {},
        "default": {},
    }


async def test_the_handoff_names_the_tenant(made: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    """The identity that prefill proves to decode, as it came off the wire."""
    seen, host = [], made.hosts[0]

    async def noting(claim: Claim) -> PageSink:
        seen.append(claim.identity)
        return await WatchedHost.grant(host, claim)

    monkeypatch.setattr(host, "grant", noting)
    ids = prompt(LENGTH, seed=4)
    await ask(made, "zeta", ids)
    assert seen == [HandoffIdentity(made.decodes[0].contract.digest(), None, "zeta", prompt_digest(ids), 0, LENGTH)]


def smuggled(field: str) -> bytes:
    """A GenerateRequest with one more field that a naive server might read: number 60, or the label."""
    message = gateway_pb2.GenerateRequest(tokens=gateway_pb2.TokenPrompt(ids=prompt(LENGTH, seed=5)), want_record=True)
    message.sampling.temperature, message.sampling.max_tokens = 0.0, 4
    if field == "label":
        message.request_id = "tenant=acme"
    data = message.SerializeToString()
    return data + b"\xe2\x03\x04acme" if field == "unknown" else data


@pytest.mark.parametrize("field", ["label", "unknown"])
@pytest.mark.parametrize("name", ["tenant", "x-tenant", "x-pdserve-tenant", "user", "cache-salt"])
async def test_no_message_and_no_metadata_changes_who_asks_over_grpc(made: Stack, field: str, name: str) -> None:
    """`acme` holds the prompt; `zeta` says that it is acme."""
    await ask(made, "acme", prompt(LENGTH, seed=5))
    for worker in made.workers:  # so that zeta, which asked for the prompt before, finds nothing of its own
        forget(worker, "zeta")
    async with grpc.aio.insecure_channel(made.router.address) as channel:
        metadata = (("authorization", f"Bearer {KEYS['zeta']}"), (name, "acme"))
        method: Any = channel.unary_stream("/pdserve.v1.Gateway/Generate")
        call = method(smuggled(field), metadata=metadata, timeout=20)
        events = [gateway_pb2.GenerateEvent.FromString(data) async for data in call]
    (record,) = [event.record for event in events if event.WhichOneof("event") == "record"]
    assert (record.computed_tokens, record.sent_tokens) == (LENGTH, LENGTH)
    assert events[-1].finish.usage.cached_prompt_tokens == 0
    assert found(await ask(made, "acme", prompt(LENGTH, seed=5))) == FOUND


def forget(worker: Worker, tenant: str) -> None:
    """Evicts what a tenant left behind."""
    mine = cache_identity(worker.contract, None, tenant)
    for page in [page for page, entry in worker.blocks._cached.items() if entry.link.identity == mine]:
        if page in worker.blocks._cached:  # not gone with its parent
            worker.blocks._evict(page)
    assert mine not in identities(worker)


HTTP_BODY: dict[str, Any] = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "the cat sat on the mat and the dog sat on the log " * 2}],
    "max_tokens": 3,
    "temperature": 0,
}


async def test_no_body_and_no_header_changes_who_asks_over_http() -> None:
    async with house(tenants=TENANTS) as served:
        url = f"http://{served.router.http_address}/v1/chat/completions"

        async def cached(tenant: str, headers: dict[str, str] | None = None, **more: Any) -> int:
            given = {"Authorization": f"Bearer {KEYS[tenant]}", **(headers or {})}
            async with httpx.AsyncClient(timeout=20) as http:
                answer = await http.post(url, headers=given, json={**HTTP_BODY, **more})
            assert answer.status_code == 200, answer.text
            tokens = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
            assert isinstance(tokens, int)
            return tokens

        assert await cached("acme") == 0
        assert await cached("acme") > 0
        # One request for each disguise: the first that worked would find acme's pages.
        for index, headers in enumerate(({"X-Tenant": "acme"}, {"Tenant": "acme"}, {"OpenAI-Organization": "acme"})):
            messages = [{**HTTP_BODY["messages"][0], "role": f"{index}user"}]  # no page in common with another
            assert await cached("acme", messages=messages) == 0
            assert await cached("zeta", headers, messages=messages, user="acme") == 0
            assert await cached("acme", messages=messages, user="zeta") > 0
        labels: dict[str, Any] = {
            "safety_identifier": "acme",
            "prompt_cache_key": "acme",
            "metadata": {"tenant": "acme"},
        }
        for label, value in labels.items():  # taken as clients send them, and never an identity
            messages = [{**HTTP_BODY["messages"][0], "role": f"{label[:4]}user"}]
            assert await cached("acme", messages=messages) == 0
            assert await cached("zeta", messages=messages, **{label: value}) == 0
            other: Any = "zeta" if value == "acme" else {}
            assert await cached("acme", messages=messages, **{label: other}) > 0
        for field in ("tenant", "tenant_id", "cache_salt", "salt"):
            async with httpx.AsyncClient() as http:
                answer = await http.post(
                    url, headers={"Authorization": f"Bearer {KEYS['zeta']}"}, json={**HTTP_BODY, field: "acme"}
                )
            assert answer.status_code == 400
            error = answer.json()["error"]
            assert (error["code"], error["param"]) == ("unknown_field", field)
        with_name = [{**HTTP_BODY["messages"][0], "name": "acme"}]
        assert await cached("zeta", messages=with_name) == 0
