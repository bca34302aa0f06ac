"""A command with many flags, in groups: each group is a dataclass whose fields are flags."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import Field, fields
from inspect import Parameter, Signature
from typing import Any, get_type_hints


def grouped(*groups: type[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorates a function that takes one object of each group: its fields, in this order, become the command's flags.

    Fields are annotated as a command's parameters are, and have a default.
    """
    named = [(group, field) for group in groups for field in fields(group)]
    hints = {name: hint for group in groups for name, hint in get_type_hints(group, include_extras=True).items()}

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        def run(**given: Any) -> None:
            command(*(group(**{field.name: given[field.name] for field in fields(group)}) for group in groups))

        run.__name__, run.__doc__, run.__annotations__ = command.__name__, command.__doc__, hints
        run.__signature__ = Signature([_parameter(field, hints) for _, field in named])  # type: ignore[attr-defined]
        return run

    return decorate


def _parameter(field: Field[Any], hints: dict[str, Any]) -> Parameter:
    return Parameter(field.name, Parameter.KEYWORD_ONLY, default=field.default, annotation=hints[field.name])
