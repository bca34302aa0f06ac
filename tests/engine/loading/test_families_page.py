"""docs/families.md is right: its example is the code, and its table names what is served."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from transformers.integrations.ggml import GGUF_CONFIG_MAPPING

from pdserve.engine import families
from pdserve.engine.families import FAMILIES
from pdserve.engine.family import Family
from pdserve.engine.gguf_families import GGUF_FAMILIES
from pdserve.engine.load import load_model
from pdserve.errors import CheckpointError
from tests.engine.loading import peers
from tests.engine.loading.gguf_writing import write_gguf

PAGE = (Path(__file__).parents[3] / "docs" / "families.md").read_text()
_REFUSED = PAGE[PAGE.index("| architecture in the file |") : PAGE.index("Multimodal Gemma 3")]
# The first column, as `general.architecture` has them.
NOT_SERVED = [name for row in _REFUSED.splitlines()[2:] if row for name in re.findall(r"`(.*?)`", row.split("|")[1])]


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def test_the_page_of_data_is_the_family() -> None:
    (block,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    written = eval(block, vars(families))
    assert isinstance(written, Family)
    assert written in FAMILIES


def test_every_family_and_gguf_architecture_is_in_the_table() -> None:
    table = PAGE[PAGE.index("| family |") : PAGE.index("GGUF is read for")].lower()
    plain = _plain(table)
    for family in FAMILIES:
        assert _plain(family.model_type) in plain, family.model_type
    rows = [row.split("|") for row in table.splitlines()[2:] if row]
    told = {_plain(name) for row in rows if row[3].strip() != "no" for name in row[1].split(",")}
    for arch in GGUF_FAMILIES:
        assert any(_plain(arch) in name for name in told), arch


def test_the_page_says_of_every_gguf_architecture_that_the_peer_reads_whether_it_is_served() -> None:
    """A newer peer that reads more, or less, fails here until somebody has looked at it."""
    not_architectures = {"general", "tokenizer"}  # further sections of the peer's mapping
    served = {*GGUF_FAMILIES, "mistral"}  # the peer's name for Mistral's files, which are of architecture llama
    ours, refused = {_plain(name) for name in served}, {_plain(name) for name in NOT_SERVED}
    assert not ours & refused
    assert ours | refused == {_plain(name) for name in GGUF_CONFIG_MAPPING if name not in not_architectures}


@pytest.mark.parametrize("name", NOT_SERVED)
def test_unknown_gguf_architecture_is_refused_by_name(name: str, tmp_path: Path) -> None:
    path = write_gguf(peers.make_peer("llama"), tmp_path / "tiny.gguf", architecture=name)
    with pytest.raises(CheckpointError, match=f"is of architecture {re.escape(name)}") as caught:
        load_model(path, "fp32")
    assert (caught.value.reason, caught.value.field) == ("UNKNOWN_ARCHITECTURE", "general.architecture")
