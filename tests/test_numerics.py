"""Norms against exact rational arithmetic."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ghoststep.numerics import safe_norm, safe_row_norms

FINITE = st.floats(min_value=-1e300, max_value=1e300, allow_nan=False)


def twin(values: list[float]) -> float:
    """The definition, in whole numbers: the square root of the sum of squares, to 30 digits and more."""
    total = sum((Fraction(v) ** 2 for v in values), Fraction(0))
    shift = 1 << 2300  # lifts the square of the smallest subnormal far above 1
    root = math.isqrt(int(total * shift * shift))
    return float(Fraction(root, shift))


@settings(max_examples=200, deadline=None)
@given(st.lists(FINITE, min_size=0, max_size=8))
def test_equals_the_definition_at_any_magnitude(values: list[float]) -> None:
    expected = twin(values)
    for result in (safe_norm(np.array(values)), safe_norm(torch.tensor(values, dtype=torch.float64))):
        assert result == pytest.approx(expected, rel=1e-14, abs=1e-323)


@pytest.mark.parametrize("magnitude", [1e-300, 1e-160, 1e-45, 1e-38, 1e-30, 1e-12, 1.0, 1e20, 3e38, 1e160, 1e299])
def test_three_four_five(magnitude: float) -> None:
    assert safe_norm(np.array([3 * magnitude, 0.0, -4 * magnitude])) == pytest.approx(5 * magnitude, rel=1e-15)


def test_sees_what_a_float32_norm_does_not() -> None:
    small = torch.full((64,), 1.25e-31)
    assert float(small.norm()) == 0.0  # the reason for this module
    assert safe_norm(small) == pytest.approx(1e-30, rel=1e-6)
    assert safe_norm(torch.full((4,), 1e30)) == pytest.approx(2e30, rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.int32, torch.float8_e5m2])
def test_narrow_tensors_are_widened_first(dtype: torch.dtype) -> None:
    assert safe_norm(torch.tensor([[3.0, 4.0]]).to(dtype)) == 5.0


def test_rows_are_independent_of_each_other() -> None:
    rows = np.array([[3e-200, 4e-200], [0.0, -0.0], [3e200, 4e200], [1.0, np.inf], [np.nan, np.inf], [-np.inf, 1e308]])
    norms = safe_row_norms(rows)
    assert norms[:3] == pytest.approx([5e-200, 0.0, 5e200])
    assert norms[3] == norms[5] == math.inf
    assert math.isnan(norms[4])
    assert norms.dtype == np.float64


@pytest.mark.parametrize("shape", [(0, 4), (4, 0), (0, 0)])
def test_empty_rows(shape: tuple[int, int]) -> None:
    assert safe_row_norms(np.empty(shape)).tolist() == [0.0] * shape[0]


def test_empty_and_scalar() -> None:
    assert safe_norm(np.empty(0)) == 0.0
    assert safe_norm(torch.empty(0, 3)) == 0.0
    assert safe_norm(torch.tensor(-2.0)) == 2.0


@pytest.mark.parametrize("values", [np.array([1j]), torch.tensor([1j])])
def test_complex_is_refused(values: object) -> None:
    with pytest.raises(TypeError, match="magnitudes"):
        safe_norm(values)  # type: ignore[arg-type]


def test_changes_nothing_and_records_no_gradient() -> None:
    tensor = torch.tensor([1e-30, 2.0], requires_grad=True)
    array = np.array([1e-300, -2.0])
    assert isinstance(safe_norm(tensor), float)
    safe_norm(array)
    assert tensor.grad is None
    assert tensor.tolist() == pytest.approx([1e-30, 2.0])
    assert array.tolist() == [1e-300, -2.0]
