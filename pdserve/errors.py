"""The one error tree. Standard library only, so that every package may use it.

    PdserveError
    |- InvalidRequest       INVALID_ARGUMENT     the caller sent something that can never work
    |- NotFound             NOT_FOUND            unknown model, adapter, worker, bundle
    |- Incompatible         FAILED_PRECONDITION  contracts or identities differ; carries the diff
    |- Refused              FAILED_PRECONDITION  right now this state forbids it (expired ticket, ...)
    |- Fenced               ABORTED              an attempt, incarnation or ticket that is no longer current
    |- Exhausted            RESOURCE_EXHAUSTED   a bounded queue or pool is full
    |- Unavailable          UNAVAILABLE          no worker, a dead worker, registry unreachable
    |- DeadlineExceeded     DEADLINE_EXCEEDED
    |- Cancelled            CANCELLED
    |- DataLoss             DATA_LOSS            a byte did not verify
    |- Unauthenticated      UNAUTHENTICATED
    |- PermissionDenied     PERMISSION_DENIED
    |- Internal             INTERNAL             our own fault: an invariant does not hold
    |- ConfigError          (local)              configuration file, flag or port
    `- CheckpointError      (local)              model files that cannot be loaded

The mapping to gRPC and HTTP status lives in one place, `pdserve.rpc.status`.
"""

from __future__ import annotations

from dataclasses import dataclass

MAX_SHOWN = 100  # characters of a caller's value in an error


def shown(value: object) -> str:
    """A caller's value for an error's text: its repr, cut to MAX_SHOWN characters."""
    if isinstance(value, int) and value.bit_length() > 4 * MAX_SHOWN:
        return f"a number of {value.bit_length()} bits"  # Python does not write out the very long ones
    text = repr(value[: MAX_SHOWN + 1] if isinstance(value, (str, bytes)) else value)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."


@dataclass(frozen=True)
class FieldDifference:
    """One named difference, as text, ready for errors, logs and the wire."""

    code: str  # stable, such as "POSITION_SCHEME.theta"
    left: str
    right: str
    kind: str = "must_equal"  # must_equal | convertible | lossy | informational

    def __str__(self) -> str:
        return f"{self.code}: {self.left} != {self.right}"


class PdserveError(Exception):
    """Base of every error this project raises on purpose.

    Args:
        message: one sentence for people.
        reason: stable upper-case code; defaults to the class's own.
        field: the request, config or contract field at fault.
        remedy: what the reader can do about it; defaults to the class's own.
        retryable: the same request may succeed elsewhere or later.
        differences: set when contracts or identities disagree.
        retry_after_ms: a hint for `retryable` errors; 0 when unknown.
    """

    default_reason = "ERROR"
    default_remedy = ""
    default_retryable = False

    def __init__(
        self,
        message: str,
        *,
        reason: str = "",
        field: str = "",
        remedy: str = "",
        retryable: bool | None = None,
        differences: tuple[FieldDifference, ...] = (),
        retry_after_ms: int = 0,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.reason = reason or self.default_reason
        self.field = field
        self.remedy = remedy or self.default_remedy
        self.retryable = self.default_retryable if retryable is None else retryable
        self.differences = differences
        self.retry_after_ms = retry_after_ms

    def __str__(self) -> str:
        text = f"{self.field}: {self.message}" if self.field else self.message
        return f"{text} ({self.remedy})" if self.remedy else text


class InvalidRequest(PdserveError):
    default_reason = "INVALID_REQUEST"


class NotFound(PdserveError):
    default_reason = "NOT_FOUND"


class Incompatible(PdserveError):
    default_reason = "CONTRACT_MISMATCH"


class Refused(PdserveError):
    default_reason = "REFUSED"


class Fenced(PdserveError):
    default_reason = "FENCED"
    default_retryable = True


class Exhausted(PdserveError):
    default_reason = "EXHAUSTED"
    default_retryable = True


class Unavailable(PdserveError):
    default_reason = "UNAVAILABLE"
    default_retryable = True


class DeadlineExceeded(PdserveError):
    default_reason = "DEADLINE_EXCEEDED"


class Cancelled(PdserveError):
    default_reason = "CANCELLED"


class DataLoss(PdserveError):
    default_reason = "DATA_LOSS"
    default_retryable = True


class Unauthenticated(PdserveError):
    default_reason = "UNAUTHENTICATED"


class PermissionDenied(PdserveError):
    default_reason = "PERMISSION_DENIED"


class Internal(PdserveError):
    default_reason = "INTERNAL"
    default_remedy = "report it, with the request's id and the log"


class ConfigError(PdserveError):
    default_reason = "CONFIG"


class CheckpointError(PdserveError):
    default_reason = "CHECKPOINT"


def not_allowed(section: str, name: str, value: object, expected: str) -> ConfigError:
    """For a setting out of its range, such as `[decode] max_batch`."""
    return ConfigError(f"{value!r} is not allowed", field=f"{section}.{name}", remedy=f"use {expected}")
