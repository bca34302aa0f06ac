"""Frames that must be refused: damaged, moved, missing, or such as no sender could mean."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import msgpack

from pdserve.conformance.hostile import FOREIGN, FRAMES, Hostile, Make, changed, field_bytes, flip_first, flip_middle
from pdserve.conformance.streams import Draft, together, wire


def frames() -> Iterator[Hostile]:
    yield from _frames()
    yield from _together()
    yield from _headers()


def _frames() -> Iterator[Hostile]:
    def refuse(name: str, reason: str, make: Make) -> Hostile:
        return Hostile(name, FRAMES, (reason,), make)

    yield refuse("payload with a flipped bit", "FRAME_DIGEST", _frame(payload=flip_middle))
    yield refuse("digest with a flipped bit", "FRAME_DIGEST", _frame(digest=flip_first))
    yield refuse("last payload with a flipped bit", "FRAME_DIGEST", _frame(place=-3, payload=flip_middle))
    yield refuse("digest made with another secret", "FRAME_DIGEST", _foreign_frame)
    yield refuse("two payloads swapped", "FRAME_DIGEST", _swapped_payloads)
    yield refuse("digest of 31 bytes", "MALFORMED_MESSAGE", _frame(digest=lambda digest: digest[:-1]))
    yield refuse("two frames swapped", "FRAME_SEQUENCE", _reordered(lambda frames: [frames[1], frames[0], *frames[2:]]))
    yield refuse("a frame twice", "FRAME_SEQUENCE", _reordered(lambda frames: [frames[0], *frames]))
    yield refuse("a frame missing", "FRAME_SEQUENCE", _reordered(lambda frames: frames[1:]))
    yield refuse("a frame twice, renumbered", "FRAME_OVERLAP", _rearranged(lambda frames: [frames[0], *frames]))
    yield refuse(
        "later tokens first, renumbered", "FRAME_GAP", _rearranged(lambda frames: [frames[1], frames[0], *frames[2:]])
    )
    yield refuse("earlier tokens missing, renumbered", "FRAME_GAP", _rearranged(lambda frames: frames[1:]))
    yield refuse("one token sent twice", "FRAME_OVERLAP", _overlapping)
    yield refuse("the last frame missing, renumbered", "FRAMES_MISSING", _rearranged(lambda frames: frames[:-1]))
    yield refuse("no frame at all", "FRAMES_MISSING", _rearranged(lambda frames: []))
    yield refuse("an unknown plane", "FRAME_PLANE", _header(plane="q"))
    yield refuse("a layer after the last", "FRAME_PLANE", _header(layer=1 << 20))
    yield refuse("the largest layer number", "FRAME_PLANE", _header(layer=2**32 - 1))
    yield refuse("another dtype", "FRAME_DTYPE", _header(dtype="int8"))
    yield refuse("heads beyond the plane", "FRAME_HEADS", _header(heads=[0, 2**32 - 1]))
    yield refuse("tokens beyond the grant", "FRAME_TOKENS", _header(tokens=[0, 2**32 - 1]))
    yield refuse("tokens after the prompt", "FRAME_TOKENS", _tokens_after)
    yield refuse("a payload one byte short", "FRAME_SIZE", _payload(lambda payload: payload[:-1]))
    yield refuse("a payload one byte long", "FRAME_SIZE", _payload(lambda payload: payload + b"\0"))
    yield refuse("an empty payload", "FRAME_SIZE", _explicit(payload=b""))
    yield refuse("a payload of 2 MiB", "FRAME_SIZE", _payload(lambda _: bytes(2 << 20)))
    yield refuse("fields out of order", "MALFORMED_MESSAGE", _raw_frame(lambda h, p, d: p + h + d))
    yield refuse("a field twice", "MALFORMED_MESSAGE", _raw_frame(lambda h, p, d: h + h + p + d))
    yield refuse("no digest", "MALFORMED_MESSAGE", _raw_frame(lambda h, p, d: h + p))
    yield refuse("an unknown field", "MALFORMED_MESSAGE", _raw_frame(lambda h, p, d: h + p + d + field_bytes(4, b"x")))
    yield refuse("a frame that is cut", "MALFORMED_MESSAGE", lambda d: changed(d, 1, lambda data: data[:-8]))
    yield refuse("bytes after the frame", "MALFORMED_MESSAGE", lambda d: changed(d, 1, lambda data: data + b"\x12\0"))


def _together() -> Iterator[Hostile]:
    """Several frames in a message. A receiver that takes none so refuses the message itself."""

    def refuse(name: str, reason: str, change: Callable[[Any], None]) -> Hostile:
        def make(draft: Draft) -> list[bytes]:
            requests = together(draft.seal(), len(draft.frames))
            change(requests[1].frames.frames)
            return wire(requests)

        return Hostile(f"frames together: {name}", FRAMES, (reason, "MALFORMED_MESSAGE"), make)

    yield refuse("the last payload with a flipped bit", "FRAME_DIGEST", _damage_last)
    yield refuse("the first one missing", "FRAME_SEQUENCE", lambda frames: frames.pop(0))
    yield refuse("one twice", "FRAME_SEQUENCE", lambda frames: frames.insert(0, frames[0]))
    yield refuse("none", "MALFORMED_MESSAGE", lambda frames: frames.clear())
    yield refuse("one without a digest", "MALFORMED_MESSAGE", lambda frames: frames[-1].ClearField("digest"))


def _damage_last(frames: Any) -> None:
    frames[-1].payload = flip_middle(frames[-1].payload)


def _frame(place: int = 1, **changes: Callable[[bytes], bytes]) -> Make:
    """Fields of one frame changed after it was digested."""

    def make(draft: Draft) -> list[bytes]:
        requests = draft.seal()
        for name, change in changes.items():
            setattr(requests[place].frame, name, change(getattr(requests[place].frame, name)))
        return wire(requests)

    return make


def _header(**changes: Any) -> Make:
    """Fields of the first frame's header changed before it was digested."""

    def make(draft: Draft) -> list[bytes]:
        draft.frames[0].header = {**_fields(draft), **changes}
        return draft.messages()

    return make


