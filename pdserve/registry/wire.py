"""Worker records <-> protobuf. Readers trust nothing: what is out of bounds raises InvalidRequest."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import NoReturn

from cache_transfer.contract import Endpoint, WorkerContract
from cache_transfer.wire import contract_from_proto, contract_to_proto, endpoint_from_proto, endpoint_to_proto
from pdserve.errors import ConfigError, InvalidRequest, shown
from pdserve.registry.records import (
    DECODE,
    DRAINING,
    PREFILL,
    READY,
    STALLED,
    STARTING,
    LiveRecord,
    Load,
    NamedAdapter,
    WorkerRecord,
)
from pdserve.rpc.settings import split_address
from pdserve.v1 import common_pb2, gateway_pb2, registry_pb2

MAX_RECORD_BYTES = 256 * 1024  # serialized
MAX_NAME = 128  # characters of a worker id
MAX_MODEL = 256  # characters of a model name
MAX_ENDPOINTS = 64
MAX_ADAPTERS = 1024
MAX_ADDRESS = 300  # characters
DIGEST_BYTES = 32
INCARNATION_BYTES = 16
MAX_LEASE_MS = 3_600_000
RECORDS_A_TURN = 8  # whole records that are read or written before others have their turn: 0.2 ms each

ROLES = (PREFILL, DECODE)
STATES = (STARTING, READY, STALLED, DRAINING)

_REMEMBERED_CONTRACTS = 128
_LOAD_FIELDS = tuple(field.name for field in gateway_pb2.Load.DESCRIPTOR.fields)
_LOAD_RATES = tuple(name for name in _LOAD_FIELDS if isinstance(getattr(Load(), name), float))


def load_to_proto(load: Load) -> gateway_pb2.Load:
    return gateway_pb2.Load(**{name: getattr(load, name) for name in _LOAD_FIELDS})


def load_from_proto(message: gateway_pb2.Load) -> Load:
    values = {name: getattr(message, name) for name in _LOAD_FIELDS}
    for name in _LOAD_RATES:
        if not 0 <= values[name] < math.inf:
            _fail(f"load.{name}", f"is {values[name]}", "a finite number of at least 0")
    return Load(**values)


def status_to_proto(record: WorkerRecord, lease_left_s: float) -> gateway_pb2.WorkerStatus:
    """What people and the Worker service see of a record: no incarnation, no transfer listeners."""
    return gateway_pb2.WorkerStatus(
        worker_id=record.worker_id,
        role=record.role,
        state=record.state,
        model=record.model,
        endpoints=[endpoint_to_proto(endpoint) for endpoint in record.endpoints],
        contract=contract_to_proto(record.contract),
        contract_digest=record.contract.digest(),
        load=load_to_proto(record.load),
        lease_left_s=lease_left_s,
        takes_prompts=record.takes_prompts,
        capabilities=sorted(record.capabilities),
        adapters=[common_pb2.LoadedAdapter(name=each.name, digest=each.digest) for each in record.adapters],
        metrics=record.metrics,
    )


def record_to_proto(record: WorkerRecord, lease_left_s: float = 0.0) -> registry_pb2.WorkerRecord:
    return registry_pb2.WorkerRecord(
        status=status_to_proto(record, lease_left_s),
        incarnation=record.incarnation,
        transfer=[endpoint_to_proto(endpoint) for endpoint in record.transfer],
        lease_ms=max(1, round(record.lease_s * 1000)),
    )


def record_from_proto(message: registry_pb2.WorkerRecord) -> WorkerRecord:
    """Raises InvalidRequest naming the field that is missing, too large or not one of the known values."""
    status = message.status
    if message.ByteSize() > MAX_RECORD_BYTES:
        _fail("record", f"has {message.ByteSize()} bytes", f"at most {MAX_RECORD_BYTES}")
    if not 1 <= message.lease_ms <= MAX_LEASE_MS:
        _fail("lease_ms", f"is {message.lease_ms}", f"1 to {MAX_LEASE_MS}")
    _check_count("endpoints", len(status.endpoints), 1)
    _check_count("transfer", len(message.transfer), 0)
    if status.role == PREFILL and message.transfer:
        _fail("transfer", "is set", "no transfer listeners for a prefill worker")
    contract, digest = _read_contract(status.contract.SerializeToString(deterministic=True))
    record = WorkerRecord(
        worker_id=check_worker_id(status.worker_id),
        role=_one_of("role", status.role, ROLES),
        incarnation=check_incarnation(message.incarnation),
        state=check_state(status.state),
        model=_text("model", status.model, MAX_MODEL),
        endpoints=_endpoints("endpoints", status.endpoints),
        transfer=_endpoints("transfer", message.transfer),
        contract=contract,
        load=load_from_proto(status.load),
        lease_s=message.lease_ms / 1000,
        takes_prompts=status.role == DECODE and status.takes_prompts,
        capabilities=_capabilities(status.capabilities),
        adapters=_adapters(status.adapters),
        metrics=_metrics(status.metrics),
    )
    if status.contract_digest != digest:
        _fail("contract_digest", "is not the digest of the contract", "the SHA-256 that docs/protocol.md describes")
    return record


def _capabilities(names: Sequence[str]) -> frozenset[str]:
    """Those of newer versions too: only whoever needs one has to know what it means."""
    _check_count("capabilities", len(names), 0)
    return frozenset(_text("capabilities", name, MAX_NAME) for name in names)


def _endpoints(name: str, messages: Iterable[common_pb2.Endpoint]) -> tuple[Endpoint, ...]:
    """Whoever reads the record connects to these, so none may be such that no channel can be made.

    Addresses of other transports than gRPC, such as shared memory, are names that only the two workers read.
    """
    endpoints = tuple(map(endpoint_from_proto, messages))
    for endpoint in endpoints:
        if endpoint.transport != "grpc" and name == "transfer":
            continue
        try:
            split_address(endpoint.address)
        except ConfigError:
            _fail(name, f"has the address {shown(endpoint.address)}", "host:port")
    return endpoints


def _metrics(address: str) -> str:
    """Prometheus is told to ask there."""
    try:
        if address:
            split_address(_text("metrics", address, MAX_ADDRESS))
    except ConfigError:
        _fail("metrics", f"is {shown(address)}", "host:port, or nothing")
    return address


def _adapters(messages: Sequence[common_pb2.LoadedAdapter]) -> tuple[NamedAdapter, ...]:
    if len(messages) > MAX_ADAPTERS:
        _fail("adapters", f"has {len(messages)} entries", f"at most {MAX_ADAPTERS}")
    for each in messages:
        if len(each.digest) != DIGEST_BYTES:
            _fail("adapters", f"has a digest of {len(each.digest)} bytes", f"{DIGEST_BYTES} bytes")
        if len(each.name) > MAX_NAME:
            _fail("adapters", f"has a name of {len(each.name)} characters", f"at most {MAX_NAME}")
    return tuple(NamedAdapter(each.name, each.digest) for each in messages)


@lru_cache(maxsize=_REMEMBERED_CONTRACTS)
def _read_contract(data: bytes) -> tuple[WorkerContract, bytes]:
    """The contract and its digest. Remembered: every snapshot brings the same few again."""
    contract = contract_from_proto(common_pb2.WorkerContract.FromString(data))
    return contract, contract.digest()


def live_to_proto(live: LiveRecord) -> registry_pb2.WorkerRecord:
    return record_to_proto(live.record, live.lease_left_s)


def live_from_proto(message: registry_pb2.WorkerRecord) -> LiveRecord:
    return LiveRecord(record_from_proto(message), message.status.lease_left_s)


def check_worker_id(value: str) -> str:
    _text("worker_id", value, MAX_NAME)
    if not value.isprintable() or " " in value:
        _fail("worker_id", f"is {value!r}", "printable characters without spaces")
    return value


def check_incarnation(value: bytes) -> bytes:
    if len(value) != INCARNATION_BYTES:
        _fail("incarnation", f"has {len(value)} bytes", f"{INCARNATION_BYTES} random bytes, new at every start")
    return value


def check_state(value: str) -> str:
    return _one_of("state", value, STATES)


def _text(name: str, value: str, limit: int) -> str:
    if not 1 <= len(value) <= limit:
        _fail(name, f"has {len(value)} characters", f"1 to {limit}")
    return value


def _one_of(name: str, value: str, known: tuple[str, ...]) -> str:
    if value not in known:
        _fail(name, f"is {value[:MAX_NAME]!r}", f"one of {', '.join(known)}")
    return value


def _check_count(name: str, count: int, low: int) -> None:
    if not low <= count <= MAX_ENDPOINTS:
        _fail(name, f"has {count} entries", f"{low} to {MAX_ENDPOINTS}")


def _fail(name: str, problem: str, expected: str) -> NoReturn:
    raise InvalidRequest(
        f"the worker record's {name} {problem}",
        reason="MALFORMED_RECORD",
        field=name,
        remedy=f"use {expected}",
    )
