"""GS307."""

import math

from ghoststep.decay_law import crossing_of
from ghoststep.evidence.base import Missing
from ghoststep.evidence.decay import DecayFacts
from ghoststep.evidence.rows import InputRows
from ghoststep.evidence.wiring import Mixing, MixingClass
from ghoststep.finding import Basis, Finding, Power, Quantity, Severity, Where
from ghoststep.registry import Answer, Clear, NotApplicable, Unknown, answer, check
from ghoststep.severity import SPIKE_NORM


@check(code="GS307", severity=Severity.WARNING, basis=Basis.MEASURED)
def decaying_rows(
    decay: DecayFacts,
    inputs: InputRows,
    mixing: MixingClass | Missing,
    *,
    norm_limit: float = SPIKE_NORM,
    plausible_steps: int = 1_000_000,
) -> Answer:
    """Weight decay carries table rows of tokens that the data never holds to almost nothing within this run.

    ## What it finds
    The step at which a row of the untied input table that no batch feeds crosses `norm_limit`. Decoupled decay multiplies such a
    row by (1 - c · lr) a step, so after N steps log(norm_0 / norm_N) = sum of -log(1 - c · lr_t). c is measured: the user's own
    optimizer class runs on 64 numbers of the same dtype with zero gradients. The learning rates come from the scheduler.

    ## Why it matters
    A row that has decayed below 1e-6 makes its gradient explode when its token appears after all: in fine-tuning, or as a new
    chat template marker. Clipping then throws the whole step away.

    ## When it is not a problem
    A tied table (the softmax gradient reaches every row in every step); bfloat16 parameters without master weights (a factor of
    1 - c · lr above 1 - 2^-9 rounds away, and the twin shows it); a model that adds learned positions to the row.

    ## How to confirm by hand
    `w[row].double().norm()` of a token that the data lacks, now and a thousand steps later. To plan a run: `Schedule(kind="cosine",
    peak=4e-4, warm_up=2000, total=10**6, floor=0.1).crossing(1.0, 1e-6, decay=0.1, horizon=10**6)` of `ghoststep.decay_law`
    gives the step in closed form (385,286), for constant, linear and cosine schedules with warm-up and floor.

    ## How to fix
    Put the input table into a group with `weight_decay=0`, or decay it less. Rows that are already small: `ghoststep fix`.

    ## Options
    `norm_limit`: effective norm that must not be crossed (1e-6). `plausible_steps`: where nothing says how long the run is, a
    crossing later than this is clear, an earlier one unknown.

    ## References
    Arithmetic; real AdamW over 12,000 steps agreed with the product to five digits. Seed: pre-training for 1e6 steps at 4e-4
    with decay 0.1 crosses 1e-6 after about 350,000 (constant) to 440,000 (linear) steps.
    """
    if decay.rate == 0:
        return NotApplicable(
            reason=f"in {decay.dtype} a step's decay of {decay.peak_lr * decay.declared_decay:.1g} of the value rounds away"
        )
    norm = inputs.rows.median_norm * inputs.multiplier
    if not norm > norm_limit:
        return NotApplicable(reason=f"the median row has norm {norm:.3g}: the table is near zero as a whole")
    step = crossing_of(decay.steps, decay.exponents, norm, norm_limit)
    last = norm * math.exp(-decay.exponents[-1])
    if decay.horizon is None:
        if step is None or step > plausible_steps:
            return Clear(power=Power(quantity="first crossing", smallest_detectable=float(plausible_steps), unit="steps"))
        return Unknown(
            reason=f"a row that no batch feeds would cross {norm_limit:g} at step {step:,} ({decay.schedule}, decay "
            f"{decay.declared_decay:g}), and nothing says how long the run is: give `total_steps`"
        )
    power = Power(quantity="norm of a never-fed row at the end", smallest_detectable=norm_limit, unit="L2 norm")
    if step is None:
        return answer([], power=power)
    return answer([_finding(decay, mixing, norm, last, step, norm_limit)], power=power)


def _finding(
    decay: DecayFacts, mixing: MixingClass | Missing, norm: float, last: float, step: int, norm_limit: float
) -> Finding:
    gated = isinstance(mixing, Missing) or mixing.mixing is Mixing.RECURRENT_GATED
    lifted = isinstance(mixing, MixingClass) and mixing.lifted_by_positions
    return Finding(
        message=f"rows of {decay.parameter} whose tokens the data never holds cross norm {norm_limit:g} at step {step:,} of "
        f"{decay.horizon:,} and end at {last:.2g}: each step multiplies them by 1 - {decay.rate:.3g} · lr ({decay.schedule}; median "
        f"row {norm:.3g}). The first batch that holds such a token later loses its step. Put the input table into an optimizer "
        "group with weight_decay=0.",
        where=Where(parameter=decay.parameter, step=step),
        measured=Quantity(value=last, unit="L2 norm at the end"),
        expected=Quantity(value=norm_limit, unit="L2 norm, at least"),
        severity=Severity.WARNING if gated and not lifted else Severity.NOTE,
        remedy="weight_decay=0 for the input table's group",
    )
