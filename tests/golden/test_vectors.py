"""The golden vectors, read three times: by the index, by a reader in another language, by our receiver."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.golden.generate import FOLDER, files
from tests.golden.read import INDEX, read_elsewhere, receive


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
    """Two streams or time: `pdserve conformance` has them. Shared memory: `tests/cache_transfer` has it."""
    from pdserve.conformance.reasons import PUSH_REASONS

    reasons = {entry["expected"].get("reason") for entry in INDEX} - {None}
    assert reasons == PUSH_REASONS.keys() - {"TICKET_USED", "TICKET_EXPIRED", "DEADLINE_EXCEEDED", "SHARED_RANGE"}
