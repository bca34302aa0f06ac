"""Every hostile stream, in a fixed order: for the cases here and for the golden vectors."""

from __future__ import annotations

from collections.abc import Iterator

from pdserve.conformance.bad_endings import endings
from pdserve.conformance.bad_frames import frames
from pdserve.conformance.bad_openings import openings
from pdserve.conformance.hostile import Hostile


def hostile_streams() -> Iterator[Hostile]:
    yield from openings()
    yield from frames()
    yield from endings()
