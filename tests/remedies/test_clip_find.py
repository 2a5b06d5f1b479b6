"""The rule by itself, against a slow twin that follows its words row by row."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ghoststep.remedies.clip_rule import find_spike

torch.set_num_threads(1)


def twin(norms: list[float], trunk: float, max_norm: float) -> tuple[set[int], float]:
    """Indices to cap, and the cap."""
    order = sorted(range(len(norms)), key=lambda i: (-norms[i], i))
    rows = [norms[i] for i in order]
    present = sum(r > 0 for r in rows)

    def left(k: int) -> float:
        return math.fsum([r * r for r in rows[k:]] + [trunk * trunk])

    found, bound = 0, max_norm
    for k, row in enumerate(rows):
        below = present - k - 1
        cap = max(max_norm, 10 * rows[k + 1 + below // 100] if below > 0 else trunk)
        kin = sum(r > 10 * row for r in rows)
        if row > cap and left(k + 1) < 0.01 * left(kin) and max_norm < 1e-3 * math.sqrt(left(kin)):
            found, bound = k + 1, cap
    return {order[k] for k in range(found)}, bound


SIZES = st.one_of(st.just(0.0), st.floats(-3, 20).map(lambda e: 10.0**e), st.sampled_from((0.05, 0.1, 1e3, 1e10)))


@given(norms=st.lists(SIZES, max_size=250), trunk=SIZES, max_norm=st.sampled_from((0.1, 1.0, 10.0)))
@settings(deadline=None, max_examples=200)
def test_as_the_slow_twin(norms: list[float], trunk: float, max_norm: float) -> None:
    spike = find_spike(torch.tensor(norms, dtype=torch.float64), torch.tensor(trunk, dtype=torch.float64), max_norm)
    wanted, cap = twin(norms, trunk, max_norm)
    found = {i for i, s in enumerate(spike.spiking_R.tolist()) if s}
    assert sorted(norms[i] for i in found) == sorted(norms[i] for i in wanted)
    assert int(spike.num_spiking) == len(wanted)
    assert float(spike.cap) == pytest.approx(cap)


@pytest.mark.parametrize(("norms", "trunk", "guilty"), [
    ([], 1e30, 0), ([0.0] * 9, 1e30, 0), ([1e25], 0.3, 1), ([1e25], 1e26, 0), ([1e25, 1e10, *[0.05] * 99], 0.3, 2),
    ([1e25] * 300, 0.3, 300), ([5e3, *[1e3] * 500], 1e4, 0), ([0.05] * 300, 0.3, 0), ([2e3, *[0.05] * 300], 0.3, 1),
    ([900.0, *[0.05] * 300], 0.3, 0), ([500.0] * 9 + [0.05] * 300, 0.3, 9),
    ([10.0**k for k in range(25, 3, -1)] + [0.05] * 99, 0.3, 22),
    ([1e25, 500.0, *[0.05] * 99], 0.3, 1),
])  # fmt: skip
def test_how_many_rows_are_guilty(norms: list[float], trunk: float, guilty: int) -> None:
    spike = find_spike(torch.tensor(norms, dtype=torch.float64), torch.tensor(trunk, dtype=torch.float64), 1.0)
    assert int(spike.num_spiking) == guilty
    assert float(spike.cap) >= 1
