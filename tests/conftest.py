"""Property tests are not timed, and try the same examples every time. Some folders are marked as `alone`."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import settings

settings.register_profile("tests", deadline=None, derandomize=True)
settings.load_profile("tests")

HERE = Path(__file__).parent

# These start Ray clusters or measure: beside other tests they would be slow, not wrong, and run into their limits.
ALONE = {"benchmarks", "cli", "ray"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.relative_to(HERE).parts[0] in ALONE:
            item.add_marker(pytest.mark.alone)
