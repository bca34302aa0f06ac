"""How the product may wait."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.test_imports import modules


def calls(path: Path) -> set[str]:
    found = [node.func for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    return {ast.unparse(function) for function in found}


@pytest.mark.parametrize("path", [path for _, path in modules()], ids=[name for name, _ in modules()])
def test_no_wait_swallows_a_cancellation(path: Path) -> None:
    """Before Python 3.12, asyncio.wait_for returns as if nothing were when the result and a cancellation meet."""
    assert not {"asyncio.wait_for", "wait_for"} & calls(path), "use asyncio.timeout"
