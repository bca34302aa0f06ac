"""Bad input gets one clear error that says what to do: read from the source, for every place that makes one."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from pdserve import errors
from pdserve.errors import Cancelled, Internal, PdserveError

ROOT = Path(__file__).parent.parent
PACKAGES = ("cache_transfer", "decode_worker", "pdserve", "prefill_worker", "router")
CLASSES = {name: cls for name, cls in vars(errors).items() if isinstance(cls, type) and issubclass(cls, PdserveError)}
NO_REMEDY = (
    Internal,  # a fault of ours: the class itself says to report it
    Cancelled,  # whoever is told has gone, or asked for it
)


def made_in(source: str) -> Iterator[tuple[int, str, set[str | None]]]:
    """Line, class and keywords of every error of ours that is made; keyword None stands for `**options`."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            name = getattr(node.func, "id", getattr(node.func, "attr", ""))
            if name in CLASSES:
                yield node.lineno, name, {keyword.arg for keyword in node.keywords}


def without_remedy(source: str) -> list[str]:
    return [
        f"{line}: {name}"
        for line, name, given in made_in(source)
        if not issubclass(CLASSES[name], NO_REMEDY) and not given & {"remedy", None}
    ]


@pytest.mark.parametrize("package", PACKAGES)
def test_every_error_that_others_can_cause_says_what_to_do(package: str) -> None:
    files = {path: path.read_text() for path in sorted((ROOT / package).rglob("*.py"))}
    assert any(True for source in files.values() for _ in made_in(source)), "the walk finds no error at all"
    assert [
        f"{path.relative_to(ROOT)}:{found}" for path, source in files.items() for found in without_remedy(source)
    ] == []


def test_an_error_without_a_remedy_is_found() -> None:
    source = 'raise NotFound("no such worker")\nraise errors.Refused("no", field="x")\nraise Internal("a bug")\n'
    assert without_remedy(source) == ["1: NotFound", "2: Refused"]
    assert without_remedy('raise NotFound("no such worker", remedy="see pdserve status")\n') == []


def test_a_fault_of_ours_asks_for_a_report_unless_it_says_more() -> None:
    assert "report it" in str(Internal("an invariant does not hold"))
    assert Internal("it broke", remedy="restart it").remedy == "restart it"
    assert Cancelled("the caller has gone").remedy == ""
