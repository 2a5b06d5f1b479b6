"""GS416."""

from ghoststep.evidence.base import Missing
from ghoststep.evidence.model_state import ModelState, NonfiniteParameter
from ghoststep.evidence.rows import InputRows, OutputRows
from ghoststep.finding import Basis, Finding, Power, Quantity, Severity, Where
from ghoststep.parameter_text import counted, listed
from ghoststep.registry import Answer, answer, check


@check(
    code="GS416",
    severity=Severity.ERROR,
    basis=Basis.PROOF,
    explains_anywhere=("nonfinite-loss", "nonfinite-gradient", "unchanged-weights", "skipped-by-scaler"),
)
def nonfinite_parameter(state: ModelState, inputs: InputRows | Missing, outputs: OutputRows | Missing) -> Answer:
    """A parameter holds NaN or infinite values before training begins.

    ## What it finds
    Parameters of the model in memory with at least one value that is NaN or ±inf. The vocabulary tables are left to GS008, which
    names their rows.

    ## Why it matters
    One such value makes everything downstream of it NaN: the loss, then by one step every weight that it reaches. Where the first
    batch does not pass it (an expert without tokens) it waits for one that does.

    ## When it is not a problem
    A frozen parameter that holds -inf on purpose, as an additive mask does: infinities in frozen parameters are silent here.

    ## How to confirm by hand
    `[n for n, p in model.named_parameters() if not p.isfinite().all()]`.

    ## How to fix
    Load an earlier checkpoint, and find the step that wrote the value; initialise memory that `torch.empty` left as it was.

    ## Options
    None.

    ## References
    None.
    """
    tables = [r.rows.table.tensor.name for r in (inputs, outputs) if not isinstance(r, Missing)]
    bad = [p for p in state.nonfinite if (p.num_nan or p.trainable) and p.name not in tables]
    findings = []
    if bad:
        more = f", and {counted(len(bad) - 1, 'more parameter')} ({listed([p.name for p in bad[1:]])})" if len(bad) > 1 else ""
        findings.append(
            Finding(
                message=f"{bad[0].name} holds {_values(bad[0])} of {bad[0].num_elements:,} values{more}: whatever passes it is NaN, "
                "and one step later so is every weight that it reaches. Load it from an earlier checkpoint or initialise it "
                "again, and find what wrote it.",
                where=Where(parameter=bad[0].name),
                measured=Quantity(value=sum(p.num_nan + p.num_infinite for p in bad), unit="non-finite values"),
                expected=Quantity(value=0, unit="non-finite values"),
            )
        )
    unread = f"; not readable: {listed(list(state.unread))}" if state.unread else ""
    power = Power(quantity="non-finite values in a parameter", smallest_detectable=1, unit="values")
    return answer(findings, power=power, reason=f"{counted(state.num_parameters, 'parameter')} looked at{unread}")


def _values(p: NonfiniteParameter) -> str:
    parts = [f"{p.num_nan:,} NaN"] if p.num_nan else []
    parts += [f"{p.num_infinite:,} infinite"] if p.num_infinite else []
    return " and ".join(parts)
