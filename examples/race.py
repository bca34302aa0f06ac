"""Several answers at once with the asyncio client: the first one wins, and the others are cancelled.

.venv/bin/pdserve up &                  # wait for "ready:"
.venv/bin/python examples/race.py "Name an animal that can fly."
"""

from __future__ import annotations

import argparse
import asyncio

from pdserve.client import AsyncClient, Completion
from pdserve.errors import PdserveError


async def main() -> None:
    parser = argparse.ArgumentParser(description="Ask the same with several seeds, and take the first answer.")
    parser.add_argument("question")
    parser.add_argument("--gateway", default="127.0.0.1:8470", help="host:port")
    parser.add_argument("--runners", type=int, default=4, help="answers that are begun")
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds for all of it")
    options = parser.parse_args()

    async with AsyncClient(options.gateway) as client:
        try:
            async with asyncio.timeout(options.timeout):
                seed, answer = await first(client, options.question, options.runners)
        except TimeoutError:
            print(f"no answer within {options.timeout:g} s; all of them are cancelled")
        else:
            print(f"seed {seed} was first: {answer.text.strip()}")


async def first(client: AsyncClient, question: str, runners: int) -> tuple[int, Completion]:
    """The answer that is whole first, and its seed. Raises PdserveError if one fails before that."""
    messages = [{"role": "user", "content": question}]

    async def run(seed: int) -> tuple[int, Completion]:
        return seed, await client.complete(messages=messages, temperature=0.5, seed=seed, max_tokens=200)

    tasks = [asyncio.create_task(run(seed)) for seed in range(runners)]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return done.pop().result()
    finally:
        # Cancelling a task cancels its call: router, prefill and decode stop, and their pages are free again.
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


if __name__ == "__main__":
    try:
        asyncio.run(main())
    except PdserveError as error:
        raise SystemExit(f"error: {error}") from None
