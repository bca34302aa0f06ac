"""The four dtype names of contracts and configs, and what torch calls them."""

from __future__ import annotations

import torch

from pdserve.errors import ConfigError

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "float64": torch.float64}


def torch_dtype(name: str, field: str = "dtype") -> torch.dtype:
    """Raises ConfigError for a name outside fp32, bf16, fp16, float64."""
    if name not in _DTYPES:
        raise ConfigError(f"unknown dtype {name!r}", field=field, remedy=f"use one of {', '.join(_DTYPES)}")
    return _DTYPES[name]


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums, softmax and logits: fp32, or float64 for a float64 model."""
    return torch.float64 if dtype == torch.float64 else torch.float32
