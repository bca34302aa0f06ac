"""Tokens per second of the engine against `transformers`, vLLM and llama.cpp: same weights, threads and machine.

    decode    each sequence gets one token per step, greedily, after a prefill of the given length
    prefill   one prompt, in the chunks that a prefill worker uses
    ragged    sequences of mixed lengths against as many equal ones with the same sum: no peer but ourselves
    int8      decode with weight-only int8 against llama.cpp's Q4_1, and what int8 does to the logits

bf16 on both sides but for int8. Rounds alternate, the best of each side counts, and a peer sleeps while others
are measured; how fast memory can be read is measured in the same rounds. In each round every side decodes the tokens
after those of the round before.

vLLM appears twice: `vllm-library` is `LLM.generate` with its defaults, the engine in a second process, as people use
it: the goals are against this one. `vllm` steps its engine in one process as we do ours. That is the faster and the
stricter peer; it has rows of its own, judged by the same goals.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from benchmarks.checkpoints import tiny_checkpoint as tiny_checkpoint
from benchmarks.engine_cases import FULL, MARGIN, QUICK, Case, Cases
from benchmarks.engine_sides import PAGE_SIZE, PEERS, Limit, Ours, Peer, Side, open_peers
from benchmarks.int8_error import int8_error
from benchmarks.peers.process import PeerError
from benchmarks.report import Figure, make_parser, report
from pdserve.engine.engine import Engine
from pdserve.engine.load import find_smollm2, load_model
from pdserve.engine.plan import EngineConfig

THREADS = 2
SPIN_S = 0.4  # between two sides: OpenMP threads of the one before wait for work by spinning, some for 0.2 s
SECTIONS = ("decode", "prefill", "ragged", "int8")
LABELS = {
    "transformers": "transformers",
    "vllm": "vLLM's engine in one process",
    "vllm-library": "vLLM's LLM.generate",
    "llamacpp": "llama.cpp Q4_1",
}
DECODE_GOALS = {"transformers": 1.5, "vllm": 1.5, "vllm-library": 1.5}
PREFILL_GOAL = 1.15
USED = ("transformers", "vllm-library")  # of which the best is the peer of a prefill
LIMIT_GOAL = 0.6
RAGGED_GOAL = 0.85
INT8_GOAL = 1.0


def open_engine(path: Path, cases: Cases, kernels: str, weights: str = "") -> Engine:
    """In bf16, with room for the largest case; `weights` "int8" quantizes them."""
    need = max(sum(-(-(length + MARGIN) // PAGE_SIZE) for length in case.lengths) for case in cases.all)
    config = EngineConfig(
        dtype="bf16", pages=need, page_size=PAGE_SIZE, threads=THREADS, weights=weights, kernels=kernels
    )
    return Engine(load_model(path, "bf16"), config)


def rates(case: Case, sides: Mapping[str, Side], vocab: int, rounds: int) -> dict[str, float]:
    """Tokens per second of each side, the best of its rounds. A peer that ends has none, and costs nobody else's."""
    print(f"measuring {case.name}", file=sys.stderr, flush=True)
    prompts, sides = case.prompts(vocab), dict(sides)
    best: dict[str, float] = {}

    def seconds(name: str, work: Callable[[Side], float | None]) -> None:
        try:
            took = work(sides[name])
        except PeerError as error:
            print(f"{name} is left out: {error}", file=sys.stderr)
            del sides[name]
            best.pop(name, None)
            return
        if took is not None:
            best[name] = min(best.get(name, took), took)

    for name in tuple(sides):
        seconds(name, lambda side: side.fill(prompts))
    for _ in range(rounds):
        for name in tuple(sides):
            time.sleep(SPIN_S)
            seconds(name, lambda side: side.decode(case.steps) if case.steps else side.prefill(prompts))
    return {name: case.timed_tokens / took for name, took in best.items()}


def measure_decode(
    cases: Cases, ours: Ours, peers: Mapping[str, Peer], engine: Engine, rounds: int, names: Sequence[str]
) -> list[Figure]:
    figures = []
    for case in cases.decode:
        sides: dict[str, Side] = {"ours": ours, **_only(peers, DECODE_GOALS)}
        if case.batch == 1:
            sides["limit"] = Limit(engine.spec, case.step(rounds), THREADS)
        found = rates(case, sides, engine.spec.vocab_size, rounds)
        mine = found["ours"]
        for name, goal in DECODE_GOALS.items():
            if name in names:
                title = f"{case.name}, against {LABELS[name]}"
                figures.append(Figure(title, mine, "tokens/s", found.get(name), goal, relative=True))
        if case.batch == 1:
            title = f"{case.name}, against the bandwidth limit"
            figures.append(Figure(title, mine, "tokens/s", found["limit"], LIMIT_GOAL, relative=True))
    return figures


