"""GS604."""

import re

from ghoststep.evidence.training import LiveWiring, ParameterFacts
from ghoststep.finding import Basis, Finding, Power, Quantity, Severity, Where
from ghoststep.parameter_text import counted, listed
from ghoststep.registry import Answer, NotApplicable, answer, check

_NUMBER = re.compile(r"\.\d+\.")


@check(code="GS604", severity=Severity.ERROR, basis=Basis.PROOF, explains_anywhere=("trainable-without-gradient",))
def frozen_by_accident(wiring: LiveWiring, *, minority_fraction: float = 0.1) -> Answer:
    """Parameters that the optimizer is to train are frozen, against everything around them.

    ## What it finds
    - An optimizer that holds no trainable parameter at all (error).
    - A frozen output head of its own in the optimizer, while the input table and at least nine tenths of all else train (warning).
    - A frozen table (input embedding, or a head tied to it) in the optimizer, while at least nine tenths of all else train (note: it
      may be meant).
    - A few frozen parameters in the optimizer inside layers that train otherwise, while the same parameter of other layers trains
      (warning).

    ## Why it matters
    A frozen parameter is skipped by backward and by the optimizer without a word.

    ## When it is not a problem
    Frozen on purpose: adapters over a frozen base, whole frozen layers, frozen parameters that the optimizer does not hold. A frozen
    embedding table that the optimizer holds is named in a note, because nothing tells which of the two is meant.

    ## How to confirm by hand
    `[n for n, p in model.named_parameters() if not p.requires_grad]`.

    ## How to fix
    `p.requires_grad_(True)` for what is to train; leave what is frozen on purpose out of the optimizer.

    ## Options
    `minority_fraction`: the share of the optimizer's tensors up to which frozen ones count as an exception (0.1).

    ## References
    None.
    """
    if not wiring.has_optimizer:
        return NotApplicable(reason="the setup has no optimizer: nothing claims to train a parameter")
    if wiring.holds_copies:
        return NotApplicable(reason="the optimizer holds copies of the parameters (master weights)")
    claimed = [p for p in wiring.parameters if p.group is not None]
    frozen = [p for p in claimed if not p.trainable]
    power = Power(quantity="frozen parameters in the optimizer", smallest_detectable=1, unit="parameters")
    trained_elsewhere = any(o.gets_gradient for o in wiring.orphans)
    if claimed and len(frozen) == len(claimed) and not trained_elsewhere:
        return answer([_all_frozen(wiring, frozen)])
    findings = []
    head = wiring.named(wiring.head) if wiring.head else None
    num_trainable = sum(1 for p in wiring.parameters if p.trainable)
    rest = len(wiring.parameters) - 1
    tables_train = any(t.parameter != wiring.head for t in wiring.tables)
    if head in frozen and head is not None and tables_train and num_trainable >= (1 - minority_fraction) * rest:
        findings.append(_finding([head], "the output head", len(claimed)))
    elif num_trainable >= (1 - minority_fraction) * rest:
        findings += [_table(p, len(claimed)) for p in frozen if _is_table(p, wiring)]
    if 0 < len(frozen) <= max(1.0, minority_fraction * len(claimed)):
        odd = [p for p in frozen if p is not head and not _is_table(p, wiring) and _is_exception(p, wiring)]
        if odd:
            findings.append(_finding(odd, listed([p.name for p in odd]), len(claimed)))
    return answer(findings, power=power, reason=f"{counted(len(frozen), 'frozen parameter')} in the optimizer")


def _is_exception(p: ParameterFacts, wiring: LiveWiring) -> bool:
    """The same parameter trains in other layers, and most of its own layer trains."""
    if not _NUMBER.search(p.name):
        return False
    role = _NUMBER.sub(".*.", p.name)
    twins = [q for q in wiring.parameters if q is not p and _NUMBER.sub(".*.", q.name) == role]
    match = _NUMBER.search(p.name)
    layer = p.name[: match.end()] if match else p.name
    own = [q for q in wiring.parameters if q is not p and q.name.startswith(layer)]
    return bool(twins and own) and all(q.trainable for q in twins) and sum(q.trainable for q in own) > len(own) / 2


def _is_table(p: ParameterFacts, wiring: LiveWiring) -> bool:
    """The input embedding's table, or the head's weight."""
    return p.name in (wiring.head, wiring.embedding) or bool({wiring.head, wiring.embedding} - {""} & set(p.aliases))


def _table(p: ParameterFacts, num_claimed: int) -> Finding:
    tied = f" (also {', '.join(p.aliases)})" if p.aliases else ""
    return Finding(
        message=f"the table {p.name}{tied} is frozen (requires_grad is False) while the rest trains, and the optimizer holds it (group "
        f"{p.group}, {num_claimed} parameters): no step changes it. If that is meant, leave it out of the optimizer; else set "
        "requires_grad_(True).",
        where=Where(parameter=p.name),
        measured=Quantity(value=1, unit="frozen parameters in the optimizer"),
        expected=Quantity(value=0, unit="frozen parameters in the optimizer"),
        severity=Severity.NOTE,
        basis=Basis.MEASURED,
        remedy="requires_grad_(True), or leave it out of the optimizer",
    )


def _all_frozen(wiring: LiveWiring, frozen: list[ParameterFacts]) -> Finding:
    others = [p.name for p in wiring.parameters if p.trainable]
    rest = f" Trainable are {listed(others)}, which it does not hold." if others else " No parameter of the model is trainable."
    return Finding(
        message=f"all {len(frozen)} parameters in the optimizer are frozen ({listed([p.name for p in frozen])}): no "
        "step changes anything."
        f"{rest} Set requires_grad_(True) on what is to train, and make the optimizer from that.",
        where=Where(),
        measured=Quantity(value=len(frozen), unit="frozen parameters in the optimizer"),
        expected=Quantity(value=0, unit="frozen parameters in the optimizer"),
        remedy="requires_grad_(True) on the parameters to train",
    )


def _finding(odd: list[ParameterFacts], what: str, num_claimed: int) -> Finding:
    return Finding(
        message=f"{what} ({listed([p.name for p in odd])}) is frozen (requires_grad is False) while its like trains, "
        "and the optimizer "
        f"holds it (group {odd[0].group}, {num_claimed} parameters): it stays as it is for the whole run. Set "
        "requires_grad_(True), or "
        "leave it out of the optimizer if it is meant.",
        where=Where(parameter=odd[0].name),
        measured=Quantity(value=len(odd), unit="frozen parameters in the optimizer"),
        expected=Quantity(value=0, unit="frozen parameters in the optimizer"),
        severity=Severity.WARNING,
        basis=Basis.MEASURED,
        remedy="requires_grad_(True), or leave it out of the optimizer",
    )
