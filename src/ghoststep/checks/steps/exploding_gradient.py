"""GS418."""

import math

from ghoststep.evidence.steps import RankRecord, RunRecord, Step, StepOutcome, TensorOutlier
from ghoststep.finding import Basis, Finding, Power, Quantity, Severity, Where
from ghoststep.parameter_text import counted
from ghoststep.registry import Answer, Unknown, answer, check
from ghoststep.step_comparison import not_compared
from ghoststep.step_findings import Stretch, all_stretches, is_cut, is_nan_clipped, is_zeroed, looked_at, median, owner, refusal

LEAST_HISTORY = 20
AT_ONCE = 1e3
"""Factor over the parameter's own median, and over that of the whole norm, which no healthy step reaches."""
WINDOW, IN_WINDOW = 16, 8
"""A lesser rise of the whole norm counts if the parameter's factor lasts in half of 16 steps ..."""
LASTING_TOTAL = 10.0
"""... while the whole norm is ten times its own median."""


@check(code="GS418", severity=Severity.WARNING, basis=Basis.MEASURED)
def exploding_gradient(run: RunRecord) -> Answer:
    """Gradients are far above their own history, in single parameters and as a whole.

    ## What it finds
    Steps in which a parameter's gradient norm is 1,000 times the median of its own last norms and the whole norm 1,000 times its
    own (20 to 256 steps); or 8 of 16 steps with that factor while the whole norm is ten times its median. The largest factor is
    named. Steps that another check explains (zeroed-step, crushed-step, nan-by-infinite-clip, nonfinite-gradient) are left out.

    ## Why it matters
    Clipping throws such a step away; without clipping it throws the weights away.

    ## When it is not a problem
    A parameter that begins to train (LoRA's A, a gate that starts at 0, an expert that gets its first tokens): the whole norm
    does not follow. Batches with many more tokens under a summed loss.

    ## How to confirm by hand
    The gradient norm of the named parameter over the steps around the named one.

    ## How to fix
    Look at the batch of the named step; lower the learning rate; clip; a warm-up.

    ## Options
    None.

    ## References
    None.
    """
    refused = refusal(run, "outliers", "norm", at_least=LEAST_HISTORY + 1)
    if refused:
        return Unknown(reason=refused)
    findings = []
    for record, stretch in all_stretches(run):
        marked = [i for i, s in enumerate(stretch.steps) if s.outliers]
        if marked:
            findings += _exploding(run, record, stretch, marked)
    power = Power(quantity="factor over the parameter's own median", smallest_detectable=AT_ONCE)
    left_out = not_compared(run, ("norm",))
    return answer(findings, power=power, reason=f"{looked_at(run)}{left_out.note}", undecided=left_out.undecided)


def _exploding(run: RunRecord, record: RankRecord, stretch: Stretch, marked: list[int]) -> list[Finding]:
    recent: dict[str, list[int]] = {}
    findings: list[Finding] = []
    quiet_until = -1
    for i in marked:
        step = stretch.steps[i]
        large = [o for o in step.outliers if o.typical > 0 and math.isfinite(o.norm) and o.norm >= AT_ONCE * o.typical]
        if not large or _is_explained(run, step):
            continue
        worst = max(large, key=_factor)
        lasting = []
        for o in large:
            seen = [j for j in recent.get(o.parameter, []) if j > i - WINDOW] + [i]
            recent[o.parameter] = seen
            lasting += [o] if len(seen) >= IN_WINDOW else []
        if i < max(stretch.first, LEAST_HISTORY) or i < quiet_until:
            continue
        if _total_factor(stretch, i, 1) >= AT_ONCE:
            findings.append(_finding(record, stretch, i, worst, len(large), ""))
        elif lasting and _total_factor(stretch, i, WINDOW) >= LASTING_TOTAL:
            named = max(lasting, key=_factor)
            lasts = f", in {len(recent[named.parameter])} of the last {WINDOW} steps"
            findings.append(_finding(record, stretch, i, named, len(large), lasts))
        else:
            continue
        quiet_until = i + WINDOW  # one finding an episode
    return findings


def _is_explained(run: RunRecord, step: Step) -> bool:
    if step.outcome is not StepOutcome.STEPPED or step.clip_action or step.num_nonfinite_before:
        return True
    return is_zeroed(step) or is_nan_clipped(step) or (is_cut(step) and owner(run, step.number) is not None)


def _factor(outlier: TensorOutlier) -> float:
    return outlier.norm / outlier.typical


def _total_factor(stretch: Stretch, i: int, width: int) -> float:
    """The whole norm (median over the last `width` steps) over its median before them, for as many tokens."""
    before = [s for s in stretch.history(i - width + 1) if s.norm and s.norm < math.inf]
    now = [s for s in stretch.steps[max(0, i - width + 1) : i + 1] if s.norm]
    if len(before) < LEAST_HISTORY or not now:
        return 0.0
    usual_tokens = median(s.num_tokens for s in before)
    tokens = median(s.num_tokens for s in now)
    more = max(1.0, tokens / usual_tokens) if usual_tokens > 0 else 1.0
    return median(s.norm or 0.0 for s in now) / (median(s.norm or 0.0 for s in before) * more)


def _finding(record: RankRecord, stretch: Stretch, i: int, worst: TensorOutlier, num_large: int, lasts: str) -> Finding:
    step = stretch.steps[i]
    usual = median(s.norm for s in stretch.history(i) if s.norm)
    also = f"; {counted(num_large - 1, 'other parameter')} left its history too" if num_large > 1 else ""
    clipped = f", and clipping left {step.norm_after:.3g} of it" if step.norm_after and is_cut(step) else ""
    return Finding(
        message=f"the gradient of {worst.parameter} has a norm of {worst.norm:.3g} in step {step.number}{lasts}, where "
        f"{worst.typical:.3g} is usual{also}. The whole norm is {step.norm or 0:.3g} (usual: {usual:.3g}){clipped}. "
        "Look at this step's batch; lower the learning rate or clip.",
        where=Where(parameter=worst.parameter, step=step.number, rank=record.facts.rank),
        measured=Quantity(value=_factor(worst), unit="gradient norm over its median"),
        expected=Quantity(value=AT_ONCE, unit="gradient norm over its median, at most"),
    )
