"""One end of a handoff in a process of its own, to be killed: `python -m tests.cache_transfer.far_end send|receive`.

It says one line when it has come so far that the other end can go on, and then waits for its end.

    send      reads from standard input: address, ticket and identity, in hex; announces one layer, "sent"
    receive   prints its address and a ticket and identity, in hex; writes wait from the first one on, "writing"
"""

from __future__ import annotations

import asyncio
import sys

from cache_transfer.contract import HandoffIdentity, Ticket
from cache_transfer.rings import Rings
from cache_transfer.sender import HandoffSender
from cache_transfer.transport import GrpcTransport
from cache_transfer.wire import identity_from_proto, identity_to_proto, ticket_from_proto, ticket_to_proto
from pdserve.rpc.channel import channel
from pdserve.v1 import common_pb2
from tests.cache_transfer.endings import TOKENS
from tests.cache_transfer.pages import WAIT_S, NumpySource
from tests.cache_transfer.support import make_contract, make_pair, random_cache

PLENTY_S = 6 * WAIT_S


def line_of(address: str, ticket: Ticket, identity: HandoffIdentity) -> str:
    parts = ticket_to_proto(ticket).SerializeToString(), identity_to_proto(identity).SerializeToString()
    return " ".join((address, *(part.hex() for part in parts)))


def read_line(line: str) -> tuple[str, Ticket, HandoffIdentity]:
    address, ticket, identity = line.split()
    return (
        address,
        ticket_from_proto(common_pb2.Ticket.FromString(bytes.fromhex(ticket))),
        identity_from_proto(common_pb2.HandoffIdentity.FromString(bytes.fromhex(identity))),
    )


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


async def send() -> None:
    address, ticket, identity = read_line(sys.stdin.readline())
    contract = make_contract()
    async with channel(address) as link:
        transport = GrpcTransport(link, address, Rings())
        source = NumpySource(contract, TOKENS).fill(random_cache(contract, TOKENS))
        sender = HandoffSender(transport, ticket, identity, contract, source, logits_only=False, deadline_s=PLENTY_S)
        sender.computed(0, (0, TOKENS))
        await sender.run()


async def receive() -> None:
    async with make_pair("shared") as pair:
        pair.host.gated = True
        say(line_of(pair.address, *pair.issue(TOKENS)))
        await asyncio.to_thread(pair.host.writing.wait, PLENTY_S)
        say("writing")
        await asyncio.to_thread(pair.host.gate.wait, PLENTY_S)


if __name__ == "__main__":
    asyncio.run(send() if sys.argv[1] == "send" else receive())
