"""Lost steps in synthetic records: zeroed, crushed, NaN by an infinite clip, hidden NaN loss. Broken, healthy twin, near misses."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from ghoststep.checks.steps.crushed_step import crushed_step
from ghoststep.checks.steps.hidden_nan_loss import hidden_nan_loss
from ghoststep.checks.steps.nan_by_infinite_clip import nan_by_infinite_clip
from ghoststep.checks.steps.nonfinite_gradient import nonfinite_gradient
from ghoststep.checks.steps.zeroed_step import zeroed_step
from ghoststep.diagnosis import diagnose
from ghoststep.engine import Case, ask
from ghoststep.evidence.base import Missing
from ghoststep.evidence.steps import Gap, RunRecord, Step, StepOutcome
from ghoststep.finding import Finding, Outcome, Severity, Verdict
from ghoststep.registry import Answer, Check, Clear, Found, NotApplicable, Unknown
from tests.checks.run_builders import (
    TABLE,
    TOKEN,
    crushed,
    dead,
    every,
    healthy,
    nan_clipped,
    put,
    record,
    row,
    run,
    step,
    zeroed,
)

ABSENT = Missing(reason="needs a setup, and none was given", outcome=Outcome.NOT_APPLICABLE, is_absent=True)


def found(said: Answer) -> tuple[Finding, ...]:
    assert isinstance(said, Found), said
    return said.findings


def is_clear(said: Answer) -> bool:
    assert isinstance(said, Clear), said
    assert said.power is not None
    return True


class TestZeroed:
    def test_one_finding_a_row_with_its_place_and_price(self) -> None:
        steps = put(healthy(60), zeroed(41), zeroed(47), zeroed(52))
        (one,) = found(zeroed_step(run(steps)))
        where = one.where
        assert (where.step, where.rank, where.table_row, where.token_id) == (41, 0, TOKEN, TOKEN)
        assert (where.example, where.position, where.micro_batch, where.parameter) == (1, 8, 2, TABLE)
        assert where.token == " foo\x1b[31m"
        assert one.measured is not None
        assert one.measured.value == 3
        for part in ("' foo\\x1b[31m'", "norm 1e-30", "1.2e+27", "overflowed to inf", "3 steps of 60", "768 tokens", "locked"):
            assert part in one.message
        assert "\x1b" not in one.message
        assert "0.0003" in one.message  # three steps of 1e-4 by momentum and decay

    def test_the_message_says_when_weights_stood_still_and_when_the_row_heals(self) -> None:
        (one,) = found(zeroed_step(run([zeroed(1, moved=0.0)])))
        assert "the weights stood still" in one.message
        assert "did not grow this time" in one.message
        heals = row(TOKEN, 1e27, row_norm_before=1e-30, row_norm_after=1e-3)
        (one,) = found(zeroed_step(run([zeroed(1, rows=(heals,))])))
        assert "healing: its norm went from 1e-30 to 0.001" in one.message
        (one,) = found(zeroed_step(run([zeroed(1, rows=(replace(heals, row_norm_after=None),))])))
        assert "locked" not in one.message
        assert "healing" not in one.message

    def test_decay_that_shrinks_the_row_leaves_it_locked(self) -> None:
        shrunk = row(TOKEN, 1e27, row_norm_before=1e-30, row_norm_after=0.99e-30)
        assert "locked" in found(zeroed_step(run([zeroed(1, rows=(shrunk,))])))[0].message

    def test_the_rank_that_fed_the_token_is_named(self) -> None:
        innocent = (row(TOKEN, 0.01, position=1),)  # the same token where it does no harm
        first = put(healthy(20), zeroed(9, rows=innocent))
        (one,) = found(zeroed_step(run(first, put(healthy(20), zeroed(9)))))
        assert (one.where.rank, one.where.position) == (1, 8)
        assert "512 tokens" in one.message
        (other,) = found(zeroed_step(run(put(healthy(20), zeroed(9)), first)))
        assert other.where.rank == 0

    def test_under_fsdp_one_rank_sees_inf_and_the_other_a_finite_shard(self) -> None:
        shard = zeroed(9, norm=0.8, tables_norm=0.1, trunk_norm=0.7, rows=(row(3, 0.01),))
        facts: dict[str, Any] = {"parallelism": "FSDP2", "world_size": 2}
        (one,) = found(zeroed_step(run(put(healthy(20), shard), put(healthy(20), zeroed(9)), **facts)))
        assert (one.where.rank, one.where.table_row) == (1, TOKEN)
        assert "overflowed" in one.message
        (alone,) = found(zeroed_step(run(put(healthy(20), shard), **facts)))
        assert "another rank" in alone.message

    def test_two_rows_are_two_findings_and_many_are_bounded(self) -> None:
        steps = [zeroed(n, rows=(row(n % 30, 1e27),)) for n in range(1, 91)]
        findings = found(zeroed_step(run(steps)))
        assert len(findings) == 21
        assert "10 further table rows" in findings[-1].message

    def test_without_a_guilty_row_the_trunk_is_not_blamed_on_a_token(self) -> None:
        (one,) = found(zeroed_step(run([zeroed(1, rows=(row(),), trunk_norm=math.inf)])))
        assert one.where.table_row is None
        assert "overflowed" in one.message

    def test_gradients_that_something_clears(self) -> None:
        cleared = [step(n, norm_after=0.0, num_zero_after=12) for n in range(1, 11)]
        (one,) = found(zeroed_step(run(cleared)))
        assert one.severity is Severity.ERROR
        assert "something set them to 0" in one.message
        (one,) = found(zeroed_step(run(put(healthy(60), cleared[4]))))
        assert one.severity is Severity.WARNING, "a guard may have done so on purpose"
        (one,) = found(zeroed_step(run(every(cleared, clip_bound=0.0))))
        assert "a norm of 0" in one.message

    def test_a_step_that_ghoststep_skipped_is_milder(self) -> None:
        (one,) = found(zeroed_step(run([zeroed(1, outcome=StepOutcome.SKIPPED_BY_POLICY)])))
        assert one.severity is Severity.WARNING
        assert "ghoststep skipped 1" in one.message

    @pytest.mark.parametrize(
        "change",
        [
            {"num_zero_before": 12, "norm": 0.0},  # equal rewards: backward left zeros
            {"num_gradients": 0, "num_zero_after": 0, "norm": None},  # no gradient at all
            {"outcome": StepOutcome.SKIPPED_BY_SCALER},
            {"num_zero_after": 11},  # near miss: one tensor is left
            {"num_nonfinite_before": 1, "num_zero_after": 11, "num_nonfinite_after": 1},  # an inf entry: not silent
            {"loss": math.nan},
            {"clip_action": "capped rows"},
            {"num_nonfinite_before": 3},  # a guard took them out: nonfinite-gradient tells it
        ],
    )
    def test_look_alikes(self, change: dict[str, Any]) -> None:
        assert is_clear(zeroed_step(run(put(healthy(40), zeroed(20, **change)))))

    def test_more_look_alikes(self) -> None:
        assert is_clear(zeroed_step(run(every(healthy(40), lrs=(0.0,), moved=0.0))))
        by_value = step(20, norm=1e20, norm_after=0.3, tables_norm=1e20, trunk_norm_after=0.2)
        assert is_clear(zeroed_step(run(put(healthy(40), by_value))))
        assert is_clear(zeroed_step(run(healthy(40))))

    def test_what_was_not_seen_is_unknown(self) -> None:
        assert isinstance(zeroed_step(run([])), Unknown)
        said = zeroed_step(run(healthy(4), unseen={"norm_after": "the optimizer runs inside backward"}))
        assert isinstance(said, Unknown)
        assert "inside backward" in said.reason
        both = RunRecord(ranks=(record(healthy(4), unseen={"norm_after": "why"}), record([zeroed(1)], 1)))
        assert len(found(zeroed_step(both))) == 1, "the other rank has seen it"


class TestCrushed:
    def test_a_nan_in_its_history_hides_none(self) -> None:
        steps = put(healthy(200), nan_clipped(32), crushed(66))
        (one,) = found(crushed_step(run(steps)))
        assert one.where.step == 66

    def test_found_with_its_row_and_coefficient(self) -> None:
        (one,) = found(crushed_step(run(put(healthy(40), crushed(30), crushed(35)))))
        assert (one.where.step, one.where.table_row, one.where.position, one.where.rank) == (30, TOKEN, 8, 0)
        for part in ("1e+11", "1e-11", "2 steps", "1e-12 to 0.003", "ghoststep.clip_grad_norm_"):
            assert part in one.message
        assert "too few" not in one.message
        assert one.measured is not None
        assert one.measured.value == pytest.approx(1e-11)

    def test_early_it_goes_by_the_coefficient_and_says_so(self) -> None:
        (one,) = found(crushed_step(run(put(healthy(10), crushed(3)))))
        assert "too few earlier steps" in one.message
        near = crushed(3, size=3e3)  # the trunk is still 4e-4 of the norm: a summed loss may begin like this
        assert is_clear(crushed_step(run(put(healthy(10), near))))
        assert len(found(crushed_step(run(put(healthy(40), replace(near, number=30)))))) == 1

    def test_a_gap_ends_the_history(self) -> None:
        steps = put(healthy(40), crushed(33, size=3e3))
        assert len(found(crushed_step(run(steps)))) == 1
        assert is_clear(crushed_step(run(record(steps, gaps=[Gap(after=30, reason="resumed")]))))

    @pytest.mark.parametrize(
        "change",
        [
            {"num_gradients": 1, "trunk_norm": None, "trunk_norm_after": None},  # textual inversion
            {"trunk_norm": 0.0, "trunk_norm_after": 0.0},  # two tables train, nothing else
            {"norm_after": 1e11, "trunk_norm_after": 1.14, "clip_bound": None},  # nobody clips
            {"norm_after": 2e8, "trunk_norm_after": 1.14 * 2e-3},  # near miss: coefficient 2e-3
            {"trunk_norm_after": 0.02},  # near miss: the trunk keeps 2 % of its median
            {"tables_norm": 0.99e11, "trunk_norm": 0.14e11, "trunk_norm_after": 1e-3},  # near miss: 98 %
            {"rows": tuple(row(i, 0.5e11) for i in range(2))[:1]},  # one place with half of the norm
            {"outcome": StepOutcome.SKIPPED_BY_SCALER},
            {"clip_action": "capped rows"},
            {"norm": math.inf, "norm_after": 0.0},
        ],
    )
    def test_look_alikes(self, change: dict[str, Any]) -> None:
        assert is_clear(crushed_step(run(put(healthy(60), crushed(50, **change)))))

    def test_a_summed_loss_is_cut_in_every_step(self) -> None:
        summed = [
            replace(
                s, norm=1e5, tables_norm=0.99995e5, trunk_norm=1e3, norm_after=1.0, trunk_norm_after=0.01, rows=(row(5, 1e5),)
            )
            for s in healthy(60)
        ]
        assert is_clear(crushed_step(run(summed)))
        assert len(found(crushed_step(run(put(summed, replace(crushed(50, size=1e13), trunk_norm_after=1e-10)))))) == 1

    def test_a_token_that_occurs_more_often_than_places_are_kept(self) -> None:
        places = tuple(row(TOKEN, 1e10, position=i) for i in range(4))
        assert found(crushed_step(run(put(healthy(40), crushed(30, rows=places)))))[0].where.table_row == TOKEN
        mixed = tuple(row(i, 1e10, position=i) for i in range(4))
        assert is_clear(crushed_step(run(put(healthy(40), crushed(30, rows=mixed)))))

    def test_ranks(self) -> None:
        whole = [put(healthy(40), crushed(30, rows=(row(3, 0.1),))), put(healthy(40), crushed(30, rows=(row(TOKEN, 2e11),)))]
        (one,) = found(crushed_step(run(*whole)))
        assert (one.where.rank, one.where.table_row) == (1, TOKEN)
        shared = put(healthy(40), crushed(30, rows=(row(TOKEN, 1.2e11),)))  # a mean over two ranks: 60 % of the norm
        assert is_clear(crushed_step(run(whole[0], shared)))
        (alone,) = found(crushed_step(run(whole[0], world_size=2, parallelism="DDP")))
        assert "another rank" in alone.message
        shard = crushed(
            30, norm=1.2, tables_norm=0.2, trunk_norm=1.1, norm_after=1e-11, trunk_norm_after=1e-11, rows=(row(3, 0.1),)
        )
        facts: dict[str, Any] = {"parallelism": "FSDP2", "world_size": 2}
        (alone,) = found(crushed_step(run(put(healthy(40), shard), **facts)))
        assert "another rank" in alone.message
        (both,) = found(crushed_step(run(put(healthy(40), shard), whole[1], **facts)))
        assert both.where.rank == 1

    def test_rows_that_are_not_seen(self) -> None:
        (one,) = found(crushed_step(run(put(healthy(40), crushed(30, rows=())))))
        assert "not seen" in one.message
        assert one.where.table_row is None


class TestNanByClip:
    def test_found_and_the_symptoms_join_it(self) -> None:
        steps = [*healthy(20), nan_clipped(21), *(dead(n) for n in range(22, 40))]
        (one,) = found(nan_by_infinite_clip(run(steps)))
        assert (one.where.step, one.where.table_row, one.where.rank) == (21, TOKEN, 0)
        for part in ("inf / inf", "bound of inf", "12 of 12 gradient tensors", "step 21"):
            assert part in one.message
        verdicts = verdicts_of(run(steps), nan_by_infinite_clip, hidden_nan_loss, nonfinite_gradient)
        assert [v.name for v in verdicts if v.severity is Severity.ERROR and v.findings] == ["nan-by-infinite-clip"]

    def test_a_nan_bound_does_the_same_with_a_finite_norm(self) -> None:
        finite = nan_clipped(5, norm=1.2, tables_norm=0.5, trunk_norm=1.1, clip_bound=math.nan, rows=(row(),))
        (one,) = found(nan_by_infinite_clip(run(put(healthy(10), finite))))
        assert one.where.table_row is None
        assert "bound of nan" in one.message

    @pytest.mark.parametrize(
        "change",
        [
            {"num_nonfinite_after": 0, "norm": 1e11, "norm_after": 1e11},  # a finite spike under an infinite bound
            {"num_nonfinite_before": 12},  # NaN was there before
            {"num_nonfinite_after": 5},  # in some only
            {"num_nonfinite_after": 1, "num_zero_after": 11, "num_nonfinite_before": 1},
            {"outcome": StepOutcome.SKIPPED_BY_SCALER},
        ],
    )
    def test_look_alikes(self, change: dict[str, Any]) -> None:
        assert is_clear(nan_by_infinite_clip(run(put(healthy(40), nan_clipped(20, **change)))))

    def test_skipped_in_time(self) -> None:
        (one,) = found(nan_by_infinite_clip(run([nan_clipped(1, outcome=StepOutcome.SKIPPED_BY_POLICY)])))
        assert one.severity is Severity.WARNING
        assert "skipped the step before" in one.message


class TestHiddenNan:
    def test_first_and_count(self) -> None:
        steps = put(healthy(30), *(dead(n) for n in (12, 13, 29)))
        (one,) = found(hidden_nan_loss(run(steps, healthy(30))))
        assert (one.where.step, one.where.rank) == (12, 0)
        assert "NaN in step 12 and in 3 steps in all on 1 rank" in one.message
        assert "0.0" in one.message
        assert (
            "stepped on NaN or infinity in 12 of 12 gradient tensors in step 12; the loss is a number again in step 30"
            in one.message
        )
        (one,) = found(hidden_nan_loss(run([*healthy(20), *(dead(n) for n in range(21, 25))])))
        assert "it still is NaN in step 24" in one.message

    def test_scaler(self) -> None:
        early = [step(n, loss=math.inf, scale=65536.0, outcome=StepOutcome.SKIPPED_BY_SCALER) for n in range(1, 5)]
        assert is_clear(hidden_nan_loss(run([*early, *healthy(20, start=5)])))
        nan = every(early, loss=math.nan)
        assert found(hidden_nan_loss(run([*nan, *healthy(20, start=5)])))[0].severity is Severity.WARNING
        (one,) = found(hidden_nan_loss(run([replace(dead(1), loss=-math.inf)])))
        assert (one.severity, "the loss is -inf" in one.message) == (Severity.ERROR, True)

    def test_a_loss_that_is_infinite_only_times_its_scale(self) -> None:
        """2.0 in fp16 times 65536."""
        scaled = step(9, loss=math.inf, scale=32768.0)
        said = hidden_nan_loss(run(put(healthy(30), scaled)))
        assert is_clear(said)
        assert "1 of 30 steps could not be compared: the loss times its loss scale is infinite in step 9" in str(said.reason)
        said = hidden_nan_loss(run(every(healthy(30), loss=math.inf, scale=32768.0)))
        assert isinstance(said, Unknown)
        assert "30 of 30 steps" in said.reason
        for other in (
            replace(scaled, scale=1.0),
            replace(scaled, scale=None),
            replace(scaled, loss=math.nan),
            replace(scaled, num_nonfinite_before=12, num_nonfinite_after=12),  # the optimizer stepped on them
            step(9, loss=math.inf, scale=1.0, outcome=StepOutcome.SKIPPED_BY_SCALER),
        ):
            assert found(hidden_nan_loss(run(put(healthy(30), other))))[0].where.step == 9

    @pytest.mark.parametrize(
        ("change", "severity", "text"),
        [
            ({"norm": math.inf, "norm_after": 0.0, "num_zero_after": 12}, Severity.WARNING, "exactly zero"),  # a clip
            ({"norm": math.nan, "num_nonfinite_before": 12}, Severity.WARNING, "was given finite gradients"),  # a guard
            ({"norm_after": None}, Severity.WARNING, "was given finite gradients"),  # finite before
            ({"norm": math.nan, "num_nonfinite_before": 12, "norm_after": None}, Severity.ERROR, "is not seen here"),
            ({"moved": 0.0, "norm_after": 0.0, "num_zero_after": 12}, Severity.WARNING, "the weights stood still"),
            ({"outcome": StepOutcome.SKIPPED_BY_POLICY}, Severity.WARNING, "ghoststep skipped it"),
            ({"num_nonfinite_after": 12, "norm_after": math.nan}, Severity.ERROR, "stepped on NaN or infinity"),
        ],
    )
    def test_what_the_optimizer_was_given(self, change: dict[str, Any], severity: Severity, text: str) -> None:
        (one,) = found(hidden_nan_loss(run(put(healthy(30), step(7, loss=math.nan, **change)))))
        assert (one.severity, text in one.message) == (severity, True), one.message
        assert ("Go back" in one.message) == (severity is Severity.ERROR)

    def test_some_of_them_were_skipped(self) -> None:
        steps = put(healthy(30), step(7, loss=math.nan), step(9, loss=math.nan, outcome=StepOutcome.SKIPPED_BY_POLICY))
        assert "skipped in 1 step of them; in the others the optimizer" in found(hidden_nan_loss(run(steps)))[0].message

    def test_a_finite_shard_says_nothing_of_the_others(self) -> None:
        steps = put(healthy(30), step(7, loss=math.nan))
        facts: dict[str, Any] = {"parallelism": "FSDP2", "world_size": 2}
        assert found(hidden_nan_loss(run(steps, **facts)))[0].severity is Severity.ERROR
        assert found(hidden_nan_loss(run(steps, steps, **facts)))[0].severity is Severity.WARNING

    def test_finite_gradients_spare_the_weights(self) -> None:
        """torch's mean over a batch in which every label is ignored: the loss is NaN, every gradient is zero."""
        zero: dict[str, Any] = {"num_zero_before": 12, "num_zero_after": 12, "norm": 0.0, "norm_after": 0.0}
        (one,) = found(hidden_nan_loss(run(put(healthy(30), step(7, loss=math.nan, **zero)))))
        assert one.severity is Severity.WARNING
        assert "exactly zero; the step moved the weights by 0.0001 of their norm (momentum and decay go on" in one.message
        assert "spared" not in one.message
        assert found(hidden_nan_loss(run([step(n, loss=math.nan, **zero) for n in range(1, 30)])))[0].severity is Severity.ERROR

    def test_zero_and_unseen(self) -> None:
        assert is_clear(hidden_nan_loss(run(every(healthy(30), loss=0.0))))
        assert isinstance(hidden_nan_loss(run(every(healthy(3), loss=None))), Unknown)


