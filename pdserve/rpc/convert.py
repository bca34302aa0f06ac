"""Sampling options and stream events <-> protobuf: the one place where the two meet.

Readers take what is on the wire as it is (NaN included) and leave judging to the owner of
the type, such as SamplingParams.check().
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from pdserve.errors import InvalidRequest
from pdserve.request import Grammar, SamplingParams
from pdserve.rpc.events import (
    Accepted,
    AttemptRecord,
    Finish,
    GroupPair,
    HandoffRecord,
    PositionLogprobs,
    TokenBatch,
    TokenLogprob,
    ToolCallPart,
    Usage,
)
from pdserve.rpc.status import difference_from_proto, difference_to_proto
from pdserve.v1 import common_pb2, gateway_pb2

_OPTIONAL = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "max_tokens",
    "min_tokens",
    "ignore_eos",
    "logprobs",
    "skip_special_tokens",
)
_RECORD_LISTS = ("conversions", "notes", "candidates", "rejected", "history")
_RECORD_SCALARS = tuple(
    field.name for field in common_pb2.HandoffRecord.DESCRIPTOR.fields if field.name not in _RECORD_LISTS
)
_ATTEMPT_FIELDS = tuple(field.name for field in common_pb2.AttemptRecord.DESCRIPTOR.fields)


def sampling_from_proto(options: common_pb2.SamplingOptions) -> SamplingParams:
    """Absent fields get SamplingParams' defaults; nothing is checked. top_k -1 is read as 0: keep all."""
    given: dict[str, Any] = {name: getattr(options, name) for name in _OPTIONAL if options.HasField(name)}
    if given.get("top_k") == -1:
        given["top_k"] = 0
    return SamplingParams(
        logit_bias=dict(options.logit_bias),
        stop=tuple(options.stop),
        stop_token_ids=tuple(options.stop_token_ids),
        grammar=None if (kind := options.WhichOneof("grammar")) is None else Grammar(kind, getattr(options, kind)),
        **given,
    )


def sampling_to_proto(params: SamplingParams) -> common_pb2.SamplingOptions:
    """Sets every field that is not None. Raises InvalidRequest naming one whose value the field cannot carry."""
    options = common_pb2.SamplingOptions()
    for name in _OPTIONAL:
        if getattr(params, name) is not None:
            _fill(name, params, partial(setattr, options, name))
    _fill("logit_bias", params, options.logit_bias.update)
    _fill("stop", params, options.stop.extend)
    _fill("stop_token_ids", params, options.stop_token_ids.extend)
    if params.grammar is not None:
        params.grammar.check()  # a kind that is none has no field
        _fill("grammar", params, lambda grammar: setattr(options, grammar.kind, grammar.text))
    return options


def _fill(name: str, params: SamplingParams, put: Callable[[Any], None]) -> None:
    value = getattr(params, name)
    try:
        put(value)
    except (TypeError, ValueError) as error:
        raise InvalidRequest(
            f"{value!r} is not allowed",
            reason=f"INVALID_{name.upper()}",
            field=name,
            remedy="use the type and range that the option documents",
        ) from error


def tokens_to_proto(batch: TokenBatch) -> common_pb2.TokenBatch:
    return common_pb2.TokenBatch(
        first_index=batch.first_index,
        ids=batch.ids,
        text=batch.text,
        logprobs=[
            common_pb2.PositionLogprobs(chosen=_logprob_to_proto(p.chosen), top=[_logprob_to_proto(t) for t in p.top])
            for p in batch.logprobs
        ],
        choice=batch.choice,
    )


def tokens_from_proto(message: common_pb2.TokenBatch) -> TokenBatch:
    return TokenBatch(
        first_index=message.first_index,
        ids=tuple(message.ids),
        text=message.text,
        logprobs=tuple(
            PositionLogprobs(_logprob_from_proto(p.chosen), tuple(_logprob_from_proto(t) for t in p.top))
            for p in message.logprobs
        ),
        choice=message.choice,
    )


def usage_to_proto(usage: Usage) -> common_pb2.Usage:
    return common_pb2.Usage(
        prompt_tokens=usage.prompt_tokens,
        output_tokens=usage.output_tokens,
        cached_prompt_tokens=usage.cached_prompt_tokens,
    )


def usage_from_proto(message: common_pb2.Usage) -> Usage:
    return Usage(message.prompt_tokens, message.output_tokens, message.cached_prompt_tokens)


