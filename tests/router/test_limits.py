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
from router.placement import Room
from router.settings import RouterSettings
from tests.engine.tiny import prompt
from tests.router.support import VOCAB, house

ROOM = Room(prompt=255, total=256)


@pytest.mark.parametrize(
    ("given", "prompt_tokens", "max_tokens", "least_tokens"),
    [
        ({}, 56, 100, 1),  # the default
        ({}, 200, 56, 1),  # what the room leaves
        ({"min_tokens": 120}, 56, 120, 120),  # a minimum above the default
        ({"max_tokens": 150}, 56, 150, 150),  # named: above the default, and never cut
        ({"max_tokens": 200}, 56, 200, 200),
        ({"max_tokens": 201, "min_tokens": 3}, 56, 200, 3),  # more than anybody has
    ],
)
def test_the_output_limit(given: dict[str, Any], prompt_tokens: int, max_tokens: int, least_tokens: int) -> None:
    sampling, least = complete(SamplingParams(**given), prompt_tokens, ROOM, default_max_tokens=100)
    assert (sampling.max_tokens, least) == (max_tokens, least_tokens)


def test_a_minimum_beyond_the_room_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="at most 200"):
        complete(SamplingParams(min_tokens=201), 56, ROOM, default_max_tokens=100)


async def test_both_doors_have_the_same_default() -> None:
    async with house(default_max_tokens=7) as made, AsyncClient(made.router.address) as client:
        ids = prompt(20, seed=1, vocab=VOCAB)
        assert len((await client.complete(token_ids=ids, ignore_eos=True)).ids) == 7
        assert len((await client.complete(token_ids=ids, ignore_eos=True, max_tokens=9)).ids) == 9
        body = {"model": "tiny", "messages": [{"role": "user", "content": "the cat"}], "ignore_eos": True}
        async with httpx.AsyncClient(base_url=f"http://{made.router.http_address}") as http:
            answer = (await http.post("/v1/chat/completions", json=body)).json()
        assert answer["usage"]["completion_tokens"] == 7, answer


def test_a_stuck_client_is_noticed_before_decode_gives_up_its_reader() -> None:
    assert RouterSettings().client_stall_s < DecodeSettings().reader_s


@pytest.mark.parametrize("changes", [{"first_token_timeout_s": 0.0}, {"default_max_tokens": 0}])
def test_settings_are_checked_by_name(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        RouterSettings(**changes).check()
    assert caught.value.field == f"router.{next(iter(changes))}"
