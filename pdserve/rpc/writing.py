"""Writing to a bidirectional call without losing what its peer said.

The public `write()` of grpc.aio answers a failed write by replacing the status that the peer
sent with a bare INTERNAL (grpc issue 36066). The call underneath leaves the status alone.
"""

from __future__ import annotations

from typing import Any

import grpc


async def write(call: grpc.aio.StreamStreamCall[Any, Any], message: bytes) -> bool:
    """Sends one serialized message. False: the call is over, and reading from it says why.

    Raises grpc.RpcError when the call ended before it was connected.
    """
    if call.done():
        return False
    await call.wait_for_connection()
    writer: Any = call._cython_call  # type: ignore[attr-defined]
    try:
        await writer.send_serialized_message(message)
    except grpc.aio.InternalError:
        return False
    return True
