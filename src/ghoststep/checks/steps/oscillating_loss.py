"""GS410."""

import math
from collections.abc import Sequence

from ghoststep.evidence.steps import RankRecord, RunRecord, Step
from ghoststep.finding import Basis, Finding, Power, Quantity, Severity, Where
from ghoststep.parameter_text import counted
from ghoststep.registry import Answer, NotApplicable, Unknown, answer, check
from ghoststep.step_comparison import not_compared
from ghoststep.step_findings import Stretch, all_stretches, looked_at, median, refusal

BLOCK = 64
"""Steps judged together; blocks begin at the same numbers wherever the record begins."""
LEAST_SEEN = 48
"""Steps of a block that must have a finite loss: with three quarters of it, spread and turns are still those of the block."""


@check(code="GS410", severity=Severity.NOTE, basis=Basis.RULE_OF_THUMB)
def oscillating_loss(run: RunRecord, *, spread: float = 0.4) -> Answer:
    """The loss swings up and down by a large part of itself without getting anywhere.

    ## What it finds
    Blocks of 64 steps (at least 48 of them with a finite loss) whose loss has a standard deviation of more than 40 % of its mean, no
    trend, and turns at half of its steps or more; the number of tokens does not explain it.

    ## Why it matters
    Often a learning rate at the edge of stability, or batches too small or too unlike each other to say anything.

    ## When it is not a problem
    Tiny batches, mixed tasks. Losses that are not positive throughout (policy gradients) are not judged.

    ## How to confirm by hand
    The loss of each step, not its running mean.

    ## How to fix
    Lower the learning rate, accumulate over more micro-batches, or shuffle better.

    ## Options
    `spread`: standard deviation over mean (0.4).

    ## References
    A rule of thumb.
    """
    refused = refusal(run, "loss", at_least=BLOCK)
    if refused:
        return Unknown(reason=refused)
    findings, every = [], []
    for record, stretch in all_stretches(run):
        cut = _blocks(stretch)
        every += cut
        blocks = [b for b in cut if _oscillates(b, spread)]
        if blocks:
            findings.append(_finding(record, blocks, spread))
    if every and all(any(s.loss is not None and s.loss <= 0 for s in b) for b in every):
        return NotApplicable(
            reason="the loss is not above 0 throughout (as that of a policy): it has no mean to compare its spread with"
        )
    power = Power(quantity="standard deviation over mean", smallest_detectable=spread)
    left_out = not_compared(run, ("loss",))
    none = None if every else f"no block of {BLOCK} steps is whole"
    return answer(findings, power=power, reason=f"{looked_at(run)}{left_out.note}", undecided=left_out.undecided or none)


def _blocks(stretch: Stretch) -> list[Sequence[Step]]:
    steps = stretch.steps
    start = -(steps[0].number - 1) % BLOCK
    blocks = [steps[a : a + BLOCK] for a in range(start, len(steps) - BLOCK + 1, BLOCK)]
    return [b for b in blocks if b[-1].number - b[0].number == BLOCK - 1]


def _oscillates(block: Sequence[Step], spread: float) -> bool:
    block = [s for s in block if s.loss is not None and s.loss - s.loss == 0]
    losses = [s.loss for s in block if s.loss is not None]
    count = len(losses)
    if count < LEAST_SEEN or not min(losses) > 0:
        return False
    if not _is_wide(losses, spread):
        return False
    mean = sum(losses) / count
    middle = (count - 1) / 2
    slope = sum((i - middle) * x for i, x in enumerate(losses)) / sum((i - middle) ** 2 for i in range(count))
    left = [x - slope * (i - middle) for i, x in enumerate(losses)]
    std = math.sqrt(sum((x - mean) ** 2 for x in left) / count)
    half = count // 2
    has_trend = abs(sum(losses[:half]) - sum(losses[-half:])) / half > 0.5 * std
    turns = sum((b - a) * (c - b) < 0 for a, b, c in zip(losses, losses[1:], losses[2:], strict=False))
    middle_loss = median(losses)
    is_outlier = median(abs(x - middle_loss) for x in losses) < 0.5 * spread * mean
    if not math.isfinite(std) or std <= spread * mean or has_trend or turns < (count - 2) // 2 or is_outlier:
        return False
    per_token = [x / s.num_tokens for x, s in zip(losses, block, strict=True) if s.num_tokens]
    return len(per_token) < count or _is_wide(per_token, spread)


def _is_wide(values: list[float], spread: float) -> bool:
    mean = sum(values) / len(values)
    return sum(x * x for x in values) / len(values) - mean * mean > (spread * mean) ** 2


def _finding(record: RankRecord, blocks: list[Sequence[Step]], spread: float) -> Finding:
    first = blocks[0]
    losses = [s.loss for s in first if s.loss is not None and math.isfinite(s.loss)]
    mean = sum(losses) / len(losses)
    std = math.sqrt(sum((x - mean) ** 2 for x in losses) / len(losses))
    more = f", and in {counted(len(blocks) - 1, 'later block')} of {BLOCK} steps" if len(blocks) > 1 else ""
    return Finding(
        message=f"the loss swings by {std / mean:.0%} of its mean ({mean:.4g}) in steps {first[0].number} to {first[-1].number}{more}, "
        "without a trend. A lower learning rate or larger batches make it readable; batches of unlike kinds in turn (several tasks or "
        "losses) swing by themselves: log each kind alone.",
        where=Where(step=first[0].number, rank=record.facts.rank),
        measured=Quantity(value=std / mean, unit="standard deviation over mean"),
        expected=Quantity(value=spread, unit="standard deviation over mean, at most"),
    )
