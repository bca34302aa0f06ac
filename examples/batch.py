"""Answers a file of prompts, shows how far it is, and goes on where it was when started again.

    python examples/batch.py prompts.jsonl answers.jsonl                     pools of its own on this machine
    python examples/batch.py prompts.jsonl answers.jsonl --gateway HOST:PORT
    ray job submit --address http://HEAD:8265 --working-dir . -- \\
        python examples/batch.py prompts.jsonl answers.jsonl --config pdserve.toml

Each line of the input is an object: `id`; one of `prompt`, `messages` and `token_ids`; and any option of
`pdserve.client.AsyncClient.complete`, such as `max_tokens`. Each line of the output has the `id`, and either
`text`, `token_ids`, `finish` and the number of tokens, or `error`. Lines come as they are done; started
again, what has an answer is not asked for again, and what failed is. A router with tenants wants a key of theirs in
PDSERVE_API_KEY.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from pdserve.cli.deployment import Deployment
from pdserve.client import AsyncClient
from pdserve.config import load_config
from pdserve.errors import InvalidRequest, PdserveError
from pdserve.rpc.settings import RpcSettings

Row = dict[str, Any]
PARTS = 20  # without a terminal: a line each time so much more is done


def main() -> int:
    options = arguments()
    try:
        rows = read_rows(options.input)
        done = read_done(options.output)
        todo = [row for row in rows if row["id"] not in done]
        print(f"{len(rows)} prompts, {len(rows) - len(todo)} answered before", file=sys.stderr)
        if not todo:
            return 0
        with gateway(options) as (address, rpc), options.output.open("a") as output:
            failed = asyncio.run(answer_all(todo, output, address, rpc, options.concurrency))
    except PdserveError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if failed:
        print(f"{failed} prompts failed; start again to try them again", file=sys.stderr)
    return 1 if failed else 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Answer a file of prompts.")
    parser.add_argument("input", type=Path, help="JSON lines")
    parser.add_argument("output", type=Path, help="JSON lines; what is in it is kept")
    parser.add_argument("--gateway", help="host:port; without it, pools are started and stopped")
    parser.add_argument("--config", type=Path, help="TOML file for pools of its own, and for [rpc]")
    parser.add_argument("--concurrency", type=int, default=32, help="prompts in flight at a time")
    return parser.parse_args()


@contextmanager
def gateway(options: argparse.Namespace) -> Iterator[tuple[str, RpcSettings]]:
    """A running one, or pools of our own: in a Ray job on the job's cluster, else on a local one."""
    config = load_config(options.config, {} if options.config else {"router": {"port": 0, "http_port": 0}})
    if options.gateway:
        yield options.gateway, config.router.rpc
        return
    with Deployment(config, options.config, lambda text: print(text, file=sys.stderr)) as running:
        yield running.gateway, config.router.rpc


def read_rows(path: Path) -> list[Row]:
    """Raises InvalidRequest naming the line that is no prompt."""
    rows = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        try:
            row = json.loads(line)
            known = isinstance(row, dict) and "id" in row and len({"prompt", "messages", "token_ids"} & set(row)) == 1
        except json.JSONDecodeError:
            known = False
        if not known:
            raise InvalidRequest(
                "is not a prompt",
                field=f"{path}:{number}",
                remedy='write {"id": ..., "prompt": ...}; `messages` or `token_ids` may take the place of `prompt`',
            )
        rows.append(row)
    return rows


def read_done(path: Path) -> set[Any]:
    """Ids that have an answer. A last line that was cut short is taken off the file."""
    if not path.exists():
        return set()
    data = path.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    if len(whole) < len(data):
        path.write_bytes(whole)
    rows = [json.loads(line) for line in whole.splitlines()]
    return {row["id"] for row in rows if "error" not in row}


async def answer_all(todo: Sequence[Row], output: IO[str], address: str, rpc: RpcSettings, concurrency: int) -> int:
    """Writes a line per prompt as each is done. Returns how many failed."""
    waiting, failed = iter(todo), 0
    with show_progress(len(todo)) as step:
        key = os.environ.get("PDSERVE_API_KEY", "")
        async with AsyncClient(address, rpc, api_key=key) as client, asyncio.TaskGroup() as group:

            async def work() -> None:
                nonlocal failed
                for row in waiting:
                    answer = await answer_one(client, row)
                    output.write(json.dumps(answer) + "\n")
                    output.flush()
                    failed += "error" in answer
                    step()

            for _ in range(min(concurrency, len(todo))):
                group.create_task(work())
    return failed


async def answer_one(client: AsyncClient, row: Row) -> Row:
    asked = {key: value for key, value in row.items() if key != "id"}
    try:
        done = await client.complete(asked.pop("prompt", None), **asked)
    except PdserveError as error:
        return {"id": row["id"], "error": str(error)}
    return {
        "id": row["id"],
        "text": done.text,
        "token_ids": list(done.ids),
        "finish": done.finish.reason,
        "prompt_tokens": done.usage.prompt_tokens,
        "output_tokens": done.usage.output_tokens,
    }


@contextmanager
def show_progress(total: int) -> Iterator[Any]:
    """A bar on a terminal, lines elsewhere, such as in the log of a job."""
    console = Console(stderr=True)
    if console.is_terminal:
        columns = (TextColumn("answered"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=console) as bar:
            task = bar.add_task("", total=total)
            yield lambda: bar.advance(task)
        return
    done = 0

    def step() -> None:
        nonlocal done
        done += 1
        if done * PARTS // total > (done - 1) * PARTS // total:
            print(f"answered {done} of {total}", file=sys.stderr, flush=True)

    yield step


if __name__ == "__main__":
    sys.exit(main())
