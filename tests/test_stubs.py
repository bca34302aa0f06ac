import re

from tests.stubs import ROOT, stale_stubs


def test_generated_stubs_are_current() -> None:
    assert stale_stubs() == []


def test_every_field_of_the_schema_says_what_it_means() -> None:
    field = re.compile(r"^\s+(?:optional |repeated )?[\w.<>, ]+ \w+ = \d+;")
    silent = []
    for path in sorted((ROOT / "proto").rglob("*.proto")):
        before = ""
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if field.match(line) and "//" not in line and not before.strip().startswith("//"):
                silent.append(f"{path.name}:{number}: {line.strip()}")
            before = line
    assert not silent
