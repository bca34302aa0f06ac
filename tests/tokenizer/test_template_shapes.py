"""Shapes of templates that public checkpoints have, with tools, prefixes and switches, against `transformers`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from jinja2 import TemplateError

from pdserve.errors import CheckpointError, InvalidRequest
from pdserve.tokenizer import Bundle, Tokenizer
from tests.tokenizer.shapes import SHAPES

from .conftest import byte_level, tokenizer_of

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
