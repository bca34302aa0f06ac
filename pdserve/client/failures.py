"""What a failed call raises: the server's error, in the words of the client's own arguments where they decide."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import grpc

from pdserve.errors import DeadlineExceeded, PdserveError, Unauthenticated
from pdserve.rpc.status import from_rpc_error

_DEADLINE_FIELDS = ("", "deadline")  # of the error of our own gRPC library, and of a router's that was no slower


@contextmanager
def typed_errors(address: str, timeout_s: float) -> Iterator[None]:
    """Around one call to `address` with this deadline. Raises PdserveError for every RpcError."""
    began = time.monotonic()
    try:
        yield
    except grpc.RpcError as error:
        raise _ours(from_rpc_error(error, address), timeout_s, time.monotonic() - began) from None
    except (DeadlineExceeded, Unauthenticated) as error:  # an error event of the stream
        raise _ours(error, timeout_s, time.monotonic() - began) from None


def _ours(error: PdserveError, timeout_s: float, took_s: float) -> PdserveError:
    if isinstance(error, Unauthenticated):
        return Unauthenticated(
            error.message, reason=error.reason, field="api_key", remedy="pass api_key= with a key of this router's"
        )
    # A router that gives up sooner, by a limit of its own, has its own remedy.
    if isinstance(error, DeadlineExceeded) and error.field in _DEADLINE_FIELDS and took_s > 0.9 * timeout_s:
        return DeadlineExceeded(
            f"no complete answer within {timeout_s:g} s",
            reason=error.reason,
            field="timeout_s",
            remedy="raise timeout_s, or lower max_tokens",
        )
    return error
