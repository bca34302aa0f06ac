"""How models write tool calls, which their chat templates tell.

hermes   <tool_call>{"name": ..., "arguments": {...}}</tool_call>, any number, text around (Qwen, Hermes, SmolLM3)
mistral  [TOOL_CALLS][{"name": ..., "arguments": {...}}, ...] to the end of the output
granite  the same after <|tool_call|> (Granite 3)
args     [TOOL_CALLS]name[ARGS]{...} once for each call, to the end of the output (Mistral since version 11 of its
         tokenizer; some put [CALL_ID]... between name and arguments)
llama3   the whole output is {"name": ..., "parameters": {...}}, several separated by ;
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from router.tool_readers import DECODER, MORE_KEYS, PLAIN_HEAD, SPACE, Call, Reader, SeriesReader, TaggedReader, head

_BOUNDED_SPACE = {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{0,24}"}

Mark = Callable[[str], str]
"""What stands for a marker in a Lark grammar: its text, or the special token that it is in a vocabulary."""


class ToolFormat(ABC):
    name: ClassVar[str]
    sign: ClassVar[str]  # in templates of this format
    marker: ClassVar[str]  # begins a call; a special token in some vocabularies
    key: ClassVar[str] = "arguments"
    id_length: ClassVar[int] = 24  # characters of a call's id

    @abstractmethod
    def reader(self, names: frozenset[str]) -> Reader: ...

    @abstractmethod
    def rules(self, mark: Mark, several: bool) -> str:
        """`start` of a Lark grammar that allows calls only; `call` is one of them, as `call_rule` has it."""

    @abstractmethod
    def free_rules(self, mark: Mark) -> str:
        """The same with text around, as far as the format has it, or without a call."""

    def call_rule(self, function: Mapping[str, Any], mark: Mark) -> str:
        """The right side of a rule for a call of this function."""
        parameters, shared = parameters_of(function)
        schema = {
            "x-guidance": _BOUNDED_SPACE,
            "type": "object",
            "properties": {"name": {"const": function["name"]}, self.key: parameters},
            "required": ["name", self.key],
            "additionalProperties": False,
            **shared,
        }
        return f"%json {json.dumps(schema)}"


class _Hermes(ToolFormat):
    name, sign, marker = "hermes", "<tool_call>", "<tool_call>"
    end: ClassVar[str] = "</tool_call>"

    def reader(self, names: frozenset[str]) -> Reader:
        return TaggedReader(names, self.marker, self.end, self.key)

    def rules(self, mark: Mark, several: bool) -> str:
        one = f'{mark(self.marker)} "\\n" call "\\n{self.end}"'
        return f'start: one ("\\n" one)*\none: {one}' if several else f"start: {one}"

    def free_rules(self, mark: Mark) -> str:
        marker = mark(self.marker)
        if marker != json.dumps(self.marker):
            return f'start: (TEXT {marker} "\\n" call "\\n{self.end}")* TEXT\nTEXT: /(.|\\n)*/'
        one = f'begin[lazy]: TEXT {marker}\none: begin "\\n" call "\\n{self.end}"'
        return f"start: one* rest\nrest: TEXT\nTEXT: /(.|\\n)*/\n{one}"


class _Mistral(ToolFormat):
    name, sign, marker, id_length = "mistral", "[TOOL_CALLS]", "[TOOL_CALLS]", 9

    def reader(self, names: frozenset[str]) -> Reader:
        first, following = (
            rf"\s*{re.escape(self.marker)}\s*\[\s*{head(self.key)}",
            rf"{MORE_KEYS}\s*\}}\s*,\s*{head(self.key)}",
        )

        def whole(body: str) -> Sequence[Call | None]:
            values = json.loads(body or "null")
            return [reader._call(value, self.key) for value in values] if isinstance(values, list) else []

        reader = SeriesReader(names, self.marker, first, following, MORE_KEYS + r"\s*\}?\s*\]?\s*", whole)
        return reader

    def rules(self, mark: Mark, several: bool) -> str:
        more = '(", " call)*' if several else ""
        return f'start: {mark(self.marker)} "[" call {more} "]"'

    def free_rules(self, mark: Mark) -> str:
        return _after_text(self.marker, mark, '"[" call (", " call)* "]"')


class _Granite(_Mistral):
    name, sign, marker, id_length = "granite", "<|tool_call|>", "<|tool_call|>", 24


class _MistralArgs(ToolFormat):
    name, sign, marker, id_length = "args", "[ARGS]", "[TOOL_CALLS]", 9

    def reader(self, names: frozenset[str]) -> Reader:
        one = rf"\s*{re.escape(self.marker)}\s*{PLAIN_HEAD}"
        return SeriesReader(names, self.marker, one, one, r"\s*", lambda body: [])

    def rules(self, mark: Mark, several: bool) -> str:
        one = f"{mark(self.marker)} call"
        return f"start: ({one})+" if several else f"start: {one}"

    def free_rules(self, mark: Mark) -> str:
        return _after_text(self.marker, mark, f"call ({mark(self.marker)} call)*")

    def call_rule(self, function: Mapping[str, Any], mark: Mark) -> str:
        parameters, shared = parameters_of(function)
        schema = {"x-guidance": _BOUNDED_SPACE, **parameters, **shared}
        return f"{json.dumps(function['name'])} {mark(self.sign)} %json {json.dumps(schema)}"


class _Llama3(ToolFormat):
    name, sign, marker, key = "llama3", "<|python_tag|>", "<|python_tag|>", "parameters"

    def reader(self, names: frozenset[str]) -> Reader:
        first = rf"\s*(?:{re.escape(self.marker)})?\s*{head(self.key)}"

        def whole(body: str) -> Sequence[Call | None]:
            calls, rest = [], body.strip(SPACE)
            while rest:
                value, end = DECODER.raw_decode(rest)
                calls.append(reader._call(value, self.key))
                rest = rest[end:].lstrip(SPACE + ";")
            return calls

        following = rf"\s*\}}\s*;\s*{head(self.key)}"
        reader = SeriesReader(names, self.marker, first, following, r"\s*\}?[\s;]*", whole, bare=True)
        return reader

    def rules(self, mark: Mark, several: bool) -> str:
        return 'start: call ("; " call)*' if several else "start: call"

    def free_rules(self, mark: Mark) -> str:
        """A call is the whole answer, and a text begins with nothing that could begin a call."""
        marker = mark(self.marker)
        no_call = "{" if marker != json.dumps(self.marker) else "{<"
        return f'start: ({marker}? call ("; " call)* | text)?\ntext: TEXT\nTEXT: /[^{no_call} \\t\\n\\r](.|\\n)*/'


def _after_text(marker: str, mark: Mark, calls: str) -> str:
    """`start` for any text, and perhaps a marker and calls to the end of the output."""
    marked, text = mark(marker), "TEXT: /(.|\\n)*/"
    if marked != json.dumps(marker):
        return f"start: TEXT ({marked} {calls})?\n{text}"
    return f"start: begin {calls} | rest\nrest: TEXT\n{text}\nbegin[lazy]: TEXT {marked}"


FORMATS: tuple[ToolFormat, ...] = (_Hermes(), _MistralArgs(), _Mistral(), _Granite(), _Llama3())
# Llama 3.1 templates do not always name the tag, but tell the model the form.
_LLAMA3_FORM = re.compile(r'"parameters": ?dictionary of argument name', re.IGNORECASE)


def format_of(template: str) -> ToolFormat | None:
    """The format that a chat template teaches its model."""
    for known in FORMATS:
        if known.sign in template:
            return known
    return FORMATS[-1] if _LLAMA3_FORM.search(template) else None


def parameters_of(function: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The schema of its arguments, and what references in it name from the root of the whole."""
    parameters = dict(function.get("parameters") or {"type": "object"})
    return parameters, {name: parameters.pop(name) for name in ("$defs", "definitions") if name in parameters}
