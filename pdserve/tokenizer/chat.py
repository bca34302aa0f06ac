"""Chat messages to prompt text, by the model's own Jinja template in a sandbox.

The environment offers what templates of public checkpoints rely on: trimmed blocks, loop controls,
`raise_exception`, `strftime_now`, a `tojson` that does not escape for HTML, and an inert
`{% generation %}` block. Templates come with the checkpoint an operator chose; messages come from
callers and reach the template as plain JSON data only.

Against runaway templates the whole output, the result of each `+`, `*`, `**` and `%`, and (by the
sandbox) each range are bounded. Time is not: loops that print nothing are the operator's choice of model.

Special-token text inside a message becomes that special token, as the reference implementation
has it by default: whoever writes message text can also write turn markers. A gateway that must
not trust its callers' text has to refuse such text before it gets here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

from jinja2 import Template, TemplateError, meta
from jinja2.exceptions import SecurityError

from pdserve.errors import InvalidRequest
from pdserve.tokenizer.sandbox import MAX_RENDERED_CHARS, environment

MAX_NESTING = 32
_END_MARK = "\ue0f0\ue0f1\ue0f2 "  # characters that no text has; the blank tells whether the template trims
_OWN_NAMES = frozenset({"messages", "tools", "documents", "add_generation_prompt"})
# What running a foreign template can raise besides Jinja's own errors.
_TEMPLATE_FAULTS = (
    TemplateError,
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    MemoryError,
    RecursionError,
    TypeError,
    ValueError,
)


class ChatTemplate:
    """One compiled template; thread-safe, since each render has its own context."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """`special_tokens`: names such as `bos_token` that the template may use."""
        self._source = source
        self._special_tokens = dict(special_tokens)

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, object]] = (),
        continue_final_message: bool = False,
        variables: Mapping[str, object] | None = None,
    ) -> str:
        """The prompt text.

        Args:
            tools: JSON descriptions of functions; a template that takes none is refused.
            continue_final_message: the text ends within the last message, which the model goes on with.
            variables: further names for this template, such as `enable_thinking`.

        Raises InvalidRequest (field "messages", "tools", ...) for bad messages, no template, or one that fails.
        """
        if not self._source:
            raise InvalidRequest(
                "this model has no chat template",
                reason="NO_CHAT_TEMPLATE",
                field="messages",
                remedy="send a text prompt or token ids",
            )
        plain = [self._known_role(message) for message in plain_messages(messages)]
        if tools and not self.takes_tools:
            raise _bad("tools", "the model's chat template takes none", "leave them out", "NO_TOOLS")
        if continue_final_message:
            _mark_end(plain, add_generation_prompt)
        context = {
            **self._special_tokens,
            **_variables(variables or {}),
            "messages": plain,
            "tools": [_plain_data(tool, f"tools[{i}]", 0) for i, tool in enumerate(tools)] or None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        text = self._rendered(context)
        return _cut_at_mark(text) if continue_final_message else text

    def _known_role(self, message: dict[str, object]) -> dict[str, object]:
        """A developer's message is a system message, except for templates that know developers."""
        if message["role"] == "developer" and "developer" not in self._source:
            return {**message, "role": "system"}
        return message

    @cached_property
    def takes_tools(self) -> bool:
        """The template reads `tools`. A template that cannot be parsed takes none: rendering it says why."""
        try:
            return "tools" in meta.find_undeclared_variables(environment().parse(self._source))
        except TemplateError:
            return False

    def _rendered(self, context: Mapping[str, object]) -> str:
        pieces: list[str] = []
        room = MAX_RENDERED_CHARS
        try:
            for piece in self._template.generate(context):
                pieces.append(piece)
                room -= len(piece)
                if room < 0:
                    raise SecurityError(f"the prompt exceeds {MAX_RENDERED_CHARS} characters")
        except _TEMPLATE_FAULTS as error:
            raise InvalidRequest(
                f"the model's chat template refused them: {error or type(error).__name__}",
                reason="CHAT_TEMPLATE",
                field="messages",
                remedy="send roles and an order of turns that this model's template accepts",
            ) from error
        return "".join(pieces)

    @cached_property
    def _template(self) -> Template:
        return environment().from_string(self._source)


