"""A sender that computes nothing: it pushes caches of zeros as slowly as a prefill worker would compute them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from cache_transfer.codec import ITEM_BYTES
from cache_transfer.contract import WorkerContract
from cache_transfer.pages import Range
from cache_transfer.sender import HandoffSender
from cache_transfer.wire import identity_from_proto, ticket_from_proto
from pdserve.rpc.settings import RpcSettings
from pdserve.v1 import decode_pb2
from prefill_worker.peers import Peers

CHUNK_TOKENS = 256  # as a prefill worker's
GROUP_BYTES = 1 << 20  # as it announces


class _Zeros:
    """A cache of the contract's shape, any part of it."""

    def __init__(self, contract: WorkerContract, tokens: int) -> None:
        self._rows = {
            (plane.name, layer): plane.head_dim * ITEM_BYTES[contract.kv_dtype]
            for layer, planes in enumerate(contract.planes)
            for plane in planes
        }
        widest = max(plane.heads for planes in contract.planes for plane in planes)
        self._data = memoryview(bytes(tokens * widest * max(self._rows.values())))

    def read(self, plane: str, layer: int, heads: Range, tokens: Range) -> Sequence[memoryview]:
        size = (tokens[1] - tokens[0]) * (heads[1] - heads[0]) * self._rows[plane, layer]
        return (self._data[:size],)


class PacedSender:
    """Hands over caches of `tokens` tokens, each within `seconds`. `close` ends its connections."""

    def __init__(self, contract: WorkerContract, tokens: int) -> None:
        self._peers = Peers(RpcSettings(), shares_memory=True)
        self._contract = contract
        self._tokens = tokens
        self._source = _Zeros(contract, tokens)
        self.seconds = 1.0

    async def __call__(self, admitted: decode_pb2.Admitted) -> None:
        """One handoff; a benchmark's `HandOver`."""
        ticket, identity = ticket_from_proto(admitted.ticket), identity_from_proto(admitted.identity)
        address = next(each.address for each in ticket.endpoints if each.transport == "grpc")
        sender = HandoffSender(
            self._peers.take(address), ticket, identity, self._contract, self._source, logits_only=admitted.logits_only
        )
        computing = asyncio.create_task(self._compute(sender))
        try:
            await sender.run()
        finally:
            computing.cancel()
            await self._peers.give_back(address)

    async def close(self) -> None:
        await self._peers.close()

    async def _compute(self, sender: HandoffSender) -> None:
        """Announces layers when a prefill core would have them."""
        layers = len(self._contract.planes)
        token = sum(plane.heads * plane.head_dim for planes in self._contract.planes for plane in planes)
        layer_bytes = CHUNK_TOKENS * token * ITEM_BYTES[self._contract.kv_dtype] // layers  # on average
        group = max(1, GROUP_BYTES // layer_bytes)
        loop = asyncio.get_running_loop()
        began, done, parts = loop.time(), 0, -(-self._tokens // CHUNK_TOKENS) * -(-layers // group)
        for start in range(0, self._tokens, CHUNK_TOKENS):
            for first in range(0, layers, group):
                done += 1
                await asyncio.sleep(began + self.seconds * done / parts - loop.time())
                for layer in range(first, min(first + group, layers)):
                    sender.computed(layer, (start, min(start + CHUNK_TOKENS, self._tokens)))
        sender.logits("fp32", bytes(4 * self._contract.vocab_size), self._tokens - 1)
