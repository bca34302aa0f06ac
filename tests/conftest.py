"""Property tests are not timed, and try the same examples every time."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("tests", deadline=None, derandomize=True)
settings.load_profile("tests")
