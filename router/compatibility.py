"""Which kinds of prefill workers may hand to which kinds of decode workers, and every difference of theirs.

The gate judges; here its words are put in order for people. Workers of one kind have the same differences from any
other worker, so that a pool of a thousand is compared as fast as one of three.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pdserve.errors import FieldDifference
from pdserve.registry.records import DECODE, PREFILL
from router.gate import Gate, Member

MAX_KINDS = 32  # of each pool, told to people

Key = tuple[bytes, tuple[tuple[str, str], ...]]


@dataclass(frozen=True)
class Kind:
    """Workers with equal contracts, informational fields included; by worker id."""

    members: tuple[Member, ...]

    @property
    def first(self) -> Member:
        return self.members[0]


@dataclass(frozen=True)
class Cell:
    """What the gate says of two kinds."""

    fits: bool
    differences: tuple[FieldDifference, ...]  # all of them, refused or not

    @property
    def verdict(self) -> str:
        return verdict(self.fits, self.differences)


@dataclass(frozen=True)
class Matrix:
    """`cells[row][column]` of prefill and decode kinds; at most MAX_KINDS of each are in it."""

    rows: tuple[Kind, ...]
    columns: tuple[Kind, ...]
    cells: tuple[tuple[Cell, ...], ...]


def key(member: Member) -> Key:
    """Equal for workers of one kind."""
    return member.group, tuple(sorted(member.record.contract.info.items()))


def kinds(members: Sequence[Member], role: str) -> tuple[Kind, ...]:
    found: dict[Key, list[Member]] = {}
    for member in members:
        if member.record.role == role:
            found.setdefault(key(member), []).append(member)
    return tuple(Kind(tuple(alike)) for alike in found.values())


def compare(gate: Gate, prefill: Member, decode: Member) -> Cell:
    return Cell(gate.fits(prefill, decode), gate.differences(prefill, decode))


def matrix(gate: Gate, members: Sequence[Member]) -> Matrix:
    rows, columns = (kinds(members, role)[:MAX_KINDS] for role in (PREFILL, DECODE))
    cells = tuple(tuple(compare(gate, row.first, column.first) for column in columns) for row in rows)
    return Matrix(rows, columns, cells)


def verdict(fits: bool, differences: Sequence[FieldDifference]) -> str:
    """fits | converts | lossy | refused."""
    told = {difference.kind for difference in differences}
    if not fits:
        return "refused"
    return "lossy" if "lossy" in told else "converts" if "convertible" in told else "fits"