def measure_prefill(
    cases: Cases, ours: Ours, peers: Mapping[str, Peer], engine: Engine, rounds: int, names: Sequence[str]
) -> list[Figure]:
    figures = []
    for case in cases.prefill:
        found = rates(case, {"ours": ours, **_only(peers, DECODE_GOALS)}, engine.spec.vocab_size, rounds)
        mine = found["ours"]
        used = [name for name in USED if name in found]
        best = max(used, key=lambda name: found[name], default="")
        if set(USED) & set(names):
            title = f"{case.name}, against the best peer" + (f" ({LABELS[best]})" if best else "")
            figures.append(Figure(title, mine, "tokens/s", found.get(best), PREFILL_GOAL, relative=True))
        for name in names:
            if name in DECODE_GOALS and name != best:
                goal = None if name in USED else PREFILL_GOAL
                title = f"{case.name}, against {LABELS[name]}"
                figures.append(Figure(title, mine, "tokens/s", found.get(name), goal, relative=True))
    return figures


def measure_ragged(
    cases: Cases, ours: Ours, peers: Mapping[str, Peer], engine: Engine, rounds: int, names: Sequence[str]
) -> list[Figure]:
    mixed, equal = (rates(case, {"ours": ours}, engine.spec.vocab_size, rounds)["ours"] for case in cases.ragged)
    return [Figure(f"{cases.ragged[0].name}, against equal lengths", mixed, "tokens/s", equal, RAGGED_GOAL)]


def _only(peers: Mapping[str, Peer], names: Mapping[str, object]) -> dict[str, Peer]:
    return {name: peer for name, peer in peers.items() if name in names}


def measure_int8(
    path: Path, cases: Cases, peers: Mapping[str, Peer], rounds: int, plain: Engine, kernels: str
) -> list[Figure]:
    engine = open_engine(path, cases, kernels, "int8")
    sides: dict[str, Side] = {"ours": Ours(engine), **_only(peers, {"llamacpp": 1})}
    figures = []
    for case in cases.decode:
        if case.batch == 1:
            found = rates(case, sides, engine.spec.vocab_size, rounds)
            title = f"int8 {case.name}, against {LABELS['llamacpp']}"
            figures.append(Figure(title, found["ours"], "tokens/s", found.get("llamacpp"), INT8_GOAL, relative=True))
    return figures + int8_error(path, plain, engine)


Section = Callable[[Cases, Ours, Mapping[str, Peer], Engine, int, Sequence[str]], list[Figure]]
BF16_SECTIONS: dict[str, Section] = {"decode": measure_decode, "prefill": measure_prefill, "ragged": measure_ragged}


def measure(
    path: Path, cases: Cases, rounds: int, sections: Sequence[str], names: Sequence[str], kernels: str
) -> list[Figure]:
    opened = names if {"decode", "prefill", "int8"} & set(sections) else ()
    if "int8" not in sections:
        opened = [name for name in opened if name != "llamacpp"]
    peers = open_peers(opened, path, cases.most_tokens, THREADS)
    figures: list[Figure] = []
    try:
        engine = open_engine(path, cases, kernels)
        for name, section in BF16_SECTIONS.items():
            if name in sections:
                figures += section(cases, Ours(engine), peers, engine, rounds, names)
        if "int8" in sections:
            figures += measure_int8(path, cases, peers, rounds, engine, kernels)
    finally:
        for peer in peers.values():
            peer.stop()
    return figures


def parse() -> argparse.Namespace:
    parser = make_parser(__doc__)
    listed = "comma-separated, of: {}"
    parser.add_argument(
        "--only", metavar="SECTIONS", default=",".join(SECTIONS), help=listed.format(", ".join(SECTIONS))
    )
    parser.add_argument("--peers", metavar="NAMES", help=listed.format(", ".join(PEERS)) + "; --quick: transformers")
    parser.add_argument("--kernels", choices=("auto", "native", "plain"), default="native", help="ours")
    parser.add_argument("--rounds", type=int, default=6)
    return parser.parse_args()


def main() -> None:
    options = parse()
    sections = options.only.split(",")
    if options.quick:
        names = (options.peers or "transformers").split(",")
        with tempfile.TemporaryDirectory() as folder:
            figures = measure(tiny_checkpoint(Path(folder)), QUICK, 2, sections, names, options.kernels)
    else:
        names = (options.peers or ",".join(PEERS)).split(",")
        figures = measure(find_smollm2(), FULL, options.rounds, sections, names, options.kernels)
    report(figures, options.json)


if __name__ == "__main__":
    main()
