"""GS308."""

from ghoststep.evidence.tokenizer import ADDED_NOT_MATCHED, NEVER_BUILT, Reach, Vocabulary, VocabularyReach
from ghoststep.finding import Basis, Finding, Power, Quantity, Severity, Where
from ghoststep.registry import Answer, answer, check
from ghoststep.text import printable

_FAULTS = {
    NEVER_BUILT: "they are in the vocabulary, but no sequence of merges ends in them, so no text ever produces them and their "
    "rows are never trained. Add them as added tokens, or train the tokenizer with merges that build them.",
    ADDED_NOT_MATCHED: "the text that they were added for encodes to other ids, so their rows are never trained. Look at "
    "`normalized`, `lstrip`, `rstrip` and `single_word` of the added token, and at tokens that contain it.",
}


@check(code="GS308", severity=Severity.WARNING, basis=Basis.PROOF)
def unreachable_tokens(reach: VocabularyReach, vocabulary: Vocabulary, *, usual_fraction: float = 0.25) -> Answer:
    """Tokens that someone added, and that no text can ever produce.

    ## What it finds
    Ids that decode → re-encode does not bring back beside any neighbour, and whose cause is a fault: a BPE token that the merges
    never build, or an added token that its own string does not match (warning). Also a vocabulary of which more than
    `usual_fraction` is unreachable for whatever cause (note).

    ## Why it matters
    Tokens are added to be learnt. If text never produces them, the rows stay at their initialisation while the loss falls, and
    the new words go on being cut into pieces.

    ## When it is not a problem
    Unreachable by design: reserved entries (`[unused5]`), continuation pieces that a pre-tokenizer always separates, bytes that
    have a character token, pieces that normalisation rewrites. One published encoder has 1,331 of 30,522, one published decoder
    1,909 of 151,669; both are silent here.

    ## How to confirm by hand
    `tok.encode("a " + tok.decode([id]) + " b")` does not contain the id, whatever stands around it.

    ## How to fix
    For new words use `tok.add_tokens([...])` rather than editing the vocabulary; then encode one sentence with each of them.

    ## Options
    `usual_fraction`: 0.25 by default; far above every real tokenizer that was measured (0 to 4.4 %).

    ## References
    Measured on ten published tokenizers: none has a token with either fault.
    """
    findings = []
    for cause, meaning in _FAULTS.items():
        count = reach.cause_counts.get(cause, 0)
        if count:
            shown = [(i, token) for i, token, why in reach.examples if why == cause]
            names = ", ".join(f"{printable(token, 40)} = {i}" for i, token in shown[:5]) + (", ..." if count > 5 else "")
            first = shown[0] if shown else (None, None)
            findings.append(
                Finding(
                    message=f"{count} tokens are never produced ({names}): {meaning}",
                    where=Where(file=vocabulary.file, token_id=first[0], token=first[1]),
                    measured=Quantity(value=count, unit="unreachable tokens"),
                    expected=Quantity(value=0, unit="unreachable tokens"),
                    remedy="tok.add_tokens([...]), then check that each encodes to one id",
                )
            )
    total = reach.count(Reach.UNREACHABLE)
    causes = ", ".join(f"{count} {cause}" for cause, count in sorted(reach.cause_counts.items(), key=lambda c: -c[1]))
    share = total / max(1, vocabulary.num_tokens)
    if share > usual_fraction:
        findings.append(
            Finding(
                message=f"{total} of {vocabulary.num_tokens} tokens are never produced by text ({causes}): far more than in any "
                "usual tokenizer. Is this the tokenizer that the model was made with?",
                where=Where(file=vocabulary.file),
                measured=Quantity(value=round(share, 4), unit="of the vocabulary"),
                expected=Quantity(value=usual_fraction, unit="of the vocabulary, at most"),
                severity=Severity.NOTE,
                basis=Basis.RULE_OF_THUMB,
            )
        )
    reason = (
        f"{total} of {vocabulary.num_tokens} tokens are unreachable by design ({causes})"
        if total
        else "every token is reachable"
    )
    partial = reach.count(Reach.PARTIAL_UTF8)
    if partial:
        reason += f"; {partial} are parts of multi-byte characters, undetermined alone"
    return answer(
        findings, power=Power(quantity="tokens that no text produces", smallest_detectable=1, unit="tokens"), reason=reason
    )
