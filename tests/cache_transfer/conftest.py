"""What transfers' tests share: one torch thread, and a look at the memory that is left."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch


@pytest.fixture(autouse=True, scope="package")
def one_thread() -> Iterator[None]:
    """More only wait for each other with tiny models."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def no_shared_memory_is_left() -> Iterator[None]:
    yield
    links = [os.readlink(each) for each in Path("/proc/self/fd").iterdir() if each.is_symlink()]
    assert not [link for link in links if "pdserve-handoff" in link or "by-hand" in link]
    assert "pdserve-handoff" not in Path("/proc/self/maps").read_text()