def _mark_end(messages: list[dict[str, object]], add_generation_prompt: bool) -> None:
    """Changes the last message: where its text ends has to be found again in what the template makes of it."""
    where = "continue_final_message"
    if add_generation_prompt:
        raise _bad(where, "it contradicts add_generation_prompt", "set one of them", "INVALID_FIELD")
    content = messages[-1].get("content")
    if not isinstance(content, str):
        raise _bad(where, "the last message has no text to go on with", "send its beginning", "INVALID_FIELD")
    messages[-1]["content"] = content + _END_MARK


def _cut_at_mark(text: str) -> str:
    place = text.rfind(_END_MARK.strip())
    if place < 0:
        raise _bad(
            "continue_final_message",
            "the model's chat template does not show the end of the last message",
            "leave it out",
            "CHAT_TEMPLATE",
        )
    # Without the blank the template trims its texts, and would have trimmed the message's own end, too.
    return text[:place] if text.startswith(_END_MARK, place) else text[:place].rstrip()


def _variables(given: Mapping[str, object]) -> dict[str, object]:
    taken = sorted(given.keys() & _OWN_NAMES)
    if taken:
        raise _bad(f"chat_template_kwargs.{taken[0]}", "it is set otherwise", "use the field of that name")
    return {name: _plain_data(value, f"chat_template_kwargs.{name}", 0) for name, value in given.items()}


def plain_messages(messages: Sequence[Mapping[str, object]]) -> list[dict[str, object]]:
    """Copies messages into plain data for a template: role, text content, other keys as JSON data.

    Content may be a list of text parts, which are joined as they are. None content is allowed
    beside tool calls; keys that are None are left out. Raises InvalidRequest naming the message.
    """
    if not messages:
        raise _bad("messages", "there are none", "send at least one message", "EMPTY_PROMPT")
    return [_plain_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _plain_message(message: Mapping[str, object], where: str) -> dict[str, object]:
    if not isinstance(message, Mapping):
        raise _bad(where, f"a {type(message).__name__} is not a message", "send a role and a content")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise _bad(f"{where}.role", f"{role!r} is not a role", "use system, user, assistant or tool")
    plain: dict[str, object] = {
        str(key): _plain_data(value, f"{where}.{key}", 0)
        for key, value in message.items()
        if value is not None and key != "content"
    }
    content = message.get("content")
    if content is not None:
        plain["content"] = _content(content, f"{where}.content")
    elif not message.get("tool_calls"):
        raise _bad(f"{where}.content", "there is none", "send text, or tool calls of an assistant")
    return plain


def _content(content: object, where: str) -> str:
    if isinstance(content, str):
        return _unicode(content, where)
    if not isinstance(content, list | tuple):
        raise _bad(where, f"a {type(content).__name__} is not content", "send text or a list of text parts")
    texts = []
    for i, part in enumerate(content):
        match part:
            case {"type": "text", "text": str(text)}:
                texts.append(_unicode(text, f"{where}[{i}]"))
            case Mapping():
                kind = part.get("type")
                raise _bad(f"{where}[{i}]", f"parts of type {kind!r} are not supported", "send text parts only")
            case _:
                raise _bad(f"{where}[{i}]", f"a {type(part).__name__} is not a part", "send text parts only")
    return "".join(texts)


def _plain_data(value: object, where: str, depth: int) -> object:
    if depth > MAX_NESTING:
        raise _bad(where, "nested too deeply", f"use at most {MAX_NESTING} levels")
    if isinstance(value, str):
        return _unicode(value, where)
    if value is None or type(value) in (int, float, bool):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain_data(item, f"{where}.{key}", depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain_data(item, f"{where}[{i}]", depth + 1) for i, item in enumerate(value)]
    raise _bad(where, f"a {type(value).__name__} is not JSON data", "send JSON data")


def _unicode(text: str, where: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise _bad(where, "a lone surrogate is not a character", "send valid Unicode") from error
    return str(text)


def _bad(where: str, problem: str, remedy: str, reason: str = "INVALID_MESSAGES") -> InvalidRequest:
    return InvalidRequest(problem, reason=reason, field=where, remedy=remedy)
