"""A deployment left alone, with mixed traffic, adapters that change and workers that are killed: what becomes of it.

Two prefill and two decode workers and a router, each a process, share the cores that this command may use with the
callers and with what starts again who has died. Rounds of traffic and kills end in a rest, in which nothing may be
held any more. Workers compute in deterministic mode, so that every answer is known beforehand, from one process.

    requests that complete   at least 95 %; those that callers leave, or that are wrong on purpose, are not among them
    failures                 typed, all of them
    answers that differ      none
    pages left at a rest     none
    idle rings at a rest     as many as a prefill worker keeps
    memory, descriptors, threads, tasks of the router, and of workers that lived   flat after the warm-up

The exit status is 1 when a goal is missed. `--model tiny` (and --quick) serves a small random model: many more
requests, and the same code. `--spare p1 d1` never kills these: they see their peers die again and again.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from openai import AsyncOpenAI

from benchmarks.checkpoints import add_tokenizer, random_adapter, tiny_checkpoint
from benchmarks.report import Figure, make_parser, report
from benchmarks.soak_adapters import Changes
from benchmarks.soak_figures import Rest, Soak, figures_of, summary
from benchmarks.soak_house import WORKERS, House, open_house, toml
from benchmarks.soak_questions import SMOLLM2, TINY, VERSIONS, Baseline, Question, Sizes, make
from benchmarks.soak_traffic import Callers, Doors
from benchmarks.soak_watch import Watch
from benchmarks.systems import run_until_done
from pdserve.client import AsyncClient
from pdserve.engine.load import load_model, model_path
from pdserve.tokenizer import Tokenizer, load_bundle

KEYS = {name: f"{name}-key-of-the-soak" for name in ("amber", "birch", "cedar")}
OPERATOR = "amber"
REST_S = 90.0  # for what is held to go back: leases are 60 seconds
SETTLE_S = 7.0  # for connections that nobody uses to be closed


def config(model: Path, adapters: Path, sizes: Sizes) -> str:
    tables: dict[str, dict[str, object]] = {
        "model": {"path": str(model), "name": "soak", "adapter_root": str(adapters)},
        "engine": {"dtype": "fp32", "pages": sizes.pages, "deterministic": True, "threads": 1},
        "router": {"operators": [OPERATOR], "port": 0, "http_port": 0},
        "prefill": {"grace_s": 10.0},
        "decode": {"grace_s": 10.0},
    }
    tenants = [f'[[router.tenants]]\nname = "{name}"\nkeys = ["{key}"]\n' for name, key in KEYS.items()]
    return toml(tables) + "\n".join(tenants)


@asynccontextmanager
async def doors_of(house: House) -> AsyncIterator[list[Doors]]:
    async with AsyncExitStack() as stack:
        made = []
        for tenant, key in KEYS.items():
            grpc = await stack.enter_async_context(AsyncClient(house.grpc, api_key=key))
            url = f"http://{house.http}/v1"
            http = await stack.enter_async_context(AsyncOpenAI(base_url=url, api_key=key, max_retries=0))
            made.append(Doors(tenant, grpc, http, "soak"))
        yield made


async def rest(house: House, watch: Watch, operator: AsyncClient) -> Rest:
    """Waits until nothing is held, at most REST_S."""
    began = time.monotonic()
    while True:
        accounts = await house.accounts()
        held = {life: each.pages_held for life, each in accounts.items() if each.holdings or each.pages_held}
        if not held or time.monotonic() - began > REST_S:
            break
        await asyncio.sleep(0.25)
    waited_s = time.monotonic() - began
    await asyncio.sleep(SETTLE_S)
    for life in held:
        print(f"{life} still holds {accounts[life].holdings}", file=sys.stderr)
    faults = tuple(f"{life}: {each.fault}" for life, each in accounts.items() if not each.intact)
    tasks = await house.tasks(operator, KEYS[OPERATOR])
    rings = {life: mine[-1].rings for life in house.lives if (mine := watch.samples.get(life))}
    return Rest(time.monotonic(), sum(held.values()), waited_s, faults, tasks, rings)


async def soak(options: argparse.Namespace, house: House, questions: Sequence[Question]) -> tuple[Soak, Watch, Changes]:
    seen, watch = Soak(), Watch(lambda: house.lives, every_s=1.0 if options.quick else 3.0)
    async with doors_of(house) as doors:
        operator = next(each.grpc for each in doors if each.tenant == OPERATOR)
        changes = Changes(operator, options.adapters)
        callers = Callers(doors, questions, options.clients, options.think_s, options.seed, changes.serves)
        seen.outcomes = callers.outcomes
        await house.all_here(operator)
        house.keep_all()
        await changes.restore()
        watching = asyncio.create_task(watch.run())
        await callers.ask_each()
        print(f"{len(callers.outcomes)} questions to warm up", file=sys.stderr, flush=True)
        seen.rests.append(await rest(house, watch, operator))
        drawn = random.Random(options.seed)
        victims = [name for name in WORKERS if name not in options.spare]
        seen.began = time.monotonic()
        for _ in range(options.rounds):
            resting = asyncio.Event()
            asyncio.get_running_loop().call_later(options.round_s, resting.set)
            async with asyncio.TaskGroup() as group:
                group.create_task(callers.ask_until(resting))
                group.create_task(changes.change_until(resting, drawn, options.change_s))
                group.create_task(house.kill_until(resting, drawn, options.pause_s, victims, operator, changes.restore))
            seen.rests.append(await rest(house, watch, operator))
            say(seen, house)
        seen.ended = time.monotonic()
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
    return seen, watch, changes


def say(seen: Soak, house: House) -> None:
    last = seen.rests[-1]
    ends = Counter(outcome.end for outcome in seen.outcomes)
    told = ", ".join(f"{count} {end}" for end, count in ends.most_common())
    print(
        f"{last.at - seen.began:6.0f} s: {told}; {len(house.kills)} kills; at rest after {last.waited_s:.1f} s",
        file=sys.stderr,
        flush=True,
    )


async def measure(options: argparse.Namespace, questions: Sequence[Question]) -> list[Figure]:
    async with open_house(config(options.model, options.adapters, options.sizes), options.logs) as house:
        seen, watch, changes = await soak(options, house, questions)
        summary(seen, watch, house, changes)
        if options.logs:
            watch.write(options.logs / "samples.json", seen.began)
        return figures_of(seen, watch, house, changes)


def prepare(options: argparse.Namespace, folder: Path) -> list[Question]:
    """The checkpoint and its adapters, and every question with its answer."""
    if options.model == "tiny":
        tiny_checkpoint(folder / "model")
        add_tokenizer(folder / "model")
        options.model, options.sizes = folder / "model", TINY
    else:
        options.model, options.sizes = model_path(options.model), SMOLLM2
    options.adapters = folder / "adapters"
    spec = load_model(options.model, "fp32").spec
    for seed, version in enumerate(version for versions in VERSIONS.values() for version in versions):
        random_adapter(options.adapters / version, spec, seed)
    bundle = load_bundle(options.model)
    if bundle is None:
        raise SystemExit(f"{options.model} has no tokenizer")
    began = time.monotonic()
    questions = Baseline(options.model, options.adapters).answered(
        list(make(options.sizes, Tokenizer(bundle), options.seed))
    )
    print(f"{len(questions)} questions answered by one process in {time.monotonic() - began:.0f} s", file=sys.stderr)
    return questions


def parse() -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument("--minutes", type=float, help="of traffic (default: 20; --quick: 0.5)")
    parser.add_argument("--model", help="checkpoint, or tiny (default: smollm2; --quick: tiny)")
    parser.add_argument("--clients", type=int, default=6, help="callers at a time")
    parser.add_argument("--think-s", type=float, default=0.2, help="mean seconds from an answer to the next question")
    parser.add_argument("--pause-s", type=float, default=4.0, help="mean seconds from a victim's return to the next")
    parser.add_argument("--spare", nargs="*", default=[], choices=WORKERS, help="workers that are never killed")
    parser.add_argument("--change-s", type=float, default=6.0, help="mean seconds between changes of adapters")
    parser.add_argument("--round-s", type=float, default=100.0, help="seconds from one rest to the next")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--logs", type=Path, metavar="FOLDER", help="keep what the processes print")
    options = parser.parse_args()
    options.minutes = options.minutes or (0.5 if options.quick else 20.0)
    options.model = options.model or ("tiny" if options.quick else "smollm2")
    options.rounds = max(1, round(60 * options.minutes / options.round_s))
    options.round_s = 60 * options.minutes / options.rounds
    return options


def main() -> None:
    options = parse()
    with tempfile.TemporaryDirectory(prefix="pdserve-soak-") as folder:
        questions = prepare(options, Path(folder))
        figures = run_until_done(measure(options, questions))
    report(figures, options.json)
    sys.exit(any(figure.met is False for figure in figures))


if __name__ == "__main__":
    main()