class TestNonfiniteGradient:
    def bad(self, number: int, **more: Any) -> Step:
        values: dict[str, Any] = {"num_nonfinite_before": 5, "nonfinite_before": ("a.w", "b.w", "c.w", "d.w")}
        return step(number, **{**values, "num_nonfinite_after": 5, "norm": math.nan, "norm_after": math.nan, **more})

    def test_found_and_it_explains_the_nan_loss(self) -> None:
        steps = [*healthy(20), self.bad(21), *(dead(n) for n in range(22, 40))]
        (one,) = found(nonfinite_gradient(ABSENT, run(steps)))
        assert (one.where.step, one.where.parameter) == (21, "a.w")
        assert "5 of 12 parameters (a.w, b.w, c.w, ...)" in one.message
        verdicts = verdicts_of(run(steps), hidden_nan_loss, nonfinite_gradient)
        assert [v.name for v in verdicts if v.findings] == ["nonfinite-gradient"]

    def test_the_other_way_round_the_loss_is_the_cause(self) -> None:
        steps = [*healthy(20), *(dead(n) for n in range(21, 40))]
        assert is_clear(nonfinite_gradient(ABSENT, run(steps)))
        other_rank = [*healthy(20), *(self.bad(n) for n in range(21, 40))]
        assert is_clear(nonfinite_gradient(ABSENT, run(other_rank, steps)))

    def test_a_guard_took_them_out(self) -> None:
        guarded = self.bad(5, num_nonfinite_after=0, norm_after=0.7)
        (one,) = found(nonfinite_gradient(ABSENT, run([guarded])))
        assert one.severity is Severity.WARNING
        assert "something took them out before the optimizer stepped." in one.message
        assert "checkpoint" not in one.message
        (one,) = found(nonfinite_gradient(ABSENT, run([replace(guarded, norm_after=0.0, num_zero_after=12)])))
        assert "stepped, and every gradient was exactly zero then." in one.message
        (one,) = found(nonfinite_gradient(ABSENT, run([replace(guarded, norm_after=None)])))
        assert (one.severity, "is not seen" in one.message) == (Severity.ERROR, True)
        assert is_clear(nonfinite_gradient(ABSENT, run([replace(guarded, clip_action="removed non-finite rows")])))
        skips = put(healthy(30), self.bad(5, outcome=StepOutcome.SKIPPED_BY_SCALER))
        assert is_clear(nonfinite_gradient(ABSENT, run(skips)))

    def test_the_rank_before_the_reduction(self) -> None:
        guilty = self.bad(5, rows=(row(3, math.nan),))
        (one,) = found(nonfinite_gradient(ABSENT, run([self.bad(5)], [guilty])))
        assert one.where.rank == 1

    def test_a_rank_that_fed_nothing_of_it_says_so(self) -> None:
        facts: dict[str, Any] = {"world_size": 2, "parallelism": "DDP"}
        (one,) = found(nonfinite_gradient(ABSENT, run(put(healthy(9), self.bad(5, rows=(row(),))), **facts)))
        assert "this rank's loss was finite" in one.message
        assert "another rank's batch may have done it" in one.message

    def test_the_places_that_stand_out(self) -> None:
        rows = (row(TOKEN, math.nan, example=1, position=8, row_norm_before=1e-30), row(5, math.inf, position=2), row(), row(6))
        (one,) = found(nonfinite_gradient(ABSENT, run(put(healthy(9), self.bad(5, rows=rows)))))
        where = one.where
        assert (where.table_row, where.token, where.example, where.position, where.step) == (TOKEN, " foo\x1b[31m", 1, 8, 5)
        assert (
            "Table row 17 of embed.weight (token ' foo\\x1b[31m', norm 1e-30) got a gradient of nan at position 8"
            in one.message
        )
        assert ", and table row 5 of embed.weight (norm 1) at position 2 of example 0;" in one.message
        assert "\x1b" not in one.message

    @pytest.mark.parametrize(
        ("norms", "text"),
        [((math.nan,) * 4, "No place of the batch stands out"), ((1.0, 2.0), "finite at every place"), ((), "")],
    )
    def test_no_place_stands_out(self, norms: tuple[float, ...], text: str) -> None:
        rows = tuple(row(i, norm) for i, norm in enumerate(norms))
        (one,) = found(nonfinite_gradient(ABSENT, run(put(healthy(9), self.bad(5, rows=rows)))))
        assert (one.where.table_row, one.where.parameter) == (None, "a.w")
        assert text in one.message
        assert ("place" in one.message) == bool(norms)

    def test_neither_setup_nor_run(self) -> None:
        said = nonfinite_gradient(ABSENT, ABSENT)
        assert isinstance(said, NotApplicable)
        assert said.reason == ABSENT.reason
        assert isinstance(nonfinite_gradient(Missing(reason="out of time"), ABSENT), Unknown)
        assert isinstance(nonfinite_gradient(ABSENT, Missing(reason="damaged")), Unknown)
        broken = ask(Case([Missing(reason="x")]), nonfinite_gradient)
        assert broken.outcome is not Outcome.CLEAR


def verdicts_of(record_: RunRecord, *checks: Check) -> tuple[Verdict, ...]:
    case = Case([record_])
    return diagnose([ask(case, c) for c in checks], checks)
