"""Bodies as clients really send them (LangChain, LiteLLM, Open WebUI, agents): taken, or refused by name."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
import pytest_asyncio
from openai import AsyncOpenAI

from pdserve.tokenizer import Tokenizer
from tests.router.support import MODEL, House, bundle, house

pytestmark = pytest.mark.asyncio(loop_scope="module")

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
USER: dict[str, Any] = {"role": "user", "content": "the cat sat"}
SAID: dict[str, Any] = {"role": "assistant", "content": "It"}
RULE: dict[str, Any] = {"role": "system", "content": "Be brief."}
CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
PLAIN: dict[str, dict[str, Any]] = {
    CHAT: {"model": MODEL, "messages": [USER], "temperature": 0, "max_tokens": 2},
    TEXT: {"model": MODEL, "prompt": "the cat sat", "temperature": 0, "max_tokens": 2},
}

# What asks for nothing, or for what is done anyway: the answer is that to the plain body.
SAME: dict[str, tuple[str, dict[str, Any]]] = {
    "every option null, those that are not served too": (CHAT, dict.fromkeys(
        ("tools", "tool_choice", "parallel_tool_calls", "response_format", "stop", "seed", "logit_bias", "logprobs",
         "top_logprobs", "presence_penalty", "frequency_penalty", "n", "stream", "stream_options", "user", "store",
         "metadata", "service_tier", "modalities", "audio", "prediction", "web_search_options", "reasoning_effort",
         "verbosity", "functions", "function_call", "safety_identifier", "prompt_cache_key", "max_completion_tokens",
         "continue_final_message", "add_generation_prompt", "chat_template_kwargs", "pdserve_record",
         "return_token_ids", "skip_special_tokens", "structured_outputs", "top_k", "min_p", "top_p",
         "repetition_penalty", "min_tokens", "ignore_eos", "stop_token_ids"))),
    "every option of a completion null": (TEXT, dict.fromkeys(
        ("best_of", "echo", "suffix", "logprobs", "logit_bias", "n", "stop", "stream", "user", "seed", "top_p",
         "add_special_tokens", "stream_options", "presence_penalty", "frequency_penalty", "functions"))),
    "empty lists and texts": (CHAT, {"tools": [], "stop": [], "logit_bias": {}, "metadata": {}, "user": ""}),
    "an empty stop text": (CHAT, {"stop": ""}),
    "an empty stop text of a completion": (TEXT, {"stop": "", "echo": False, "best_of": 1}),
    "no calls of no tools": (CHAT, {"tools": [], "tool_choice": "auto", "parallel_tool_calls": True}),
    "defaults in full": (CHAT, {
        "n": 1, "top_p": 1, "top_k": -1, "min_p": 0, "presence_penalty": 0, "frequency_penalty": 0.0, "stream": False,
        "response_format": {"type": "text"}, "modalities": ["text"], "store": False, "service_tier": "auto",
        "logprobs": False}),
    "labels": (CHAT, {
        "user": "u-1", "metadata": {"trace": "7", "tags": ["a"]}, "safety_identifier": "s", "prompt_cache_key": "k"}),
    "max_completion_tokens, and max_tokens null": (CHAT, {"max_tokens": None, "max_completion_tokens": 2}),
    "both limits, alike": (CHAT, {"max_completion_tokens": 2}),
    "content as a list of parts": (CHAT, {"messages": [{"role": "user", "content": [
        {"type": "text", "text": "the cat"}, {"type": "text", "text": " sat"}]}]}),
    "a mark that a prefix should be kept": (CHAT, {"messages": [{"role": "user", "content": [
        {"type": "text", "text": "the cat sat", "cache_control": {"type": "ephemeral"}}]}]}),
    "a name, null": (CHAT, {"messages": [{**USER, "name": None, "tool_calls": None, "tool_call_id": None}]}),
    "fields of another server's objects, null": (CHAT, {"messages": [
        {**USER, "provider_specific_fields": None, "thinking_blocks": None, "reasoning": None, "images": None}]}),
}  # fmt: skip
# What is taken and changes the prompt: the messages that the template has to see in the end.
SEEN: dict[str, tuple[list[dict[str, Any]], list[dict[str, Any]]]] = {
    "a developer is a system": (
        [{**RULE, "role": "developer"}, USER], [RULE, USER],
    ),
    "an answer comes last": ([USER, SAID], [USER, SAID]),
    "an answer as OpenAI's own server gives it": (
        [USER, {**SAID, "refusal": None, "annotations": [], "audio": None}, USER],
        [USER, SAID, USER],
    ),
    "an answer with its thoughts": (
        [USER, {**SAID, "reasoning_content": "Hm."}, USER],
        [USER, SAID, USER],
    ),
    "a call without content": (
        [USER, {"role": "assistant", "content": "", "tool_calls": [{**CALL, "index": 0}]},
         {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "7"}], "name": "f"}],
        [USER, {"role": "assistant", "content": ""}, {"role": "tool", "content": "7"}],
    ),
    "no calls": ([{**USER, "tool_calls": []}], [USER]),
    "a system message in the middle": ([USER, RULE], [USER, RULE]),
}  # fmt: skip
# What is refused, by the name of the field, and with what to do instead.
REFUSED: dict[str, tuple[str, dict[str, Any], str, str, str]] = {
    "store": (CHAT, {"store": True}, "store", "unknown_field", "leave"),
    "service_tier": (CHAT, {"service_tier": "flex"}, "service_tier", "unknown_field", "leave"),
    "audio": (CHAT, {"audio": {"voice": "a", "format": "wav"}}, "audio", "unknown_field", "leave"),
    "modalities": (CHAT, {"modalities": ["text", "audio"]}, "modalities", "unknown_field", "leave"),
    "prediction": (CHAT, {"prediction": {"type": "content", "content": "x"}}, "prediction", "unknown_field", "leave"),
    "web_search_options": (CHAT, {"web_search_options": {}}, "web_search_options", "unknown_field", "leave"),
    "reasoning_effort": (
        CHAT, {"reasoning_effort": "low"}, "reasoning_effort", "unknown_field", "chat_template_kwargs"),
    "verbosity": (CHAT, {"verbosity": "low"}, "verbosity", "unknown_field", "leave"),
    "functions": (CHAT, {"functions": [{"name": "f"}]}, "functions", "unknown_field", "tools"),
    "function_call": (CHAT, {"function_call": "auto"}, "function_call", "unknown_field", "tool_choice"),
    "guided_json": (CHAT, {"guided_json": {}}, "guided_json", "unknown_field", "structured_outputs"),
    "num_ctx": (CHAT, {"options": {"num_ctx": 4096}}, "options", "unknown_field", "leave"),
    "enable_thinking": (CHAT, {"enable_thinking": False}, "enable_thinking", "unknown_field", "chat_template_kwargs"),
    "extra_body": (CHAT, {"extra_body": {"top_k": 1}}, "extra_body", "unknown_field", "beside"),
    "best_of in chat": (CHAT, {"best_of": 1}, "best_of", "unknown_field", TEXT),
    "a prompt in chat": (CHAT, {"prompt": "x"}, "prompt", "unknown_field", TEXT),
    "a misspelled option beside one that is null": (
        CHAT, {"audio": None, "temprature": 1}, "temprature", "unknown_field", "leave"),
    "a null where a value is due": (CHAT, {"audio": None, "messages": None}, "messages", "invalid_field", "correct"),
    "padded events": (
        CHAT, {"stream": True, "stream_options": {"include_obfuscation": True}},
        "stream_options.include_obfuscation", "invalid_field", "correct"),
    "a picture": (
        CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}]},
        "messages[0].content[0]", "invalid_field", "text parts only"),
    "a sound": (
        CHAT, {"messages": [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}]},
        "messages[0].content[0]", "invalid_field", "text parts only"),
    "a part with a field that is unknown": (
        CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "bold": True}]}]},
        "messages[0].content[0].bold", "unknown_field", "leave"),
    "a part that is none": (
        CHAT, {"messages": [{"role": "user", "content": ["a"]}]}, "messages[0].content[0]", "invalid_field", "parts"),
    "content null": (
        CHAT, {"messages": [{**SAID, "content": None}]}, "messages[0].content", "invalid_messages", "text"),
    "a stop text among others that is empty": (CHAT, {"stop": ["a", ""]}, "stop", "invalid_stop", "1 to"),
    "no tokens at all": (CHAT, {"max_tokens": -1}, "max_tokens", "invalid_max_tokens", "at least 1"),
    "messages of a completion": (TEXT, {"messages": [USER]}, "messages", "unknown_field", CHAT),
    "suffix": (TEXT, {"suffix": "end"}, "suffix", "unknown_field", "leave"),
    "best_of": (TEXT, {"best_of": 3}, "best_of", "invalid_field", "n"),
    "log probabilities that are a switch": (TEXT, {"logprobs": True}, "logprobs", "invalid_field", "correct"),
}  # fmt: skip


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def plain(http: httpx.AsyncClient) -> dict[str, Any]:
    """The choices that the plain bodies get."""
    return {path: (await http.post(path, json=body)).json()["choices"] for path, body in PLAIN.items()}


@pytest.mark.parametrize("case", SAME)
async def test_what_asks_for_nothing_changes_nothing(http: httpx.AsyncClient, plain: dict[str, Any], case: str) -> None:
    path, change = SAME[case]
    answer = await http.post(path, json=PLAIN[path] | change)
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"] == plain[path]


@pytest.mark.parametrize("case", SEEN)
async def test_messages_reach_the_template_as_clients_mean_them(http: httpx.AsyncClient, case: str) -> None:
    sent, seen = SEEN[case]
    answer = await http.post(CHAT, json=PLAIN[CHAT] | {"messages": sent, "max_tokens": 1})
    assert answer.status_code == 200, answer.text
    expected = Tokenizer(bundle()).apply_chat(seen)
    assert answer.json()["usage"]["prompt_tokens"] == len(expected)
    told = await http.post("/tokenize", json={"messages": sent})
    assert told.json()["tokens"] == list(expected)


@pytest.mark.parametrize("case", REFUSED)
async def test_what_is_not_served_is_refused_by_name_with_what_to_do(http: httpx.AsyncClient, case: str) -> None:
    path, change, param, code, remedy = REFUSED[case]
    answer = await http.post(path, json=PLAIN[path] | change)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (400, param, code), error
    assert error["type"] == "invalid_request_error" and remedy in error["message"].split("(")[-1], error["message"]


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/embeddings", "/v1/audio/speech", "/v1", "/", "/v1/chat"])
async def test_other_paths_say_what_is_served(http: httpx.AsyncClient, path: str) -> None:
    answer = await http.post(path, json={"model": MODEL, "input": "hi"})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["type"]) == (404, "unknown_url", "invalid_request_error")
    assert CHAT in error["message"] and path in error["message"]


async def test_a_slash_at_the_end_and_a_question_for_the_head_alone(http: httpx.AsyncClient) -> None:
    for path, body in PLAIN.items():
        assert (await http.post(f"{path}/", json=body)).status_code == 200  # not sent elsewhere: few clients follow
    listed = await http.get("/v1/models")
    assert (await http.get("/v1/models/")).json() == listed.json()
    for path in ("/v1/models", f"/v1/models/{MODEL}", "/healthz"):
        head = await http.head(path)
        assert (head.status_code, head.content) == (200, b"")
    assert (await http.head(CHAT)).status_code == 405
    assert (await http.get(f"/v1/models/{MODEL}")).json()["id"] == MODEL
    missing = await http.get("/v1/models/some%2Fother")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")


ORIGIN = "https://chat.example.org"
ASKS = {"origin": ORIGIN, "access-control-request-method": "POST"}
ASKED_HEADERS = "authorization,content-type,x-stainless-lang"  # as OpenAI's client for browsers sends them


async def test_pages_in_browsers_may_ask_only_from_origins_that_were_named(http: httpx.AsyncClient) -> None:
    for path in (CHAT, "/v1/models"):
        refused = await http.options(path, headers=ASKS)
        assert refused.status_code == 405 and not any("access-control" in name for name in refused.headers)
    assert "access-control-allow-origin" not in (await http.get("/v1/models", headers={"origin": ORIGIN})).headers
    async with house(prefills=0, decodes=0, cors_origins=(ORIGIN,)) as open_house:
        url = f"http://{open_house.router.http_address}"
        async with httpx.AsyncClient(base_url=url) as browser:
            allowed = await browser.options(CHAT, headers={**ASKS, "access-control-request-headers": ASKED_HEADERS})
            assert allowed.status_code == 200 and allowed.headers["access-control-allow-origin"] == ORIGIN
            assert "POST" in allowed.headers["access-control-allow-methods"]
            assert set(ASKED_HEADERS.split(",")) <= set(allowed.headers["access-control-allow-headers"].split(","))
            assert "access-control-allow-credentials" not in allowed.headers
            for path, status in (("/v1/models", 200), ("/v1/nothing", 404)):
                answer = await browser.get(path, headers={"origin": ORIGIN})
                assert answer.status_code == status and answer.headers["access-control-allow-origin"] == ORIGIN
            stranger = await browser.options(CHAT, headers={**ASKS, "origin": "https://evil.example.org"})
            assert stranger.status_code == 400 and "access-control-allow-origin" not in stranger.headers


async def test_openais_client_can_be_given_an_address_with_a_slash(made: House, client: AsyncOpenAI) -> None:
    other = client.with_options(base_url=f"http://{made.router.http_address}/v1/")
    assert (await other.models.list()).data[0].id == MODEL
    assert (await other.chat.completions.create(**PLAIN[CHAT])).choices
