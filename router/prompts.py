"""Prompts of one request, and what they contradict: the same checks for both doors, before a model is known."""

from __future__ import annotations

from typing import Any

from pdserve.errors import InvalidRequest, shown
from router.openai_json import refused
from router.request import TextPrompt, TokenPrompt

MAX_PROMPTS = 128  # of one request, and choices of all of them together


def prompts_answer(given: bool | None, continues: bool) -> bool:
    """Whether the template's header of an answer comes last: by default, unless the last message goes on."""
    return not continues if given is None else given


def check_several(count: int, n: int, record_wanted: bool, record_field: str) -> None:
    """Raises InvalidRequest for more prompts, or choices of them, than one request may have."""
    if count > MAX_PROMPTS:
        problem = f"there are {count} prompts"
        raise refused("prompt", problem, f"send at most {MAX_PROMPTS} in one request", "TOO_MANY_PROMPTS")
    if count * n > MAX_PROMPTS:
        problem = f"{count} prompts with n={shown(n)}"
        raise refused("n", problem, f"ask for at most {MAX_PROMPTS} choices in one request", "TOO_MANY_CHOICES")
    if record_wanted and count > 1:
        raise refused(record_field, "there is one for each request", "send one prompt")


def check_echo(logprobs: int | None) -> None:
    """Raises InvalidRequest where the prompt's text is wanted, and log probabilities with it."""
    if logprobs is not None:
        problem = "log probabilities of a prompt are not computed"
        raise refused("echo", problem, "leave out echo, or logprobs", "PROMPT_LOGPROBS")


def no_prompts() -> InvalidRequest:
    return refused("prompt", "the prompt is empty", "send some text", "EMPTY_PROMPT")


def prompts_of(value: Any, add_special: bool = True) -> tuple[TextPrompt | TokenPrompt, ...]:
    """What a JSON body has as its prompt. Raises InvalidRequest naming the entry that is neither text nor token ids."""
    if isinstance(value, str) or (isinstance(value, list) and value and type(value[0]) is int):
        return (_prompt(value, "prompt", add_special),)
    if not isinstance(value, list):
        raise refused("prompt", f"a {type(value).__name__} is no prompt", "send text or token ids")
    if not value:
        raise no_prompts()
    check_several(len(value), 1, False, "")
    return tuple(_prompt(item, f"prompt[{n}]", add_special) for n, item in enumerate(value))


def _prompt(value: Any, where: str, add_special: bool) -> TextPrompt | TokenPrompt:
    if isinstance(value, str):
        return TextPrompt(value, add_special)
    if not isinstance(value, list):
        raise refused(where, f"a {type(value).__name__} is no prompt", "send text or token ids")
    return TokenPrompt(ids_of(value, where))


def ids_of(value: list[Any], where: str) -> tuple[int, ...]:
    """What is an id of the model is the intake's to know; more than 31 bits never are."""
    if all(type(item) is int and -(2**31) <= item < 2**31 for item in value):
        return tuple(value)
    position = next(n for n, item in enumerate(value) if not (type(item) is int and -(2**31) <= item < 2**31))
    raise refused(f"{where}[{position}]", f"{shown(value[position])} is no token id", "send token ids only")
