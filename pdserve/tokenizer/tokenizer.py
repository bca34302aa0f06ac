"""A bundle at work: text and chat messages to ids, ids to text."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tokenizers import Tokenizer as Backend

from pdserve.errors import CheckpointError, InvalidRequest
from pdserve.tokenizer.bundle import Bundle
from pdserve.tokenizer.chat import ChatTemplate
from pdserve.tokenizer.detokenizer import IncrementalDetokenizer
from pdserve.tokenizer.pieces import Pieces, plan_of

# The batch call below has only one text: threads would only cost, and the library warns of them at a fork.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


class Tokenizer:
    """Thread-safe after construction. Callers bound the length of what they encode.

    A long `encode` in a thread leaves the other threads running.

    Special-token text in a prompt is parsed as that token, as the reference implementation does.
    """

    def __init__(self, bundle: Bundle) -> None:
        """Raises CheckpointError if the bundle's tokenizer is broken or uses an unsupported decoder."""
        self.bundle = bundle
        self._backend = load_backend(bundle.tokenizer_json)
        self.vocab_size = vocab_size_of(self._backend)
        if self.vocab_size != bundle.vocab_size:
            raise CheckpointError(
                f"the bundle states {bundle.vocab_size} ids, its tokenizer has {self.vocab_size}",
                reason="BAD_TOKENIZER",
                field="bundle.vocab_size",
                remedy="build the bundle again from the model's files",
            )
        self.longest_token_bytes = max(map(_utf8_bytes, self._backend.get_vocab(with_added_tokens=True)), default=1)
        # Only the decoder is read from the JSON: the library does not show a decoder's parameters.
        plan = plan_of(json.loads(bundle.tokenizer_json)["decoder"])
        self.pieces = Pieces(self._backend, plan, frozenset(bundle.eos_ids))
        self._chat = ChatTemplate(bundle.chat_template, bundle.special_tokens)

    @property
    def has_chat_template(self) -> bool:
        return bool(self.bundle.chat_template)

    def special_id(self, text: str) -> int | None:
        """The id of a special token, which adds nothing to a text; None for one that does, or that does not exist."""
        token: int | None = self._backend.token_to_id(text)
        return token if token is not None and self.pieces.is_silent(token) else None

    def encode(self, text: str, *, add_special: bool = True) -> tuple[int, ...]:
        """Ids of `text`; empty text gives only what `add_special` adds, perhaps nothing.

        `add_special` adds what the model wants around a prompt, usually its begin token. A text
        that already starts with the begin token does not get a second one. Raises InvalidRequest
        for text that is not valid Unicode.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequest(
                "a lone surrogate is not a character",
                reason="INVALID_TEXT",
                field="prompt",
                remedy="send valid Unicode",
            ) from error
        # A batch of one: only the batch calls release the GIL, and a long text takes seconds.
        (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=add_special)
        ids: list[int] = encoding.ids
        if add_special and self.bundle.add_bos and ids[1:2] == [self.bundle.bos_id]:
            ids = ids[1:]
        return tuple(ids)

    def most_bytes(self, tokens: int) -> int:
        """UTF-8 bytes of text beyond which it has more than `tokens` tokens, found without encoding it.

        Longest token times count: generous where tokens are spelled in letters of several bytes. Only a
        normalizer that drops or folds most of a text could fit more into as many tokens.
        """
        return tokens * self.longest_token_bytes

    @property
    def takes_tools(self) -> bool:
        """The chat template shows functions to the model."""
        return self._chat.takes_tools

    def render_chat(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, object]] = (),
        continue_final_message: bool = False,
        variables: Mapping[str, object] | None = None,
    ) -> str:
        """The prompt text of a conversation: arguments and errors of `chat.ChatTemplate.render`."""
        return self._chat.render(
            messages,
            add_generation_prompt=add_generation_prompt,
            tools=tools,
            continue_final_message=continue_final_message,
            variables=variables,
        )

    def apply_chat(self, messages: Sequence[Mapping[str, object]], **options: Any) -> tuple[int, ...]:
        """Ids of a conversation, options as for `render_chat`. Special tokens, the begin token too, are the template's
        business alone."""
        return self.encode(self.render_chat(messages, **options), add_special=False)

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """Text of `ids` as a text of their own, broken characters as U+FFFD."""
        stream = IncrementalDetokenizer(self, special=not skip_special_tokens)
        data = b"".join([*(stream.push(token) for token in ids), stream.flush()])
        return data.decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """One token's own bytes, a special token's name included; empty beyond the tokenizer."""
        return self.pieces.text(token_id)


def load_backend(tokenizer_json: str) -> Backend:
    """Raises CheckpointError with the library's own reason."""
    try:
        return Backend.from_str(tokenizer_json)
    except Exception as error:  # the library raises nothing more specific
        raise CheckpointError(
            f"the tokenizer cannot be loaded: {error}",
            reason="BAD_TOKENIZER",
            field="tokenizer.json",
            remedy="get the model's files again, or save the tokenizer with a current version of its library",
        ) from error


def vocab_size_of(backend: Backend) -> int:
    """Highest id plus one, added tokens included."""
    ids: Iterable[int] = backend.get_vocab(with_added_tokens=True).values()
    return max(ids, default=-1) + 1


def _utf8_bytes(token: str) -> int:
    return len(token.encode())
