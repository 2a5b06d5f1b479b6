"""GS406."""

import math

from ghoststep.evidence.base import Missing
from ghoststep.evidence.steps import RunRecord
from ghoststep.evidence.training import LiveWiring, ParameterSteps, StepProbe
from ghoststep.finding import Basis, Finding, Power, Quantity, Severity, Where
from ghoststep.parameter_text import counted, listed
from ghoststep.registry import Answer, Unknown, answer, check
from ghoststep.step_findings import NO_RUN, of_either
from ghoststep.unchanged_run import of_run

_MANTISSA_BITS = {"bfloat16": 7, "float16": 10, "float32": 23, "float64": 52}


@check(code="GS406", severity=Severity.ERROR, basis=Basis.MEASURED)
def unchanged_weights(
    wiring: LiveWiring | Missing,
    probe: StepProbe | Missing,
    run: RunRecord | Missing = NO_RUN,
    *,
    lost_fraction: float = 0.5,
    error_fraction: float = 0.9,
) -> Answer:
    """Optimizer steps leave the weights as they are.

    ## What it finds
    Of a setup, after a few real steps on real batches: no step was taken at all; a learning rate of 0 that no schedule ever raises; or
    elements with a gradient whose value did not change, because the update is smaller than half the spacing of the numbers
    around the weight (bf16 at a small learning rate). Of a run: 20 steps in a row, with gradients and a learning rate above 0,
    after which not one weight of the watch's sample is another; 50 steps in a row at a learning rate of 0 in every group, or
    64 with gradients as large as ever that moved the sample by less than 6e-8 of its norm (clipped to nearly nothing), or
    most of 128 and more that did at a learning rate that no longer rises (a schedule that is over); in a
    window of 64 steps near the full learning rate, elements of 16-bit weights that had a gradient in each of them and one and
    the same value all the while (torch's own optimizers); or 20 steps and more, from the first one on, in which not one
    parameter had a gradient.

    ## Why it matters
    The loss is flat, or only a few parameters learn; nothing raises.

    ## When it is not a problem
    A first step at learning rate 0 (warm-up); groups kept at 0 beside others; gradients that are exactly zero (equal rewards in a
    GRPO group); stochastic rounding or Kahan summation, which lose nothing over many steps (an optimizer that keeps further
    tensors gives unknown).

    ## How to confirm by hand
    `before = p.detach().clone()`, a few steps, then `(p != before).float().mean()`.

    ## How to fix
    Keep fp32 master weights (load the model in float32 and use autocast), or an optimizer with Kahan summation or stochastic
    rounding; set the learning rate.

    ## Options
    `lost_fraction`: share of the elements with a gradient that did not change, from which this is a warning (0.5). Of a run:
    of its 16-bit elements.
    `error_fraction`: from which it is an error (0.9).

    ## References
    Spacing of bf16 around 0.02: 1.2e-4, so that updates below 6e-5 are lost.
    """
    about_run = run if isinstance(run, Missing) else lambda: of_run(run, lost_fraction, error_fraction)
    if isinstance(wiring, Missing):
        return of_either(wiring, about_run)
    about_setup = probe if isinstance(probe, Missing) else lambda: _of_setup(wiring, probe, lost_fraction, error_fraction)
    return of_either(about_setup, about_run)


def _of_setup(wiring: LiveWiring, probe: StepProbe, lost_fraction: float, error_fraction: float) -> Answer:
    if not probe.steps:
        return _no_step(wiring, probe)
    if all(s.gradient_norm == 0.0 for s in probe.steps):
        if any(s.backward_norm > 0 for s in probe.steps):
            return Unknown(reason="no gradient reached a step (gradients-cleared-before-step judges that)")
        return Unknown(reason=f"every gradient was exactly zero in {counted(len(probe.steps), 'step')}: nothing was to change")
    rate = _rate_findings(wiring, probe)
    if rate is not None:
        return rate
    pushed = [p for p in probe.parameters if p.num_pushed and _lr(probe, p.group, -1) > 0]
    if not pushed:
        return Unknown(reason="no element with a finite gradient under a learning rate above 0 was seen in these steps")
    num_pushed, num_lost = sum(p.num_pushed for p in pushed), sum(p.num_lost for p in pushed)
    share = num_lost / num_pushed
    still = [p for p in pushed if p.num_changed == 0]
    power = Power(quantity="elements with a gradient that stay the same", smallest_detectable=lost_fraction, unit="fraction")
    reason = f"{1 - share:.1%} of {num_pushed:,} elements with a gradient changed in {counted(len(probe.steps), 'step')}"
    if share < lost_fraction and not still:
        return answer((), power=power, reason=reason)
    if any(p.kept_state for p in pushed):
        return Unknown(
            reason=f"{reason}; the optimizer keeps further tensors or draws random numbers: it may "
            "carry the lost part on (Kahan summation) or round at random"
        )
    if _is_warming_up(wiring, probe):
        return Unknown(reason=f"{reason}; the learning rate is still far below its base, so that this says little")
    if share >= lost_fraction:
        severity = Severity.ERROR if share >= error_fraction else Severity.WARNING
        return answer([_lost(probe, pushed, share, num_lost, num_pushed, severity)])
    return answer([_lost(probe, still, 1.0, sum(p.num_lost for p in still), sum(p.num_pushed for p in still), Severity.NOTE)])


