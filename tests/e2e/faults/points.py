"""Named points in the life of a request, where one process of the installation can be held.

The real parts are wrapped where they talk to each other, in the test's process only:

    decode    Generate's answers; the receiver's stream
    prefill   the sender's stream
    router    its reading of decode's answers; its choice of a pair

A point that was armed is reached once, by a call or stream that began after the arming: its request
stands still there, everything else in the process goes on, and the parent is told. What the parent
then does to the process is up to it. It is told as well when a push or an answer is over.

    idle --arm--> armed --reach--> held --go--> idle
"""

from __future__ import annotations

import asyncio
from multiprocessing.connection import Connection
from typing import Any

from cache_transfer.messages import (
    Ack,
    Commit,
    Frame,
    Frames,
    Grant,
    Logits,
    PackedFrames,
    PushOpening,
    Queued,
    SharedFrames,
)
from cache_transfer.receiver import Receiver
from cache_transfer.transport import GrpcTransport
from decode_worker import service as decode_service
from pdserve.rpc.events import Finish, TokenBatch
from router import planner
from router.gate import Pair
from router.wire import Admitted, DecodeCall
from tests.e2e.faults.table import Step

SOME_FRAMES = 3  # a handoff here has at least six
SOME_TOKENS = 12  # of `questions.OUTPUT`


class Points:
    """The points of this process. The pipe brings ("arm", step) and ("disarm",), which are answered, and ("go",)."""

    armings = 0  # so far

    def __init__(self, pipe: Connection) -> None:
        self.gone = asyncio.Event()
        """The parent has closed its end."""
        self._pipe = pipe
        self._armed: str | None = None
        self._go = asyncio.Event()
        asyncio.get_running_loop().add_reader(pipe.fileno(), self._read)

    def tell(self, *message: object) -> None:
        self._pipe.send(message)

    async def reach(self, step: Step) -> None:
        """Stands still if the step is armed, until the parent says go."""
        if self._armed == step:
            self._armed = None
            self._go.clear()
            self.tell("reached", step.value)
            await self._go.wait()

    def _read(self) -> None:
        try:
            command, *arguments = self._pipe.recv()
        except (EOFError, ConnectionResetError):
            asyncio.get_running_loop().remove_reader(self._pipe.fileno())
            self.gone.set()
            return
        if command == "go":
            self._go.set()
        else:
            self._armed = arguments[0] if command == "arm" else None
            self.armings += command == "arm"
            self.tell("noted")


def watch_decode(points: Points) -> None:
    class Service(decode_service.DecodeService):
        async def Generate(self, requests: Any, context: Any) -> None:
            answers: Any = _Answers(context, points)
            try:
                await super().Generate(requests, answers)
            finally:
                points.tell("over", "")

    _put(decode_service, "DecodeService", Service)
    receive = Receiver.receive

    async def watched(self: Receiver, stream: Any) -> None:
        await receive(self, _Received(stream, points))

    _put(Receiver, "receive", watched)


def watch_prefill(points: Points) -> None:
    original = GrpcTransport.open

    def watched(self: GrpcTransport, *arguments: Any, **named: Any) -> Any:
        return _Sent(original(self, *arguments, **named), points)

    _put(GrpcTransport, "open", watched)


def watch_router(points: Points) -> None:
    following = DecodeCall.next
    place: Any = vars(planner)["place"]

    async def watched_next(self: DecodeCall) -> Any:
        since = vars(self).setdefault("_since", points.armings)
        event = await following(self)
        if since != points.armings:
            return event
        if isinstance(event, Admitted):
            await points.reach(Step.ADMIT)
        elif isinstance(event, TokenBatch):
            for step in token_steps(event.first_index, len(event.ids)):
                await points.reach(step)
        elif isinstance(event, Finish):
            await points.reach(Step.RELEASE)
        return event

    def watched_place(*arguments: Any, **named: Any) -> Pair:
        pair: Pair = place(*arguments, **named)
        points.tell("pair", pair.prefill.id, pair.decode.id)
        return pair

    _put(DecodeCall, "next", watched_next)
    _put(planner, "place", watched_place)


class _Wrapper:
    """Everything but what a subclass overrides goes straight to the real thing."""

    def __init__(self, inner: Any, points: Points) -> None:
        self._inner = inner
        self._points = points
        self._since = points.armings
        self._frames = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def _reach(self, step: Step) -> None:
        if self._since == self._points.armings:
            await self._points.reach(step)

    async def _reach_message(self, message: Any) -> None:
        """Either side of a push: one of its messages on the way to the receiver."""
        if isinstance(message, PushOpening):
            await self._reach(Step.OPEN)
        elif isinstance(message, Queued):  # of frames that may be some by now, and more come
            before, self._frames = self._frames, SOME_FRAMES
            if before < SOME_FRAMES:
                await self._reach(Step.MID_FRAMES)
        elif isinstance(message, Frame | Frames | PackedFrames | SharedFrames):
            before = self._frames
            self._frames += 1 if isinstance(message, Frame) else len(message.frames)
            if before < SOME_FRAMES <= self._frames:
                await self._reach(Step.MID_FRAMES)
        elif isinstance(message, Logits):
            await self._reach(Step.LOGITS)
        elif isinstance(message, Commit):
            await self._reach(Step.COMMIT)


class _Answers(_Wrapper):
    """The context of Decode/Generate: holds before an answer is written."""

    async def write(self, event: Any) -> None:
        kind = event.WhichOneof("event")
        if kind == "admitted":
            await self._reach(Step.ADMIT)
        elif kind == "tokens":
            for step in token_steps(event.tokens.first_index, len(event.tokens.ids)):
                await self._reach(step)
        elif kind == "finish":
            await self._reach(Step.RELEASE)
        await self._inner.write(event)


class _Received(_Wrapper):
    """The receiver's stream: holds after a message was read, and before the grant is written."""

    async def read(self) -> Any:
        message = await self._inner.read()
        await self._reach_message(message)
        return message

    async def write(self, message: Any) -> None:
        if isinstance(message, Grant):
            await self._reach(Step.GRANT)
        await self._inner.write(message)


class _Sent(_Wrapper):
    """The sender's stream: holds before a message is sent, and after an answer was read."""

    _acknowledged = ""

    async def send(self, message: Any) -> None:
        await self._reach_message(message)
        await self._inner.send(message)

    async def receive(self) -> Any:
        message = await self._inner.receive()
        if isinstance(message, Grant):
            await self._reach(Step.GRANT)
        elif isinstance(message, Ack):
            self._acknowledged = "acknowledged"
            await self._reach(Step.RELEASE)
        return message

    async def close(self) -> None:
        await self._inner.close()
        self._points.tell("over", self._acknowledged)


def token_steps(first: int, count: int) -> tuple[Step, ...]:
    """What a batch of output tokens [first, first + count) stands for."""
    steps = (Step.FIRST_TOKEN,) if first == 0 else ()
    return (*steps, Step.MID_STREAM) if first + count > SOME_TOKENS else steps


def _put(owner: Any, name: str, value: object) -> None:
    assert hasattr(owner, name)
    setattr(owner, name, value)
