"""GS606."""

import math

from ghoststep.evidence.base import Missing
from ghoststep.evidence.training import LiveWiring, OptimizerGroup, StepProbe
from ghoststep.finding import Basis, Finding, Power, Quantity, Severity, Where
from ghoststep.registry import Answer, NotApplicable, Unknown, answer, check


@check(code="GS606", severity=Severity.ERROR, basis=Basis.PROOF)
def decay_on_frozen_rows(wiring: LiveWiring, probe: StepProbe | Missing, *, slow_half_life_steps: float = 1e5) -> Answer:
    """Rows of a table that are meant to stay, since their gradient is zeroed, shrink by weight decay.

    ## What it finds
    Table rows whose tokens the batch feeds, whose gradient in the table is nevertheless exactly zero (a hook, or code between
    backward and step, zeroes it), in a group with weight decay. Real steps show by how much they shrink; where none can be taken,
    the arithmetic does: 1 - lr · weight_decay a step.

    ## Why it matters
    Zeroing a gradient stops the gradient part of the update only. Decay (decoupled, or added inside the optimizer) still pulls
    the rows to zero, and the model forgets tokens that are not even in the data.

    ## When it is not a problem
    No weight decay on the table; rows that are absent from the batch (they decay as the whole model does); a frozen table.

    ## How to confirm by hand
    Norms of the rows before and after a hundred steps.

    ## How to fix
    Put the table into a group with `weight_decay=0`, or write the frozen rows back after each step; or train the new rows only
    (PEFT `trainable_token_indices`).

    ## Options
    `slow_half_life_steps`: rows that take more steps than this to lose half of their norm give a warning only (1e5).

    ## References
    Arithmetic of decoupled weight decay; measured again on a tiny model: 200 steps at lr 0.01, decay 0.1 keep 0.82 of the norm.
    """
    if not wiring.has_optimizer:
        return Unknown(reason="the setup has no optimizer")
    if not wiring.tables:
        if wiring.gradient_reason:
            return Unknown(reason=wiring.gradient_reason)
        return NotApplicable(reason="no table is trained")
    padding = wiring.padding_row.index if wiring.padding_row is not None else -1
    findings = []
    for parameter, group_index, rows, ratio in _masked(wiring, probe):
        kept = tuple(i for i in rows if i != padding)
        group = next((g for g in wiring.groups if g.index == group_index), None)
        if not kept or group is None or not group.weight_decay > 0:
            continue
        if ratio is not None and not ratio < 1:
            continue
        findings.append(_finding(parameter, group, kept, ratio, probe, slow_half_life_steps))
    power = Power(quantity="fed table rows with zeroed gradient that decay", smallest_detectable=1, unit="table rows")
    return answer(findings, power=power)


def _masked(wiring: LiveWiring, probe: StepProbe | Missing) -> list[tuple[str, int | None, tuple[int, ...], float | None]]:
    """Parameter, group, masked rows and the median ratio of their norms (None where no step was taken)."""
    if isinstance(probe, Missing) or not probe.steps:
        found: list[tuple[str, int | None, tuple[int, ...], float | None]] = []
        for t in wiring.tables:
            p = wiring.named(t.parameter)
            found.append((t.parameter, p.group if p else None, t.masked_rows, None))
        return found
    return [(r.parameter, r.group, r.rows, sorted(r.ratios)[len(r.ratios) // 2] if r.ratios else None) for r in probe.rows]


def _finding(
    parameter: str, group: OptimizerGroup, rows: tuple[int, ...], ratio: float | None, probe: StepProbe | Missing, slow: float
) -> Finding:
    lr = group.lr or group.initial_lr or 0.0
    if ratio is not None and not isinstance(probe, Missing):
        num_steps = len(probe.steps)
        proof = f"in {num_steps} real steps they lost {1 - ratio:.2g} of their norm"
        half_life = math.log(2) * num_steps / -math.log(ratio) if ratio > 0 else 1.0
    else:
        proof = f"each step multiplies them by 1 - {lr:g} · {group.weight_decay:g}"
        half_life = math.log(2) / (lr * group.weight_decay) if lr > 0 else math.inf
    first = ", ".join(str(i) for i in rows[:5]) + (", ..." if len(rows) > 5 else "")
    return Finding(
        message=f"{len(rows)} table rows of {parameter} ({first}) have a gradient of exactly zero although the batch "
        "feeds their tokens, so "
        f"they are meant to stay; weight decay {group.weight_decay:g} (group {group.index}, lr {lr:g}) still shrinks "
        f"them: {proof}, half of it "
        f"is gone after {half_life:,.0f} steps. Put the table into a group with weight_decay=0, or write the rows "
        "back after each step.",
        where=Where(parameter=parameter, table_row=rows[0]),
        measured=Quantity(value=1.0 if ratio is None else ratio, unit="norm after over before"),
        expected=Quantity(value=1.0, unit="norm after over before"),
        severity=Severity.ERROR if half_life <= slow else Severity.WARNING,
        remedy="weight_decay=0 for the table's group",
    )
