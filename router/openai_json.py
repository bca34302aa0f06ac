"""The bytes of a body to a checked model: sizes before parsing, and one error that names the first field at fault."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import from_json

from pdserve.errors import MAX_SHOWN, InvalidRequest

MAX_ENTRIES = 20_000  # of all lists and objects of a body together
MAX_IDS = 1 << 19  # besides, where a body may hold token ids: they are the cheapest of entries
_FEW_ENTRIES_BYTES = 2 * MAX_ENTRIES  # an entry is at least a digit and a comma


class Strict(BaseModel):
    """An object whose unknown fields are refused: an option that is silently ignored looks as if it worked."""

    model_config = ConfigDict(extra="forbid", frozen=True)


Body = TypeVar("Body", bound=Strict)


@dataclass(frozen=True)
class KnownFields:
    """What to say of fields that clients send, and that are not served."""

    neutral: frozenset[str] = frozenset()  # only values are taken that ask for nothing
    instead: Mapping[str, str] = field(default_factory=dict)  # unknown field -> remedy


NONE = KnownFields()


def parse(data: bytes, kind: type[Body], *, ids: str = "", known: KnownFields = NONE) -> Body:
    """Raises InvalidRequest naming the first field that is unknown, missing or of the wrong type.

    An unknown field that is null asks for nothing, and is left out: clients write their whole objects.

    Args:
        ids: the field in which up to MAX_IDS token ids may stand beside the other entries.
    """
    try:
        if len(data) > _FEW_ENTRIES_BYTES:
            _check_marks(data, MAX_ENTRIES + (MAX_IDS if ids else 0))
            _check_entries(from_json(data), ids)
        return _without_nulls(data, kind)
    except ValidationError as error:
        raise _explain(error.errors(include_url=False)[0], known) from error
    except ValueError as error:  # from_json's; ValidationError is one, too
        raise _not_json(str(error)) from error


def validate(value: Any, kind: type[Body], where: str) -> Body:
    """One part of a body that was parsed before; `where` it stood. Raises InvalidRequest as `parse` does."""
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        raise _explain({**problem, "loc": (where, *problem["loc"])}, NONE) from error


def _without_nulls(data: bytes, kind: type[Body]) -> Body:
    """The body, less unknown fields that are null. They are looked for only where a body cannot be taken as it is."""
    try:
        return kind.model_validate_json(data)
    except ValidationError as error:
        problems = error.errors(include_url=False)
        nulls = [p["loc"] for p in problems if p["type"] == "extra_forbidden" and p["input"] is None]
        if not nulls:
            raise
    body = from_json(data)
    for *path, name in nulls:
        place = body
        for part in path:
            known = isinstance(place, dict) or (isinstance(place, list) and isinstance(part, int))
            place = place[part] if known and (isinstance(part, int) or part in place) else None
        if isinstance(place, dict):
            place.pop(name, None)
    return kind.model_validate(body)


def refused(field: str, problem: str, remedy: str, reason: str = "INVALID_FIELD") -> InvalidRequest:
    return InvalidRequest(problem, reason=reason, field=field, remedy=remedy)


def _explain(problem: Any, known: KnownFields) -> InvalidRequest:
    where = _path(problem["loc"])
    if problem["type"] == "extra_forbidden":
        return refused(where, "this field is not supported", known.instead.get(where, "leave it out"), "UNKNOWN_FIELD")
    if problem["loc"] and problem["loc"][0] in known.neutral:
        return refused(str(problem["loc"][0]), "what it asks for is not supported", "leave it out", "UNKNOWN_FIELD")
    if problem["type"] == "missing":
        return refused(where, "this field is missing", "send it", "MISSING_FIELD")
    if problem["type"] == "json_invalid":
        return _not_json(problem["ctx"]["error"])
    return refused(where, str(problem["msg"]).lower(), "correct it")


def _not_json(problem: str) -> InvalidRequest:
    return refused("", f"the body is not JSON: {problem}", "send a JSON object", "INVALID_JSON")


def _check_marks(data: bytes, entries: int) -> None:
    """What parsing would cost is refused before: a body of brackets makes millions of objects in one go.

    A body of n entries has at most n commas, and n + 1 opening brackets and two strings for each entry that is no id.
    """
    plain = data.replace(b"\\\\", b"").replace(b'\\"', b"")  # from here on every quote begins or ends a string
    if plain.count(b'"') <= 4 * (MAX_ENTRIES + 1):
        outside = b"".join(plain.split(b'"')[::2])
        if outside.count(b",") <= entries and outside.count(b"[") + outside.count(b"{") <= MAX_ENTRIES + 1:
            return
    raise _too_many_entries()


def _too_many_entries() -> InvalidRequest:
    problem = f"its lists and objects have more than {MAX_ENTRIES} entries"
    return refused("body", problem, "send fewer", "TOO_MANY_ENTRIES")


def _check_entries(body: Any, ids: str) -> None:
    """Raises InvalidRequest for more than MAX_ENTRIES: checking each against the schema would stop all other work."""
    left = MAX_ENTRIES
    free = id(body.get(ids)) if isinstance(body, dict) and ids else 0
    todo = [body]
    while todo:
        value = todo.pop()
        if id(value) == free:
            left -= _lists_of_ids(value)
        elif isinstance(value, (dict, list)):
            left -= len(value)
            # Their entries only if there are not too many of them already.
            todo += (value.values() if isinstance(value, dict) else value) if left >= 0 else ()
        if left < 0:
            raise _too_many_entries()


def _lists_of_ids(value: Any) -> int:
    """Entries of a list of ids, or of lists of ids, that are no ids."""
    rows = value if isinstance(value, list) and any(isinstance(item, list) for item in value) else [value]
    return sum(1 for row in rows if isinstance(row, list)) + sum(
        1 for row in rows for item in (row if isinstance(row, list) else [row]) if type(item) is not int
    )


def _path(location: tuple[int | str, ...]) -> str:
    """messages[0].content; without the type names that a union adds."""
    text = ""
    for part in location:
        if isinstance(part, int):
            text += f"[{part}]"
        elif part not in ("str", "int", "float") and not part.startswith(("list[", "constrained-", "function-")):
            text += f".{part}" if text else part
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."
