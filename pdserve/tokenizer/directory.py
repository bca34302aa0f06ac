"""The tokenizer of a Hugging Face model directory: tokenizer.json and the files around it.

tokenizer.json          vocabulary, splits, decoder, post-processor: what ids are
tokenizer_config.json   named tokens, tokens added later, add_bos_token, chat template
special_tokens_map.json named tokens of older checkpoints
chat_template.jinja     chat template; goes before the one in tokenizer_config.json
generation_config.json  ids that end an answer (else config.json has them), and defaults of sampling
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from pdserve.errors import CheckpointError, InvalidRequest
from pdserve.request import SamplingParams
from pdserve.tokenizer.build import build_bundle, canonical_json, with_bos
from pdserve.tokenizer.bundle import MAX_BUNDLE_BYTES, SAMPLING_NAMES, Bundle
from pdserve.tokenizer.tokenizer import load_backend

# Files that say a tokenizer was meant to be here, in formats that are not read.
_OTHER_FORMATS = ("tokenizer.model", "vocab.json", "vocab.txt", "tekken.json", "spiece.model", "tokenizer_config.json")
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


def bundle_from_directory(path: str | Path) -> Bundle | None:
    """None for a directory without tokenizer files. Raises CheckpointError naming the file at fault."""
    folder = Path(path)
    if not (folder / "tokenizer.json").exists():
        for name in _OTHER_FORMATS:
            if (folder / name).exists():
                raise _bad(name, "found without a tokenizer.json", "save the tokenizer in its fast form")
        return None
    config = _read(folder, "tokenizer_config.json")
    named = _named_tokens(config, _read(folder, "special_tokens_map.json"))
    backend = load_backend(canonical_json(_read(folder, "tokenizer.json")))
    _add_missing(backend, config, named)
    content: dict[str, object] = json.loads(backend.to_str())
    bos = named.get("bos_token")
    if config.get("add_bos_token") and bos is not None and not _starts_with(backend, bos):
        content = with_bos(content, bos, _id_of(backend, bos))
    return build_bundle(
        content,
        chat_template=_chat_template(folder, config),
        special_tokens=named,
        eos_ids=_eos_ids(folder, backend, named),
        sampling=_sampling(folder),
    )


def _named_tokens(config: Mapping[str, Any], older: Mapping[str, Any]) -> dict[str, str]:
    """`bos_token`, `eos_token` and so on; each a string or an object with a `content`."""
    # A checkpoint whose configuration lists its added tokens is complete without the older file.
    sources = (config,) if "added_tokens_decoder" in config else (config, older)
    named = {}
    for source in sources:
        for key, value in source.items():
            text = _content(value)
            if key.endswith("_token") and text is not None:
                named[key] = text
    return named


def _add_missing(backend: Backend, config: Mapping[str, Any], named: Mapping[str, str]) -> None:
    """Adds to `backend` the tokens that only the configuration mentions; named tokens become special."""
    known = {token.content: token for token in backend.get_added_tokens_decoder().values()}
    for token in _listed_tokens(config):
        if token.content not in known:
            known[token.content] = token
            backend.add_tokens([token])
    extra = config.get("additional_special_tokens") or config.get("extra_special_tokens") or ()
    texts = [*named.values(), *(_content(value) for value in (extra if isinstance(extra, list) else ()))]
    for text in dict.fromkeys(texts):
        if text is None:
            continue
        token = known.get(text) or AddedToken(text, normalized=False)
        token.special = True
        backend.add_special_tokens([token])


def _listed_tokens(config: Mapping[str, Any]) -> list[AddedToken]:
    """The configuration's `added_tokens_decoder`, an object of id -> token, in the order of ids."""
    listed = config.get("added_tokens_decoder", {})
    if not isinstance(listed, dict) or not all(key.isdecimal() for key in listed):
        raise _bad("tokenizer_config.json", "added_tokens_decoder is no table by id", "save the tokenizer again")
    tokens = []
    for _, value in sorted(listed.items(), key=lambda item: int(item[0])):
        if not isinstance(value, dict) or not isinstance(value.get("content"), str):
            raise _bad("tokenizer_config.json", f"added_tokens_decoder holds {value!r}", "save the tokenizer again")
        flags = {flag: bool(value[flag]) for flag in _FLAGS if flag in value}
        tokens.append(AddedToken(value["content"], **flags))
    return tokens


