"""GS410."""

import math
from collections.abc import Sequence

from ghoststep.evidence.steps import RankRecord, RunRecord, Step
from ghoststep.finding import Basis, Finding, Power, Quantity, Severity, Where
from ghoststep.parameter_text import counted
from ghoststep.registry import Answer, Unknown, answer, check
from ghoststep.step_findings import Stretch, all_stretches, looked_at, median, refusal

BLOCK = 64
"""Steps judged together; blocks begin at the same numbers wherever the record begins."""


@check(code="GS410", severity=Severity.NOTE, basis=Basis.RULE_OF_THUMB)
def oscillating_loss(run: RunRecord, *, spread: float = 0.4) -> Answer:
    """The loss swings up and down by a large part of itself without getting anywhere.

    ## What it finds
    Blocks of 64 steps whose loss has a standard deviation of more than 40 % of its mean, no trend, and turns at half of its steps
    or more; the number of tokens does not explain it.

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
    findings = []
    for record, stretch in all_stretches(run):
        blocks = [b for b in _blocks(stretch) if _oscillates(b, spread)]
        if blocks:
            findings.append(_finding(record, blocks, spread))
    power = Power(quantity="standard deviation over mean", smallest_detectable=spread)
    return answer(findings, power=power, reason=looked_at(run))


def _blocks(stretch: Stretch) -> list[Sequence[Step]]:
    steps = stretch.steps
    start = -(steps[0].number - 1) % BLOCK
    blocks = [steps[a : a + BLOCK] for a in range(start, len(steps) - BLOCK + 1, BLOCK)]
    return [b for b in blocks if b[-1].number - b[0].number == BLOCK - 1]


def _oscillates(block: Sequence[Step], spread: float) -> bool:
    losses = [s.loss for s in block if s.loss is not None]
    if len(losses) < BLOCK or not min(losses) > 0:
        return False
    if not _is_wide(losses, spread):
        return False
    mean = sum(losses) / BLOCK
    middle = (BLOCK - 1) / 2
    slope = sum((i - middle) * x for i, x in enumerate(losses)) / sum((i - middle) ** 2 for i in range(BLOCK))
    left = [x - slope * (i - middle) for i, x in enumerate(losses)]
    std = math.sqrt(sum((x - mean) ** 2 for x in left) / BLOCK)
    half = BLOCK // 2
    has_trend = abs(sum(losses[:half]) - sum(losses[half:])) / half > 0.5 * std
    turns = sum((b - a) * (c - b) < 0 for a, b, c in zip(losses, losses[1:], losses[2:], strict=False))
    middle_loss = median(losses)
    is_outlier = median(abs(x - middle_loss) for x in losses) < 0.5 * spread * mean
    if not math.isfinite(std) or std <= spread * mean or has_trend or turns < (BLOCK - 2) // 2 or is_outlier:
        return False
    per_token = [x / s.num_tokens for x, s in zip(losses, block, strict=True) if s.num_tokens]
    return len(per_token) < BLOCK or _is_wide(per_token, spread)


def _is_wide(values: list[float], spread: float) -> bool:
    mean = sum(values) / len(values)
    return sum(x * x for x in values) / len(values) - mean * mean > (spread * mean) ** 2


def _finding(record: RankRecord, blocks: list[Sequence[Step]], spread: float) -> Finding:
    first = blocks[0]
    losses = [s.loss for s in first if s.loss is not None]
    mean = sum(losses) / len(losses)
    std = math.sqrt(sum((x - mean) ** 2 for x in losses) / len(losses))
    more = f", and in {counted(len(blocks) - 1, 'later block')} of {BLOCK} steps" if len(blocks) > 1 else ""
    return Finding(
        message=f"the loss swings by {std / mean:.0%} of its mean ({mean:.4g}) in steps {first[0].number} to {first[-1].number}{more}, "
        "without a trend. A lower learning rate or larger batches make it readable.",
        where=Where(step=first[0].number, rank=record.facts.rank),
        measured=Quantity(value=std / mean, unit="standard deviation over mean"),
        expected=Quantity(value=spread, unit="standard deviation over mean, at most"),
    )
