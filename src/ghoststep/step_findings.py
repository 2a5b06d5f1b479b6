"""What the checks on a run share: its stretches without a gap, ranks joined by step number, lost steps and who took them.

Steps whose loss or norm is NaN and that a check left out are told by `ghoststep.step_comparison.not_compared`.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from ghoststep.answers import Answer, Clear, Found, NotApplicable, Unknown
from ghoststep.errors import GhoststepError
from ghoststep.evidence.base import Missing
from ghoststep.evidence.steps import HISTORY, UNWATCHED, RankRecord, RunRecord, Step, StepOutcome, StepRow
from ghoststep.finding import Outcome
from ghoststep.lost_step import LOST_COEFFICIENT, OWNED

NO_RUN = Missing(reason="needs a run, and none was given", outcome=Outcome.NOT_APPLICABLE, is_absent=True)
"""What stands for the run where a check is called by hand with a setup only."""

_IN_WORDS = {
    "kept_gradients": "whether gradients were cleared",
    "loss": "a loss",
    "moved": "by how much the weights moved",
    "norm": "a gradient norm",
    "norm_after": "a gradient when the optimizer stepped",
    "tables_norm": "a gradient of an embedding table",
    "num_graph_nodes": "the size of the loss's graph",
}
"""Quantities of `Step`, for a reader of the report."""

REPEATED = 4
"""Kept places that all hold one token: it occurs more often than is kept, so that its sum is not known."""

ROUNDING = 4e-3
"""Relative error of a norm over bf16 gradients against the float64 norm of the same row, generously."""

OVERFLOWING_ROW = 1e17
"""Norm of a row's gradient from which it is named as the cause of an overflow: the float32 norm of all is inf from 1.84e19 on, which
several such rows can reach together; an ordinary row is many orders below."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """Steps of one rank without a gap. first: index of the first step that has its history here (at most `HISTORY` steps).

    is_whole: it begins where the recording began; otherwise earlier steps are not here, and were judged when they were.
    """

    steps: Sequence[Step]
    first: int
    is_whole: bool

    def history(self, index: int) -> Sequence[Step]:
        """The steps before this one that may be looked at."""
        return self.steps[max(0, index - HISTORY) : index]


@dataclass(frozen=True, slots=True)
class Place:
    """A table row's gradient at one place of one step on one rank."""

    rank: int
    step: Step
    row: StepRow


