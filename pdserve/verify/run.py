"""From sides and prompts to comparisons: the whole of `pdserve verify` but its looks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

from pdserve.errors import ConfigError
from pdserve.rpc.settings import RpcSettings
from pdserve.tokenizer import Bundle
from pdserve.verify.compare import Comparison, check_sizes, compare
from pdserve.verify.handoff import run_handoff
from pdserve.verify.inputs import Limits, make_prompts
from pdserve.verify.local import run_engine
from pdserve.verify.models import Models
from pdserve.verify.observing import Prompts, Run, Shape
from pdserve.verify.peer import check_installed, run_peer
from pdserve.verify.remote import bundle_of, contract_of, run_worker, shape_of_contract
from pdserve.verify.sides import HANDOFF, PEER, WORKER, Side

Say = Callable[[str], AbstractContextManager[None]]
MAX_PROMPT = 512  # tokens: every tensor of every layer is kept, and workers trace no more


@dataclass(frozen=True)
class Request:
    """What to run through every side."""

    texts: Sequence[str] = ()
    ids: Sequence[tuple[int, ...]] = ()  # neither texts nor ids: the default prompts
    tokens: int = 4  # greedy ones after each prompt
    tolerance: float | None = None  # None: that of the coarser dtype
    rpc: RpcSettings = field(default_factory=RpcSettings)

    def check(self) -> None:
        if self.tokens < 1:
            raise ConfigError(f"{self.tokens} is not allowed", field="tokens", remedy="use 1 or more")
        if self.tolerance is not None and not 0 < self.tolerance < 1:
            raise ConfigError(f"{self.tolerance} is not allowed", field="tolerance", remedy="use a number from 0 to 1")


def verify(
    sides: Sequence[Side], request: Request, say: Say = lambda text: nullcontext()
) -> tuple[tuple[Comparison, ...], Prompts]:
    """Compares every side with the first. Returns the comparisons and the prompts that ran.

    Raises:
        ConfigError, CheckpointError: a side or prompt that cannot run.
        Incompatible: models of other sizes; found before anything runs.
        Refused, Unavailable, ...: what a worker answers.
    """
    request.check()
    if len(sides) < 2:
        raise ConfigError("there is one side", field="side", remedy="name another to compare it with")
    if any(side.kind == PEER for side in sides):
        check_installed()
    models = Models()
    with say("reading the models"):
        prompts = _prompts(sides, request, models)
    with say(f"running {sides[0].text}"):
        base = run_side(sides[0], prompts, request, models)
    comparisons = []
    for side in sides[1:]:
        with say(f"running {side.text}"):
            comparisons.append(compare(base, run_side(side, prompts, request, models), request.tolerance))
    return tuple(comparisons), prompts


def run_side(side: Side, prompts: Prompts, request: Request, models: Models) -> Run:
    """Raises as `verify`."""
    if side.kind == WORKER:
        return run_worker(side, prompts, request.rpc)
    if side.kind == PEER:
        return run_peer(side, prompts, request.tokens)
    if side.way == HANDOFF:
        return run_handoff(side, prompts, request.tokens, models)
    return run_engine(side, prompts, request.tokens, models)


def _prompts(sides: Sequence[Side], request: Request, models: Models) -> Prompts:
    facts = [_facts(side, request, models) for side in sides]
    for side, fact in zip(sides[1:], facts[1:], strict=True):
        check_sizes(sides[0], facts[0].shape, side, fact.shape)
    limits = Limits(
        vocab_size=facts[0].shape.vocab_size,
        context=min(MAX_PROMPT, min(fact.context for fact in facts) - request.tokens - 1),
        unit=max(max(side.engine.page_size, side.chunk_tokens) for side in sides),
    )
    texts = request.texts or not request.ids  # tokenizers take their time to read
    bundle = next((found for fact in facts if (found := fact.bundle())), None) if texts else None
    return make_prompts(request.texts, request.ids, bundle, limits)


@dataclass(frozen=True)
class _Facts:
    """What must be known of a side before it runs."""

    shape: Shape
    context: int
    bundle: Callable[[], Bundle | None]  # its tokenizer


def _facts(side: Side, request: Request, models: Models) -> _Facts:
    if side.kind == WORKER:
        contract = contract_of(side, request.rpc)
        limit = contract.context_limit or MAX_PROMPT + request.tokens + 1
        return _Facts(shape_of_contract(contract), limit, lambda: bundle_of(side, contract, request.rpc))
    spec = models.load(side).spec
    shape = Shape(spec.planes(), spec.vocab_size)
    return _Facts(shape, spec.context_limit, lambda: models.bundle(side))
