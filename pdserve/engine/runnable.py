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
    _check_combinations(spec)
    check_schemes(spec)


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
        raise _unsupported("mlp_bias", "experts have no biases")
    if not (1 <= spec.active_experts <= spec.experts if spec.experts else spec.active_experts == 0):
        raise _unsupported("active_experts", f"{spec.active_experts} of {spec.experts} experts")
    if bool(spec.experts) != (spec.expert_width > 0):
        raise _unsupported("expert_width", f"{spec.expert_width} for {spec.experts} experts")
    if spec.sigmoid_router and not spec.experts:
        raise _unsupported("sigmoid_router", "there are no experts")
    if spec.shared_width < 0 or (spec.shared_width and not spec.experts):
        raise _unsupported("shared_width", f"{spec.shared_width} beside {spec.experts} experts")
    if any(not 0 <= layer < spec.layers for layer in spec.dense_layers) or (spec.dense_layers and not spec.experts):
        raise _unsupported("dense_layers", f"{spec.dense_layers} among {spec.layers} layers")


def _unsupported(field: str, message: str) -> CheckpointError:
    return CheckpointError(message, reason="UNSUPPORTED_MODEL", field=field)
