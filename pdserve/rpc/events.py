"""What streams back to a caller, as plain values. Router, decode workers and clients share these."""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.errors import FieldDifference

STOP = "stop"
LENGTH = "length"


@dataclass(frozen=True)
class TokenLogprob:
    id: int
    logprob: float  # natural logarithm, of the model's raw distribution
    rank: int  # 0 is the best


@dataclass(frozen=True)
class PositionLogprobs:
    """One output position: the token that was chosen, and the best ones, best first."""

    chosen: TokenLogprob
    top: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True)
class TokenBatch:
    """Output tokens [first_index, first_index + len(ids)) of one choice."""

    first_index: int
    ids: tuple[int, ...]
    text: bytes = b""  # UTF-8 released by these tokens; may be empty
    logprobs: tuple[PositionLogprobs, ...] = ()  # one per id, or none
    choice: int = 0


@dataclass(frozen=True)
class ToolCallPart:
    """A call of a function that begins, or more of one that has begun."""

    index: int  # of the call, among those of its choice
    arguments: str = ""  # JSON as the model writes it: what is added
    id: str = ""  # of a call that begins: what its result names
    name: str = ""  # of a call that begins


@dataclass(frozen=True)
class Usage:
    """Of one choice, or of a request: then the prompt counts once, and the output of all choices."""

    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_prompt_tokens: int = 0  # prompt tokens that were not computed again


@dataclass(frozen=True)
class Finish:
    """Normal end of one choice."""

    reason: str  # STOP | LENGTH; from the gateway also "tool_calls"
    usage: Usage = Usage()
    stop_string: str | None = None  # the stop string that matched
    stop_token_id: int | None = None  # the end or stop token that was sampled
    choice: int = 0
    shared_pages: int = 0  # of the prompt, that this choice read together with others
    copied_pages: int = 0  # of these, copied before it could write there


@dataclass(frozen=True)
class Accepted:
    """First event of a stream: the request passed every check."""

    request_id: str
    model: str
    prompt_tokens: int
    seed: int  # the seed in force
    prompt: int = 0  # which of several prompts
    read_fields: tuple[str, ...] = ()  # of the request, beyond the first version of the schema


@dataclass(frozen=True)
class Prefilled:
    """What a prompt cost that the decode worker computed itself; comes before the first token."""

    computed_tokens: int
    cached_tokens: int  # found in the prefix index
    queued_ms: float
    prefill_ms: float
    chunks: int  # engine steps it took


@dataclass(frozen=True)
class GroupPair:
    """A group of prefill and one of decode workers, each of equal contracts; ids are the first few of each."""

    prefill_workers: tuple[str, ...] = ()
    decode_workers: tuple[str, ...] = ()
    prefill_count: int = 0
    decode_count: int = 0
    differences: tuple[FieldDifference, ...] = ()  # candidates: what is converted; rejected: what refuses


@dataclass(frozen=True)
class AttemptRecord:
    """One handoff that was begun; the wire schema says from when to when each time is."""

    prefill_worker: str = ""
    decode_worker: str = ""
    prefill_candidates: int = 0  # workers it was chosen from
    decode_candidates: int = 0
    prefill_cost: float = 0.0  # predicted tokens to compute before the prompt is done
    decode_cost: float = 0.0  # predicted slowness, in running sequences
    outcome: str = ""  # finish reason, or the reason code of what ended it
    failed_worker: str = ""
    first_index: int = 0  # output tokens there were before it
    output_tokens: int = 0  # that it gave
    begun_ms: float = 0.0
    admitted_ms: float = 0.0
    first_token_ms: float = 0.0
    total_ms: float = 0.0
    computed_tokens: int = 0
    sent_tokens: int = 0
    bytes_sent: int = 0
    frames_sent: int = 0
    queued_ms: float = 0.0
    prefill_ms: float = 0.0
    push_ms: float = 0.0
    transfer_ms: float = 0.0
    placement: str = ""  # handoff | decode | split: which worker computed the prompt, or both
    placement_reason: str = ""
    predicted_handoff_ms: float = 0.0  # pair chosen .. first token
    predicted_decode_ms: float = 0.0
    decode_penalty_ms: float = 0.0
    predicted_split_ms: float = 0.0
    handoff_tokens: int = 0  # of a split prompt: tokens that prefill_worker computes


@dataclass(frozen=True)
class HandoffRecord:
    """What happened to one request, in stages. Times are milliseconds, sizes are bytes. Figures of prefill
    and transfer are the last attempt's.
    """

    request_id: str = ""
    prefill_worker: str = ""
    decode_worker: str = ""
    attempts: int = 0
    prompt_tokens: int = 0
    computed_tokens: int = 0  # tokens that prefill ran; of a resumed answer, its output so far too
    sent_tokens: int = 0  # tokens whose cache travelled
    bytes_sent: int = 0  # payload bytes of frames and logits
    frames_sent: int = 0
    queued_ms: float = 0.0  # waiting for a prefill slot
    prefill_ms: float = 0.0  # first chunk started .. logits ready
    transfer_ms: float = 0.0  # logits ready .. acknowledged: what streaming did not hide
    first_token_ms: float = 0.0  # request received by the router .. first token there
    decode_tokens_per_s: float = 0.0  # output tokens after the first, over their time
    conversions: tuple[FieldDifference, ...] = ()  # those with loss included
    notes: tuple[str, ...] = ()
    output_tokens: int = 0  # delivered
    outcome: str = ""  # finish reason, or the reason code of the error that ended it
    intake_ms: float = 0.0  # received .. checked and tokenized
    admitted_ms: float = 0.0  # received .. first admitted by a decode worker
    push_ms: float = 0.0  # pages granted .. acknowledged: all the time in which bytes_sent could travel
    decode_ms: float = 0.0  # first output token .. last one
    total_ms: float = 0.0  # received .. end
    candidates: tuple[GroupPair, ...] = ()  # that fitted when the last attempt was placed
    rejected: tuple[GroupPair, ...] = ()
    history: tuple[AttemptRecord, ...] = ()  # oldest first
    choices: int = 1  # outputs asked for
    prefills: int = 0  # times the prompt was computed, for all choices together
    transfers: int = 0  # of these, handed over
    shared_pages: int = 0  # of the prompt, that choices read together, counted for each
    copied_pages: int = 0  # of these, copied before a choice wrote there
    trace_id: str = ""  # hexadecimal; empty: neither client nor router traces