def stretches(record: RankRecord, *, is_live: bool) -> list[Stretch]:
    """The record cut at its gaps: what came before a gap says nothing about what comes after it."""
    steps = record.steps
    if not steps:
        return []
    cuts = {bisect_right(steps, gap.after, key=_number) for gap in record.gaps} - {0, len(steps)}
    bounds = [0, *sorted(cuts), len(steps)]
    start = steps[0].number
    begins = start == 1 or any(g.after == start - 1 or (not is_live and g.after < start) for g in record.gaps)
    result = []
    for a, b in itertools.pairwise(bounds):
        is_whole = a > 0 or begins
        result.append(Stretch(steps[a:b] if cuts else steps, 0 if is_whole else min(HISTORY, (b - a) // 2), is_whole))
    return result


def all_stretches(run: RunRecord) -> Iterable[tuple[RankRecord, Stretch]]:
    """Every stretch of every rank."""
    return ((r, stretch) for r in run.ranks for stretch in stretches(r, is_live=run.is_live))


def long_runs(stretch: Stretch, flags: Sequence[bool], at_least: int) -> list[tuple[int, int]]:
    """Maximal runs of True, as [start, stop), that are long enough and whose first step is known to be the first."""
    if True not in flags:
        return []
    result, i = [], 0
    for value, group in itertools.groupby(flags):
        length = sum(1 for _ in group)
        if value and length >= at_least and (i > 0 or stretch.is_whole):
            result.append((i, i + length))
        i += length
    return result


def median(values: Iterable[float]) -> float:
    """The middle value (the upper one of two) of those that are numbers: a NaN would leave them unsorted. NaN of none."""
    ordered = sorted(v for v in values if not math.isnan(v))
    return ordered[len(ordered) // 2] if ordered else math.nan


def steps_at(run: RunRecord, number: int) -> list[tuple[RankRecord, Step]]:
    """The step with this number, on every rank that has it."""
    found = []
    for record in run.ranks:
        i = bisect_left(record.steps, number, key=_number)
        if i < len(record.steps) and record.steps[i].number == number:
            found.append((record, record.steps[i]))
    return found


def _number(step: Step) -> int:
    return step.number


def was_taken(step: Step) -> bool:
    """The optimizer stepped, or would have, had ghoststep not skipped it."""
    return step.outcome is not StepOutcome.SKIPPED_BY_SCALER


def is_zeroed(step: Step) -> bool:
    """Non-zero, finite gradients before; every one exactly zero when the optimizer stepped."""
    n = step.num_gradients
    if not 0 < n == step.num_zero_after or step.num_zero_before >= n or step.num_nonfinite_before or not was_taken(step):
        return False
    has_loss = step.loss is None or (math.isfinite(step.loss) and (step.loss != 0 or step.norm == math.inf))
    return has_loss and not step.clip_action


def is_nan_clipped(step: Step) -> bool:
    """Finite gradients before, NaN in nearly all of them when the optimizer stepped."""
    return (
        step.num_nonfinite_after > 0
        and step.num_nonfinite_before == 0
        and step.num_nonfinite_after >= 0.9 * step.num_gradients
        and was_taken(step)
    )


def is_cut(step: Step) -> bool:
    """Clipped to less than a thousandth of a finite gradient, by something that is not ghoststep's clip."""
    norm, after = step.norm, step.norm_after
    if norm is None or after is None or not 0 < after < LOST_COEFFICIENT * norm or norm == math.inf:
        return False
    return was_taken(step) and not step.clip_action


def is_sharded(record: RankRecord) -> bool:
    """Norms are of this rank's shards only."""
    return record.facts.world_size > 1 and "FSDP" in record.facts.parallelism.upper()


def others_unseen(run: RunRecord) -> bool:
    """Ranks that take part in every step are not in this record (a live run sees its own rank)."""
    facts = run.ranks[0].facts
    return facts.world_size > len(run.ranks) and bool(facts.parallelism)


def owner(run: RunRecord, number: int) -> Place | None:
    """The table row that owns the gradient of this step, alone or with a few others: more than 99 % of its squared norm, or what made
    it overflow.

    The place is the largest one on any rank (before a reduction only the guilty rank's is large). Under a reduction the gradient
    is a mean over ranks, a token that occurs twice adds up, and only the largest few places are kept: all three are allowed for.
    """
    here = steps_at(run, number)
    places = [Place(record.facts.rank, step, row) for record, step in here for row in step.rows if row.gradient_norm > 0]
    if not places:
        return None
    worst = max(places, key=lambda p: p.row.gradient_norm)
    norm, tables, trunk = (_joint(here, name) for name in ("norm", "tables_norm", "trunk_norm"))
    sums: dict[tuple[str, int], float] = {}
    for p in places:
        key = (p.row.table, p.row.token_id)
        sums[key] = sums.get(key, 0.0) + p.row.gradient_norm
    total = math.hypot(*sums.values())
    if norm == math.inf:
        # What overflowed here may come from another rank's batch, by the reduction: then no place of this one is blamed.
        is_tables = tables == math.inf and trunk is not None and trunk < math.inf and not others_unseen(run)
        is_guilty = total >= OVERFLOWING_ROW or is_tables
        return worst if is_guilty else None
    if norm is None or (tables is not None and tables * tables < OWNED * norm * norm):
        return None
    facts = here[0][0].facts
    share = total / facts.world_size if facts.parallelism else total
    large = [p for p in places if p.row.gradient_norm >= 0.01 * worst.row.gradient_norm]
    is_repeated = len(large) >= REPEATED and len({(p.row.table, p.row.token_id) for p in large}) == 1
    return worst if is_repeated or share >= (math.sqrt(OWNED) - ROUNDING) * norm else None


def by_row(run: RunRecord, numbers: Iterable[int]) -> dict[tuple[str, int] | None, list[tuple[int, Place | None]]]:
    """These steps grouped by the table row that owns them; None: no row does."""
    groups: dict[tuple[str, int] | None, list[tuple[int, Place | None]]] = {}
    for number in sorted(set(numbers)):
        place = owner(run, number)
        key = None if place is None else (place.row.table, place.row.token_id)
        groups.setdefault(key, []).append((number, place))
    return groups


def _joint(here: Sequence[tuple[RankRecord, Step]], name: str) -> float | None:
    """A norm of the whole gradient from what each rank saw of it."""
    seen = [(is_sharded(record), value) for record, step in here if (value := getattr(step, name)) is not None]
    if not seen:
        return None
    values = [value for _, value in seen]
    return math.hypot(*values) if all(sharded for sharded, _ in seen) else max(values)


def refusal(run: RunRecord, *quantities: str, at_least: int = 1) -> str:
    """Why these quantities of `Step` cannot be judged on any rank; "" if they can on one. at_least: steps in a row that are needed."""
    with_steps = [r for r in run.ranks if r.steps]
    if not with_steps:
        return "no step is recorded yet"
    reasons = [_not_seen(r, quantities) for r in with_steps]
    if all(reasons):
        return reasons[0]
    most = max((len(stretch.steps) for _, stretch in all_stretches(run)), default=0)
    return f"{most} {'step' if most == 1 else 'steps'} in a row are recorded; {at_least} are needed" if most < at_least else ""


def _not_seen(record: RankRecord, quantities: Sequence[str]) -> str:
    for q in quantities:
        if q in record.facts.unseen:
            return f"{q} is not seen: {record.facts.unseen[q]}"
        if all(getattr(s, q) is None for s in record.steps):
            return _never_shown(record, q)
    return ""


def _never_shown(record: RankRecord, quantity: str) -> str:
    if not any(s.num_gradients for s in record.steps):
        return (
            f"not one watched parameter had a gradient in {len(record.steps)} steps of the optimizer: no backward reached them, or the "
            "model that trains is another one"
        )
    return f"no step shows {_IN_WORDS.get(quantity, quantity)}"


def looked_at(run: RunRecord) -> str:
    """ "512 steps of 2 ranks looked at", for the reason of a clear; says which ranks are missing, and what trains unseen."""
    most = max((len(r.steps) for r in run.ranks), default=0)
    world = max((r.facts.world_size for r in run.ranks), default=1)
    ranks = f" of {len(run.ranks)} of {world} ranks" if world > 1 else ""
    unwatched = next((f"; {r.facts.unseen[UNWATCHED]}" for r in run.ranks if UNWATCHED in r.facts.unseen), "")
    return f"{most} {'step' if most == 1 else 'steps'}{ranks} looked at{unwatched}"


def of_either(setup: Missing | Callable[[], Answer], run: Missing | Callable[[], Answer]) -> Answer:
    """The answer about a setup, about a run, or about both together; neither: what the setup's absence says."""
    if not isinstance(setup, Missing):
        return setup() if isinstance(run, Missing) else _joined(setup(), run())
    if not isinstance(run, Missing):
        return run()
    missing = run if setup.is_absent and not run.is_absent else setup
    if missing.outcome is Outcome.BROKEN:
        raise GhoststepError(missing.reason)
    return (NotApplicable if missing.outcome is Outcome.NOT_APPLICABLE else Unknown)(reason=missing.reason)


def _joined(first: Answer, second: Answer) -> Answer:
    if isinstance(first, Found) and isinstance(second, Found):
        reason = "; ".join(a.reason for a in (first, second) if a.reason) or None
        return Found(findings=(*first.findings, *second.findings), reason=reason)
    ranking = (Found, Unknown, Clear, NotApplicable)
    return min((first, second), key=lambda a: ranking.index(type(a)))
