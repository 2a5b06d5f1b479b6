"""GS006."""

from ghoststep.evidence.checkpoint import Tables
from ghoststep.evidence.wiring import Tie, TieState
from ghoststep.finding import Basis, Finding, Power, Quantity, Severity, Where
from ghoststep.registry import Answer, NotApplicable, answer, check


@check(code="GS006", severity=Severity.ERROR, basis=Basis.PROOF)
def broken_tie(tables: Tables, tie: TieState) -> Answer:
    """The config's tie flag and the stored tables contradict each other.

    ## What it finds
    `tie_word_embeddings` true and two tables that differ; or false and no stored head in a causal language model. In a live
    model also: true and two equal tables in separate storage, of which at least one trains (they drift apart; an error where
    both train, else a warning); and false with one shared table (a note: a saver stores it once, a loader makes two of it).

    ## Why it matters
    Most loaders trust the flag. With true they throw the trained head away and use the input table; with false they leave the
    missing head at its random initialisation. The loss after loading is far above the one before saving, and no key is
    reported missing.

    ## When it is not a problem
    Encoders, reward models, adapters and other models without a language-model head; a flag that the config does not give
    (the tensors decide); two stored copies that are equal; an embedding model that pools its backbone's output (modules.json).
    A few model classes ignore the flag when they are loaded by transformers: there the finding matters for every other loader
    and for a conversion. Set the flag to false to be told nothing.

    ## How to confirm by hand
    Compare the two tables in the file, or the loss before saving with the loss after loading.

    ## How to fix
    Decide which one is meant: set the flag to what the tensors are, or re-tie the model (`model.tie_weights()`) and train and
    save again.

    ## Options
    None.

    ## References
    Behaviour of loaders re-measured with transformers 5.24: classes that name no tied parameters (NemotronH, xLSTM, KimiLinear,
    BailingHybrid among them) keep both tables whatever the flag says.
    """
    if tie.tie is Tie.NO_HEAD:
        return NotApplicable(reason=f"no output head: {tie.reason}")
    if tie.tie is Tie.BROKEN_FLAG_TRUE:
        table = tables.output or tables.input
        finding = Finding(
            message=f"the config says that input and output embeddings are one table, but {tie.reason}: most loaders trust "
            "the flag and throw the trained head away. Set tie_word_embeddings to false, or tie, retrain and save again.",
            where=Where(file=table.tensor.file, tensor=table.tensor.name, table_row=tie.first_different_row),
            measured=None
            if tie.num_different_rows is None
            else Quantity(value=tie.num_different_rows, unit="table rows that differ"),
            expected=Quantity(value=0, unit="table rows that differ"),
            remedy="set tie_word_embeddings to false in the config",
        )
        return answer([finding])
    if tie.tie is Tie.BROKEN_HEAD_MISSING:
        finding = Finding(
            message=f"the config says that the output head is a table of its own, but none is stored ({tie.reason}): a loader "
            "leaves it at its random initialisation. Set tie_word_embeddings to true if it was tied, or save the head.",
            where=Where(file=tables.input.tensor.file, tensor=tables.input.tensor.name),
            remedy="set tie_word_embeddings to true in the config, or store the head",
        )
        return answer([finding])
    compared = tie.num_different_rows is not None or tie.first_different_row is not None or tables.output is None
    power = Power(quantity="table rows that differ", smallest_detectable=1, unit="table rows") if compared else None
    if tie.tie is Tie.DRIFTING:
        return answer([_drifting(tables, tie)])
    if tie.tie is Tie.TIED and tie.declared is False and tie.num_trainable_tables is not None:
        return answer([_shared(tables, tie)])
    return answer((), power=power, reason=tie.reason)


def _drifting(tables: Tables, tie: TieState) -> Finding:
    table = tables.output or tables.input
    return Finding(
        message=f"the config says that input and output embeddings are one table, but {tie.reason}: the first step pulls them "
        "apart, and a saver or loader that trusts the flag throws one of them away. Tie them again "
        "(`model.tie_weights()`) before the "
        "optimizer is made, or set tie_word_embeddings to false.",
        where=Where(file=table.tensor.file, tensor=table.tensor.name),
        measured=Quantity(value=2, unit="separate tables"),
        expected=Quantity(value=1, unit="separate tables"),
        severity=Severity.ERROR if (tie.num_trainable_tables or 0) > 1 else Severity.WARNING,
        remedy="model.tie_weights() before the optimizer is made",
    )


def _shared(tables: Tables, tie: TieState) -> Finding:
    return Finding(
        message=f"{tie.reason}: a saver may store the shared table once, and a loader that trusts the flag then "
        "starts the head "
        "from random values. Set tie_word_embeddings to true, or give the head a table of its own.",
        where=Where(file=tables.input.tensor.file, tensor=tables.input.tensor.name),
        severity=Severity.NOTE,
        remedy="set tie_word_embeddings to true in the config",
    )
