"""What a record says was converted, over all attempts that the client has tokens of."""

from __future__ import annotations

from dataclasses import replace

from cache_transfer.contract import WorkerContract
from pdserve.errors import FieldDifference
from pdserve.registry.records import DECODE, PREFILL
from router.gate import Gate, Pair
from router.record import _converted
from router.trial import Trial
from tests.router.support import contract, member

C = replace(contract(), allow_lossy=True)


def trial(decode: WorkerContract, output_tokens: int) -> Trial:
    members = [member("p", PREFILL, C), member("d", DECODE, decode)]
    (match,) = Gate(allow_lossy=True).judge(members).matches
    (pair,) = match.pairs()
    assert isinstance(pair, Pair)
    return Trial(pair, 0, output_tokens=output_tokens)


def codes(found: tuple[FieldDifference, ...]) -> list[str]:
    return [difference.code for difference in found]


def test_loss_in_the_first_half_of_a_resumed_answer_is_reported() -> None:
    lossy, exact = replace(C, kv_dtype="bf16"), C
    assert codes(_converted([trial(lossy, 3), trial(exact, 4)])) == ["KV_DTYPE"]
    assert codes(_converted([trial(exact, 3), trial(lossy, 4)])) == ["KV_DTYPE"]


def test_an_attempt_without_tokens_converted_nothing_that_counts() -> None:
    lossy, paged = replace(C, kv_dtype="bf16"), replace(C, page_size=7)
    assert codes(_converted([trial(lossy, 0), trial(paged, 4)])) == ["PAGE_SIZE"]
    assert codes(_converted([trial(lossy, 0)])) == ["KV_DTYPE"]
    assert _converted([]) == ()
