"""Tool calls as models write them: read off an output, and made to come by a grammar where they must."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch

from decode_worker.generation import Generation
from decode_worker.grammar import Grammars
from decode_worker.sampling import Choice, sample
from pdserve.request import SamplingParams
from pdserve.tokenizer import Tokenizer
from router.openai_messages import NamedTool, tool_use
from router.tool_formats import FORMATS, ToolFormat, format_of
from router.tool_readers import Call, Reader
from tests.router.tools import (
    ARGS_TEMPLATE,
    GRANITE_TEMPLATE,
    HERMES_TEMPLATE,
    LLAMA3_TEMPLATE,
    MISTRAL_TEMPLATE,
    TOOLS,
    with_template,
)

HERMES, ARGS, MISTRAL, GRANITE, LLAMA3 = FORMATS
NAMES = frozenset({"weather", "add"})
WEATHER = {"name": "weather", "arguments": {"city": "Oslo", "days": 2}}
ADD = {"name": "add", "arguments": {"a": 1, "b": [2, {"c": "}</tool"}]}}


def read(reader: Reader, pieces: Iterator[str] | list[str]) -> tuple[str, list[Call]]:
    told = [*map(reader.push, pieces), reader.close()]
    calls: list[Call] = []
    for part in (part for _, parts in told for part in parts):
        if part.name is not None:
            calls.append(Call(part.name, ""))
        calls[-1] = Call(calls[-1].name, calls[-1].arguments + part.arguments)
    return "".join(text for text, _ in told), calls


def calls_of(*values: dict[str, Any]) -> list[Call]:
    return [Call(value["name"], json.dumps(value["arguments"])) for value in values]


def tagged(value: Any) -> str:
    return f"<tool_call>\n{json.dumps(value)}\n</tool_call>"


def llama(value: dict[str, Any]) -> str:
    return json.dumps({"name": value["name"], "parameters": value["arguments"]})


def args(value: dict[str, Any], between: str = "[ARGS]") -> str:
    return f"[TOOL_CALLS]{value['name']}{between}{json.dumps(value['arguments'])}"


UNKNOWN = {"name": "delete", "arguments": {}}
TURNED = {"arguments": WEATHER["arguments"], "name": "weather"}  # the name comes last: read once it is whole
TAGS_IN = {"name": "add", "arguments": {"a": '"}]</tool_call>[TOOL_CALLS]; {"'}}
OUTPUTS: list[tuple[ToolFormat, str, str, list[Call]]] = [
    (HERMES, "It is 5 < 6.", "It is 5 < 6.", []),
    (HERMES, tagged(WEATHER), "", calls_of(WEATHER)),
    (HERMES, f"I look.\n\n{tagged(WEATHER)}\n{tagged(ADD)}\n", "I look.", calls_of(WEATHER, ADD)),
    (HERMES, f"a {tagged(WEATHER)}\n b", "ab", calls_of(WEATHER)),
    (HERMES, f"<tool_call>{json.dumps(WEATHER)}", "", calls_of(WEATHER)),  # the end's marker was not written
    (HERMES, '<tool_call>\n{"name": "weather", "argu', '<tool_call>\n{"name": "weather", "argu', []),
    (HERMES, f"{tagged(UNKNOWN)} x", f"{tagged(UNKNOWN)} x", []),
    (HERMES, "<tool_call>nonsense</tool_call>!", "<tool_call>nonsense</tool_call>!", []),
    (HERMES, "so \n<tool_call>nonsense</tool_call> !", "so \n<tool_call>nonsense</tool_call> !", []),
    (HERMES, "so  <tool_call>{", "so  <tool_call>{", []),
    (HERMES, "text <tool_ca", "text <tool_ca", []),
    (MISTRAL, "plain [TOOL", "plain [TOOL", []),
    (MISTRAL, f"[TOOL_CALLS]{json.dumps([WEATHER, ADD])}", "", calls_of(WEATHER, ADD)),
    (MISTRAL, f"Yes. [TOOL_CALLS] {json.dumps([ADD])}", "Yes.", calls_of(ADD)),
    (HERMES, tagged({**WEATHER, "id": "a1"}), "", calls_of(WEATHER)),
    (HERMES, tagged(WEATHER).replace("}}", "}} and"), "} and\n", calls_of(WEATHER)),
    (MISTRAL, f"[TOOL_CALLS]{json.dumps([{**WEATHER, 'id': 'aB3'}, {**ADD, 'id': 'x'}])}", "", calls_of(WEATHER, ADD)),
    (MISTRAL, "[TOOL_CALLS][{]", "[TOOL_CALLS][{]", []),
    (MISTRAL, f"[TOOL_CALLS]{json.dumps([UNKNOWN])}", f"[TOOL_CALLS]{json.dumps([UNKNOWN])}", []),
    (GRANITE, f"I look. <|tool_call|>{json.dumps([WEATHER, ADD])}", "I look.", calls_of(WEATHER, ADD)),
    (GRANITE, "<|tool_call|>[weather]", "<|tool_call|>[weather]", []),
    (LLAMA3, "Hello {world}", "Hello {world}", []),
    (LLAMA3, llama(WEATHER), "", calls_of(WEATHER)),
    (LLAMA3, f"<|python_tag|>{llama(WEATHER)}; {llama(ADD)}", "", calls_of(WEATHER, ADD)),
    (LLAMA3, '{"not": "a call"}', '{"not": "a call"}', []),
    (LLAMA3, f"{llama(WEATHER)} and more", "} and more", calls_of(WEATHER)),  # it had begun before that was known
    (HERMES, tagged(TURNED), "", calls_of(WEATHER)),
    (HERMES, f"{tagged(TAGS_IN)}{tagged(ADD)}", "", calls_of(TAGS_IN, ADD)),
    (HERMES, f"<tool_call>{json.dumps(WEATHER)} x", "} x", calls_of(WEATHER)),
    (HERMES, '<tool_call>{"name": "add", "arguments": {"a": [1, ', "", [Call("add", '{"a": [1, ')]),
    (
        HERMES,
        '<tool_call>{"name": "add", "arguments": {a}}</tool_call>.',
        '<tool_call>{"name": "add", "arguments": {a}}</tool_call>.',
        [],
    ),
    (MISTRAL, f"[TOOL_CALLS]{json.dumps([TURNED, ADD])}", "", calls_of(WEATHER, ADD)),
    (MISTRAL, f"[TOOL_CALLS]{json.dumps([TAGS_IN, ADD])}", "", calls_of(TAGS_IN, ADD)),
    (MISTRAL, f"[TOOL_CALLS]{json.dumps([ADD])} x", "}] x", calls_of(ADD)),
    (ARGS, args(WEATHER), "", calls_of(WEATHER)),
    (ARGS, f"I look. {args(WEATHER)}{args(ADD)}", "I look.", calls_of(WEATHER, ADD)),
    (ARGS, f"{args(TAGS_IN, '[CALL_ID]aB3[ARGS]')} {args(ADD)}\n", "", calls_of(TAGS_IN, ADD)),
    (ARGS, f"{args(UNKNOWN)} x", f"{args(UNKNOWN)} x", []),
    (ARGS, "[TOOL_CALLS]weather[ARGS]", "[TOOL_CALLS]weather[ARGS]", []),
    (ARGS, "no [TOOL_CALL", "no [TOOL_CALL", []),
    (LLAMA3, f"{llama(TAGS_IN)};{llama(ADD)} ;", "", calls_of(TAGS_IN, ADD)),
]


@pytest.mark.parametrize(
    ("form", "output", "text", "calls"), OUTPUTS, ids=[f"{o[0].name}-{o[1][:24]}" for o in OUTPUTS]
)
def test_calls_are_read_however_the_output_is_divided_and_all_else_stays_text(
    form: ToolFormat, output: str, text: str, calls: list[Call]
) -> None:
    for size in (1, 2, 3, 7, 1000):
        pieces = [output[n : n + size] for n in range(0, len(output), size)]
        assert read(form.reader(NAMES), pieces) == (text, calls)


def test_the_form_is_told_by_the_template() -> None:
    assert format_of(HERMES_TEMPLATE) is HERMES
    assert format_of(MISTRAL_TEMPLATE) is MISTRAL
    assert format_of(ARGS_TEMPLATE) is ARGS
    assert format_of(GRANITE_TEMPLATE) is GRANITE
    assert format_of(LLAMA3_TEMPLATE) is LLAMA3
    assert format_of("{{ messages }}") is None


CASES = [
    (HERMES, HERMES_TEMPLATE, ""),
    (HERMES, HERMES_TEMPLATE, "<tool_call>"),
    (MISTRAL, MISTRAL_TEMPLATE, "[TOOL_CALLS]"),
    (ARGS, ARGS_TEMPLATE, "[TOOL_CALLS]"),
    (ARGS, ARGS_TEMPLATE, "[TOOL_CALLS] [ARGS]"),
    (GRANITE, GRANITE_TEMPLATE, "<|tool_call|>"),
    (LLAMA3, LLAMA3_TEMPLATE, "<|python_tag|>"),
]


@pytest.mark.parametrize(("form", "template", "special"), CASES, ids=[f"{c[0].name} {c[2]}" for c in CASES])
@pytest.mark.parametrize("choice", ["required", "named", "single"])
def test_required_calls_come_whatever_the_model_says_and_fit_their_parameters(
    form: ToolFormat, template: str, special: str, choice: str
) -> None:
    tokenizer = Tokenizer(with_template(template, special))
    body = {"type": "function", "function": {"name": "weather"}}
    use = tool_use(TOOLS, "required" if choice != "named" else NamedTool.model_validate(body), choice != "single")
    assert use is not None
    params = use.adapt(tokenizer, SamplingParams(seed=5, temperature=1.0))
    assert params.skip_special_tokens == (not special)  # a marker that is one has to be seen
    rng = np.random.default_rng(1)
    made = Generation((1,), params, 800, (), tokenizer, Grammars(tokenizer, tokenizer.vocab_size))
    output = b""
    while made.finish is None:
        (chosen,) = sample([(made.sampler, torch.from_numpy(rng.normal(size=tokenizer.vocab_size)))])
        assert isinstance(chosen, Choice), chosen
        output += made.accept(chosen).text
    cut = made.finish.reason == "length"  # of several calls there may always be one more
    text, calls = read(form.reader(use.names), [output.decode()])
    if cut:
        calls = calls[:-1]  # the last one is not whole
    assert calls and (cut or text == "")
    assert choice == "required" or (len(calls) == 1 and not cut)
    for call in calls:
        (tool,) = [t for t in TOOLS if t["function"]["name"] == call.name]
        jsonschema.validate(json.loads(call.arguments), tool["function"]["parameters"])
        assert choice != "named" or call.name == "weather"


SPOKEN = {  # up to the first argument
    "hermes": 'Any text {"a": 1}, then <tool_call>\n{"name": "weather", "arguments": ',
    "mistral": 'Any text [{"a": 1}], then [TOOL_CALLS][{"name": "weather", "arguments": ',
    "granite": 'Any text [{"a": 1}], then <|tool_call|>[{"name": "weather", "arguments": ',
    "args": "Any text [weather], then [TOOL_CALLS]weather[ARGS]",
    "llama3": '{"name": "weather", "parameters": ',
}


WITHOUT_SPECIAL = [(MISTRAL, MISTRAL_TEMPLATE, ""), (ARGS, ARGS_TEMPLATE, ""), (LLAMA3, LLAMA3_TEMPLATE, "")]


@pytest.mark.parametrize(
    ("form", "template", "special"),
    [*CASES, *WITHOUT_SPECIAL],
    ids=[f"{form.name} {special or '-'}" for form, _, special in [*CASES, *WITHOUT_SPECIAL]],
)
def test_strict_arguments_leave_the_text_around_free(form: ToolFormat, template: str, special: str) -> None:
    tokenizer = Tokenizer(with_template(template, special))
    strict = [{**TOOLS[0], "function": {**TOOLS[0]["function"], "strict": True}}]
    use = tool_use(strict, "auto", None)
    assert use is not None
    params = use.adapt(tokenizer, SamplingParams(temperature=0, seed=0))
    assert params.grammar is not None
    grammars = Grammars(tokenizer, tokenizer.vocab_size)
    for text in (SPOKEN[form.name] + '{"city": "Oslo", "days": ', "I know: 20 degrees.\nAnd {more}"):
        constraint = grammars.start(params.grammar)
        for token in tokenizer.encode(text):
            assert constraint.allowed()[token], (text, tokenizer.decode([token], skip_special_tokens=False))
            constraint.advance(token)
        allowed = constraint.allowed()
        is_call = text.endswith('"days": ')
        assert allowed[tokenizer.encode("2")[0]] and allowed[tokenizer.encode("7")[0]] == (not is_call)
