"""Equivalence: the same text alone, as it stands in the batch, and padded on the other side. B examples, T positions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ghoststep.errors import CannotLook, DoesNotApply
from ghoststep.evidence.batch import BatchFacts
from ghoststep.evidence.equivalence import Equivalence, Variant
from ghoststep.instruments.live.equivalence_arguments import pad
from ghoststep.instruments.live.equivalence_runs import Found, Judged, Runs, SingleRuns, compared, span_of
from ghoststep.registry import instrument
from ghoststep.subjects.setup import Setup

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

NUM_PADS = 3
"""Padding added for a side that the batch does not use."""


@instrument
def equivalence(setup: Setup, batch: BatchFacts, single: SingleRuns) -> Equivalence:
    """Compare up to two padded examples, in eval mode, with themselves alone and unpadded, and padded on the other side.

    Cost: 6 forwards of a single example, so 6/B of a pass, 2/B less without the other side; where something moved 5/B more, and
    in low precision the same again. Nothing is changed.
    """
    if batch.document_BT is not None:
        raise DoesNotApply("the batch is packed: a text never stands alone in it")
    if batch.padding_BT is None:
        raise DoesNotApply(f"nothing says what padding is ({batch.padding_source})")
    runs, padding_BT = single.runs, single.padding_BT
    before = runs.num_examples
    chosen = padded_examples(padding_BT)
    judged: list[Judged] = []
    reasons: list[str] = []
    if chosen and padding_BT.any():
        judged.append(_as_batched(runs, padding_BT, chosen))
    side = _tokenizer_side(setup)
    other = {"right": Variant.LEFT, "left": Variant.RIGHT}.get(batch.sides)
    if other is None and batch.sides == "none" and side is not None:
        other = Variant.LEFT if side == "left" else Variant.RIGHT
    if other is not None and chosen:
        used = "the tokenizer" if side is not None and side in other.value else ""
        try:
            judged.append(_other_side(runs, batch, padding_BT, chosen[0], other, used))
        except CannotLook as reason:
            reasons.append(f"{other.value}: {reason}")
    if not judged:
        raise DoesNotApply("the first batch has no padding, and nothing says on which side it would stand")
    return Equivalence(
        readings=tuple(j.reading for j in judged), side=batch.sides, has_position_ids=batch.has_position_ids,
        num_forward=(runs.num_examples - before) / padding_BT.shape[0],
        reasons=(*reasons, *(r for j in judged for r in j.reasons)),
    )  # fmt: skip


def padded_examples(padding_BT: NDArray[np.bool_]) -> list[int]:
    """Up to two examples with one run of at least two real tokens, those with most padding first."""
    order = sorted(range(len(padding_BT)), key=lambda b: -int(padding_BT[b].sum()))
    return [b for b in order if span_of(padding_BT[b]) is not None][:2]


def _as_batched(runs: Runs, padding_BT: NDArray[np.bool_], chosen: list[int]) -> Judged:
    time = padding_BT.shape[1]
    spans = [(b, s) for b in chosen if (s := span_of(padding_BT[b])) is not None and s != (0, time)]

    def measure() -> Found:
        found: Found = []
        for b, (start, stop) in spans:
            padded = runs.alone(b, 0, time)[:, start:stop]
            found += compared(padded, runs.alone(b, start, stop), b, start)
        return found

    return runs.judge(Variant.AS_BATCHED, measure, "the batch", (spans[0][0], *spans[0][1]) if spans else (0, 0, time))


def _other_side(
    runs: Runs, batch: BatchFacts, padding_BT: NDArray[np.bool_], example: int, variant: Variant, used: str
) -> Judged:
    if batch.pad_id is None or not batch.has_attention_mask:
        raise CannotLook("no pad id, or no attention mask to say what padding is")
    if batch.has_position_ids:
        raise CannotLook("the batch passes position_ids, which only its collator could extend")
    span = span_of(padding_BT[example])
    assert span is not None  # `padded_examples` chose it
    start, stop = span
    left = variant is Variant.LEFT
    arguments = runs.example(example, start, stop)
    ids = runs.probe.ids_BT[example, start:stop]
    padded = pad(*arguments, stop - start, NUM_PADS, left=left, pad_id=batch.pad_id, ids=ids)

    def measure() -> Found:
        hidden = runs.hidden(padded, (1, stop - start + NUM_PADS))
        hidden = hidden[:, NUM_PADS:] if left else hidden[:, :-NUM_PADS]
        return compared(hidden, runs.alone(example, start, stop), example, start)

    return runs.judge(variant, measure, used, (example, start, stop))


def _tokenizer_side(setup: Setup) -> str | None:
    side = getattr(setup.tokenizer, "padding_side", None)
    return side if side in ("left", "right") else None
