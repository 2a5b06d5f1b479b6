"""The same text alone and in a batch of another order. B examples, T positions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ghoststep.errors import DoesNotApply
from ghoststep.evidence.equivalence import OtherBatch, Variant
from ghoststep.instruments.live.equivalence_runs import Found, SingleRuns, compared
from ghoststep.registry import instrument

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

MOST_EXAMPLES = 4
"""Examples of the batch in another order."""


@instrument
def other_batch(single: SingleRuns) -> OtherBatch:
    """Run up to four examples in another order and compare two of them, last in that order, with themselves alone.

    All are as wide as the batch: only the neighbours, their number and the place in the batch differ. Cost: 6 single examples at
    most, up to 10 more where something moved. Nothing is changed.
    """
    runs, padding_BT = single.runs, single.padding_BT
    num, time = padding_BT.shape
    if num < 2:
        raise DoesNotApply("the first batch has one example")
    chosen = _chosen(padding_BT)
    if not chosen:
        raise DoesNotApply("every example is padding")
    order = [b for b in range(num) if b not in chosen][: MOST_EXAMPLES - len(chosen)] + chosen
    before = runs.num_examples

    def measure() -> Found:
        hidden = runs.several(order)
        found: Found = []
        for i, b in enumerate(order):
            if b in chosen:
                every = compared(hidden[i : i + 1], runs.alone(b, 0, time), b, 0)
                found += [f for f in every if not padding_BT[b, f[2]]]
        return found

    judged = runs.judge(Variant.OTHER_BATCH, measure, "the batch", (chosen[0], 0, time))
    return OtherBatch(reading=judged.reading, num_forward=(runs.num_examples - before) / num, reasons=judged.reasons)


def _chosen(padding_BT: NDArray[np.bool_]) -> list[int]:
    """Two examples, those with most padding first: they have been run alone already. The first of the batch comes last."""
    order = sorted(range(len(padding_BT)), key=lambda b: -int(padding_BT[b].sum()))
    return sorted([b for b in order if not padding_BT[b].all()][:2], reverse=True)
