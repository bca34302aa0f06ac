"""Which fields of a request the first version of the schema did not have, so that none is ignored without a word.

A server that is older than its client does not see the fields that it does not know. So a router answers with those
that it has read (`Accepted.read_fields`), and a client that finds one of its own missing there refuses the answer. Both
ends name them by this module. A field that is added to the schema is a later one by itself: nothing is to be done here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

# Of each message what it had when it came into being.
_FIRST = {
    "GenerateRequest": {"model", "text", "chat", "tokens", "sampling", "request_id", "adapter", "want_record"},
    "ChatPrompt": {"messages"},
    "ChatMessage": {"role", "content"},
    "TokenPrompt": {"ids"},
    "PromptList": {"prompts"},
    "ListedPrompt": {"text", "tokens"},
    "SamplingOptions": {
        *("temperature", "top_k", "top_p", "min_p", "logit_bias", "seed", "stop", "stop_token_ids", "ignore_eos"),
        *("repetition_penalty", "presence_penalty", "frequency_penalty", "max_tokens", "min_tokens", "logprobs"),
    },
}
# Values that ask for what a server does that does not know the field.
_AS_BEFORE = {
    ("GenerateRequest", "n"): 1,
    ("GenerateRequest", "add_special_tokens"): True,
    ("SamplingOptions", "skip_special_tokens"): True,
}


def later_fields(request: Message) -> frozenset[str]:
    """Those that are set, by their way in the request, such as "chat.tool_mode"."""
    return frozenset(_later(request, ""))


def _later(message: Message, way: str) -> Iterator[str]:
    kind = message.DESCRIPTOR.name
    for field, value in message.ListFields():
        if field.name not in _FIRST.get(kind, ()) and _AS_BEFORE.get((kind, field.name)) != value:
            yield f"{way}{field.name}"
        for part in _messages(field, value):
            yield from _later(part, f"{way}{field.name}.")


def _messages(field: FieldDescriptor, value: Any) -> Iterator[Message]:
    if field.message_type is None or field.message_type.GetOptions().map_entry:
        return
    yield from (value,) if isinstance(value, Message) else value
