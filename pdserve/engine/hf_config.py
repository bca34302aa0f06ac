"""From a Hugging Face config.json to a ModelSpec, every key accounted for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cache_transfer.contract import PositionScheme
from pdserve.engine.families import ACTIVATIONS, FAMILIES, FIXED_KEYS, HARMLESS_KEYS, Family
from pdserve.engine.fields import Fields
from pdserve.engine.hf_rope import rope_scheme
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
        )
    return found[0]


def spec_from_config(family: Family, config: Mapping[str, Any], generation: Mapping[str, Any], where: str) -> ModelSpec:
    """The spec of a config.json; `generation` is generation_config.json, which may hold the end tokens.

    Raises CheckpointError naming the key that is missing, wrong, unsupported or unknown.
    """
    fields = Fields(config, where)
    sizes: dict[str, Any] = {name: fields.integer(key) for name, key in family.sizes.items()}
    fields.integer(family.sizes["layers"], maximum=MAX_LAYERS)
    spec = ModelSpec(
        **sizes,
        **dict(family.traits),
        **_heads(family, fields, sizes),
        **_feed_forward(family, fields, sizes["width"]),
        **_biases(family, fields),
        positions=_positions(family, fields, sizes),
        sliding_window=_windows(family, fields, sizes["layers"]),
        tied_head=fields.flag("tie_word_embeddings", family.tied_default),
        bos_id=_first(token_ids(fields.take("bos_token_id", generation.get("bos_token_id")), "bos_token_id", where)),
        eos_ids=_eos(fields, generation, where),
    )
    for key, allowed in {**FIXED_KEYS, **family.fixed}.items():
        fields.expect(key, allowed)
    fields.finish(HARMLESS_KEYS.__contains__)
    return spec


def token_ids(value: object, key: str, where: str) -> tuple[int, ...]:
    """One id, a list of ids or nothing, as a tuple."""
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(item, int) and not isinstance(item, bool) and item >= 0 for item in ids):
        raise CheckpointError(f"{where} has {key} = {value!r}, expected token ids", field=key, reason="BAD_VALUE")
    return tuple(ids)


def _first(ids: tuple[int, ...]) -> int | None:
    return ids[0] if ids else None


def _eos(fields: Fields, generation: Mapping[str, Any], where: str) -> tuple[int, ...]:
    """generation_config.json wins, as it does in the peer's generate(); base configs often list one id of several."""
    key = "eos_token_id"
    own = token_ids(fields.take(key, None), key, where)
    return token_ids(generation.get(key), key, "generation_config.json") or own


def _heads(family: Family, fields: Fields, sizes: Mapping[str, int]) -> dict[str, Any]:
    width, heads = sizes["width"], sizes["heads"]
    kv_heads = fields.integer("num_key_value_heads", heads) if family.grouped else heads
    if family.head_dim == "required" or (family.head_dim == "optional" and "head_dim" in fields):
        return {"kv_heads": kv_heads, "head_dim": fields.integer("head_dim")}
    if width % heads:
        raise fields.unsupported(family.sizes["heads"], heads, f"it does not divide {family.sizes['width']} = {width}")
    return {"kv_heads": kv_heads, "head_dim": width // heads}


def _feed_forward(family: Family, fields: Fields, width: int) -> dict[str, Any]:
    if family.positions == "learned":  # GPT-2's names; its inner width defaults to four times the width
        inner = fields.integer("n_inner", 4 * width)
        return {
            "ffn_width": inner,
            "norm_eps": fields.number("layer_norm_epsilon"),
            "activation": fields.choice("activation_function", ACTIVATIONS),
            "attention_scale": 0.0 if fields.flag("scale_attn_weights", True) else 1.0,
        }
    return {
        "ffn_width": fields.integer("intermediate_size"),
        "norm_eps": fields.number("rms_norm_eps"),
        "activation": fields.choice("hidden_act", ACTIVATIONS),
    }


def _biases(family: Family, fields: Fields) -> dict[str, Any]:
    biases: dict[str, Any] = {}
    if family.attention_bias:
        attention = fields.flag("attention_bias", False)
        biases |= {"qkv_bias": attention, "attn_out_bias": attention}
    if family.mlp_bias:
        biases["mlp_bias"] = fields.flag("mlp_bias", False)
    return biases


def _positions(family: Family, fields: Fields, sizes: Mapping[str, int]) -> PositionScheme:
    if family.positions == "learned":
        fields.expect("n_ctx", (sizes["context_limit"],))
        return PositionScheme(kind="learned", dims=sizes["context_limit"])
    return rope_scheme(fields, _heads(family, fields, sizes)["head_dim"])


def _windows(family: Family, fields: Fields, layers: int) -> tuple[int, ...]:
    """Tokens seen per layer; () if no layer has a window."""
    if family.windows == "none":
        return ()
    window = fields.integer("sliding_window", None)
    if family.windows == "all":
        if not fields.names("sliding_window"):  # null means none, but the peer's default is a window
            raise fields.missing("sliding_window")
        return (window,) * layers if window else ()
    return _window_layers(fields, layers, window)


def _window_layers(fields: Fields, layers: int, window: int | None) -> tuple[int, ...]:
    """Qwen's rules: off unless use_sliding_window; then layer_types, else all layers from max_window_layers on."""
    if not fields.flag("use_sliding_window", False):
        window = None
    elif window is None:
        raise fields.missing("sliding_window")
    first = fields.integer("max_window_layers", layers, minimum=0)
    default = ["sliding_attention" if window and i >= first else "full_attention" for i in range(layers)]
    types = fields.take("layer_types", default)
    known = {"full_attention": 0, "sliding_attention": window}
    if not isinstance(types, list) or len(types) != layers or not all(isinstance(t, str) and t in known for t in types):
        raise fields.unsupported(
            "layer_types", types, f"expected full_attention or sliding_attention for {layers} layers"
        )
    if "sliding_attention" not in types:
        return ()
    if not window:
        raise fields.unsupported("layer_types", types, "sliding_attention needs use_sliding_window and sliding_window")
    return tuple(known[t] or 0 for t in types)
