"""GS407."""

import math

from ghoststep.evidence.base import Missing
from ghoststep.evidence.steps import RunRecord, StepOutcome, StepRow
from ghoststep.evidence.training import Gradient, LiveWiring, StepProbe
from ghoststep.finding import Basis, Finding, Power, Quantity, Severity, Where
from ghoststep.parameter_text import counted
from ghoststep.registry import Answer, NotApplicable, Unknown, answer, check
from ghoststep.step_findings import NO_RUN, Stretch, all_stretches, long_runs, looked_at, of_either, refusal
from ghoststep.step_texts import token_of
from ghoststep.text import printable

IN_A_ROW = 20
"""Skips one after the other: halving takes 65536 down to 1/16 in as many."""
LEAST_SCALE = 2.0**-4
"""What an honest start does not fall to in them."""
DEAD_SCALE = 2.0**-10
"""A scale under which the smallest fp16 number times it is what is lost: no start comes here."""
WINDOW = 200
PER_HALF = 10
"""Skips in each half of the last 200 steps, so that a rough start alone does not count."""
NET_FALL = 2.0**-8
"""Of the scale over those 200 steps: it does not recover between the skips."""


@check(code="GS407", severity=Severity.ERROR, basis=Basis.MEASURED)
def skipped_by_scaler(
    wiring: LiveWiring | Missing, probe: StepProbe | Missing, run: RunRecord | Missing = NO_RUN, *, most_skips: int = 200
) -> Answer:
    """The loss scaler skips steps without end.

    ## What it finds
    Of a setup: every step of the probe was skipped, and no lower scale will help: the gradients are not finite without a scale, or
    the scale did not go down after a skip (`scaler.update()` is not called). Of a run: 20 skips one after the other by which the
    scale stayed or fell to 1/16; 10 skips in each half of 200 steps while the scale fell by 256 in all; or skips at a scale of
    1/1024.

    ## Why it matters
    A skipped step raises nothing and fires no hook; the loop runs on, the scheduler advances, the weights stay.

    ## When it is not a problem
    A few skips at the start: the scaler begins at a scale that is too large and halves it until the gradients fit. A skip now and
    then when the scale was raised.

    ## How to confirm by hand
    `scaler.get_scale()` after each step.

    ## How to fix
    Call `scaler.update()` once after each `scaler.step(optimizer)`; find the non-finite gradient; use bf16.

    ## Options
    `most_skips`: how many further skips are taken for an ordinary start; 200 by default. Halving needs at most 128 from the largest
    float32 down to 1, so that only a backoff_factor near 1 comes this far.

    ## References
    Documentation of torch.amp.GradScaler.
    """
    about_run = run if isinstance(run, Missing) else lambda: _of_run(run)
    if isinstance(wiring, Missing):
        return of_either(wiring, about_run)
    return of_either(probe if isinstance(probe, Missing) else lambda: _of_setup(wiring, probe, most_skips), about_run)


def _of_setup(wiring: LiveWiring, probe: StepProbe, most_skips: int) -> Answer:
    if probe.scales is None:
        return NotApplicable(reason="the setup has no scaler")
    before, after = probe.scales
    power = Power(quantity="skipped steps", smallest_detectable=1, unit="steps")
    if probe.num_skipped == 0 or probe.steps:
        return answer(
            (), power=power, reason=f"{counted(probe.num_skipped, 'early skip')}, then {counted(len(probe.steps), 'step')}"
        )
    unscaled_bad = any(p.gradient is Gradient.NONFINITE for p in wiring.parameters)
    if not unscaled_bad and after < before:
        norm = math.hypot(*(p.gradient_norm for p in wiring.parameters)) or 1.0
        factor = (after / before) ** (1 / probe.num_skipped)  # what one skip takes off, as the scaler itself did it
        more = max(0, math.ceil(math.log(max(1.0, after * norm / 65504)) / -math.log(factor)))
        fell = f"all {probe.num_skipped} steps were skipped while the scale fell from {before:g} to {after:g}"
        if more <= most_skips:
            reason = (
                f"{fell}; without a scale the gradients are finite (norm {norm:.3g}): about {more} more skips make them fit"
            )
            return answer((), power=power, reason=reason)
        return answer([
            Finding(
                message=f"{fell}: at this pace about {more} more steps are skipped before the gradients (norm {norm:.3g} without a "
                "scale) fit into fp16. Start from a smaller init_scale, or use a backoff_factor near 0.5.",
                where=Where(),
                measured=Quantity(value=more, unit="more skipped steps"),
                expected=Quantity(value=most_skips, unit="more skipped steps, at most"),
            )
        ])  # fmt: skip
    cause = (
        "the gradients are not finite even without a scale, so that no scale helps. Find their source (nonfinite-gradient)"
        if unscaled_bad
        else f"the scale stayed at {after:g}: scaler.update() is not called after scaler.step(). Call it once a step"
    )
    finding = Finding(
        message=f"the scaler skipped all {probe.num_skipped} steps, and {cause}.",
        where=Where(),
        measured=Quantity(value=probe.num_skipped, unit="skipped steps"),
        expected=Quantity(value=0, unit="skipped steps"),
    )
    return answer([finding])


