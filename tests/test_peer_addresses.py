"""Who connects to whom is never a client's to say: nothing that it can send has a place for it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from google.protobuf.descriptor import Descriptor, ServiceDescriptor

from pdserve.errors import InvalidRequest
from pdserve.rpc.tls import CLIENT, MAY_CALL
from pdserve.v1 import decode_pb2, gateway_pb2, prefill_pb2, transfer_pb2
from router.openai_json import parse
from router.openai_schema import ChatCompletionBody, CompletionBody

SERVICES: list[ServiceDescriptor] = [
    service
    for module in (gateway_pb2, prefill_pb2, decode_pb2, transfer_pb2)
    for service in module.DESCRIPTOR.services_by_name.values()
]
TELLING = re.compile(
    r"address|endpoint|host|\bport\b|url|peer|ticket|grant|worker|incarnation|boot|tenant", re.IGNORECASE
)


def fields(message: Descriptor, path: str = "", seen: frozenset[str] = frozenset()) -> Iterator[str]:
    """The path of every field in a message, of those inside it, too, and the types of the latter."""
    if message.full_name in seen:
        return
    for field in message.fields:
        here = f"{path}.{field.name}"
        yield here
        if field.message_type is not None:
            yield f"{here} {field.message_type.name}"
            yield from fields(field.message_type, here, seen | {message.full_name})


def asked_by_clients() -> list[str]:
    return [
        f"{method.name}{field}"
        for service in SERVICES
        if CLIENT in MAY_CALL[service.full_name]
        for method in service.methods
        for field in fields(method.input_type)
    ]


def test_no_message_of_a_client_has_a_place_for_an_address() -> None:
    found = asked_by_clients()
    assert any(field.startswith("Generate.") for field in found)
    assert [field for field in found if TELLING.search(field)] == []


def test_the_search_finds_what_routers_and_workers_tell_each_other() -> None:
    run = prefill_pb2.DESCRIPTOR.services_by_name["Prefill"].methods_by_name["Run"].input_type
    assert any("Endpoint" in field and TELLING.search(field) for field in fields(run))


def test_no_http_body_has_one_either() -> None:
    prompts: dict[Any, dict[str, Any]] = {ChatCompletionBody: {"messages": []}, CompletionBody: {"prompt": "a"}}
    for body, prompt in prompts.items():
        assert [name for name in body.model_fields if TELLING.search(name)] == []
        parse(json.dumps({"model": "m", **prompt}).encode(), body)
        for name in ("endpoint", "transfer_address", "kv_transfer_params", "tenant"):
            with pytest.raises(InvalidRequest) as caught:
                parse(json.dumps({"model": "m", **prompt, name: "10.0.0.1:8481"}).encode(), body)
            assert caught.value.field == name
