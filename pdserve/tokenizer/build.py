"""What both kinds of checkpoint share: a tokenizer.json, normalised, to a checked bundle."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping

from pdserve.errors import CheckpointError
from pdserve.tokenizer.bundle import MAX_TEMPLATE_CHARS, Bundle
from pdserve.tokenizer.tokenizer import Tokenizer, load_backend, vocab_size_of


def build_bundle(
    content: Mapping[str, object],
    *,
    chat_template: str,
    special_tokens: Mapping[str, str],
    eos_ids: Collection[int],
    sampling: Mapping[str, float] | None = None,
) -> Bundle:
    """A bundle that a Tokenizer accepts. Raises CheckpointError for one that cannot be used.

    Args:
        content: tokenizer.json, parsed; its truncation, padding and dropout are left out, since a
            prompt is never cut, filled or varied by its tokenizer.
        special_tokens: names for templates; `bos_token` is the begin token.
        sampling: what a request gets that does not say.
    """
    if len(chat_template) > MAX_TEMPLATE_CHARS:
        raise CheckpointError(
            f"{len(chat_template)} characters exceed the limit of {MAX_TEMPLATE_CHARS}",
            reason="BAD_TOKENIZER",
            field="chat_template",
            remedy="use a smaller template",
        )
    text = canonical_json(content)
    backend = load_backend(text)
    bos_id = backend.token_to_id(special_tokens["bos_token"]) if "bos_token" in special_tokens else None
    plain = backend.encode("a", add_special_tokens=False).ids
    full = backend.encode("a", add_special_tokens=True).ids
    bundle = Bundle(
        tokenizer_json=text,
        chat_template=chat_template,
        bos_id=bos_id,
        eos_ids=tuple(sorted(eos_ids)),
        add_bos=bos_id is not None and full != plain and full[:1] == [bos_id],
        special_tokens=dict(special_tokens),
        vocab_size=vocab_size_of(backend),
        sampling=dict(sampling or {}),
    )
    Tokenizer(bundle)  # an unsupported decoder is refused when the model is loaded, not on its first answer
    return bundle


def canonical_json(content: Mapping[str, object]) -> str:
    """Equal tokenizers get equal text: sorted keys, no spaces, no run-time settings."""
    model = content.get("model")
    if isinstance(model, dict) and "dropout" in model:
        content = {**content, "model": {**model, "dropout": None}}
    content = {**content, "truncation": None, "padding": None}
    return json.dumps(content, ensure_ascii=False, sort_keys=True, separators=(",", ":"))


def with_bos(content: Mapping[str, object], token: str, token_id: int) -> dict[str, object]:
    """tokenizer.json with a post-processor that puts the begin token first, after its own."""
    begin = {"SpecialToken": {"id": token, "type_id": 0}}
    template: dict[str, object] = {
        "type": "TemplateProcessing",
        "single": [begin, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [begin, {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {token: {"id": token, "ids": [token_id], "tokens": [token]}},
    }
    present = content.get("post_processor")
    if present is not None:
        template = {"type": "Sequence", "processors": [present, template]}
    return {**content, "post_processor": template}
