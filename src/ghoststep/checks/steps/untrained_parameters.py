"""GS421."""

from ghoststep.evidence.steps import QUIET_STEPS, RankRecord, RunRecord, UntrainedFacts
from ghoststep.finding import Basis, Finding, Power, Quantity, Severity, Where
from ghoststep.parameter_text import counted
from ghoststep.registry import Answer, Unknown, answer, check
from ghoststep.step_findings import looked_at, refusal
from ghoststep.text import visible

_OF_ONE = {"them": "it", "they": "it", "They": "It", "their": "its", "are": "is", "were": "was"}
"""Words of a message, where it is about one parameter."""


@check(code="GS421", severity=Severity.NOTE, basis=Basis.MEASURED)
def untrained_parameters(run: RunRecord) -> Answer:
    """Parameters of the model are set to train (requires_grad) and are not trained in a run.

    ## What it finds
    From 64 steps on, one note for each kind: parameters that no optimizer that has stepped holds, although they get gradients or are
    in an optimizer whose `step()` is never called; parameters in the optimizer that
    never got a gradient; parameters whose gradient was exactly zero, or missing, in each of the last 64 or more steps in which others
    had one. A warning where parameters with gradients are in no optimizer while the optimizer holds tensors that are not the model's
    and never get one: it was made before that part of the model was put in its place.

    ## Why it matters
    A head that stays as it was drawn, a second optimizer whose `step()` is missing, or a trunk cut off by a `detach()` gives a loss
    that falls all the same, only less far.

    ## When it is not a problem
    Only a part is meant to train and the rest was not frozen (linear probing; without gradients it is not told). Modules that
    this loss does not use (a pooler, an expert without tokens, another task's head). A loop that updates the parameters itself.
    Two models with one optimizer are told apart by the gradients. Parameters that pause are told only where they pause far
    longer than before. Parameters frozen meanwhile are left out; sharded ones are not judged.

    ## How to confirm by hand
    `held = {id(p) for g in optimizer.param_groups for p in g["params"]}`, then the named parameters that are not in it; `p.grad` of
    the named parameters after backward.

    ## How to fix
    Make the optimizer after the last change of the model; step every optimizer; look for a `detach()`, a `no_grad` or a unit that is
    always off. Freeze on purpose with `requires_grad_(False)`.

    ## Options
    None.

    ## References
    None.
    """
    refused = refusal(run, "num_gradients")
    if refused:
        return Unknown(reason=refused)
    findings: dict[tuple[str, ...], Finding] = {}
    reasons = []
    for record in (r for r in run.ranks if r.steps):
        if record.facts.untrained is None:
            reasons.append(_not_judged(record))
            continue
        for kind, finding in _findings(record, record.facts.untrained).items():
            findings.setdefault(kind, finding)  # the same on every rank
    power = Power(quantity="steps without a gradient", smallest_detectable=QUIET_STEPS, unit="steps")
    undecided = f"{reasons[0]} (on {len(reasons)} of {len(run.ranks)} ranks)" if len(run.ranks) > 1 and reasons else None
    return answer(
        findings.values(), power=power, reason=looked_at(run), undecided=undecided or (reasons[0] if reasons else None)
    )


def _not_judged(record: RankRecord) -> str:
    if record.facts.parallelism not in ("", "DDP"):
        return f"parameters are sharded ({record.facts.parallelism}): the shard of one rank may be empty or zero by itself"
    if len(record.steps) < QUIET_STEPS:
        return f"{counted(len(record.steps), 'step')} recorded; {QUIET_STEPS} are needed"
    return (
        f"fewer than {QUIET_STEPS} steps with a gradient since the process started last, or the record is of an earlier version, "
        "which did not look"
    )


def _findings(record: RankRecord, facts: UntrainedFacts) -> dict[tuple[str, ...], Finding]:
    """By kind and names."""
    found = {}
    if facts.num_unheld:
        found[("unheld", *facts.unheld)] = _unheld(record, facts)
    if facts.num_absent:
        found[("absent", *facts.absent)] = _finding(
            record, facts.absent, facts.num_absent,
            "in the optimizer and never had a gradient: the loss does not depend on {them} (a module that is not used, or a detach() "
            "or no_grad behind it). Weight decay is all that can move {them}. If {they} should train, look for what cuts {them} off; "
            "if not, freeze {them} (requires_grad_(False)) or leave {them} out of the optimizer.",
        )  # fmt: skip
    if facts.num_still:
        found[("still", *facts.still)] = _finding(
            record, facts.still, facts.num_still,
            f"in the optimizer and had a gradient of exactly zero, or none, in each of the last {QUIET_STEPS} or more steps in which "
            f"others had one ({_since(facts)}): a unit that is always off (a dead ReLU, a closed gate, a mask, a weight of 0), or a "
            "module that no batch used (an expert without tokens, another task's head). Look at what stands behind {them}.",
        )  # fmt: skip
    return found


def _unheld(record: RankRecord, facts: UntrainedFacts) -> Finding:
    text = "held by no optimizer that has stepped, so that no step changes {them}"
    if facts.num_unheld_alive:
        whose = "" if facts.num_unheld_alive == facts.num_unheld else f"{facts.num_unheld_alive} of "
        text += f"; {whose}{{their}} gradients are computed and thrown away"
    if facts.num_unheld_alive and facts.num_strange:
        one = facts.num_strange == 1
        text += (
            f". The optimizer holds {counted(facts.num_strange, 'trainable tensor')} that {'is' if one else 'are'} not in this model "
            f"and never {'gets' if one else 'get'} a gradient: the optimizer was made before "
            "this part was put in place. Make the optimizer after the last change of the model."
        )
        return _finding(record, facts.unheld, facts.num_unheld, text, severity=Severity.WARNING)
    if facts.num_idle:
        some = "{They} {are}" if facts.num_idle == facts.num_unheld else f"{facts.num_idle} of {{them}} are"
        text += f". {some} in an optimizer whose step() was never called: call it in the loop"
    text += (
        ". If {they} should train, give {them} to an optimizer and step it; if not, freeze {them} (requires_grad_(False)): gradients "
        "cost memory and count in clipping. A loop that updates {them} itself looks the same."
    )
    return _finding(record, facts.unheld, facts.num_unheld, text)


def _finding(record: RankRecord, names: tuple[str, ...], count: int, text: str, *, severity: Severity | None = None) -> Finding:
    one = count == 1
    shown = ", ".join(visible(n) for n in names[:3]) + (f" and {count - 3} more" if count > 3 else "")
    for word, single in _OF_ONE.items():
        text = text.replace(f"{{{word}}}", single if one else word)
    steps = record.steps[-1].number
    return Finding(
        message=f"by step {steps}, {counted(count, 'trainable parameter')} ({shown}) {'is' if one else 'are'} {text}",
        where=Where(parameter=names[0] if names else None, rank=record.facts.rank),
        measured=Quantity(value=count, unit="trainable parameters that are not trained"),
        expected=Quantity(value=0, unit="trainable parameters that are not trained"),
        severity=severity,
    )


def _since(facts: UntrainedFacts) -> str:
    """When the first names had their last gradient."""
    shown = facts.still_since[:3]
    if not any(shown):
        return "and never another one"
    said = ", ".join(f"step {n}" if n else "never" for n in shown)
    return f"last one that was not zero: {said}"
