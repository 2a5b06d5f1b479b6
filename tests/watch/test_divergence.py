"""A loss that rises in real loops, live and in the record: thrown out of place at the beginning, one step far above, healthy rises."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import ghoststep
from ghoststep.finding import Finding, Outcome, Severity, Verdict
from tests.watch.healthy_loops import rewards
from tests.watch.loops import TinyLM, Watch, next_token_loss, run, steps_of, tokens, watch
from tests.watch.rising_loops import DIVERGING, RISING, cleared, spoilt_batch, unlabelled

NUM_STEPS = 100


def verdict(w: Watch, code: str) -> Verdict:
    return w.report().verdict(code)


def live(w: Watch, code: str) -> list[Finding]:
    return [a.finding for a in w.flusher.alarms if a.code == code]


def replayed(folder: Path, code: str) -> Verdict:
    return ghoststep.check(folder / "run0", select=[code]).verdict(code)


@pytest.mark.parametrize("name", DIVERGING)
def test_a_loss_that_diverges_at_the_beginning(name: str, tmp_path: Path) -> None:
    (w,) = run(DIVERGING[name], NUM_STEPS, tmp_path, flush_steps=8).watches
    (told,) = live(w, "GS408")
    assert told.severity is Severity.WARNING
    assert told.where.step is not None
    assert told.where.step <= 40
    assert "the loss diverged at the beginning" in told.message
    assert [f.message for f in replayed(tmp_path, "GS408").findings] == [told.message]
    assert [f.message for f in verdict(w, "GS408").findings] == [told.message]
    before, after = (steps_of(w)[told.where.step - k] for k in (2, 1))
    assert (before.loss or 0) < (after.loss or 0)


@pytest.mark.parametrize("name", RISING)
def test_a_loss_that_rises_in_a_healthy_run(name: str, tmp_path: Path) -> None:
    (w,) = run(RISING[name], NUM_STEPS, tmp_path, flush_steps=8).watches
    assert live(w, "GS408") == []
    assert verdict(w, "GS408").outcome is Outcome.CLEAR
    assert replayed(tmp_path, "GS408").outcome is Outcome.CLEAR


def test_a_short_healthy_run_is_clear_and_a_shorter_one_is_not() -> None:
    (w,) = run(RISING["SGD 1"], 20, flush_steps=8).watches
    assert verdict(w, "GS408").outcome is Outcome.CLEAR
    (w,) = run(RISING["SGD 1"], 19, flush_steps=8).watches
    assert verdict(w, "GS408").outcome is Outcome.UNKNOWN


def test_one_spoilt_batch_is_a_note_and_its_batch_is_kept(tmp_path: Path) -> None:
    (w,) = run(spoilt_batch(90), NUM_STEPS, tmp_path, flush_steps=8, policy={"GS4": "stop"}).watches
    (note,) = live(w, "GS408")
    assert (note.severity, note.where.step) == (Severity.NOTE, 91)
    assert [f.message for f in replayed(tmp_path, "GS408").findings] == [note.message]
    assert not w.should_stop
    assert list(tmp_path.glob("run0/rank-00000/batches/step-000091.safetensors"))
    (w,) = run(spoilt_batch(-1), NUM_STEPS, flush_steps=8).watches
    assert verdict(w, "GS408").outcome is Outcome.CLEAR


@pytest.mark.parametrize("guard", ["nan_to_num", "at least 1"])
@pytest.mark.parametrize("clip", [1.0, 0.0])
def test_batches_without_a_label_are_one_note(guard: str, clip: float, tmp_path: Path) -> None:
    make = unlabelled(guard, is_bad=lambda i: i % 12 == 5, clip=clip)
    (w,) = run(make, 60, tmp_path, flush_steps=8, policy={"GS4": "stop"}).watches
    assert len(live(w, "GS420")) == 1
    for said in (verdict(w, "GS420"), replayed(tmp_path, "GS420")):
        (note,) = said.findings
        assert (said.outcome, note.severity, note.where.step) == (Outcome.FOUND, Severity.NOTE, 6)
        assert "5 steps of 60 (steps 6, 18, 30, 42, 54)" in note.message
        assert "no label was left" in note.message
        assert "240 tokens" in note.message
    assert [v.code for v in w.report().verdicts if v.findings] == ["GS420"], "one cause, one line"
    assert not w.should_stop
    assert list(tmp_path.glob("run0/rank-00000/batches/step-000006.safetensors"))


def test_equal_rewards_are_the_same_note() -> None:
    (w,) = run(rewards, 60, flush_steps=8).watches
    (note,) = verdict(w, "GS420").findings
    assert note.severity is Severity.NOTE
    assert "40 steps of 60" in note.message
    assert "all rewards of a group were equal" in note.message
    assert len(live(w, "GS420")) == 1


@pytest.mark.parametrize("guard", ["one label", "none"])
def test_batches_of_which_something_is_learned(guard: str) -> None:
    make = unlabelled(guard, is_bad=lambda i: i % 12 == 5 and guard != "none")
    (w,) = run(make, 60, flush_steps=8).watches
    assert verdict(w, "GS420").outcome is Outcome.CLEAR


def test_a_loss_that_is_detached_now_and_then() -> None:
    model = TinyLM()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with watch(model, optimizer, flush_steps=8) as w:
        for i in range(40):
            optimizer.zero_grad()
            loss = next_token_loss(model(tokens(i)), tokens(i))
            (loss.detach().requires_grad_() if i % 4 == 3 else loss).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    (note,) = verdict(w, "GS420").findings
    assert "not one parameter had a gradient in 10 steps of 40 (steps 4, 8, 12, 16, 20, 24, 28, 32, ...)" in note.message
    assert verdict(w, "GS406").outcome is Outcome.CLEAR


def test_gradients_cleared_after_backward() -> None:
    (w,) = run(cleared("before clipping"), 30, flush_steps=8).watches
    (note,) = verdict(w, "GS420").findings
    assert "zero_grad between backward and clipping" in note.message
    assert verdict(w, "GS401").outcome is Outcome.CLEAR
    (w,) = run(cleared("after clipping"), 30, flush_steps=8).watches
    assert verdict(w, "GS420").outcome is Outcome.CLEAR
    assert verdict(w, "GS401").outcome is Outcome.FOUND


def test_a_catapult_rises_and_comes_back() -> None:
    catapulted = [s.loss or 0.0 for s in steps_of(run(RISING["catapult, a hundredfold"], 60, flush_steps=8).watches[0])]
    assert max(catapulted) > 100 * catapulted[0] > 100 * catapulted[-1]


def backwards(kind: str, count: int = 40) -> Watch:
    """Loops in which some gradients are cleared before a step, on purpose or not."""
    torch.manual_seed(0)
    model, other = TinyLM(), TinyLM()
    optimizer, others = (torch.optim.AdamW(m.parameters(), lr=1e-3) for m in (model, other))

    def backward(i: int) -> None:
        next_token_loss(model(tokens(i)), tokens(i)).backward()  # type: ignore[no-untyped-call]

    with watch(model, optimizer, flush_steps=8) as w:
        for i in range(count):
            optimizer.zero_grad()
            if kind == "left out" and i % 4 == 1:
                backward(i)
                continue
            for _ in range({"inside": 4, "sharpness": 1, "accumulated": 0}.get(kind, 0)):
                backward(i)
                optimizer.zero_grad()
            backward(i)
            if kind == "accumulated":
                backward(i + 1)
            optimizer.step()
            if kind == "adversary" and i % 5 == 4:  # through our model into another one's weights, as a generator's turn does
                backward(i)
                next_token_loss(other(tokens(i)), tokens(i)).backward()  # type: ignore[no-untyped-call]
                others.step()
                others.zero_grad()
    return w


def test_backwards_whose_gradients_are_thrown_away() -> None:
    (note,) = verdict(backwards("left out"), "GS420").findings
    assert "the gradients of 10 backwards were set to None before any step used them (before steps 2, 5, 8, 11," in note.message
    (note,) = verdict(backwards("inside"), "GS420").findings
    assert "the gradients of 160 backwards" in note.message


@pytest.mark.parametrize("kind", ["", "accumulated", "sharpness", "adversary"])
def test_backwards_that_are_used_or_have_another_purpose(kind: str) -> None:
    assert verdict(backwards(kind), "GS420").outcome is Outcome.CLEAR


@pytest.mark.parametrize(("halving", "outcome"), [(1, Outcome.FOUND), (60, Outcome.CLEAR)])
def test_a_schedule_that_is_over_early(halving: int, outcome: Outcome) -> None:
    torch.manual_seed(0)
    model = TinyLM()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: 0.5 ** (i / halving))
    with watch(model, optimizer, flush_steps=16, scheduler=schedule) as w:
        for i in range(150):
            optimizer.zero_grad()
            next_token_loss(model(tokens(i)), tokens(i)).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            schedule.step()
    assert verdict(w, "GS406").outcome is outcome
    if outcome is Outcome.FOUND:
        assert (
            "does not rise. Look at the number of steps that the schedule was built for"
            in verdict(w, "GS406").findings[0].message
        )
        assert len(live(w, "GS406")) == 1
