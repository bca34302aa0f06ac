"""The Jinja environment that chat templates run in: what public checkpoints' templates rely on, and no more."""

from __future__ import annotations

import json
import re
from datetime import datetime
from typing import NoReturn

from jinja2 import TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_RENDERED_CHARS = 4 * 1024 * 1024
# A conversion whose width or precision is taken from the arguments or has five digits or more.
_WIDE_FORMAT = re.compile(r"%(?:\([^)]*\))?[-+ #0]*(?:\*|\d{5,}|\d*\.(?:\*|\d{5,}))")


class Environment(ImmutableSandboxedEnvironment):
    """The sandbox, with the operators that make much out of little bounded."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def call_binop(self, context: Context, operator: str, left: object, right: object) -> object:
        _check_size(operator, left, right)
        return super().call_binop(context, operator, left, right)


def _check_size(operator: str, left: object, right: object) -> None:
    match operator, left, right:
        case "*", (str() | list() | tuple()) as items, int(count):
            size = len(items) * count
        case "*", int(count), (str() | list() | tuple()) as items:
            size = len(items) * count
        case "+", (str() | list() | tuple()) as items, (str() | list() | tuple()) as more:
            size = len(items) + len(more)
        case (("*" | "**"), int(), int()):
            size = left.bit_length() * (right if operator == "**" else 1)
        case "%", str(), _:
            size = MAX_RENDERED_CHARS + 1 if _WIDE_FORMAT.search(left) else 0
        case _:
            size = 0
    if size > MAX_RENDERED_CHARS:
        raise SecurityError(f"the result of {operator!r} would be too large")


class _GenerationBlock(Extension):
    """`{% generation %}` marks assistant text for training; here its body is simply rendered."""

    tags = {"generation"}  # noqa: RUF012 (the base class declares it so)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def environment() -> ImmutableSandboxedEnvironment:
    made = Environment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationBlock])
    made.filters["tojson"] = _to_json
    made.globals["raise_exception"] = _raise_exception
    made.globals["strftime_now"] = _strftime_now
    return made


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes <, > and & for HTML, which a prompt must not contain.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: object) -> NoReturn:
    raise TemplateError(str(message))


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
