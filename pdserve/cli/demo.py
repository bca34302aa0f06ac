"""`pdserve demo`: everything once, from nothing to a streamed answer and back to nothing."""

from __future__ import annotations

from typing import Annotated

import typer

from pdserve.cli.ask import Ask, ask_gateway
from pdserve.cli.console import err
from pdserve.cli.deployment import Deployment
from pdserve.cli.generate import show_events
from pdserve.config import load_config
from pdserve.request import SamplingParams

QUESTION = "What is the capital of France?"


def demo(
    question: Annotated[str, typer.Argument(help="What to ask.")] = QUESTION,
    max_tokens: Annotated[int, typer.Option(help="Most output tokens.")] = 80,
) -> None:
    """Start one prefill and one decode worker on a local Ray, ask a question, stop everything."""
    config = load_config(None, {"router": {"port": 0, "http_port": 0}})
    with Deployment(config, None, lambda text: err.print(f"{text} ...")) as deployment:
        err.print(f"\n[bold]{question}[/bold]\n")
        ask = Ask(
            sampling=SamplingParams(temperature=0.0, max_tokens=max_tokens),
            messages=({"role": "user", "content": question},),
            want_record=True,
        )
        show_events(ask_gateway(ask, deployment.gateway))
        err.print("\nstopping ...")
    err.print("nothing is left running. Next: `.venv/bin/pdserve --help`", highlight=False)
