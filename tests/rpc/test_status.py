"""One error tree, one mapping."""

from __future__ import annotations

import inspect

import grpc
import pytest

from pdserve import errors
from pdserve.errors import FieldDifference, Incompatible, Internal, PdserveError, Refused
from pdserve.rpc import status
from pdserve.v1 import common_pb2

CLASSES = [value for _, value in inspect.getmembers(errors, inspect.isclass) if issubclass(value, PdserveError)]
REMOTE = [cls for cls in CLASSES if cls not in (PdserveError, errors.ConfigError, errors.CheckpointError)]
# The table drawn in the docstring of pdserve/errors.py.
DOCUMENTED = {
    "InvalidRequest": ("INVALID_ARGUMENT", 400),
    "NotFound": ("NOT_FOUND", 404),
    "Incompatible": ("FAILED_PRECONDITION", 409),
    "Refused": ("FAILED_PRECONDITION", 409),
    "Fenced": ("ABORTED", 409),
    "Exhausted": ("RESOURCE_EXHAUSTED", 429),
    "Unavailable": ("UNAVAILABLE", 503),
    "DeadlineExceeded": ("DEADLINE_EXCEEDED", 504),
    "Cancelled": ("CANCELLED", 499),
    "DataLoss": ("DATA_LOSS", 500),
    "Unauthenticated": ("UNAUTHENTICATED", 401),
    "PermissionDenied": ("PERMISSION_DENIED", 403),
    "Internal": ("INTERNAL", 500),
    "ConfigError": ("INTERNAL", 500),
    "CheckpointError": ("INTERNAL", 500),
    "PdserveError": ("INTERNAL", 500),
}


def full(cls: type[PdserveError]) -> PdserveError:
    differences = (FieldDifference("LAYERS", "2", "3"), FieldDifference("KV_DTYPE", "fp32", "bf16", "lossy"))
    return cls(
        "what happened",
        reason="SOME_REASON",
        field="some.field",
        remedy="do this",
        retryable=not cls.default_retryable,
        differences=differences if cls is not Refused else (),
        retry_after_ms=250,
    )


def test_every_class_has_the_documented_status() -> None:
    assert {cls.__name__: (status.grpc_code(cls("x")).name, status.http_status(cls("x"))) for cls in CLASSES} == (
        DOCUMENTED
    )


def test_a_subclass_maps_like_its_parent() -> None:
    class Special(errors.Exhausted):
        pass

    assert status.grpc_code(Special("x")) is grpc.StatusCode.RESOURCE_EXHAUSTED


@pytest.mark.parametrize("cls", REMOTE)
def test_detail_keeps_class_and_every_field(cls: type[PdserveError]) -> None:
    error = full(cls)
    back = status.from_detail(common_pb2.ErrorDetail.FromString(status.to_detail(error).SerializeToString()))
    assert type(back) is cls
    assert vars(back) == vars(error)


@pytest.mark.parametrize("cls", [errors.ConfigError, errors.CheckpointError])
def test_local_errors_arrive_as_internal_with_every_field(cls: type[PdserveError]) -> None:
    back = status.from_detail(status.to_detail(full(cls)))
    assert type(back) is Internal
    assert vars(back) == vars(full(cls))


@pytest.mark.parametrize("kind", ["must_equal", "convertible", "lossy", "informational"])
def test_difference_classes_round_trip(kind: str) -> None:
    difference = FieldDifference("A.b", "1", "2", kind)
    assert status.difference_from_proto(status.difference_to_proto(difference)) == difference


def test_an_unknown_difference_class_refuses() -> None:
    assert status.difference_from_proto(common_pb2.Difference(code="X")).kind == "must_equal"


def test_a_mismatch_without_differences_is_still_incompatible() -> None:
    assert type(status.from_detail(status.to_detail(Incompatible("x")))) is Incompatible
    assert type(status.from_detail(status.to_detail(Incompatible("x", reason="IDENTITY_MISMATCH")))) is Incompatible


def test_an_unknown_code_is_internal() -> None:
    assert type(status.from_detail(common_pb2.ErrorDetail(code=99, message="m"))) is Internal


FOREIGN = {
    "OK": "Internal",
    "CANCELLED": "Cancelled",
    "UNKNOWN": "Internal",
    "INVALID_ARGUMENT": "InvalidRequest",
    "DEADLINE_EXCEEDED": "DeadlineExceeded",
    "NOT_FOUND": "NotFound",
    "ALREADY_EXISTS": "Refused",
    "PERMISSION_DENIED": "PermissionDenied",
    "RESOURCE_EXHAUSTED": "Exhausted",
    "FAILED_PRECONDITION": "Refused",
    "ABORTED": "Fenced",
    "OUT_OF_RANGE": "InvalidRequest",
    "UNIMPLEMENTED": "Refused",
    "INTERNAL": "Internal",
    "UNAVAILABLE": "Unavailable",
    "DATA_LOSS": "DataLoss",
    "UNAUTHENTICATED": "Unauthenticated",
}


@pytest.mark.parametrize("code", list(grpc.StatusCode))
@pytest.mark.parametrize("trailer", [(), ((status.ERROR_KEY, b"\xff\xff not a detail"),)])
def test_every_foreign_status_is_mapped(code: grpc.StatusCode, trailer: tuple[tuple[str, bytes], ...]) -> None:
    error = grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(*trailer), details="their text")
    typed = status.from_rpc_error(error, "127.0.0.1:1")
    assert type(typed).__name__ == FOREIGN[code.name]
    assert typed.message == "127.0.0.1:1: their text"


def test_an_rpc_error_without_status_is_internal() -> None:
    assert type(status.from_rpc_error(grpc.RpcError("lost"))) is Internal


def test_a_huge_diff_fits_the_trailer_and_says_how_much_is_missing() -> None:
    differences = tuple(FieldDifference(f"PLANES[{n}].k.heads", "8", "4") for n in range(400))
    detail = status.to_detail(Incompatible("m" * 10_000, field="PLANES[0].k.heads", differences=differences))
    data = status.trailer_bytes(detail)
    assert len(data) <= status.MAX_TRAILER_BYTES
    back = status.from_detail(common_pb2.ErrorDetail.FromString(data))
    kept = len(back.differences)
    assert 50 < kept < 400
    assert back.differences == differences[:kept]
    assert back.message.endswith(f"(and {400 - kept} more)")
    assert len(detail.differences) == 400
