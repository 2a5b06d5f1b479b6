"""GS406 of a run: updates that 16-bit weights lose in part, and gradients that never arrive; with healthy twins on real loops."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ghoststep
from ghoststep.evidence.steps import STUCK_STEPS
from ghoststep.finding import Finding, Outcome, Severity, Verdict
from ghoststep.watching.stuck import LEAST_ELEMENTS, StuckElements
from tests.watch.healthy_loops import PureBfloat16, clipped, warm_up
from tests.watch.loops import Loop, TinyLM, Watch, language_model, next_token_loss, run, steps_of, tokens, watch
from tests.watch.other_loops import hugging_face, lora, mixture


def verdict(w: Watch) -> Verdict:
    return next(v for v in w.report().verdicts if v.code == "GS406")


def alarms(w: Watch) -> list[Any]:
    return [a for a in w.flusher.alarms if a.code == "GS406"]


def shares(w: Watch) -> list[float]:
    return [s.stuck for s in steps_of(w) if s.stuck is not None]


def bfloat16(make: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]) -> Callable[[], Loop]:
    def loop() -> Loop:
        model = PureBfloat16()
        return clipped(model, make(model.parameters()))

    return loop


def scheduled(schedule: Callable[[int], float], lr: float) -> Callable[[], Loop]:
    def make() -> Loop:
        loop = bfloat16(lambda p: torch.optim.AdamW(p, lr=lr))()
        planned = torch.optim.lr_scheduler.LambdaLR(loop.optimizers[0][0], schedule)

        def step(i: int) -> Tensor:
            loss = loop.step(i)
            planned.step()
            return loss

        return Loop(models=loop.models, optimizers=loop.optimizers, step=step)

    return make


class RoundsAtRandom(torch.optim.SGD):
    """SGD for bf16 weights: the 16 bits that are cut off decide, against a random number, whether the last one kept goes up."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    wanted = (p.float() - group["lr"] * p.grad.float()).view(torch.int32)
                    noise = torch.randint_like(wanted, 1 << 16)
                    p.copy_(((wanted + noise) & -(1 << 16)).view(torch.float32))


def low_rank() -> Loop:
    """LoRA: the base is bf16 and frozen, the adapters are float32."""
    loop = lora()
    for p in loop.models[0].parameters():
        if not p.requires_grad:
            p.data = p.data.to(torch.bfloat16)
    (model,) = loop.models
    made = loop.optimizers[0][0]

    def step(i: int) -> Tensor:
        made.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss: Tensor = model(input_ids=tokens(i, first=3), labels=tokens(i, first=3)).loss
        loss.backward()  # type: ignore[no-untyped-call]
        made.step()
        return loss

    return Loop(models=[model], optimizers=[[made]], step=step)


def experts() -> Loop:
    """A mixture in bf16, whose experts get nothing in some steps."""
    loop = mixture()
    return hugging_face(loop.models[0].to(torch.bfloat16), lr=1e-2, generates=False)


