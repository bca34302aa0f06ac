"""LoRA adapters through the whole service: against the peer library, and nothing shared or mixed that must not be."""

from __future__ import annotations

from collections import Counter
from contextlib import aclosing
from typing import Any

import openai
import pytest
import torch
from openai import AsyncOpenAI

from pdserve.client import AsyncClient
from pdserve.client.events import Tokens
from pdserve.errors import InvalidRequest, NotFound, Refused, Unavailable
from pdserve.tokenizer import Tokenizer
from router.tenants import Tenant
from tests.decode_worker.small_bundle import ids_of, small_bundle
from tests.e2e.adapted import Adapted, all_of, ask, greedy, prompt, serving
from tests.e2e.stack import MODEL, read_tokens
from tests.engine.loading import peers


async def test_requests_of_two_adapters_and_of_none_are_answered_together_as_by_the_peers(made: Adapted) -> None:
    """Chunked prefill (16 tokens), handoff over gRPC, decode in one batch."""
    async with serving(made, "red", "blue") as it:
        asked = [(prompt(9 + 7 * n, seed=n), ("red", None, "blue")[n % 3]) for n in range(9)]
        answers = await all_of(*(ask(it, tokens, adapter, 12) for tokens, adapter in asked))
        for (tokens, adapter), answer in zip(asked, answers, strict=True):
            assert answer.ids == made.answer(tokens, adapter, 12), adapter
            first = torch.frombuffer(bytearray(it.first_logits(answer)), dtype=torch.float32)
            torch.testing.assert_close(first, made.logits(tokens, adapter), rtol=0, atol=peers.TOLERANCE)
            assert answer.accepted is not None
            assert answer.accepted.model == (f"{MODEL}:{adapter}" if adapter else MODEL)


async def test_nothing_is_reused_between_adapters_versions_none_and_tenants(made: Adapted) -> None:
    """F38: the key under which a cache is found again, here and through the transfer, has adapter and tenant."""
    keys = {name: f"{name}-0123456789abcdef" for name in ("left", "right")}
    tenants = tuple(Tenant.of(name, key) for name, key in keys.items())
    tokens = prompt(40)
    async with serving(made, "red", "blue", "crimson", tenants=tenants) as it:
        for round_, held in ((1, 0), (2, 36)):  # the last page is never taken whole: its last token is computed
            for tenant, key in keys.items():
                async with AsyncClient(it.router.address, api_key=key) as client:
                    for adapter in ("red", "blue", "crimson", None):
                        answer = await client.complete(
                            token_ids=tokens, sampling=greedy(6), adapter=adapter or "", want_record=True, timeout_s=60
                        )
                        where = (round_, tenant, adapter)
                        assert answer.ids == made.answer(tokens, adapter, 6), where
                        assert answer.record is not None
                        assert answer.record.computed_tokens == 40 - held, where
                        assert answer.record.sent_tokens == 40 - held, where


async def test_an_adapter_that_is_not_served_is_an_error_that_names_it_and_never_base_text(made: Adapted) -> None:
    async with serving(made, "red") as it:
        asked: tuple[dict[str, Any], ...] = (
            {"adapter": "green"},
            {"model": f"{MODEL}:green"},
            {"model": MODEL, "adapter": "green"},
        )
        for options in asked:
            with pytest.raises(NotFound, match="'green'") as refused:
                await it.client.complete(token_ids=prompt(5), sampling=greedy(2), timeout_s=60, **options)
            assert refused.value.reason == "UNKNOWN_ADAPTER"
        with pytest.raises(NotFound, match="green"):
            await it.client.complete(token_ids=prompt(5), sampling=greedy(2), model="green", timeout_s=60)
        with pytest.raises(InvalidRequest, match="red") as clash:
            await it.client.complete(
                token_ids=prompt(5), sampling=greedy(2), model=f"{MODEL}:red", adapter="blue", timeout_s=60
            )
        assert clash.value.reason == "TWO_ADAPTERS"
        (model,) = await it.client.models()
        assert model.adapters == ("red",)


async def test_the_openai_client_chooses_an_adapter_by_the_models_name(made: Adapted) -> None:
    text = "the cat sat on the mat"
    async with serving(made) as it:
        bundle = small_bundle()
        given: dict[str, Any] = {"bundle": bundle, "adapters": {"red": made.path("red"), "blue": made.path("blue")}}
        for worker in it.workers:
            await it.remove(worker)
        await it.add_prefill(made.engine(), **given)
        await it.add_decode(made.engine(), **given)
        url = f"http://{it.router.http_address}/v1"
        async with AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=20) as client:
            listed = {model.id: model async for model in client.models.list()}
            assert list(listed) == [MODEL, f"{MODEL}:blue", f"{MODEL}:red"]
            assert (listed[f"{MODEL}:red"].model_extra or {})["parent"] == MODEL
            assert (await client.models.retrieve("red")).id == f"{MODEL}:red"
            for name, adapter in ((f"{MODEL}:red", "red"), ("blue", "blue"), (MODEL, None)):
                answer = await client.completions.create(
                    model=name, prompt=text, max_tokens=8, temperature=0, extra_body={"ignore_eos": True}
                )
                expected = Tokenizer(bundle).decode(made.answer(ids_of(text), adapter, 8))
                assert answer.choices[0].text == expected
                assert answer.model == (f"{MODEL}:{adapter}" if adapter else MODEL)
            with pytest.raises(openai.NotFoundError) as refused:
                await client.completions.create(model=f"{MODEL}:green", prompt=text, max_tokens=8)
            assert "green" in refused.value.message
            with pytest.raises(openai.NotFoundError):
                await client.models.retrieve(f"{MODEL}:green")


