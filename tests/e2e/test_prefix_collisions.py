"""A digest finds a prefix, a comparison decides: what happens when digests are equal and prompts are not."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest

from pdserve.client import AsyncClient, Completion
from pdserve.engine import blocks, prefix
from router.tenants import Tenant
from tests.e2e.prefixes import GREEDY, expected, found
from tests.e2e.stack import Stack, pair
from tests.engine.tiny import prompt

pytestmark = pytest.mark.asyncio(loop_scope="module")
SAME = bytes(32)
# Ways in which two links can share a digest, each a fault of its own.
COLLISIONS: dict[str, tuple[str, Any]] = {
    "all pages": ("_chain", lambda parent, content: SAME),
    "other ids": ("_chain", lambda parent, content: hashlib.sha256(parent).digest()),
    "other parent": ("_chain", lambda parent, content: hashlib.sha256(content).digest()),
    "other identity": ("_root", lambda identity: SAME),
}


async def confuse(made: Stack) -> list[tuple[tuple[int, ...], Completion]]:
    """Prompts that collide under one or another of these: equal pages in other places, other pages in equal places."""
    a, b, c, d = (prompt(4, seed=seed) for seed in range(4))
    end = (5,)
    asked = [(*a, *b, *end), (*c, *d, *end), (*c, *b, *end), (*a, *d, *end), (*b, *a, *end)]
    return [(ids, await made.ask(ids, GREEDY)) for ids in asked]


@pytest.mark.parametrize("kind", COLLISIONS)
async def test_equal_digests_are_not_enough(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix, *COLLISIONS[kind])
    async with pair() as made:
        for ids, got in await confuse(made):
            assert got.ids == expected(ids).ids
            assert made.first_logits(got) == expected(ids).first_logits
            at_prefill, at_decode = found(got)
            assert max(at_prefill, at_decode) <= 4  # at most the first page, which is truly the same


KEYS = {name: f"sk-{name}-0123456789abcdef" for name in ("acme", "zeta")}


async def ask_as(made: Stack, tenant: str, ids: tuple[int, ...]) -> Completion:
    async with AsyncClient(made.router.address, api_key=KEYS[tenant]) as client:
        return await client.complete(token_ids=ids, sampling=GREEDY, want_record=True)


@pytest.mark.parametrize("kind", ["all pages", "other identity"])
@pytest.mark.parametrize("compared", [True, False])
async def test_equal_digests_do_not_join_tenants(kind: str, compared: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same prompt under the same digests; without the comparison the other tenant would be served from it."""
    monkeypatch.setattr(prefix, *COLLISIONS[kind])
    monkeypatch.setattr(prefix, "_root", lambda identity: SAME)
    if not compared:
        monkeypatch.setattr(blocks, "same", lambda found, wanted: True)
    ids = prompt(5, seed=3)
    async with pair(tenants=tuple(Tenant.of(name, key) for name, key in KEYS.items())) as made:
        counts = [found(await ask_as(made, tenant, ids)) for tenant in ("acme", "acme", "zeta")]
        assert counts == [(0, 0), (4, 4), (0, 0) if compared else (4, 4)]


@pytest.mark.parametrize("kind", ["all pages", "other ids", "other parent"])
async def test_without_the_comparison_they_would_answer_wrongly(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plant that shows what the comparison is for."""
    monkeypatch.setattr(prefix, *COLLISIONS[kind])
    monkeypatch.setattr(blocks, "same", lambda found, wanted: True)
    async with pair() as made:
        answers = await confuse(made)
        assert any(made.first_logits(got) != expected(ids).first_logits for ids, got in answers)
