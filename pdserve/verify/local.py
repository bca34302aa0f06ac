"""Sides on engines of this process: one prompt alone, several in a batch, or on a prefix found in the cache.

The loop is a worker's: prompts in chunks, then one token at a time, greedily, each sequence in its
own pages. The pool is fresh and no page is used twice, so what was never written is zero.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from cache_transfer.contract import cache_identity
from pdserve.engine.blocks import BlockManager
from pdserve.engine.engine import Engine
from pdserve.engine.layered import OnLayer
from pdserve.engine.loaded import LoadedModel
from pdserve.engine.observe import Observed, Recording
from pdserve.engine.plan import Chunk, EngineConfig, StepOutput, StepPlan
from pdserve.engine.prefix import Prefix
from pdserve.engine.trace import StepTrace
from pdserve.errors import ConfigError, DataLoss, Internal
from pdserve.verify.models import Models, pages_for
from pdserve.verify.observing import Prompts, Run, Shape, described
from pdserve.verify.sides import BATCHED, REUSED, Side

FAULTS = (Internal, DataLoss)  # errors that are themselves what a comparison looks for
_TAIL = 3  # tokens after the shared prefix of the prompt that fills the cache
_COMPANION = 5  # tokens by which a batch's made-up members differ in length


class TracedEngine(Engine):
    """A real engine of which every step is recorded."""

    def __init__(self, model: LoadedModel, config: EngineConfig) -> None:
        super().__init__(model, config)
        self.recording = Recording(self)

    def step(
        self,
        plan: StepPlan,
        *,
        on_layer: OnLayer | None = None,
        cancelled: Callable[[], bool] | None = None,
        trace: StepTrace | None = None,
    ) -> StepOutput:
        trace = trace or StepTrace()
        output = super().step(plan, on_layer=on_layer, cancelled=cancelled, trace=trace)
        self.recording.add(trace, output)
        return output


def shape_of(engine: Engine) -> Shape:
    return Shape(engine.spec.planes(), engine.spec.vocab_size)


@dataclass(eq=False)
class _Sequence:
    key: str
    prompt: tuple[int, ...]
    pages: tuple[int, ...]
    done: int = 0  # tokens [0, done) are cached
    logits: list[Tensor] = field(default_factory=list)
    outputs: list[int] = field(default_factory=list)

    @property
    def ids(self) -> tuple[int, ...]:
        """All tokens that ran or will: the last output is not fed back."""
        return (*self.prompt, *self.outputs[:-1])

    def next(self, chunk_tokens: int) -> Chunk:
        if self.done < len(self.prompt):
            end = min(len(self.prompt), self.done + (chunk_tokens or len(self.prompt)))
            ids = self.prompt[self.done : end]
        else:
            ids = (self.outputs[-1],)
        logits = self.done + len(ids) >= len(self.prompt)
        return Chunk(self.key, ids, self.done, self.pages, "last" if logits else "none")

    def accept(self, chunk: Chunk, output: StepOutput) -> None:
        self.done += len(chunk.ids)
        if chunk.key in output.logits:
            self.logits.append(output.logits[chunk.key][-1])
            self.outputs.append(int(self.logits[-1].argmax()))


class _Runner:
    """One side on one engine."""

    def __init__(self, side: Side, prompts: Prompts, tokens: int, models: Models) -> None:
        self.side, self.prompts, self.tokens = side, prompts, tokens
        sequences = 2 * len(prompts) + (side.count if side.way == BATCHED else 0)
        room = sequences * (max(map(len, prompts)) + tokens + side.engine.page_size)
        self.engine = models.engine(side, pages_for(room, side.engine), TracedEngine)
        self.blocks = BlockManager(self.engine.config.pages, self.engine.config.page_size)
        self.reused: list[int] = []

    def run(self) -> tuple[Observed, ...]:
        if self.side.way == BATCHED:
            return self._batched()
        if self.side.way == REUSED:
            return tuple(self._on_prefix(number, prompt) for number, prompt in enumerate(self.prompts))
        return tuple(self._alone(f"prompt {number}", prompt) for number, prompt in enumerate(self.prompts))

    def _alone(self, key: str, prompt: tuple[int, ...]) -> Observed:
        sequence = self._sequence(key, prompt)
        self._run([sequence])
        return self._observed(sequence)

    def _sequence(self, key: str, prompt: tuple[int, ...]) -> _Sequence:
        return _Sequence(key, prompt, self.blocks.allocate(key, self.blocks.pages_for(len(prompt) + self.tokens)))

    def _run(self, sequences: Sequence[_Sequence]) -> None:
        """Runs them together until each has its tokens."""
        while running := [s for s in sequences if len(s.outputs) < self.tokens]:
            chunks = [sequence.next(self.side.chunk_tokens) for sequence in running]
            output = self.engine.step(StepPlan(tuple(chunks)))
            for sequence, chunk in zip(running, chunks, strict=True):
                sequence.accept(chunk, output)

    def _observed(self, sequence: _Sequence, *before: str) -> Observed:
        """before: keys of sequences that computed the first part of it."""
        recording = self.engine.recording
        parts = [part for key in (*before, sequence.key) for part in recording.parts[key]]
        return recording.observed(parts, sequence.ids, len(sequence.prompt), sequence.logits, sequence.outputs)

    def _batched(self) -> tuple[Observed, ...]:
        """Prompts in groups of `count`; a group that is not full gets made-up members of other lengths."""
        found: list[Observed] = []
        for first in range(0, len(self.prompts), self.side.count):
            group = self.prompts[first : first + self.side.count]
            members = [self._sequence(f"prompt {first + n}", prompt) for n, prompt in enumerate(group)]
            for number in range(len(group), self.side.count):
                base = group[number % len(group)][::-1]
                cut = base[: max(2, len(base) - _COMPANION * number)]
                members.append(self._sequence(f"companion {first}.{number}", cut))
            self._run(members)
            found += [self._observed(member) for member in members[: len(group)]]
        return tuple(found)

    def _on_prefix(self, number: int, prompt: tuple[int, ...]) -> Observed:
        """Another prompt with the same beginning fills the cache; then this one finds its prefix there."""
        blocks, size = self.blocks, self.engine.config.page_size
        limit = min(self.side.count or len(prompt), len(prompt) - 1)  # the last token is always computed
        shared = limit // size * size
        identity = cache_identity(self.engine.contract(), None, "verify")
        first = None
        if shared:
            vocab = self.engine.spec.vocab_size
            other = prompt[:shared] + tuple((token + 1) % vocab for token in prompt[shared : shared + _TAIL])
            first = self._sequence(f"cache {number}", other)
            while first.done < len(other):
                chunk = first.next(self.side.chunk_tokens)
                first.accept(chunk, self.engine.step(StepPlan((chunk,))))
            blocks.publish(Prefix(identity, other, size), first.pages[: shared // size])
        pages, found = blocks.match(Prefix(identity, prompt, size), limit)
        self.reused.append(found)
        key = f"prompt {number}"
        if pages:
            blocks.retain(key, pages)
        fresh = blocks.allocate(key, blocks.pages_for(len(prompt) + self.tokens) - len(pages))
        sequence = _Sequence(key, prompt, (*pages, *fresh), done=found)
        self._run([sequence])
        return self._observed(sequence, *([first.key] if first and found else []))


def run_engine(side: Side, prompts: Prompts, tokens: int, models: Models) -> Run:
    """`tokens` greedy tokens for every prompt. Raises CheckpointError, ConfigError (nothing can be reused)."""
    if side.way == REUSED and max(map(len, prompts)) <= side.engine.page_size:
        raise ConfigError(
            f"no prompt is longer than a page of {side.engine.page_size} tokens, so nothing can be reused",
            field="reused",
            remedy="give a longer prompt, or smaller pages (page:4)",
        )
    runner = _Runner(side, prompts, tokens, models)
    observed: tuple[Observed, ...] = ()
    error = None
    try:
        observed = runner.run()
    except FAULTS as fault:
        error = fault
    contract = runner.engine.contract()
    return Run(
        side=side,
        shape=shape_of(runner.engine),
        observed=observed,
        contract=contract,
        broken=tuple(runner.engine.recording.broken),
        reused=tuple(runner.reused),
        error=error,
        record=described(side, contract),
    )
