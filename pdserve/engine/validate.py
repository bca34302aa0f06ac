"""What a spec that came from a file must satisfy beyond what the decoder itself asks."""

from __future__ import annotations

import math

from pdserve.engine.runnable import check_spec as check_runnable
from pdserve.engine.spec import ModelSpec
from pdserve.errors import CheckpointError

# Far above any model; keeps a damaged count from being taken for a list of that length.
MAX_LAYERS = MAX_EXPERTS = 4096


def check_spec(spec: ModelSpec) -> None:
    """Raises CheckpointError naming the first field that no model can have or the engine cannot run."""
    _require(spec.layers <= MAX_LAYERS, "layers", spec.layers, f"is more than {MAX_LAYERS}")
    _require(spec.experts <= MAX_EXPERTS, "experts", spec.experts, f"is more than {MAX_EXPERTS}")
    check_runnable(spec)
    good_eps = math.isfinite(spec.norm_eps) and spec.norm_eps > 0
    _require(good_eps, "norm_eps", spec.norm_eps, "must be a positive number")
    for name in ("attention_scale", "embed_scale", "residual_scale", "logit_scale", "norm_offset"):
        _require(math.isfinite(getattr(spec, name)), name, getattr(spec, name), "must be a number")
    for name in ("soft_cap", "logit_soft_cap", "swiglu_alpha", "swiglu_limit"):
        cap = getattr(spec, name)
        _require(math.isfinite(cap) and cap >= 0, name, cap, "must be a positive number, or 0 for none")
    _require(all(w >= 0 for w in spec.sliding_window), "sliding_window", spec.sliding_window, "must not be negative")
    for token in spec.eos_ids:
        _require(0 <= token < spec.vocab_size, "eos_ids", token, f"must be in the vocabulary of {spec.vocab_size}")
    if spec.bos_id is not None:
        good_bos = 0 <= spec.bos_id < spec.vocab_size
        _require(good_bos, "bos_id", spec.bos_id, f"must be in the vocabulary of {spec.vocab_size}")


def _require(good: bool, field: str, value: object, what: str) -> None:
    if not good:
        raise CheckpointError(
            f"{field} = {value} {what}",
            field=field,
            reason="BAD_SPEC",
            remedy="correct it, or use the model as it was published",
        )
