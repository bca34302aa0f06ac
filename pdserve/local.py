"""One process, no services: the same engine, sampler and stop rules as the two pools.

This is `pdserve generate --local`, and the baseline that tests and benchmarks compare the
disaggregated path with. Prompts are prefilled in chunks and decoded in batches, both in the
same steps; no prefix is reused.
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from decode_worker.admission import Limits, output_limit
from decode_worker.generation import Generation, check_endings
from decode_worker.grammar import Grammars
from decode_worker.sampling import sample
from decode_worker.stream import merged
from pdserve.engine.blocks import BlockManager
from pdserve.engine.checks import check_tokenizer
from pdserve.engine.engine import Engine
from pdserve.engine.plan import Chunk, StepCounters, StepPlan
from pdserve.errors import Exhausted, InvalidRequest, PdserveError
from pdserve.request import SamplingParams, check_choices, check_token_ids
from pdserve.rpc.events import Finish, TokenBatch
from pdserve.tokenizer import Bundle, Tokenizer

Event = TokenBatch | Finish
Observer = Callable[[int, int, Tensor], None]


@dataclass(frozen=True)
class LocalOutput:
    """One whole answer."""

    ids: tuple[int, ...]
    text: bytes
    finish: Finish
    tokens: TokenBatch  # all of them, with their logprobs


@dataclass(eq=False)
class _Running:
    number: int  # of the prompt, in the order given
    prompt: tuple[int, ...]
    generation: Generation
    tokens: int  # largest cache it will need
    pages: tuple[int, ...] = ()
    cached: int = 0  # tokens [0, cached) are in the pages

    @property
    def owner(self) -> str:
        return f"local-{self.number}"

    @property
    def prefilling(self) -> bool:
        return self.cached < len(self.prompt)


class LocalRunner:
    """Runs prompts on an engine that nothing else uses meanwhile; every call is blocking.

    Args:
        engine: its whole page pool is used.
        bundle: None: ids only, no text and no stop strings.
        chunk_tokens: prompt tokens of one step, over all prompts.
        max_batch: sequences of one step.
        adapter: digest of the one, loaded into the engine, that all prompts are computed with; None: the base model.
    """

    def __init__(
        self,
        engine: Engine,
        bundle: Bundle | None = None,
        *,
        chunk_tokens: int = 256,
        max_batch: int = 32,
        adapter: bytes | None = None,
    ) -> None:
        if chunk_tokens < 1 or max_batch < 1:
            raise InvalidRequest(
                "a step needs at least one token and one sequence",
                field="chunk_tokens" if chunk_tokens < 1 else "max_batch",
                remedy="use 1 or more",
            )
        self.engine = engine
        self.tokenizer = None if bundle is None else Tokenizer(bundle)
        self.blocks = BlockManager(engine.config.pages, engine.config.page_size)
        self.counters = StepCounters()  # summed over all steps so far
        self.steps = 0
        self._grammars = Grammars(self.tokenizer, engine.spec.vocab_size)
        self._chunk_tokens = chunk_tokens
        self._max_batch = max_batch
        self._adapter = adapter
        check_tokenizer(engine.spec, bundle.vocab_size if bundle else 0)
        eos = set(engine.spec.eos_ids) | set(bundle.eos_ids if bundle else ())
        contract = engine.contract(bundle.digest() if bundle else b"")
        self._limits = Limits(
            model=engine.name,
            contract=contract,
            context_limit=engine.spec.context_limit,
            pages=engine.config.pages,
            page_size=engine.config.page_size,
            eos_ids=tuple(sorted(eos)),
            has_text=bundle is not None,
        )

    def generate(
        self, ids: Sequence[int], params: SamplingParams, *, n: int = 1, observe: Observer | None = None
    ) -> Iterator[Event]:
        """Yields one TokenBatch per token, then a Finish. Checked at the call, before the first `next`.

        Closing the iterator early frees the pages.

        Args:
            n: outputs, each with its Finish; nothing is shared between them.
            observe: called with (choice, output index, raw logits [vocab]) before each token is chosen.

        Raises:
            InvalidRequest: as the decode worker would.
        """
        check_choices(n)
        if params.seed is None:
            params = replace(params, seed=secrets.randbits(64))
        running = [self._admit(choice, ids, params, choice) for choice in range(n)]
        return (event for _, event in self._run(running, observe))

    def generate_batch(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams],
        *,
        observe: Observer | None = None,
    ) -> list[LocalOutput]:
        """All prompts together, batched as far as pages and `max_batch` allow; outputs in the order given."""
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        todo = [self._admit(n, ids, p) for n, (ids, p) in enumerate(zip(prompts, each, strict=True))]
        tokens: list[list[TokenBatch]] = [[] for _ in todo]
        ends: dict[int, Finish] = {}
        for number, event in self._run(todo, observe):
            if isinstance(event, Finish):
                ends[number] = event
            else:
                tokens[number].append(event)
        outputs = []
        for number, batches in enumerate(tokens):
            whole = merged(batches)
            outputs.append(LocalOutput(whole.ids, whole.text, ends[number], whole))
        return outputs

    def _admit(self, number: int, ids: Sequence[int], params: SamplingParams, choice: int = 0) -> _Running:
        ids, limits = tuple(ids), self._limits
        check_token_ids(ids, limits.contract.vocab_size)
        params.check(limits.contract.vocab_size)
        check_endings(params, limits.eos_ids, limits.contract.vocab_size, limits.has_text)
        limit = output_limit(len(ids), params, limits)
        tokens = len(ids) + limit - 1
        if limits.pages_for(tokens) > limits.pages:  # here even one token needs the prompt's pages
            raise InvalidRequest(
                f"{len(ids)} prompt tokens are more than the page pool holds",
                reason="POOL_TOO_SMALL",
                field="prompt",
                remedy="give the engine more pages",
            )
        if params.seed is None:
            params = replace(params, seed=secrets.randbits(64))
        generation = Generation(ids, params, limit, limits.eos_ids, self.tokenizer, self._grammars, choice)
        return _Running(number, ids, generation, tokens)

    def _run(self, todo: Sequence[_Running], observe: Observer | None) -> Iterator[tuple[int, Event]]:
        waiting, running = deque(todo), list[_Running]()
        try:
            while waiting or running:
                self._start(waiting, running)
                plan = self._plan(running)
                output = self.engine.step(plan)
                self.steps += 1
                self.counters += output.counters
                for sequence, event in self._apply(plan, running, output.logits, observe):
                    yield sequence.number, event
        finally:
            for sequence in running:
                self.blocks.release(sequence.owner)

    def _start(self, waiting: deque[_Running], running: list[_Running]) -> None:
        """Gives pages to as many prompts as fit, in order."""
        while waiting and len(running) < self._max_batch:
            try:
                waiting[0].pages = self.blocks.allocate(waiting[0].owner, self._limits.pages_for(waiting[0].tokens))
            except Exhausted:
                return
            running.append(waiting.popleft())

    def _plan(self, running: Sequence[_Running]) -> StepPlan:
        """One token for each that decodes, and prompt chunks, oldest first, within the budget."""
        chunks, budget = [], self._chunk_tokens
        for sequence in running:
            start = sequence.cached
            ids = sequence.prompt[start : start + budget] if sequence.prefilling else sequence.generation.output[-1:]
            if not ids:
                continue
            if sequence.prefilling:
                budget -= len(ids)
            last = start + len(ids) >= len(sequence.prompt)
            pages = sequence.pages[: self._limits.pages_for(start + len(ids))]
            chunks.append(
                Chunk(sequence.owner, tuple(ids), start, pages, "last" if last else "none", adapter=self._adapter)
            )
        return StepPlan(tuple(chunks))

    def _apply(
        self, plan: StepPlan, running: list[_Running], logits: Mapping[str, Tensor], observe: Observer | None
    ) -> Iterator[tuple[_Running, Event]]:
        """Books a step that has run, and samples where a prompt is complete. Ended ones leave `running`."""
        chunks = {chunk.key: chunk for chunk in plan.chunks}
        for sequence in running:
            if sequence.owner in chunks:
                sequence.cached += len(chunks[sequence.owner].ids)
        ready = [(sequence, logits[sequence.owner][-1]) for sequence in running if sequence.owner in logits]
        for sequence, scores in ready:
            if observe is not None:
                observe(sequence.number, len(sequence.generation.output), scores)
        choices = sample([(sequence.generation.sampler, scores) for sequence, scores in ready])
        for (sequence, _), choice in zip(ready, choices, strict=True):
            if isinstance(choice, PdserveError):
                raise choice
            yield sequence, sequence.generation.accept(choice)
            if sequence.generation.finish is not None:
                self.blocks.release(sequence.owner)
                running.remove(sequence)
                yield sequence, sequence.generation.finish
