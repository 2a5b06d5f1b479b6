"""GS306: untrained rows need not be small."""

from __future__ import annotations

from dataclasses import replace

from ghoststep.checks.rows.untrained_rows import untrained_rows
from ghoststep.evidence.base import Missing
from ghoststep.evidence.tokenizer import Reach
from ghoststep.finding import Basis, Severity
from ghoststep.registry import Answer, Clear, Found, Unknown
from tests.checks import builders as b

SPECIAL = dict.fromkeys((3, 5, 9), Reach.SPECIAL)


def severities(said: Answer) -> list[tuple[Severity | None, Basis | None]]:
    assert isinstance(said, Found), said
    return [(f.severity, f.basis) for f in said.findings]


def test_identical_rows_are_a_proof() -> None:
    said = untrained_rows(b.inputs(groups=[(3, 5, 9)]), b.reach(SPECIAL))
    assert isinstance(said, Found)
    (finding,) = said.findings
    assert finding.basis is Basis.PROOF
    assert finding.measured is not None
    assert finding.measured.value == 3
    assert "'tok3', 'tok5', 'tok9'" in finding.message


def test_a_quantised_table_may_have_made_them_equal() -> None:
    evidence = b.inputs(groups=[(3, 5)])
    coarse = replace(evidence, rows=replace(evidence.rows, storage="q4_0", storage_note="fp16 block scales"))
    said = untrained_rows(coarse, b.reach(SPECIAL))
    assert severities(said)[0][1] is Basis.MEASURED
    assert isinstance(said, Found)
    assert "by rounding" in said.findings[0].message


def test_rows_at_the_common_vector_are_a_rule_of_thumb() -> None:
    said = untrained_rows(b.inputs(close={7: 0.01}), b.reach({7: Reach.REACHABLE}))
    assert severities(said) == [(Severity.NOTE, Basis.RULE_OF_THUMB)]
    assert isinstance(untrained_rows(b.inputs(close={7: 0.06}), b.reach({7: Reach.REACHABLE})), Clear)


def test_alignment_rows_and_tokens_that_nothing_produces_are_silent() -> None:
    for kind in (Reach.NO_TOKEN, Reach.UNREACHABLE):
        kinds = dict.fromkeys((3, 5, 7), kind)
        assert isinstance(untrained_rows(b.inputs(groups=[(3, 5)], close={7: 0.01}), b.reach(kinds)), Clear)


def test_one_used_member_in_a_group_has_nobody_to_be_confused_with() -> None:
    said = untrained_rows(b.inputs(groups=[(3, 62)]), b.reach({3: Reach.SPECIAL, 62: Reach.NO_TOKEN}))
    assert isinstance(said, Clear)


def test_no_tokenizer_is_unknown_where_there_is_something_and_clear_where_there_is_not() -> None:
    missing = Missing(reason="no tokenizer file")
    for evidence in (b.inputs(groups=[(3, 5)]), b.inputs(close={7: 0.01})):
        said = untrained_rows(evidence, missing)
        assert isinstance(said, Unknown)
        assert "no tokenizer file" in said.reason
    assert isinstance(untrained_rows(b.inputs(), missing), Clear)


def test_groups_of_near_zero_rows_belong_to_another_check() -> None:
    assert isinstance(untrained_rows(b.inputs({3: 1e-12, 5: 1e-12}, groups=[(3, 5)]), b.reach(SPECIAL)), Clear)


def test_too_few_dims_to_measure_a_distance_is_unknown() -> None:
    said = untrained_rows(b.inputs(close=dict.fromkeys(range(64), float("nan"))), b.reach({}))
    assert isinstance(said, Unknown)
    assert "8 dims" in said.reason


def test_most_of_the_table_in_one_group_is_an_error() -> None:
    everything = tuple(range(40))
    said = untrained_rows(b.inputs(groups=[everything]), b.reach(dict.fromkeys(everything, Reach.REACHABLE)))
    assert severities(said)[0] == (Severity.ERROR, Basis.PROOF)
    few = untrained_rows(b.inputs(groups=[everything[:20]]), b.reach(dict.fromkeys(everything, Reach.REACHABLE)))
    assert severities(few)[0] == (Severity.NOTE, Basis.PROOF)
