"""Every form in which models write calls: the template that teaches it, calls as they are written, damaged ones."""

from __future__ import annotations

from collections.abc import Callable

from tests.tokenizer.shapes import LLAMA31_LIKE, MISTRAL3_LIKE, QWEN_LIKE

ARGS_LIKE = """{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == "user" %}
        {%- if tools %}{{- "[AVAILABLE_TOOLS]" + tools | tojson + "[/AVAILABLE_TOOLS]" }}{%- endif %}
        {{- "[INST]" + message.content + "[/INST]" }}
    {%- elif message.tool_calls %}
        {%- for call in message.tool_calls %}
            {{- "[TOOL_CALLS]" + call.function.name + "[ARGS]" + call.function.arguments | tojson }}
        {%- endfor %}{{- eos_token }}
    {%- elif message.role == "tool" %}{{- "[TOOL_RESULTS]" + message.content + "[/TOOL_RESULTS]" }}
    {%- else %}{{- message.content + eos_token }}{%- endif %}
{%- endfor %}"""
GRANITE_LIKE = """{%- if tools %}{{- tools | tojson + " Call with <|tool_call|> and a JSON list.\\n" }}{%- endif %}
{%- for message in messages %}
    {{- "<|role|>" + message.role + "<|text|>" }}
    {%- if message.tool_calls %}{{- "<|tool_call|>" + message.tool_calls | map(attribute="function") | list | tojson }}
    {%- else %}{{- message.content }}{%- endif %}
    {{- eos_token }}
{%- endfor %}
{%- if add_generation_prompt %}{{- "<|role|>assistant<|text|>" }}{%- endif %}"""
LLAMA3_LIKE = LLAMA31_LIKE.replace(
    "call in JSON.", 'call: {"name": function name, "parameters": dictionary of argument name and its value}.'
)
# Form -> its template, and the special tokens of its vocabulary.
TEMPLATES = {
    "hermes": (QWEN_LIKE, "<|im_start|> <|im_end|>"),
    "mistral": (MISTRAL3_LIKE, "[INST] [/INST] [TOOL_CALLS]"),
    "granite": (GRANITE_LIKE, "<|tool_call|> <|role|> <|text|>"),
    "args": (ARGS_LIKE, "[INST] [/INST] [TOOL_CALLS] [ARGS]"),
    "llama3": (LLAMA3_LIKE, "<|eot_id|> <|start_header_id|> <|end_header_id|> <|python_tag|>"),
}
Call = tuple[str, str]  # name, and arguments as the model writes them
WEATHER: Call = ("weather", '{"city": "Z\\u00fcrich \\"}]", "days": 2}')
NOW: Call = ("now", "{}")


def objects(key: str, *calls: Call) -> list[str]:
    return [f'{{"name": "{name}", "{key}": {arguments}}}' for name, arguments in calls]


WRITTEN: dict[str, Callable[..., str]] = {
    "hermes": lambda *calls: "\n".join(f"<tool_call>\n{one}\n</tool_call>" for one in objects("arguments", *calls)),
    "mistral": lambda *calls: f"[TOOL_CALLS] [{', '.join(objects('arguments', *calls))}]",
    "granite": lambda *calls: f"<|tool_call|>[{', '.join(objects('arguments', *calls))}]",
    "args": lambda *calls: "".join(f"[TOOL_CALLS]{name}[ARGS]{arguments}" for name, arguments in calls),
    "llama3": lambda *calls: "; ".join(objects("parameters", *calls)),
}
# What breaks before a call has begun, and so stays text, to the last character.
DAMAGED: dict[str, list[str]] = {
    "hermes": [
        '<tool_call>{"name": "weather", "arguments": [1]}</tool_call>',
        '<tool_call>\n{"name": "delete", "arguments": {}}\n</tool_call>',
        '<tool_call>\n{"name": weather',
        "I would call <tool_call>weather</tool_call> now.",
    ],
    "mistral": [
        '[TOOL_CALLS] [{"name": "weather", "arguments": 5}]',
        '[TOOL_CALLS] [{"name": "delete", "arguments": {}}]',
    ],
    "granite": ['<|tool_call|>{"name": "weather"', '<|tool_call|>[{"name": "delete", "arguments": {}}]'],
    "args": ["[TOOL_CALLS]weather[ARGS]", "[TOOL_CALLS]delete[ARGS]{}"],
    "llama3": ['{"name": "weather", "parameters": "Oslo"}', '{"name": "delete", "parameters": {}}', '{"city": "Oslo"}'],
}
FORMS = list(TEMPLATES)
