"""GS305, and what a measured amplification makes of GS301 and GS302."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest

from ghoststep.checks.rows.amplified_rows import amplified_rows
from ghoststep.checks.rows.near_zero_input_rows import near_zero_input_rows
from ghoststep.checks.rows.zero_input_rows import zero_input_rows
from ghoststep.diagnosis import diagnose
from ghoststep.evidence.amplification import FIRST, LEFT, MIDDLE, PACKED, Amplification, Place, Reading, SpikedStep
from ghoststep.evidence.base import Missing
from ghoststep.evidence.batch import BatchFacts
from ghoststep.evidence.plan import TrainingKind
from ghoststep.evidence.tokenizer import Reach
from ghoststep.evidence.wiring import Mixing
from ghoststep.finding import Outcome, Severity, Verdict
from ghoststep.registry import Answer, Clear, Found, Unknown, load
from tests.checks import builders as b

ROW, OTHER = 17, 19
E, W, N = Severity.ERROR, Severity.WARNING, Severity.NOTE
MISSING = Missing(reason="-")


def amplified(gradients: Mapping[str, float], *, row: int = ROW, norm: float = 1e-12, bound: float = 1.0) -> Amplification:
    places = tuple(
        Place(name=n, example=0, position=i, readings=(Reading(norm=norm, gradient=g, table_row=row),))
        for i, (n, g) in enumerate(gradients.items())
    )
    return Amplification(
        places=places, multiplier=1.0, num_loss_tokens=30, bound=bound, median_norm=1.0, num_passes=len(places)
    )


def batch(*, row: int | None = 9, at: int = 8) -> BatchFacts:
    ids_BT = np.arange(16, dtype=np.int64).reshape(1, -1) + 30
    if row is not None:
        ids_BT[0, at] = row
    return BatchFacts(
        ids_BT=ids_BT, padding_BT=None, padding_source="", document_BT=None, document_source="", labels_BT=None,
        sides="none", has_attention_mask=False, has_position_ids=False,
    )  # fmt: skip


def spiked(trunk: float, rows: float | None = 1.0) -> SpikedStep:
    return SpikedStep(table_row=ROW, place=MIDDLE, kept_trunk=trunk, kept_rows=rows)


def gs305(found: Amplification, fed: BatchFacts, kind: Reach | None = None, step: SpikedStep | Missing = MISSING) -> Answer:
    return amplified_rows(found, b.inputs({ROW: 1e-12}), fed, MISSING if kind is None else b.reach({ROW: kind}), step)


def severity(said: Answer) -> Severity | None:
    if isinstance(said, Found):
        return said.findings[0].severity
    assert isinstance(said, Clear), said
    return None


class TestAmplifiedRows:
    @pytest.mark.parametrize(
        ("gradients", "fed", "expected"),
        [
            ({FIRST: 5.0, MIDDLE: 1e22}, batch(row=ROW), E),
            ({FIRST: 5.0, MIDDLE: 1e22}, batch(row=None), W),
            ({FIRST: 1e27, MIDDLE: 0.3}, batch(row=ROW), W),
            ({FIRST: 1e27, MIDDLE: 0.3}, batch(row=ROW, at=0), E),
            ({FIRST: 0.1, MIDDLE: 0.1}, batch(row=ROW), None),
            ({FIRST: 999.0, MIDDLE: 999.0}, batch(row=ROW), None),
            ({FIRST: 1.0, MIDDLE: float("nan")}, batch(row=ROW), E),
        ],
    )
    def test_place_and_batch_decide(self, gradients: dict[str, float], fed: BatchFacts, expected: Severity | None) -> None:
        assert severity(gs305(amplified(gradients), fed)) is expected

    def test_a_row_without_a_token_is_silent(self) -> None:
        assert severity(gs305(amplified({MIDDLE: 1e22}), batch(row=None), Reach.NO_TOKEN)) is None
        assert severity(gs305(amplified({MIDDLE: 1e22}), batch(row=None), Reach.REACHABLE)) is E

    def test_the_clip_bound_counts(self) -> None:
        assert severity(gs305(amplified({MIDDLE: 5e3}, bound=10.0), batch(row=ROW))) is None
        assert severity(gs305(amplified({MIDDLE: 5e3}, bound=1.0), batch(row=ROW))) is E

    @pytest.mark.parametrize(
        ("step", "expected"),
        [(spiked(0.5), None), (spiked(0.0), E), (spiked(float("nan")), E), (spiked(0.5, 1e-9), E), (spiked(0.5, None), None)],
    )
    def test_the_user_s_own_step_decides(self, step: SpikedStep, expected: Severity | None) -> None:
        said = gs305(amplified({MIDDLE: 1e22}), batch(row=ROW), step=step)
        assert severity(said) is expected
        if isinstance(said, Clear):
            assert said.reason is not None
            assert "train_step keeps" in said.reason

    def test_where_no_loss_depends_nothing_is_known(self) -> None:
        for gradients in ({FIRST: 0.0, MIDDLE: 0.0}, {MIDDLE: 0.0}):
            said = gs305(amplified(gradients), batch(row=ROW))
            assert isinstance(said, Unknown)
            assert "nothing was measured" in said.reason
        said = gs305(amplified({FIRST: 5.0, MIDDLE: 0.0}), batch(row=ROW))
        assert isinstance(said, Unknown)
        assert "only the first position was measured" in said.reason

    def test_a_first_position_without_loss_leaves_the_middle(self) -> None:
        said = gs305(amplified({FIRST: 0.0, MIDDLE: 5.0}), batch(row=ROW))
        assert isinstance(said, Clear)
        assert said.power is not None
        assert FIRST not in said.power.quantity
        found = gs305(amplified({FIRST: 0.0, MIDDLE: 1e22}), batch(row=ROW))
        assert severity(found) is E
        assert isinstance(found, Found)
        assert "first position not measured" in found.findings[0].message

    def test_an_amplified_first_position_is_found_without_a_middle(self) -> None:
        assert severity(gs305(amplified({FIRST: 1e27, MIDDLE: 0.0}), batch(row=ROW, at=0))) is E

    def test_the_message_names_what_happens(self) -> None:
        for gradient, words in ((1e22, "is inf"), (1e6, "shrinks by 1e-06"), (float("inf"), "NaN")):
            said = gs305(amplified({MIDDLE: gradient}), batch(row=ROW))
            assert isinstance(said, Found)
            assert words in said.findings[0].message


def rows_check(
    found: Amplification | Missing,
    *,
    zero: bool = False,
    row: int = ROW,
    norm: float = 1e-12,
    first: bool = False,
    mix: Mixing = Mixing.RECURRENT_GATED,
    training: TrainingKind = TrainingKind.FULL,
    step: SpikedStep | Missing = MISSING,
) -> Answer:
    check = zero_input_rows if zero else near_zero_input_rows
    inputs = b.inputs({row: 0.0 if zero else norm})
    reach = b.reach({row: Reach.REACHABLE}, starts=[row] if first else [])
    said: Answer = check(
        inputs, MISSING, b.mixing(mix), reach, b.template(), b.vocabulary(), MISSING, MISSING, b.plan(training), found, step
    )
    return said


class TestUpgradeOrClear:
    @pytest.mark.parametrize(
        ("gradients", "first", "mix", "expected"),
        [
            ({FIRST: 5.0, MIDDLE: 0.3}, False, Mixing.RECURRENT_GATED, N),  # cleared
            ({FIRST: 5.0, MIDDLE: 1e22}, False, Mixing.RECURRENT_GATED, E),
            ({FIRST: 1e27, MIDDLE: 0.3}, False, Mixing.ATTENTION, N),
            ({FIRST: 1e27, MIDDLE: 0.3}, True, Mixing.ATTENTION, E),
            ({FIRST: 0.2, MIDDLE: 0.3}, True, Mixing.ATTENTION, N),  # cleared
            ({FIRST: 0.2, MIDDLE: 0.3, PACKED: 1e20}, True, Mixing.ATTENTION, E),
            ({FIRST: 0.2, MIDDLE: 1e20}, False, Mixing.ATTENTION, E),  # upgraded
            ({LEFT: 1e20, MIDDLE: 0.2}, True, Mixing.ATTENTION, E),
        ],
    )
    def test_near_zero(self, gradients: dict[str, float], first: bool, mix: Mixing, expected: Severity) -> None:
        said = rows_check(amplified(gradients), first=first, mix=mix)
        assert severity(said) is expected
        assert isinstance(said, Found)
        assert "Measured on this model" in said.findings[0].message

    def test_where_no_first_place_was_measured_the_wiring_decides(self) -> None:
        said = rows_check(amplified({MIDDLE: 0.2}), first=True, mix=Mixing.ATTENTION)
        assert severity(said) is E
        assert isinstance(said, Found)
        assert "Measured" not in said.findings[0].message

    @pytest.mark.parametrize(
        ("gradients", "first", "mix", "expected"),
        [
            ({FIRST: 5.0, MIDDLE: 0.0}, False, Mixing.RECURRENT_GATED, E),
            ({FIRST: 5.0, MIDDLE: 0.0}, True, Mixing.RECURRENT_GATED, E),
            ({FIRST: 0.0, MIDDLE: 0.0}, True, Mixing.ATTENTION, E),
            ({FIRST: 0.0, MIDDLE: 0.3}, True, Mixing.ATTENTION, E),
            ({FIRST: 0.0, MIDDLE: 0.3}, False, Mixing.RECURRENT_GATED, N),  # the middle was measured: cleared
        ],
    )
    def test_no_gradient_is_no_evidence(
        self, gradients: dict[str, float], first: bool, mix: Mixing, expected: Severity
    ) -> None:
        for zero in (False, True):
            said = rows_check(amplified(gradients, norm=0.0 if zero else 1e-12), first=first, mix=mix, zero=zero)
            assert severity(said) is expected
            assert isinstance(said, Found)
            assert ("Measured" in said.findings[0].message) is (expected is N)

    def test_one_amplified_place_is_enough(self) -> None:
        said = rows_check(amplified({FIRST: 1e27, MIDDLE: 0.0}), first=True, mix=Mixing.ATTENTION)
        assert severity(said) is E
        assert isinstance(said, Found)
        assert "fed at the first position" in said.findings[0].message

    def test_a_row_that_was_not_fed_takes_the_nearest_smaller_one(self) -> None:
        smaller = amplified({MIDDLE: 0.2}, row=OTHER, norm=1e-14)
        assert severity(rows_check(smaller)) is N
        larger = amplified({MIDDLE: 0.2}, row=OTHER, norm=1e-9)
        assert severity(rows_check(larger)) is E  # says nothing about a smaller row: the wiring decides

    def test_an_exact_zero_speaks_for_zeros_only(self) -> None:
        zero = amplified({MIDDLE: 0.2}, row=OTHER, norm=0.0)
        assert severity(rows_check(zero)) is E
        assert severity(rows_check(zero, zero=True)) is N
        assert severity(rows_check(amplified({MIDDLE: float("nan")}, norm=0.0), zero=True)) is E

    def test_files_alone_are_judged_as_before(self) -> None:
        assert severity(rows_check(MISSING)) is E
        assert severity(rows_check(MISSING, mix=Mixing.ATTENTION)) is N

    def test_rl_text_is_one_step_milder(self) -> None:
        assert severity(rows_check(amplified({MIDDLE: 1e20}), training=TrainingKind.RL)) is W

    def test_a_step_that_survives_is_a_note(self) -> None:
        assert severity(rows_check(amplified({MIDDLE: 1e20}), step=spiked(0.3))) is N
        assert severity(rows_check(amplified({MIDDLE: 1e20}), step=spiked(0.0))) is E


def test_one_cause_one_error() -> None:
    found = amplified({FIRST: 5.0, MIDDLE: 1e22})
    registry = load(with_instruments=False, plugins=False)
    verdicts = []
    for code, said in (("GS301", rows_check(found)), ("GS305", gs305(found, batch(row=ROW)))):
        assert isinstance(said, Found)
        check = registry.find(code)
        empty = Verdict(
            code=code, name=check.name, outcome=Outcome.FOUND, severity=check.severity, basis=check.basis, reason=None
        )
        verdicts.append(empty.with_findings(said.findings))
    cause, symptom = diagnose(verdicts, registry.checks)
    assert [s.code for s in cause.findings[0].symptoms] == ["GS305"]
    assert symptom.findings == ()


def reading(norm: float, gradient: float, direction: int = -1) -> Reading:
    return Reading(norm=norm, gradient=gradient, direction=direction)


class TestLaw:
    def test_constant_and_thresholds(self) -> None:
        norms = (1.0, 1e-3, 1e-6, 1e-12, 1e-20, 1e-30)
        place = Place(name=MIDDLE, example=0, position=8, readings=tuple(reading(n, min(0.3 / n, 1e24)) for n in norms))
        assert place.constant == pytest.approx(0.3)
        assert place.critical_norm(1.844e19) == pytest.approx(0.3 / 1.844e19)
        assert place.critical_norm(1e25) == 0.0

    def test_no_law_no_threshold(self) -> None:
        flat = Place(name=MIDDLE, example=0, position=8, readings=tuple(reading(10.0**-k, 5e3) for k in range(5)))
        assert np.isnan(flat.constant)
        assert np.isnan(flat.critical_norm(1e3))
        assert flat.critical_norm(1e4) == 0.0

    def test_equal_norms_of_two_directions_do_not_make_a_law(self) -> None:
        flat = Place(
            name=MIDDLE, example=0, position=8, readings=tuple(reading(10.0**-k, 5e3, d) for k in range(5) for d in (1, 2))
        )
        assert np.isnan(flat.constant)

    def test_the_whole_model_counts_where_it_was_measured(self) -> None:
        readings = tuple(Reading(norm=10.0**-k, gradient=10.0**k, total=100 * 10.0**k) for k in range(6))
        assert Place(name=FIRST, example=0, position=0, readings=readings).constant == pytest.approx(100.0)
