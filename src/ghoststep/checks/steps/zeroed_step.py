"""GS401."""

import math

from ghoststep.evidence.steps import RunRecord, Step, StepOutcome
from ghoststep.finding import Basis, Finding, Power, Quantity, Severity, Where
from ghoststep.parameter_text import counted
from ghoststep.registry import Answer, Unknown, answer, check
from ghoststep.step_findings import Place, by_row, is_sharded, is_zeroed, looked_at, others_unseen, refusal, steps_at
from ghoststep.step_texts import cost_text, fate_text, place_text, place_where, row_text

MOST_ROWS = 20
"""Table rows that get a finding of their own; the rest share one."""


@check(code="GS401", severity=Severity.ERROR, basis=Basis.PROOF)
def zeroed_step(run: RunRecord) -> Answer:
    """A training step in which every gradient was set to zero.

    ## What it finds
    Steps before whose clipping the gradients were finite and not all zero, and whose every gradient was exactly zero when the
    optimizer stepped, though the loss was finite. The table row whose gradient made the norm overflow is named, with its place;
    under several ranks, the rank that fed it. One finding a row, however many steps it took.

    ## Why it matters
    A row of norm 1e-30 gets a gradient of 1e28. The float32 norm of all gradients is then inf, `clip_grad_norm_` multiplies by
    1 / inf = 0, and the optimizer moves the weights by old momentum and decay alone. Neither loss nor log shows it, unless the
    norm of that very step is logged. The row gets no gradient either: it is locked, and every batch with its token is lost.

    ## When it is not a problem
    Gradients that backward itself leaves at zero (a GRPO group of equal rewards): they are silent here, as are steps without
    any gradient, steps at learning rate 0, skips of a loss scaler, and clipping that leaves something.

    ## How to confirm by hand
    After clipping: `all(not p.grad.any() for p in model.parameters() if p.grad is not None)`.

    ## How to fix
    `ghoststep.clip_grad_norm_(model, max_norm)`: it caps the row and keeps all else, and the row heals. Or repair the rows
    (`ghoststep fix`). Where no row is to blame: a clip bound above 0, and `zero_grad` before `backward` or after `step`.

    ## Options
    None.

    ## References
    torch.nn.utils.clip_grad_norm_: coefficient max_norm / (norm + 1e-6). The float32 norm overflows past 1.84e19.
    """
    refused = refusal(run, "num_zero_after", "num_gradients", "norm_after")
    if refused:
        return Unknown(reason=refused)
    lost = {s.number for r in run.ranks for s in r.steps if s.num_zero_after and is_zeroed(s)}
    findings, rest = [], []
    for key, group in by_row(run, lost).items() if lost else ():
        places = [p for _, p in group if p is not None]
        if key is None:
            findings += _without_row(run, [n for n, _ in group])
        elif len(findings) < MOST_ROWS:
            findings.append(_of_row(run, places))
        else:
            rest += places
    if rest:
        findings.append(_of_the_rest(rest))
    power = Power(quantity="steps whose gradients all became zero", smallest_detectable=1, unit="steps")
    return answer(findings, power=power, reason=looked_at(run))


def _of_row(run: RunRecord, places: list[Place]) -> Finding:
    first = places[0]
    step = first.step
    numbers = [p.step.number for p in places]
    how = (
        "the float32 norm of all gradients overflowed to inf, and clipping multiplied every one of them by 0"
        if _norm(run, step.number) == math.inf
        else f"the norm of all gradients was {_norm(run, step.number):.3g}, and none of them reached the optimizer"
    )
    return Finding(
        message=f"{row_text(run, first)} got a gradient of {first.row.gradient_norm:.3g} at {place_text(first)}: {how} "
        f"({counted(step.num_gradients, 'tensor')}, {step.num_gradients - step.num_zero_before} not zero before, all zero after; "
        f"loss {_loss(step)}). It took {counted(len(numbers), 'step')} of {_num_steps(run)}."
        f"{fate_text(places)}{cost_text(run, numbers)}{_skipped(places)} Clip with ghoststep.clip_grad_norm_(model, max_norm), or "
        "repair the row (ghoststep fix).",
        where=place_where(run, first),
        measured=Quantity(value=len(numbers), unit="lost steps"),
        expected=Quantity(value=0, unit="lost steps"),
        severity=_severity([p.step for p in places]),
        remedy="ghoststep.clip_grad_norm_",
    )


