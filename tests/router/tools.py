"""Functions to call, and chat templates that teach each form of calling them."""

from __future__ import annotations

import dataclasses
from typing import Any

from tokenizers import Tokenizer as Backend

from pdserve.tokenizer import Bundle
from tests.router.support import bundle

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Tells the weather of a place.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "maxLength": 5}, "days": {"enum": [1, 2, 3]}},
                "required": ["city", "days"],
                "additionalProperties": False,
            },
        },
    },
    {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "additionalProperties": False}}},
]
HERMES_TEMPLATE = (
    "{% if tools %}<|s|>You may call: {% for t in tools %}{{ t | tojson }}{% endfor %}. Answer with <tool_call>"
    '{"name": ..., "arguments": ...}</tool_call>.{% endif %}'
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content or '' }}{% for c in m.tool_calls or [] %}<tool_call>"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}</tool_call>{% endfor %}'
    "{% endfor %}{% if add_generation_prompt %}<|a|>{% endif %}"
)
MISTRAL_TEMPLATE = "{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}{% endif %}{{ messages }}[TOOL_CALLS]"
ARGS_TEMPLATE = (
    "{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}{% endif %}{{ messages }}[TOOL_CALLS]name[ARGS]{...}"
)
GRANITE_TEMPLATE = "{% if tools %}Answer with <|tool_call|> and a list. {{ tools | tojson }}{% endif %}{{ messages }}"
LLAMA3_TEMPLATE = (
    '{% if tools %}Answer as {"name": function name, "parameters": dictionary of argument name and its value}.'
    "{{ tools | tojson }}{% endif %}{{ messages }}"
)


def with_template(template: str, special: str = "") -> Bundle:
    plain = bundle()
    if special:
        backend = Backend.from_str(plain.tokenizer_json)
        backend.add_special_tokens(special.split())
        plain = dataclasses.replace(
            plain, tokenizer_json=backend.to_str(), vocab_size=backend.get_vocab_size(with_added_tokens=True)
        )
    return dataclasses.replace(plain, chat_template=template)
