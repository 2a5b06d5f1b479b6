"""GS415 of a run: real loops under a GradScaler, watched and replayed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import ghoststep
from ghoststep.finding import Outcome, Severity
from tests.watch.loops import Loop, TinyLM, next_token_loss, run, tokens

NUM_STEPS = 30
OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "slow SGD": lambda p: torch.optim.SGD(p, lr=1e-3),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-3),
    "fused": lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True),
}


def fp16(
    optimizer: str, *, unscales: bool = False, scale: float = 2.0**16, bound: float | None = 1.0, is_bound_scaled: bool = False,
    clip: Callable[..., Any] = torch.nn.utils.clip_grad_norm_, interval: int = 1000,
) -> Callable[[], Loop]:  # fmt: skip
    """A loop in fp16 that clips before it unscales, or as it is told."""

    def make() -> Loop:
        model = TinyLM()
        made = OPTIMIZERS[optimizer](model.parameters())
        scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=interval)

        def step(i: int) -> Tensor:
            ids = tokens(i)
            made.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                loss = next_token_loss(model(ids), ids)
            scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
            if unscales:
                scaler.unscale_(made)
            if bound is not None:
                clip(model.parameters(), bound * (scaler.get_scale() if is_bound_scaled else 1))
            scaler.step(made)
            scaler.update()
            return loss

        return Loop(models=[model], optimizers=[[made]], step=step, more=[scaler])

    return make


@pytest.mark.parametrize("optimizer", ["SGD", "AdamW", "fused"])
def test_found(optimizer: str, tmp_path: Path) -> None:
    (w,) = run(fp16(optimizer), NUM_STEPS, tmp_path, flush_steps=8).watches
    assert not w.faults.lines()
    (alarm,) = w.flusher.alarms
    assert (alarm.code, alarm.step, alarm.severity) == ("GS415", 1, Severity.ERROR)
    (finding,) = w.report().verdict("GS415").findings
    assert f"in {NUM_STEPS} steps in a row, from step 1 on" in finding.message
    assert "1 / 65536 = 1.53e-05" in finding.message
    (again,) = ghoststep.check(tmp_path / "run0").verdict("GS415").findings
    assert again.message == finding.message


def test_weights_that_stand_still_are_its_symptom() -> None:
    """One cause, one error: SGD's updates are less than float32 weights can hold."""
    (w,) = run(fp16("slow SGD"), 80, flush_steps=8).watches
    found = {v.code: v for v in w.report().verdicts if v.findings}
    assert list(found) == ["GS415"]
    assert [s.code for s in found["GS415"].findings[0].symptoms] == ["GS406"]


def test_found_after_the_first_steps_were_skipped(tmp_path: Path) -> None:
    (w,) = run(fp16("AdamW", scale=2.0**40), 60, tmp_path, flush_steps=8).watches
    (finding,) = w.report().verdict("GS415").findings
    assert (finding.where.step or 0) > 5
    (again,) = ghoststep.check(tmp_path / "run0").verdict("GS415").findings
    assert again.where == finding.where


@pytest.mark.parametrize("optimizer", ["SGD", "AdamW", "fused"])
@pytest.mark.parametrize(
    "more",
    [
        {"unscales": True},
        {"unscales": True, "bound": 0.01},
        {"unscales": True, "scale": 2.0, "interval": 5},
        {"scale": 1.0},
        {"bound": None},
        {"bound": 1e9},
        {"unscales": True, "clip": ghoststep.clip_grad_norm_},
        {"is_bound_scaled": True},
        {"is_bound_scaled": True, "bound": 0.1, "scale": 1024.0, "interval": 8},
    ],
    ids=lambda more: " ".join(f"{k}={getattr(v, '__name__', v)}" for k, v in more.items()),
)
def test_healthy(optimizer: str, more: dict[str, Any], tmp_path: Path) -> None:
    (w,) = run(fp16(optimizer, **more), NUM_STEPS, tmp_path, flush_steps=8).watches
    assert not w.faults.lines()
    for verdict in (w.report().verdict("GS415"), ghoststep.check(tmp_path / "run0").verdict("GS415")):
        assert verdict.outcome in (Outcome.CLEAR, Outcome.NOT_APPLICABLE), (verdict.reason, verdict.findings)
    assert not [a for a in w.flusher.alarms if a.severity is Severity.ERROR]
