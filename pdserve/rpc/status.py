"""The one mapping between our errors and gRPC and HTTP statuses.

A failed call carries its error twice: as gRPC status code and text, for any client, and as
a serialized ErrorDetail in the trailing metadata key "pdserve-error-bin", for ours.

ConfigError and CheckpointError are local: over the wire they become Internal, with the
same text and fields. Incompatible and Refused share FAILED_PRECONDITION: a detail with
differences, or with a reason that ends in _MISMATCH, is Incompatible.
"""

from __future__ import annotations

from typing import Any, NoReturn

import grpc
from google.protobuf.message import DecodeError

from pdserve import errors
from pdserve.errors import FieldDifference, PdserveError
from pdserve.v1 import common_pb2

ERROR_KEY = "pdserve-error-bin"

# Headers and trailers are limited to 8 KiB by default in other clients; base64 adds a third.
MAX_TRAILER_BYTES = 4096
_MAX_TEXT = 512

_TABLE: dict[type[PdserveError], tuple[grpc.StatusCode, int]] = {
    errors.InvalidRequest: (grpc.StatusCode.INVALID_ARGUMENT, 400),
    errors.NotFound: (grpc.StatusCode.NOT_FOUND, 404),
    errors.Incompatible: (grpc.StatusCode.FAILED_PRECONDITION, 409),
    errors.Refused: (grpc.StatusCode.FAILED_PRECONDITION, 409),
    errors.Fenced: (grpc.StatusCode.ABORTED, 409),
    errors.Exhausted: (grpc.StatusCode.RESOURCE_EXHAUSTED, 429),
    errors.Unavailable: (grpc.StatusCode.UNAVAILABLE, 503),
    errors.DeadlineExceeded: (grpc.StatusCode.DEADLINE_EXCEEDED, 504),
    errors.Cancelled: (grpc.StatusCode.CANCELLED, 499),
    errors.DataLoss: (grpc.StatusCode.DATA_LOSS, 500),
    errors.Unauthenticated: (grpc.StatusCode.UNAUTHENTICATED, 401),
    errors.PermissionDenied: (grpc.StatusCode.PERMISSION_DENIED, 403),
    errors.Internal: (grpc.StatusCode.INTERNAL, 500),
    errors.ConfigError: (grpc.StatusCode.INTERNAL, 500),
    errors.CheckpointError: (grpc.StatusCode.INTERNAL, 500),
    PdserveError: (grpc.StatusCode.INTERNAL, 500),
}

# Statuses by which others may answer us; FAILED_PRECONDITION is decided in `_class_of`.
_FOREIGN: dict[grpc.StatusCode, type[PdserveError]] = {
    grpc.StatusCode.OK: errors.Internal,
    grpc.StatusCode.UNKNOWN: errors.Internal,
    grpc.StatusCode.ALREADY_EXISTS: errors.Refused,
    grpc.StatusCode.OUT_OF_RANGE: errors.InvalidRequest,
    grpc.StatusCode.UNIMPLEMENTED: errors.Refused,
}
_LOCAL = (errors.Incompatible, errors.ConfigError, errors.CheckpointError, PdserveError)
_BY_CODE: dict[grpc.StatusCode, type[PdserveError]] = {
    **{code: cls for cls, (code, _) in _TABLE.items() if cls not in _LOCAL},
    **_FOREIGN,
}
_BY_NUMBER: dict[int, grpc.StatusCode] = {code.value[0]: code for code in grpc.StatusCode}

# What a call that breaks on its way ends with. Our servers never do without a detail.
_LOST_CODES = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.CANCELLED,  # not by us: our own cancellation never reads the status
    grpc.StatusCode.INTERNAL,  # a reset stream
    grpc.StatusCode.UNKNOWN,
)

_NOT_GRPC = "this is not a gRPC port"

_KINDS = {
    "must_equal": common_pb2.DIFFERENCE_CLASS_MUST_EQUAL,
    "convertible": common_pb2.DIFFERENCE_CLASS_CONVERTIBLE,
    "lossy": common_pb2.DIFFERENCE_CLASS_LOSSY,
    "informational": common_pb2.DIFFERENCE_CLASS_INFORMATIONAL,
}
_KIND_NAMES: dict[int, str] = {number: name for name, number in _KINDS.items()}


def grpc_code(error: PdserveError) -> grpc.StatusCode:
    return _row(error)[0]


def http_status(error: PdserveError) -> int:
    return _row(error)[1]


def to_detail(error: PdserveError) -> common_pb2.ErrorDetail:
    """The complete error, with all differences."""
    return common_pb2.ErrorDetail(
        reason=error.reason,
        message=error.message,
        field=error.field,
        remedy=error.remedy,
        retryable=error.retryable,
        differences=[difference_to_proto(d) for d in error.differences],
        code=grpc_code(error).value[0],
        retry_after_ms=max(0, error.retry_after_ms),
    )


def from_detail(detail: common_pb2.ErrorDetail) -> PdserveError:
    """Rebuilds the error; an unknown code becomes Internal."""
    code = _BY_NUMBER.get(detail.code, grpc.StatusCode.UNKNOWN)
    return _class_of(code, detail)(
        detail.message,
        reason=detail.reason,
        field=detail.field,
        remedy=detail.remedy,
        retryable=detail.retryable,
        differences=tuple(difference_from_proto(d) for d in detail.differences),
        retry_after_ms=detail.retry_after_ms,
    )


