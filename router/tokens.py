"""Tokenizers by digest: fetched from a worker that has it, verified, and kept.

The cache is bounded (least recently used goes first); concurrent requests for one digest
share one fetch. What the pool's models need is fetched when the router learns of them, as far as
there is room, so that their first requests need not wait for it. Building a tokenizer and encoding
long texts run off the event loop, and a text that cannot fit is refused before it is encoded.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Mapping, Sequence

from pdserve.errors import DataLoss, InvalidRequest, NotFound, PdserveError, Unavailable, shown
from pdserve.registry.records import READY
from pdserve.tokenizer import Bundle, Tokenizer
from router.channels import WorkerChannels
from router.gate import Member
from router.placement import too_long
from router.request import ChatPrompt, Prompt, TextPrompt, TokenPrompt
from router.room import Room
from router.wire import fetch_bundle

MAX_MESSAGES = 4096
_INLINE_CHARACTERS = 2000  # encoding this much takes well under a millisecond
_MESSAGE_CHARACTERS = 50  # what a template does for a message takes as long as encoding this much


class BundleCache:
    """See the module's docstring. Belongs to one event loop."""

    def __init__(self, channels: WorkerChannels, limit: int, timeout_s: float) -> None:
        self._channels = channels
        self._limit = limit
        self._timeout_s = timeout_s
        self._kept: OrderedDict[bytes, Tokenizer] = OrderedDict()
        self._fetching: dict[bytes, asyncio.Task[Tokenizer]] = {}
        self._in_pool: set[bytes] = set()  # digests of the ready workers, when they were looked at last

    async def get(self, digest: bytes, holders: Sequence[Member]) -> Tokenizer:
        """The tokenizer with this digest; asks `holders` in turn when it is not here.

        Raises Unavailable (reason NO_TOKENIZER_BUNDLE) when none of them delivers it.
        """
        if digest in self._kept:
            self._kept.move_to_end(digest)
            return self._kept[digest]
        task = self._fetching.get(digest) or self._begin(digest, holders)
        # Shielded: one caller that goes away must not take the fetch from the others.
        return await asyncio.shield(task)

    def prepare(self, members: Sequence[Member]) -> None:
        """Begins to fetch what is new among the ready workers and fits beside what is kept; once, even if it fails."""
        known = {m.record.contract.tokenizer_digest for m in members if m.record.state == READY} - {b""}
        new, self._in_pool = known - self._in_pool - self._kept.keys() - self._fetching.keys(), known
        for digest in sorted(new)[: max(0, self._limit - len(self._kept) - len(self._fetching))]:
            self._begin(digest, holders(members, digest))

    async def close(self) -> None:
        """Cancels fetches in progress."""
        tasks = list(self._fetching.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _begin(self, digest: bytes, holders: Sequence[Member]) -> asyncio.Task[Tokenizer]:
        task = asyncio.create_task(self._fetch(digest, holders), name="fetch-bundle")
        self._fetching[digest] = task
        task.add_done_callback(lambda done: self._fetched(digest, done))
        return task

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
        raise DataLoss(
            "the tokenizer bundle is not the one asked for",
            reason="BUNDLE_DIGEST",
            field="tokenizer",
            remedy="ask again; if it stays so, restart the worker that sent it",
        )
    return Tokenizer(bundle)


async def encode(prompt: Prompt, tokenizer: Tokenizer | None, limit: Room) -> tuple[int, ...]:
    """The prompt's ids. Raises InvalidRequest for an empty prompt, text without a tokenizer or beyond `limit`."""
    if isinstance(prompt, TokenPrompt):
        return prompt.ids
    if tokenizer is None:
        raise InvalidRequest(
            "this model has no tokenizer", reason="NO_TOKENIZER", field="prompt", remedy="send token ids"
        )
    if isinstance(prompt, ChatPrompt):
        check_message_count(len(prompt.messages))
        size = sum(_MESSAGE_CHARACTERS + _size(message) for message in prompt.messages) + _size(prompt.tools)
    else:
        size = len(prompt.text)
    if not size:
        raise _empty("prompt", "send some text")
    if size <= _INLINE_CHARACTERS:
        return _encode(prompt, tokenizer, limit)
    return await asyncio.to_thread(_encode, prompt, tokenizer, limit)


def check_message_count(count: int) -> None:
    """Raises InvalidRequest. For doors too, before they turn each message into an object."""
    if not count:
        raise _empty("messages", "send at least one message")
    if count > MAX_MESSAGES:
        raise InvalidRequest(
            f"there are {count} messages",
            reason="TOO_MANY_MESSAGES",
            field="messages",
            remedy=f"send at most {MAX_MESSAGES}",
        )


def _encode(prompt: TextPrompt | ChatPrompt, tokenizer: Tokenizer, limit: Room) -> tuple[int, ...]:
    """On the event loop or in a thread."""
    if isinstance(prompt, ChatPrompt):
        text = tokenizer.render_chat(
            prompt.messages,
            add_generation_prompt=prompt.add_generation_prompt,
            tools=prompt.tools,
            continue_final_message=prompt.continue_final_message,
            variables=prompt.variables,
        )
        # Special tokens, the begin token too, are the template's business.
        return tokenizer.encode(_fitting(text, tokenizer, limit), add_special=False)
    return tokenizer.encode(_fitting(prompt.text, tokenizer, limit), add_special=prompt.add_special)


def _size(value: object) -> int:
    """Characters, roughly, of JSON data."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(len(key) + _size(item) for key, item in value.items())
    return sum(map(_size, value)) if isinstance(value, (list, tuple)) else 1


def _fitting(text: str, tokenizer: Tokenizer, limit: Room) -> str:
    """The text. Raises InvalidRequest when it is so long that its tokens need not be counted."""
    size = len(text.encode("utf-8", "surrogatepass"))  # what is no text is `Tokenizer.encode`'s to refuse
    if size > tokenizer.most_bytes(limit.prompt):
        raise too_long(f"{size} bytes", limit)
    return text


def _empty(field: str, remedy: str) -> InvalidRequest:
    return InvalidRequest("the prompt is empty", reason="EMPTY_PROMPT", field=field, remedy=remedy)


def holders(members: Sequence[Member], digest: bytes) -> tuple[Member, ...]:
    """Those that can deliver a bundle."""
    return tuple(member for member in members if member.record.contract.tokenizer_digest == digest)


def unknown_model(model: str, served: Sequence[str]) -> NotFound:
    listed = ", ".join(served) or "none"
    return NotFound(
        f"model {shown(model)} is not served", reason="UNKNOWN_MODEL", field="model", remedy=f"served models: {listed}"
    )
