"""GS507."""

import math

from ghoststep.evidence.training import ContrastiveProbe
from ghoststep.finding import Basis, Finding, Power, Quantity, Severity, Where
from ghoststep.registry import Answer, Unknown, answer, check

_ABOVE = 0.01
_USUAL = (5.0, 200.0)
"""Scales in use. One whose inverse lies here was most likely divided by."""


@check(code="GS507", severity=Severity.ERROR, basis=Basis.MEASURED)
def capped_logit_scale(
    probe: ContrastiveProbe, *, floor_fraction: float = 0.25, least_examples: int = 8, least_fixed_scale: float = 1.5
) -> Answer:
    """The logit scale (temperature) of a contrastive loss keeps even perfect embeddings far above zero.

    ## What it finds
    The user's own loss is driven with chosen embeddings instead of the model's: the smallest loss that any embeddings reach on this
    batch (found by descent on them alone) against the loss when all are equal (ln B for InfoNCE), both above what remains when the
    embeddings' length is free. An error where the scale is learnable or a fixed one was left out (under `least_fixed_scale`); a
    note where a fixed temperature is that soft on purpose (0.5 is in use).

    ## Why it matters
    Cosines lie in [-1, 1]. Multiplied by a scale near 1 they cannot make a softmax sharp: the loss sits at its floor, matching pairs
    are already together, and gradients only spread negatives for ever. Typical: the scale was set to 1.0 where its logarithm
    ln(1/0.07) was meant, or the temperature was left out.

    ## When it is not a problem
    Unnormalised dot products (the embeddings' length is free); the usual scales (10 to 100); a sigmoid loss with a bias; several
    positives an example, which leave a floor of their own. A floor that is higher than the scale alone can keep it (14 leaves
    almost nothing) comes from wrong targets: unknown here, for misaligned-positives to judge.

    ## How to confirm by hand
    ln(1 + (B - 1) · exp(-scale)) is the loss of pairs at cosine 1 and all others at cosine 0.

    ## How to fix
    Multiply the similarities by the scale, not the other way round. Start it at 1/0.07 ≈ 14 (`logit_scale = ln(1/0.07)` where it is
    exponentiated), or use a fixed temperature of 0.02 to 0.1.

    ## Options
    `floor_fraction`: floor over the loss of equal embeddings (0.25). With 64 examples a scale of 5 gives 0.08, 2.7 gives 0.4, 1 gives
    0.8. `least_examples`: fewer say too little (8). `least_fixed_scale`: a fixed scale below it counts as left out (1.5).

    ## References
    Arithmetic of InfoNCE; the figures are recomputed in the tests.
    """
    power = Power(quantity="loss floor over the loss of equal embeddings", smallest_detectable=floor_fraction, unit="fraction")
    if not all(math.isfinite(v) for v in (probe.floor, probe.collapsed)) or probe.collapsed <= 0:
        return Unknown(
            reason=f"the loss of chosen embeddings is {probe.floor:g} at best and {probe.collapsed:g} when all are equal"
        )
    reason = f"embeddings alone reach a loss of {probe.floor:.3g}, equal ones give {probe.collapsed:.3g}"
    if probe.floor > (1 + _ABOVE) * probe.collapsed:
        return Unknown(
            reason=f"{reason}: the embeddings that the loss itself asks for are worse than equal ones, so its targets or its sign are "
            "wrong, and the scale cannot be judged (misaligned-positives judges the targets)"
        )
    own = 0.0 if math.isnan(probe.free_floor) else min(probe.free_floor, probe.floor)
    if own >= probe.collapsed:
        return Unknown(reason=f"{reason}: no embeddings lower it")
    fraction = (probe.floor - own) / (probe.collapsed - own)
    if fraction < floor_fraction:
        return answer((), power=power, reason=reason)
    if math.isnan(probe.free_floor):
        return Unknown(reason=f"{reason}; whether the scale or the loss itself keeps it there could not be told")
    if probe.num_examples < least_examples:
        return Unknown(reason=f"{reason} with {probe.num_examples} examples; {least_examples} are needed to judge")
    allowed = _fraction_at(probe.scale, probe.num_examples)
    if allowed < floor_fraction:
        return Unknown(
            reason=f"{reason}, {fraction:.0%} of it, but a scale of {probe.scale:.3g} alone leaves {allowed:.1%} at most with "
            f"{probe.num_examples} examples: the targets are wrong (or something else bounds the logits), and the scale is not "
            "what keeps it there (misaligned-positives judges the targets)"
        )
    left_out = not math.isnan(probe.scale) and probe.scale < least_fixed_scale
    return answer([_finding(probe, fraction, own, floor_fraction, harms=probe.is_learnable or left_out)])


def _fraction_at(scale: float, num_examples: int) -> float:
    """Part of the loss of equal embeddings that this scale leaves with right targets at least as bad as cosines of 0 to all others;
    NaN without a scale. Candidates of both columns count, as in NT-Xent."""
    others = 2 * num_examples - 1
    return math.log1p(others * math.exp(-scale)) / math.log1p(others)


def _finding(probe: ContrastiveProbe, fraction: float, own: float, limit: float, *, harms: bool) -> Finding:
    scale = "" if math.isnan(probe.scale) else f" ({probe.scale:.3g})"
    kind = "learnable logit scale" if probe.is_learnable else "fixed logit scale"
    turned = not math.isnan(probe.scale) and probe.scale > 0 and _USUAL[0] <= 1 / probe.scale <= _USUAL[1]
    if not harms:
        fix = "If the temperature is meant, nothing is wrong; the loss just cannot come near zero."
    elif turned:
        fix = (
            f"It is the inverse of {1 / probe.scale:.3g}, a usual scale: the similarities are divided by it, or its logarithm has "
            "the wrong sign. Multiply by it (or divide by a temperature); a larger parameter would make it worse."
        )
    else:
        fix = (
            "Let the similarities be multiplied by 1/0.07 = 14.3 at the start (a parameter of 2.66 where it is exponentiated), or "
            "divided by a temperature of 0.02 to 0.1."
        )
    return Finding(
        message=f"the {kind}{scale} caps what this loss can reach: on this batch of {probe.num_examples} examples even perfect "
        f"embeddings leave a loss of {probe.floor:.3g}, {fraction:.0%} of what equal ones give ({probe.collapsed:.3g}). {fix}",
        where=Where(),
        measured=Quantity(value=probe.floor, unit="loss of perfect embeddings"),
        expected=Quantity(value=own + limit * (probe.collapsed - own), unit="loss of perfect embeddings, at most"),
        severity=Severity.ERROR if harms else Severity.NOTE,
        remedy="multiply by the scale instead of dividing"
        if turned and harms
        else "similarities * 14.3 (or / 0.07) at the start",
    )
