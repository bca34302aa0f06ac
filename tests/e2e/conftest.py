"""What is costly to make and never changed: once for all files."""

from __future__ import annotations

import pytest

from tests.e2e.adapted import Adapted


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Adapted:
    """A base model with adapters."""
    return Adapted.made(tmp_path_factory.mktemp("adapted"))