def memorised() -> Loop:
    """One batch, fitted by a bf16 model until nothing is left to learn."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4)).to(torch.bfloat16)
    x = torch.randn(4, 16, dtype=torch.bfloat16)
    y = torch.randn(4, 4, dtype=torch.bfloat16)
    made = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(i: int) -> Tensor:
        made.zero_grad()
        loss: Tensor = (model(x) - y).float().square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        made.step()
        return loss

    return Loop(models=[model], optimizers=[[made]], step=step)


LOST: dict[str, tuple[Callable[[], Loop], Severity]] = {
    "SGD at 1e-6": (bfloat16(lambda p: torch.optim.SGD(p, lr=1e-6)), Severity.ERROR),
    "AdamW at 1e-5": (bfloat16(lambda p: torch.optim.AdamW(p, lr=1e-5)), Severity.ERROR),
    "AdamW at 1e-4": (bfloat16(lambda p: torch.optim.AdamW(p, lr=1e-4)), Severity.WARNING),
}
MOVING: dict[str, Callable[[], Loop]] = {
    "AdamW at 1e-2": bfloat16(lambda p: torch.optim.AdamW(p, lr=1e-2)),
    "AdamW at 1e-3": bfloat16(lambda p: torch.optim.AdamW(p, lr=1e-3)),
    "SGD at 0.1": bfloat16(lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)),
    "random rounding": bfloat16(lambda p: RoundsAtRandom(p, lr=1e-6)),
    "a long warm-up": scheduled(lambda i: min(1.0, (i + 1) / 400), 2e-2),
    "the end of a decay": scheduled(lambda i: 1.0 if i < 60 else 0.01, 1e-2),
    "warm-up from 0": scheduled(warm_up, 1e-2),
    "experts": experts,
    "LoRA": low_rank,
    "fp16": language_model(autocast=torch.float16, init_scale=2.0**16),
    "float32": language_model(lr=1e-6),
    "memorised": memorised,
}


@pytest.mark.parametrize("name", LOST)
def test_lost_in_part(name: str, tmp_path: Path) -> None:
    make, severity = LOST[name]
    (w,) = run(make, 140, tmp_path, flush_steps=16).watches
    assert not w.faults.lines()
    assert len(shares(w)) == 2
    first = alarms(w)[0]
    assert (first.step, first.severity) == (1, severity)
    assert "in every step from 1 to 64" in first.finding.message
    (finding,) = verdict(w).findings
    assert finding.severity is severity
    (again,) = next(v for v in ghoststep.check(tmp_path / "run0", select=["GS406"]).verdicts if v.code == "GS406").findings
    assert again.message == finding.message


@pytest.mark.parametrize("name", MOVING)
def test_not_lost(name: str) -> None:
    (w,) = run(MOVING[name], 400 if name == "memorised" else 140, flush_steps=16).watches
    assert not w.faults.lines()
    assert alarms(w) == []
    said = verdict(w)
    assert said.outcome is Outcome.CLEAR, said
    assert bool(w.builder.sample.stuck) == (name not in ("LoRA", "fp16", "float32"))


def test_an_optimizer_that_may_carry_on_what_was_lost_is_named() -> None:
    (w,) = run(MOVING["random rounding"], 140, flush_steps=16).watches
    assert shares(w) == []
    assert "RoundsAtRandom is no optimizer of torch" in (verdict(w).reason or "")
    assert "lost in part" not in (verdict(run(MOVING["AdamW at 1e-2"], 70, flush_steps=16).watches[0]).reason or "")


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
def test_the_share_equals_what_a_slow_loop_counts(kind: torch.dtype) -> None:
    """Elements of two tensors of unlike size, some pushed in every step, some in all but one, some moved once."""
    random = torch.Generator().manual_seed(0)
    parameters = [nn.Parameter(torch.ones(n, dtype=kind)) for n in (300, 90)]
    sizes = [64, 64]
    made = torch.optim.SGD(parameters, lr=1.0)
    stuck = StuckElements.of(parameters, sizes)
    assert stuck is not None
    weight = torch.tensor([300 / 64] * 64 + [90 / 64] * 64)
    gaps, moves = (torch.randint(-3 * STUCK_STEPS, STUCK_STEPS, (128,), generator=random) for _ in range(2))
    sample = torch.cat([p.detach()[:64].float() for p in parameters])
    found = None
    for i in range(STUCK_STEPS):
        for p, gap in zip(parameters, (gaps[:64], gaps[64:]), strict=True):
            p.grad = torch.ones_like(p)
            p.grad[:64][gap == i] = (0.0, torch.inf, torch.nan)[i % 3]
        last, sample = sample, torch.where(moves == i, sample + 1, sample)
        stuck.saw(last, sample)
        stuck.stepped(made, {id(p) for p in parameters})
        found = stuck.end_step(is_taken=True)
        assert (found is None) == (i < STUCK_STEPS - 1)
    pushed, stayed = gaps < 0, moves < 0
    assert found is not None
    assert float(found) == pytest.approx(float(weight[pushed & stayed].sum() / weight[pushed].sum()))
    assert LEAST_ELEMENTS <= int(pushed.sum()) < 128


def test_float32_pays_nothing() -> None:
    assert StuckElements.of([nn.Parameter(torch.ones(3))], [3]) is None


# Gradients that never arrive.


def without_gradient(mistake: str, num_steps: int = 30, *, arrives_at: int = 10**9) -> Watch:
    torch.manual_seed(0)
    model, other = TinyLM(), TinyLM()
    trained = [*model.parameters(), *other.parameters()] if mistake == "joint" else list(model.parameters())
    made = torch.optim.AdamW(trained, lr=1e-3)
    with watch(model, made, flush_steps=8) as w:
        for i in range(num_steps):
            ids = tokens(i)
            if i >= arrives_at or mistake == "":
                loss = next_token_loss(model(ids), ids)
            elif mistake == "detached":
                loss = next_token_loss(model(ids).detach().requires_grad_(), ids)
            else:
                loss = next_token_loss((copy.deepcopy(model) if mistake == "copy" else other)(ids), ids)
            made.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            made.step()
    assert not w.faults.lines()
    return w


def the_one(w: Watch) -> Finding:
    (finding,) = verdict(w).findings
    return finding


@pytest.mark.parametrize("mistake", ["detached", "copy", "another"])
def test_gradients_that_never_arrive(mistake: str) -> None:
    w = without_gradient(mistake)
    (alarm,) = alarms(w)
    assert (alarm.step, alarm.severity) == (1, Severity.ERROR)
    finding = the_one(w)
    assert finding.severity is Severity.ERROR
    assert "took 30 steps in a row, from step 1 on, and not one of the" in finding.message


def test_a_joint_optimizer_is_only_warned_of() -> None:
    w = without_gradient("joint")
    assert the_one(w).severity is Severity.WARNING
    assert [a.severity for a in alarms(w)] == [Severity.WARNING]
    assert "if another model trains first" in the_one(w).message


def test_twenty_steps_and_nineteen() -> None:
    assert verdict(without_gradient("detached", 40, arrives_at=19)).outcome is Outcome.CLEAR
    assert "took 20 steps in a row" in the_one(without_gradient("detached", 40, arrives_at=20)).message
    assert verdict(without_gradient("detached", 19)).outcome is Outcome.UNKNOWN
    assert verdict(without_gradient("")).outcome is Outcome.CLEAR


def test_what_trains_without_a_gradient_that_we_see_is_not_accused() -> None:
    """Gradients kept elsewhere (`main_grad`), taken by an optimizer of its own; and steps inside the backward."""
    from tests.watch.clearing_loops import in_backward

    torch.manual_seed(0)
    model = TinyLM()

    class Elsewhere(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for p in self.param_groups[0]["params"]:
                p.sub_(1e-3 * p.main_grad)

    def move(p: Any) -> None:
        p.main_grad, p.grad = p.grad, None

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(move)  # type: ignore[no-untyped-call]
    made = Elsewhere(model.parameters(), lr=1e-3)
    with watch(model, made, flush_steps=8) as w:
        for i in range(40):
            next_token_loss(model(tokens(i)), tokens(i)).backward()  # type: ignore[no-untyped-call]
            made.step()
    assert not verdict(w).findings
    (inside,) = run(in_backward(True), 40, flush_steps=8).watches
    assert not verdict(inside).findings


@pytest.mark.parametrize(("bound", "rate"), [(1e-9, 1e-1), (1.0, 1e-9)])
def test_steps_that_float32_cannot_hold(bound: float, rate: float) -> None:
    """A clip, or a learning rate, that leaves next to nothing: a loop that does the same at ordinary sizes is clear."""

    def trained(bound: float, rate: float) -> Watch:
        torch.manual_seed(0)
        model = TinyLM()
        optimizer = torch.optim.SGD(model.parameters(), lr=rate)
        with watch(model, optimizer, flush_steps=8) as w:
            for i in range(70):
                optimizer.zero_grad()
                next_token_loss(model(tokens(i)), tokens(i)).backward()  # type: ignore[no-untyped-call]
                torch.nn.utils.clip_grad_norm_(model.parameters(), bound)
                optimizer.step()
        return w

    finding = the_one(trained(bound, rate))
    assert finding.severity is Severity.WARNING
    assert ("clipping to a norm of 1e-09" if bound < 1 else "a learning rate of 1e-09 is too small") in finding.message
    assert verdict(trained(1.0, 1e-1)).outcome is Outcome.CLEAR
    assert verdict(trained(1.0, 1e-4)).outcome is Outcome.CLEAR
