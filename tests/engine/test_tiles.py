"""Products by tile instructions (AMX): used where processor and system have them, and right where they do not."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from tests.engine.test_native import rope
from tests.engine.tiny import spec, tiny_engine

ASKED = """
import ctypes, sys, torch
from pdserve.engine.native import build, library
import pdserve.engine.native.choice as choice
recipe = build.find_recipe((*build.FLAGS, *sys.argv[2:]))
choice.find_recipe = lambda: recipe
if sys.argv[1] == "refuse":  # for tiles the system wants more room for signals than this thread will have
    class Stack(ctypes.Structure):
        _fields_ = (("at", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t))
    room = ctypes.create_string_buffer(8192)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.sigaltstack(ctypes.byref(Stack(ctypes.addressof(room), 0, len(room))), None):
        sys.exit(f"sigaltstack: {ctypes.get_errno()}")
from tests.engine.test_native import FAMILIES, logits, relative_error
from tests.engine.tiny import tiny_engine
config = dict(page_size=16, pages=40)
native = tiny_engine(FAMILIES["head of 128, groups of 3"], "bf16", kernels="native", **config)
want = logits(tiny_engine(FAMILIES["head of 128, groups of 3"], "bf16", kernels="plain", **config))
for key, found in logits(native).items():
    assert relative_error(found, want[key]) < 1.2e-1, key
print(native.contract().info["kernels"])
"""


def run_apart(*arguments: str) -> str:
    """What an engine computes with, in a process of its own, after its answers were compared with the plain path's."""
    done = subprocess.run(
        [sys.executable, "-c", ASKED, *arguments], capture_output=True, text=True, timeout=200, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_they_are_used_wherever_torch_would_use_them() -> None:
    has = torch.cpu._is_amx_tile_supported() and torch.cpu._init_amx()
    used = run_apart("ask")
    assert (used == "native amx-bf16") == has, used


@pytest.mark.slow
def test_without_them_in_the_library_the_answers_are_as_near() -> None:
    assert "amx" not in run_apart("ask", "-mno-amx-tile")


@pytest.mark.slow
def test_where_the_system_refuses_them_the_same_library_does_without() -> None:
    assert "amx" not in run_apart("refuse")


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("width", [96, 41])
def test_a_row_of_a_product_is_the_same_beside_any_others(dtype: str, width: int) -> None:
    """Blocks of tiles have up to 16 and up to 32 rows, others six or eight: each row comes out alike, to the bit."""
    of = spec(head_dim=48, positions=rope(48), heads=2, kv_heads=1, width=width, ffn_width=200, layers=1)
    engine = tiny_engine(of, dtype, kernels="native")
    engine.prepare()
    for name in ("qkv", "o", "up", "down"):
        product = getattr(engine.decoder.layers[0], name)
        x = torch.randn(71, product.matrices[0].inputs, dtype=engine.decoder.embedding.dtype)
        alone = torch.cat([product(x[row : row + 1]) for row in range(len(x))])
        for rows in (2, 7, 16, 17, 32, 33, 71):
            assert torch.equal(product(x[:rows]), alone[:rows]), (name, rows)
