"""The page of licences is what the installed packages say, and the audit says what it could not find out."""

from __future__ import annotations

import json

from tests import audit, licences


def test_the_page_of_licences_is_current() -> None:
    """Another version of Python may need other packages: the page says which one it is of."""
    listed = licences.packages()
    assert licences.direct() == {package.name for package in listed if package.direct}
    assert licences.PAGE.read_text() == licences.page(listed), "run `make licences`"


def test_every_licence_is_known_and_copyleft_has_a_word() -> None:
    listed = {package.name: package for package in licences.packages()}
    assert not [name for name, package in listed.items() if package.licence == "not said"]
    flagged = {name for name, package in listed.items() if package.copyleft}
    assert flagged == set(licences.WHY)
    for text in ("GPLv2", "GNU Lesser General Public License v3", "MPL-2.0 AND MIT", "AGPL-3.0-only", "EPL-2.0"):
        assert licences.COPYLEFT.search(text), text
    for text in ("MIT", "Apache-2.0", "BSD-3-Clause", "PSF-2.0", "ISC License (ISCL)", "CC0-1.0 OR Apache-2.0"):
        assert not licences.COPYLEFT.search(text), text


REPORT = """{"dependencies": [
  {"name": "flask", "version": "0.5", "vulns": [
    {"id": "PYSEC-2019-179", "fix_versions": ["1.0"], "aliases": ["CVE-2019-1010083"], "description": "..."},
    {"id": "PYSEC-2018-66", "fix_versions": [], "aliases": [], "description": "..."}]},
  {"name": "jinja2", "version": "3.0.2", "vulns": []},
  {"name": "own", "skip_reason": "Dependency not found on PyPI and could not be audited: own (1.0)"}
], "fixes": []}"""


def test_an_audit_tells_what_is_known_and_what_is_not() -> None:
    answer = audit.read(json.loads(REPORT))
    assert answer.status == 1 and answer.clean == ["jinja2 3.0.2"]
    assert answer.vulnerable == [
        "flask 0.5: PYSEC-2019-179 CVE-2019-1010083, fixed in 1.0",
        "flask 0.5: PYSEC-2018-66, fixed in no version yet",
    ]
    answer.vulnerable.clear()
    assert answer.status == 2, "one could not be looked up"
    answer.unknown.clear()
    assert answer.status == 0
    assert audit.Answer().status == 2, "nothing was looked up"


def test_what_is_audited_is_what_is_pinned() -> None:
    pinned = dict(line.split("==") for line in audit.pins())
    assert {"torch", "grpcio", "starlette", "cryptography"} <= set(pinned)
    assert not [version for version in pinned.values() if "+" in version]
    own = {package.name: package.version for package in licences.packages()}
    differ = {name for name in own if name in pinned and pinned[name].partition("+")[0] != own[name]}
    assert not differ, "constraints.txt has another version than is installed"
