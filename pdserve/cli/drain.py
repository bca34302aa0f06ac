"""`pdserve drain`: for the hook that a container runs before Ray is told to stop."""

from __future__ import annotations

import asyncio
from typing import Annotated

import typer

from pdserve.cli.console import out
from pdserve.drain import drain_all
from pdserve.errors import DeadlineExceeded


def drain(
    timeout_s: Annotated[float, typer.Option(help="Seconds that the workers get, all together.")] = 60.0,
) -> None:
    """Drain the workers that Ray runs here: they leave the registry, finish what they have, and take nothing new."""
    drained, late = asyncio.run(drain_all(timeout_s))
    if late:
        raise DeadlineExceeded(
            f"workers that have not drained within {timeout_s:g} s: {late} of {drained + late}",
            field="timeout_s",
            remedy="give more time with --timeout-s, more than their grace_s",
        )
    out.print(f"workers drained: {drained}")
