"""Which steps of a run a check could compare with others: clear is said only about those."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ghoststep.evidence.steps import RankRecord, RunRecord, Step, StepOutcome

LAST_STEPS = 20
"""Steps at the end that could not be compared, from which nothing is known of the run as it is now. A bad batch or a scaler that finds
its scale takes fewer in a row (halving leads from 65536 to 1/16 in 20)."""

_IN_WORDS = {
    "loss": "loss",
    "moved": "movement of the weights",
    "norm": "gradient norm",
    "norm_after": "gradient norm after clipping",
    "trunk_norm_after": "gradient norm after clipping",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class NotCompared:
    """What to say of steps that could not be compared. undecided: why nothing can be called clear, or None. note: for the reason of
    a clear, begins with "; ", or ""."""

    undecided: str | None = None
    note: str = ""


def not_compared(
    run: RunRecord, quantities: Sequence[str], *, is_compared: Callable[[Step], bool] | None = None
) -> NotCompared:
    """Steps in which one of these quantities of `Step` is not a finite number, on the rank that has most of them.

    Nothing is clear where that is more than half of the steps, or all of the last 20. is_compared: another rule for a step. Ranks that
    never see one of the quantities are left to `refusal`.
    """
    worst: tuple[bool, int, RankRecord, list[int]] | None = None
    for record in run.ranks:
        if any(all(getattr(s, q) is None for s in record.steps) for q in quantities):
            continue
        if is_compared is None:
            lacking = [i for i, s in enumerate(record.steps) if not _is_finite(s, quantities)]
        else:
            lacking = [i for i, s in enumerate(record.steps) if not is_compared(s)]
        is_open = 2 * len(lacking) > len(record.steps) or _num_trailing(record, lacking) >= LAST_STEPS
        if lacking and (worst is None or (is_open, len(lacking)) > worst[:2]):
            worst = is_open, len(lacking), record, lacking
    if worst is None:
        return NotCompared()
    is_open, _, record, lacking = worst
    text = _text(record, lacking, quantities, on=f" of rank {record.facts.rank}" if len(run.ranks) > 1 else "")
    return NotCompared(undecided=text) if is_open else NotCompared(note=f"; {text}")


def _is_finite(step: Step, quantities: Sequence[str]) -> bool:
    for q in quantities:
        value = getattr(step, q)
        if value is None or value - value != 0:  # NaN and inf
            return False
    return True


def _num_trailing(record: RankRecord, lacking: Sequence[int]) -> int:
    """Steps at the very end, one after the other."""
    last = len(record.steps) - 1
    return next((k for k, i in enumerate(reversed(lacking)) if i != last - k), len(lacking))


def _text(record: RankRecord, lacking: Sequence[int], quantities: Sequence[str], *, on: str) -> str:
    trailing = _num_trailing(record, lacking)
    has_ended = trailing >= LAST_STEPS or (trailing > 1 and trailing == len(lacking))
    step = record.steps[lacking[-trailing] if has_ended else lacking[0]]
    what, judge = _cause(step, quantities)
    told = f" ({judge} judges that)" if judge else ""
    since = f"from step {step.number} on" if has_ended else f"in step {step.number}"
    first = "" if has_ended or len(lacking) == 1 else ", the first of them"
    return f"{len(lacking)} of {len(record.steps)} steps{on} could not be compared: {what} {since}{first}{told}"


def _cause(step: Step, quantities: Sequence[str]) -> tuple[str, str]:
    """What is wrong with the numbers of a step, and the check that tells about it, or ""."""
    loss, norm = step.loss, step.norm
    was_skipped = step.outcome is StepOutcome.SKIPPED_BY_SCALER
    if loss is not None and loss - loss != 0:
        if not math.isnan(loss) and (was_skipped or (step.scale or 0.0) > 1):
            return "the loss times its loss scale is infinite", "skipped-by-scaler" if was_skipped else ""
        return f"the loss is {'NaN' if math.isnan(loss) else 'infinite'}", "hidden-nan-loss"
    if was_skipped:
        return "the loss scaler skipped", "skipped-by-scaler"
    if step.num_nonfinite_before:
        return "gradients are not finite", "nonfinite-gradient"
    if step.num_nonfinite_after:
        return "gradients became NaN after backward", "nan-by-infinite-clip"
    if 0 < step.num_gradients == step.num_zero_after and norm is not None and norm - norm != 0:
        return "every gradient was set to zero", "zeroed-step"
    for q in quantities:
        value = getattr(step, q)
        if value is None:
            return f"no {_IN_WORDS.get(q, q)} was seen", ""
        if value - value != 0:
            times = " times the loss scale" if (step.scale or 0.0) > 1 else ""
            return f"the {_IN_WORDS.get(q, q)} is NaN" if math.isnan(
                value
            ) else f"the {_IN_WORDS.get(q, q)}{times} is infinite", ""
    return "what is needed was not seen", ""
