"""Payloads through shared memory: used where both agree, refused where anything is odd, and nothing is left of it."""

from __future__ import annotations

import asyncio
import fcntl
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from blake3 import blake3

from cache_transfer.codec import encode_header
from cache_transfer.digests import frame_digest
from cache_transfer.messages import FrameHeader, Grant, PackedFrames, SharedFrame, SharedFrames, SharedMemory, Unpacked
from cache_transfer.opening import make_opening
from cache_transfer.receiver import ReceiverSettings
from cache_transfer.shared import Ring, Shared
from pdserve.errors import DataLoss, InvalidRequest, PdserveError
from tests.cache_transfer.pages import WAIT_S
from tests.cache_transfer.support import Pair, check_same, heard, make_pair, random_cache

pytestmark = pytest.mark.usefixtures("no_shared_memory_is_left")

TOKENS = 9
SECRET = bytes(range(32))
SIZE = 8192


def proof(secret: bytes, size: int) -> bytes:
    """As docs/protocol.md says it."""
    return blake3(b"pd-share" + size.to_bytes(8, "little"), key=secret).digest()


@contextmanager
def memory(start: bytes = proof(SECRET, SIZE), *, sealed: bool = True) -> Iterator[SharedMemory]:
    """An offer of this process, made by hand."""
    fd = os.memfd_create("by-hand", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, SIZE)
        os.pwrite(fd, start, 0)
        if sealed:
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        yield SharedMemory(os.getpid(), fd, SIZE)
    finally:
        os.close(fd)


async def used(pair: Pair) -> bool:
    """Makes one handoff, whole and right; whether its grant agreed to shared memory."""
    grants = heard(pair, Grant)
    ticket, identity = pair.issue(TOKENS)
    sender = pair.sender(ticket, identity, pair.source(TOKENS))
    pair.announce_all(sender, TOKENS)
    await sender.run()
    check_same(pair.host.sinks[ticket.handoff_id, 1].content(TOKENS), random_cache(pair.sends, TOKENS))
    return grants[0].shared


async def test_two_workers_of_one_machine_use_it() -> None:
    async with make_pair("shared") as pair:
        assert await used(pair)


async def test_many_more_frames_than_slots() -> None:
    async with make_pair("shared", layers=40) as pair:
        ticket, identity = pair.issue(TOKENS)
        sender = pair.sender(ticket, identity, pair.source(TOKENS), max_payload_bytes=16)
        pair.announce_all(sender, TOKENS)
        report = await sender.run()
        assert report.frames == 40 * 2 * 3 * TOKENS
        check_same(pair.host.sinks[ticket.handoff_id, 1].content(TOKENS), random_cache(pair.sends, TOKENS))


async def test_a_sender_that_does_not_want_it_uses_the_stream() -> None:
    async with make_pair("grpc") as pair:
        assert not await used(pair)


async def test_a_receiver_that_does_not_want_it_gets_frames_on_the_stream() -> None:
    async with make_pair("shared", settings=ReceiverSettings(shared_memory=False)) as pair:
        assert not await used(pair)


async def test_a_receiver_of_another_machine_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    async with make_pair("shared") as pair:
        monkeypatch.setattr("cache_transfer.shared.boot_id", lambda: "another machine")
        assert not await used(pair)


async def test_memory_that_cannot_be_read_falls_back_to_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    async with make_pair("shared") as pair:
        monkeypatch.setattr("cache_transfer.shared.os.getpid", lambda: 2**22 + 1)  # no process has this number
        assert not await used(pair)


def test_memory_of_this_tickets_sender_is_taken() -> None:
    with memory() as offer:
        os.pwrite(offer.fd, b"payload", 4096)
        shared = Shared.open(offer, SECRET)
        frame = SharedFrame(b"header", 4096, 7, bytes(32))
        assert bytes(shared.read(frame, memoryview(bytearray(16)))) == b"payload"
        shared.close()


@pytest.mark.parametrize("size", [0, 1, SIZE - 1, SIZE + 1, 2**40, 2**63])
def test_another_size_than_the_files_is_refused(size: int) -> None:
    with memory(proof(SECRET, size)) as offer, pytest.raises(ValueError, match="bytes that were offered"):
        Shared.open(replace(offer, size=size), SECRET)


def test_memory_that_could_still_shrink_is_refused() -> None:
    with memory(sealed=False) as offer, pytest.raises(ValueError, match="not sealed"):
        Shared.open(offer, SECRET)


