"""Every byte of the worked example in docs/protocol.md.

It is computed here from the page's own words, with hashlib, struct and blake3 only.
"""

from __future__ import annotations

import hashlib
import re
import struct

import msgpack
from blake3 import blake3

from tests.golden.generate import worked_example
from tests.golden.page import PAGE, code_of, table
from tests.golden.read import INDEX

EXAMPLE = next(entry["expected"] for entry in INDEX if entry["name"] == "worked example")
SECRET = bytes(range(32))


def named_bytes() -> dict[str, bytes]:
    """What stands indented under each name in the example's blocks."""
    found: dict[str, str] = {}
    for block in re.findall(r"```text\n(.*?)```", PAGE, re.DOTALL):
        name = ""
        for line in block.splitlines():
            if line.startswith("    "):
                found[name] += line.strip()
            else:
                name = line.split(":")[0]
                found[name] = ""
    return {name: bytes.fromhex(digits) for name, digits in found.items()}


def tagged(tag: str, body: bytes) -> bytes:
    return tag.encode() + struct.pack("<Q", len(body)) + body


def text(value: str) -> bytes:
    return tagged("S", value.encode())


def sequence(*items: bytes) -> bytes:
    return tagged("T", b"".join(items))


def keyed(*parts: bytes) -> bytes:
    return blake3(b"".join(parts), key=SECRET).digest()


def test_the_contract_digest_is_that_of_the_rows() -> None:
    rows = [(code_of(code), bytes.fromhex(code_of(data))) for code, _, data in table("code | value | encode(value)")]
    pairs = [sequence(text(code), data) for code, data in rows]
    shown = named_bytes()
    assert shown["pair"] == pairs[0]
    assert f"The first pair, and the digest over all {len(rows)}:" in PAGE
    digest = hashlib.sha256(sequence(text("contract"), sequence(*pairs))).digest()
    assert digest == shown["contract digest"] == bytes.fromhex(EXAMPLE["contract_digest"])
    assert dict(rows)["MODEL_DIGEST"] == tagged("Y", hashlib.sha256(b"a model").digest())


def test_prompt_identity_and_proof_are_as_shown() -> None:
    shown = named_bytes()
    assert shown["prompt"] == sequence(text("prompt"), tagged("Y", struct.pack("<2i", 0, 1)))
    assert shown["prompt digest"] == hashlib.sha256(shown["prompt"]).digest()
    pairs = sequence(
        sequence(text("contract_digest"), tagged("Y", shown["contract digest"])),
        sequence(text("adapter_digest"), tagged("N", b"")),
        sequence(text("tenant"), text("tenant")),
        sequence(text("prompt_digest"), tagged("Y", shown["prompt digest"])),
        sequence(text("start"), tagged("I", b"0")),
        sequence(text("end"), tagged("I", b"2")),
    )
    assert shown["identity"] == tagged("D", text("HandoffIdentity") + pairs)
    assert shown["identity digest"] == hashlib.sha256(sequence(text("identity"), shown["identity"])).digest()
    assert shown["proof"] == keyed(b"pd-proof", shown["identity"])
    for name in ("prompt digest", "identity digest", "proof"):
        assert shown[name].hex() == EXAMPLE[name.replace(" ", "_")]


def test_frames_logits_and_commit_are_as_shown() -> None:
    shown = named_bytes()
    header, payload = shown["header"], shown["payload"]
    said = {"plane": "k", "layer": 0, "heads": [0, 1], "tokens": [0, 2], "seq": 0, "dtype": "fp32"}
    assert msgpack.unpackb(header) == said
    assert str(said).replace("'", '"') in PAGE
    assert payload == struct.pack("<4f", 0.0, -0.0, float("inf"), float("-inf"))
    assert len(header) == 0x33
    first, second = shown["frame digest 0"], shown["frame digest 1"]
    assert first == keyed(b"pd-frame", bytes.fromhex("33000000"), header, payload)
    assert [first.hex(), second.hex()] == EXAMPLE["frame_digests"]
    body = b"\x0a\x33" + header + b"\x12\x10" + payload + b"\x1a\x20" + first
    assert shown["frame message"] == b"\x12" + bytes([len(body)]) + body
    assert shown["scores"] == struct.pack("<2f", -1.0, 3.25)
    logits = keyed(b"pd-logit", bytes.fromhex("04000000"), b"fp32", bytes.fromhex("01000000"), shown["scores"])
    assert logits == shown["logits digest"] == bytes.fromhex(EXAMPLE["logits_digest"])
    assert shown["counts"] == struct.pack("<IQII", 2, 32, 0, 2)
    commit = keyed(b"pd-manif", first, second, logits, shown["identity digest"], shown["counts"])
    assert commit == shown["commit digest"] == bytes.fromhex(EXAMPLE["manifest_digest"])
    assert shown["commit message"] == b"\x22\x28" + b"\x08\x02\x10\x20\x20\x02" + b"\x2a\x20" + commit
    sent = worked_example().messages
    assert (shown["frame message"], shown["commit message"]) == (sent[1], sent[4])
