"""A document of an announced pack against the same document alone. B examples, T positions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ghoststep.errors import DoesNotApply
from ghoststep.evidence.batch import BatchFacts
from ghoststep.evidence.equivalence import Packed, Variant
from ghoststep.instruments.live.equivalence_runs import Found, SingleRuns, compared
from ghoststep.registry import instrument

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@instrument
def packed(batch: BatchFacts, single: SingleRuns) -> Packed:
    """Run one packed example, and up to two of its later documents alone, with the arguments cut to them.

    Equal hidden states prove that the pack is isolated and that its positions are those of the document alone. Cost: 3 single
    examples at most, up to 10 more where something moved. Nothing is changed.
    """
    if batch.document_BT is None:
        raise DoesNotApply(f"no document boundary is announced ({batch.document_source})")
    runs = single.runs
    num, time = single.padding_BT.shape
    document_BT = batch.document_BT[:num, :time]
    example, spans = _later_documents(document_BT, single.padding_BT)
    before = runs.num_examples

    def measure() -> Found:
        together = runs.alone(example, 0, time)
        return [
            f for start, stop in spans
            for f in compared(together[:, start:stop], runs.alone(example, start, stop), example, start)
        ]  # fmt: skip

    judged = runs.judge(Variant.PACKED, measure, "the batch", (example, *spans[0]))
    reading = judged.reading
    number = int(document_BT[example, reading.position]) if reading.position >= 0 else -1
    return Packed(
        reading=reading, source=batch.document_source, document=number, has_position_ids=batch.has_position_ids,
        num_forward=(runs.num_examples - before) / num, reasons=judged.reasons,
    )  # fmt: skip


def _later_documents(document_BT: NDArray[np.int64], padding_BT: NDArray[np.bool_]) -> tuple[int, list[tuple[int, int]]]:
    """The first example with a document behind another one, and the last two such documents of at least two tokens."""
    for example, (document_T, padding_T) in enumerate(zip(document_BT, padding_BT, strict=True)):
        spans = []
        for number in dict.fromkeys(document_T[~padding_T & (document_T >= 0)].tolist()):
            where = ((document_T == number) & ~padding_T).nonzero()[0]
            if len(where) > 1 and int(where[-1]) - int(where[0]) + 1 == len(where):
                spans.append((int(where[0]), int(where[-1]) + 1))
        later = [s for s in sorted(spans) if s[0] > 0 and (~padding_T[: s[0]]).any()]
        if later:
            return example, later[-2:]
    raise DoesNotApply("no example holds two documents of two tokens or more")