def _of_run(run: RunRecord) -> Answer:
    refused = refusal(run, "outcome")
    if refused:
        return Unknown(reason=refused)
    num_skipped = sum(s.outcome is StepOutcome.SKIPPED_BY_SCALER for r in run.ranks for s in r.steps)
    if not num_skipped and all(s.scale is None for r in run.ranks for s in r.steps[-1:]):
        return NotApplicable(reason="no loss scaler in this run")
    if num_skipped:
        for record, stretch in all_stretches(run):
            said = _endless(stretch)
            if said is not None:
                return answer([_of_stretch(run, stretch, record.facts.rank, *said)])
    power = Power(quantity="skips one after the other", smallest_detectable=IN_A_ROW, unit="steps")
    return answer((), power=power, reason=f"{counted(num_skipped, 'skip')}; {looked_at(run)}")


def _endless(stretch: Stretch) -> tuple[int, int, str] | None:
    """First step of the skips, their number, and why they will not end."""
    steps = stretch.steps
    skipped = [s.outcome is StepOutcome.SKIPPED_BY_SCALER for s in steps]
    for start, stop in long_runs(stretch, skipped, IN_A_ROW):
        first, last = steps[start].scale, steps[stop - 1].scale
        number, count = steps[start].number, stop - start
        if first is None or last is None or last >= first:
            shown = "an unknown scale" if last is None else f"a scale of {last:g}"
            return (
                number,
                count,
                f"{count} skips one after the other at {shown}, which does not fall: scaler.update() is not called",
            )
        if last <= LEAST_SCALE:
            return number, count, f"{count} skips one after the other, while the scale fell from {first:g} to {last:g}"
    places = [i for i, value in enumerate(skipped) if value]
    for i in places:
        scale = steps[i].scale
        if scale is not None and scale <= DEAD_SCALE:
            return steps[i].number, len(places), f"it still skips at a scale of {scale:g}"
    return _often(stretch, places)


def _often(stretch: Stretch, places: list[int]) -> tuple[int, int, str] | None:
    """Skips all the time, with steps in between, and a scale that never recovers."""
    for i in places[2 * PER_HALF - 1 :]:
        near = [j for j in places if i - WINDOW < j <= i]
        early = sum(j <= i - WINDOW // 2 for j in near)
        first, last = stretch.steps[max(0, i - WINDOW + 1)].scale, stretch.steps[i].scale
        if i < WINDOW - 1 or min(early, len(near) - early) < PER_HALF or first is None or last is None:
            continue
        if last <= NET_FALL * first:
            fell = f"the scale fell from {first:g} to {last:g} and does not recover"
            return stretch.steps[i].number, len(near), f"{len(near)} of the last {WINDOW} steps were skipped, while {fell}"
    return None


def _size(row: StepRow) -> float:
    return math.inf if math.isnan(row.gradient_norm) else row.gradient_norm


def _of_stretch(run: RunRecord, stretch: Stretch, rank: int, number: int, count: int, why: str) -> Finding:
    skips = [s for s in stretch.steps if s.outcome is StepOutcome.SKIPPED_BY_SCALER]
    # Where no kept place is finite, which ones were kept is chance (a NaN counts as largest): no token is to blame.
    heads = [max(s.rows, key=_size).token_id for s in skips if any(math.isfinite(r.gradient_norm) for r in s.rows)]
    common = max(set(heads), key=heads.count) if heads else None
    who, token_id = "", None
    if common is not None and len(skips) >= 4 and heads.count(common) >= 0.8 * len(skips):
        token_id = common
        text = token_of(run, common)
        shown = f" {printable(text)}" if text is not None else ""
        who = f" The largest gradient in {heads.count(common)} of these {len(skips)} steps is that of token {common}{shown}."
    losses = [s.loss for s in skips if s.loss is not None]
    nan = " The loss itself is NaN." if losses and all(math.isnan(x) for x in losses) else ""
    return Finding(
        message=f"the loss scaler skips steps without end (step {number}): {why}.{who}{nan} A skipped step changes nothing and raises "
        "nothing. Find the gradient that is not finite (near-zero table rows, overflowing activations), train in bf16, and call "
        "scaler.update() once after each scaler.step(optimizer).",
        where=Where(step=number, rank=rank, token_id=token_id, token=None if token_id is None else token_of(run, token_id)),
        measured=Quantity(value=count, unit="skipped steps"),
        expected=Quantity(value=0, unit="skipped steps"),
    )
