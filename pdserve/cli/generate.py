"""`pdserve generate`: one prompt in, text out, through a running deployment or in this process."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from typing import Any

from pdserve.cli.ask import Ask, ask_gateway, ask_local, rpc_settings
from pdserve.cli.console import err, show_logprobs, show_record, write
from pdserve.cli.flags import grouped
from pdserve.cli.generate_flags import DoorFlags, PromptFlags, SamplingFlags
from pdserve.client import Accepted, Event, Finish, HandoffRecord, Tokens
from pdserve.client.events import whole_calls
from pdserve.request import check_choices
from pdserve.rpc.events import PositionLogprobs, ToolCallPart

_EVENT_NAMES = {Accepted: "accepted", Tokens: "tokens", HandoffRecord: "handoff_record", Finish: "finish"}


@grouped(PromptFlags, SamplingFlags, DoorFlags)
def generate(prompt: PromptFlags, sampling: SamplingFlags, door: DoorFlags) -> None:
    """Ask a model and stream its answer.

    \b
    pdserve generate --chat "What is the capital of France?" --temperature 0
    echo "Once upon a time" | pdserve generate --max-tokens 40 --seed 7
    pdserve generate --token-ids 1,2,3 --ignore-eos --max-tokens 8 --json
    pdserve generate --local "def fib(n):" --max-tokens 60
    pdserve generate "Is it late in Oslo?" --tools tools.json --tool-choice required
    """
    params = sampling.params()
    check_choices(door.n)
    ask = Ask(
        n=door.n,
        sampling=params,
        unset=sampling.unset,
        model=door.model,
        want_record=door.record,
        timeout_s=door.timeout_s,
        **prompt.ask(),
    )
    if door.local:
        events = ask_local(ask, door.config)
    else:
        events = ask_gateway(ask, door.gateway, door.api_key, rpc_settings(door.tls, door.plaintext))
    show_events(events if ask.outputs == 1 or door.as_json else one_by_one(events), as_json=door.as_json)


def one_by_one(events: Iterable[Event]) -> Iterator[Event]:
    """Of several answers each as a whole, under its number, before its end."""
    texts: dict[int, list[Tokens]] = {}
    for event in events:
        if isinstance(event, Tokens):
            texts.setdefault(event.choice, []).append(event)
            continue
        if isinstance(event, Finish):
            yield Tokens(0, (), f"[{event.choice}] ")
            yield from texts.pop(event.choice, ())
        yield event


def show_events(events: Iterable[Event], *, as_json: bool = False) -> None:
    """Streams an answer to standard output; the record and the reason to stop go to standard error."""
    if as_json:
        for event in events:
            write(json.dumps(_event_json(event)) + "\n")
        return
    line = _Line()
    logprobs: list[PositionLogprobs] = []
    calls: list[ToolCallPart] = []
    try:
        for event in events:
            if isinstance(event, Tokens):
                line.write(event.text)
                logprobs += event.logprobs
                calls += event.tool_calls
            elif isinstance(event, HandoffRecord):
                line.end()
                show_record(event)
            elif isinstance(event, Finish):
                line.end(even_if_empty=not calls)
                for call in whole_calls(calls):
                    write(f"{call.name}({call.arguments})\n")
                show_logprobs(logprobs)
                logprobs.clear()
                calls.clear()
                usage = event.usage
                err.print(
                    f"[{event.reason}: {usage.prompt_tokens} prompt, {usage.output_tokens} output tokens]", markup=False
                )
    finally:
        line.end()  # an error, or Ctrl-C, in the middle of it


class _Line:
    """The answer's line on standard output, and whether it is still open."""

    def __init__(self) -> None:
        self._open = self._written = False

    def write(self, text: str) -> None:
        if text:
            write(text)
            self._open = self._written = True

    def end(self, *, even_if_empty: bool = False) -> None:
        if self._open or (even_if_empty and not self._written):
            write("\n")
            self._open = False


def _event_json(event: Event) -> dict[str, Any]:
    return {"event": _EVENT_NAMES[type(event)], **asdict(event)}
