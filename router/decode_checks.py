"""Whether a decode worker says what it may say now. Nothing that fails here is forwarded."""

from __future__ import annotations

from cache_transfer.contract import HandoffIdentity, check_compatible, check_identity, prompt_digest
from pdserve.rpc.events import Finish, TokenBatch
from router.failures import mismatch
from router.gate import Member, Pair
from router.record import Account
from router.request import Request
from router.wire import Admitted


def check_admitted(request: Request, pair: Pair, admitted: Admitted, allow_lossy: bool) -> None:
    """Compares again what the gate compared from the registry: the worker may have changed since."""
    if (admitted.ticket is None) != pair.here:
        raise mismatch(pair.decode, "would compute the prompt where it was not asked to, or not where it was")
    check_compatible(pair.prefill.record.contract, admitted.contract, allow_lossy)
    end = pair.handoff_tokens or len(request.ids)
    expected = HandoffIdentity(
        contract_digest=request.contract_digest,
        adapter_digest=request.adapter_digest,
        tenant=request.tenant,
        prompt_digest=prompt_digest(request.ids[:end]),
        start=admitted.identity.start,
        end=end,
    )
    check_identity(expected, admitted.identity)


def check_tokens(batch: TokenBatch, request: Request, account: Account, decode: Member) -> None:
    """Raises Internal for tokens that do not follow those there are, or that are none or more than was asked for."""
    check_choice(batch.choice, account, decode)
    due = len(account.outputs[batch.choice].ids)
    if not batch.ids:
        raise mismatch(decode, f"sent a message without a token where {due} was due")
    if batch.first_index != due:
        raise mismatch(decode, f"sent token {batch.first_index} where {due} was due")
    if due + len(batch.ids) > request.max_tokens:
        raise mismatch(decode, f"sent more than the {request.max_tokens} tokens asked for")
    if request.sampling.logprobs is not None and len(batch.logprobs) != len(batch.ids):
        raise mismatch(decode, f"sent logprobs for {len(batch.logprobs)} of {len(batch.ids)} tokens")


def check_choice(choice: int, account: Account, decode: Member) -> None:
    """Raises Internal for an output that was not asked for, or has ended."""
    if choice >= len(account.outputs) or account.outputs[choice].finish is not None:
        raise mismatch(decode, f"sent something of choice {choice}, where nothing of it was due")


def check_end(finish: Finish, account: Account, decode: Member) -> None:
    """Raises Internal for an end that counts other tokens than came, or comes twice."""
    check_choice(finish.choice, account, decode)
    came = len(account.outputs[finish.choice].ids)
    if finish.usage.output_tokens != came:
        raise mismatch(decode, f"counts {finish.usage.output_tokens} tokens at the end, {came} came")
