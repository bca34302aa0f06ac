"""Shapes of templates that public checkpoints have, with tools, prefixes and switches, against `transformers`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from jinja2 import TemplateError

from pdserve.errors import CheckpointError, InvalidRequest
from pdserve.tokenizer import Bundle, Tokenizer

from .conftest import byte_level, tokenizer_of

# Functions as one JSON object a line in the system turn, calls between tags, results inside of user turns.
QWEN_LIKE = """{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- "# Functions\\nOne of them may help:\\n<tools>" }}
    {%- for tool in tools %}{{- "\\n" }}{{- tool | tojson }}{%- endfor %}
    {{- '\\n</tools>\\nTo call one write <tool_call>{"name": NAME, "arguments": OBJECT}</tool_call><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant' }}
        {%- if message.content %}{{- '\\n' + message.content }}{%- endif %}
        {%- for tool_call in message.tool_calls or [] %}
            {%- if tool_call.function is defined %}{%- set tool_call = tool_call.function %}{%- endif %}
            {{- '\\n<tool_call>\\n{"name": "' + tool_call.name + '", "arguments": ' }}
            {{- tool_call.arguments | tojson }}{{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.index0 == 0 or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""

# A date, functions shown with indentation in the first user turn, one call at most, and a role for results.
LLAMA31_LIKE = """{{- bos_token }}
{%- if not date_string is defined %}{%- set date_string = "1 Jan 2030" %}{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] | trim %}{%- set messages = messages[1:] %}
{%- else %}{%- set system = "" %}{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{%- if tools is not none %}{{- "Environment: ipython\\n" }}{%- endif %}
{{- "Date: " + date_string + "\\n\\n" + system + "<|eot_id|>" }}
{%- if tools is not none and messages %}
    {%- set first = messages[0]['content'] | trim %}{%- set messages = messages[1:] %}
    {{- '<|start_header_id|>user<|end_header_id|>\\n\\nAnswer with a call in JSON.\\n\\n' }}
    {%- for t in tools %}{{- t | tojson(indent=4) }}{{- "\\n\\n" }}{%- endfor %}
    {{- first + "<|eot_id|>" }}
{%- endif %}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
        {{- message['content'] | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls | length == 1 %}{{- raise_exception("one call at a time, please") }}{%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "' + call.name + '", "parameters": ' }}
        {{- call.arguments | tojson }}{{- "}<|eot_id|>" }}
    {%- else %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" }}
        {%- if message.content is mapping or message.content is iterable and message.content is not string %}
            {{- message.content | tojson }}
        {%- else %}{{- message.content }}{%- endif %}
        {{- "<|eot_id|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"""

# Functions before the last user turn only; ids of calls have nine letters; turns must alternate.
MISTRAL3_LIKE = """{%- if messages[0]["role"] == "system" %}
    {%- set system = messages[0]["content"] %}{%- set loop_messages = messages[1:] %}
{%- else %}{%- set loop_messages = messages %}{%- endif %}
{%- if not tools is defined %}{%- set tools = none %}{%- endif %}
{%- set users = loop_messages | selectattr("role", "equalto", "user") | list %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if message["role"] == "user" %}
        {%- if tools is not none and (message == users[-1]) %}
            {{- "[AVAILABLE_TOOLS] [" }}
            {%- for tool in tools %}
                {%- set tool = tool.function %}
                {{- '{"type": "function", "function": {' }}
                {%- for key, val in tool.items() if key != "return" %}
                    {%- if val is string %}{{- '"' + key + '": "' + val + '"' }}
                    {%- else %}{{- '"' + key + '": ' + val | tojson }}{%- endif %}
                    {%- if not loop.last %}{{- ", " }}{%- endif %}
                {%- endfor %}
                {{- "}}" }}{%- if not loop.last %}{{- ", " }}{%- endif %}
            {%- endfor %}
            {{- "][/AVAILABLE_TOOLS]" }}
        {%- endif %}
        {%- if loop.last and system is defined %}{{- "[INST] " + system + "\\n\\n" + message["content"] + "[/INST]" }}
        {%- else %}{{- "[INST] " + message["content"] + "[/INST]" }}{%- endif %}
    {%- elif message.tool_calls is defined and message.tool_calls is not none %}
        {{- "[TOOL_CALLS] [" }}
        {%- for call in message.tool_calls %}
            {%- if not call.id is defined or call.id | length != 9 %}
                {{- raise_exception("an id of a call has nine letters") }}
            {%- endif %}
            {{- call.function | tojson }}{{- ', "id": "' + call.id + '"}' }}
            {%- if not loop.last %}{{- ", " }}{%- endif %}
        {%- endfor %}
        {{- "]" + eos_token }}
    {%- elif message["role"] == "assistant" %}{{- " " + message["content"] | trim + eos_token }}
    {%- elif message["role"] in ("tool", "tool_results") %}
        {{- '[TOOL_RESULTS] {"content": ' + message.content | string + ', "call_id": "' + message.tool_call_id + '"}' }}
    {%- else %}{{- raise_exception("this role is not known: " + message["role"]) }}{%- endif %}
{%- endfor %}"""

# A switch of the caller's, thoughts that are cut out of earlier answers, and reversed search for the last question.
THINKING_LIKE = """{%- set ns = namespace(last=messages | length - 1, searching=true) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages | length - 1) - loop.index0 %}
    {%- if ns.searching and message.role == "user" %}
        {%- set ns.searching = false %}{%- set ns.last = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == "assistant" %}
        {%- if '</think>' in content %}
            {%- set thought = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- else %}{%- set thought = '' %}{%- endif %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.index0 > ns.last and thought %}{{- '<think>\\n' + thought + '\\n</think>\\n\\n' }}{%- endif %}
        {{- content + '<|im_end|>\\n' }}
    {%- else %}{{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}"""

# Short tags of single tokens, nothing trimmed.
PHI_LIKE = (
    "{% for message in messages %}{% if message['role'] == 'system' and message['content'] %}"
    "{{ '<|system|>\n' + message['content'] + '<|end|>\n' }}{% elif message['role'] == 'user' %}"
    "{{ '<|user|>\n' + message['content'] + '<|end|>\n' }}{% elif message['role'] == 'assistant' %}"
    "{{ '<|assistant|>\n' + message['content'] + '<|end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"
)

# A macro, whitespace of its own, and names of speakers.
MACRO_LIKE = """{% macro turn(role, text) %}
<{{ role | capitalize }}>
{{ text }}

{% endmacro %}
{% for m in messages %}
{{ turn(m.name | default(m.role), m.content or 'nothing') }}
{% endfor %}
{% if add_generation_prompt %}<Assistant>
{% endif %}"""

SHAPES = {
    "qwen": QWEN_LIKE,
    "llama31": LLAMA31_LIKE,
    "mistral3": MISTRAL3_LIKE,
    "thinking": THINKING_LIKE,
    "phi": PHI_LIKE,
    "macro": MACRO_LIKE,
}
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "tide",
            "description": "When the tide is high <next> & where",
            "parameters": {"type": "object", "properties": {"harbour": {"type": "string"}}, "required": ["harbour"]},
        },
    },
    {"type": "function", "function": {"description": "Keys in another order", "name": "noon", "parameters": {}}},
]
ASKED = {"role": "user", "content": " When is it high in Kråkøy? "}
CALLED = {
    "role": "assistant",
    "tool_calls": [
        {"id": "aB3dE6gH9", "type": "function", "function": {"name": "tide", "arguments": {"harbour": "Kråkøy"}}}
    ],
}
TOLD = {"role": "tool", "content": "6:20", "tool_call_id": "aB3dE6gH9"}
ANSWERED = {"role": "assistant", "content": "<think>\nEasy.\n</think>\n\nAt twenty past six.\n"}
SYSTEM = {"role": "system", "content": "You know the sea."}
CHATS: dict[str, list[dict[str, Any]]] = {
    "one": [ASKED],
    "system": [SYSTEM, ASKED, ANSWERED, {**ASKED, "name": "bo"}],
    "calls": [SYSTEM, ASKED, CALLED, TOLD],
    "after": [ASKED, CALLED, TOLD, ANSWERED],
}
NAMES = {"bos_token": "<s>", "eos_token": "</s>"}
SPECIAL = ("<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>",
           "[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "<|user|>", "<|end|>")  # fmt: skip


@pytest.fixture(scope="module", params=SHAPES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, Any]:
    """Ours, and the peer's on the same directory."""
    from transformers import AutoTokenizer

    folder = tmp_path_factory.mktemp(request.param)
    ours = tokenizer_of(folder, byte_level(special=SPECIAL), {**NAMES, "chat_template": SHAPES[request.param]})
    return ours, AutoTokenizer.from_pretrained(str(folder))


@pytest.mark.parametrize("tools", [False, True], ids=["plain", "tools"])
@pytest.mark.parametrize("chat", CHATS)
def test_ids_equal_apply_chat_template(pair: tuple[Tokenizer, Any], chat: str, tools: bool) -> None:
    ours, peer = pair
    if tools and not ours.takes_tools:
        with pytest.raises(InvalidRequest) as caught:
            ours.apply_chat(CHATS[chat], tools=TOOLS)
        assert (caught.value.reason, caught.value.field) == ("NO_TOOLS", "tools")
        return
    given: dict[str, Any] = {"tools": TOOLS} if tools else {}
    try:
        ids = peer.apply_chat_template(CHATS[chat], return_dict=False, add_generation_prompt=True, **given)
    except (TemplateError, TypeError) as refusal:
        with pytest.raises(InvalidRequest, match="template") as caught:
            ours.apply_chat(CHATS[chat], **given)
        assert str(refusal)[:20] in str(caught.value)
        return
    assert list(ours.apply_chat(CHATS[chat], **given)) == ids


@pytest.mark.parametrize("beginning", ["At twenty", "At twenty ", "At\n", " six"])
def test_an_answer_begun_ends_the_prompt_where_it_ends_for_transformers(
    pair: tuple[Tokenizer, Any], beginning: str
) -> None:
    ours, peer = pair
    messages = [SYSTEM, ASKED, {"role": "assistant", "content": beginning}]
    ids = peer.apply_chat_template(messages, return_dict=False, continue_final_message=True)
    assert list(ours.apply_chat(messages, continue_final_message=True, add_generation_prompt=False)) == ids


def test_a_developer_is_a_system_except_for_templates_that_know_developers(
    pair: tuple[Tokenizer, Any], tmp_path: Path
) -> None:
    ours, peer = pair
    told, given = ([{**SYSTEM, "role": role}, ASKED] for role in ("developer", "system"))
    ids = peer.apply_chat_template(given, return_dict=False, add_generation_prompt=True)
    assert list(ours.apply_chat(told)) == ids
    knows = "{% for m in messages %}{% if m.role == 'developer' %}D{% else %}{{ m.role }}{% endif %}{% endfor %}"
    assert tokenizer_of(tmp_path, byte_level(), {"chat_template": knows}).render_chat(told) == "Duser"


def test_switches_reach_the_template(pair: tuple[Tokenizer, Any]) -> None:
    ours, peer = pair
    switches = {"enable_thinking": False, "date_string": "2 Feb 2031"}
    ids = peer.apply_chat_template([ASKED], return_dict=False, add_generation_prompt=True, **switches)
    assert list(ours.apply_chat([ASKED], variables=switches)) == ids


def test_which_templates_take_tools(pair: tuple[Tokenizer, Any], request: pytest.FixtureRequest) -> None:
    assert pair[0].takes_tools == (request.node.callspec.params["pair"] in ("qwen", "llama31", "mistral3"))


@pytest.mark.parametrize(
    ("messages", "options", "field"),
    [
        ([ASKED, CALLED], {"add_generation_prompt": False}, "continue_final_message"),
        ([ASKED], {"add_generation_prompt": True}, "continue_final_message"),
    ],
)
def test_what_cannot_be_continued_is_refused(
    pair: tuple[Tokenizer, Any], messages: list[Any], options: dict[str, Any], field: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        pair[0].apply_chat(messages, continue_final_message=True, **options)
    assert caught.value.field == field


def test_a_template_that_hides_the_last_message_cannot_continue_it(tmp_path: Path) -> None:
    ours = tokenizer_of(tmp_path, byte_level(), {"chat_template": "{{ messages[0].content }}"})
    with pytest.raises(InvalidRequest, match="does not show"):
        ours.apply_chat([ASKED, ANSWERED], continue_final_message=True, add_generation_prompt=False)


def bundle_with(folder: Path, generation: dict[str, Any]) -> Bundle:
    return tokenizer_of(folder, byte_level(), NAMES | {"eos_token": "<|end|>"}, generation_config=generation).bundle


def test_generation_settings_become_defaults(tmp_path: Path) -> None:
    stated = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "do_sample": True, "eos_token_id": [5, 7], "min_p": None}
    made = bundle_with(tmp_path, stated)
    assert dict(made.sampling) == {"temperature": 0.6, "top_k": 20.0, "top_p": 0.95}
    assert {5, 7} <= set(made.eos_ids)
    assert Bundle.from_bytes(made.to_bytes()) == made
    assert made.digest() != bundle_with(tmp_path / "other", {**stated, "top_p": 0.9}).digest()


@pytest.mark.parametrize("wrong", [{"temperature": "hot"}, {"top_p": 2}, {"top_k": -3}, {"repetition_penalty": True}])
def test_generation_settings_that_no_request_could_have_are_refused(tmp_path: Path, wrong: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError) as caught:
        bundle_with(tmp_path, wrong)
    assert caught.value.field == "generation_config.json"
