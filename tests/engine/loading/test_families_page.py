"""docs/families.md is right: its example is the code, and its table names what is served."""

from __future__ import annotations

import re
from pathlib import Path

from pdserve.engine import families
from pdserve.engine.families import FAMILIES
from pdserve.engine.family import Family
from pdserve.engine.gguf_families import GGUF_FAMILIES

PAGE = (Path(__file__).parents[3] / "docs" / "families.md").read_text()


def test_the_page_of_data_is_the_family() -> None:
    (block,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    written = eval(block, vars(families))
    assert isinstance(written, Family)
    assert written in FAMILIES


def test_every_family_and_gguf_architecture_is_in_the_table() -> None:
    table = PAGE[PAGE.index("| family |") : PAGE.index("GGUF is read for")].lower()
    plain = re.sub(r"[^a-z0-9]", "", table)
    for family in FAMILIES:
        assert re.sub(r"[^a-z0-9]|_text", "", family.model_type) in plain, family.model_type
    rows = [row.split("|") for row in table.splitlines()[2:] if row]
    told = {re.sub(r"[^a-z0-9]", "", name) for row in rows if row[3].strip() != "no" for name in row[1].split(",")}
    for arch in GGUF_FAMILIES:
        assert any(re.sub(r"[^a-z0-9]", "", arch) in name for name in told), arch
