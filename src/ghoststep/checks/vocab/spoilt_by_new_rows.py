"""GS007."""

from ghoststep.evidence.training import NewRows
from ghoststep.finding import Basis, Finding, Power, Quantity, Severity, Where
from ghoststep.registry import Answer, answer, check


@check(code="GS007", severity=Severity.ERROR, basis=Basis.MEASURED)
def spoilt_by_new_rows(
    new: NewRows, *, least_share: float = 0.1, error_share: float = 0.3, over_uniform: float = 5.0
) -> Answer:
    """Added tokens take probability from all others, because their output rows are far from the trained ones.

    ## What it finds
    The softmax mass that the added tokens at the end of the vocabulary take on the first batch, at positions that are not
    followed by one of them. Fires from `least_share`, and only if it is `over_uniform` times what equal logits would give (or more
    than halfway from that to all the mass).

    ## Why it matters
    A trained head gives most tokens a low logit. A new row of zeros, or of another scale, stays near 0 and outshines them: the
    loss jumps, the first steps undo what was trained, and an evaluation before training looks broken.

    ## When it is not a problem
    A model that is not trained yet (all logits are alike); tokens that are meant to follow here.

    ## How to confirm by hand
    `logits[..., first_new:].mean()` against `logits[..., :first_new].mean()` on real text.

    ## How to fix
    Initialise new output rows with the mean of the trained ones (`resize_token_embeddings(..., mean_resizing=True)`).

    ## Options
    `least_share` 0.1, `error_share` 0.3, `over_uniform` 5.

    ## References
    None.
    """
    uniform = new.num_rows / new.num_classes
    # Many added tokens have a large share already when all logits are equal: halfway from there to everything is too much too.
    limit = max(least_share, min(over_uniform * uniform, (1 + uniform) / 2))
    power = Power(quantity="softmax mass on added tokens", smallest_detectable=limit, unit="fraction")
    reason = f"{new.num_rows} added tokens take {new.share:.2g} of the softmax mass"
    if new.share < limit:
        return answer((), power=power, reason=reason)
    finding = Finding(
        message=f"{new.num_rows} added tokens (output rows {new.first_row} to {new.first_row + new.num_rows - 1}) "
        f"take {new.share:.0%} of the softmax "
        "mass on the first batch, at positions where none of them follows: their mean logit is "
        f"{new.mean_logit_new:.3g}, that of all others "
        f"{new.mean_logit_old:.3g} ± {new.spread_old:.2g} (row norms {new.norm_new:.3g} and {new.norm_old:.3g}). "
        "Initialise new output rows with the "
        "mean of the trained ones.",
        where=Where(table_row=new.first_row),
        measured=Quantity(value=new.share, unit="softmax mass"),
        expected=Quantity(value=uniform, unit="softmax mass (uniform)"),
        severity=Severity.ERROR if new.share >= error_share else Severity.WARNING,
        remedy="initialise new output rows with the mean of the trained ones",
    )
    return answer([finding])
