"""Models of more than 512 tensors: a part is measured after clipping, and what it shows is carried over to the others."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import nn

import ghoststep
from ghoststep.finding import Outcome
from ghoststep.watching.building import MAX_AFTER


class Many(nn.Module):
    """604 tensors. `amplified` makes one place of the table's gradient as large as asked, as a near-zero row would."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(30, 8), nn.Linear(8, 30)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(300))
        self.amplified: tuple[int, float] | None = None

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids)
        if self.amplified is not None:
            token, factor = self.amplified
            here = (ids == token)[..., None]
            x = torch.where(here, x * factor - (x * (factor - 1)).detach(), x)  # the same value, a larger gradient
        for block in self.blocks:
            x = x + torch.tanh(block(x)) / 300
        logits: torch.Tensor = self.head(x)
        return logits


def train(tmp_path: Path, spikes: dict[int, float], bound: float = 0.1) -> tuple[ghoststep.Watch, list[tuple[float, float]]]:
    """20 steps; the norms before and after clipping as the loop itself computes them, in float64."""
    torch.manual_seed(0)
    model = Many()
    assert len(list(model.parameters())) > MAX_AFTER
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    norms = []

    def norm() -> float:
        return math.sqrt(sum(float(p.grad.double().square().sum()) for p in model.parameters() if p.grad is not None))

    with ghoststep.watch(model, optimizer, run_dir=tmp_path) as w:
        for step in range(1, 21):
            ids = torch.randint(0, 29, (2, 6))
            model.amplified = None
            if step in spikes:
                ids[1, 3] = 29
                model.amplified = (29, spikes[step])
            nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten()).backward()  # type: ignore[no-untyped-call]
            before = norm()
            nn.utils.clip_grad_norm_(model.parameters(), bound)
            norms.append((before, norm()))
            optimizer.step()
            optimizer.zero_grad()
    assert not w.faults, w.faults.lines()
    return w, norms


@pytest.mark.parametrize("bound", [0.1, 1e9])
def test_norms_are_those_of_all_tensors(tmp_path: Path, bound: float) -> None:
    w, norms = train(tmp_path, {}, bound)
    steps = w.flusher.window
    assert [s.norm for s in steps] == pytest.approx([before for before, _ in norms], rel=1e-4)
    assert [s.norm_after for s in steps] == pytest.approx([after for _, after in norms], rel=1e-3)
    assert {s.num_gradients for s in steps} == {603}
    assert not [v for v in w.report().verdicts if v.outcome is Outcome.FOUND]


@pytest.mark.parametrize(("factor", "name"), [(1e24, "zeroed-step"), (1e9, "crushed-step")])
def test_a_lost_step_is_found(tmp_path: Path, factor: float, name: str) -> None:
    w, _ = train(tmp_path, {15: factor})
    (verdict,) = [v for v in w.report().verdicts if v.outcome is Outcome.FOUND]
    where = verdict.findings[0].where
    assert (verdict.name, where.step, where.token_id, where.example, where.position) == (name, 15, 29, 1, 3)
    step = w.flusher.window[14]
    assert step.num_zero_after == (step.num_gradients if name == "zeroed-step" else 0)
