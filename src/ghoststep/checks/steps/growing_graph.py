"""GS411."""

import itertools

from ghoststep.evidence.steps import RankRecord, RunRecord, Step
from ghoststep.finding import Basis, Finding, Power, Quantity, Severity, Where
from ghoststep.parameter_text import counted
from ghoststep.registry import Answer, Unknown, answer, check
from ghoststep.step_findings import Stretch, all_stretches, looked_at, refusal

INTERVALS = 4
"""Intervals between counted steps with the very same growth a step."""
LEAST_SHARE = 0.01
"""Growth a step over the first graph: what is kept is a good part of it."""
WHOLE = 10
"""Times the first graph from which this is no window of truncated backpropagation any more."""


@check(code="GS411", severity=Severity.ERROR, basis=Basis.MEASURED)
def growing_graph(run: RunRecord) -> Answer:
    """The graph behind the loss grows by the same amount step after step: the loss keeps the graphs of earlier steps.

    ## What it finds
    The number of nodes of the loss's autograd graph, in the steps where it was counted: at least five counts that grow by the
    same number of nodes a step, while the number of tokens does not grow along. An error from ten times the first count on.

    ## Why it matters
    Each backward walks through all steps before: time and memory grow until the run dies, and old gradients are added again.

    ## When it is not a problem
    Lengths that vary or grow (a curriculum). Backpropagation through a window of steps on purpose: a warning while the window is
    short.

    ## How to confirm by hand
    Count `loss.grad_fn` and its `next_functions` in two steps.

    ## How to fix
    `total += loss.item()` or `loss.detach()` for running means; `hidden = hidden.detach()` between steps.

    ## Options
    None.

    ## References
    None.
    """
    refused = refusal(run, "num_graph_nodes")
    if refused:
        return Unknown(reason=refused)
    findings, most = [], 0
    for record, stretch in all_stretches(run):
        counts = [s for s in stretch.steps if s.num_graph_nodes is not None]
        most = max(most, len(counts))
        if len(counts) > INTERVALS:
            findings += _growing(record, stretch, counts)
    power = Power(quantity="growth of the graph a step", smallest_detectable=LEAST_SHARE, unit="of its first size")
    undecided = None if most > INTERVALS else f"the graph was counted in {counted(most, 'step')}; {INTERVALS + 1} are needed"
    return answer(findings, power=power, reason=looked_at(run), undecided=undecided)


def _growing(record: RankRecord, stretch: Stretch, counts: list[Step]) -> list[Finding]:
    nodes = [s.num_graph_nodes or 0 for s in counts]
    rates = [(nodes[i + 1] - nodes[i]) / (counts[i + 1].number - counts[i].number) for i in range(len(counts) - 1)]
    findings, start = [], 0
    for stop in range(1, len(rates) + 1):
        if stop < len(rates) and rates[stop] == rates[start]:
            continue
        if stop - start >= INTERVALS and rates[start] > 0 and (start > 0 or stretch.is_whole):
            steps = counts[start : stop + 1]
            has_more = all(a.num_tokens < b.num_tokens for a, b in itertools.pairwise(steps))
            if not has_more and rates[start] >= LEAST_SHARE * nodes[start]:
                findings.append(_finding(record, steps, rates[start]))
        start = stop
    return findings


def _finding(record: RankRecord, steps: list[Step], rate: float) -> Finding:
    first, last = steps[0], steps[-1]
    small, large = first.num_graph_nodes or 0, last.num_graph_nodes or 0
    return Finding(
        message=f"the graph behind the loss grows by {rate:g} nodes in every step, from {small:,} in step {first.number} to {large:,} "
        f"in step {last.number}: the loss keeps the graphs of the steps before it, and each backward walks through all of them. Detach "
        "what is carried over from step to step (loss.item() for running sums, hidden.detach()).",
        where=Where(step=first.number, rank=record.facts.rank),
        measured=Quantity(value=rate, unit="graph nodes more a step"),
        expected=Quantity(value=0, unit="graph nodes more a step"),
        severity=Severity.ERROR if large >= WHOLE * max(1, small) else Severity.WARNING,
    )
