"""GS208."""

from collections.abc import Mapping

from ghoststep.evidence.batch import BatchFacts
from ghoststep.evidence.loss import LossXray
from ghoststep.finding import Basis, Finding, Power, Quantity, Severity, Where
from ghoststep.label_shift import counted, likely_offset, measure_shift, no_answer
from ghoststep.registry import Answer, NotApplicable, Unknown, answer, check


@check(code="GS208", severity=Severity.ERROR, basis=Basis.MEASURED)
def unsupervised_stop_token(xray: LossXray, batch: BatchFacts) -> Answer:
    """No end of a trained text teaches the end token: it stands there and is no target, or it was never appended.

    ## What it finds
    Positions e with ids[e] an end token that is no padding, where ids[e - 1] is trained as a target and ids[e] is not, at every such
    end of the batch. Or: no end token stands at or behind the trained end of any of at least three padded examples, although the
    setup's tokenizer names one (a warning).

    ## Why it matters
    The model answers and then goes on to the length limit. The training loss shows nothing.

    ## When it is not a problem
    Another stop token (`<|im_end|>`) just before it is trained; texts that were cut at the full length and carry no end token; end
    tokens inside a prompt; texts that all end in the same two or more tokens (a stop string of one's own).

    ## How to confirm by hand
    `(labels == eos_token_id).sum()` is 0 while `((input_ids == eos_token_id) & (attention_mask == 1)).sum()` is not.

    ## How to fix
    Give padding an id of its own, or mask labels by the attention mask instead of by the pad id:
    `labels[attention_mask == 0] = -100`. Append `tokenizer.eos_token` to each text where it is missing.

    ## Options
    None.

    ## References
    None.
    """
    refused = no_answer(xray, signed=True)
    if refused:
        return Unknown(reason=refused)
    shift = measure_shift(xray, batch)
    offset = likely_offset(shift, batch)
    if offset == 0 or batch.intent == "masked":
        return NotApplicable(reason="positions predict their own token, not the next one: nothing is generated from its end")
    if not batch.eos_ids:
        return Unknown(reason="no end token is known: neither tokenizer nor config names one")
    targets = {(c.example, c.source): c.target for c in counted(xray, offset) if c.source is not None}
    padding = None if batch.padding_BT is None else batch.padding_BT.tolist()
    trained, missed = _ends(batch, targets, padding, offset)
    bare = [] if trained or missed or no_answer(xray) else _bare_ends(batch, targets)
    if bare:
        return answer([_never_appended(batch, bare)])
    if trained or not missed:
        power = Power(quantity="ends of trained text", smallest_detectable=1, unit="ends")
        if not trained:
            return NotApplicable(reason="no trained text of this batch ends with an end token")
        return answer((), power=power, reason=f"{trained} of {trained + len(missed)} ends are trained")
    b, e, token = missed[0]
    same = f" The pad id is the end token's own ({token}), and labels are masked by it." if batch.pad_id == token else ""
    return answer(
        [
            Finding(
                message=f"the end token {token} is never a target: at all {len(missed)} ends of trained text in this batch the token "
                f"before it is trained and it is not (the first is position {e} of example {b}).{same} The model will not learn to "
                "stop. Mask labels where attention_mask == 0 instead of where the id is the pad id.",
                where=Where(example=b, position=e, token_id=token),
                measured=Quantity(value=0, unit="end tokens trained"),
                expected=Quantity(value=len(missed), unit="end tokens trained"),
                remedy="labels[attention_mask == 0] = -100  # and leave the end token in",
            )
        ]
    )


def _ends(
    batch: BatchFacts, targets: Mapping[tuple[int, int], int], padding: list[list[bool]] | None, offset: int
) -> tuple[int, list[tuple[int, int, int]]]:
    """How many ends of trained text are trained, and (example, position, end token) of those that are not."""
    missed: list[tuple[int, int, int]] = []
    trained = 0
    for b, ids in enumerate(batch.ids_BT.tolist()):
        for e in range(offset, len(ids)):
            if ids[e] not in batch.eos_ids or (padding is not None and padding[b][e]) or ids[e - 1] in batch.eos_ids:
                continue
            if (b, e) in targets:
                trained += 1
            elif (b, e - 1) in targets:
                near = {targets.get((b, p)) for p in range(max(0, e - 3), e)}
                if near & (batch.special_ids - set(batch.eos_ids)):
                    trained += 1
                else:
                    missed.append((b, e, ids[e]))
    return trained, missed


def _bare_ends(batch: BatchFacts, targets: Mapping[tuple[int, int], int]) -> list[tuple[int, int]]:
    """(example, position) of the last real token of padded examples, if it is trained everywhere and no stop token anywhere.

    Empty where fewer than three examples are padded at the right, where any of them ends in a special token or is trained to
    stop behind its end, and where all end in the same two tokens, which is a stop string.
    """
    if batch.padding_BT is None or batch.document_BT is not None or not set(batch.eos_ids) & batch.special_ids:
        return []  # without a tokenizer the end token is a default of some config: nobody says that texts are to end in it
    stops = set(batch.eos_ids) | set(batch.special_ids)
    ends, tails = [], set()
    for b, (ids, padding) in enumerate(zip(batch.ids_BT.tolist(), batch.padding_BT.tolist(), strict=True)):
        real = [t for t in range(len(ids)) if not padding[t]]
        if len(real) < 3 or not padding[-1] or len(real) != real[-1] - real[0] + 1:
            continue
        last = real[-1]
        near = {ids[t] for t in real[-3:]} | {targets.get((b, last + 1), -1)}
        if near & stops:
            return []
        if (b, last) in targets:
            ends.append((b, last))
            tails.add((ids[last - 1], ids[last]))
    return ends if len(ends) >= 3 and len(tails) > 1 else []


def _never_appended(batch: BatchFacts, ends: list[tuple[int, int]]) -> Finding:
    example, position = ends[0]
    return Finding(
        message=f"texts end without an end token: none of the {len(ends)} padded examples whose last token is trained ends in "
        f"{' or '.join(map(str, batch.eos_ids))}, nor in any other special token (the first ends at position {position} of example "
        f"{example}). The model will not learn to stop. Append the end token to each text before it is padded.",
        where=Where(example=example, position=position),
        measured=Quantity(value=0, unit="texts with an end token"),
        expected=Quantity(value=len(ends), unit="texts with an end token"),
        severity=Severity.WARNING,
        remedy="text + tokenizer.eos_token",
    )
