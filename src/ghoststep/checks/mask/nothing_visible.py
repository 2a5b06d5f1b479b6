"""GS107."""

from ghoststep.evidence.influence import Influence
from ghoststep.finding import Basis, Finding, Power, Quantity, Severity, Where
from ghoststep.registry import Answer, NotApplicable, answer, check
from ghoststep.visibility import not_read


@check(
    code="GS107",
    severity=Severity.ERROR,
    basis=Basis.PROOF,
    explains_anywhere=(
        "blind-context",
        "order-blind",
        "padding-side-changes-output",
        "attention-implementations-differ",
        "absent-mask-changes-output",
        "pack-changes-output",
        "nonfinite-loss",
    ),
)
def nothing_visible(influence: Influence) -> Answer:
    """A real token may attend to nothing at all: every key of its query is masked.

    ## What it finds
    Attention masks and scores, as they pass through softmax and `scaled_dot_product_attention`, whose line for a real query has no
    key above -5e3; and real positions whose hidden state alone is NaN.

    ## Why it matters
    A softmax over nothing gives NaN with -inf, and with a finite minimum the average over *everything*, future and padding
    included. Some kernels return zeros: three implementations, three results.

    ## When it is not a problem
    Queries that are padding themselves.

    ## How to confirm by hand
    `(~visible.any(-1))[real]` on the boolean mask, or look for NaN in the attention's output.

    ## How to fix
    Let every query see at least itself (`mask | torch.eye(T).bool()`), and check the polarity of the padding mask.

    ## Options
    None.

    ## References
    None.
    """
    if not influence.has_attention and not influence.nothing_visible:
        return NotApplicable(reason="no attention operation was seen to run")
    if not influence.nothing_visible:
        return not_read(influence) or answer(
            (), power=Power(quantity="real queries without a key", smallest_detectable=1, unit="positions")
        )
    example, position = influence.nothing_visible[0]
    number = len(influence.nothing_visible)
    return answer(
        [
            Finding(
                message=f"position {position} of example {example} is a real token and may attend to nothing: all keys of its query "
                f"are masked, or its hidden state is NaN ({number} such positions). Depending on the kernel it gets NaN, zeros, or "
                "the average over everything, future and padding included. Let every query see at least itself, and check the "
                "polarity of the mask.",
                where=Where(example=example, position=position),
                measured=Quantity(value=number, unit="real positions without a visible key"),
                expected=Quantity(value=0, unit="real positions without a visible key"),
                remedy="let every query see at least itself",
            )
        ]
    )
