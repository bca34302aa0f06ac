"""The Python client: `Client` for plain code, `AsyncClient` for asyncio.

    with Client("127.0.0.1:50051") as client:
        print(client.complete("The capital of France is", max_tokens=8).text)
        for event in client.generate(messages=[{"role": "user", "content": "Hello"}], temperature=0.7):
            if isinstance(event, Tokens):
                print(event.text, end="")

Failures raise the typed errors of `pdserve.errors`, with the server's field, remedy and diff.
"""

from pdserve.client.adapters import Adapter, WorkerAdapters
from pdserve.client.asynchronous import AsyncClient
from pdserve.client.events import Choice, Completion, Event, Tokens, ToolCall
from pdserve.client.request import GenerateOptions
from pdserve.client.status import Contract, Model, Pair, Placement, RecentRequest, Status, Worker, WorkerLoad
from pdserve.client.synchronous import Client
from pdserve.rpc.events import Accepted, Finish, HandoffRecord, ToolCallPart, Usage

__all__ = [
    "Accepted",
    "Adapter",
    "AsyncClient",
    "Choice",
    "Client",
    "Completion",
    "Contract",
    "Event",
    "Finish",
    "GenerateOptions",
    "HandoffRecord",
    "Model",
    "Pair",
    "Placement",
    "RecentRequest",
    "Status",
    "Tokens",
    "ToolCall",
    "ToolCallPart",
    "Usage",
    "Worker",
    "WorkerAdapters",
    "WorkerLoad",
]
