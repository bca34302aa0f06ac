"""Tokenizers by digest: fetched from a worker that has it, verified, and kept.

The cache is bounded (least recently used goes first); concurrent requests for one digest
share one fetch. Building a tokenizer and encoding long texts run off the event loop.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Sequence

from pdserve.errors import DataLoss, InvalidRequest, NotFound, PdserveError, Unavailable
from pdserve.tokenizer import Bundle, Tokenizer
from router.channels import WorkerChannels
from router.gate import Member
from router.request import ChatPrompt, Prompt, TokenPrompt
from router.wire import fetch_bundle

_INLINE_CHARACTERS = 2000  # encoding this much takes well under a millisecond


class BundleCache:
    """See the module's docstring. Belongs to one event loop."""

    def __init__(self, channels: WorkerChannels, limit: int, timeout_s: float) -> None:
        self._channels = channels
        self._limit = limit
        self._timeout_s = timeout_s
        self._kept: OrderedDict[bytes, Tokenizer] = OrderedDict()
        self._fetching: dict[bytes, asyncio.Task[Tokenizer]] = {}

    async def get(self, digest: bytes, holders: Sequence[Member]) -> Tokenizer:
        """The tokenizer with this digest; asks `holders` in turn when it is not here.

        Raises Unavailable (reason NO_TOKENIZER_BUNDLE) when none of them delivers it.
        """
        if digest in self._kept:
            self._kept.move_to_end(digest)
            return self._kept[digest]
        task = self._fetching.get(digest)
        if task is None:
            task = asyncio.create_task(self._fetch(digest, holders), name="fetch-bundle")
            self._fetching[digest] = task
            task.add_done_callback(lambda done: self._fetched(digest, done))
        # Shielded: one caller that goes away must not take the fetch from the others.
        return await asyncio.shield(task)

    async def close(self) -> None:
        """Cancels fetches in progress."""
        tasks = list(self._fetching.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _fetched(self, digest: bytes, task: asyncio.Task[Tokenizer]) -> None:
        del self._fetching[digest]
        if task.cancelled() or task.exception() is not None:
            return  # whoever waited has the error
        self._kept[digest] = task.result()
        if len(self._kept) > self._limit:
            self._kept.popitem(last=False)

    async def _fetch(self, digest: bytes, holders: Sequence[Member]) -> Tokenizer:
        failures: list[str] = []
        for member in holders:
            try:
                data = await fetch_bundle(self._channels, member.address, digest, self._timeout_s)
                return await asyncio.to_thread(_open, data, digest)
            except PdserveError as error:
                failures.append(f"{member.id}: {error}")
        raise Unavailable(
            f"no worker delivered tokenizer {digest.hex()[:16]}: {'; '.join(failures) or 'none has it'}",
            reason="NO_TOKENIZER_BUNDLE",
            field="tokenizer",
            remedy="check that the workers of this model are reachable",
        )


def _open(data: bytes, digest: bytes) -> Tokenizer:
    """Parses, verifies and loads a bundle; in a thread."""
    bundle = Bundle.from_bytes(data)
    if bundle.digest() != digest:
        raise DataLoss("the tokenizer bundle is not the one asked for", reason="BUNDLE_DIGEST", field="tokenizer")
    return Tokenizer(bundle)


async def encode(prompt: Prompt, tokenizer: Tokenizer | None) -> tuple[int, ...]:
    """The prompt's ids. Raises InvalidRequest for an empty prompt, or text without a tokenizer."""
    if isinstance(prompt, TokenPrompt):
        return prompt.ids
    if tokenizer is None:
        raise InvalidRequest(
            "this model has no tokenizer", reason="NO_TOKENIZER", field="prompt", remedy="send token ids"
        )
    if isinstance(prompt, ChatPrompt):
        if not prompt.messages:
            raise _empty("messages", "send at least one message")
        characters = sum(len(message.get("content", "")) for message in prompt.messages)
        if characters <= _INLINE_CHARACTERS:
            return tokenizer.apply_chat(prompt.messages)
        return await asyncio.to_thread(tokenizer.apply_chat, prompt.messages)
    if not prompt.text:
        raise _empty("prompt", "send some text")
    if len(prompt.text) <= _INLINE_CHARACTERS:
        return tokenizer.encode(prompt.text)
    return await asyncio.to_thread(tokenizer.encode, prompt.text)


def _empty(field: str, remedy: str) -> InvalidRequest:
    return InvalidRequest("the prompt is empty", reason="EMPTY_PROMPT", field=field, remedy=remedy)


def holders(members: Sequence[Member], digest: bytes) -> tuple[Member, ...]:
    """Those that can deliver a bundle."""
    return tuple(member for member in members if member.record.contract.tokenizer_digest == digest)


def unknown_model(model: str, served: Sequence[str]) -> NotFound:
    listed = ", ".join(served) or "none"
    return NotFound(
        f"model {model!r} is not served", reason="UNKNOWN_MODEL", field="model", remedy=f"served models: {listed}"
    )
