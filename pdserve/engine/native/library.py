"""The kernels' C interface: the structs of abi.h, mirrored, and the loaded library."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_float, c_int32, c_int64, c_void_p
from functools import cache
from pathlib import Path

import torch

from pdserve.errors import ConfigError

ABI = 3
KINDS = {"none": 0, "rms": 1, "layer": 2}
ACTIVATIONS = {"silu": 0, "gelu": 1, "gelu_tanh": 2, "relu": 3}


class Norm(ctypes.Structure):
    _fields_ = (("scale", c_void_p), ("shift", c_void_p), ("eps", c_float), ("kind", c_int32))


class Matrix(ctypes.Structure):
    _fields_ = (
        ("weight", c_void_p),
        ("scale", c_void_p),
        ("bias", c_void_p),
        ("outputs", c_int32),
        ("inputs", c_int32),
        ("group", c_int32),
        ("lanes", c_int32),
    )


class Layer(ctypes.Structure):
    _fields_ = (
        *((name, Norm) for name in ("attn_norm", "q_norm", "k_norm", "mlp_norm")),
        *((name, Matrix) for name in ("qkv", "o", "gate", "up", "down")),
        ("k_pages", c_void_p),
        ("v_pages", c_void_p),
        ("window", c_int64),
    )


class Model(ctypes.Structure):
    _fields_ = (
        *((name, c_int32) for name in ("width", "heads", "kv_heads", "head_dim", "ffn", "rotary_dims")),
        *((name, c_int32) for name in ("post_norm", "gated", "activation")),
        *((name, c_int32) for name in ("x_bf16", "w_int8", "kv_bf16", "page_size")),
        ("scale", c_float),
        ("soft_cap", c_float),
        ("head_stride", c_int64),
        ("slot_stride", c_int64),
        ("cos", c_void_p),
        ("sin", c_void_p),
    )


class Step(ctypes.Structure):
    _fields_ = (
        *((name, c_int32) for name in ("rows", "sequences", "threads", "stored")),
        *((name, c_void_p) for name in ("slots", "positions", "places", "first_row", "tables", "table_at", "scratch")),
    )


_MODEL, _LAYER, _STEP = POINTER(Model), POINTER(Layer), POINTER(Step)
_FUNCTIONS = {
    "pdserve_abi": (c_int32, ()),
    "pdserve_level": (c_int32, ()),
    "pdserve_scratch_bytes": (c_int64, (_MODEL, c_int64, c_int64, c_int64, c_int32)),
    "pdserve_attention_inputs": (None, (_MODEL, _LAYER, _STEP, c_void_p, c_void_p, c_void_p, c_void_p)),
    "pdserve_attention": (None, (_MODEL, _LAYER, _STEP, c_void_p, c_void_p)),
    "pdserve_attention_output": (None, (_MODEL, _LAYER, _STEP, c_void_p, c_void_p, c_void_p)),
    "pdserve_layers": (None, (_MODEL, _LAYER, c_int32, _STEP, *[c_void_p] * 6)),
    "pdserve_linear": (None, (_MODEL, _STEP, POINTER(Matrix), c_void_p, c_void_p)),
    "pdserve_logits": (None, (_MODEL, _STEP, POINTER(Norm), POINTER(Matrix), c_void_p, c_void_p)),
}


@cache
def load(path: Path) -> ctypes.CDLL:
    """Loads a library that build.py vouches for; its functions run without the interpreter lock.

    torch is imported before, so that its OpenMP runtime, of the same name, serves both. Raises ConfigError.
    """
    torch.get_num_threads()
    try:
        library = ctypes.CDLL(str(path))
        for name, (result, arguments) in _FUNCTIONS.items():
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
    except (OSError, AttributeError) as error:
        raise ConfigError(f"the kernels cannot be loaded: {error}", field="kernels", remedy="use plain") from error
    if library.pdserve_abi() != ABI:
        raise ConfigError("the kernels are of another version", field="kernels", remedy=f"remove {path}")
    return library


def pair(library: ctypes.CDLL, dtype: torch.dtype) -> int:
    """Inputs that the library multiplies at a time, in activations of this type."""
    return 2 if dtype == torch.bfloat16 and library.pdserve_level() >= 2 else 1


def level(library: ctypes.CDLL) -> str:
    """What the library computes with, here."""
    return ("portable", "avx512", "avx512-bf16", "amx-bf16")[library.pdserve_level()]
