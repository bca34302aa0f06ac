"""Vectors as our receiver reads them, and as a reader in another language does."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from google.protobuf.message import DecodeError

from cache_transfer.contract import HandoffIdentity, Ticket, WorkerContract, prompt_digest
from cache_transfer.messages import Ack, Grant, Request, Response
from cache_transfer.push import decode_request
from cache_transfer.receiver import Receiver
from cache_transfer.tickets import TicketBook
from cache_transfer.wire import contract_from_proto, identity_from_proto, ticket_from_proto
from pdserve.errors import PdserveError
from pdserve.rpc.status import grpc_code
from pdserve.v1 import common_pb2, transfer_pb2
from tests.cache_transfer.support import Host
from tests.golden.generate import FOLDER

INDEX: list[dict[str, Any]] = json.loads((FOLDER / "index.json").read_text())["vectors"]
WAIT_S = 10.0


def records(data: bytes) -> Iterator[bytes]:
    """The length-delimited messages of a file."""
    at = 0
    while at < len(data):
        size = shift = 0
        while True:
            byte = data[at]
            size |= (byte & 0x7F) << shift
            at, shift = at + 1, shift + 7
            if byte < 0x80:
                break
        yield data[at : at + size]
        at += size


class Stream:
    """A receiver's end of a stream: the opening, and after the grant all the rest."""

    def __init__(self, messages: list[bytes]) -> None:
        self._opening, self._messages = messages[:1], iter(messages[1:])
        self._granted = asyncio.Event()
        if not messages:
            self._granted.set()  # nothing to wait for
        self.answers: list[Response] = []

    async def read(self) -> Request | None:
        if self._opening:
            return decode_request(self._opening.pop())
        await self._granted.wait()
        data = next(self._messages, None)
        return None if data is None else decode_request(data)

    async def write(self, message: Response) -> None:
        self.answers.append(message)
        self._granted.set()


def dtype_of(messages: list[bytes]) -> str:
    """Of the frames; the pages here keep them as they come."""
    try:
        return transfer_pb2.PushRequest.FromString(messages[0]).open.kv_dtype if messages else ""
    except DecodeError:
        return ""


async def receive(entry: dict[str, Any], data: bytes) -> dict[str, Any]:
    """What our receiver makes of one vector, in the words of the index."""
    heads, messages = list(records(data))[:3], list(records(data))[3:]
    contract: WorkerContract = contract_from_proto(common_pb2.WorkerContract.FromString(heads[0]))
    ticket: Ticket = ticket_from_proto(common_pb2.Ticket.FromString(heads[1]))
    identity: HandoffIdentity = identity_from_proto(common_pb2.HandoffIdentity.FromString(heads[2]))
    found: dict[str, Any] = {
        "contract_digest": contract.digest().hex(),
        "identity_digest": identity.digest().hex(),
        "prompt_digest": prompt_digest(tuple(entry["prompt_ids"])).hex(),
    }
    book = TicketBook(ticket.incarnation, 60.0, ticket.endpoints)
    other = book.issue("r", identity, ticket.held_tokens, entry["logits_only"])
    book._entries[ticket.handoff_id] = replace(book._entries.pop(other.handoff_id), ticket=ticket)
    host, stream = Host(replace(contract, kv_dtype=dtype_of(messages) or contract.kv_dtype)), Stream(messages)
    receiver = Receiver(book, contract, host)
    try:
        async with asyncio.timeout(WAIT_S):
            await receiver.receive(stream)
    except PdserveError as error:
        assert host.done == []
        found |= {"result": "refused", "reason": error.reason, "status": grpc_code(error).name}
        return found | {"differences": [difference.code for difference in error.differences]}
    finally:
        receiver.close()
    grant, ack = stream.answers
    assert isinstance(grant, Grant) and isinstance(ack, Ack)
    ((claim, logits, _),) = host.done
    content = host.sinks[claim.handoff_id, claim.attempt].content(claim.end) if claim.start < claim.end else {}
    scores = np.frombuffer(logits.data, "<f8" if logits.dtype == "float64" else "<f4")
    return found | {
        "result": "accepted",
        "conversions": [difference.code for difference in claim.conversions],
        "frames": ack.frames,
        "payload_bytes": ack.payload_bytes,
        "cache_sha256": hashlib.sha256(
            b"".join(rows[claim.start :].tobytes() for rows in content.values())
        ).hexdigest(),
        "first_token": int(scores.argmax()),
    }


def read_elsewhere(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs the reader that shares no code with ours."""
    node = shutil.which("node")
    if node is None:
        if os.environ.get("CI"):
            pytest.fail("the independent reader needs Node")
        pytest.skip("no Node on this machine")
    command = [node, str(folder / "reader.mjs"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