def _of_the_rest(places: list[Place]) -> Finding:
    rows = sorted({p.row.token_id for p in places})
    shown = ", ".join(str(i) for i in rows[:8]) + (", ..." if len(rows) > 8 else "")
    return Finding(
        message=f"{counted(len(rows), 'further table row')} took {counted(len(places), 'step')} in the same way: {shown}.",
        where=Where(parameter=places[0].row.table),
        measured=Quantity(value=len(places), unit="lost steps"),
        expected=Quantity(value=0, unit="lost steps"),
        remedy="ghoststep.clip_grad_norm_",
    )


def _without_row(run: RunRecord, numbers: list[int]) -> list[Finding]:
    """One finding for overflows that no table row caused, one for gradients that were cleared."""
    overflown = [n for n in numbers if _norm(run, n) == math.inf]
    cleared = [n for n in numbers if n not in set(overflown)]
    return [_one_without_row(run, group, is_overflow=group is overflown) for group in (overflown, cleared) if group]


def _one_without_row(run: RunRecord, numbers: list[int], *, is_overflow: bool) -> Finding:
    record, step = next((r, s) for r, s in steps_at(run, numbers[0]) if is_zeroed(s))
    severity = Severity.ERROR
    if is_overflow and others_unseen(run):
        cause = (
            "the float32 norm of all gradients overflowed to inf, and clipping multiplied every one by 0; nothing that this rank "
            "fed is large enough, so another rank's batch did it"
        )
        fix = "Look at the records of all ranks together: the one that fed the token is named there."
    elif is_overflow:
        named = max(step.outliers, key=lambda o: o.norm, default=None)
        blamed = f", {named.parameter} with the largest gradient" if named is not None else ""
        cause = f"the float32 norm of all gradients overflowed to inf{blamed}, and clipping multiplied every one by 0"
        fix = "Clip with ghoststep.clip_grad_norm_(model, max_norm), and find what is so large."
    elif step.clip_bound == 0:
        cause = "gradients are clipped to a norm of 0"
        fix = "Give the clip a bound above 0 (no bound: do not clip)."
    elif is_sharded(record):
        cause = (
            "the clip multiplied every gradient by 0: the norm overflowed in the shards of another rank, or is not shown here"
        )
        fix = "Look at the records of all ranks together: the one that fed the token is named there."
    else:
        cause = f"between backward, which left a norm of {step.norm or 0:.3g}, and the optimizer's step something set them to 0"
        fix = "Call zero_grad before backward or after step; a guard of your own had better not call step."
        severity = Severity.ERROR if 2 * len(numbers) > _num_steps(run) else Severity.WARNING
    return Finding(
        message=f"every gradient was exactly zero in {counted(len(numbers), 'step')} of {_num_steps(run)}, first in step "
        f"{numbers[0]} (loss {_loss(step)}): {cause}.{cost_text(run, numbers)} {fix}",
        where=Where(step=numbers[0], rank=record.facts.rank),
        measured=Quantity(value=len(numbers), unit="lost steps"),
        expected=Quantity(value=0, unit="lost steps"),
        severity=severity,
    )


def _norm(run: RunRecord, number: int) -> float:
    """The largest that any rank saw: one rank's overflow is everybody's."""
    return max((s.norm for _, s in steps_at(run, number) if s.norm is not None), default=math.nan)


def _loss(step: Step) -> str:
    return "not seen" if step.loss is None else f"{step.loss:.4g}"


def _num_steps(run: RunRecord) -> int:
    return max(len(r.steps) for r in run.ranks)


def _severity(steps: list[Step]) -> Severity:
    """A step that ghoststep skipped wrote nothing: only the batch is lost."""
    return Severity.ERROR if any(s.outcome is StepOutcome.STEPPED for s in steps) else Severity.WARNING


def _skipped(places: list[Place]) -> str:
    skipped = sum(p.step.outcome is StepOutcome.SKIPPED_BY_POLICY for p in places)
    return f" ghoststep skipped {skipped} of them." if skipped else ""
