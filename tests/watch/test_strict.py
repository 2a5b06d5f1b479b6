"""Lost steps are known before they are taken, by one read of the host, and only those are skipped."""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

from ghoststep.errors import UsageError
from ghoststep.lost_step import LEAST_HISTORY
from ghoststep.watching.strict import Decider, StrictStep, cannot_skip, decide

INF, NAN = math.inf, math.nan


def norms(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32)


@pytest.mark.parametrize(
    ("before", "after", "code"),
    [
        # index 0 is the table
        ((1.0, 2.0, 3.0), (0.2, 0.4, 0.6), None),
        ((INF, 2.0, 3.0), (0.0, 0.0, 0.0), "GS401"),
        ((1e19, 2.0, 3.0), (0.0, 0.0, 0.0), "GS401"),
        ((1.0, 2.0, 3.0), (0.0, 0.0, 0.0), "GS401"),
        ((0.0, 0.0, 0.0), (0.0, 0.0, 0.0), None),  # equal rewards
        ((-1.0, -1.0, -1.0), (-1.0, -1.0, -1.0), None),  # nothing has a gradient
        ((INF, 2.0, -1.0), (0.0, 0.0, -1.0), "GS401"),
        ((INF, 2.0, 3.0), (NAN, NAN, NAN), "GS403"),
        ((INF, 2.0, 3.0), (NAN, 0.0, 0.0), "GS405"),  # inf in the gradient itself, an ordinary clip
        ((NAN, 2.0, 3.0), (NAN, NAN, NAN), "GS405"),
        ((1.0, NAN, 3.0), (1.0, NAN, 3.0), "GS405"),  # no clip
        ((INF, 2.0, 3.0), (INF, 2.0, 3.0), None),  # an overflown norm without a clip: the gradient is finite
        ((1e8, 1.0, 1.0), (1.0, 1e-8, 1e-8), "GS402"),
        ((1e8, 1.0, 1.0), (1e8, 1.0, 1.0), None),  # not clipped: another matter
        ((1.0, 1e8, 1.0), (1e-8, 1.0, 1e-8), None),  # the trunk spikes: not a table row
        ((1e5, 5e4, 1.0), (0.9, 0.45, 1e-5), None),  # a summed loss: small coefficient, as in every step
        ((1e8, -1.0, -1.0), (1.0, -1.0, -1.0), None),  # one trainable tensor
        ((1e8, 0.0, 0.0), (1.0, 0.0, 0.0), None),  # nothing else to crush
        ((1.0, 2.0, 3.0), (-1.0, -1.0, -1.0), None),  # ghoststep's clip took the gradients away
    ],
)
def test_decide(before: tuple[float, ...], after: tuple[float, ...], code: str | None) -> None:
    assert decide(norms(*before), norms(*after), [0]) == code


def test_an_infinite_norm_without_a_clip_is_looked_into() -> None:
    asked: list[int] = []

    def look() -> bool:
        asked.append(1)
        return True

    assert decide(norms(INF, 2.0), norms(INF, 2.0), [0], look) == "GS405"
    assert decide(norms(1.0, 2.0), norms(1.0, 2.0), [0], look) is None
    assert asked == [1]
    assert decide(None, None, [0], look) is None


def test_a_crushed_step_is_judged_by_the_runs_own_history() -> None:
    """A healthy table that holds nearly all of the gradient, with a tight clip, in every step."""
    usual = norms(1e4, 30.0), norms(1.0, 3e-3)
    decider = Decider(tables=[0])
    for _ in range(LEAST_HISTORY):
        assert decider.decide(*usual) is None
    assert decider.decide(*usual) is None
    assert decider.decide(norms(1e8, 30.0), norms(1.0, 3e-7)) == "GS402"
    assert decider.decide(norms(1e4, 3.0), norms(1.0, 3e-4)) is None, "a tenth of the usual is not crushed"


def test_ratios_do_not_depend_on_scale() -> None:
    for factor in (1e-6, 1.0, 65536.0):
        assert decide(norms(1e8, 1.0) * factor, norms(1.0, 1e-8) * factor, [0]) == "GS402"


