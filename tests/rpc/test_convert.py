"""Every field of every event survives the wire."""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Any

import pytest

from pdserve.errors import FieldDifference, InvalidRequest
from pdserve.request import Grammar, SamplingParams
from pdserve.rpc import convert
from pdserve.rpc.events import (
    Accepted,
    AttemptRecord,
    Finish,
    GroupPair,
    HandoffRecord,
    PositionLogprobs,
    TokenBatch,
    TokenLogprob,
    Usage,
)
from pdserve.v1 import common_pb2, gateway_pb2

FULL = SamplingParams(
    temperature=0.5,
    top_k=7,
    top_p=0.25,
    min_p=0.125,
    repetition_penalty=1.5,
    presence_penalty=-0.5,
    frequency_penalty=0.75,
    logit_bias={3: -1.5, 9: 2.0},
    seed=2**64 - 1,
    stop=("a", "é"),
    stop_token_ids=(4, 5),
    max_tokens=11,
    min_tokens=2,
    ignore_eos=True,
    logprobs=0,
    grammar=Grammar("regex", "a+"),
    skip_special_tokens=False,
)
PAGE_SIZE = FieldDifference("PAGE_SIZE", "8", "16")
ATTEMPT = AttemptRecord(
    "p", "d", 3, 4, 5.5, 6.5, "LOST", "e", 7, 8, 9.5, 10.5, 11.5, 12.5, 13, 14, 2**41, 15, 16.5, 17.5, 18.5, 19.5,
    "handoff", "cheaper", 20.5, 21.5, 22.5, 23.5, 24,
)  # fmt: skip
RECORD = HandoffRecord(
    "id", "p", "d", 2, 10, 8, 6, 2**40, 12, 1.5, 2.5, 3.5, 4.5, 5.5, (PAGE_SIZE,), ("n",), 9, "stop",
    6.5, 7.5, 8.5, 9.5, 10.5, (GroupPair(("p",), ("d", "e"), 1, 2, (PAGE_SIZE,)),), (GroupPair((), (), 3, 4),),
    (ATTEMPT, AttemptRecord()), 3, 2, 7, 11, 5, "4bf92f3577b34da6a3ce929d0e0e4736",
)  # fmt: skip
CHOSEN = TokenLogprob(5, -0.5, 3)
BATCH = TokenBatch(4, (5, 6), b"\xc3\xa9", (PositionLogprobs(CHOSEN, (TokenLogprob(1, -0.1, 0), CHOSEN)),) * 2, 1)


def over_the_wire(message: Any) -> Any:
    return type(message).FromString(message.SerializeToString())


def test_the_samples_here_leave_no_field_at_its_default() -> None:
    for sample, default in ((FULL, SamplingParams()), (RECORD, HandoffRecord()), (ATTEMPT, AttemptRecord())):
        assert [f.name for f in fields(sample) if getattr(sample, f.name) == getattr(default, f.name)] == []


@pytest.mark.parametrize(
    "params", [FULL, SamplingParams(), SamplingParams(temperature=0.0, seed=0, grammar=Grammar("json_schema", "{}"))]
)
def test_sampling_round_trips(params: SamplingParams) -> None:
    assert convert.sampling_from_proto(over_the_wire(convert.sampling_to_proto(params))) == params


def test_absent_sampling_fields_get_the_defaults() -> None:
    assert convert.sampling_from_proto(common_pb2.SamplingOptions()) == SamplingParams()


def test_explicit_zero_is_not_the_default() -> None:
    assert convert.sampling_from_proto(common_pb2.SamplingOptions(temperature=0.0)).temperature == 0.0


def test_top_k_of_minus_one_keeps_all_and_other_negatives_reach_the_check() -> None:
    assert convert.sampling_from_proto(common_pb2.SamplingOptions(top_k=-1)).top_k == 0
    with pytest.raises(InvalidRequest, match="top_k"):
        convert.sampling_from_proto(common_pb2.SamplingOptions(top_k=-2)).check()


@pytest.mark.parametrize("name", ["temperature", "top_p", "min_p", "presence_penalty"])
def test_nan_passes_both_ways_and_is_refused_by_the_check(name: str) -> None:
    given: dict[str, Any] = {name: math.nan}
    params = SamplingParams(**given)
    read = convert.sampling_from_proto(over_the_wire(convert.sampling_to_proto(params)))
    assert math.isnan(getattr(read, name))
    with pytest.raises(InvalidRequest, match=name):
        read.check()


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"seed": 2**64}, "seed"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"logprobs": -1}, "logprobs"),
        ({"temperature": "hot"}, "temperature"),
        ({"stop": (3,)}, "stop"),
        ({"logit_bias": {2**40: 1.0}}, "logit_bias"),
    ],
)
def test_what_no_field_can_carry_is_refused(given: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        convert.sampling_to_proto(SamplingParams(**given))
    assert caught.value.field == field


def test_token_batches_round_trip() -> None:
    assert convert.tokens_from_proto(over_the_wire(convert.tokens_to_proto(BATCH))) == BATCH


@pytest.mark.parametrize(
    "finish",
    [
        Finish("length", Usage(1, 2, 3), choice=1),
        Finish("stop", Usage(), stop_string="", stop_token_id=0),
        Finish("stop", Usage(), stop_string="end"),
    ],
)
def test_finish_round_trips(finish: Finish) -> None:
    assert convert.finish_from_proto(over_the_wire(convert.finish_to_proto(finish))) == finish


def test_record_and_accepted_round_trip() -> None:
    assert convert.record_from_proto(over_the_wire(convert.record_to_proto(RECORD))) == RECORD
    accepted = Accepted("id", "m", 3, 2**63, 1, ("chat.tool_mode", "n"))
    assert convert.accepted_from_proto(over_the_wire(convert.accepted_to_proto(accepted))) == accepted


@pytest.mark.parametrize(
    ("message", "value"),
    [
        (common_pb2.HandoffRecord, HandoffRecord),
        (common_pb2.AttemptRecord, AttemptRecord),
        (common_pb2.GroupPair, GroupPair),
        (common_pb2.TokenBatch, TokenBatch),
        (common_pb2.Finish, Finish),
        (common_pb2.Usage, Usage),
        (common_pb2.TokenLogprob, TokenLogprob),
        (common_pb2.PositionLogprobs, PositionLogprobs),
        (common_pb2.SamplingOptions, SamplingParams),
        (gateway_pb2.Accepted, Accepted),
    ],
)
def test_dataclasses_and_messages_have_the_same_fields(message: Any, value: Any) -> None:
    choices = {f.name: f.containing_oneof for f in message.DESCRIPTOR.fields}
    # Of a real choice between fields, not the one that protobuf makes of each optional one.
    names = {name if of is None or len(of.fields) == 1 else of.name for name, of in choices.items()}
    assert names == {f.name for f in fields(value)}
