"""Every threat on the page of security names tests that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from pdserve.rpc.tls import MAY_CALL

ROOT = Path(__file__).parent.parent
LINE = re.compile(r"^\| (?P<threat>.+?) \| (?P<answer>.+?) \| (?P<tests>`tests/.+`) \|$", re.MULTILINE)
ROLE = re.compile(r"^\| `(\w+)\.pdserve` \| (.+?) \|$", re.MULTILINE)
TEST = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")


def test_the_table_of_roles_is_the_programs() -> None:
    page = (ROOT / "docs" / "security.md").read_text()
    told = {role: set(services.split(", ")) for role, services in ROLE.findall(page)}
    services = {service.rpartition(".")[2]: roles for service, roles in MAY_CALL.items()}
    assert told == {role: {name for name, roles in services.items() if role in roles} for role in told}
    assert set(told) == set.union(*map(set, MAY_CALL.values()))


def test_every_threat_has_a_test_that_exists() -> None:
    page = (ROOT / "docs" / "security.md").read_text()
    table = page.partition("| threat |")[2].partition("\n## ")[0].splitlines()[2:]
    lines = [line for line in table if line]
    found = LINE.findall("\n".join(lines))
    assert len(found) == len(lines) > 15
    for _, _, tests in found:
        for file, name in TEST.findall(tests):
            tree = ast.parse((ROOT / file).read_text())
            defined = {n.name for n in ast.walk(tree) if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))}
            assert name in defined, f"{file} has no {name}"
