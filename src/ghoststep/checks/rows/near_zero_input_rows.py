"""GS301."""

from ghoststep.evidence.amplification import Amplification, SpikedStep
from ghoststep.evidence.base import Missing
from ghoststep.evidence.checkpoint import Declared, StoredTensors
from ghoststep.evidence.plan import TrainingPlan
from ghoststep.evidence.rows import InputRows, OutputRows
from ghoststep.evidence.tokenizer import SuspectReach, TemplateTokens, Vocabulary
from ghoststep.evidence.wiring import MixingClass
from ghoststep.finding import Basis, Power, Severity
from ghoststep.registry import Answer, check
from ghoststep.row_findings import judge_rows, row_case
from ghoststep.row_measurement import NOT_MEASURED
from ghoststep.severity import SPIKE_NORM


@check(code="GS301", severity=Severity.ERROR, basis=Basis.MEASURED, explains=("amplified-rows", "dead-template-rows"))
def near_zero_input_rows(
    inputs: InputRows,
    outputs: OutputRows | Missing,
    mixing: MixingClass | Missing,
    reach: SuspectReach | Missing,
    template: TemplateTokens | Missing,
    vocabulary: Vocabulary | Missing,
    declared: Declared | Missing,
    stored: StoredTensors | Missing,
    plan: TrainingPlan,
    amplified: Amplification | Missing = NOT_MEASURED,
    spiked: SpikedStep | Missing = NOT_MEASURED,
    *,
    norm_limit: float = SPIKE_NORM,
) -> Answer:
    """A token that training can feed has an input embedding row that decayed to almost nothing.

    ## What it finds
    Rows of the input table, shape [table rows, dims], with 0 < multiplier × L2 norm < `norm_limit`, whose token text or the
    chat template can produce. Norms are taken in float64 where float32 would read 0, so 1e-30 is seen. `multiplier` is the
    factor that the config applies after the lookup.

    ## Why it matters
    Normalisation divides by the row's norm, so the gradient of the row is about c/(N·r): c ≈ 10, N loss tokens in the batch, r
    the norm. Under 6e-7 one occurrence has a gradient 1e3 times the clipping bound and every other gradient is crushed; under
    about 1e-20 the fp32 norm overflows and clipping sets the whole step to exactly 0.0. The loss stays ordinary and no log
    says a word. Where attention reaches a normal token the effect vanishes: recurrent and gated layers without attention
    beside them amplify at any position, attention-only models at the first visible position (position 0, the start of a packed
    document, after left padding).

    On a live setup the gradient is measured (`amplified-rows`), and the measured figure decides, not the wiring.

    ## When it is not a problem
    The table is frozen (`--training lora` or `frozen-embeddings`); nothing produces the token; the row has no token at all
    (alignment padding); the model adds learned positions to the row (GPT-2).

    ## How to confirm by hand
    `w[row].double().norm()` of the input embedding; then one forward and backward with the token in the batch, and the norm of
    its row's gradient.

    ## How to fix
    Before training, set the rows to a small random vector of about a tenth of the median norm, never to zeros. In our runs
    (Mamba-2, 6 layers) that left 0 of 504 such steps lost, against all 504 with the rows as they were.

    ## Options
    `norm_limit`: effective L2 norm under which a row counts; 1e-6 by default.

    ## References
    Amplification, clipping and repair were re-measured with torch 2.13 and transformers 5.24 on small random models; the
    norms at which single steps are lost (6e-7, 2e-20) follow from c/(N·r) with c as measured.
    """
    norms = inputs.rows.norms_R * inputs.multiplier
    table_rows = [int(i) for i in ((norms < norm_limit) & (norms > 0)).nonzero()[0]]
    case = row_case(inputs, outputs, mixing, reach, template, vocabulary, declared, stored, plan, amplified, spiked)
    smallest = Power(quantity="effective input row norm below the limit", smallest_detectable=norm_limit, unit="L2 norm")
    return judge_rows(case, table_rows, zero=False, looked_for="near zero", power=smallest)
