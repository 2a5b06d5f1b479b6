"""GS412."""

import math
from collections.abc import Sequence

from ghoststep.evidence.base import Missing
from ghoststep.evidence.steps import RunRecord, Step, StepOutcome
from ghoststep.evidence.training import StepProbe
from ghoststep.finding import Basis, Finding, Power, Quantity, Severity, Where
from ghoststep.parameter_text import counted, listed
from ghoststep.registry import Answer, NotApplicable, Unknown, answer, check
from ghoststep.step_findings import NO_RUN, all_stretches, long_runs, looked_at, of_either, refusal

KEPT_STEPS = 5
"""Steps in a row with the gradients of the step before, from which nothing clears them. A loop that clears them starts from nothing
after every step; a few without (a batch repeated after an error) may be wanted."""


@check(code="GS412", severity=Severity.ERROR, basis=Basis.PROOF)
def gradients_not_cleared(
    probe: StepProbe | Missing, run: RunRecord | Missing = NO_RUN, *, leftover_fraction: float = 1e-3
) -> Answer:
    """Gradients of earlier steps are never cleared, so that each step adds to all before it.

    ## What it finds
    Of a setup: what `.grad` already holds when the first backward after an optimizer step reaches a parameter, against its
    gradient. Of a run: 5 steps in a row in which, from an optimizer's step to its next one, nothing outside of a backward replaced
    its gradients or wrote to them (clipping and unscaling before the step do not count), and their norms were the same when the
    next backward began.

    ## Why it matters
    The effective gradient is the sum over the whole history: it grows, points into the past, and clipping hides its size.

    ## When it is not a problem
    Accumulation between two steps of the same optimizer; a second optimizer that steps more rarely. Of a run: gradients that are
    replaced by hand before each step, and steps inside a backward, are not judged; where only some of an optimizer's gradients
    are cleared, a run is silent and a setup is not.

    ## How to confirm by hand
    Print the norm of one `.grad` just before `backward()`.

    ## How to fix
    `optimizer.zero_grad()` once for each step, of the optimizer (or model) that holds all trained parameters.

    ## Options
    `leftover_fraction`: leftover over gradient norm from which it counts, of a setup (1e-3).

    ## References
    None.
    """
    about_setup = probe if isinstance(probe, Missing) else lambda: _of_setup(probe, leftover_fraction)
    return of_either(about_setup, run if isinstance(run, Missing) else lambda: _of_run(run))


def _of_setup(probe: StepProbe, leftover_fraction: float) -> Answer:
    if not probe.is_users:
        return NotApplicable(reason="the setup has no train_step whose clearing could be watched")
    if len(probe.steps) < 2:
        return Unknown(reason=f"{counted(len(probe.steps), 'optimizer step')} in {probe.num_calls} calls; two are needed")
    left = [p for p in probe.parameters if p.leftover > leftover_fraction * p.largest_gradient > 0]
    findings = []
    if left:
        worst = max(left, key=lambda p: p.leftover)
        findings.append(
            Finding(
                message=f"{len(left)} of {counted(len(probe.parameters), 'parameter')} in the optimizer "
                f"({listed([p.name for p in left])}) still hold "
                f"the gradient of an earlier step when the next backward begins (norm {worst.leftover:.3g} left in "
                f"{worst.name}, where a step "
                f"saw up to {worst.largest_gradient:.3g}): steps add up over the whole run. Call "
                "optimizer.zero_grad() once for each step.",
                where=Where(parameter=worst.name),
                measured=Quantity(value=worst.leftover, unit="L2 norm left over"),
                expected=Quantity(value=0.0, unit="L2 norm left over"),
                remedy="optimizer.zero_grad() before backward or after step",
            )
        )
    power = Power(quantity="leftover over gradient", smallest_detectable=leftover_fraction, unit="fraction")
    return answer(findings, power=power, reason=f"{counted(len(probe.steps), 'step')} watched")


def _of_run(run: RunRecord) -> Answer:
    refused = refusal(run, "kept_gradients", at_least=KEPT_STEPS)
    if refused:
        return Unknown(reason=refused)
    num_kept = 0
    for record, stretch in all_stretches(run):
        flags = [_has_kept(s) for s in stretch.steps]
        num_kept = max(num_kept, sum(flags))
        for start, stop in long_runs(stretch, flags, KEPT_STEPS):
            return answer([_kept(stretch.steps[start:stop], record.facts.rank)])
    if num_kept >= KEPT_STEPS:
        return Unknown(
            reason=f"in {num_kept} steps the gradients of the step before were still there, though not in {KEPT_STEPS} seen from their "
            "first on: zero_grad may be called more rarely than step"
        )
    taken = [s for r in run.ranks for s in r.steps if s.outcome is StepOutcome.STEPPED]
    num_blind = sum(s.kept_gradients is None for s in taken)
    if 2 * num_blind > len(taken):
        return Unknown(reason=f"in {num_blind} of {counted(len(taken), 'step')} it was not seen whether gradients were cleared")
    power = Power(quantity="steps in a row whose gradients were not cleared", smallest_detectable=KEPT_STEPS, unit="steps")
    return answer((), power=power, reason=looked_at(run))


def _has_kept(step: Step) -> bool:
    after = step.norm_after
    return bool(step.kept_gradients) and step.outcome is StepOutcome.STEPPED and after is not None and after > 0


def _kept(steps: Sequence[Step], rank: int) -> Finding:
    first, last = steps[0], steps[-1]
    grew = ""
    if first.norm and last.norm and math.isfinite(first.norm) and math.isfinite(last.norm):
        grew = f" (norm {first.norm:.3g} in step {first.number}, {last.norm:.3g} in step {last.number})"
    return Finding(
        message=f"in {counted(len(steps), 'step')} in a row, from step {first.number} on, the gradients that the optimizer had used "
        f"in the step before were still there, unchanged, when the next backward began: each step adds to all before it{grew}. Call "
        "optimizer.zero_grad() once for each step, of the optimizer (or model) that holds all trained parameters.",
        where=Where(step=first.number, rank=rank),
        measured=Quantity(value=len(steps), unit="steps whose gradients were not cleared"),
        expected=Quantity(value=0, unit="steps whose gradients were not cleared"),
        remedy="optimizer.zero_grad() before backward or after step",
    )
