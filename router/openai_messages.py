"""Chat messages, tools and output formats as OpenAI writes them, checked by name, as plain data for a template."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, StrictBool, StrictInt, StrictStr

from pdserve.errors import shown
from pdserve.request import JSON_SCHEMA, LARK, REGEX, Grammar
from router.openai_json import Strict, refused, validate
from router.openai_tools import ToolUse

MAX_TOOLS = 128
_PART_HINTS = frozenset({"cache_control"})  # taken and ignored: prefixes are kept whether or not they are marked


class CalledFunction(Strict):
    name: StrictStr
    arguments: StrictStr  # a JSON object


class ToolCall(Strict):
    id: StrictStr
    type: Literal["function"] = "function"
    function: CalledFunction
    index: StrictInt | None = None  # as clients keep it that add up a stream

    def plain(self, where: str) -> dict[str, object]:
        """With the arguments as data, as templates expect them."""
        try:
            arguments = json.loads(self.function.arguments or "{}")
        except (ValueError, RecursionError) as error:
            raise refused(f"{where}.function.arguments", f"not JSON: {error}", "send a JSON object") from error
        return {"id": self.id, "type": self.type, "function": {"name": self.function.name, "arguments": arguments}}


class Message(Strict):
    """One turn. The fields below `reasoning_content` exist because clients send answers back as they got them."""

    role: StrictStr
    content: StrictStr | list[Any] | None = None  # or parts, see `_text`
    name: StrictStr | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: StrictStr | None = None
    reasoning_content: StrictStr | None = None  # some templates show it
    refusal: None = None
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None
    audio: None = None
    function_call: None = None

    def plain(self, where: str) -> dict[str, object]:
        """Without what is None: the tokenizer refuses a message without content or calls, by its place."""
        content = _text(self.content, f"{where}.content") if isinstance(self.content, list) else self.content
        calls = [call.plain(f"{where}.tool_calls[{n}]") for n, call in enumerate(self.tool_calls or ())]
        given = {
            "role": self.role,
            "content": content,
            "name": self.name,
            "tool_calls": calls or None,
            "tool_call_id": self.tool_call_id,
            "reasoning_content": self.reasoning_content,
        }
        return {key: value for key, value in given.items() if value is not None}


def _text(parts: list[Any], where: str) -> str:
    """Of parts that are text. Raises InvalidRequest naming one that is not."""
    texts = []
    for n, part in enumerate(parts):
        match part:
            case {"type": "text", "text": str(text), **more}:
                texts.append(text)
                unknown = next((k for k, v in more.items() if v is not None and k not in _PART_HINTS), None)
                if unknown is not None:
                    problem = "this field is not supported"
                    raise refused(f"{where}[{n}].{unknown!s:.64}", problem, "leave it out", "UNKNOWN_FIELD")
            case {"type": str(kind)} if kind != "text":
                raise refused(f"{where}[{n}]", f"parts of type {shown(kind)} are not supported", "send text parts only")
            case _:
                raise refused(
                    f"{where}[{n}]", "it is no part of a text", 'send parts like {"type": "text", "text": ...}'
                )
    return "".join(texts)


class Function(Strict):
    name: StrictStr = Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")
    description: StrictStr | None = None
    parameters: dict[StrictStr, Any] | None = None
    strict: StrictBool | None = None


class Tool(Strict):
    type: Literal["function"]
    function: Function


class FunctionName(Strict):
    name: StrictStr


class NamedTool(Strict):
    type: Literal["function"]
    function: FunctionName


ToolChoice = Literal["none", "auto", "required"] | NamedTool


def tool_use(tools: Sequence[Any] | None, choice: ToolChoice | None, parallel: bool | None) -> ToolUse | None:
    """None where the model is offered nothing. Raises InvalidRequest naming the tool at fault.

    The tools themselves stay as they were sent: a template shows their keys in the order that the caller gave.
    """
    if not tools:
        if choice is not None and choice not in ("none", "auto"):
            raise refused("tool_choice", "there are no tools", "send tools, or leave it out")
        return None
    if len(tools) > MAX_TOOLS:
        raise refused("tools", f"there are {len(tools)}", f"send at most {MAX_TOOLS}")
    functions = [validate(tool, Tool, f"tools[{n}]").function for n, tool in enumerate(tools)]
    names = [function.name for function in functions]
    if len(set(names)) != len(names):
        raise refused("tools", "two functions have one name", "give each its own")
    if choice == "none":
        return None
    if isinstance(choice, NamedTool):
        wanted = choice.function.name
        if wanted not in names:
            raise refused("tool_choice", f"{shown(wanted)} is not among the tools", f"use one of: {', '.join(names)}")
        functions = [function for function in functions if function.name == wanted]
    return ToolUse(
        functions=tuple({"name": f.name, "parameters": f.parameters} for f in functions),
        required=choice == "required" or isinstance(choice, NamedTool),
        strict=any(function.strict for function in functions),
        several=parallel is not False and not isinstance(choice, NamedTool),
    )


class JsonSchema(Strict):
    name: StrictStr | None = None
    description: StrictStr | None = None
    schema_: dict[StrictStr, Any] | StrictBool = Field(alias="schema")
    strict: StrictBool | None = None


class ResponseFormat(Strict):
    """OpenAI's text, json_object and json_schema, and ours: regex and grammar."""

    type: Literal["text", "json_object", "json_schema", "regex", "grammar"]
    json_schema: JsonSchema | None = None
    regex: StrictStr | None = None
    grammar: StrictStr | None = None  # in llguidance's form of Lark

    def grammar_of(self) -> Grammar | None:
        """Raises InvalidRequest for a type without what it needs, or with what belongs to another."""
        needs = {"json_schema": "json_schema", "regex": "regex", "grammar": "grammar"}.get(self.type)
        for name in ("json_schema", "regex", "grammar"):
            if (getattr(self, name) is not None) != (name == needs):
                problem = "this type needs it" if name == needs else f"it does not go with type {self.type}"
                raise refused(f"response_format.{name}", problem, "send what the type asks for")
        if self.json_schema is not None:
            return Grammar(JSON_SCHEMA, json.dumps(self.json_schema.schema_))
        if self.regex is not None:
            return Grammar(REGEX, self.regex)
        if self.grammar is not None:
            return Grammar(LARK, self.grammar)
        return Grammar(JSON_SCHEMA, '{"type": "object"}') if self.type == "json_object" else None


class StructuredOutputs(Strict):
    """The same as vLLM's clients ask for it."""

    json_: dict[StrictStr, Any] | StrictStr | None = Field(default=None, alias="json")
    json_object: StrictBool | None = None
    regex: StrictStr | None = None
    choice: list[StrictStr] | None = None
    grammar: StrictStr | None = None

    def grammar_of(self) -> Grammar | None:
        found = [
            Grammar(JSON_SCHEMA, self.json_ if isinstance(self.json_, str) else json.dumps(self.json_))
            if self.json_ is not None
            else None,
            Grammar(JSON_SCHEMA, '{"type": "object"}') if self.json_object else None,
            Grammar(REGEX, self.regex) if self.regex is not None else None,
            Grammar(LARK, "start: " + " | ".join(map(json.dumps, self.choice))) if self.choice else None,
            Grammar(LARK, self.grammar) if self.grammar is not None else None,
        ]
        wanted = [grammar for grammar in found if grammar is not None]
        if len(wanted) != 1:
            raise refused("structured_outputs", f"it asks for {len(wanted)} things", "ask for one")
        return wanted[0]
