"""Comparisons of tiny models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pdserve.engine.plan import EngineConfig
from pdserve.verify.compare import Comparison
from pdserve.verify.run import Request, verify
from pdserve.verify.sides import Side, parse_side
from tests.engine.tiny import prompt

PROMPTS = (prompt(9, 1, 61), prompt(4, 2, 61), prompt(22, 3, 61), prompt(1, 4, 61))


def sides(*texts: str, **engine: Any) -> list[Side]:
    """The first is the baseline; pages of 4 tokens and plain kernels unless `engine` says otherwise."""
    base = parse_side(texts[0], Side("", engine=EngineConfig(**{"page_size": 4, "kernels": "plain", **engine})))
    return [base, *(parse_side(text, base) for text in texts[1:])]


def compared(*texts: str | Path, ids: Any = PROMPTS, **request: Any) -> tuple[Comparison, ...]:
    comparisons, _ = verify(sides(*map(str, texts)), Request(ids=ids, **request))
    return comparisons
