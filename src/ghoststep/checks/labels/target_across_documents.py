"""GS211."""

from ghoststep.evidence.batch import BatchFacts
from ghoststep.evidence.loss import LossXray
from ghoststep.finding import Basis, Finding, Power, Quantity, Severity, Where
from ghoststep.label_shift import counted, likely_offset, measure_shift, no_answer
from ghoststep.registry import Answer, NotApplicable, Unknown, answer, check


@check(code="GS211", severity=Severity.WARNING, basis=Basis.MEASURED)
def target_across_documents(xray: LossXray, batch: BatchFacts) -> Answer:
    """The last token of a packed document is trained to predict the first token of the next one.

    ## What it finds
    Positions t that carry loss whose target is the token at t + 1, where t and t + 1 belong to different announced documents [B, T].

    ## Why it matters
    The next document's first token cannot be predicted: the loss has a floor that grows with the number of documents, and the end
    of one text is tied to the beginning of an unrelated one.

    ## When it is not a problem
    Nobody announced boundaries (plain concatenation is common practice); labels at the first token of each document are -100.

    ## How to confirm by hand
    `labels[position_ids == 0]` holds something else than -100.

    ## How to fix
    `labels[position_ids == 0] = -100` for a class that shifts by itself.

    ## Options
    None.

    ## References
    None.
    """
    if batch.document_BT is None:
        return NotApplicable(reason=f"no documents are announced: {batch.document_source}")
    refused = no_answer(xray, signed=True)
    if refused:
        return Unknown(reason=refused)
    offset = likely_offset(measure_shift(xray, batch), batch)
    documents, ids = batch.document_BT.tolist(), batch.ids_BT.tolist()
    padding = None if batch.padding_BT is None else batch.padding_BT.tolist()
    positions = list(counted(xray, offset))
    bad = [
        c for c in positions
        if c.source is not None and ids[c.example][c.source] == c.target
        and documents[c.example][c.source] != documents[c.example][c.position]
        and not (padding is not None and (padding[c.example][c.source] or padding[c.example][c.position]))
    ]  # fmt: skip
    if not bad:
        return answer((), power=Power(quantity="targets across a boundary", smallest_detectable=1, unit="positions"))
    first = bad[0]
    document = documents[first.example][first.position]
    return answer(
        [
            Finding(
                message=f"{len(bad)} of {len(positions)} trained positions predict the first token of the next document "
                f"({batch.document_source}): position {first.position} of example {first.example} ends document {document} and is "
                f"trained to predict token {first.target}. Set the labels at the first token of each document to -100.",
                where=Where(example=first.example, position=first.position, document=document, token_id=first.target),
                measured=Quantity(value=len(bad), unit="positions"),
                expected=Quantity(value=0, unit="positions"),
                remedy="labels[position_ids == 0] = -100",
            )
        ]
    )
