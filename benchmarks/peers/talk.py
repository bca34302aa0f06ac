"""The peer's end of the pipe: one JSON object a line in, one a line out. Standard library only, as it runs in any
peer's environment.

    {"do": "decode", "steps": 32}  ->  {"value": 0.71}  or  {"error": "ValueError: ..."}
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from typing import TypeVar

Command = Callable[..., object]
T = TypeVar("T")


def serve(load: Callable[[], Mapping[str, Command]]) -> None:
    """Loads the peer, says so, then answers commands until standard input ends.

    What the peer prints goes to standard error: standard output belongs to the answers. Between two
    commands the process blocks on its input, so it takes no processor time unless the peer's own threads do.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(**fields: object) -> None:
        print(json.dumps(fields), file=answers, flush=True)

    commands = _attempt(load, answer)
    if commands is None:
        return
    answer(value="ready")
    for line in sys.stdin:
        request = json.loads(line)
        command = commands[request.pop("do")]
        made = _attempt(lambda command=command, request=request: (command(**request),), answer)  # type: ignore[misc]
        if made is not None:
            answer(value=made[0])


def _attempt(work: Callable[[], T], answer: Callable[..., None]) -> T | None:
    """The boundary to foreign code: whatever it raises becomes the answer."""
    try:
        return work()
    except Exception as error:  # noqa: BLE001
        traceback.print_exc()
        answer(error=f"{type(error).__name__}: {error}")
        return None