class Gate:
    """A model, an optimizer and a gate whose decision is set by hand."""

    def __init__(self, skips: frozenset[str] = frozenset({"GS401"}), make: Callable[[Any], Any] | None = None) -> None:
        torch.manual_seed(0)
        self.weight = torch.nn.Parameter(torch.ones(3))
        self.optimizer = make([self.weight]) if make else torch.optim.AdamW([self.weight], lr=0.1)
        self.code: str | None = None
        self.skipped: list[str] = []
        self.faults: list[Exception] = []
        self.gate = StrictStep(
            self.optimizer, lambda: self.code, skips=skips, on_skip=self.skipped.append, on_fault=self.faults.append
        )

    def step(self) -> torch.Tensor:
        self.optimizer.zero_grad()
        (self.weight**2).sum().backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        return self.weight.detach().clone()


def test_a_skipped_step_moves_nothing_and_the_next_one_does() -> None:
    made = Gate()
    first = made.step()
    made.code = "GS401"
    assert torch.equal(made.step(), first)
    state = made.optimizer.state[made.weight]["step"].item()
    assert state == 1
    made.code = "GS403"  # not among those to be skipped
    assert not torch.equal(made.step(), first)
    assert made.skipped == ["GS401"]
    assert made.gate.missed == 0


def test_identical_to_the_optimizer_alone() -> None:
    made = Gate()
    with_gate = [made.step() for _ in range(20)]
    made.gate.close()
    alone = Gate()
    alone.gate.close()
    assert all(torch.equal(a, alone.step()) for a in with_gate)


def test_closing_restores_the_instance() -> None:
    made = Gate()
    assert "step" in vars(made.optimizer)
    assert type(made.optimizer) is torch.optim.AdamW
    made.gate.close()
    made.gate.close()
    assert "step" not in vars(made.optimizer)
    assert made.optimizer.step.__func__ is torch.optim.AdamW.step  # type: ignore[attr-defined]
    assert not made.optimizer._optimizer_step_pre_hooks


@pytest.mark.parametrize("scheduler_first", [True, False])
def test_schedulers_go_on_working(scheduler_first: bool) -> None:
    def bare() -> list[float]:
        weight = torch.nn.Parameter(torch.ones(3))
        optimizer = torch.optim.SGD([weight], lr=1.0)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        return run(weight, optimizer, scheduler)

    def run(weight: torch.nn.Parameter, optimizer: Any, scheduler: Any) -> list[float]:
        seen = []
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # "Seems like optimizer.step() has been overridden" and the like
            for _ in range(4):
                optimizer.zero_grad()
                weight.sum().backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                scheduler.step()
                seen.append(float(weight.detach()[0]))
        return seen

    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    codes = iter(["GS401", None, None, None])
    skipped: list[str] = []

    def gate() -> StrictStep:
        return StrictStep(
            optimizer, lambda: next(codes), skips=frozenset({"GS401"}), on_skip=skipped.append, on_fault=lambda e: None
        )

    if scheduler_first:
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        before = optimizer.step
        made = gate()
    else:
        made = gate()
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    assert run(weight, optimizer, scheduler) == [1.0, 0.5, 0.25, 0.125]  # the first step is left out, the schedule goes on
    assert skipped == ["GS401"]
    made.close()
    if scheduler_first:
        assert optimizer.step == before
    assert bare() == [0.0, -0.5, -0.75, -0.875]
    optimizer.step()  # still a step, whoever wrapped it


def test_grad_scaler() -> None:
    made = Gate()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    seen = []
    for code in (None, "GS401", None):
        made.code = code
        made.optimizer.zero_grad()
        scaler.scale((made.weight**2).sum()).backward()  # type: ignore[no-untyped-call]
        scaler.unscale_(made.optimizer)
        scaler.step(made.optimizer)
        scaler.update()
        seen.append(made.weight.detach().clone())
    assert torch.equal(seen[0], seen[1])
    assert not torch.equal(seen[1], seen[2])
    assert inspect.signature(made.optimizer.step) == inspect.signature(torch.optim.AdamW.step.__get__(made.optimizer))
    assert made.gate.missed == 0


