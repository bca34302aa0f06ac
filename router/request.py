"""What a caller asks, as it came through a door, and what the router made of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from pdserve.errors import Exhausted
from pdserve.registry.records import CHOICES, GRAMMAR, SPECIAL_TOKENS
from pdserve.request import SamplingParams
from pdserve.tokenizer import Tokenizer
from router.openai_tools import ToolUse


def router_full(count: int) -> Exhausted:
    """More than `max_active` requests."""
    return Exhausted(
        f"{count} requests are in flight",
        reason="ROUTER_FULL",
        field="router.max_active",
        remedy="send the request again later",
        retry_after_ms=1000,
    )


@dataclass(frozen=True)
class TextPrompt:
    text: str
    add_special: bool = True  # with what the model wants around a prompt, such as its begin token


@dataclass(frozen=True)
class ChatPrompt:
    messages: tuple[Mapping[str, object], ...]  # each with role and content
    tools: tuple[Mapping[str, object], ...] = ()  # functions that the template shows
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    variables: Mapping[str, object] = field(default_factory=dict)  # further names for the template


@dataclass(frozen=True)
class TokenPrompt:
    ids: tuple[int, ...]


Prompt = TextPrompt | ChatPrompt | TokenPrompt


@dataclass(frozen=True)
class Ask:
    """One request as parsed by a door: typed, but neither checked nor tokenized."""

    prompt: Prompt
    sampling: SamplingParams = field(default_factory=SamplingParams)
    model: str = ""  # empty: the only one served
    adapter: str = ""
    label: str = ""  # the caller's own, for logs only
    id: str = ""  # the router's own; empty: made when it is taken
    want_record: bool = False
    timeout_s: float | None = None  # the caller's deadline, if it has one
    unset: frozenset[str] = frozenset()  # options of sampling that the caller left to the model's own defaults
    tools: ToolUse | None = None  # what the model may call; its answer is read for calls
    n: int = 1  # outputs
    version: bytes | None = None  # of the adapter; None: the one that its name stands for now


@dataclass(frozen=True)
class OpenChoice:
    """One of several outputs that has not ended, with what the client has of it."""

    choice: int
    output_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class Request:
    """A checked request. Its sampling has a seed and a max_tokens; its tokens fit the widest pair of the pool."""

    id: str  # the router's own
    model: str
    tenant: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    least_tokens: int  # output tokens a pair must have room for; less than max_tokens where that may be cut
    contract_digest: bytes  # the must-equal contract that serves it
    received: float  # monotonic seconds
    deadline: float  # monotonic seconds
    label: str = ""
    want_record: bool = False
    notes: tuple[str, ...] = ()  # what the gate refused
    tokenizer_digest: bytes = b""  # what the prompt's ids mean; empty: the model has no tokenizer
    vocab_size: int = 0  # that they were checked against; 0: unknown
    tokenizer: Tokenizer | None = field(default=None, repr=False, compare=False)
    output_ids: tuple[int, ...] = ()  # had from earlier attempts: a new one goes on after them
    n: int = 1  # outputs, of one prefill
    operation: str = "text_completion"  # or chat
    adapter: str = ""  # its name, for people; empty: the base model
    adapter_digest: bytes | None = None  # the version it was taken with and keeps; None: the base model
    choices: tuple[OpenChoice, ...] = ()  # of several outputs those that have not ended; for one: `output_ids`

    @property
    def ids(self) -> tuple[int, ...]:
        """What an attempt prefills: the prompt, then the output so far."""
        return self.prompt_ids + self.output_ids

    @property
    def served(self) -> str:
        """What its answer says has made it."""
        return f"{self.model}:{self.adapter}" if self.adapter else self.model

    @property
    def max_tokens(self) -> int:
        return self.sampling.max_tokens or 1

    @property
    def needs(self) -> frozenset[str]:
        """Capabilities without which a decode worker would answer something else."""
        return needs(self.sampling, self.n)


def needs(sampling: SamplingParams, n: int) -> frozenset[str]:
    named = (
        (GRAMMAR, sampling.grammar is not None),
        (SPECIAL_TOKENS, not sampling.skip_special_tokens),
        (CHOICES, n > 1),
    )
    return frozenset(name for name, needed in named if needed)