def _raw_header(change: Callable[[dict[str, Any]], bytes]) -> Make:
    def make(draft: Draft) -> list[bytes]:
        draft.frames[0].header = change(_fields(draft))
        return draft.messages()

    return make


def _payload(change: Callable[[bytes], bytes]) -> Make:
    def make(draft: Draft) -> list[bytes]:
        draft.frames[0].payload = change(draft.frames[0].payload)
        return draft.messages()

    return make


def _reordered(change: Callable[[list[bytes]], list[bytes]]) -> Make:
    """Finished frames in another order."""

    def make(draft: Draft) -> list[bytes]:
        messages = draft.messages()
        return [messages[0], *change(messages[1:-2]), *messages[-2:]]

    return make


def _rearranged(change: Callable[[list[Any]], list[Any]]) -> Make:
    """Frames in another order, numbered and digested anew: only coverage can tell."""

    def make(draft: Draft) -> list[bytes]:
        draft.frames = [replace(f, header=dict(_as_dict(f.header))) for f in change(draft.frames)]
        draft.renumber()
        return draft.messages()

    return make


def _overlapping(draft: Draft) -> list[bytes]:
    """The second frame of a plane begins one token early."""
    first, second = draft.frames[0], draft.frames[1]
    a, b = _as_dict(first.header), _as_dict(second.header)
    row = len(first.payload) // (a["tokens"][1] - a["tokens"][0])
    second.header = {**b, "tokens": [b["tokens"][0] - 1, b["tokens"][1]]}
    second.payload = first.payload[-row:] + second.payload
    return draft.messages()


def _tokens_after(draft: Draft) -> list[bytes]:
    first, end = _fields(draft), draft.identity.end
    length = first["tokens"][1] - first["tokens"][0]
    return _header(tokens=[end, end + length])(draft)


def _foreign_frame(draft: Draft) -> list[bytes]:
    messages = draft.messages()
    draft.ticket = replace(draft.ticket, secret=FOREIGN)
    return [messages[0], draft.messages()[1], *messages[2:]]


def _swapped_payloads(draft: Draft) -> list[bytes]:
    """Of two planes of one layer: equal in shape, so only the digest can tell."""
    requests = draft.seal()
    first = requests[1].frame
    other = next(
        r.frame
        for r in requests[2:-2]
        if len(r.frame.payload) == len(first.payload) and r.frame.payload != first.payload
    )
    first.payload, other.payload = other.payload, first.payload
    return wire(requests)


