"""Healthy runs of every kind, all checks on runs at once: no error and no warning; and what asking costs."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ghoststep.diagnosis import diagnose
from ghoststep.engine import Case, ask
from ghoststep.evidence.base import Missing
from ghoststep.evidence.steps import RunRecord, Step, StepOutcome, TensorOutlier
from ghoststep.evidence.training import LiveWiring, StepProbe
from ghoststep.finding import Outcome, Severity, Verdict
from ghoststep.registry import Check, load
from tests.checks.run_builders import crushed, every, healthy, nan_clipped, put, row, run, skipped, step, window, zeroed


def checks_on_runs() -> tuple[Check, ...]:
    every_check = [c for c in load(with_instruments=False, plugins=False).checks if c.code.startswith("GS4")]
    return tuple(c for c in every_check if any(n.kind is RunRecord for n in c.needs))


CHECKS = checks_on_runs()


def verdicts(record: RunRecord) -> tuple[Verdict, ...]:
    case = Case([record])
    return diagnose([ask(case, c) for c in CHECKS], CHECKS)


def bad(record: RunRecord, at_least: Severity = Severity.WARNING) -> list[str]:
    said = verdicts(record)
    assert [v.reason for v in said if v.outcome is Outcome.BROKEN] == []
    return [f"{v.name}: {f.message}" for v in said for f in v.findings if (f.severity or v.severity).rank >= at_least.rank]


def test_every_code_is_there() -> None:
    wanted = {401, 402, 403, 404, 405, 406, 407, 408, 409, 410, 411, 412, 415, 418, 419, 420, 421, 422}
    assert {int(c.code[2:]) for c in CHECKS} == wanted
    for c in CHECKS:
        needed = [n.kind for n in c.needs if not n.optional]
        assert needed in ([], [RunRecord]), "a live run has nothing else"
        headings = [line[3:] for line in c.doc.splitlines() if line.startswith("## ")]
        assert headings == [
            "What it finds", "Why it matters", "When it is not a problem", "How to confirm by hand", "How to fix", "Options",
            "References",
        ]  # fmt: skip
    names = {c.name for c in load(with_instruments=False, plugins=False).checks}
    assert {e for c in CHECKS for e in (*c.explains, *c.explains_anywhere)} <= names


def scaler_start() -> list[Step]:
    return [*(skipped(n, 65536 / 2 ** (n - 1)) for n in range(1, 9)), *every(healthy(300, start=9), scale=256.0)]


def warm_up_and_cosine() -> list[Step]:
    def lr(n: int) -> float:
        return 1e-3 * min((n - 1) / 50, 0.5 * (1 + math.cos(math.pi * n / 400)))

    rates = [replace(s, lrs=(lr(s.number),)) for s in healthy(400)]
    return [replace(s, moved=0.0) if s.lrs[0] < 1e-6 else s for s in rates]


def equal_rewards() -> list[Step]:
    """GRPO: losses around 0, in every third step all rewards are equal and every gradient is zero."""
    chance = random.Random(1)
    steps = [replace(s, loss=chance.gauss(0, 0.02)) for s in healthy(300)]
    zero: dict[str, Any] = {"norm": 0.0, "tables_norm": 0.0, "trunk_norm": 0.0, "norm_after": 0.0, "trunk_norm_after": 0.0}
    nothing = [step(n, loss=0.0, num_zero_before=12, num_zero_after=12, rows=(), **zero) for n in range(1, 301, 3)]
    return put(steps, *nothing)


def flat_bf16() -> list[Step]:
    """DPO at ln 2, in bf16, over a slow warm-up."""
    return every(healthy(300), loss=0.69140625, lrs=(1e-7,))


def flat_sft() -> list[Step]:
    chance = random.Random(2)
    return [replace(s, loss=1.4 + chance.gauss(0, 0.02)) for s in healthy(300)]


def contrastive() -> list[Step]:
    return every(healthy(200), loss=math.log(64))


def growing_kl() -> list[Step]:
    """RL with a growing KL term: small, positive, rising all the time."""
    return [replace(s, loss=1e-6 * 1.04**s.number, norm=0.1 * 1.01**s.number) for s in healthy(300)]


def summed_loss() -> list[Step]:
    chance = random.Random(3)
    steps = []
    for s in healthy(300):
        tokens = chance.randrange(200, 6000)
        norm = 40.0 * tokens
        steps.append(
            replace(
                s, loss=2.3 * tokens, num_tokens=tokens, norm=norm, tables_norm=0.9 * norm, trunk_norm=0.43 * norm,
                norm_after=1.0, trunk_norm_after=0.43, rows=(row(5, 0.5 * norm),),
            )
        )  # fmt: skip
    return steps


def textual_inversion() -> list[Step]:
    """One row of one table trains; the sample of weights never holds it."""
    one: dict[str, Any] = {"num_gradients": 1, "trunk_norm": None, "trunk_norm_after": None, "moved": 0.0}
    return [replace(s, norm=1e4, tables_norm=1e4, norm_after=1.0, rows=(row(5, 1e4),), **one) for s in healthy(200)]


def lora_begins() -> list[Step]:
    """lora_A has almost no gradient before lora_B has grown."""
    return [
        replace(s, outliers=(TensorOutlier(parameter="q.lora_A", norm=1e-3 * s.number, typical=1e-7),)) if s.number > 20 else s
        for s in healthy(100)
    ]


def experts_starve() -> list[Step]:
    gone = TensorOutlier(parameter="experts.3.w", norm=1e-12, typical=1e-2)
    back = TensorOutlier(parameter="experts.3.w", norm=20.0, typical=1e-2)
    steps = [replace(s, outliers=(gone,)) if s.number % 3 == 0 else s for s in healthy(200)]
    return [replace(s, outliers=(back,)) if s.number % 17 == 1 else s for s in steps]


def tiny_batches() -> list[Step]:
    """Losses of single examples: heavy tails."""
    chance = random.Random(4)
    steps = []
    for s in healthy(400):
        size = math.exp(chance.gauss(0, 1.0))
        steps.append(replace(s, loss=1.5 * size, norm=2.0 * size, norm_after=min(1.0, 2.0 * size)))
    return steps


def converges() -> list[Step]:
    """Memorised: loss and all gradients go to nothing, then rounding keeps the weights."""
    steps = []
    for s in healthy(300):
        f = math.exp(-s.number / 8)
        steps.append(
            replace(
                s, loss=2 * f, norm=2 * f, tables_norm=f, trunk_norm=1.7 * f, norm_after=min(1.0, 2 * f),
                moved=1e-4 if f > 1e-6 else 0.0,
                trunk_norm_after=min(0.8, 1.7 * f),
            )
        )  # fmt: skip
    return steps


def value_clipped() -> list[Step]:
    return [replace(s, norm=1e6, tables_norm=1e6, norm_after=3.0, trunk_norm_after=1.5, clip_bound=None) for s in healthy(40)]


def other_data() -> list[Step]:
    """The second data set is harder."""
    return [*healthy(200), *(replace(s, loss=4.5) for s in healthy(200, start=201))]


def evaluations_between() -> list[Step]:
    return [replace(s, seconds=60.0 if s.number % 50 == 0 else 1.0) for s in healthy(300)]


def skipped_by_us() -> list[Step]:
    return put(healthy(200), *(step(n, outcome=StepOutcome.SKIPPED_BY_POLICY) for n in (40, 41)))


def saved_by_our_clip() -> list[Step]:
    return put(healthy(200), *(crushed(n, clip_action="capped rows") for n in (40, 90)))


HEALTHY: list[Callable[[], list[Step]]] = [
    lambda: healthy(300), scaler_start, warm_up_and_cosine, equal_rewards, flat_bf16, flat_sft, contrastive, growing_kl, summed_loss,
    textual_inversion, lora_begins, experts_starve, tiny_batches, converges, value_clipped, other_data, evaluations_between,
    skipped_by_us, saved_by_our_clip, lambda: [], lambda: [step(1, lrs=(0.0,), moved=0.0)],
]  # fmt: skip


@pytest.mark.parametrize("make", HEALTHY, ids=[m.__name__ for m in HEALTHY])
def test_healthy_runs(make: Callable[[], list[Step]]) -> None:
    steps = make()
    assert bad(run(steps)) == []
    assert bad(run(steps, steps)) == []
    assert bad(window(run(steps), max(0, len(steps) - 150), len(steps))) == []


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    scale=st.floats(-9, 9).map(lambda x: 10.0**x),
    noise=st.floats(0, 0.8),
    count=st.integers(0, 400),
)
def test_a_healthy_noisy_run_of_any_scale_is_silent(seed: int, scale: float, noise: float, count: int) -> None:
    steps = healthy(count, seed, scale=scale, noise=noise)
    assert bad(run(steps)) == []
    if noise <= 0.25:
        assert bad(run(steps), Severity.NOTE) == []


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 200), st.sampled_from(["zeroed", "crushed", "nan"])), max_size=6), st.integers(0, 9))
def test_each_lost_step_is_told_and_nothing_else(lost: list[tuple[int, str]], seed: int) -> None:
    makers: dict[str, Callable[[int], Step]] = {"zeroed": zeroed, "crushed": crushed, "nan": nan_clipped}
    kinds = dict(lost)
    said = verdicts(run(put(healthy(200, seed), *(makers[kind](n) for n, kind in kinds.items()))))
    names = {"zeroed": "zeroed-step", "crushed": "crushed-step", "nan": "nan-by-infinite-clip"}
    assert {v.name for v in said if v.findings} == {names[k] for k in kinds.values()}
    for v in said:
        for f in v.findings:
            numbers = [n for n, k in kinds.items() if names[k] == v.name]
            assert f.where.step == min(numbers)


def test_nothing_is_clear_where_nothing_was_seen() -> None:
    assert {v.outcome for v in verdicts(run([]))} <= {Outcome.UNKNOWN, Outcome.NOT_APPLICABLE}
    blind = [
        Step(number=n, ended_at=0.0) for n in range(1, 30)  # nothing but that steps happened
    ]  # fmt: skip
    clear = {v.name for v in verdicts(run(blind)) if v.outcome is Outcome.CLEAR}
    assert clear == set(), clear


def test_a_setup_and_a_run_together_give_one_answer() -> None:
    check = load(with_instruments=False, plugins=False).find("GS405")
    missing = ask(Case([]), check)
    assert missing.outcome in (Outcome.NOT_APPLICABLE, Outcome.UNKNOWN)
    assert {n.kind for n in check.needs if n.optional} == {LiveWiring, RunRecord}
    assert {n.kind for n in load(with_instruments=False, plugins=False).find("GS406").needs} == {
        LiveWiring,
        StepProbe,
        RunRecord,
    }
    assert all(n.kind is not Missing for n in check.needs)


@pytest.mark.parametrize("check", CHECKS, ids=[c.name for c in CHECKS])
def test_a_healthy_window_costs_less_than_a_millisecond(check: Check) -> None:
    of = window(run(healthy(900)), 388, 900)
    case = Case([of])
    best = math.inf
    for _ in range(15):
        start = time.perf_counter()
        ask(case, check)
        best = min(best, time.perf_counter() - start)
    assert best < 1e-3, f"{best * 1e6:.0f} µs"


def test_no_check_imports_torch_or_numpy() -> None:
    root = Path(__file__).resolve().parents[2] / "src" / "ghoststep"
    for file in [*(root / "checks" / "steps").glob("*.py"), root / "step_findings.py", root / "step_texts.py"]:
        text = file.read_text(encoding="utf-8")
        assert "import torch" not in text, file.name
        assert "import numpy" not in text, file.name
