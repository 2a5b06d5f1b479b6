"""Observing changes nothing, also when it is cut short: the user's code raises, Ctrl-C, `--timeout`; and what stays the user's."""

from __future__ import annotations

import queue
import signal
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import ghoststep
from ghoststep.finding import Outcome
from ghoststep.undisturbed import is_undisturbed, undisturbed
from tests.live.unchanged_models import FAMILIES, Stateful, batches, loss_of
from tests.live.unchanged_plans import Plan, make
from tests.live.unchanged_world import changes, world

PLAN = Plan(family="counting", optimizer="momentum", schedule="warm-up", steps_before=0)


class Stopping:
    """A loss (or a step) that raises at its n-th call, in the middle: after the forward, before the result."""

    def __init__(self, inner: Any, at: int, error: type[BaseException]) -> None:
        self.inner, self.at, self.error = inner, at, error
        self.ticks: queue.Queue[int] = queue.Queue()  # a number would be put back

    @property
    def calls(self) -> int:
        return self.ticks.qsize()

    def __call__(self, *given: Any) -> Any:
        self.ticks.put(1)
        result = self.inner(*given)
        if self.calls == self.at:
            torch.manual_seed(99)
            torch.set_grad_enabled(False)
            raise self.error("in the middle")
        return result


def checked(made: dict[str, Any], **more: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ghoststep.check(**{k: v for k, v in made.items() if v is not None}, **more)


@pytest.mark.parametrize("what", ["loss_fn", "train_step"])
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_code_that_raises_half_way(what: str, error: type[BaseException]) -> None:
    plan = Plan(family="batch norm", optimizer="momentum", schedule="warm-up", own_step=what == "train_step")
    made = make(plan)
    made[what] = counted = Stopping(made[what], 0, error)
    checked(made)
    assert counted.calls >= 2
    for at in range(1, min(counted.calls, 10) + 1):
        made = make(plan)
        made[what] = Stopping(made[what], at, error)
        before = world(made)
        if error is KeyboardInterrupt:
            with pytest.raises(KeyboardInterrupt):
                checked(made)
        else:
            report = checked(made)
            assert not [v.reason for v in report.verdicts if v.outcome is Outcome.BROKEN], at
        assert not changes(before, world(made)), at
        assert torch.is_grad_enabled()


@pytest.mark.parametrize("share", [0.02, 0.1, 0.2, 0.3, 0.45, 0.6, 0.8])
def test_a_timeout_anywhere(share: float) -> None:
    import time

    made = make(PLAN)
    checked(make(PLAN))
    start = time.perf_counter()
    checked(make(PLAN))
    whole = time.perf_counter() - start
    before = world(made)
    report = checked(made, timeout_seconds=max(1e-4, share * whole))
    assert not changes(before, world(made))
    assert not [v.reason for v in report.verdicts if v.outcome is Outcome.BROKEN]


@pytest.mark.parametrize("after", [0.005, 0.02, 0.04, 0.07, 0.1, 0.15])
def test_ctrl_c_anywhere(after: float) -> None:
    made = make(PLAN)
    checked(make(PLAN))

    def stop(*_: Any) -> None:
        signal.raise_signal(signal.SIGINT)

    former = signal.signal(signal.SIGALRM, stop)
    before = world(made)
    try:
        signal.setitimer(signal.ITIMER_REAL, after)
        try:
            checked(made)
        except KeyboardInterrupt:
            pass
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        assert not changes(before, world(made))
    finally:
        signal.signal(signal.SIGALRM, former)


def test_ctrl_c_waits_until_everything_is_put_back() -> None:
    done = []

    def put_back() -> None:
        with undisturbed():
            assert is_undisturbed()
            with undisturbed():
                signal.raise_signal(signal.SIGINT)
            done.append(True)

    with pytest.raises(KeyboardInterrupt):
        put_back()
    assert done
    assert not is_undisturbed()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_hooks_of_the_users_own_stay_and_fire_as_in_any_forward() -> None:
    """Their own count is theirs: it goes on, as it would with any other forward. Hooks, order and identity stay."""
    made = make(Plan(family="dict output"))
    calls: list[str] = []
    made["model"].register_forward_pre_hook(lambda *_: calls.append("pre"))
    made["model"].mix.register_forward_hook(lambda *_: calls.append("mix"))
    made["model"].mix.weight.register_hook(lambda g: calls.append("gradient"))
    made["model"].head.weight.register_post_accumulate_grad_hook(lambda p: calls.append("accumulated"))
    made["optimizer"].register_step_post_hook(lambda *_: calls.append("step"))
    before = world(made)
    checked(made)
    assert not changes(before, world(made))
    assert set(calls) == {"pre", "mix", "gradient", "accumulated", "step"}


def test_a_lazy_model_is_not_made_by_looking() -> None:
    model = Stateful(nn.Identity())
    model.head = nn.LazyLinear(40)
    report = checked({"model": model, "batches": batches(), "loss_fn": loss_of})
    assert isinstance(model.head.weight, nn.UninitializedParameter)
    reasons = {v.reason for v in report.verdicts if v.outcome is Outcome.UNKNOWN and v.reason}
    assert any("lazy" in r for r in reasons)
    assert not [v.reason for v in report.verdicts if v.outcome is Outcome.BROKEN]


def test_a_warm_compiled_model() -> None:
    torch._dynamo.reset()
    model, given, loss = FAMILIES["batch norm"]()
    compiled: Any = torch.compile(model, backend="eager")
    loss(compiled, given[0]).backward()
    made = {"model": compiled, "batches": given, "loss_fn": loss, "optimizer": torch.optim.AdamW(model.parameters(), 0.01)}
    before = world(made)
    checked(made)
    assert not changes(before, world(made))


def test_an_outside_tensor_of_the_optimizer() -> None:
    """A soft prompt beside the model, with a gradient left over."""
    made = make(Plan(family="dict output"))
    prompt = torch.zeros(16, requires_grad=True)
    prompt.grad = torch.ones(16)
    inner, kept = made["loss_fn"], prompt.grad
    made["optimizer"].add_param_group({"params": [prompt]})
    made["loss_fn"] = lambda model, batch: inner(model, batch) + (prompt * model.mix.bias).sum()
    before = world(made)
    checked(made)
    assert not changes(before, world(made))
    assert prompt.grad is kept
    assert bool((prompt.grad == 1).all())


def test_inference_mode_is_survived() -> None:
    made = make(Plan(family="batch norm"))
    before = world(made)
    with torch.inference_mode():
        report = checked(made)
    assert not changes(before, world(made))
    assert not [f"{v.code} {v.reason}" for v in report.verdicts if v.outcome is Outcome.BROKEN]
