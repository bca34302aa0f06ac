"""Our receiver and the independent reader judge the same damaged handoffs, and must agree."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cache_transfer.framing import varint
from pdserve.conformance.hostile import flip
from pdserve.conformance.reasons import PUSH_REASONS
from tests.golden.generate import FOLDER, good
from tests.golden.read import read_elsewhere, receive
from tests.golden.vectors import Vector

EACH = 45  # damaged streams made of each good one


def damaged(vector: Vector, draw: random.Random) -> list[bytes]:
    """One fault in one place: a bit, a byte, a cut, or a message that is lost, repeated or moved."""
    messages = list(vector.messages)
    place = draw.randrange(len(messages))
    data = messages[place]
    match draw.randrange(8):
        case 0 | 1 | 2 | 3:
            messages[place] = flip(data, draw.randrange(8 * len(data)))
        case 4:
            at = draw.randrange(len(data))
            messages[place] = data[:at] + bytes([draw.randrange(256)]) + data[at + 1 :]
        case 5:
            messages[place] = data[: draw.randrange(len(data))]
        case 6:
            del messages[place]
        case 7:
            messages.insert(draw.randrange(len(messages)), data)
    return messages


def streams(draw: random.Random) -> Iterator[tuple[dict[str, Any], bytes]]:
    for vector in good():
        heads = vector.data().removesuffix(b"".join(varint(len(m)) + m for m in vector.messages))
        for number in range(EACH):
            entry = {**vector.entry(), "name": f"{vector.name} {number}", "file": f"{vector.file}.{number}"}
            yield entry, heads + b"".join(varint(len(m)) + m for m in damaged(vector, draw))


def verdict(found: dict[str, Any]) -> tuple[str, ...]:
    """What both must say alike. Which lost byte is noticed first depends on the threads that verify."""
    if found["result"] == "accepted":
        return "accepted", found["cache_sha256"], str(found["first_token"])
    status, _ = PUSH_REASONS[found["reason"]]
    lost = status.name == "DATA_LOSS" and found["reason"] != "PROOF"
    return "refused", status.name, "" if lost else found["reason"], ",".join(found["differences"])


async def test_both_readers_judge_damaged_streams_alike(tmp_path: Path) -> None:
    made = list(streams(random.Random(7)))
    for source in FOLDER.glob("*.mjs"):
        shutil.copy(source, tmp_path)
    for name in ("good", "hostile"):
        (tmp_path / name).mkdir()
    for entry, data in made:
        (tmp_path / entry["file"]).write_bytes(data)
    (tmp_path / "index.json").write_text(json.dumps({"vectors": [entry for entry, _ in made]}))
    done = read_elsewhere(tmp_path, "--json")
    assert done.returncode == 0, done.stderr
    theirs = json.loads(done.stdout)
    kinds = set()
    for entry, data in made:
        ours = await receive(entry, data)
        assert verdict(ours) == verdict(theirs[entry["name"]]), entry["name"]
        if ours["result"] == "accepted":  # the damage was where nothing depends on it
            same = ("cache_sha256", "first_token", "payload_bytes", "identity_digest")
            assert [ours[key] for key in same] == [entry["expected"][key] for key in same], entry["name"]
        kinds.add(ours.get("reason", "accepted"))
    assert len(kinds) > 10, kinds  # the damage reaches every part of a stream
