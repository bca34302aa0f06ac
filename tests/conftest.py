"""Property tests are not timed, and try the same examples every time. Some folders are marked as `alone`."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import settings

# Ray reads it when it is imported: a late call of one of its threads would start a cluster that nobody ends.
os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"

settings.register_profile("tests", deadline=None, derandomize=True)
settings.load_profile("tests")

HERE = Path(__file__).parent

# These start Ray clusters or measure: beside other tests they would be slow, not wrong, and run into their limits.
ALONE = {"benchmarks", "cli", "ray"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.relative_to(HERE).parts[0] in ALONE:
            item.add_marker(pytest.mark.alone)
