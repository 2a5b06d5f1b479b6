"""Where rows are fed: at positions that the loss depends on, and a place without one is told as not measured."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import ghoststep
from ghoststep.evidence.amplification import FIRST, LEFT, MIDDLE, PACKED
from ghoststep.evidence.batch import BatchFacts
from ghoststep.finding import Outcome, Severity
from ghoststep.instruments.live.amplification_places import places_of

from .test_amplification import TOKEN, V, llama, mamba2, shrink, tokens, verdict
from .test_live_tables import tokenizer

T = 16


def facts(*, padding: Any = None, documents: Any = None, num: int = 2) -> BatchFacts:
    return BatchFacts(
        ids_BT=np.ones((num, T), dtype=np.int64), padding_BT=padding, padding_source="", document_BT=documents,
        document_source="", labels_BT=None, sides="none", has_attention_mask=False, has_position_ids=False,
    )  # fmt: skip


def depended(*spans: tuple[int, int]) -> Any:
    """One example a span [start, end)."""
    found_BT = np.zeros((len(spans), T), dtype=bool)
    for b, (start, end) in enumerate(spans):
        found_BT[b, start:end] = True
    return found_BT


class TestPlaces:
    @pytest.mark.parametrize(
        ("spans", "expected"),
        [
            (((0, 15), (0, 15)), [(FIRST, 0, 0), (MIDDLE, 0, 8)]),
            (((0, 16), (0, 16)), [(FIRST, 0, 0), (MIDDLE, 0, 8)]),
            (((0, 4), (0, 4)), [(FIRST, 0, 0), (MIDDLE, 0, 2)]),  # five positions up to the last label
            (((1, 4), (0, 15)), [(FIRST, 1, 0), (MIDDLE, 0, 2)]),
            (((0, 1), (0, 15)), [(FIRST, 0, 0), (MIDDLE, 1, 8)]),
            (((12, 15), (0, 0)), [(FIRST, 0, 0), (MIDDLE, 0, 12)]),  # no loss looks at what stands before
            (((0, 0), (0, 0)), [(FIRST, 0, 0), (MIDDLE, 0, 8)]),
        ],
    )
    def test_the_loss_decides(self, spans: Any, expected: Any) -> None:
        assert places_of(facts(), depended(*spans)) == expected

    def test_padding_and_documents(self) -> None:
        padding_BT = np.zeros((2, T), dtype=bool)
        padding_BT[1, :6] = True
        document_BT = np.repeat(np.arange(2), 8)[None].repeat(2, axis=0)
        batch = facts(padding=padding_BT, documents=document_BT)
        found = {name: (b, t) for name, b, t in places_of(batch, depended((0, 15), (6, 15)))}
        assert found[LEFT] == (1, 6)
        assert found[PACKED] == (0, 8)
        assert found[MIDDLE] == (0, 7)  # not where a document begins
        found = {name: (b, t) for name, b, t in places_of(batch, depended((0, 4), (6, 15)))}
        assert found[PACKED] == (1, 8)
        assert found[MIDDLE] == (0, 2)


def labelled(first: int, last: int) -> dict[str, torch.Tensor]:
    """Labels count from `first` to before `last` only."""
    given = tokens(at=3)
    given["labels"][:, :first] = -100
    given["labels"][:, last:] = -100
    return given


class TestAmplify:
    def test_early_labels_are_measured_before_the_last(self) -> None:
        found = ghoststep.amplify(mamba2(6), batch=labelled(0, 5), norms=[1.0, 1e-12])
        place = found.place(MIDDLE)
        assert (place.position, place.is_measured) == (2, True)
        assert place.readings[1].gradient > 1e6
        assert "safe" not in next(line for line in found.to_text().splitlines() if line.startswith("middle"))

    def test_nothing_supervised_is_not_measured(self) -> None:
        found = ghoststep.amplify(mamba2(), batch=labelled(T, T), norms=[1.0, 1e-12])
        text, svg = found.to_text(), found.to_svg()
        assert not found.measured
        assert text.count("not measured") == 2
        assert "not measured" in svg
        assert "safe" not in text + svg

    def test_one_unmeasured_place(self) -> None:
        found = ghoststep.amplify(llama(2), batch=labelled(0, 2), norms=[1.0, 1e-3])
        assert [p.name for p in found.measured] == [FIRST]
        assert "middle: not measured" in found.to_text()
        assert "first position: not" not in found.to_text()


class TestChecks:
    def given(self, model: Any, batch: Any) -> dict[str, Any]:
        words = ["<pad>", "<s>", "</s>", *(f"w{i}" for i in range(3, V))]
        return {"model": model, "batch": batch, "tokenizer": tokenizer(words)}

    @pytest.mark.parametrize(("norm", "code"), [(1e-30, "GS301"), (0.0, "GS302")])
    def test_early_labels_clear_nothing(self, norm: float, code: str) -> None:
        said = verdict(self.given(shrink(mamba2(6), norm), labelled(0, 5)), code)
        assert (said.outcome, said.severity) == (Outcome.FOUND, Severity.ERROR)
        assert "fed at the middle" in said.findings[0].message

    @pytest.mark.parametrize("last", [0, 2])
    def test_where_the_middle_is_not_measured_the_wiring_decides(self, last: int) -> None:
        given = self.given(shrink(mamba2(6), 1e-30), labelled(0, last))
        said = verdict(given, "GS301")
        assert (said.outcome, said.severity) == (Outcome.FOUND, Severity.ERROR)
        assert "Measured" not in said.findings[0].message
        unknown = verdict(given)
        assert unknown.outcome is Outcome.UNKNOWN
        assert ("no position" if last == 0 else "only the first position was measured") in str(unknown.reason)

    def test_a_measured_small_gradient_still_clears(self) -> None:
        said = verdict(self.given(shrink(mamba2(2, epsilon=1e-2), 1e-30), labelled(0, 8)), "GS301")
        assert (said.outcome, said.severity) == (Outcome.FOUND, Severity.NOTE)
        assert said.findings[0].where.table_row == TOKEN