def _explicit(**changes: bytes) -> Make:
    """An empty field that is there all the same: protobuf libraries leave it out."""

    def make(draft: Draft) -> list[bytes]:
        draft.frames[0] = replace(draft.frames[0], **changes)
        return _raw_frame(lambda header, payload, digest: header + payload + digest)(draft)

    return make


def _raw_frame(join: Callable[[bytes, bytes, bytes], bytes]) -> Make:
    """The first frame's three fields put together in another way."""

    def make(draft: Draft) -> list[bytes]:
        requests = draft.seal()
        frame = requests[1].frame
        body = join(field_bytes(1, frame.header), field_bytes(2, frame.payload), field_bytes(3, frame.digest))
        messages = wire(requests)
        messages[1] = field_bytes(2, body)
        return messages

    return make


def _headers() -> Iterator[Hostile]:
    def refuse(name: str, make: Make) -> Hostile:
        return Hostile(f"header: {name}", FRAMES, ("FRAME_HEADER",), make)

    for key in ("plane", "layer", "heads", "tokens", "seq", "dtype"):
        yield refuse(f"no {key}", _raw_header(lambda h, key=key: _pack({k: v for k, v in h.items() if k != key})))  # type: ignore[misc]
    yield refuse("an unknown key", _raw_header(lambda h: _pack({**h, "blocks": 1})))
    yield refuse("an unknown key for a known one", _raw_header(lambda h: _pack({**_less(h, "seq"), "blocks": 1})))
    yield refuse("a key twice", _raw_header(_repeated_key))
    wrong: dict[str, tuple[str, Any]] = {
        "a layer of 2^32": ("layer", 2**32),
        "a layer of 2^63": ("layer", 2**63),
        "a negative layer": ("layer", -1),
        "a layer that is true": ("layer", True),
        "a layer that is a float": ("layer", 0.0),
        "a layer that is text": ("layer", "0"),
        "a layer that is nil": ("layer", None),
        "a negative seq": ("seq", -1),
        "a plane that is a number": ("plane", 0),
        "a plane that is bytes": ("plane", b"k"),
        "a dtype that is nil": ("dtype", None),
        "empty heads": ("heads", [0, 0]),
        "reversed heads": ("heads", [1, 0]),
        "negative heads": ("heads", [-1, 1]),
        "heads as one number": ("heads", 1),
        "heads of one number": ("heads", [1]),
        "heads of three numbers": ("heads", [0, 1, 2]),
        "heads as a map": ("heads", {0: 1}),
        "empty tokens": ("tokens", [1, 1]),
        "reversed tokens": ("tokens", [2, 1]),
        "tokens up to 2^40": ("tokens", [0, 2**40]),
        "tokens that are floats": ("tokens", [0.0, 1.0]),
        "tokens within tokens": ("tokens", [[0], [1]]),
    }
    for name, (key, value) in wrong.items():
        yield refuse(name, _header(**{key: value}))
    yield refuse("a byte after the map", _raw_header(lambda h: _pack(h) + b"\xc0"))
    yield refuse("cut", _raw_header(lambda h: _pack(h)[:-1]))
    yield refuse("empty", _explicit(header=b""))
    yield refuse("an array", _raw_header(lambda h: _pack(list(h.values()))))
    yield refuse("a pickle", _raw_header(lambda h: pickle.dumps(h, protocol=4)))
    yield refuse("more than 256 bytes", _header(plane="k" * 250))
    yield refuse("a map of 2^32 - 1 keys", _raw_header(lambda _: b"\xdf\xff\xff\xff\xff"))
    yield refuse("a text of 2^32 - 1 bytes", _raw_header(lambda _: b"\x86\xdb\xff\xff\xff\xff"))


def _repeated_key(header: dict[str, Any]) -> bytes:
    """Six entries, `layer` twice and no `seq`."""
    return b"\x86" + _pack(_less(header, "seq"))[1:] + _pack("layer") + _pack(0)


def _fields(draft: Draft) -> dict[str, Any]:
    return _as_dict(draft.frames[0].header)


def _as_dict(header: dict[str, Any] | bytes) -> dict[str, Any]:
    if isinstance(header, bytes):
        unpacked: dict[str, Any] = msgpack.unpackb(header)
        return unpacked
    return header


def _less(header: dict[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in header.items() if name != key}


def _pack(value: Any) -> bytes:
    packed: bytes = msgpack.packb(value)
    return packed