def _no_step(wiring: LiveWiring, probe: StepProbe) -> Answer:
    if probe.num_skipped or probe.scales is not None:
        return Unknown(reason="the scaler skipped every step (skipped-by-scaler judges that)")
    if not any(g.num_tensors > g.num_frozen for g in wiring.groups):
        return Unknown(reason="the optimizer holds nothing trainable (frozen-by-accident judges that)")
    if probe.changed_outside:
        return Unknown(reason="the optimizer never stepped, but parameters outside it changed: another optimizer is in use")
    if not wiring.gradient_reason and all(not p.norms for p in probe.parameters) and not probe.parameters:
        return Unknown(reason="the optimizer holds no trainable parameter of the model")
    finding = Finding(
        message=f"{'train_step' if probe.is_users else 'the loop'} ran {probe.num_calls} times without one optimizer "
        "step on a gradient: the "
        "weights never change. Call loss.backward() and step() of the optimizer that the setup names; if it "
        "accumulates over more "
        "micro-batches, give accumulation_steps.",
        where=Where(),
        measured=Quantity(value=0, unit="optimizer steps"),
        expected=Quantity(value=1, unit="optimizer steps, at least"),
    )
    return answer([finding])


def _lr(probe: StepProbe, group: int, step: int) -> float:
    lrs = probe.steps[step].lrs
    return lrs[group] if group < len(lrs) and not math.isnan(lrs[group]) else math.inf


def _rate_findings(wiring: LiveWiring, probe: StepProbe) -> Answer | None:
    """The answer where the learning rate is 0 in every step of every group that trains; None where it is not."""
    groups = sorted({p.group for p in probe.parameters})
    dead = [g for g in groups if all(_lr(probe, g, s) == 0 for s in range(len(probe.steps)))]
    if not dead or len(dead) < len(groups):
        return None
    if probe.lrs_ahead > 0:
        return Unknown(reason=f"the learning rate is 0 in these steps and rises later (to {probe.lrs_ahead:.3g}): a warm-up")
    base = [g.initial_lr for g in wiring.groups if g.initial_lr]
    if math.isnan(probe.lrs_ahead) and base:
        return Unknown(reason=f"the learning rate is 0 now and its base is {base[0]:g}: give the setup its scheduler")
    later = "" if math.isnan(probe.lrs_ahead) else ", and the scheduler keeps it there"
    finding = Finding(
        message=f"the learning rate is 0 in all {len(probe.steps)} steps{later}: gradients arrive (norm "
        f"{probe.steps[-1].gradient_norm:.3g}) "
        "and nothing ever changes. Set the learning rate, or give the scheduler a length above 0.",
        where=Where(),
        measured=Quantity(value=0.0, unit="learning rate"),
        basis=Basis.PROOF,
        remedy="set lr in the optimizer",
    )
    return answer([finding])


def _is_warming_up(wiring: LiveWiring, probe: StepProbe) -> bool:
    last = max((lr for lr in probe.steps[-1].lrs if not math.isnan(lr)), default=0.0)
    base = [g.initial_lr for g in wiring.groups if g.initial_lr]
    later = max([probe.lrs_ahead if not math.isnan(probe.lrs_ahead) else 0.0, *base], default=0.0)
    return later > 2 * last


def _lost(
    probe: StepProbe, pushed: list[ParameterSteps], share: float, num_lost: int, num_pushed: int, severity: Severity
) -> Finding:
    worst = max(pushed, key=lambda p: p.num_lost)
    lr = _lr(probe, worst.group, -1)
    spacing = _spacing(worst)
    proof = f"around {worst.typical_value:.2g}, the usual size in {worst.name}, {worst.dtype} numbers are {spacing:.2g} apart"
    message = f"{num_lost:,} of {num_pushed:,} elements with a gradient ({share:.0%}) have the very same value after "
    message += f"{len(probe.steps)} steps at lr "
    message += f"{lr:.3g}: the updates are lost to rounding ({proof}, an update under half of that vanishes)."
    if severity is Severity.NOTE:
        names = listed([p.name for p in pushed])
        message = f"{counted(len(pushed), 'parameter')} ({names}) did not change at all in {len(probe.steps)} steps "
        message += f"at lr {lr:.3g}, while others did: "
        message += f"the updates are lost to rounding ({proof})."
    message += " Keep the weights in float32 and use autocast, or an optimizer with Kahan summation or stochastic rounding."
    return Finding(
        message=message,
        where=Where(parameter=worst.name),
        measured=Quantity(value=share, unit="fraction of elements lost"),
        severity=severity,
        remedy="fp32 master weights",
    )


def _spacing(p: ParameterSteps) -> float:
    if p.typical_value <= 0 or not math.isfinite(p.typical_value):
        return 0.0
    return float(2.0 ** (math.floor(math.log2(p.typical_value)) - _MANTISSA_BITS.get(p.dtype, 23)))
