"""From the metadata of a GGUF file to a ModelSpec, every key accounted for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from cache_transfer.contract import PositionScheme
from pdserve.engine.fields import Fields
from pdserve.engine.gguf_families import GGUF_FAMILIES, GgufFamily
from pdserve.engine.gguf_gemma4 import gemma4_fields
from pdserve.engine.gguf_layers import deci_fields
from pdserve.engine.gguf_metadata import Metadata, head_dim, vocab_size
from pdserve.engine.gguf_rope import gguf_rope_scheme, single
from pdserve.engine.lfm2 import gguf_fields
from pdserve.engine.rope_scaling import within
from pdserve.engine.spec import ModelSpec
from pdserve.engine.stored import StoredTensor
from pdserve.engine.validate import MAX_EXPERTS, MAX_LAYERS
from pdserve.errors import CheckpointError

# Metadata outside the architecture's own prefix never changes the forward pass.
_HARMLESS_PREFIXES = ("general.", "tokenizer.", "quantize.", "split.")


_READERS: Mapping[str, Callable[[Metadata, Mapping[str, StoredTensor]], dict[str, Any]]] = {
    "deci": deci_fields,
    "gemma4": gemma4_fields,
    "lfm2": gguf_fields,
}


def spec_from_metadata(
    metadata: Mapping[str, Any], stored: Mapping[str, StoredTensor], where: str
) -> tuple[GgufFamily, ModelSpec]:
    """Raises CheckpointError naming the key that is missing, wrong, unsupported or unknown."""
    arch = str(metadata.get("general.architecture"))
    if arch not in GGUF_FAMILIES:
        raise CheckpointError(
            f"{where} is of architecture {arch}",
            field="general.architecture",
            reason="UNKNOWN_ARCHITECTURE",
            remedy=f"supported are {', '.join(GGUF_FAMILIES)}",
        )
    family, fields = GGUF_FAMILIES[arch], Metadata(metadata, where, arch)
    own = _READERS.get(family.rules)
    read = (own(fields, stored) if own else _sizes(fields, stored)) | dict(family.traits)
    read["norm_eps"] = single(fields.number(fields.key(family.norm_eps)))
    read |= {name: single(fields.number(fields.key(key))) for name, key in family.numbers.items()}
    read |= {name: f"blk.0.{tensor}" in stored for name, tensor in family.options.items()}
    read |= {name: f"blk.0.{tensor}" not in stored for name, tensor in family.without.items()}
    if own is None:
        read |= _positions(fields, family, read, stored) | _experts(fields, family)
        read |= _layers(fields, family, read)
    read |= _scales(family, read)
    spec = ModelSpec(
        **read,
        tied_head="output.weight" not in stored,
        bos_id=fields.integer("tokenizer.ggml.bos_token_id", None, minimum=0),
        eos_ids=_eos(fields),
    )
    _refuse_rest(fields, family)
    return family, within(spec, 0)


def _sizes(fields: Metadata, stored: Mapping[str, StoredTensor]) -> dict[str, Any]:
    heads = fields.size("attention.head_count")
    width = fields.size("embedding_length")
    return {
        "vocab_size": vocab_size(fields, stored),
        "width": width,
        "layers": fields.size("block_count", maximum=MAX_LAYERS),
        "heads": heads,
        "kv_heads": fields.size("attention.head_count_kv", heads),
        "head_dim": head_dim(fields, width, heads),
        "ffn_width": fields.size("feed_forward_length"),
        "context_limit": fields.size("context_length"),
    }


def _positions(
    fields: Metadata, family: GgufFamily, read: Mapping[str, Any], stored: Mapping[str, StoredTensor]
) -> dict[str, PositionScheme]:
    if family.positions == "learned":
        return {"positions": PositionScheme(kind="learned", dims=read["context_limit"])}
    if family.positions == "alibi":
        return {"positions": PositionScheme(kind="alibi", dims=read["heads"])}
    sizes = read["head_dim"], read["context_limit"]
    options = family.partial, family.yarn_truncate
    return {"positions": gguf_rope_scheme(fields, fields.arch, *sizes, *options, stored)}


def _experts(fields: Metadata, family: GgufFamily) -> dict[str, int]:
    if not family.experts:
        return {}
    found = {
        "experts": fields.size("expert_count", maximum=MAX_EXPERTS),
        "active_experts": fields.size("expert_used_count"),
        "expert_width": fields.size("expert_feed_forward_length"),
    }
    if family.shared_expert:
        found["shared_width"] = fields.size("expert_shared_feed_forward_length")
    return found


def _layers(fields: Metadata, family: GgufFamily, read: Mapping[str, Any]) -> dict[str, Any]:
    """Windows, and the positions of layers with one where these have their own."""
    if not family.window:
        return {}
    window, layers = fields.size(family.window, 0, minimum=0), read["layers"]
    if not family.pattern:
        return {"sliding_window": (window,) * layers if window else ()}
    if not window:
        raise fields.missing(fields.key(family.window))
    pattern = fields.size(f"{family.window}_pattern", family.pattern)
    windows = tuple(0 if (i + 1) % pattern == 0 else window for i in range(layers))
    found: dict[str, Any] = {"sliding_window": windows}
    if family.local_theta:
        theta = fields.number(fields.key("rope.freq_base_swa"), family.local_theta)
        local = PositionScheme(kind="rope", theta=theta, dims=read["head_dim"])
        found["layer_positions"] = tuple(local if w else read["positions"] for w in windows)
    return found


def _scales(family: GgufFamily, read: Mapping[str, Any]) -> dict[str, float]:
    """What the format leaves to whoever knows the architecture."""
    found: dict[str, float] = {}
    if family.scaled_embedding:
        found["embed_scale"] = read["width"] ** 0.5
    if family.wide_scale and read["layers"] == family.wide_scale:
        found["attention_scale"] = (read["width"] / read["heads"]) ** -0.5
    return found


def _eos(fields: Fields) -> tuple[int, ...]:
    """The end of text, and the end of a turn or message where the file has them."""
    keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    ids = [fields.integer(f"tokenizer.ggml.{key}", None, minimum=0) for key in keys]
    return tuple(dict.fromkeys(token for token in ids if token is not None))


def _refuse_rest(fields: Metadata, family: GgufFamily) -> None:
    for name in family.harmless:
        fields.take(fields.key(name), None)
    for name, value in family.fixed.items():
        fields.expect(fields.key(name), (value,))
    fields.expect("general.type", ("model",))
    fields.expect("split.count", (0, 1))
    for name, allowed in (
        ("expert_count", (0,)),
        ("expert_used_count", (0,)),
        ("use_parallel_residual", (False,)),
        ("attention.causal", (True,)),
        ("tensor_data_layout", ("reference",)),
    ):
        if not fields.taken(fields.key(name)):
            fields.expect(fields.key(name), allowed)
    fields.finish(lambda key: key.startswith(_HARMLESS_PREFIXES))
