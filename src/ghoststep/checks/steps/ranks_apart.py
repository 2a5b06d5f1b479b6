"""GS422."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ghoststep.evidence.steps import OWN_GRADIENTS, RankRecord, RunRecord, Step, StepOutcome
from ghoststep.finding import Basis, Finding, Power, Quantity, Severity, Where
from ghoststep.parameter_text import counted
from ghoststep.registry import Answer, NotApplicable, Unknown, answer, check
from ghoststep.step_findings import refusal

TOLERANCE = 1e-3
"""Relative: DDP hands the same bits to every rank, whose devices may add their squares up in another order (1e-6 in float32)."""
APART_STEPS = 8
"""Steps whose norms differ, from which it is no single event (a gradient that one rank changed by hand)."""
MOST_SHIFT = 64
"""Steps by which one rank may be numbered behind another: after a kill each rank's record ends where it was last flushed (every 32
steps), and goes on from there when the run is resumed."""
MOST_PROBED = 64
"""Steps that are looked up at every shift; two ranks whose norms differ meet by chance in about one of a hundred."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pair:
    """The two ranks that are furthest apart in one step, with the norms that tell it."""

    number: int
    ranks: tuple[int, int]
    norms: tuple[float, float]


@check(code="GS422", severity=Severity.ERROR, basis=Basis.MEASURED)
def ranks_apart(run: RunRecord) -> Answer:
    """Under DDP the ranks step with different gradients: nothing is reduced, and each trains a model of its own.

    ## What it finds
    Of a record of several ranks under DDP: steps in which the norm of the gradient that the optimizer was given, or the one that a
    clip cut down to its bound, differs between ranks by more than 0.1 %, if these are at least 8 and more than half of the steps that
    the ranks share.

    ## Why it matters
    DDP reduces gradients only for a forward that goes through its wrapper. Otherwise every rank trains on its own share of the data,
    weights drift apart without a word, and the checkpoint of rank 0 has seen one share only.

    ## When it is not a problem
    Communication hooks that average weights and not gradients (local SGD after its warm-up); parameters that DDP was told to ignore, as
    experts that live on one rank each: with such a hook or list, differences are unknown. Ranks whose steps are numbered apart after
    a resume are unknown. While a run trains, each rank sees its own steps only: ask `ghoststep check RUN` afterwards.

    ## How to confirm by hand
    Print the norm of one parameter on every rank after a few steps.

    ## How to fix
    Call the wrapper (`ddp(x)`), not `model(x)` or `ddp.module(x)`; leave the last micro-batch of each step outside of `no_sync`.

    ## Options
    None.

    ## References
    Documentation of torch.nn.parallel.DistributedDataParallel.
    """
    kinds = {r.facts.parallelism or "no parallel wrapper" for r in run.ranks}
    if max((r.facts.world_size for r in run.ranks), default=1) < 2:
        return NotApplicable(reason="the run has one process")
    if kinds != {"DDP"}:
        return NotApplicable(
            reason=f"the watched model has {' and '.join(sorted(kinds))}: only under DDP are all ranks' norms equal"
        )
    if len(run.ranks) < 2:
        return Unknown(reason="other ranks are not in this record")
    refused = refusal(run, "norm_after")
    if refused:
        return Unknown(reason=refused)
    joint = _joint_steps(run.ranks)
    if len(joint) < APART_STEPS:
        shared = counted(len(joint), "step")
        return Unknown(
            reason=f"other ranks are not in this record: {shared} in common could be compared; {APART_STEPS} are needed"
        )
    apart = [pair for here in joint if (pair := _apart(here)) is not None]
    power = Power(quantity="steps whose norms differ between ranks", smallest_detectable=APART_STEPS, unit="steps")
    compared = f"{counted(len(joint), 'step')} of {len(run.ranks)} ranks compared"
    are_many, are_most = len(apart) >= APART_STEPS, 2 * len(apart) > len(joint)
    if not are_many and not are_most:
        some = f", {len(apart)} of them differ" if apart else ""
        return answer((), power=power, reason=compared + some)
    if not are_many or not are_most:
        return Unknown(reason=f"{compared}: gradients differ in {len(apart)} of them, from step {apart[0].number} on")
    on_purpose = next((r.facts.unseen[OWN_GRADIENTS] for r in run.ranks if OWN_GRADIENTS in r.facts.unseen), "")
    if on_purpose:
        return Unknown(reason=f"{compared}: gradients differ in {len(apart)} of them, and {on_purpose}")
    shift = _shift(run.ranks, apart)
    if shift:
        first, other = apart[0].ranks
        return Unknown(
            reason=f"rank {other} numbers its steps {abs(shift)} {'later' if shift > 0 else 'earlier'} than rank {first}"
        )
    return answer([_finding(apart, len(joint), len(run.ranks))])


