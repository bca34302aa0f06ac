"""A frame's payload from where the worker holds it."""

from __future__ import annotations

from cache_transfer.messages import FrameHeader
from cache_transfer.pages import DirectSource, KVSource
from pdserve.errors import Internal


def copy_payload(source: KVSource, header: FrameHeader, out: memoryview) -> None:
    """Copies what the header names from the source to `out`."""
    where = header.plane, header.layer, header.heads, header.tokens
    if isinstance(source, DirectSource):
        source.read_into(*where, out)
        return
    at = 0
    for piece in source.read(*where):
        end = at + piece.nbytes
        if end > len(out):
            raise Internal(f"the source gave more than {len(out)} bytes for {header}")
        out[at:end] = piece.cast("B") if piece.c_contiguous else piece.tobytes()
        at = end
    if at != len(out):
        raise Internal(f"the source gave {at} bytes instead of {len(out)} for {header}")