def test_a_fused_optimizer_under_a_scaler_skips_by_itself() -> None:
    """The scaler counts the skip then; were it ours, the record would blame the policy."""
    made = Gate(frozenset({"GS405", "GS401"}), make=lambda p: torch.optim.AdamW(p, lr=0.1, fused=True))
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    made.code = "GS405"
    scaler.scale((made.weight * torch.tensor([INF, 1.0, 1.0])).sum()).backward()  # type: ignore[no-untyped-call]
    scaler.step(made.optimizer)
    scaler.update()
    assert made.weight.tolist() == [1.0, 1.0, 1.0]
    assert made.skipped == []
    assert scaler.get_scale() == 2.0


def test_a_fault_of_ours_takes_the_step() -> None:
    made = Gate()
    made.gate._decide = lambda: 1 / 0  # type: ignore[assignment, return-value]
    before = made.weight.detach().clone()
    assert not torch.equal(made.step(), before)
    assert isinstance(made.faults[0], ZeroDivisionError)


def test_a_closure_is_refused_at_the_first_step_only() -> None:
    made = Gate()
    with pytest.raises(UsageError, match="runs backward inside the step"):
        made.optimizer.step(lambda: 0.0)
    assert "step" not in vars(made.optimizer)
    late = Gate()
    late.step()
    late.optimizer.step(lambda: 0.0)
    assert late.gate.missed == 1


def test_a_step_that_goes_past_the_gate_is_noticed() -> None:
    """Accelerate under a scaler puts the step that it remembered back on the optimizer."""
    made = Gate()
    made.optimizer.step = torch.optim.AdamW.step.__get__(made.optimizer)  # type: ignore[method-assign]
    made.step()
    assert made.gate.missed == 1
    theirs = made.optimizer.step
    made.gate.close()
    assert made.optimizer.step == theirs


def test_what_cannot_be_skipped_is_said_before_training() -> None:
    weight = [torch.nn.Parameter(torch.ones(1))]
    assert cannot_skip(torch.optim.AdamW(weight), is_strict=True) == ""
    assert "strict=True" in cannot_skip(torch.optim.AdamW(weight), is_strict=False)
    assert "LBFGS" in cannot_skip(torch.optim.LBFGS(weight), is_strict=True)
    assert "without step()" in cannot_skip(object(), is_strict=True)


def test_no_norm_is_read_by_itself() -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Counting(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            assert func is not torch.ops.aten._local_scalar_dense.default
            return func(*args, **(kwargs or {}))

    before, after = norms(1.0, 2.0), norms(0.5, 1.0)
    with Counting():  # type: ignore[no-untyped-call]
        assert decide(before, after, [0]) is None
        with pytest.raises(AssertionError):
            before[0].item()


def test_a_real_watch_skips_the_zeroed_step_and_no_other() -> None:
    """One loss is 1e30 times too large: the float32 norm overflows, the clip zeroes everything, and AdamW would move by momentum."""
    from ghoststep.evidence.steps import StepOutcome
    from ghoststep.watching.watch import watch

    def train(weights: list[float], *, is_watched: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 3)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

        def loop() -> None:
            for weight in weights:
                loss = model(torch.ones(2, 4)).square().mean() * weight
                loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()

        if not is_watched:
            loop()
            return [p.detach() for p in model.parameters()]
        with watch(model, optimizer, policy={"GS401": "skip-step"}, strict=True) as w:
            loop()
        outcomes = [s.outcome for s in w.flusher.kept]
        assert outcomes == [StepOutcome.SKIPPED_BY_POLICY if x > 1 else StepOutcome.STEPPED for x in weights]
        assert "step" not in vars(optimizer)
        return [p.detach() for p in model.parameters()]

    with_skip = train([1.0, 1.0, 1e30, 1.0], is_watched=True)
    assert all(torch.equal(a, b) for a, b in zip(with_skip, train([1.0, 1.0, 1.0], is_watched=False), strict=True))
    without = train([1.0, 1.0, 1e30, 1.0], is_watched=False)
    assert not all(torch.equal(a, b) for a, b in zip(with_skip, without, strict=True))
