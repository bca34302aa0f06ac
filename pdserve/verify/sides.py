"""What is compared: a side is one way to run the same prompts, written as words joined by commas.

    side    = word {"," word}
    word    = what runs     PATH | smollm2 | transformers | worker:HOST:PORT
            | how exactly   fp32 | bf16 | fp16 | float64 | kv:TYPE | int8 | fast | plain | native | deterministic
            | how stored    page:N | hnd | nhd | device:NAME
            | how cut       whole | chunked[:N]
            | in what way   alone | batched[:N] | reused[:N] | handoff

The first side is the baseline. Any other one takes over from it whatever it does not say itself, so
`smollm2 bf16` compares one checkpoint in two precisions.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from pdserve.engine.plan import EngineConfig
from pdserve.errors import ConfigError
from pdserve.rpc.settings import split_address

ENGINE, PEER, WORKER = "engine", "transformers", "worker"
ALONE, BATCHED, REUSED, HANDOFF = "alone", "batched", "reused", "handoff"
CHUNK = 16  # tokens of `chunked` without a number
BATCH = 4  # sequences of `batched` without a number
PACKAGED = "smollm2"
DTYPES = ("fp32", "bf16", "fp16", "float64")
_SUFFIXES = (".gguf", ".pdmodel", ".safetensors")
_EXAMPLES = (
    *("smollm2", "transformers", "worker:127.0.0.1:7000", "fp32", "bf16", "fp16", "float64", "kv:bf16"),
    *("int8", "fast", "plain", "native", "deterministic", "page:8", "hnd", "nhd", "device:cpu", "whole", "chunked:64"),
    *("alone", "batched:4", "reused", "reused:32", "handoff"),
)


@dataclass(frozen=True)
class Side:
    """One way to run the prompts."""

    text: str  # as it was written
    kind: str = ENGINE  # ENGINE | PEER | WORKER
    model: str = PACKAGED  # checkpoint; of a worker: not used
    address: str = ""  # of a worker
    engine: EngineConfig = field(default_factory=EngineConfig)
    chunk_tokens: int = 0  # of one step; 0: the whole prompt
    way: str = ALONE  # ALONE | BATCHED | REUSED | HANDOFF
    count: int = 0  # BATCHED: sequences; REUSED: tokens found in the cache, 0: as many as can be


def parse_side(text: str, base: Side) -> Side:
    """A side as words on top of `base`. Raises ConfigError naming the word and what would do."""
    words = [text] if "," in text and Path(text).exists() else [word.strip() for word in text.split(",")]
    side = replace(base, text=text)
    for word in words:
        side = _with_word(side, word)
    _check(side)
    return side


def _with_word(side: Side, word: str) -> Side:
    name, _, value = word.partition(":")
    if name == WORKER and value:
        split_address(value)
        return replace(side, kind=WORKER, address=value, way=ALONE, count=0)
    if word == PEER:
        return replace(side, kind=PEER, way=ALONE, count=0)
    if word in DTYPES:
        return _engine(side, dtype=word)
    if word in _WORDS:
        return _WORDS[word](side)
    if word == PACKAGED or (word and Path(word).exists()):
        return replace(side, kind=ENGINE, model=word)
    if name in _NUMBERED and value.isascii() and value.isdigit() and int(value) > 0:
        return _NUMBERED[name](side, int(value))
    if name == "kv" and value in DTYPES:
        return _engine(side, kv_dtype=value)
    if name == "device" and value:
        return _engine(side, device=value)
    if "/" in word or word.endswith(_SUFFIXES):
        raise ConfigError(f"there is no checkpoint {word!r}", field="side", remedy="check the path")
    near = difflib.get_close_matches(word, _EXAMPLES, n=1, cutoff=0.5)
    every = f"words are PATH, {', '.join(_EXAMPLES)}"
    raise ConfigError(
        f"{word!r} is no word of a side",
        reason="UNKNOWN_SIDE",
        field="side",
        remedy=f"did you mean {near[0]}?" if near else every,
    )


def _engine(side: Side, **changes: object) -> Side:
    """Words about an engine make it one again, after `transformers` or a worker: except the dtype, which a peer has."""
    kind = side.kind if side.kind == PEER and set(changes) == {"dtype"} else ENGINE
    return replace(side, kind=kind, engine=replace(side.engine, **changes))  # type: ignore[arg-type]


def _way(side: Side, way: str, count: int = 0) -> Side:
    return replace(side, kind=ENGINE, way=way, count=count)


_WORDS: dict[str, Callable[[Side], Side]] = {
    "int8": lambda side: _engine(side, weights="int8"),
    "fast": lambda side: _engine(side, deterministic=False, kernels="auto"),
    "plain": lambda side: _engine(side, deterministic=False, kernels="plain"),
    "native": lambda side: _engine(side, deterministic=False, kernels="native"),
    "deterministic": lambda side: _engine(side, deterministic=True, kernels="auto"),
    "hnd": lambda side: _engine(side, axis_order="hnd"),
    "nhd": lambda side: _engine(side, axis_order="nhd"),
    "whole": lambda side: replace(side, chunk_tokens=0),
    "chunked": lambda side: replace(side, chunk_tokens=CHUNK),
    "alone": lambda side: _way(side, ALONE),
    "batched": lambda side: _way(side, BATCHED, BATCH),
    "reused": lambda side: _way(side, REUSED),
    "handoff": lambda side: _way(side, HANDOFF),
}
_NUMBERED: dict[str, Callable[[Side, int], Side]] = {
    "page": lambda side, value: _engine(side, page_size=value),
    "chunked": lambda side, value: replace(side, chunk_tokens=value),
    "batched": lambda side, value: _way(side, BATCHED, value),
    "reused": lambda side, value: _way(side, REUSED, value),
}


def _check(side: Side) -> None:
    if side.kind == ENGINE and side.way == BATCHED and side.count < 2:
        raise ConfigError("a batch needs 2 sequences", field="side", remedy="write batched:2 or more")
    if side.kind == ENGINE and side.way == HANDOFF and 0 < side.chunk_tokens < 2:
        raise ConfigError("a prefill step has 2 tokens or more", field="side", remedy="write chunked:2 or more")
