"""GS109."""

from ghoststep.evidence.influence import Influence
from ghoststep.finding import Basis, Finding, Power, Quantity, Severity, Where
from ghoststep.registry import Answer, answer, check


@check(code="GS109", severity=Severity.NOTE, basis=Basis.MEASURED)
def documents_concatenated(influence: Influence) -> Answer:
    """Texts joined by an end or begin token see each other, and nothing announces them as separate.

    ## What it finds
    BOS or EOS tokens in the middle of an example, no announced document boundary, and a position behind one that depends on
    tokens before it.

    ## Why it matters
    It is common practice and works; but if the texts are independent, each is trained on accidental context.

    ## When it is not a problem
    Conversations, where turns end with a stop token and belong together; plain concatenation on purpose.

    ## How to confirm by hand
    Look for the end token inside `input_ids`.

    ## How to fix
    Nothing is needed. To keep the texts apart, restart `position_ids` and pass a block-diagonal mask.

    ## Options
    None.

    ## References
    None.
    """
    if not influence.separators:
        return answer((), power=Power(quantity="separators looked across", smallest_detectable=1, unit="positions"))
    example, position = influence.separators[0]
    return answer(
        [
            Finding(
                message=f"example {example} holds an end or begin token at position {position}, inside the text, and what follows sees "
                "what came before; no boundary is announced. Fine for conversations and plain concatenation; to keep independent "
                "texts apart, restart position_ids and pass a block-diagonal mask.",
                where=Where(example=example, position=position),
                measured=Quantity(value=len(influence.separators), unit="separators seen across"),
            )
        ]
    )
