"""Asks for known vulnerabilities of what constraints.txt pins, by pip-audit: `make audit`.

pip-audit has an environment of its own, so that what is tested does not change. It asks PyPI, then OSV, about each
package; a mirror often has no such data, and then that is what is said.

Exit status: 0, all were looked up and nothing is known; 1, something is; 2, some could not be looked up.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import venv
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
PLACE = ROOT / ".venv" / "audit"
SERVICES = ("pypi", "osv")
SHOWN = 5  # packages without an answer


@dataclass
class Answer:
    clean: list[str] = field(default_factory=list)
    vulnerable: list[str] = field(default_factory=list)  # as lines for people
    unknown: list[str] = field(default_factory=list)

    @property
    def status(self) -> int:
        return 1 if self.vulnerable else 2 if self.unknown or not self.clean else 0


def pins() -> list[str]:
    """name==version, without what says how it was built; what lies at a path is no package of a registry."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return [re.sub(r"\+.*", "", line) for line in lines if re.match(r"[\w.-]+==", line)]


def read(report: Any) -> Answer:
    """pip-audit's JSON."""
    answer = Answer()
    for each in report["dependencies"]:
        name = f"{each['name']} {each.get('version', '')}".strip()
        if "skip_reason" in each:
            answer.unknown.append(f"{name}: {each['skip_reason']}")
        elif each["vulns"]:
            answer.vulnerable += [_line(name, vulnerability) for vulnerability in each["vulns"]]
        else:
            answer.clean.append(name)
    return answer


def ask(pinned: Sequence[str], service: str) -> Answer:
    """Everything is unknown when the service does not answer."""
    wanted = PLACE / "pins.txt"
    wanted.write_text("\n".join(pinned))
    words = ["--requirement", str(wanted), "--no-deps", "--disable-pip", "--progress-spinner", "off"]
    command = [str(PLACE / "bin" / "pip-audit"), *words, "--format", "json", "--vulnerability-service", service]
    done = subprocess.run(command, capture_output=True, text=True)
    try:
        return read(json.loads(done.stdout))
    except json.JSONDecodeError:
        reason = (done.stderr.strip().splitlines() or ["no answer"])[-1]
        return Answer(unknown=[f"{service}: {reason}"])


def main() -> int:
    if not (PLACE / "bin" / "pip-audit").exists():
        venv.create(PLACE, with_pip=True)
        pip = [str(PLACE / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, "pip-audit"], check=True)
    pinned, best = pins(), Answer(unknown=["nobody was asked"])
    for service in SERVICES:
        answer = ask(pinned, service)
        print(f"{service}: {len(answer.clean)} of {len(pinned)} packages have no known vulnerability")  # noqa: T201
        if answer.status != 2 or len(answer.clean) >= len(best.clean):
            best = answer
        if best.status != 2:
            break
    for line in best.vulnerable or best.unknown[:SHOWN]:
        print(line)  # noqa: T201
    if best.status == 2:
        print(f"NOT AUDITED: no data of {len(pinned) - len(best.clean)} packages")  # noqa: T201
    return best.status


def _line(name: str, vulnerability: Any) -> str:
    names = [vulnerability["id"], *vulnerability.get("aliases", [])]
    fixed = ", ".join(vulnerability["fix_versions"]) or "no version yet"
    return f"{name}: {' '.join(names)}, fixed in {fixed}"


if __name__ == "__main__":
    sys.exit(main())
