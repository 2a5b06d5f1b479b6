"""GS510."""

from ghoststep.evidence.contrastive import ContrastiveForm, ContrastiveXray
from ghoststep.finding import Basis, Finding, Power, Quantity, Severity, Where
from ghoststep.registry import Answer, NotApplicable, Unknown, answer, check


@check(code="GS510", severity=Severity.ERROR, basis=Basis.MEASURED, explains_anywhere=("capped-logit-scale",))
def misaligned_positives(xray: ContrastiveXray, *, minimum_share: float = 0.5, least_anchors: int = 4) -> Answer:
    """A contrastive loss pulls examples to the partners of others instead of their own.

    ## What it finds
    The user's own loss is fed orthogonal embeddings; its gradient tells for each one which others it is pulled to and pushed from.
    Found where what an anchor is pulled to belongs to another example, and the text that stands beside the anchor in the batch
    (another column, the same example) is not among it.

    ## Why it matters
    The loss falls as the model fits what it can, and retrieval stays at chance. Typical: pairs flattened to [2B, T] one after
    another but split as two halves; a reversed or shifted index; positives shuffled apart from their queries.

    ## When it is not a problem
    Labels in the batch that pair examples otherwise, classes of equal labels, several positives of which the own one is one, equal
    texts, batches of one column: these are left alone.

    ## How to confirm by hand
    Print the texts of an anchor and of the column of the logits that its label points at.

    ## How to fix
    Keep both texts of a pair at one index of the two halves: `torch.cat([query, positive])` with `chunk(2)`, or `z[0::2], z[1::2]`
    for pairs that stand one after another.

    ## Options
    `minimum_share`: part of the paired anchors that must be pulled elsewhere (0.5). `least_anchors`: fewer say too little (4).

    ## References
    None.
    """
    if xray.form is ContrastiveForm.OTHER:
        return Unknown(reason=f"the loss is {xray.form.value}: what it pulls together could not be read")
    if xray.text_N is None:
        return Unknown(reason="the texts behind the embeddings could not be matched to them")
    if not xray.num_paired:
        return NotApplicable(reason="no anchor has a partner: the batch holds no second column of texts that the loss compares")
    if xray.num_paired < least_anchors:
        return Unknown(reason=f"{xray.num_paired} anchors have a partner in the batch; {least_anchors} are needed to judge")
    share = len(xray.misplaced) / xray.num_paired
    power = Power(quantity="share of anchors pulled to another example", smallest_detectable=minimum_share, unit="fraction")
    if share < minimum_share or not xray.misplaced:
        return answer((), power=power, reason=f"{len(xray.misplaced)} of {xray.num_paired} anchors are pulled elsewhere")
    i, j = (xray.example_N[k] if xray.example_N else k for k in xray.misplaced[0])
    one, other = xray.columns
    return answer(
        [
            Finding(
                message=f"{len(xray.misplaced)} of {xray.num_paired} anchors are pulled to a text of another example instead of their "
                f"own partner: example {i} to one of example {j}, while `{one}` and `{other}` stand side by side in the batch. "
                "Make the index of the positive match, e.g. z[0::2], z[1::2] for pairs flattened one after another.",
                where=Where(example=i if i >= 0 else None),
                measured=Quantity(value=round(share, 4), unit="share of anchors"),
                expected=Quantity(value=0, unit="share of anchors"),
                remedy="pair each anchor with the positive of its own example",
            )
        ]
    )
