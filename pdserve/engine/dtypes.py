"""The four dtype names of contracts and configs, and what torch calls them."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from pdserve.errors import ConfigError, Internal

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "float64": torch.float64}


def torch_dtype(name: str, field: str = "dtype") -> torch.dtype:
    """Raises ConfigError for a name outside fp32, bf16, fp16, float64."""
    if name not in _DTYPES:
        raise ConfigError(f"unknown dtype {name!r}", field=field, remedy=f"use one of {', '.join(_DTYPES)}")
    return _DTYPES[name]


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums, softmax and logits: fp32, or float64 for a float64 model."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def cast_bytes(payload: memoryview, source: torch.dtype, target: torch.dtype) -> memoryview:
    """Little-endian scalars in another precision, as torch casts: round to nearest even, overflow to infinity.

    Raises Internal for a payload that is not a whole number of scalars.
    """
    if payload.nbytes % source.itemsize:
        raise Internal(f"{payload.nbytes} bytes are no scalars of {source.itemsize}", field="payload")
    values = torch.frombuffer(bytearray(payload), dtype=source)  # torch takes no read-only memory
    cast: NDArray[np.uint8] = values.to(target).view(torch.uint8).numpy()
    return cast.data
