"""A watched run leaves the same bits as one that nobody watches: losses, weights, buffers, gradients, states, random numbers."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ghoststep.remedies import clip_events
from tests.watch.loops import Loop, language_model, run, same, steps_of, watch
from tests.watch.more_loops import LOOPS

PLAIN: dict[str, tuple[Callable[[], Loop], int]] = {
    "plain": (language_model(), 200),
    "our clip": (language_model(clip="ours"), 60),
    "no clip": (language_model(clip=""), 60),
    "bf16": (language_model(autocast=torch.bfloat16), 60),
    "fp16": (language_model(autocast=torch.float16, init_scale=2.0**16), 60),
    "fp16, skips": (language_model(autocast=torch.float16, init_scale=2.0**40), 60),
    "fused, fp16": (
        language_model(
            autocast=torch.float16, init_scale=2.0**20, clip="", optimizer=lambda p: torch.optim.AdamW(p, fused=True)
        ),
        60,
    ),
    "accumulation": (language_model(accumulate=4), 60),
    "checkpointing": (language_model(reentrant=False, dropout=0.1), 60),
    "reentrant checkpointing": (language_model(reentrant=True, dropout=0.1), 60),
    "tied": (language_model(tied=True, dropout=0.1), 60),
}
CASES = {**PLAIN, **LOOPS}
LEAST_STEPS = int(os.environ.get("GHOSTSTEP_IDENTITY_STEPS", "0"))
"""scripts/nightly asks for 200 of every loop; fewer show the same in a tenth of the time."""
FULL = ("plain", "our clip", "fp16, skips", "accumulation", "two optimizers", "sparse", "lora", "two models")


@pytest.mark.parametrize("name", CASES)
def test_identical(name: str, tmp_path: Path) -> None:
    make, num_steps = CASES[name]
    num_steps = max(num_steps, LEAST_STEPS)
    bare = run(make, num_steps)
    for detail in ("default", "full") if name in FULL else ("default",):
        watched = run(make, num_steps, tmp_path / detail, detail=detail, flush_steps=7)
        same(bare.state, watched.state)
        for w in watched.watches:
            assert not w.faults.lines()
            assert not w.flusher.broken()
            assert [s.number for s in steps_of(w)] == list(range(1, len(steps_of(w)) + 1))
            assert all(bool(s.norms) == (detail == "full") for s in steps_of(w))
        assert any(len(steps_of(w)) >= num_steps // 2 for w in watched.watches)


def test_the_comparison_sees_one_bit() -> None:
    a = run(language_model(), 3)
    b = run(language_model(), 3)
    same(a.state, b.state)
    with torch.no_grad():
        b.loop.models[0].norm.bias[0].add_(1e-8)  # type: ignore[union-attr,index]
    b.state["models"][0]["norm.bias"] = b.loop.models[0].norm.bias.detach()  # type: ignore[union-attr,operator]
    with pytest.raises(AssertionError, match=r"norm\.bias"):
        same(a.state, b.state)


def _functions() -> list[Any]:
    return [
        torch.autograd.backward,
        torch.Tensor.backward,
        torch.amp.GradScaler.step,
        torch.nn.utils.clip_grad_norm_,
        torch.nn.utils.clip_grad._clip_grads_with_norm_,
        torch.nn.utils.clip_grad._get_total_norm,
        torch.nn.utils.get_total_norm,
        torch._foreach_norm,
        torch.optim.Optimizer.step,
        torch.optim.AdamW.step,
        nn.Module.__call__,
    ]


def _hooks(model: nn.Module) -> list[int]:
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_forward_pre_hooks_with_kwargs", "_backward_hooks", "_backward_pre_hooks")
    parameters = [len(p._backward_hooks or ()) for p in model.parameters()]
    return [len(getattr(m, kind)) for m in model.modules() for kind in kinds] + parameters


@pytest.mark.parametrize("name", ["plain", "fp16, skips", "two optimizers"])
@pytest.mark.parametrize("wishes", [{}, {"policy": {"GS401": "skip-step"}, "strict": True}], ids=["default", "strict"])
def test_nothing_is_left_behind(name: str, wishes: dict[str, Any]) -> None:
    from torch.optim.optimizer import _global_optimizer_post_hooks

    torch.optim.AdamW([torch.zeros(1)])  # the first one of a process wraps its class's `step`, watched or not
    functions, listeners = _functions(), list(clip_events._listeners)
    num_global = len(_global_optimizer_post_hooks)
    ran = run(CASES[name][0], 5, flush_steps=2, **wishes)
    assert all(a is b for a, b in zip(functions, _functions(), strict=True))
    assert list(clip_events._listeners) == listeners
    assert len(_global_optimizer_post_hooks) == num_global
    assert not any(_hooks(ran.loop.models[0]))
    for optimizer in ran.loop.optimizers[0]:
        assert "step" not in vars(optimizer) or "_wrapped_by_lr_sched" in vars(vars(optimizer)["step"])
        assert not optimizer._optimizer_step_pre_hooks
        assert not optimizer._optimizer_step_post_hooks


def test_a_refused_start_leaves_nothing_behind(tmp_path: Path) -> None:
    functions = _functions()
    loop = language_model()()
    for wishes in ({"policy": "skip-step"}, {"sinks": ["no-such-sink:x"]}, {"detail": "much"}, {"flush_steps": 0}):
        with pytest.raises(ghoststep_error()):
            watch(loop.models[0], loop.optimizers[0], run_dir=tmp_path / "run", **wishes).start()
        assert not any(_hooks(loop.models[0]))
        assert all(a is b for a, b in zip(functions, _functions(), strict=True))
    with watch(loop.models[0], loop.optimizers[0], run_dir=tmp_path / "run"):  # no lock is held
        loop.step(0)


def ghoststep_error() -> type[Exception]:
    from ghoststep.errors import UsageError

    return UsageError


def test_a_second_close_does_nothing(tmp_path: Path) -> None:
    loop = language_model()()
    w = watch(loop.models[0], loop.optimizers[0], run_dir=tmp_path)
    with w:
        loop.step(0)
    w.close()
    w.close()
    assert len(steps_of(w)) == 1
    assert w.report().verdicts


def test_somebody_else_wraps_backward_and_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their wrapper around ours outlives our watch: afterwards ours is dead, also while another watch runs."""
    before = torch.autograd.backward
    loop = language_model()()
    try:
        with watch(loop.models[0], loop.optimizers[0]):
            ours = torch.autograd.backward

            def theirs(*args: Any, **kwargs: Any) -> None:
                ours(*args, **kwargs)

            torch.autograd.backward = theirs
            loop.step(0)
        assert torch.autograd.backward is theirs
        with watch(loop.models[0], loop.optimizers[0]) as second:
            told: list[Any] = []
            original = second.before_backward

            def telling(tensors: Any) -> None:
                told.append(tensors)
                original(tensors)

            monkeypatch.setattr(second, "before_backward", telling)
            for i in range(3):
                loop.step(i)
            assert len(told) == 3
            second.flush()
            assert [s.num_micro_batches for s in steps_of(second)] == [1, 1, 1]
        assert torch.autograd.backward is theirs
    finally:
        torch.autograd.backward = before