async def test_adapters_come_and_go_while_workers_serve(made: Adapted) -> None:
    tokens = prompt(30)
    async with serving(made) as it:
        with pytest.raises(NotFound, match="red"):
            await ask(it, tokens, "red", 4)
        loaded = await it.client.load_adapter("red", "red", model=MODEL)
        assert [(worker.worker_id, worker.error) for worker in loaded] == [("d0", None), ("p0", None)]
        assert {adapter.digest for worker in loaded for adapter in worker.adapters} == {made.digest("red")}
        assert (await ask(it, tokens, "red", 4)).ids == made.answer(tokens, "red", 4)
        again = await it.client.load_adapter("red", made.path("red"))
        assert [worker.adapters for worker in again] == [worker.adapters for worker in loaded]
        for worker in await it.client.adapters():
            assert [(adapter.name, adapter.users, adapter.rank) for adapter in worker.adapters] == [("red", 0, 4)]
        gone = await it.client.unload_adapter("red", wait_s=5.0)
        assert [(worker.adapters, worker.error) for worker in gone] == [((), None), ((), None)]
        with pytest.raises(NotFound, match="red"):
            await ask(it, tokens, "red", 4)
        assert (await ask(it, tokens, None, 4)).ids == made.answer(tokens, None, 4)
        assert [len(each.engine.adapters) for each in it.workers] == [0, 0]


async def test_unloading_under_traffic_waits_for_those_who_use_it_or_fails(made: Adapted) -> None:
    """F44: whoever began with the adapter ends with it, and whoever comes later gets an error."""
    tokens, count = prompt(20), 60
    async with serving(made, "red") as it:
        options: dict[str, Any] = {"token_ids": tokens, "sampling": greedy(count), "adapter": "red", "timeout_s": 60.0}
        async with aclosing(it.client.generate(**options)) as events:
            begun = await read_tokens(events, 1)
            with_user = await it.client.unload_adapter("red", wait_s=0.0)
            (refusal,) = [worker.error for worker in with_user if worker.role == "decode"]
            assert isinstance(refusal, Refused)
            assert refusal.reason == "ADAPTER_IN_USE"
            assert (await ask(it, prompt(12), "red", 3)).ids == made.answer(prompt(12), "red", 3)
            rest = [token async for event in events if isinstance(event, Tokens) for token in event.ids]
        assert (*begun, *rest) == made.answer(tokens, "red", count)
        async with aclosing(it.client.generate(**options)) as events:
            begun = await read_tokens(events, 1)

            async def read() -> tuple[int, ...]:
                return tuple([token async for event in events if isinstance(event, Tokens) for token in event.ids])

            async def refused_meanwhile() -> None:
                await it.until(lambda: not any(m.record.adapters for m in it.router.pool.members() if m.id == "d0"))
                with pytest.raises(Unavailable, match="red") as refused:
                    await ask(it, prompt(12), "red", 3)
                assert refused.value.reason == "NO_ADAPTER_PAIR"

            gone, _, rest = await all_of(it.client.unload_adapter("red", wait_s=30.0), refused_meanwhile(), read())
        assert [(worker.adapters, worker.error) for worker in gone] == [((), None), ((), None)]
        assert (*begun, *rest) == made.answer(tokens, "red", count)


async def test_replacing_under_traffic_never_mixes_two_versions(made: Adapted) -> None:
    tokens, count = [prompt(18, seed=n) for n in range(4)], 10
    async with serving(made, "red", pairs=2) as it:
        seen: Counter[str] = Counter()  # answers by each version
        replaced = 0

        async def traffic(number: int) -> None:
            while replaced < 4:
                answer = await ask(it, tokens[number], "red", count)
                versions = [v for v in ("red", "crimson") if made.answer(tokens[number], v, count) == answer.ids]
                assert len(versions) == 1, "an answer of neither version, so of both or of none"
                seen[versions[0]] += 1

        async def some_more(version: str) -> None:
            wanted = seen[version] + 3
            await it.until(lambda: seen[version] >= wanted)

        async def replace() -> None:
            nonlocal replaced
            for version in ("crimson", "red", "crimson", "red"):
                loaded = await it.client.load_adapter("red", version)
                assert not [worker.error for worker in loaded if worker.error]
                now = await ask(it, tokens[0], "red", count)
                assert now.ids == made.answer(tokens[0], version, count), "asked after the replacement"
                await some_more(version)
                replaced += 1

        await all_of(replace(), *(traffic(number) for number in range(4)))
        assert min(seen.values()) >= 3