def _starts_with(backend: Backend, token: str) -> bool:
    first: list[int] = backend.encode("a", add_special_tokens=True).ids[:1]
    return first == [_id_of(backend, token)]


def _chat_template(folder: Path, config: Mapping[str, Any]) -> str:
    """The template file; else the configuration's: text, a name -> text object, or a list of such."""
    file = folder / "chat_template.jinja"
    if file.exists():
        return _text(file)
    match config.get("chat_template"):
        case None:
            return ""
        case str(text):
            return text
        case {"default": str(text)}:
            return text
        case [*entries]:
            for entry in entries:
                if isinstance(entry, dict) and entry.get("name") == "default" and isinstance(entry["template"], str):
                    return entry["template"]
    raise _bad("tokenizer_config.json", "chat_template has no default", "name one of its templates default")


def _eos_ids(folder: Path, backend: Backend, named: Mapping[str, str]) -> set[int]:
    """Every id that ends an answer: the generation settings' and the tokenizer's end token."""
    ids: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        stated = _read(folder, name).get("eos_token_id")
        if stated is not None:
            ids.update(_ids(stated, name))
            break
    if "eos_token" in named:
        ids.add(_id_of(backend, named["eos_token"]))
    return ids


def _sampling(folder: Path) -> dict[str, float]:
    """What the generation settings say of sampling. Raises CheckpointError for values that no request could have."""
    name = "generation_config.json"
    settings = _read(folder, name)
    stated: dict[str, Any] = {key: settings[key] for key in SAMPLING_NAMES if settings.get(key) is not None}
    for key, value in stated.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise _bad(name, f"{key} {value!r} is not a number", "correct the file")
    try:
        if "top_k" in stated:
            stated["top_k"] = int(stated["top_k"])
        SamplingParams(**stated).check()
    except (InvalidRequest, ValueError, OverflowError) as error:
        raise _bad(name, str(error), "correct the file") from error
    return {key: float(value) for key, value in stated.items()}


def _ids(value: object, name: str) -> Iterable[int]:
    items = value if isinstance(value, list) else [value]
    for item in items:
        if isinstance(item, bool) or not isinstance(item, int) or item < 0:
            raise _bad(name, f"eos_token_id {item!r} is not a token id", "correct the file")
        yield item


def _id_of(backend: Backend, token: str) -> int:
    token_id: int | None = backend.token_to_id(token)
    if token_id is None:
        raise _bad("tokenizer.json", f"{token!r} has no id", "save the tokenizer again")
    return token_id


def _content(value: object) -> str | None:
    match value:
        case str(text) | {"content": str(text)}:
            return text
        case _:
            return None


def _read(folder: Path, name: str) -> dict[str, Any]:
    """A JSON object; empty when there is no such file."""
    file = folder / name
    if not file.exists():
        return {}
    try:
        content = json.loads(_text(file))
    except (ValueError, RecursionError) as error:
        raise _bad(name, f"not JSON: {error}", "get the file again") from error
    if not isinstance(content, dict):
        raise _bad(name, f"a {type(content).__name__} instead of an object", "get the file again")
    return content


def _text(file: Path) -> str:
    try:
        if file.stat().st_size > MAX_BUNDLE_BYTES:
            raise _bad(file.name, f"larger than {MAX_BUNDLE_BYTES} bytes", "check that it is the right file")
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise _bad(file.name, f"cannot be read: {error}", "get the file again") from error


def _bad(name: str, problem: str, remedy: str) -> CheckpointError:
    return CheckpointError(problem, reason="BAD_TOKENIZER", field=name, remedy=remedy)
