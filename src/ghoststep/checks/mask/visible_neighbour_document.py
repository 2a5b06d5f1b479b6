"""GS104."""

from ghoststep.evidence.batch import BatchFacts
from ghoststep.evidence.influence import Influence, Region
from ghoststep.finding import Basis, Finding, Severity, Where
from ghoststep.registry import Answer, NotApplicable, answer, check
from ghoststep.visibility import NOTHING_EXPECTED, examples_mixed, judge_region, looked_at, power_of, without_power


@check(code="GS104", severity=Severity.ERROR, basis=Basis.MEASURED, explains_anywhere=("pack-changes-output",))
def visible_neighbour_document(influence: Influence, batch: BatchFacts) -> Answer:
    """Documents that the batch announces as separate see one another.

    ## What it finds
    Announced boundaries (restarting `position_ids`, sequence ids, `cu_seqlens`, a block-diagonal mask) and a hidden state that
    moves, or has a gradient, when a token of another document of the same example changes. Error above 1e-3 of the own past's
    influence, warning above 1e-5 (swap, float32) or 1e-6 (gradient).

    ## Why it matters
    Every document is trained on the accidental text before it; positions restart although the context does not, which no text
    at inference ever does.

    ## When it is not a problem
    Plain concatenation without announced boundaries (a note, `documents-concatenated`).

    ## How to confirm by hand
    Replace the first document's tokens and compare the logits of the second: they must be equal.

    ## How to fix
    Do not pass an all-ones `attention_mask` beside restarting `position_ids` (many implementations isolate documents only
    without a mask; those of transformers
    only with `use_cache=False`), pass a block-diagonal mask or `cu_seqlens`, and give recurrent layers `seq_idx`.

    ## Options
    None.

    ## References
    None.
    """
    if batch.document_BT is None:
        return NotApplicable(reason=f"no document boundary is announced ({batch.document_source})")
    mixed = examples_mixed(influence)
    if mixed is not None:
        return mixed
    if not looked_at(influence, Region.OTHER_DOCUMENT):
        return NotApplicable(reason="no example that was looked at holds two documents")
    seen = judge_region(influence, Region.OTHER_DOCUMENT)
    if seen is None:
        return without_power(influence) or answer((), power=power_of(influence), reason=f"{batch.document_source}: isolated")
    example, position = seen.reading.target
    document = int(batch.document_BT[example, position]) if not influence.is_time_first else None
    hint = (
        " An attention_mask is passed beside them: many implementations isolate documents only without one. Leave it out, or "
        "pass a block-diagonal mask."
        if batch.has_attention_mask
        else " Pass a block-diagonal mask, cu_seqlens or seq_idx that the model understands; a model of "
        "transformers reads documents off position_ids only without a cache: use_cache=False."
    )
    return answer(
        [
            Finding(
                message=f"the batch announces separate documents ({batch.document_source}), but they see one another: "
                f"{seen.proof}." + hint,
                where=Where(example=example, position=position, document=document),
                measured=seen.measured,
                expected=NOTHING_EXPECTED,
                severity=seen.severity,
                remedy="isolate the documents, or announce none",
            )
        ]
    )
