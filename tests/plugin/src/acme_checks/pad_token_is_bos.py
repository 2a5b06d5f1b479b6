"""ACME101."""

from ghoststep.evidence.tokenizer import Vocabulary
from ghoststep.finding import Basis, Finding, Quantity, Severity, Where
from ghoststep.registry import Answer, NotApplicable, answer, check


@check(code="ACME101", severity=Severity.WARNING, basis=Basis.PROOF)
def pad_token_is_bos(vocabulary: Vocabulary) -> Answer:
    """The padding token is the token that begins every text.

    ## What it finds
    A tokenizer whose `pad` and `bos` roles have one id.

    ## Why it matters
    Code that leaves padding out by its id leaves out the first position of every example too.

    ## When it is not a problem
    When padding is only ever recognised by the attention mask.

    ## How to confirm by hand
    Compare `pad_token` and `bos_token` in tokenizer_config.json.

    ## How to fix
    Give padding a token of its own, or use the end-of-text token and recognise padding by the mask.

    ## Options
    None.

    ## References
    The rule is ACME's own.
    """
    pad, bos = vocabulary.special_ids.get("pad"), vocabulary.special_ids.get("bos")
    if pad is None or bos is None:
        return NotApplicable(reason=f"the tokenizer has no {'padding' if pad is None else 'BOS'} token")
    finding = Finding(
        message=(
            f"padding and BOS are both id {pad}: whatever leaves padding out by its id leaves out the first position of every "
            f"example too. The tokenizer says so for both roles. Give padding a token of its own."
        ),
        where=Where(file=vocabulary.file, token_id=pad),
        measured=Quantity(value=pad, unit="token id"),
    )
    return answer([finding] if pad == bos else [])
