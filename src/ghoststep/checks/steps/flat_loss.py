"""GS409."""

import itertools
import math
import struct
from collections.abc import Sequence

from ghoststep.evidence.steps import RankRecord, RunRecord, Step, StepOutcome
from ghoststep.finding import Basis, Finding, Power, Quantity, Severity, Where
from ghoststep.parameter_text import counted
from ghoststep.registry import Answer, Unknown, answer, check
from ghoststep.step_comparison import not_compared
from ghoststep.step_findings import Stretch, all_stretches, long_runs, looked_at, refusal

IN_A_ROW = 50
"""Steps with the very same loss."""
MOST_CLASSES = 65536
_STRIDE = IN_A_ROW // 2


@check(code="GS409", severity=Severity.WARNING, basis=Basis.MEASURED)
def flat_loss(run: RunRecord) -> Answer:
    """The loss is the very same number step after step, while gradients arrive and weights move.

    ## What it finds
    At least 50 steps in a row whose loss is bit for bit the same, with non-zero gradients and moving weights. A warning where the
    batches can be seen to differ, a note where they cannot.

    ## Why it matters
    The number that is watched is not the loss of these batches: an old tensor, a constant, a loss over detached values.

    ## When it is not a problem
    A loss that is merely flat (fine-tuning from a pretrained model, reinforcement learning) is not judged: it cannot be told from
    a healthy one. Silent too: 0, ln 2 (preference losses) and the logarithm of any number of classes (contrastive losses), and
    losses that a bf16 or fp16 number can hold, which rounding keeps in place.

    ## How to confirm by hand
    Print the loss with all digits (`float.hex`) for a few batches.

    ## How to fix
    Give the watch the loss that `backward` is called on; look for `detach`, `.item()` and a cached batch in its way.

    ## Options
    None.

    ## References
    None.
    """
    refused = refusal(run, "loss", "moved", "norm", at_least=IN_A_ROW)
    if refused:
        return Unknown(reason=refused)
    findings = []
    for record, stretch in all_stretches(run):
        findings += _flat(record, stretch)
    power = Power(quantity="steps in a row with the very same loss", smallest_detectable=IN_A_ROW, unit="steps")
    left_out = not_compared(run, ("loss", "moved"))
    reason = f"{looked_at(run)}{left_out.note}; a loss that is flat without being the same is not judged"
    return answer(findings, power=power, reason=reason, undecided=left_out.undecided)


def _flat(record: RankRecord, stretch: Stretch) -> list[Finding]:
    losses = [s.loss for s in stretch.steps]
    # A run of 50 holds two steps of the same value that are 24 apart, at a multiple of 25.
    if all(losses[i] != losses[i + _STRIDE - 1] for i in range(0, len(losses) - _STRIDE + 1, _STRIDE)):
        return []
    same = [
        a is not None and a == b and _learns(s) for (a, b), s in zip(itertools.pairwise(losses), stretch.steps[1:], strict=True)
    ]
    same = [*same[:1], *same]  # as the second step is to the first, so may the first be to the one before the window
    findings = []
    for start, stop in long_runs(stretch, same, IN_A_ROW - 1):
        steps = stretch.steps[max(0, start - 1) : stop]
        loss = steps[0].loss
        if loss is not None and _tells(loss):
            findings.append(_finding(record, steps[0], len(steps), differ=_batches_differ(steps)))
    return findings


def _learns(step: Step) -> bool:
    return step.outcome is StepOutcome.STEPPED and bool(step.norm) and step.moved is not None and step.moved > 0


def _tells(loss: float) -> bool:
    """False for the values at which healthy losses rest."""
    if not math.isfinite(loss) or loss == 0:
        return False
    bits = struct.unpack("<I", struct.pack("<f", loss))[0]
    if bits & 0x1FFF == 0:  # at most 10 bits after the leading one: bf16 and fp16 hold it
        return False
    size = abs(loss)
    classes = round(math.exp(size)) if size < math.log(MOST_CLASSES) else 0
    return not (classes >= 2 and abs(size - math.log(classes)) <= 1e-6 * size)


def _batches_differ(steps: Sequence[Step]) -> bool:
    """The tokens with the largest gradients, or the numbers of tokens, are not the same in each step."""
    return len({(s.num_tokens, tuple(r.token_id for r in s.rows)) for s in steps}) > 1


def _finding(record: RankRecord, first: Step, num_steps: int, *, differ: bool) -> Finding:
    loss = first.loss or 0.0
    proof = "the batches differ, gradients arrive and the weights move" if differ else "gradients arrive and the weights move"
    return Finding(
        message=f"the loss is {loss!r} to the last bit in {counted(num_steps, 'step')} in a row from step {first.number} on, while "
        f"{proof}: the number that is watched is not the loss of these batches. Look for an old tensor, a constant or a cached batch.",
        where=Where(step=first.number, rank=record.facts.rank),
        measured=Quantity(value=num_steps, unit="steps with the very same loss"),
        expected=Quantity(value=1, unit="steps with the very same loss"),
        severity=Severity.WARNING if differ else Severity.NOTE,
    )
