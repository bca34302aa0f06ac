"""Reading records: what every snapshot brings again is read once, and still checked."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cache_transfer.contract import Endpoint
from pdserve.errors import InvalidRequest
from pdserve.registry.records import DECODE
from pdserve.registry.wire import record_from_proto, record_to_proto
from tests.registry.records import CONTRACT, record


def test_a_contract_is_read_once_for_all_who_have_it() -> None:
    first, second = (record_from_proto(record_to_proto(record(name))) for name in ("a", "b"))
    assert first.contract == CONTRACT
    assert second.contract is first.contract


def test_contracts_that_differ_are_not_mistaken_for_each_other() -> None:
    for changed in (replace(CONTRACT, info={"torch": "3"}), replace(CONTRACT, page_size=32)):
        assert record_from_proto(record_to_proto(record(contract=CONTRACT))).contract == CONTRACT
        assert record_from_proto(record_to_proto(record(contract=changed))).contract == changed


def test_a_known_contract_with_a_wrong_digest_or_a_broken_one_is_refused_every_time() -> None:
    record_from_proto(record_to_proto(record()))
    for _ in range(2):
        message = record_to_proto(record())
        message.status.contract_digest = b"x" * 32
        with pytest.raises(InvalidRequest) as caught:
            record_from_proto(message)
        assert caught.value.field == "contract_digest"
        message = record_to_proto(record())
        message.status.contract.page_size = 0
        with pytest.raises(InvalidRequest) as caught:
            record_from_proto(message)
        assert caught.value.field == "contract.page_size"


@pytest.mark.parametrize("address", ["myhost", "myhost:", ":5000", "myhost:0", "myhost:65536", "myhost:http"])
@pytest.mark.parametrize("name", ["endpoints", "transfer"])
def test_an_address_that_no_channel_can_be_made_to_is_refused(name: str, address: str) -> None:
    with pytest.raises(InvalidRequest, match="host:port") as caught:
        record_from_proto(record_to_proto(replace(record(role=DECODE), **{name: (Endpoint(address),)})))  # type: ignore[arg-type]
    assert caught.value.field == name


def test_memory_that_two_workers_share_is_named_by_no_address() -> None:
    shared = record(transfer=(Endpoint("127.0.0.1:1003"), Endpoint("a-machine", "shm")))
    assert record_from_proto(record_to_proto(shared)).transfer == shared.transfer


def test_where_a_metrics_page_is_travels_and_must_be_an_address() -> None:
    made = replace(record(), metrics="10.0.0.7:8482")
    message = record_to_proto(made)
    assert record_from_proto(message).metrics == made.metrics
    for wrong in ("http://10.0.0.7:8482/metrics", "10.0.0.7", "a" * 400 + ":1"):
        message.status.metrics = wrong
        with pytest.raises(InvalidRequest, match="metrics"):
            record_from_proto(message)
    message.status.metrics = ""
    assert record_from_proto(message).metrics == ""


def test_capabilities_travel_those_of_newer_versions_too_and_an_old_record_has_none() -> None:
    made = replace(record(), capabilities=frozenset({"choices", "something new"}))
    message = record_to_proto(made)
    assert list(message.status.capabilities) == ["choices", "something new"]
    assert record_from_proto(message).capabilities == made.capabilities
    message.status.ClearField("capabilities")
    assert record_from_proto(message).capabilities == frozenset()
    message.status.capabilities.extend(["x"] * 65)
    with pytest.raises(InvalidRequest, match="capabilities"):
        record_from_proto(message)
