"""One side's run, whatever ran it, and what all of them need."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from cache_transfer.contract import CachePlane, WorkerContract
from pdserve import __version__
from pdserve.engine.observe import Broken, Observed
from pdserve.errors import PdserveError
from pdserve.verify.sides import Side

Prompts = Sequence[tuple[int, ...]]


@dataclass(frozen=True)
class Shape:
    """The sizes without which two runs cannot be compared."""

    planes: tuple[tuple[CachePlane, ...] | None, ...]  # per layer; None: this side cannot show it
    vocab_size: int

    @property
    def layers(self) -> int:
        return len(self.planes)


@dataclass(frozen=True)
class Run:
    """What a side made of the prompts."""

    side: Side
    shape: Shape
    observed: tuple[Observed, ...]  # one per prompt; empty after an error
    contract: WorkerContract | None = None  # None: a peer has none
    broken: tuple[Broken, ...] = ()  # checks of the engine that did not hold
    reused: tuple[int, ...] = ()  # REUSED: tokens of each prompt found in the cache
    error: PdserveError | None = None  # the run ended with it: a fault found in another way
    record: Mapping[str, object] = field(default_factory=dict)  # what makes the run reproducible


def here() -> dict[str, object]:
    """The machine and the libraries of this process."""
    return {
        "pdserve": __version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "machine": platform.machine(),
        "threads": torch.get_num_threads(),
    }


def described(side: Side, contract: WorkerContract | None) -> dict[str, object]:
    """A side's own part of the record."""
    found: dict[str, object] = {"side": side.text, "kind": side.kind, "chunk_tokens": side.chunk_tokens}
    if side.kind == "worker":
        found["address"] = side.address
    else:
        found |= {"model": side.model, "way": side.way, "count": side.count, "dtype": side.engine.dtype}
    if contract is not None:
        found |= {
            "model_digest": contract.model_digest.hex(),
            "contract_digest": contract.digest().hex(),
            "dtype": contract.activation_dtype,
            "kv_dtype": contract.kv_dtype,
            "page_size": contract.page_size,
            "axis_order": contract.page_axis_order,
            "device": contract.device,
            **{name: contract.info[name] for name in sorted(contract.info)},
        }
    return found
