"""Which specs `model.py` can run: every option known, and every two of them compatible."""

from __future__ import annotations

from pdserve.engine.parts import ACTIVATIONS
from pdserve.engine.positions import check_schemes
from pdserve.engine.spec import ModelSpec
from pdserve.engine.weights import NORMS
from pdserve.errors import CheckpointError


def check_spec(spec: ModelSpec) -> None:
    """Raises CheckpointError naming the first option that the engine does not know."""
    known = {
        "norm": (spec.norm, ("rms", "layer")),
        "norm_order": (spec.norm_order, tuple(NORMS)),
        "mlp": (spec.mlp, ("gated", "plain")),
        "activation": (spec.activation, tuple(ACTIVATIONS)),
    }
    for name, (value, allowed) in known.items():
        if value not in allowed:
            raise _unsupported(name, f"{value!r} is none of {', '.join(allowed)}")
    for name in ("vocab_size", "width", "layers", "heads", "kv_heads", "head_dim", "ffn_width", "context_limit"):
        if getattr(spec, name) < 1:
            raise _unsupported(name, f"{getattr(spec, name)} is not a size")
    if spec.heads % spec.kv_heads:
        raise _unsupported("kv_heads", f"{spec.kv_heads} KV heads do not divide {spec.heads} query heads")
    if spec.sliding_window and len(spec.sliding_window) != spec.layers:
        raise _unsupported("sliding_window", f"{len(spec.sliding_window)} windows for {spec.layers} layers")
    if spec.tied_head and (spec.out_width or spec.width) != (spec.embed_width or spec.width):
        raise _unsupported("tied_head", "a tied head needs the embedding's width")
    if spec.positions.kind == "learned" and spec.positions.dims < spec.context_limit:
        raise _unsupported("context_limit", f"{spec.context_limit} exceeds a table of {spec.positions.dims} positions")
    _check_shapes(spec)
    _check_shared(spec)
    _check_combinations(spec)
    check_schemes(spec)


def _check_shapes(spec: ModelSpec) -> None:
    """Of layers that differ from one another."""
    for name in ("layer_shapes", "layer_ffn", "kv_layers"):
        if getattr(spec, name) and len(getattr(spec, name)) != spec.layers:
            raise _unsupported(name, f"{len(getattr(spec, name))} entries for {spec.layers} layers")
    for layer, shape in enumerate(spec.layer_shapes):
        heads, kv_heads, head_dim = shape.heads, shape.kv_heads, shape.head_dim
        if shape.kernel:
            good = (heads, kv_heads, head_dim) == (1, 1, spec.width) and shape.kernel == spec.window(layer) > 0
            good = good and bool(spec.layer_positions) and spec.layer_positions[layer].kind == "none"
        elif kv_heads:
            good = head_dim >= 1 and kv_heads >= 1 and heads >= 1 and heads % kv_heads == 0
        else:  # an output projection of the stream itself, or nothing
            good = heads * head_dim in (0, spec.width) and min(heads, head_dim) >= 0
        if not good:
            raise _unsupported("layer_shapes", f"layer {layer} has {heads} heads of {head_dim}, {kv_heads} KV heads")
    if any(width < 0 for width in spec.layer_ffn):
        raise _unsupported("layer_ffn", f"{min(spec.layer_ffn)} is not a size")
    if not any(spec.planes()):
        raise _unsupported("layer_shapes", "no layer caches anything")
    whole = all(spec.ffn_of(layer) and spec.shape_of(layer).kv_heads for layer in range(spec.layers))
    if not whole and (spec.norm_order != "pre" or spec.parallel):
        raise _unsupported(
            "norm_order", "a layer without attention or MLP needs norms before them, one after the other"
        )
    if spec.layer_shapes and spec.positions.kind == "alibi":
        raise _unsupported("positions.kind", "ALiBi needs the same heads in every layer")


def _check_shared(spec: ModelSpec) -> None:
    """Of layers that read another's K and V, and of values that are keys."""
    for layer, source in enumerate(spec.kv_layers):
        shapes = [spec.shape_of(i) for i in (layer, source) if 0 <= i <= layer]
        if len(shapes) < 2 or spec.kv_layer(source) != source or shapes[0] != shapes[1]:
            message = f"layer {layer} cannot read what layer {source} keeps: an earlier one of its shape, with its own"
            raise _unsupported("kv_layers", message)
    if any(not 0 <= layer < spec.layers for layer in spec.key_is_value):
        raise _unsupported("key_is_value", f"{spec.key_is_value} among {spec.layers} layers")


def _check_combinations(spec: ModelSpec) -> None:
    if spec.parallel and spec.norm_order != "pre":
        raise _unsupported("parallel", f"a parallel layer is of order pre, not {spec.norm_order}")
    if spec.one_norm and not spec.parallel:
        raise _unsupported("one_norm", "only the MLP of a parallel layer can read what attention reads")
    if spec.norm_offset and not (spec.norm_scale and (spec.norm == "layer" or not spec.norm_shift)):
        raise _unsupported("norm_offset", "an offset belongs to a learned scale, of an RMS norm without a shift")
    for name in ("qk_norm_whole", "qk_norm_each"):
        if getattr(spec, name) and not spec.qk_norm:
            raise _unsupported(name, "there is no q/k norm")
    if spec.qk_norm_whole and spec.qk_norm_each:
        raise _unsupported("qk_norm_each", "the q/k norm is over all heads together")
    if spec.experts and spec.mlp != "gated":
        raise _unsupported("experts", "experts are gated MLPs")
    if spec.experts and spec.mlp_bias:
        raise _unsupported("mlp_bias", "biases of experts are expert_bias")
    if not (1 <= spec.active_experts <= spec.experts if spec.experts else spec.active_experts == 0):
        raise _unsupported("active_experts", f"{spec.active_experts} of {spec.experts} experts")
    if bool(spec.experts) != (spec.expert_width > 0):
        raise _unsupported("expert_width", f"{spec.expert_width} for {spec.experts} experts")
    if spec.sigmoid_router and not spec.experts:
        raise _unsupported("sigmoid_router", "there are no experts")
    if spec.layer_input_width < 0:
        raise _unsupported("layer_input_width", f"{spec.layer_input_width} is not a size")
    if spec.experts_beside and (spec.dense_layers or spec.norm_order != "sandwich"):
        raise _unsupported("experts_beside", "an MLP with experts beside it is in every layer, between two norms")
    for name in ("expert_bias", "swiglu_alpha", "swiglu_limit", "experts_beside"):
        if getattr(spec, name) and not spec.experts:
            raise _unsupported(name, "there are no experts")
    if bool(spec.swiglu_alpha) != bool(spec.swiglu_limit):
        raise _unsupported("swiglu_limit", f"{spec.swiglu_limit} with an alpha of {spec.swiglu_alpha}")
    if spec.shared_width < 0 or (spec.shared_width and not spec.experts):
        raise _unsupported("shared_width", f"{spec.shared_width} beside {spec.experts} experts")
    if any(not 0 <= layer < spec.layers for layer in spec.dense_layers) or (spec.dense_layers and not spec.experts):
        raise _unsupported("dense_layers", f"{spec.dense_layers} among {spec.layers} layers")


def _unsupported(field: str, message: str) -> CheckpointError:
    return CheckpointError(
        message,
        reason="UNSUPPORTED_MODEL",
        field=field,
        remedy="correct it, or use a model of a family in docs/families.md",
    )