def from_rpc_error(error: grpc.RpcError, address: str = "") -> PdserveError:
    """The typed error behind a failed call, from its detail or else from its status.

    Args:
        error: raised by a sync or async gRPC call.
        address: of the peer, named in errors that the peer did not write itself.
    """
    detail = _detail_of(error)
    if detail is not None:
        return from_detail(detail)
    code, text = _status_of(error)
    place = f"{address}: " if address else ""
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED and "larger than max" in text:
        return errors.InvalidRequest(
            f"{place}a message is too large: {text}",
            reason="MESSAGE_TOO_LARGE",
            remedy="send less at once, or raise max_message_bytes on both sides",
        )
    cls = _class_of(code, common_pb2.ErrorDetail())
    reason = code.name if code in _FOREIGN else ""
    told = _transport_text(text) or code.name
    return cls(f"{place}{told}", reason=reason, remedy=_foreign_remedy(code, address, told))


def has_detail(error: grpc.RpcError) -> bool:
    """The peer's own error came with the status."""
    return _detail_of(error) is not None


def is_lost(error: grpc.RpcError) -> bool:
    """The call broke at the transport: nobody said why it failed, and the same call may succeed elsewhere."""
    return _status_of(error)[0] in _LOST_CODES and not has_detail(error)


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: PdserveError) -> NoReturn:
    """Ends the call with the error's status and detail."""
    trailer = trailer_bytes(to_detail(error))
    given = tuple(context.trailing_metadata() or ())  # else it would be lost
    await context.abort(grpc_code(error), _cut(str(error)), (*given, (ERROR_KEY, trailer)))
    raise AssertionError("abort() returned")  # it always raises; this line is for the type checker


def trailer_bytes(detail: common_pb2.ErrorDetail) -> bytes:
    """The detail serialized within `MAX_TRAILER_BYTES`: long texts are cut, surplus differences counted."""
    if detail.ByteSize() <= MAX_TRAILER_BYTES:
        return detail.SerializeToString()
    short = common_pb2.ErrorDetail()
    short.CopyFrom(detail)
    del short.differences[:]
    for name in ("reason", "message", "field", "remedy"):
        setattr(short, name, _cut(getattr(detail, name)))
    for number, difference in enumerate(detail.differences):
        entry = common_pb2.Difference(
            code=_cut(difference.code), left=_cut(difference.left), right=_cut(difference.right)
        )
        setattr(entry, "class", getattr(difference, "class"))
        if short.ByteSize() + entry.ByteSize() > MAX_TRAILER_BYTES - 64:
            short.message += f" (and {len(detail.differences) - number} more)"
            break
        short.differences.append(entry)
    return short.SerializeToString()


def difference_to_proto(difference: FieldDifference) -> common_pb2.Difference:
    message = common_pb2.Difference(code=difference.code, left=difference.left, right=difference.right)
    # `class` is a keyword: the generated field can only be reached by name.
    setattr(message, "class", _KINDS.get(difference.kind, common_pb2.DIFFERENCE_CLASS_MUST_EQUAL))
    return message


def difference_from_proto(message: common_pb2.Difference) -> FieldDifference:
    """An unknown class is read as must_equal: a difference we cannot judge refuses."""
    kind = _KIND_NAMES.get(getattr(message, "class"), "must_equal")
    return FieldDifference(message.code, message.left, message.right, kind)


def _row(error: PdserveError) -> tuple[grpc.StatusCode, int]:
    return next(_TABLE[cls] for cls in type(error).__mro__ if cls in _TABLE)


def _class_of(code: grpc.StatusCode, detail: common_pb2.ErrorDetail) -> type[PdserveError]:
    if code is grpc.StatusCode.FAILED_PRECONDITION:
        differs = bool(detail.differences) or detail.reason.endswith("_MISMATCH")
        return errors.Incompatible if differs else errors.Refused
    return _BY_CODE[code]


def _status_of(error: grpc.RpcError) -> tuple[grpc.StatusCode, str]:
    """Every error of a call has code() and details(); other RpcErrors only have their text."""
    code: grpc.StatusCode | None = error.code() if hasattr(error, "code") else None
    text: str | None = error.details() if hasattr(error, "details") else str(error)
    return code or grpc.StatusCode.UNKNOWN, text or ""


def _detail_of(error: grpc.RpcError) -> common_pb2.ErrorDetail | None:
    trailing: Any = error.trailing_metadata() if hasattr(error, "trailing_metadata") else None
    for key, value in trailing or ():
        if key == ERROR_KEY and isinstance(value, bytes):
            try:
                return common_pb2.ErrorDetail.FromString(value)
            except DecodeError:
                return None  # not ours after all: the status still says what happened
    return None


def _transport_text(text: str) -> str:
    """gRPC's own text, which tells every layer that it went through; the usual two in words."""
    if "Failed parsing HTTP/2" in text:
        return _NOT_GRPC
    return "connection refused" if text.endswith(": Connection refused") else text


def _foreign_remedy(code: grpc.StatusCode, address: str, told: str) -> str:
    if told is _NOT_GRPC:
        return "give a gRPC port; a gateway's is 8470 by default"
    if code is grpc.StatusCode.UNAVAILABLE:
        return f"check that a server listens at {address or 'that address'}"
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return f"check that {address or 'the address'} is the right service, of the same version"
    if _BY_CODE.get(code) is errors.Internal:  # a fault, but not of ours
        return f"see the log of what answers at {address or 'that address'}"
    return ""


def _cut(text: str) -> str:
    return text if len(text) <= _MAX_TEXT else text[: _MAX_TEXT - 3] + "..."