def finish_to_proto(finish: Finish) -> common_pb2.Finish:
    return common_pb2.Finish(
        reason=finish.reason,
        stop_string=finish.stop_string,
        stop_token_id=finish.stop_token_id,
        usage=usage_to_proto(finish.usage),
        choice=finish.choice,
        shared_pages=finish.shared_pages,
        copied_pages=finish.copied_pages,
    )


def finish_from_proto(message: common_pb2.Finish) -> Finish:
    return Finish(
        reason=message.reason,
        usage=usage_from_proto(message.usage),
        stop_string=message.stop_string if message.HasField("stop_string") else None,
        stop_token_id=message.stop_token_id if message.HasField("stop_token_id") else None,
        choice=message.choice,
        shared_pages=message.shared_pages,
        copied_pages=message.copied_pages,
    )


def accepted_to_proto(accepted: Accepted) -> gateway_pb2.Accepted:
    return gateway_pb2.Accepted(
        request_id=accepted.request_id,
        model=accepted.model,
        prompt_tokens=accepted.prompt_tokens,
        seed=accepted.seed,
        prompt=accepted.prompt,
        read_fields=accepted.read_fields,
    )


def accepted_from_proto(message: gateway_pb2.Accepted) -> Accepted:
    read = tuple(message.read_fields)
    return Accepted(message.request_id, message.model, message.prompt_tokens, message.seed, message.prompt, read)


def call_to_proto(part: ToolCallPart) -> gateway_pb2.ToolCallPart:
    return gateway_pb2.ToolCallPart(index=part.index, id=part.id, name=part.name, arguments=part.arguments)


def call_from_proto(message: gateway_pb2.ToolCallPart) -> ToolCallPart:
    return ToolCallPart(message.index, message.arguments, message.id, message.name)


def record_to_proto(record: HandoffRecord) -> common_pb2.HandoffRecord:
    return common_pb2.HandoffRecord(
        conversions=[difference_to_proto(d) for d in record.conversions],
        notes=record.notes,
        candidates=[_group_to_proto(group) for group in record.candidates],
        rejected=[_group_to_proto(group) for group in record.rejected],
        history=[attempt_to_proto(attempt) for attempt in record.history],
        **{name: getattr(record, name) for name in _RECORD_SCALARS},
    )


def record_from_proto(message: common_pb2.HandoffRecord) -> HandoffRecord:
    return HandoffRecord(
        conversions=tuple(difference_from_proto(d) for d in message.conversions),
        notes=tuple(message.notes),
        candidates=tuple(_group_from_proto(group) for group in message.candidates),
        rejected=tuple(_group_from_proto(group) for group in message.rejected),
        history=tuple(attempt_from_proto(attempt) for attempt in message.history),
        **{name: getattr(message, name) for name in _RECORD_SCALARS},
    )


def attempt_to_proto(attempt: AttemptRecord) -> common_pb2.AttemptRecord:
    return common_pb2.AttemptRecord(**{name: getattr(attempt, name) for name in _ATTEMPT_FIELDS})


def attempt_from_proto(message: common_pb2.AttemptRecord) -> AttemptRecord:
    return AttemptRecord(**{name: getattr(message, name) for name in _ATTEMPT_FIELDS})


def _group_to_proto(group: GroupPair) -> common_pb2.GroupPair:
    return common_pb2.GroupPair(
        prefill_workers=group.prefill_workers,
        decode_workers=group.decode_workers,
        prefill_count=group.prefill_count,
        decode_count=group.decode_count,
        differences=[difference_to_proto(d) for d in group.differences],
    )


def _group_from_proto(message: common_pb2.GroupPair) -> GroupPair:
    return GroupPair(
        prefill_workers=tuple(message.prefill_workers),
        decode_workers=tuple(message.decode_workers),
        prefill_count=message.prefill_count,
        decode_count=message.decode_count,
        differences=tuple(difference_from_proto(d) for d in message.differences),
    )


def _logprob_to_proto(value: TokenLogprob) -> common_pb2.TokenLogprob:
    return common_pb2.TokenLogprob(id=value.id, logprob=value.logprob, rank=value.rank)


def _logprob_from_proto(message: common_pb2.TokenLogprob) -> TokenLogprob:
    return TokenLogprob(message.id, message.logprob, message.rank)
