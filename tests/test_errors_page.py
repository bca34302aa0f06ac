"""docs/errors.md against the code: its tree is that of `pdserve.rpc.status`, its reasons are those a client may see."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from pdserve.rpc.status import _TABLE

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs/errors.md").read_text()
TREE, TOLD = (
    PAGE.partition(heading)[2].partition("\n## ")[0] for heading in ("## The tree\n", "## What a client may be told\n")
)
CALLED = ("router", "pdserve/client", "pdserve/rpc", "pdserve/tokenizer", "pdserve/request.py")
ELSEWHERE = ("Internal", "DataLoss", "ConfigError", "CheckpointError")  # faults, and what stops a process at its start
GENERIC = "INVALID_"  # one row for `INVALID_<OPTION>`
REASON = re.compile(r"[A-Z][A-Z0-9]*(?:_[A-Z0-9]+)*")


def trees(*places: str) -> list[ast.Module]:
    files = [f for place in places for f in ([ROOT / place] if place.endswith(".py") else (ROOT / place).rglob("*.py"))]
    return [ast.parse(file.read_text()) for file in files]


def parts(value: ast.expr, names: Mapping[str, str]) -> Iterator[str]:
    """The reasons that an expression may be, as patterns: a constant, the name of one, either of two, an f-string."""
    match value:
        case ast.Constant(value=str(text)):
            yield re.escape(text)
        case ast.Name(id=name) if name in names:
            yield names[name]
        case ast.IfExp():
            yield from (*parts(value.body, names), *parts(value.orelse, names))
        case ast.JoinedStr():
            yield "".join(re.escape(str(v.value)) if isinstance(v, ast.Constant) else "[A-Z_]+" for v in value.values)


def reasons(found: list[ast.Module]) -> set[str]:
    """Patterns of every `reason` given to an error, but to those of ELSEWHERE, or to a helper that makes one."""
    nodes = [node for tree in found for node in ast.walk(tree)]
    names: dict[str, str] = {}
    helpers: dict[str, int] = {}
    for node in nodes:
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Constant(value=str(text))) if REASON.fullmatch(text):
                names[name] = text
            case ast.FunctionDef(name=name, args=ast.arguments(args=args)):
                places = [
                    place for place, arg in enumerate(arg for arg in args if arg.arg != "self") if arg.arg == "reason"
                ]
                helpers.update((name, place) for place in places)
    given: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Call):
            name = getattr(node.func, "id", getattr(node.func, "attr", ""))
            values = [keyword.value for keyword in node.keywords if keyword.arg == "reason" and name not in ELSEWHERE]
            values += node.args[helpers[name] : helpers[name] + 1] if name in helpers else []
            given.update(text for value in values for text in parts(value, names) if text.isupper())
    return given


def test_the_tree_of_the_page_is_that_of_the_code() -> None:
    rows = re.findall(r"^\| `(\w+)` \| ([A-Z_]+) \| (\d+) \| (yes|no) \|", TREE, re.MULTILINE)
    listed = {name: (code, int(http), retry == "yes") for name, code, http, retry in rows}
    expected = {
        cls.__name__: (code.name, http, cls.default_retryable)
        for cls, (code, http) in _TABLE.items()
        if cls.__name__ not in ("PdserveError", "ConfigError", "CheckpointError")
    }
    assert listed == expected
    assert "| `ConfigError`, `CheckpointError` | - | - | no |" in TREE


def test_every_reason_that_a_client_may_see_is_on_the_page() -> None:
    listed = set(re.findall(r"`([A-Z][A-Z_]+)`", TOLD))
    missing = {
        reason
        for reason in reasons(trees(*CALLED))
        if not reason.startswith(GENERIC) and not any(re.fullmatch(reason, name) for name in listed)
    }
    assert "`INVALID_<OPTION>`" in TOLD
    assert missing == set()


def test_the_page_has_no_reason_that_the_code_lacks() -> None:
    made = reasons(trees(*CALLED, "pdserve/worker", "decode_worker", "prefill_worker", "pdserve/errors.py"))
    made |= set(re.findall(r'default_reason = "(\w+)"', (ROOT / "pdserve/errors.py").read_text()))
    listed = re.findall(r"`([A-Z][A-Z_]+)`", TOLD)
    assert len(listed) > 50
    assert [name for name in listed if not any(re.fullmatch(pattern, name) for pattern in made)] == []
