"""GS402."""

import math

from ghoststep.evidence.steps import RankRecord, RunRecord, Step
from ghoststep.finding import Basis, Finding, Power, Quantity, Severity, Where
from ghoststep.lost_step import CRUSHED_TRUNK, LEAST_HISTORY, LOST_COEFFICIENT, OWNED, UNSEEN_TRUNK
from ghoststep.parameter_text import counted
from ghoststep.registry import Answer, NotApplicable, Unknown, answer, check
from ghoststep.step_comparison import not_compared
from ghoststep.step_findings import (
    Place,
    Stretch,
    all_stretches,
    by_row,
    is_cut,
    is_sharded,
    is_zeroed,
    looked_at,
    median,
    others_unseen,
    refusal,
    steps_at,
    was_taken,
)
from ghoststep.step_texts import cost_text, place_text, place_where, row_text

SPIKE = 10.0
"""Of the median norm: below it this rank's own shards did not spike."""
MOST_ROWS = 20
MOVERS = "mostly momentum and decay"


@check(code="GS402", severity=Severity.ERROR, basis=Basis.MEASURED)
def crushed_step(run: RunRecord) -> Answer:
    """A training step that one table row took: clipping crushed every other gradient.

    ## What it finds
    Steps whose clip coefficient (norm after over norm before, both finite) is under 1e-3 while one row of an embedding table (or
    a few together) owns more than 99 % of the squared norm, and what is left of all other parameters is under a hundredth of the
    run's own median over up to 256 earlier steps. With fewer than 8 of those, everything else must be under 1e-4 of the norm.

    ## Why it matters
    A row of norm 1e-12 gets a gradient of 1e11: finite, so no check for inf or zeros sees it. Clipping to 1 multiplies everything
    by 1e-11. The step is as lost as a zeroed one, though the row itself moves and heals.

    ## When it is not a problem
    A run that is cut as much in every step (sum-reduced losses with a norm of 1e5): the median is as small. Only tables train
    (textual inversion): nothing else is there to be crushed. Spikes without a clip, or under ghoststep's own clip, which caps the
    row instead.

    ## How to confirm by hand
    The gradient norm of the embedding table against that of all other parameters, before clipping, in the named step.

    ## How to fix
    `ghoststep.clip_grad_norm_(model, max_norm)`, or repair the rows before training (`ghoststep fix`).

    ## Options
    None.

    ## References
    Measured: Mamba-2, row norm 1e-12: norm 2.6e11; 5 stalled steps of 200.
    """
    if reason := _nothing_to_crush(run):
        return NotApplicable(reason=reason)
    refused = refusal(run, "norm_after", "trunk_norm", "trunk_norm_after", "norm", "tables_norm")
    if refused:
        return Unknown(reason=refused)
    crushed: set[int] = set()
    is_early: set[int] = set()
    for record, stretch in all_stretches(run):
        cut = [i for i, s in enumerate(stretch.steps) if s.norm_after is not None and is_cut(s)]
        for i in cut:
            early = _crushed(run, record, stretch, i)
            if i >= stretch.first and early is not None:
                crushed.add(stretch.steps[i].number)
                is_early |= {stretch.steps[i].number} if early else set()
    findings: list[Finding] = []
    for key, group in by_row(run, crushed).items() if crushed else ():
        numbers = [n for n, _ in group]
        if key is not None and len(findings) < MOST_ROWS:
            findings.append(_of_row(run, [p for _, p in group if p is not None], early=bool(is_early & set(numbers))))
        elif key is None and (others_unseen(run) or not any(s.rows for _, s in steps_at(run, numbers[0]))):
            findings.append(_of_unseen_row(run, numbers))
    power = Power(quantity="clip coefficient of a step that one table row owns", smallest_detectable=LOST_COEFFICIENT)
    left_out = not_compared(run, ("norm", "norm_after"), is_compared=_is_compared)
    return answer(findings, power=power, reason=f"{looked_at(run)}{left_out.note}", undecided=left_out.undecided)


