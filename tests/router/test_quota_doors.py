"""What a tenant may not do or see, asked at both doors of a real router."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import httpx
import openai
import pytest
from openai import AsyncOpenAI

from pdserve.client import AsyncClient
from pdserve.errors import Exhausted, PermissionDenied
from pdserve.request import SamplingParams
from router.tenants import Tenant
from tests.router.support import MODEL, House, house

KEY = "sk-acme-0123456789abcdef"
OTHER = "sk-zeta-0123456789abcdef"


@pytest.fixture
async def made() -> AsyncIterator[House]:
    limits: dict[str, Any] = {"requests_per_minute": 3, "tokens_per_minute": 400, "concurrent": 2, "models": (MODEL,)}
    zeta = replace(Tenant.of("zeta", OTHER), models=("another",))
    async with house(tenants=(replace(Tenant.of("acme", KEY), **limits), zeta)) as it:
        yield it


async def test_both_doors_refuse_before_any_work(made: House) -> None:
    """429 with Retry-After over HTTP, RESOURCE_EXHAUSTED over gRPC; the third of three requests is the last."""
    url = f"http://{made.router.http_address}/v1"
    async with (
        AsyncClient(made.router.address, api_key=KEY) as grpc_client,
        AsyncOpenAI(base_url=url, api_key=KEY, max_retries=0) as peer,
    ):
        for _ in range(2):
            await peer.completions.create(model=MODEL, prompt="the cat", max_tokens=2)
        await grpc_client.complete("the cat", sampling=SamplingParams(max_tokens=2))
        steps = [worker.record().load.steps for worker in made.workers]
        with pytest.raises(openai.RateLimitError) as caught:
            await peer.completions.create(model=MODEL, prompt="the cat", max_tokens=2)
        assert caught.value.status_code == 429
        assert 0 < int(caught.value.response.headers["retry-after"]) <= 20
        with pytest.raises(openai.RateLimitError):
            await peer.completions.create(model=MODEL, prompt="the cat", max_tokens=2, stream=True)
        with pytest.raises(Exhausted) as too_many:
            await grpc_client.complete("the cat", sampling=SamplingParams(max_tokens=2))
        assert too_many.value.reason == "TENANT_REQUESTS" and too_many.value.retry_after_ms
        assert [worker.record().load.steps for worker in made.workers] == steps


async def test_a_model_that_is_not_this_tenants_is_forbidden(made: House) -> None:
    async with (
        AsyncClient(made.router.address, api_key=OTHER) as client,
        AsyncOpenAI(base_url=f"http://{made.router.http_address}/v1", api_key=OTHER, max_retries=0) as peer,
    ):
        with pytest.raises(PermissionDenied) as caught:
            await client.complete("the cat")
        assert caught.value.reason == "MODEL_NOT_ALLOWED" and "another" in caught.value.remedy
        with pytest.raises(openai.PermissionDeniedError):
            await peer.completions.create(model=MODEL, prompt="the cat", max_tokens=2)


async def test_what_a_tenant_may_not_use_it_is_not_told_of_either(made: House) -> None:
    async with (
        AsyncClient(made.router.address, api_key=OTHER) as client,
        AsyncOpenAI(base_url=f"http://{made.router.http_address}/v1", api_key=OTHER, max_retries=0) as peer,
        httpx.AsyncClient(
            base_url=f"http://{made.router.http_address}", headers={"authorization": f"Bearer {OTHER}"}
        ) as http,
    ):
        assert [listed.id async for listed in peer.models.list()] == []
        with pytest.raises(openai.NotFoundError):
            await peer.models.retrieve(MODEL)
        assert await client.models() == ()
        for path, body in (("/tokenize", {"prompt": "the cat"}), ("/detokenize", {"tokens": [1, 2]})):
            answer = await http.post(path, json={"model": MODEL, **body})
            assert (answer.status_code, answer.json()["error"]["code"]) == (403, "model_not_allowed")
    async with AsyncOpenAI(base_url=f"http://{made.router.http_address}/v1", api_key=KEY, max_retries=0) as peer:
        assert [listed.id async for listed in peer.models.list()] == [MODEL]


async def test_tokenizing_takes_its_part_of_a_tenants_requests(made: House) -> None:
    """Ten of them count as one request, of three in a minute."""
    headers = {"authorization": f"Bearer {KEY}"}
    async with httpx.AsyncClient(base_url=f"http://{made.router.http_address}", headers=headers) as http:
        asked = (("/tokenize", {"prompt": "the cat"}), ("/detokenize", {"tokens": [1, 2]}))
        for number in range(30):
            path, body = asked[number % 2]
            assert (await http.post(path, json=body)).status_code == 200
        for path, body in asked:
            answer = await http.post(path, json=body)
            assert (answer.status_code, answer.json()["error"]["code"]) == (429, "tenant_requests")
            assert 0 < int(answer.headers["retry-after"]) <= 20
        completion = await http.post("/v1/completions", json={"model": MODEL, "prompt": "the cat", "max_tokens": 2})
        assert completion.status_code == 429


async def test_a_client_that_goes_away_counts_no_longer(made: House) -> None:
    async with AsyncClient(made.router.address, api_key=KEY) as client:
        for _ in range(2):
            params = SamplingParams(max_tokens=100, ignore_eos=True)
            async with aclosing(client.generate("the cat", sampling=params)) as events:
                await anext(events)
        await made.router.orchestrator.idle()
        assert made.router.quotas.told()["acme"].running == 0
        # 200 tokens were spoken for, of 400; nearly all have come back.
        await client.complete("the cat", sampling=SamplingParams(max_tokens=300))


async def test_prompts_that_cannot_all_be_taken_are_charged_nothing_and_told_where_waiting_is_no_use(
    made: House,
) -> None:
    headers = {"Authorization": f"Bearer {KEY}"}
    async with httpx.AsyncClient(base_url=f"http://{made.router.http_address}/v1", headers=headers) as http:
        for count, tokens, code in ((4, 2, "requests"), (3, 2, "concurrent"), (2, 250, "tokens")):
            body = {"model": MODEL, "prompt": ["the cat"] * count, "max_tokens": tokens}
            answer = await http.post("/completions", json=body)
            assert (answer.status_code, answer.json()["error"]["code"]) == (429, f"tenant_{code}"), answer.text
            assert "retry-after" not in answer.headers
        steps = [worker.record().load.steps for worker in made.workers]
        assert not made.router.quotas.told()
        body |= {"max_tokens": 2}
        assert (await http.post("/completions", json=body)).status_code == 200
        refused = await http.post("/completions", json=body)
        assert refused.status_code == 429 and int(refused.headers["retry-after"]) <= 20
        assert made.router.quotas.told()["acme"].requests == 2
        assert [worker.record().load.steps for worker in made.workers] != steps
