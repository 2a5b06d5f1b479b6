"""GS308: speaks of faults, not of what is unreachable by design."""

from __future__ import annotations

import numpy as np

from ghoststep.checks.rows.unreachable_tokens import unreachable_tokens
from ghoststep.evidence.tokenizer import ADDED_NOT_MATCHED, NEVER_BUILT, Reach, VocabularyReach
from ghoststep.finding import Basis, Severity
from ghoststep.registry import Clear, Found
from tests.checks import builders as b


def reach(causes: dict[str, int], *, size: int = 100, partial: int = 0) -> VocabularyReach:
    codes = np.full(size, int(Reach.REACHABLE), dtype=np.uint8)
    total = sum(causes.values())
    codes[:total] = int(Reach.UNREACHABLE)
    codes[total : total + partial] = int(Reach.PARTIAL_UTF8)
    examples = tuple((i, f"tok{i}", cause) for i, cause in enumerate(causes))
    return VocabularyReach(reach_V=codes, cause_counts=causes, examples=examples)


def test_each_fault_is_a_warning_with_an_example() -> None:
    for cause in (NEVER_BUILT, ADDED_NOT_MATCHED):
        said = unreachable_tokens(reach({cause: 1}), b.vocabulary(100))
        assert isinstance(said, Found)
        (finding,) = said.findings
        assert finding.severity in (None, Severity.WARNING)
        assert "'tok0' = 0" in finding.message
        assert finding.where.token == "tok0"


def test_by_design_is_clear_with_the_figures() -> None:
    said = unreachable_tokens(reach({"cut by the pre-tokenizer": 4}, partial=2), b.vocabulary(100))
    assert isinstance(said, Clear)
    assert said.reason is not None
    assert "4 of 100" in said.reason
    assert "2 are parts" in said.reason


def test_a_large_share_is_a_note_whatever_the_cause() -> None:
    said = unreachable_tokens(reach({"cut by the pre-tokenizer": 26}), b.vocabulary(100))
    assert isinstance(said, Found)
    assert said.findings[0].basis is Basis.RULE_OF_THUMB
    assert isinstance(unreachable_tokens(reach({"cut by the pre-tokenizer": 25}), b.vocabulary(100)), Clear)
