"""GS113."""

from ghoststep.evidence.equivalence import Cached
from ghoststep.finding import Basis, Finding, Power, Quantity, Severity, Where
from ghoststep.registry import Answer, answer, check


@check(code="GS113", severity=Severity.WARNING, basis=Basis.MEASURED)
def cache_changes_output(cached: Cached) -> Answer:
    """Generation, with its cache, gives other hidden states than one forward over the same tokens.

    ## What it finds
    The longest text of the batch, in eval mode: the model's own `generate` is given all but the last three tokens and made to
    choose the text's own next ones. The hidden states of the last prompt token and of those it is fed one by one, against one
    forward over the whole text: the largest L2 change over the typical norm. Tolerance 1e-4 in float32, 2e-2 in bfloat16 and
    float16 confirmed by a float32 copy of the weights, and never under ten times what benign changes of shape cause in the same
    run. A warning where training generates (`intent="rl"`), else a note: nothing in the setup generates.

    ## Why it matters
    Training and its validation loss run whole texts; only generation uses the cache. A model that is right in training then writes
    rubbish, or slightly worse text, and no loss shows it.

    ## When it is not a problem
    The model is never used to generate.

    ## How to confirm by hand
    Generate greedily with `use_cache=True` and `use_cache=False`, and compare the logits.

    ## How to fix
    Positions of cached steps must go on counting from the number of tokens in the cache; keys must be stored with their rotation,
    once; a layer that looks at neighbours (convolution, shift) must keep them in the cache too.

    ## Options
    None.

    ## References
    Measured in transformers 5.24: CamemBERT and Data2Vec as decoders count positions in another way in generation than in training,
    which moves hidden states by their own size.
    """
    reading = cached.reading
    power = Power(quantity="change of a hidden state over its norm", smallest_detectable=reading.tolerance)
    said = f"{reading.num_positions} positions behind {cached.num_prompt} tokens move by up to {reading.change:.2g}"
    if not reading.num_above:
        return answer((), power=power, reason="; ".join((said, *cached.reasons)))
    start = "training generates, and that breaks" if reading.used_by else "would break in generation"
    start += "" if cached.is_default else " with a cache, which is not its default"
    if reading.starts_move:
        fix = (
            "The prompt's last token moves already, before anything comes from the cache: look at the position_ids and the mask that "
            "generation passes, and training does not."
        )
    else:
        fix = "Look at positions, rotation and masks of a step whose input is one token, and at layers that keep no state in the cache."
    finding = Finding(
        message=f"{start}: hidden states of {reading.num_above} of {reading.num_positions} positions move by up to "
        f"{reading.change:.2g} of their norm against one forward over the same tokens (tolerance {reading.tolerance:.0e}). {fix}",
        where=Where(example=reading.example, position=reading.position),
        measured=Quantity(value=reading.change, unit="change over the norm of a hidden state"),
        expected=Quantity(value=reading.tolerance, unit="change over the norm of a hidden state"),
        severity=Severity.WARNING if reading.used_by else Severity.NOTE,
        remedy="count positions from the length of the cache",
    )
    return answer([finding])
