"""GS302."""

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


@check(code="GS302", severity=Severity.ERROR, basis=Basis.PROOF, explains=("amplified-rows", "dead-template-rows"))
def zero_input_rows(
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
) -> Answer:
    """A token that training can feed has an input embedding row of exact zeros.

    ## What it finds
    Rows of the input table whose every stored value is ±0, apart from rows that are merely tiny (GS301), and whose token text
    or the chat template can produce. Storage limits are said: a GGUF with fp16 block scales stores a row of 1e-12 as zeros.

    ## Why it matters
    As for near-zero rows, and one step worse: there is no direction to normalise. Gradients reach 1e28 to 1e36, and deep
    models (Mamba-2 with 24 layers, Mamba with 48) turned gradients into NaN, which clipping spreads to every weight.

    On a live setup the gradient is measured (`amplified-rows`), and the measured figure decides, not the wiring.

    ## When it is not a problem
    The table is frozen; nothing produces the token; the row has no token (alignment padding); the row is the padding row
    (`padding_idx` keeps it at zero) and padding is masked.

    ## How to confirm by hand
    `(w[row] == 0).all()` on the input embedding.

    ## How to fix
    Set the rows to a small random vector of about a tenth of the median norm before training.

    ## Options
    None.

    ## References
    As for near-zero-input-rows (GS301).
    """
    table_rows = [int(i) for i in inputs.rows.zero_R.nonzero()[0]]
    case = row_case(inputs, outputs, mixing, reach, template, vocabulary, declared, stored, plan, amplified, spiked)
    power = Power(
        quantity="smallest stored value told apart from zero", smallest_detectable=inputs.rows.smallest_nonzero, unit="value"
    )
    return judge_rows(case, table_rows, zero=True, looked_for="exactly zero", power=power)
