"""A deployment left alone, with mixed traffic, adapters that change and workers that are killed: what becomes of it.

Two prefill and two decode workers and a router, each a process, share the cores that this command may use with the
callers and with what starts again who has died. Rounds of traffic and kills end in a rest, in which nothing may be
held any more. Workers compute in deterministic mode, so that every answer is known beforehand, from one process.

    requests that complete   at least 95 %; those that callers leave, or that are wrong on purpose, are not among them
    failures                 typed, all of them
    answers that differ      none
    pages left at a rest     none
    memory, descriptors, threads, tasks of the router, and of workers that lived   flat after the warm-up

The exit status is 1 when a goal is missed. `--model tiny` (and --quick) serves a small random model: many more
requests, and the same code.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from openai import AsyncOpenAI

from benchmarks.checkpoints import add_tokenizer, random_adapter, tiny_checkpoint
from benchmarks.report import Figure, make_parser, report
from benchmarks.soak_adapters import Changes
from benchmarks.soak_house import House, open_house, toml
from benchmarks.soak_questions import SMOLLM2, TINY, VERSIONS, Baseline, Question, Sizes, make
from benchmarks.soak_traffic import COMPLETE, DIFFERENT, FAILED, LEFT, REFUSED, UNTYPED, Callers, Doors, Outcome
from benchmarks.soak_watch import MIB, Sample, Watch
from benchmarks.systems import run_until_done
from pdserve.client import AsyncClient
from pdserve.engine.load import load_model, model_path
from pdserve.tokenizer import Tokenizer, load_bundle

COMPLETE_GOAL = 0.95
KEYS = {name: f"{name}-key-of-the-soak" for name in ("amber", "birch", "cedar")}
OPERATOR = "amber"
HELD = ("descriptors", "threads", "tasks")
REST_S = 90.0  # for what is held to go back: leases are 60 seconds
SETTLE_S = 7.0  # for connections that nobody uses to be closed
MAX_SHOWN = 8


@dataclass(frozen=True)
class Rest:
    """A moment at which nothing should be held."""

    at: float
    pages: int  # still held
    waited_s: float
    faults: tuple[str, ...]
    samples: dict[str, Sample]  # by life
    tasks: dict[str, int]  # of the event loop, by life

    def held(self, life: str, name: str) -> int:
        """Of one process, how many of one of HELD."""
        sample = self.samples[life]
        return {"descriptors": sample.descriptors, "threads": sample.threads, "tasks": self.tasks[life]}[name]


@dataclass
class Soak:
    """All that was seen."""

    outcomes: list[Outcome] = field(default_factory=list)
    rests: list[Rest] = field(default_factory=list)
    began: float = 0.0
    ended: float = 0.0

    def count(self, *ends: str) -> int:
        return sum(outcome.end in ends for outcome in self.outcomes)


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
    samples = {life: mine[-1] for life in house.lives if (mine := watch.samples.get(life))}
    tasks = await house.tasks(operator, KEYS[OPERATOR])
    return Rest(time.monotonic(), sum(held.values()), waited_s, faults, samples, tasks)


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
        seen.began = time.monotonic()
        for _ in range(options.rounds):
            resting = asyncio.Event()
            asyncio.get_running_loop().call_later(options.round_s, resting.set)
            async with asyncio.TaskGroup() as group:
                group.create_task(callers.ask_until(resting))
                group.create_task(changes.change_until(resting, drawn, options.change_s))
                group.create_task(house.kill_until(resting, drawn, options.pause_s, operator, changes.restore))
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


def figures_of(seen: Soak, watch: Watch, house: House, changes: Changes) -> list[Figure]:
    asked = seen.count(COMPLETE, FAILED, DIFFERENT)
    failures = [outcome for outcome in seen.outcomes if outcome.end == FAILED]
    untyped = sum(outcome.reason == UNTYPED for outcome in failures)
    per_minute = 60 * sum(outcome.began >= seen.began for outcome in seen.outcomes) / (seen.ended - seen.began)
    figures = [
        Figure("requests", len(seen.outcomes), "requests"),
        Figure("requests per minute", per_minute, "per minute"),
        Figure("complete, of those that were to complete", seen.count(COMPLETE) / asked, "share", goal=COMPLETE_GOAL),
        Figure("left early by callers, as far as they came right", seen.count(LEFT), "requests"),
        Figure("refused as due", seen.count(REFUSED), "requests"),
        Figure("failed", len(failures), "requests"),
        Figure("failed without a typed error", untyped, "requests", goal=0, at_most=True),
        Figure("answers that differ from one process", seen.count(DIFFERENT), "requests", goal=0, at_most=True),
        Figure("tokens checked", sum(outcome.tokens for outcome in seen.outcomes), "tokens"),
        Figure("kills", len(house.kills), "kills"),
        Figure("slowest victim to be ready again", max((k.ready_after_s for k in house.kills), default=0.0), "s"),
        Figure("workers that ended unasked", len(house.unasked), "workers", goal=0, at_most=True),
        Figure("changes of adapters", changes.done, "changes"),
        Figure("pages held at a rest", max(each.pages for each in seen.rests), "pages", goal=0, at_most=True),
        Figure("books that do not agree", sum(len(r.faults) for r in seen.rests), "workers", goal=0, at_most=True),
        Figure("longest wait for a rest", max(each.waited_s for each in seen.rests), "s"),
    ]
    figures += [Figure(f"failed: {reason}", count, "requests") for reason, count in reasons(failures).items()]
    return figures + growths(seen, watch)


def reasons(failures: Sequence[Outcome]) -> Counter[str]:
    return Counter(outcome.reason for outcome in failures)


def growths(seen: Soak, watch: Watch) -> list[Figure]:
    """Of the router, and the worst of the workers that lived long enough."""
    figures = []
    for title, mine in (("router", True), ("workers", False)):
        lives = [life for life in watch.samples if life.startswith("router") is mine]
        grown = [found for life in lives if (found := watch.grown(life)) is not None]
        figures.append(Figure(f"{title}: lives long enough to judge", len(grown), "processes"))
        if grown:
            worst = max(grown, key=lambda each: each.sure)
            figures += [
                Figure(f"{title}: memory", worst.level / MIB, "MiB"),
                Figure(f"{title}: growth of memory", worst.slope / MIB, "MiB/min"),
                Figure(f"{title}: its bound (95 %)", worst.bound / MIB, "MiB/min"),
                Figure(f"{title}: sure growth in ten minutes", 10 * worst.sure, "share", goal=0.02, at_most=True),
            ]
        for name in HELD:
            more = [growth for life in lives if (growth := _more(seen.rests, life, name)) is not None]
            if more:
                figures.append(Figure(f"{title}: more {name} at the last rest", max(more), name, goal=4, at_most=True))
    return figures


def _more(rests: Sequence[Rest], life: str, name: str) -> int | None:
    """At the last rest that a process saw than at its first one after the warm-up; None where it saw too few."""
    mine = [each.held(life, name) for each in rests[1:] if life in each.samples and life in each.tasks]
    return mine[-1] - mine[0] if len(mine) > 1 else None


def summary(seen: Soak, house: House, changes: Changes) -> None:
    """What a reader wants to know besides the figures, on standard error."""
    kinds = Counter((outcome.kind, outcome.end) for outcome in seen.outcomes)
    for (kind, end), count in sorted(kinds.items()):
        print(f"{kind:14} {end:14} {count:6}", file=sys.stderr)
    for way in sorted({kill.way for kill in house.kills}):
        took = [kill.ready_after_s for kill in house.kills if kill.way == way]
        print(f"{way}: {len(took)}, ready again after {statistics.median(took):.1f} s (median)", file=sys.stderr)
    wrong = [outcome for outcome in seen.outcomes if outcome.end in (FAILED, DIFFERENT)]
    for outcome in wrong[:MAX_SHOWN]:
        at = outcome.began - seen.began
        told = f"at {at:.1f} s, for {outcome.ended - outcome.began:.1f} s, {outcome.kind} by {outcome.door}"
        print(f"{outcome.end} {told}: {outcome.reason} {outcome.text[:600]}", file=sys.stderr)
    for text in (*house.unasked[:MAX_SHOWN], *changes.refused[:MAX_SHOWN]):
        print(text, file=sys.stderr)
    for kill in house.kills:
        told = f"{kill.way} {kill.victim}, ready after {kill.ready_after_s:.1f} s"
        print(f"{kill.at - seen.began:7.1f} s {told}", file=sys.stderr)


async def measure(options: argparse.Namespace, questions: Sequence[Question]) -> list[Figure]:
    async with open_house(config(options.model, options.adapters, options.sizes), options.logs) as house:
        seen, watch, changes = await soak(options, house, questions)
        summary(seen, house, changes)
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
