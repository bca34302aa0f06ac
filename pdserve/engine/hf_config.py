"""From a Hugging Face config.json to a ModelSpec, every key accounted for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cache_transfer.contract import PositionScheme
from pdserve.engine.families import FAMILIES
from pdserve.engine.family import FIXED_KEYS, HARMLESS_KEYS, REQUIRED, Family, Key
from pdserve.engine.fields import Fields
from pdserve.engine.hf_layers import layer_fields
from pdserve.engine.hf_rope import read_scheme, rope_object
from pdserve.engine.mxfp4 import check_quantization
from pdserve.engine.rope_scaling import within
from pdserve.engine.spec import ModelSpec
from pdserve.engine.validate import MAX_LAYERS
from pdserve.errors import CheckpointError


def find_family(config: Mapping[str, Any], where: str) -> Family:
    """The family that a config.json names; raises CheckpointError if none is supported."""
    architectures, model_type = config.get("architectures"), config.get("model_type")
    if isinstance(architectures, list) and len(architectures) == 1:
        found = [family for family in FAMILIES if family.architecture == architectures[0]]
        name, key = architectures[0], "architectures"
    elif architectures is None:
        found = [family for family in FAMILIES if family.model_type == model_type]
        name, key = model_type, "model_type"
    else:
        found, name, key = [], architectures, "architectures"
    if not found:
        known = ", ".join(family.architecture for family in FAMILIES)
        raise CheckpointError(
            f"{where} is of architecture {name}",
            field=key,
            reason="UNKNOWN_ARCHITECTURE",
            remedy=f"supported are {known}",
        )
    if model_type is not None and model_type != found[0].model_type:
        raise CheckpointError(
            f"{where} names architecture {name} but model_type {model_type}",
            field="model_type",
            reason="UNKNOWN_ARCHITECTURE",
            remedy=f"correct one of the two; {name} is a {found[0].model_type}",
        )
    return found[0]


def spec_from_config(family: Family, config: Mapping[str, Any], generation: Mapping[str, Any], where: str) -> ModelSpec:
    """The spec of a config.json; `generation` is generation_config.json, which may hold the end tokens.

    Raises CheckpointError naming the key that is missing, wrong, unsupported or unknown.
    """
    fields = Fields(_text_config(family, config, where), where)
    read = dict(family.traits)
    for name, key in family.keys.items():
        read[name] = _read(fields, key, read)
    if read["layers"] > MAX_LAYERS:
        fields.integer(family.keys["layers"].name, maximum=MAX_LAYERS)
    read["head_dim"] = _head_dim(family, fields, read)
    if read.get("attention_scale") == read["head_dim"] ** -0.5:
        del read["attention_scale"]  # the default: one model has one spec, however it is spelled
    read |= _positions(family, fields, read)
    read |= layer_fields(family, fields, read)
    read.pop("local_positions", None)
    spec = ModelSpec(
        **read,
        bos_id=_first(token_ids(fields.take("bos_token_id", generation.get("bos_token_id")), "bos_token_id", where)),
        eos_ids=_eos(fields, generation, where),
    )
    if family.packed:
        check_quantization(fields)
    for name, allowed in {**FIXED_KEYS, **family.fixed}.items():
        fields.expect(name, allowed)
    fields.finish((HARMLESS_KEYS | family.harmless).__contains__)
    return within(spec, 0)


def _text_config(family: Family, config: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """What a config.json says of the text model: all of it, or one object in it, with what holds for all its models."""
    if not family.inner:
        return config
    fields = Fields(config, where)
    inner = fields.take(family.inner)
    if not isinstance(inner, dict):
        raise fields.unsupported(family.inner, inner, "expected an object")
    common = {key: fields.take(key) for key in ("bos_token_id", "eos_token_id", "tie_word_embeddings") if key in fields}
    fields.finish((HARMLESS_KEYS | family.outer).__contains__)
    return {**inner, **common}


def token_ids(value: object, key: str, where: str) -> tuple[int, ...]:
    """One id, a list of ids or nothing, as a tuple."""
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(item, int) and not isinstance(item, bool) and item >= 0 for item in ids):
        raise CheckpointError(
            f"{where} has {key} = {value!r}, expected token ids",
            field=key,
            reason="BAD_VALUE",
            remedy="write one id, or a list of ids",
        )
    return tuple(ids)


def _first(ids: tuple[int, ...]) -> int | None:
    return ids[0] if ids else None


def _eos(fields: Fields, generation: Mapping[str, Any], where: str) -> tuple[int, ...]:
    """generation_config.json wins, as it does in the peer's generate(); base configs often list one id of several."""
    key = "eos_token_id"
    own = token_ids(fields.take(key, None), key, where)
    return token_ids(generation.get(key), key, "generation_config.json") or own


def _read(fields: Fields, key: Key, read: Mapping[str, Any]) -> Any:
    """The field that a key stands for."""
    name = key.also if key.also in fields and key.name not in fields else key.name
    if key.named and not fields.names(name):
        raise fields.missing(name)
    default = key.default
    if isinstance(default, tuple):
        default = read[default[0]] * default[1]
    given = () if default is REQUIRED else (default,)
    value = _typed(fields, key, name, given) if name else default
    if key.also and name != key.also and key.also in fields and fields.take(key.also) != fields.take(name):
        raise fields.unsupported(key.also, fields.take(key.also), f"{name} is {fields.take(name)}")
    if key.kind == "flag" and key.meaning:
        value = key.meaning[value]
    if key.power != 1.0:
        value = float(value) ** key.power
    return 0 if key.unless and value == read[key.unless] else value


def _typed(fields: Fields, key: Key, name: str, given: tuple[Any, ...]) -> Any:
    if key.kind == "choice":
        return fields.choice(name, key.meaning, *given)
    return {"integer": fields.integer, "number": fields.number, "flag": fields.flag}[key.kind](name, *given)


def _head_dim(family: Family, fields: Fields, read: Mapping[str, Any]) -> int:
    width, heads = read["width"], read["heads"]
    if family.head_dim == "required" or (family.head_dim == "optional" and "head_dim" in fields):
        return fields.integer("head_dim")
    if width % heads:
        names = family.keys["heads"].name, family.keys["width"].name
        raise fields.unsupported(names[0], heads, f"it does not divide {names[1]} = {width}")
    return int(width // heads)


def _positions(family: Family, fields: Fields, read: Mapping[str, Any]) -> dict[str, PositionScheme]:
    """`positions`, and `local_positions` of the layers with a window where these have their own."""
    if family.positions == "by layer":
        return {}
    if family.positions == "learned":
        return {"positions": PositionScheme(kind="learned", dims=read["context_limit"])}
    if family.positions == "alibi":
        return {"positions": PositionScheme(kind="alibi", dims=read["heads"])}
    sizes, stands = (read["head_dim"], read["context_limit"]), rope_object(fields)
    if family.local_rope is None:
        return {"positions": read_scheme(fields, stands, family.rope, *sizes)}
    inner = {
        name: Fields(stands.take(name, {}), f"rope_parameters.{name}")
        for name in ("full_attention", "sliding_attention")
    }
    nested = any(name in stands for name in inner)
    if nested:
        stands.finish(lambda key: False)
    return {
        "positions": read_scheme(fields, inner["full_attention"] if nested else stands, family.rope, *sizes),
        "local_positions": read_scheme(fields, inner["sliding_attention"], family.local_rope, *sizes),
    }
