"""The attention functions: the hand-computed case, and every path against the plain reference."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pdserve.engine import attention, deterministic
from pdserve.errors import Internal


def hand_case() -> tuple[Tensor, Tensor, Tensor]:
    """q [2, 1, 2]; k, v [1, 2, 2]: two positions of spec B6."""
    q = torch.tensor([[[1.0, 0.0]], [[1.0, 0.0]]], dtype=torch.float64)
    k = torch.tensor([[[1.0, 0.0], [0.0, 1.0]]], dtype=torch.float64)
    v = torch.tensor([[[10.0, 0.0], [0.0, 20.0]]], dtype=torch.float64)
    return q, k, v


EXPECTED = torch.tensor([[[10.0, 0.0]], [[6.69762, 6.60477]]], dtype=torch.float64)


def test_hand_case_on_every_path() -> None:
    q, k, v = hand_case()
    first, end, scale = torch.tensor([0, 0]), torch.tensor([1, 2]), 2**-0.5
    visible = attention.visible_keys(first, end, 2)
    bias = torch.zeros(2, 1, 2, dtype=torch.float64).masked_fill(~visible[:, None], -torch.inf)
    both = (k[:, None].expand(1, 2, 2, 2), v[:, None].expand(1, 2, 2, 2))  # one query of each of two sequences
    results = {
        "reference": attention.attend(q, k, v, visible, scale),
        "prefill": attention.prefill(q, k, v, attention.query_blocks(first, end, q.dtype), scale, 0.0),
        "decode": attention.decode(q, *both, bias, scale, 0.0),
        "deterministic": deterministic.attend(q, k, v, first, end, scale, 0.0),
    }
    for name, out in results.items():
        assert float((out - EXPECTED).abs().max()) < 5e-6, name


@pytest.mark.parametrize("soft_cap", [0.0, 1.5])
@pytest.mark.parametrize("keys", [1, 63, 64, 65, 130])
def test_paths_equal_the_reference(keys: int, soft_cap: float) -> None:
    torch.manual_seed(keys)
    n = min(keys, 70)
    q = torch.randn(n, 6, 8, dtype=torch.float64)
    k, v = torch.randn(2, keys, 8, dtype=torch.float64), torch.randn(2, keys, 8, dtype=torch.float64)
    end = torch.arange(keys - n, keys) + 1
    first = (end - 40).clamp(min=0)
    visible = attention.visible_keys(first, end, keys)
    expected = attention.attend(q, k, v, visible, 0.3, soft_cap)
    bias = torch.zeros(n, 1, keys, dtype=torch.float64).masked_fill(~visible[:, None], -torch.inf)
    ks, vs = k[:, None].expand(2, n, keys, 8), v[:, None].expand(2, n, keys, 8)
    blocks = attention.query_blocks(first, end, q.dtype)
    torch.testing.assert_close(attention.prefill(q, k, v, blocks, 0.3, soft_cap), expected)
    torch.testing.assert_close(attention.decode(q, ks, vs, bias, 0.3, soft_cap), expected)
    torch.testing.assert_close(deterministic.attend(q, k, v, first, end, 0.3, soft_cap), expected)


def test_a_row_that_sees_nothing_is_refused_when_the_mask_is_built() -> None:
    with pytest.raises(Internal) as error:
        attention.visible_keys(torch.tensor([0, 3]), torch.tensor([1, 3]), 4)
    assert error.value.reason == "EMPTY_QUERY_ROW"


def test_deterministic_rows_without_keys_are_zero_not_nan() -> None:
    q, k, v = hand_case()
    out = deterministic.attend(q, k, v, torch.tensor([0, 0]), torch.tensor([0, 2]), 1.0, 0.0)
    assert not bool(out[0].any()) and bool(out.isfinite().all())


def test_check_rows_reports_a_function_that_mixes_rows() -> None:
    x = torch.randn(deterministic.ROWS, 4)
    deterministic.check_rows("square", lambda r: (r * r,), x)
    with pytest.raises(Internal) as error:
        deterministic.check_rows("centred", lambda r: (r - r.mean(0),), x)
    assert error.value.reason == "NOT_DETERMINISTIC"
