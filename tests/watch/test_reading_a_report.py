"""What a user reads at the end of a watched loop: the printed report, and the cause of a run that learns nothing."""

from __future__ import annotations

import torch

import ghoststep
from ghoststep.finding import Outcome, Report, Verdict
from tests.watch.loops import next_token_loss, tokens


def trained(mistake: str, num_steps: int = 60) -> Report:
    """A report of a small loop with one mistake."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(40, 8), torch.nn.LayerNorm(8), torch.nn.Linear(8, 40))
    held = torch.nn.Sequential(torch.nn.Embedding(40, 8)) if mistake == "another model" else model
    optimizer = torch.optim.AdamW(held.parameters(), lr=1e-3)
    with ghoststep.watch(held, optimizer) as w:
        for i in range(num_steps):
            loss = next_token_loss(model(tokens(i, first=0) % 40), tokens(i) % 40)
            if mistake == "NaN once" and i == num_steps - 1:
                loss = loss * float("nan")
            (loss * 0 if mistake == "loss times 0" else loss).backward()  # type: ignore[no-untyped-call]
            if mistake == "cleared":
                optimizer.zero_grad()
            optimizer.step()
            optimizer.zero_grad()
    return w.report()


def verdict(report: Report, code: str) -> Verdict:
    return next(v for v in report.verdicts if v.code == code)


def test_a_printed_report_is_the_report_of_a_terminal() -> None:
    report = trained("")
    shown = str(report)
    assert shown.startswith("ghoststep ")
    assert " clear · 0 found" in shown.splitlines()[-1]
    assert "Verdict(" not in shown
    assert "Verdict(" in repr(report)


def test_gradients_cleared_before_the_step_are_named() -> None:
    (one,) = verdict(trained("cleared"), "GS406").findings
    assert "gone when the optimizer stepped" in one.message
    assert "rounding" not in one.message


def test_gradients_that_are_always_zero_are_not_clear() -> None:
    said = verdict(trained("loss times 0"), "GS406")
    assert said.outcome is Outcome.UNKNOWN
    assert "exactly zero in 60 steps" in (said.reason or "")


def test_an_optimizer_that_holds_another_model_is_told_in_words() -> None:
    report = trained("another model")
    assert report.exit_code == 1
    (one,) = verdict(report, "GS406").findings
    assert "backward() runs on another model than the one that is watched" in one.message
    assert "not one watched parameter had a gradient in" in (verdict(report, "GS410").reason or "")


def test_one_nan_loss_is_not_counted_in_all() -> None:
    (one,) = verdict(trained("NaN once"), "GS404").findings
    assert "in step 60: " in one.message