def test_sealed_memory_cannot_be_truncated_under_its_reader() -> None:
    ring = Ring(4096)
    try:
        with pytest.raises(PermissionError):
            os.ftruncate(ring.offer.fd, 0)
    finally:
        ring.close()


def test_memory_of_another_handoff_is_refused() -> None:
    with memory(proof(secrets.token_bytes(32), SIZE)) as offer, pytest.raises(ValueError, match="secret"):
        Shared.open(offer, SECRET)


def test_a_file_of_another_user_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cache_transfer.shared.os.geteuid", lambda: 123456)
    with memory() as offer, pytest.raises(ValueError, match="this user"):
        Shared.open(offer, SECRET)


def test_a_pipe_and_a_plain_file_are_refused_unread(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    plain = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    try:
        for fd in (reading, plain):
            with pytest.raises((OSError, ValueError)):
                Shared.open(SharedMemory(os.getpid(), fd, SIZE), SECRET)
    finally:
        for fd in (reading, writing, plain):
            os.close(fd)


def header(tokens: int, seq: int = 0) -> bytes:
    return encode_header(FrameHeader("k", 0, (0, 3), (0, tokens), seq, "fp32"))


HOSTILE: dict[str, tuple[int, int, int, type[PdserveError], str]] = {
    # offset, size, tokens, error, reason
    "beyond the end": (SIZE - 8, 48, 1, InvalidRequest, "SHARED_RANGE"),
    "far beyond the end": (2**63, 48, 1, InvalidRequest, "SHARED_RANGE"),
    "longer than all of it": (0, 2**32 - 1, 1, InvalidRequest, "SHARED_RANGE"),
    "not what was hashed": (4096, 48, 1, DataLoss, "FRAME_DIGEST"),
    "another size than the header's": (4096, 96, 1, DataLoss, "FRAME_DIGEST"),
}


@pytest.mark.parametrize("case", HOSTILE.values(), ids=HOSTILE.keys())
async def test_a_hostile_payload_is_refused_and_never_written(
    case: tuple[int, int, int, type[PdserveError], str],
) -> None:
    offset, size, tokens, error, reason = case
    async with make_pair("grpc") as pair:
        ticket, identity = pair.issue(TOKENS)
        with memory(proof(ticket.secret, SIZE)) as offer:
            stream = pair.transport.open(WAIT_S)
            await stream.send(make_opening(ticket, identity, pair.sends, logits_only=False, shared=offer))
            async with asyncio.timeout(WAIT_S):
                grant = await stream.receive()
            assert isinstance(grant, Grant) and grant.shared
            digest = frame_digest(ticket.secret, header(tokens), b"x" * 48)  # the memory holds zeros
            await stream.send(PackedFrames(SharedFrames((SharedFrame(header(tokens), offset, size, digest),)), ()))
            with pytest.raises(error) as caught:
                async with asyncio.timeout(WAIT_S):
                    await stream.receive()
            assert getattr(caught.value, "reason", None) == reason
            await stream.close()
        assert all(sink.writes == 0 for sink in pair.host.sinks.values())
        await pair.check_next_handoff_works()


async def test_shared_frames_without_an_agreement_are_out_of_order() -> None:
    async with make_pair("grpc") as pair:
        ticket, identity = pair.issue(TOKENS)
        stream = pair.transport.open(WAIT_S)
        await stream.send(make_opening(ticket, identity, pair.sends, logits_only=False))
        async with asyncio.timeout(WAIT_S):
            grant = await stream.receive()
        assert isinstance(grant, Grant) and not grant.shared
        await stream.send(PackedFrames(SharedFrames((SharedFrame(header(1), 0, 48, bytes(32)),)), ()))
        with pytest.raises(InvalidRequest) as caught:
            async with asyncio.timeout(WAIT_S):
                await stream.receive()
        assert caught.value.reason == "MESSAGE_ORDER"
        await stream.close()
        await pair.check_next_handoff_works()


async def test_what_is_changed_after_its_copy_does_not_reach_the_pages() -> None:
    """The receiver verifies its own copy: bytes changed later are not what it writes."""
    ring = Ring(4096)
    try:
        assert ring.begin(SECRET, 4096, 1 << 20)
        shared = Shared.open(ring.offer, SECRET)
        try:
            frame = Unpacked(b"header", 16, lambda out: out.__setitem__(slice(None), b"a" * 16))
            placed, _ = ring.put(frame, SECRET)
            copy = shared.read(placed, memoryview(bytearray(16)))
            os.pwrite(ring.offer.fd, b"b" * 16, placed.offset)
            assert bytes(copy) == b"a" * 16
        finally:
            shared.close()
    finally:
        ring.close()
