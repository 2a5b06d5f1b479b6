"""GS309."""

from ghoststep.evidence.tokenizer import TemplateTokens, Vocabulary
from ghoststep.finding import Basis, Finding, Power, Quantity, Severity, Where
from ghoststep.registry import Answer, answer, check
from ghoststep.text import printable


@check(code="GS309", severity=Severity.WARNING, basis=Basis.PROOF)
def split_template_markers(template: TemplateTokens, vocabulary: Vocabulary) -> Answer:
    """The chat template writes markers that the tokenizer cuts into several ordinary tokens.

    ## What it finds
    Literals of the rendered template that are shaped like one marker (`<|im_start|>`, `<start_of_turn>`) and encode to more than
    one id.

    ## Why it matters
    The template was taken from a model whose tokenizer knows the marker as one token. Here it becomes ordinary text: a user can
    type it, it costs several positions a turn, it is not stopped at, and no single table row learns to stand for it.

    ## When it is not a problem
    Old formats whose markers are plain text by design (`[INST]`, `### Answer:`); they are not shaped like one token and are
    silent here.

    ## How to confirm by hand
    `tok.encode("<|im_start|>", add_special_tokens=False)` has more than one id.

    ## How to fix
    `tok.add_special_tokens({"additional_special_tokens": [...]})`, resize the table, initialise and train the new rows; or use
    the template that belongs to this tokenizer.

    ## Options
    None.

    ## References
    Silent on the templates of llama3, qwen3 and SmolLM2 with their own tokenizers.
    """
    findings = [
        Finding(
            message=f"the chat template writes {printable(marker)}, which the tokenizer cuts into several ordinary tokens: no table "
            "row stands for it, and users can type it. Add it as a special token, or use the template of this tokenizer.",
            where=Where(file=vocabulary.file, token=marker),
            measured=Quantity(value=len(template.split_markers), unit="split markers"),
            expected=Quantity(value=0, unit="split markers"),
            remedy='tok.add_special_tokens({"additional_special_tokens": [...]}) and resize the table',
        )
        for marker in template.split_markers
    ]
    power = Power(quantity="markers cut into several tokens", smallest_detectable=1, unit="markers")
    return answer(findings, power=power)
