"""From an admitted request to the sequences that will answer it. Output of earlier workers is replayed here."""

from __future__ import annotations

from dataclasses import dataclass

from cache_transfer.contract import cache_identity
from decode_worker.admission import Admission, DecodeRequest, Limits, Output
from decode_worker.generation import Generation
from decode_worker.grammar import Grammars
from decode_worker.sequence import Sequence, State
from decode_worker.stream import EventStream
from pdserve.engine.prefix import Prefix
from pdserve.request import SamplingParams
from pdserve.tokenizer import Tokenizer


@dataclass(frozen=True)
class Opener:
    """What all requests of one worker have in common."""

    limits: Limits
    tokenizer: Tokenizer | None
    grammars: Grammars

    def open(
        self, key: str, request: DecodeRequest, admission: Admission, stream: EventStream, ends_at: float
    ) -> Sequence:
        """The sequence that brings the prompt's cache. It is DONE already if its output so far, or that of each of its
        choices, is complete; what the caller does not have of that is in the stream.

        Args:
            ends_at: monotonic seconds.

        Raises InvalidRequest for a grammar that cannot be followed.
        """
        prefix = Prefix(
            cache_identity(self.limits.contract, request.adapter, request.tenant, request.prefill_contract),
            request.ids,
            self.limits.page_size,
        )
        if not request.choices:
            output = Output(0, request.output_ids, request.forwarded_tokens)
            generation = self._replayed(request, output, admission, stream)
            made = Sequence(key, request, generation, stream, prefix, admission.cache_tokens, ends_at)
            ends = [generation.finish]
        else:
            nothing = Generation(request.prompt_ids, SamplingParams(), admission.limit)  # it never samples
            made = Sequence(key, request, nothing, stream, prefix, admission.cache_tokens, ends_at)
            choices = [self._choice(made, output, admission) for output in request.choices]
            ends = [choice.generation.finish for choice in choices]
            made.choices = tuple(choice for choice in choices if choice.generation.finish is None)
        made.replayed = tuple(end for end in ends if end is not None)
        if len(made.replayed) == len(ends):
            for end in made.replayed:
                stream.put(end)
            made.move(State.DONE)
        return made

    def _choice(self, origin: Sequence, output: Output, admission: Admission) -> Sequence:
        generation = self._replayed(origin.request, output, admission, origin.stream)
        choice = Sequence(
            f"{origin.key}/{output.choice}",
            origin.request,
            generation,
            origin.stream,
            origin.prefix.copy(),
            admission.cache_tokens,
            origin.ends_at,
        )
        choice.state, choice.origin = State.VERIFIED, origin  # where it begins, once there is a cache
        return choice

    def _replayed(
        self, request: DecodeRequest, output: Output, admission: Admission, stream: EventStream
    ) -> Generation:
        generation = Generation(
            request.prompt_ids,
            request.sampling,
            admission.limit,
            self.limits.eos_ids,
            self.tokenizer,
            self.grammars,
            output.choice,
        )
        for batch in generation.replay(output.output_ids):
            if batch.first_index >= output.forwarded_tokens:
                stream.put(batch)
        return generation
