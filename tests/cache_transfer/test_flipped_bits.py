"""Single bits of a whole stream, turned over: refused with a type and a reason, and nothing verified.

A small stream: two layers, K and V, two heads, three tokens that travel in two frames per plane. Every
bit of opening, first frame, logits and commit is tried, and every third of the frames that are like it.
Streams over real sockets and threads are in the other files.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator

import pytest

from cache_transfer.contract import CONVERTIBLE, INFORMATIONAL, diff
from cache_transfer.messages import PushOpening
from cache_transfer.push import decode_request
from pdserve.errors import DataLoss, PdserveError
from pdserve.v1 import transfer_pb2 as pb
from tests.fuzz import targets
from tests.fuzz.handoff import CONTRACT, IDENTITY
from tests.fuzz.seeds import stream
from tests.fuzz.targets import outcome

REQUESTS = stream()
MESSAGES = [request.SerializeToString() for request in REQUESTS]
FRAMES = range(1, len(MESSAGES) - 2)
LOGITS, COMMIT = len(MESSAGES) - 2, len(MESSAGES) - 1


@pytest.fixture(autouse=True, scope="module")
def quiet() -> Iterator[None]:
    """Thousands of refusals are each logged; what the log says is tested elsewhere."""
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)
    targets.close()


def with_bit_flipped(index: int, bit: int) -> list[bytes]:
    data = bytearray(MESSAGES[index])
    data[bit // 8] ^= 1 << bit % 8
    return [*MESSAGES[:index], bytes(data), *MESSAGES[index + 1 :]]


def changed(index: int, message: pb.PushRequest) -> list[bytes]:
    return [*MESSAGES[:index], message.SerializeToString(), *MESSAGES[index + 1 :]]


def check_typed(error: PdserveError | None) -> PdserveError:
    assert error is not None, "it was verified"
    assert type(error) is not PdserveError and error.reason not in ("", "INTERNAL") and error.field
    return error


def test_the_stream_itself_is_taken() -> None:
    assert outcome(MESSAGES) is None


@pytest.mark.parametrize("index", [*FRAMES, LOGITS, COMMIT])
def test_no_bit_after_the_opening_can_change(index: int) -> None:
    step = 3 if index in FRAMES[1:] else 1
    for bit in range(index % step, 8 * len(MESSAGES[index]), step):
        check_typed(outcome(with_bit_flipped(index, bit)))


def test_a_bit_of_the_opening_changes_nothing_that_matters_to_a_cache() -> None:
    """Page size, device or a library's name may differ: frames know no pages. All else is refused."""
    taken = 0
    for bit in range(8 * len(MESSAGES[0])):
        messages = with_bit_flipped(0, bit)
        error = outcome(messages)
        if error is not None:
            check_typed(error)
            continue
        taken += 1
        opening = decode_request(messages[0])
        assert isinstance(opening, PushOpening)
        assert opening.identity == IDENTITY and opening.kv_dtype == CONTRACT.kv_dtype
        assert {d.kind for d in diff(opening.contract, CONTRACT)} <= {CONVERTIBLE, INFORMATIONAL}
    assert 0 < taken < 8 * len(MESSAGES[0]) / 10


@pytest.mark.parametrize("index", [FRAMES[0], FRAMES[len(FRAMES) // 2], FRAMES[-1]], ids=["first", "middle", "last"])
def test_a_bit_of_header_payload_or_digest_is_data_loss(index: int) -> None:
    """With the frame well-formed around it: every bit of the header, also where it would still make sense."""
    for part, step in (("payload", 7), ("digest", 7), ("header", 1)):
        whole = getattr(REQUESTS[index].frame, part)
        for bit in range(0, 8 * len(whole), step):
            data = bytearray(whole)
            data[bit // 8] ^= 1 << bit % 8
            request = pb.PushRequest.FromString(MESSAGES[index])
            setattr(request.frame, part, bytes(data))
            error = check_typed(outcome(changed(index, request)))
            assert type(error) is DataLoss and error.retryable
            assert error.reason in ({"FRAME_DIGEST", "FRAME_SEQUENCE", "FRAME_GAP", "FRAME_OVERLAP"}
                                    if part == "header" else {"FRAME_DIGEST"})  # fmt: skip


@pytest.mark.parametrize("pair", list(itertools.combinations(FRAMES, 2)), ids=str)
def test_two_frames_cannot_change_places(pair: tuple[int, int]) -> None:
    left, right = pair
    messages = list(MESSAGES)
    messages[left], messages[right] = messages[right], messages[left]
    assert check_typed(outcome(messages)).reason == "FRAME_SEQUENCE"
    for part in ("payload", "digest", "header"):
        frames = [pb.PushRequest.FromString(MESSAGES[at]) for at in pair]
        a, b = (getattr(request.frame, part) for request in frames)
        setattr(frames[0].frame, part, b)
        setattr(frames[1].frame, part, a)
        messages = list(MESSAGES)
        messages[left], messages[right] = (request.SerializeToString() for request in frames)
        error = check_typed(outcome(messages))
        if part == "header":
            assert error.reason == "FRAME_SEQUENCE"
        else:
            assert error.reason == "FRAME_DIGEST"


@pytest.mark.parametrize("index", range(len(MESSAGES)))
def test_no_message_can_be_missing_doubled_or_cut_short(index: int) -> None:
    check_typed(outcome([*MESSAGES[:index], *MESSAGES[index + 1 :]]))
    for cut in range(len(MESSAGES[index])):
        check_typed(outcome([*MESSAGES[:index], MESSAGES[index][:cut], *MESSAGES[index + 1 :]]))
    if index != COMMIT:  # after the commit nothing is read any more
        check_typed(outcome([*MESSAGES[: index + 1], *MESSAGES[index:]]))


@pytest.mark.parametrize("name", ["frames", "payload_bytes", "start", "end"])
@pytest.mark.parametrize("step", [-1, 1])
def test_a_commit_that_counts_wrong_is_data_loss(name: str, step: int) -> None:
    request = pb.PushRequest.FromString(MESSAGES[COMMIT])
    setattr(request.commit, name, getattr(request.commit, name) + step)
    error = check_typed(outcome(changed(COMMIT, request)))
    assert (type(error), error.reason) == (DataLoss, "MANIFEST")


def test_logits_of_another_place_type_or_value_are_refused() -> None:
    for name, value in (("position", 1), ("dtype", "float64"), ("data", REQUESTS[LOGITS].logits.data[::-1])):
        request = pb.PushRequest.FromString(MESSAGES[LOGITS])
        setattr(request.logits, name, value)
        error = check_typed(outcome(changed(LOGITS, request)))
        assert (type(error), error.reason) == (DataLoss, "LOGITS_DIGEST")