def _joint_steps(ranks: Sequence[RankRecord]) -> list[list[tuple[int, Step]]]:
    """By number: the step on every rank that took it with a gradient that can be compared, where two or more did."""
    by_number: dict[int, list[tuple[int, Step]]] = {}
    for record in ranks:
        for s in record.steps:
            if s.outcome is StepOutcome.STEPPED and _is_number(s.norm_after):
                by_number.setdefault(s.number, []).append((record.facts.rank, s))
    return [here for _, here in sorted(by_number.items()) if len(here) > 1]


def _is_number(value: float | None) -> bool:
    """Finite and above 0."""
    return value is not None and 0 < value < math.inf


def _apart(here: Sequence[tuple[int, Step]]) -> _Pair | None:
    after = _widest(here, "norm_after")
    if after is not None:
        return after
    # One bound hides the difference: then the norms that were clipped tell it. They may have been taken before a reduction by hand, so
    # that something behind the clipping has to differ too.
    was_cut = all(s.clip_bound is not None and _is_number(s.norm) and _cut(s) for _, s in here)
    differs = was_cut and any(_widest(here, name) is not None for name in ("trunk_norm_after", "moved"))
    return _widest(here, "norm") if differs else None


def _cut(step: Step) -> bool:
    """Clipping made the gradient shorter."""
    return (step.norm_after or 0.0) < (1 - TOLERANCE) * (step.norm or 0.0)


def _widest(here: Sequence[tuple[int, Step]], name: str) -> _Pair | None:
    values = [(value, rank) for rank, s in here if _is_number(value := getattr(s, name))]
    if len(values) < len(here):
        return None
    (low, low_rank), (high, high_rank) = min(values), max(values)
    if high - low <= TOLERANCE * high:
        return None
    ends = sorted([(low_rank, low), (high_rank, high)])
    return _Pair(number=here[0][1].number, ranks=(ends[0][0], ends[1][0]), norms=(ends[0][1], ends[1][1]))


def _shift(ranks: Sequence[RankRecord], apart: Sequence[_Pair]) -> int:
    """By how many steps the second rank of the first pair is numbered apart from the first rank, as most steps say; 0: it is not."""
    first, other = apart[0].ranks
    probed = [p.number for p in apart[-MOST_PROBED:]]  # the last ones: what came before the resume is aligned
    norms = [
        {s.number: s.norm for s in next(r for r in ranks if r.facts.rank == rank).steps if _is_number(s.norm)}
        for rank in (first, other)
    ]
    for shift in (sign * k for k in range(1, MOST_SHIFT + 1) for sign in (1, -1)):
        pairs = [(norms[0].get(n), norms[1].get(n + shift)) for n in probed]
        both = [(a, b) for a, b in pairs if a is not None and b is not None]
        num_equal = sum(abs(a - b) <= TOLERANCE * max(a, b) for a, b in both)
        if 2 * len(both) > len(probed) and 2 * num_equal > len(both):
            return shift
    return 0


def _finding(apart: Sequence[_Pair], num_joint: int, num_ranks: int) -> Finding:
    first = apart[0]
    return Finding(
        message=f"the ranks step with different gradients in {len(apart)} of {counted(num_joint, 'step')} that {num_ranks} ranks "
        f"have in common (step {first.number}: a norm of {first.norms[0]:.4g} on rank {first.ranks[0]}, {first.norms[1]:.4g} on rank "
        f"{first.ranks[1]}), though the model is wrapped in DDP: nothing is reduced, and each rank trains a model of its own on its "
        "share of the data. Call the wrapper, ddp(x), not model(x) or ddp.module(x), and leave the last micro-batch of each step "
        "outside of no_sync.",
        where=Where(step=first.number, rank=first.ranks[1]),
        measured=Quantity(value=len(apart), unit="steps whose gradients differ between ranks"),
        expected=Quantity(value=0, unit="steps whose gradients differ between ranks"),
        remedy="call the DDP module, not the model inside it",
    )
