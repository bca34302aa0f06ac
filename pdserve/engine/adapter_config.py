"""A LoRA checkpoint's adapter_config.json, as PEFT writes it. What is not supported is refused by name.

The options that describe training (dropout, how weights were initialised) change nothing here, save those
initialisations that also change the base model: such an adapter fits no base model that anybody else has.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from pdserve.engine.fields import Fields
from pdserve.errors import CheckpointError

ALL_LINEAR = "all-linear"
MAX_PATTERN = 1024  # characters of a regular expression
MAX_RANK = 1 << 14

N = TypeVar("N", int, float)

Names = str | tuple[str, ...]  # one regular expression for a whole name, or ends of names

# Bookkeeping, and what only training looks at.
_HARMLESS = frozenset({
    "auto_mapping", "base_model_name_or_path", "corda_config", "ensure_weight_tying", "eva_config", "inference_mode",
    "lora_dropout", "lora_ga_config", "megatron_core", "peft_version", "qalora_group_size", "revision",
})  # fmt: skip

# What would change the computation, with the only values that are supported. `fan_in_fan_out` says how the base
# model stores its weights, and both factors are stored in the same way whatever it says.
_FIXED: Mapping[str, tuple[Any, ...]] = {
    "alora_invocation_tokens": (),
    "arrow_config": (),
    "bias": ("none",),
    "fan_in_fan_out": (False, True),
    "init_lora_weights": (True, False, "gaussian", "eva", "orthogonal"),
    "kasa_config": (),
    "layer_replication": ([],),
    "loftq_config": ({},),
    "lora_bias": (False,),
    "megatron_config": ({},),
    "modules_to_save": ([],),
    "monteclora_config": (),
    "peft_type": ("LORA",),
    "target_parameters": ([],),
    "task_type": ("CAUSAL_LM",),
    "trainable_token_indices": ([], {}),
    "use_bdlora": (False,),
    "use_dora": (False,),
    "use_qalora": (False,),
    "velora_config": (),
}


@dataclass(frozen=True)
class LoraConfig:
    """Which modules have factors A [rank, inputs] and B [outputs, rank], and the scale of their product."""

    rank: int
    alpha: float
    stabilised: bool  # rsLoRA: the scale is alpha / sqrt(rank) instead of alpha / rank
    targets: Names
    excluded: Names = ()
    layers: tuple[int, ...] = ()  # empty: all
    layer_patterns: tuple[str, ...] = ()  # of the segment before a layer's number; empty: any
    ranks: Mapping[str, int] = field(default_factory=dict)  # end of a module's name, as an expression -> its own rank
    alphas: Mapping[str, float] = field(default_factory=dict)

    def matches(self, module: str) -> bool:
        """Whether a linear module of the base model, by its full name, has factors."""
        if _named(self.excluded, module):
            return False
        if self.targets == ALL_LINEAR:
            return True
        if isinstance(self.targets, str):
            return _named(self.targets, module)
        return _named(self.targets, module) and (not self.layers or self._layer(module) in self.layers)

    def rank_of(self, module: str) -> int:
        return _by_pattern(self.ranks, module, self.rank)

    def scale_of(self, module: str) -> float:
        rank, alpha = self.rank_of(module), _by_pattern(self.alphas, module, self.alpha)
        return alpha / (math.sqrt(rank) if self.stabilised else rank)

    def _layer(self, module: str) -> int | None:
        """The number of the module's layer: the first one in its name that the patterns allow."""
        segment = "|".join(self.layer_patterns) or r"[^.]+"
        found = re.match(rf"(?:^|.*?\.)(?:{segment})\.(\d+)\.", module)
        return int(found[1]) if found else None


def read_lora_config(values: Mapping[str, Any], where: str) -> LoraConfig:
    """Raises CheckpointError naming the key that is missing, unknown, of a wrong type or not supported."""
    fields = Fields(values, where)
    for key, allowed in _FIXED.items():
        fields.expect(key, allowed)
    targets = _names(fields, "target_modules")
    if not targets:
        raise fields.missing("target_modules")
    config = LoraConfig(
        rank=fields.integer("r", 8, maximum=MAX_RANK),  # the defaults are PEFT's own
        alpha=fields.number("lora_alpha", 8.0),
        stabilised=fields.flag("use_rslora", False),
        targets=targets,
        excluded=_names(fields, "exclude_modules"),
        layers=_layers(fields),
        layer_patterns=_patterns(fields, "layers_pattern"),
        ranks={key: _rank(value, where) for key, value in _mapping(fields, "rank_pattern").items()},
        alphas={key: _alpha(value, where) for key, value in _mapping(fields, "alpha_pattern").items()},
    )
    if isinstance(targets, str) and config.layers:
        raise fields.unsupported("layers_to_transform", values["layers_to_transform"], "let target_modules name layers")
    fields.finish(_HARMLESS.__contains__)
    return config


def _names(fields: Fields, key: str) -> Names:
    value = fields.take(key, None)
    if isinstance(value, str):
        return value if key == "target_modules" and value == ALL_LINEAR else _expression(value, key)
    return _texts(value or [], key)


def _patterns(fields: Fields, key: str) -> tuple[str, ...]:
    value = fields.take(key, None) or []
    return tuple(_expression(text, key) for text in _texts([value] if isinstance(value, str) else value, key))


def _layers(fields: Fields) -> tuple[int, ...]:
    value = fields.take("layers_to_transform", None)
    numbers = value if isinstance(value, list) else [] if value is None else [value]
    for number in numbers:
        if not isinstance(number, int) or isinstance(number, bool) or number < 0:
            raise _bad("layers_to_transform", value, "layer numbers")
    return tuple(numbers)


def _mapping(fields: Fields, key: str) -> Mapping[str, Any]:
    value = fields.take(key, None) or {}
    if not isinstance(value, dict):
        raise _bad(key, value, "an object of patterns")
    return {_expression(pattern, key): item for pattern, item in value.items()}


def _rank(value: Any, where: str) -> int:
    return Fields({"rank_pattern": value}, where).integer("rank_pattern", maximum=MAX_RANK)


def _alpha(value: Any, where: str) -> float:
    return Fields({"alpha_pattern": value}, where).number("alpha_pattern")


def _texts(value: Any, key: str) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(text, str) and text for text in value):
        raise _bad(key, value, "a text, or a list of texts")
    return tuple(value)


def _expression(text: str, key: str) -> str:
    try:
        if len(text) > MAX_PATTERN:
            raise _bad(key, text, f"an expression of at most {MAX_PATTERN} characters")
        re.compile(text)
    except re.error as error:
        raise _bad(key, text, f"a regular expression: {error}") from error
    return text


def _named(names: Names, module: str) -> bool:
    """An expression has to match the whole name, a text is the name or its last parts."""
    if isinstance(names, str):
        return re.fullmatch(names, module) is not None
    return any(module == name or module.endswith(f".{name}") for name in names)


def _by_pattern(patterns: Mapping[str, N], module: str, default: N) -> N:
    """The value of the first pattern that the name ends with."""
    for pattern, value in patterns.items():
        if re.match(rf"(?:.*\.)?(?:{pattern})$", module):
            return value
    return default


def _bad(key: str, value: object, expected: str) -> CheckpointError:
    return CheckpointError(
        f"adapter_config.json has {key} = {str(value)[:60]!r}, expected {expected}",
        field=key,
        reason="BAD_VALUE",
        remedy="correct it, or save the adapter again with PEFT",
    )
