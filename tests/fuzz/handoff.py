"""The one handoff that every fuzzed stream is about: its contract, its cells, and memory that holds its payloads."""

from __future__ import annotations

import fcntl
import os

from cache_transfer import digests
from cache_transfer.messages import SharedMemory
from cache_transfer.shared_queue import ENTRY_BYTES, START
from tests.cache_transfer.support import make_contract, make_identity

CONTRACT = make_contract(layers=2, heads=2, head_dim=2)
TOKENS = 4
HANDOFF, SECRET = b"h" * 16, b"s" * 32
IDENTITY = make_identity(CONTRACT, TOKENS, start=1)
MAX_PAYLOAD_BYTES = 128
MEMORY_BYTES, PAYLOADS_AT = 8192, 4096

Cell = tuple[str, int, int, int]  # plane, layer, head, token

WHOLE = frozenset(
    (plane.name, layer, head, token)
    for layer, planes in enumerate(CONTRACT.planes)
    for plane in planes
    for head in range(plane.heads)
    for token in range(IDENTITY.start, IDENTITY.end)
)


# What an honest sender of the seed streams sends: each cell says which it is, in two fp32 scalars.
EXPECTED: dict[Cell, bytes] = {cell: bytes([cell[1], "kv".index(cell[0]), cell[2], cell[3]]) * 2 for cell in WHOLE}

_memory: list[SharedMemory] = []
ENTRIES = 8
QUEUE_BYTES, SHIFT = MEMORY_BYTES + ENTRIES * ENTRY_BYTES, ENTRIES * ENTRY_BYTES
_queue: list[SharedMemory] = []


def memory() -> SharedMemory:
    """What a sender of the seed streams would offer: one file for all inputs, its payloads `payloads()` one by one."""
    if not _memory:
        fd = os.memfd_create("fuzz", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, MEMORY_BYTES)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        os.pwrite(fd, digests.memory_proof(SECRET, MEMORY_BYTES), 0)
        os.pwrite(fd, b"".join(payloads()), PAYLOADS_AT)
        _memory.append(SharedMemory(os.getpid(), fd, MEMORY_BYTES))
    return _memory[0]


def queue() -> SharedMemory:
    """The same with a queue, empty again: payloads lie `SHIFT` bytes further."""
    if not _queue:
        fd = os.memfd_create("fuzz-queue", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, QUEUE_BYTES)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        _queue.append(SharedMemory(os.getpid(), fd, QUEUE_BYTES, ENTRIES))
    fd = _queue[0].fd
    os.pwrite(fd, bytes(START + SHIFT), 0)
    os.pwrite(fd, digests.memory_proof(SECRET, QUEUE_BYTES), 0)
    os.pwrite(fd, b"".join(payloads()), PAYLOADS_AT + SHIFT)
    return _queue[0]


def payloads() -> list[bytes]:
    """Of one frame for each plane of each layer, in order."""
    places = [(plane.name, layer, plane.heads) for layer, planes in enumerate(CONTRACT.planes) for plane in planes]
    tokens = range(IDENTITY.start, IDENTITY.end)
    return [
        b"".join(EXPECTED[name, layer, head, token] for token in tokens for head in range(heads))
        for name, layer, heads in places
    ]


def forget_memory() -> None:
    for made in (_memory, _queue):
        while made:
            os.close(made.pop().fd)
