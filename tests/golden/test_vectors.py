"""The golden vectors, read three times: by the index, by a reader in another language, by our receiver."""

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
from tests.golden.generate import FOLDER, files

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
    """A receiver's end of a stream whose messages are all there."""

    def __init__(self, messages: list[bytes]) -> None:
        self._messages = iter(messages)
        self.answers: list[Response] = []

    async def read(self) -> Request | None:
        data = next(self._messages, None)
        return None if data is None else decode_request(data)

    async def write(self, message: Response) -> None:
        self.answers.append(message)


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
        await asyncio.wait_for(receiver.receive(stream), WAIT_S)
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


def test_the_files_are_what_the_generator_writes() -> None:
    made = files()
    there = {
        str(path.relative_to(FOLDER)): path.read_bytes()
        for path in FOLDER.rglob("*")
        if path.suffix in (".bin", ".json")
    }
    assert there.keys() == made.keys()
    assert [name for name in made if made[name] != there[name]] == []


@pytest.mark.parametrize("entry", INDEX, ids=[entry["name"] for entry in INDEX])
async def test_our_receiver_finds_what_the_index_says(entry: dict[str, Any]) -> None:
    found = await receive(entry, (FOLDER / entry["file"]).read_bytes())
    expected = entry["expected"]
    frames = found.pop("frames", None)
    assert found == {key: value for key, value in expected.items() if key in found}
    assert found["result"] == expected["result"]
    assert frames is None or frames == len(expected["frame_digests"])


def test_the_independent_reader_agrees_with_the_index() -> None:
    done = read_elsewhere(FOLDER, "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found.keys() == {entry["name"] for entry in INDEX}
    for entry in INDEX:
        expected = {key: value for key, value in entry["expected"].items() if key != "status"}
        assert {key: found[entry["name"]].get(key) for key in expected} == expected, entry["name"]
    assert read_elsewhere(FOLDER).stdout.splitlines()[-1] == f"{len(INDEX)} vectors, 0 differ"


def test_the_independent_reader_sees_a_changed_vector(tmp_path: Path) -> None:
    shutil.copytree(FOLDER, tmp_path, dirs_exist_ok=True)
    target = tmp_path / "good" / "bf16.bin"
    data = bytearray(target.read_bytes())
    data[-1] ^= 1  # of the manifest's digest
    target.write_bytes(data)
    done = read_elsewhere(tmp_path)
    assert done.returncode == 1
    *lines, last = done.stdout.splitlines()
    assert [line.split()[1:3] for line in lines if line.startswith("DIFFERS")] == [["bf16", "MANIFEST"]]
    assert last == f"{len(INDEX)} vectors, 1 differ"


def test_the_vectors_cover_every_reason_that_needs_no_clock() -> None:
    """TICKET_USED and TICKET_EXPIRED need two streams or time: `pdserve conformance` has them."""
    from pdserve.conformance.reasons import PUSH_REASONS

    reasons = {entry["expected"].get("reason") for entry in INDEX} - {None}
    assert reasons == PUSH_REASONS.keys() - {"TICKET_USED", "TICKET_EXPIRED", "DEADLINE_EXCEEDED"}
