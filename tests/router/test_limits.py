"""How many tokens a request may have when it does not say, and limits that must fit those of others."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from decode_worker.settings import DecodeSettings
from pdserve.client import AsyncClient
from pdserve.errors import ConfigError, InvalidRequest
from pdserve.request import SamplingParams
from router.intake import complete
from router.room import Room
from router.settings import RouterSettings
from tests.engine.tiny import prompt
from tests.router.support import VOCAB, house

ROOM = Room(prompt=255, total=256)


@pytest.mark.parametrize(
    ("given", "prompt_tokens", "max_tokens", "least_tokens"),
    [
        ({}, 56, 200, 1),  # unnamed: what the room leaves
        ({}, 200, 56, 1),
        ({"min_tokens": 120}, 56, 200, 120),
        ({"max_tokens": 150}, 56, 150, 150),  # named: never cut
        ({"max_tokens": 200}, 56, 200, 200),
        ({"max_tokens": 201, "min_tokens": 3}, 56, 200, 3),  # more than anybody has
    ],
)
def test_the_output_limit(given: dict[str, Any], prompt_tokens: int, max_tokens: int, least_tokens: int) -> None:
    sampling, least = complete(SamplingParams(**given), prompt_tokens, ROOM)
    assert (sampling.max_tokens, least) == (max_tokens, least_tokens)


def test_a_minimum_beyond_the_room_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="at most 200"):
        complete(SamplingParams(min_tokens=201), 56, ROOM)


async def test_at_both_doors_an_answer_without_a_limit_gets_what_the_room_leaves() -> None:
    async with house() as made, AsyncClient(made.router.address) as client:
        [decode] = made.decodes
        total = min(decode.contract.context_limit, decode.blocks.pages * decode.blocks.page_size + 1)
        ids = prompt(total - 30, seed=1, vocab=VOCAB)
        assert len((await client.complete(token_ids=ids, ignore_eos=True)).ids) == 30
        assert len((await client.complete(token_ids=ids, ignore_eos=True, max_tokens=9)).ids) == 9
        for named, notes in ((31, ("max_tokens cut from 31 to 30, the most that any pair has room for",)), (30, ())):
            answer = await client.complete(token_ids=ids, ignore_eos=True, max_tokens=named, want_record=True)
            assert answer.record is not None and (len(answer.ids), answer.record.notes) == (30, notes)
        body = {"model": "tiny", "messages": [{"role": "user", "content": "the cat"}], "ignore_eos": True}
        async with httpx.AsyncClient(base_url=f"http://{made.router.http_address}") as http:
            told = (await http.post("/v1/chat/completions", json=body)).json()
        assert told["usage"]["total_tokens"] == total, told


def test_a_stuck_client_is_noticed_before_decode_gives_up_its_reader() -> None:
    assert RouterSettings().client_stall_s < DecodeSettings().reader_s


@pytest.mark.parametrize("changes", [{"first_token_timeout_s": 0.0}, {"backlog_tokens": 0}])
def test_settings_are_checked_by_name(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        RouterSettings(**changes).check()
    assert caught.value.field == f"router.{next(iter(changes))}"
