"""Bounds of a caller's options, and what an error shows of a value that is out of them."""

from __future__ import annotations

from typing import Any

import pytest

from pdserve.errors import MAX_SHOWN, InvalidRequest, shown
from pdserve.request import MAX_TOKEN_ENTRIES, SamplingParams


@pytest.mark.parametrize("name", ["logit_bias", "stop_token_ids"])
def test_the_number_of_token_entries_is_bounded(name: str) -> None:
    def given(count: int) -> SamplingParams:
        ids = range(count)
        changes: dict[str, Any] = {name: dict.fromkeys(ids, 1.0) if name == "logit_bias" else tuple(ids)}
        return SamplingParams(**changes)

    given(MAX_TOKEN_ENTRIES).check(MAX_TOKEN_ENTRIES)
    with pytest.raises(InvalidRequest, match="at most 1024 entries") as caught:
        given(MAX_TOKEN_ENTRIES + 1).check()
    assert caught.value.field == name


@pytest.mark.parametrize(
    "value", ["y" * 10**6, b"y" * 10**6, 10**5000, -(10**5000), 10**130, ["y" * 50] * 50], ids=type
)
def test_long_values_are_not_echoed(value: object) -> None:
    assert 10 < len(shown(value)) <= MAX_SHOWN + 3


@pytest.mark.parametrize("value", ["it's", 2**64, 1.5, None, float("nan")])
def test_short_values_are_shown_whole(value: object) -> None:
    assert shown(value) == repr(value)


def test_errors_of_huge_numbers_are_short() -> None:
    for changes in ({"seed": 10**4000}, {"min_tokens": 10**4001, "max_tokens": 10**4000}, {"temperature": 10**400}):
        with pytest.raises(InvalidRequest) as caught:
            SamplingParams(**changes).check()  # type: ignore[arg-type]
        assert len(str(caught.value)) < 4 * MAX_SHOWN
