"""GS209."""

from ghoststep.evidence.batch import BatchFacts
from ghoststep.finding import Basis, Finding, Power, Quantity, Severity, Where
from ghoststep.registry import Answer, NotApplicable, answer, check


@check(code="GS209", severity=Severity.WARNING, basis=Basis.MEASURED)
def bos_count(batch: BatchFacts) -> Answer:
    """Texts begin with two BOS tokens, or with none where the tokenizer puts one.

    ## What it finds
    The first real ids of each example of the batch [B, T]: BOS twice; or no BOS anywhere although `tokenizer("a")` begins with it.

    ## Why it matters
    The chat template writes BOS and the tokenizer adds another: training sees a beginning that generation never uses (or the
    other way round). Models that lean on BOS as an attention sink lose quality at once when it is missing.

    ## When it is not a problem
    Tokenizers that add no BOS; pieces of a packed stream, where BOS stands inside; BOS = EOS between documents.

    ## How to confirm by hand
    `tokenizer.convert_ids_to_tokens(batch["input_ids"][0][:3])`.

    ## How to fix
    `tokenizer(text, add_special_tokens=False)` on text that comes from `apply_chat_template`.

    ## Options
    None.

    ## References
    None.
    """
    bos = batch.bos_id
    if bos is None:
        return NotApplicable(reason="no BOS token is known")
    if bos in batch.eos_ids or bos == batch.pad_id:
        return NotApplicable(reason="BOS shares its id with the end or pad token, so its occurrences cannot be read")
    padding = None if batch.padding_BT is None else batch.padding_BT.tolist()
    texts = []
    for b, ids in enumerate(batch.ids_BT.tolist()):
        real = [t for t in range(len(ids)) if padding is None or not padding[b][t]]
        if real:
            texts.append((b, real[0], [ids[t] for t in real]))
    twice = [(b, t) for b, t, ids in texts if ids[:2] == [bos, bos]]
    none = [(b, t) for b, t, ids in texts if bos not in ids]
    power = Power(quantity="examples with a wrong number of BOS", smallest_detectable=1, unit="examples")
    if twice:
        b, t = twice[0]
        message = (
            f"{len(twice)} of {len(texts)} examples begin with BOS ({bos}) twice, the first is example {b}: the template and the "
            "tokenizer both add it. Tokenize templated text with add_special_tokens=False."
        )
        value, remedy = 2, "tokenizer(text, add_special_tokens=False)"
    elif batch.adds_bos and texts and len(none) == len(texts):
        b, t = none[0]
        message = (
            f"none of {len(texts)} examples contains BOS ({bos}), but the tokenizer puts it in front of every text: training and "
            "generation begin differently. Tokenize with add_special_tokens=True, or add BOS to the template."
        )
        value, remedy = 0, "tokenizer(text, add_special_tokens=True)"
    else:
        return answer((), power=power)
    return answer(
        [
            Finding(
                message=message,
                where=Where(example=b, position=t, token_id=bos),
                measured=Quantity(value=value, unit="BOS tokens at the start"),
                expected=Quantity(value=1, unit="BOS tokens at the start"),
                remedy=remedy,
            )
        ]
    )