def _nothing_to_crush(run: RunRecord) -> str:
    """Why no row of an embedding table can take a step of this run from other parameters: its manifests show that no table trains, or
    nothing else; "" if one may.

    A manifest that was lost lists no parameter either, a table that no hook can see (nn.EmbeddingBag) is noted as unseen, and where
    ranks are missing, they may hold another part of the model.
    """
    facts = [r.facts for r in run.ranks]
    if not all(f.trainable and "rows of bags" not in f.unseen for f in facts):
        return ""
    if any(f.world_size > len(run.ranks) and not f.parallelism for f in facts):
        return ""
    steps = [s for r in run.ranks for s in r.steps]
    tables = {t.name: t for f in facts for t in f.tables}
    if not any(t.is_trainable for t in tables.values()) and not any(s.tables_norm is not None or s.rows for s in steps):
        return f"the model has no embedding table{' that trains' if tables else ''}"
    if all(name in tables for f in facts for name in f.trainable) and not any(s.trunk_norm is not None for s in steps):
        return "nothing but embedding tables trains: no other gradient is there to be crushed"
    return ""


def _is_compared(step: Step) -> bool:
    """Its norms tell whether a clip crushed it, or there was no such clip; a zeroed step is one that zeroed-step tells."""
    if not was_taken(step) or step.clip_action or is_zeroed(step):
        return True
    return all(x is not None and math.isfinite(x) for x in (step.norm, step.norm_after))


def _crushed(run: RunRecord, record: RankRecord, stretch: Stretch, i: int) -> bool | None:
    """None: not crushed. True: so it seems, without enough history to know what is usual."""
    step = stretch.steps[i]
    trunk, after, norm = step.trunk_norm, step.trunk_norm_after, step.norm or 0.0
    if step.num_gradients < 2 or not trunk or after is None:
        return None
    of_table = step.tables_norm is not None and step.tables_norm**2 >= OWNED * norm**2
    may_be_elsewhere = is_sharded(record) and others_unseen(run)
    if not (of_table or may_be_elsewhere):
        return None
    usual = [s.trunk_norm_after for s in stretch.history(i) if s.trunk_norm_after]
    if len(usual) < LEAST_HISTORY:
        return True if of_table and trunk <= UNSEEN_TRUNK * norm else None
    if not after < CRUSHED_TRUNK * median(usual):
        return None
    if of_table:
        return False
    return False if norm <= SPIKE * median(s.norm for s in stretch.history(i) if s.norm) else None


def _of_row(run: RunRecord, places: list[Place], *, early: bool) -> Finding:
    first = places[0]
    numbers = [p.step.number for p in places]
    step = next(s for _, s in steps_at(run, numbers[0]) if is_cut(s) and s.trunk_norm)
    norm, after = step.norm or 0.0, step.norm_after or 0.0
    known = "; there are too few earlier steps to compare with" if early else ""
    row = first.row
    healed = (
        f" The row went from norm {row.row_norm_before:.3g} to {row.row_norm_after:.3g}."
        if row.row_norm_before is not None and row.row_norm_after is not None
        else ""
    )
    return Finding(
        message=f"{row_text(run, first)} got a gradient of {row.gradient_norm:.3g} at {place_text(first)}, "
        f"where the norm of all gradients was {norm:.3g}: clipping multiplied everything by {after / norm:.1g} and left "
        f"{step.trunk_norm_after or 0:.2g} of the other parameters' {step.trunk_norm or 0:.3g}{known}. It took "
        f"{counted(len(numbers), 'step')}.{healed}{cost_text(run, numbers, movers=MOVERS)} "
        "Clip with ghoststep.clip_grad_norm_(model, max_norm), or repair the row (ghoststep fix).",
        where=place_where(run, first),
        measured=Quantity(value=after / norm, unit="clip coefficient"),
        expected=Quantity(value=LOST_COEFFICIENT, unit="clip coefficient, at least"),
        remedy="ghoststep.clip_grad_norm_",
    )


def _of_unseen_row(run: RunRecord, numbers: list[int]) -> Finding:
    record, step = next((r, s) for r, s in steps_at(run, numbers[0]) if is_cut(s))
    norm, after = step.norm or 0.0, step.norm_after or 0.0
    who = (
        f"no table row fed on rank {record.facts.rank} is the cause: another rank's is. The records of all ranks together name it"
        if others_unseen(run)
        else "an embedding table owns the gradient; which of its rows is not seen in this run"
    )
    return Finding(
        message=f"clipping multiplied every gradient by {after / norm:.1g} in {counted(len(numbers), 'step')}, first in step "
        f"{numbers[0]}, and {who}.{cost_text(run, numbers, movers=MOVERS)} Clip with ghoststep.clip_grad_norm_(model, max_norm).",
        where=Where(step=numbers[0], rank=record.facts.rank),
        measured=Quantity(value=after / norm, unit="clip coefficient"),
        expected=Quantity(value=LOST_COEFFICIENT, unit="clip coefficient, at least"),
        remedy="ghoststep.clip_grad_norm_",
    )
