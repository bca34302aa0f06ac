"""The kept inputs, replayed; and that the fuzzer would find a fault if there was one."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cache_transfer import digests, intake
from cache_transfer.codec import Coverage
from tests.fuzz import targets
from tests.fuzz.handoff import EXPECTED
from tests.fuzz.mutations import restructured
from tests.fuzz.seeds import CORPUS, seeds
from tests.fuzz.targets import EARLY, SIGNS, TARGETS, Found, joined, messages_of

INPUTS = sorted(path for path in CORPUS.rglob("*") if path.is_file())


@pytest.fixture(autouse=True, scope="module")
def closed() -> Iterator[None]:
    yield
    targets.close()


@pytest.mark.parametrize("path", INPUTS, ids=lambda path: f"{path.parent.name}-{path.name[:12]}")
def test_a_kept_input_does_no_harm(path: Path) -> None:
    TARGETS[path.parent.name](path.read_bytes())


def test_the_corpus_is_small_and_starts_from_the_current_wire_format() -> None:
    assert {path.parent.name for path in INPUTS} == set(TARGETS)
    assert len(INPUTS) < 200 and sum(path.stat().st_size for path in INPUTS) < 200_000
    for target, named in seeds().items():
        for name, data in named.items():
            assert (CORPUS / target / name).read_bytes() == data, f"run python -m tests.fuzz.seeds ({target}/{name})"


@pytest.mark.parametrize("flags", [0, SIGNS])
def test_the_whole_stream_is_taken(flags: int) -> None:
    """Else the fuzzer would only ever see refusals."""
    data = seeds()["receive"]["whole"]
    targets.receive(bytes([flags]) + data[1:])
    host = targets._made[0][2]
    assert host.logits is not None and host.cells == EXPECTED


@pytest.mark.parametrize("name", ["together", "together-signed", "shared", "shared-signed", "queue", "queue-signed"])
def test_frames_that_travel_in_another_way_are_taken_too(name: str) -> None:
    targets.receive(seeds()["receive"][name])
    host = targets._made[0][2]
    assert host.logits is not None and host.cells == EXPECTED


def test_shared_frames_without_an_offer_are_not_taken() -> None:
    targets.receive(seeds()["receive"]["shared-not-agreed"])
    host = targets._made[0][2]
    assert host.logits is None and not host.cells


def test_a_stream_that_does_not_wait_for_its_grant_is_not_taken() -> None:
    data = seeds()["receive"]["whole"]
    targets.receive(bytes([SIGNS | EARLY]) + data[1:])
    host = targets._made[0][2]
    assert host.granted == host.told == 1 and host.logits is None and not host.cells


def test_streams_survive_their_framing() -> None:
    messages = [b"", b"a", b"b" * 300]
    assert messages_of(joined(messages)[1:]) == messages


FAULTS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "tokens in any order": lambda patch: patch.setattr(Coverage, "_check_order", lambda *_: None),
    "a commit that is not checked": lambda patch: patch.setattr(intake, "check_commit", lambda *_: None),
    "digests that are not compared": lambda patch: patch.setattr(digests, "same", lambda left, right: True),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some thousand changed streams are enough, without any guidance by coverage."""
    FAULTS[fault](monkeypatch)
    start = seeds()["receive"]["whole"]
    with pytest.raises(Found):
        for seed in range(4000):
            draw = random.Random(seed)
            data = bytearray(start if seed % 2 else restructured(bytes([SIGNS]) + start[1:], seed))
            if seed % 2:
                data[draw.randrange(1, len(data))] ^= 1 << draw.randrange(8)
            targets.receive(bytes(data))


@pytest.mark.slow
def test_the_command_fuzzes() -> None:
    pytest.importorskip("atheris", reason="pip install -e '.[fuzz]'")
    done = subprocess.run(
        [sys.executable, "-m", "tests.fuzz", "--minutes", "0.02", "--target", "header"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["header", "all"]
    assert all(int(line.split()[1].replace(",", "")) > 0 and "0 crashes" in line for line in lines)
