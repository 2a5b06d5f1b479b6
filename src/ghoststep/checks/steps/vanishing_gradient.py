"""GS419."""

from ghoststep.evidence.steps import RankRecord, RunRecord, StepOutcome, TensorOutlier
from ghoststep.finding import Basis, Finding, Power, Quantity, Severity, Where
from ghoststep.registry import Answer, Unknown, answer, check
from ghoststep.step_comparison import not_compared
from ghoststep.step_findings import Stretch, all_stretches, looked_at, median, refusal

LEAST_HISTORY = 20
VANISHED = 1e-6
"""Of the parameter's own median gradient norm."""
WINDOW, IN_WINDOW = 16, 12
"""It must last: 12 of 16 steps."""
TOTAL_STAYS = 0.1
"""Of the median of the whole norm: where all gradients shrink together, the run converges."""


@check(code="GS419", severity=Severity.WARNING, basis=Basis.MEASURED)
def vanishing_gradient(run: RunRecord) -> Answer:
    """A parameter's gradient has almost gone, though it had one before and the others still have theirs.

    ## What it finds
    A gradient norm under a millionth of the median of the parameter's own last norms, in 12 of 16 steps, while the whole norm stays
    above a tenth of its median over the 20 to 256 steps before. Exactly zero is not looked at.

    ## Why it matters
    A saturated gate, dead units or a normalisation that divides by a huge number: this part has stopped learning, and the loss
    tells nothing of it.

    ## When it is not a problem
    Experts that get no tokens for a while (exactly zero). A run that converges: the whole norm shrinks along. All
    gradients zero (GRPO groups of equal reward).

    ## How to confirm by hand
    The gradient norm of the named parameter over the last steps, and the activations in front of it.

    ## How to fix
    Look for what saturates: a learning rate too high for this part, a scale that ran away, a missing residual.

    ## Options
    None.

    ## References
    None.
    """
    refused = refusal(run, "outliers", "norm", at_least=LEAST_HISTORY + WINDOW)
    if refused:
        return Unknown(reason=refused)
    findings = []
    for record, stretch in all_stretches(run):
        marked = [i for i, s in enumerate(stretch.steps) if s.outliers]
        if marked:
            findings += _vanishing(record, stretch, marked)
    power = Power(quantity="gradient norm over its own median", smallest_detectable=VANISHED)
    left_out = not_compared(run, ("norm",))
    return answer(findings, power=power, reason=f"{looked_at(run)}{left_out.note}", undecided=left_out.undecided)


def _vanishing(record: RankRecord, stretch: Stretch, marked: list[int]) -> list[Finding]:
    recent: dict[str, list[int]] = {}
    quiet_until: dict[str, int] = {}
    findings = []
    for i in marked:
        step = stretch.steps[i]
        if step.outcome is not StepOutcome.STEPPED:
            continue
        for o in step.outliers:
            if not 0 < o.norm < VANISHED * o.typical:
                continue
            seen = [j for j in recent.get(o.parameter, []) if j > i - WINDOW] + [i]
            recent[o.parameter] = seen
            lasts = len(seen) >= IN_WINDOW and i >= max(stretch.first, LEAST_HISTORY)
            if lasts and i >= quiet_until.get(o.parameter, 0) and _others_stay(stretch, i):
                findings.append(_finding(record, step.number, o, len(seen)))
                quiet_until[o.parameter] = len(stretch.steps)
    return findings


def _others_stay(stretch: Stretch, i: int) -> bool:
    before = [s.norm for s in stretch.history(i - WINDOW + 1) if s.norm]
    now = [s.norm for s in stretch.steps[max(0, i - WINDOW + 1) : i + 1] if s.norm is not None]
    return len(before) >= LEAST_HISTORY and median(now) >= TOTAL_STAYS * median(before)


def _finding(record: RankRecord, number: int, gone: TensorOutlier, num_steps: int) -> Finding:
    return Finding(
        message=f"the gradient of {gone.parameter} is {gone.norm:.3g} in {num_steps} of the {WINDOW} steps up to step {number}, where "
        f"{gone.typical:.3g} is usual for it, while the whole norm is as ever: this part has stopped learning. Look at the activations "
        "in front of it for what saturates or is cut off.",
        where=Where(parameter=gone.parameter, step=number, rank=record.facts.rank),
        measured=Quantity(value=gone.norm / gone.typical, unit="gradient norm over its median"),
        expected=Quantity(value=VANISHED, unit="gradient norm over its median, at least"),
    )
