"""Tool calls: how a model writes them, which its chat template tells, and how they are read off the output.

    hermes   <tool_call>{"name": ..., "arguments": {...}}</tool_call>, any number, text around (Qwen, Hermes, SmolLM3)
    mistral  [TOOL_CALLS][{"name": ..., "arguments": {...}}, ...] to the end of the output
    llama3   the whole output is {"name": ..., "parameters": {...}}, several separated by ;

What does not read as a call of a function that was offered stays text: nothing that the model wrote is lost. A call is
given out whole, once its end has come.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from pdserve.errors import InvalidRequest
from pdserve.request import LARK, MAX_GRAMMAR_BYTES, Grammar, SamplingParams
from pdserve.tokenizer import Tokenizer
from router.openai_json import refused

_SPACE = " \t\r\n"
_BOUNDED_SPACE = {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{0,24}"}
_DECODER = json.JSONDecoder()


@dataclass(frozen=True)
class Call:
    name: str
    arguments: str  # JSON


class Reader(ABC):
    """Reads one output as it comes; what `push` and `close` return, joined, is the whole of it."""

    def __init__(self, names: frozenset[str]) -> None:
        self._names = names
        self._held = ""

    @abstractmethod
    def push(self, text: str) -> tuple[str, list[Call]]:
        """Text to show, and calls that are complete now."""

    @abstractmethod
    def close(self) -> tuple[str, list[Call]]:
        """No more comes."""

    def _call(self, value: object, key: str) -> Call | None:
        match value:
            case {"name": str(name), **rest} if name in self._names and isinstance(rest.get(key, {}), dict):
                return Call(name, json.dumps(rest.get(key, {}), ensure_ascii=False))
        return None


class ToolFormat(ABC):
    name: ClassVar[str]
    sign: ClassVar[str]  # in templates of this format
    marker: ClassVar[str]  # begins a call; a special token in some vocabularies
    key: ClassVar[str] = "arguments"
    id_length: ClassVar[int] = 24  # characters of a call's id

    @abstractmethod
    def reader(self, names: frozenset[str]) -> Reader: ...

    @abstractmethod
    def rules(self, marker: str, several: bool) -> str:
        """`start` of a Lark grammar that allows calls only; `call` is the JSON of one."""

    def free_rules(self, marker: str) -> str | None:
        """The same with any text around; None where that is not supported."""
        return None


class _Hermes(ToolFormat):
    name, sign, marker = "hermes", "<tool_call>", "<tool_call>"
    end: ClassVar[str] = "</tool_call>"

    def reader(self, names: frozenset[str]) -> Reader:
        return _HermesReader(names)

    def rules(self, marker: str, several: bool) -> str:
        one = f'{marker} "\\n" call "\\n{self.end}"'
        return f'start: one ("\\n" one)*\none: {one}' if several else f"start: {one}"

    def free_rules(self, marker: str) -> str | None:
        if marker != json.dumps(self.marker):
            return f'start: (TEXT {marker} "\\n" call "\\n{self.end}")* TEXT\nTEXT: /(.|\\n)*/'
        one = f'begin[lazy]: TEXT {marker}\none: begin "\\n" call "\\n{self.end}"'
        return f"start: one* rest\nrest: TEXT\nTEXT: /(.|\\n)*/\n{one}"


class _Mistral(ToolFormat):
    name, sign, marker, id_length = "mistral", "[TOOL_CALLS]", "[TOOL_CALLS]", 9

    def reader(self, names: frozenset[str]) -> Reader:
        return _MistralReader(names)

    def rules(self, marker: str, several: bool) -> str:
        more = '(", " call)*' if several else ""
        return f'start: {marker} "[" call {more} "]"'


class _Llama3(ToolFormat):
    name, sign, marker, key = "llama3", "<|python_tag|>", "<|python_tag|>", "parameters"

    def reader(self, names: frozenset[str]) -> Reader:
        return _Llama3Reader(names)

    def rules(self, marker: str, several: bool) -> str:
        return 'start: call ("; " call)*' if several else "start: call"


FORMATS: tuple[ToolFormat, ...] = (_Hermes(), _Mistral(), _Llama3())
# Llama 3.1 templates do not always name the tag, but tell the model the form.
_LLAMA3_FORM = re.compile(r'"parameters": ?dictionary of argument name', re.IGNORECASE)


def format_of(template: str) -> ToolFormat | None:
    """The format that a chat template teaches its model."""
    for known in FORMATS:
        if known.sign in template and "[ARGS]" not in template:
            return known
    return FORMATS[2] if _LLAMA3_FORM.search(template) else None


class _HermesReader(Reader):
    def __init__(self, names: frozenset[str]) -> None:
        super().__init__(names)
        self._called = False  # white space after a call belongs to nothing

    def push(self, text: str) -> tuple[str, list[Call]]:
        self._held += text
        shown = ""
        calls: list[Call] = []
        while True:
            begin = self._held.find(_Hermes.marker)
            if begin < 0:
                keep = _tail(self._held, _Hermes.marker)
                shown += self._text(self._held[: len(self._held) - keep])
                self._held = self._held[len(self._held) - keep :]
                return shown, calls
            end = self._held.find(_Hermes.end, begin)
            shown += self._text(self._held[:begin].rstrip(_SPACE))
            self._held = self._held[begin:]
            if end < 0:
                return shown, calls
            whole = self._held[: end - begin + len(_Hermes.end)]
            self._held = self._held[len(whole) :]
            call = self._read(whole[len(_Hermes.marker) : -len(_Hermes.end)])
            if call is None:
                shown += whole
                self._called = False
            else:
                calls.append(call)
                self._called = True

    def close(self) -> tuple[str, list[Call]]:
        held, self._held = self._held, ""
        if held.startswith(_Hermes.marker) and (call := self._read(held[len(_Hermes.marker) :])) is not None:
            return "", [call]  # the output ended where the end's marker was due
        return self._text(held), []

    def _text(self, text: str) -> str:
        if self._called:
            text = text.lstrip(_SPACE)
            self._called = not text
        return text

    def _read(self, body: str) -> Call | None:
        try:
            return self._call(json.loads(body), "arguments")
        except (ValueError, RecursionError):
            return None


class _MistralReader(Reader):
    """Holds everything from the marker on."""

    def push(self, text: str) -> tuple[str, list[Call]]:
        self._held += text
        begin = self._held.find(_Mistral.marker)
        if begin >= 0:
            shown = self._held[:begin].rstrip(_SPACE)
        else:
            shown = self._held[: len(self._held) - _tail(self._held, _Mistral.marker)]
        self._held = self._held[len(shown) :]
        return shown, []

    def close(self) -> tuple[str, list[Call]]:
        held, self._held = self._held, ""
        try:
            marked, _, body = held.partition(_Mistral.marker)
            values: Any = None if marked.strip(_SPACE) else json.loads(body or "null")
        except (ValueError, RecursionError):
            values = None
        found: list[Any] = values if isinstance(values, list) else []
        calls = [self._call(value, "arguments") for value in found]
        return _all_or_text(calls, held)


class _Llama3Reader(Reader):
    """Holds an output that begins like a call to its end; any other is text."""

    def __init__(self, names: frozenset[str]) -> None:
        super().__init__(names)
        self._is_text = False

    def push(self, text: str) -> tuple[str, list[Call]]:
        if self._is_text:
            return text, []
        self._held += text
        begin = self._held.lstrip(_SPACE)
        tag = _Llama3.marker
        if not begin or begin.startswith(("{", tag)) or tag.startswith(begin):
            return "", []
        self._is_text = True
        shown, self._held = self._held, ""
        return shown, []

    def close(self) -> tuple[str, list[Call]]:
        held, self._held = self._held, ""
        rest = held.strip(_SPACE).removeprefix(_Llama3.marker).strip(_SPACE)
        calls: list[Call | None] = []
        while rest:
            try:
                value, end = _DECODER.raw_decode(rest)
            except (ValueError, RecursionError):
                return held, []
            calls.append(self._call(value, "parameters"))
            rest = rest[end:].lstrip(_SPACE + ";")
        return _all_or_text(calls, held)


def _all_or_text(calls: Sequence[Call | None], text: str) -> tuple[str, list[Call]]:
    good = [call for call in calls if call is not None]
    return ("", good) if good and len(good) == len(calls) else (text, [])


def _tail(text: str, marker: str) -> int:
    """Characters at the end that may belong to a marker to come: its beginning, and white space before it."""
    begun = next((n for n in range(min(len(marker) - 1, len(text)), 0, -1) if text.endswith(marker[:n])), 0)
    before = text[: len(text) - begun]
    return begun + len(before) - len(before.rstrip(_SPACE))


@dataclass(frozen=True)
class ToolUse:
    """What a request offers the model to call, and whether it has to."""

    functions: tuple[Mapping[str, Any], ...]  # each with a name, and perhaps parameters
    required: bool = False
    strict: bool = False  # arguments always fit the parameters
    several: bool = True

    @property
    def names(self) -> frozenset[str]:
        return frozenset(function["name"] for function in self.functions)

    def adapt(self, tokenizer: Tokenizer | None, sampling: SamplingParams) -> SamplingParams:
        """The sampling that makes calls readable, and those that have to come come.

        Raises InvalidRequest for a model whose way to call functions is not known.
        """
        form = self.format(tokenizer)
        special = None if tokenizer is None else tokenizer.special_id(form.marker)
        if special is not None:  # otherwise it would not be seen in the text
            sampling = replace(sampling, skip_special_tokens=False)
            marker = f"<[{special}]>"
        else:
            marker = json.dumps(form.marker)
        if not (self.required or self.strict):
            return sampling
        start = form.rules(marker, self.several) if self.required else form.free_rules(marker)
        if start is None:
            problem = "calls of this model are only strict where they are required"
            raise refused("tools", problem, "leave out strict, or set tool_choice", "STRICT_TOOLS")
        grammar = "\n".join((start, *self._call_rules(form.key)))
        if len(grammar.encode()) > MAX_GRAMMAR_BYTES:
            problem = f"their parameters make a grammar of more than {MAX_GRAMMAR_BYTES} bytes"
            raise refused("tools", problem, "offer fewer, or leave the choice to the model", "TOOLS_TOO_LARGE")
        return replace(sampling, grammar=Grammar(LARK, grammar))

    def format(self, tokenizer: Tokenizer | None) -> ToolFormat:
        known = format_of(tokenizer.bundle.chat_template) if tokenizer is not None else None
        if known is None or tokenizer is None or not tokenizer.takes_tools:
            listed = ", ".join(form.name for form in FORMATS)
            raise InvalidRequest(
                "this model's chat template takes no tools, or its calls have an unknown form",
                reason="NO_TOOLS",
                field="tools",
                remedy=f"leave them out, or use a model of a known form: {listed}",
            )
        return known

    def _call_rules(self, key: str) -> list[str]:
        rules = ["call: " + " | ".join(f"call{n}" for n in range(len(self.functions)))]
        for n, function in enumerate(self.functions):
            parameters = dict(function.get("parameters") or {"type": "object"})
            # References name definitions from the schema's root.
            shared = {name: parameters.pop(name) for name in ("$defs", "definitions") if name in parameters}
            schema = {
                "x-guidance": _BOUNDED_SPACE,
                "type": "object",
                "properties": {"name": {"const": function["name"]}, key: parameters},
                "required": ["name", key],
                "additionalProperties": False,
                **shared,
            }
            rules.append(f"call{n}: %json {json.dumps(schema)}")
        return rules
