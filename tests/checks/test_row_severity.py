"""Every cell of the severity table of near-zero and zero input rows (GS301, GS302), and what must stay silent."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from ghoststep.checks.rows.near_zero_input_rows import near_zero_input_rows
from ghoststep.checks.rows.zero_input_rows import zero_input_rows
from ghoststep.evidence.base import Missing
from ghoststep.evidence.checkpoint import Declared
from ghoststep.evidence.plan import TrainingKind
from ghoststep.evidence.rows import InputRows
from ghoststep.evidence.tokenizer import Reach
from ghoststep.evidence.wiring import Mixing
from ghoststep.finding import Outcome, Severity
from ghoststep.registry import Answer, Clear, Found, NotApplicable, Unknown
from tests.checks import builders as b

ROW = 17
E, W, N = Severity.ERROR, Severity.WARNING, Severity.NOTE


# How the token is fed: reach, in the template, first in the template, a document may start with it, role.
@dataclass(frozen=True, kw_only=True)
class Fed:
    kind: Reach
    starts: bool = False
    emitted: bool = False
    first: bool = False
    role: str | None = None


FED = {
    "text": Fed(kind=Reach.REACHABLE),
    "text, may start a packed document": Fed(kind=Reach.REACHABLE, starts=True),
    "template": Fed(kind=Reach.TEMPLATE, emitted=True),
    "first in the template": Fed(kind=Reach.TEMPLATE, emitted=True, first=True),
    "bos": Fed(kind=Reach.SPECIAL, role="bos"),
    "eos": Fed(kind=Reach.SPECIAL, role="eos"),
    "reserved": Fed(kind=Reach.SPECIAL),
}
FIRST = {"text, may start a packed document", "first in the template", "bos"}


def judge(
    fed: str,
    *,
    zero: bool = False,
    norm: float = 1e-12,
    mix: object = None,
    training: TrainingKind = TrainingKind.FULL,
    tied: bool = False,
    multiplier: float = 1.0,
) -> Answer:
    how = FED[fed]
    arguments = (
        b.inputs({ROW: 0.0 if zero else norm}, multiplier=multiplier),
        b.outputs({ROW: 0.0 if tied and zero else norm if tied else 0.9}, tied=tied),
        mix or b.mixing(),
        b.reach({ROW: how.kind}, starts=[ROW] if how.starts else []),
        b.template([ROW] if how.emitted else [], [ROW] if how.first else []),
        b.vocabulary(special_ids={how.role: ROW} if how.role else {}),
        Missing(reason="-"),
        Missing(reason="-"),
        b.plan(training),
    )
    return zero_input_rows(*arguments) if zero else near_zero_input_rows(*arguments)


def severity(said: Answer) -> Severity | None:
    if isinstance(said, Found):
        assert len(said.findings) == 1
        return said.findings[0].severity
    assert isinstance(said, Clear | NotApplicable), said
    return None


@pytest.mark.parametrize("zero", [False, True], ids=["near zero", "exactly zero"])
@pytest.mark.parametrize("fed", FED)
@pytest.mark.parametrize("training", [TrainingKind.FULL, TrainingKind.RL])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_recurrent_gated(fed: str, zero: bool, training: TrainingKind, tied: bool) -> None:
    expected = N if fed == "reserved" else E
    if training is TrainingKind.RL and fed.startswith("text"):
        expected = W  # rollouts do not produce it; a prompt could
    assert severity(judge(fed, zero=zero, training=training, tied=tied)) is expected


@pytest.mark.parametrize("kind", [Mixing.ATTENTION, Mixing.ATTENTION_BESIDE])
@pytest.mark.parametrize("zero", [False, True], ids=["near zero", "exactly zero"])
@pytest.mark.parametrize("fed", FED)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_attention(fed: str, zero: bool, kind: Mixing, tied: bool) -> None:
    expected = N if fed == "reserved" else E if fed in FIRST else W if zero else N
    assert severity(judge(fed, zero=zero, mix=b.mixing(kind), tied=tied)) is expected


@pytest.mark.parametrize("zero", [False, True])
@pytest.mark.parametrize("fed", sorted(FIRST))
def test_learned_positions_lift_the_row(fed: str, zero: bool) -> None:
    assert severity(judge(fed, zero=zero, mix=b.mixing(Mixing.ATTENTION, lifted=True))) is N


def test_the_first_position_of_an_encoder_sees_the_others() -> None:
    assert severity(judge("bos", mix=b.mixing(Mixing.ATTENTION, causal=False))) is N


@pytest.mark.parametrize("zero", [False, True])
@pytest.mark.parametrize("training", [TrainingKind.LORA, TrainingKind.FROZEN_EMBEDDINGS])
@pytest.mark.parametrize("fed", FED)
def test_a_frozen_table_is_no_training_danger(fed: str, training: TrainingKind, zero: bool) -> None:
    said = judge(fed, zero=zero, training=training)
    assert isinstance(said, NotApplicable)
    assert "frozen" in said.reason


@pytest.mark.parametrize("zero", [False, True])
@pytest.mark.parametrize("kind", [Reach.UNREACHABLE, Reach.NO_TOKEN])
def test_rows_that_nothing_feeds_are_silent(kind: Reach, zero: bool) -> None:
    arguments = (
        b.inputs({ROW: 0.0 if zero else 1e-12}),
        Missing(reason="no head"),
        b.mixing(),
        b.reach({ROW: kind}),
        Missing(reason="no template"),
        b.vocabulary(),
        Missing(reason="-"),
        Missing(reason="-"),
        b.plan(),
    )
    assert isinstance((zero_input_rows if zero else near_zero_input_rows)(*arguments), Clear)


def test_rows_that_the_tokenizer_was_not_asked_about_are_undecided_not_alignment_rows() -> None:
    arguments = (b.inputs({ROW: 1e-12, 20: 1e-12}), Missing(reason="-"), b.mixing(), b.reach({20: Reach.NO_TOKEN}))
    missing = Missing(reason="-")
    said = near_zero_input_rows(*arguments, missing, b.vocabulary(), missing, missing, b.plan())
    assert isinstance(said, Unknown)
    assert "not looked up" in said.reason
    assert "17" in said.reason
    assert "20" not in said.reason


def test_a_template_that_could_not_be_rendered_may_emit_a_reserved_token() -> None:
    missing = Missing(reason="-")

    def said(template: Missing) -> Answer:
        reserved = b.reach({ROW: Reach.SPECIAL})
        return near_zero_input_rows(
            b.inputs({ROW: 1e-12}), missing, b.mixing(), reserved, template, b.vocabulary(), missing, missing, b.plan()
        )

    assert isinstance(said(Missing(reason="it raises")), Unknown)
    assert severity(said(Missing(reason="a base model", outcome=Outcome.NOT_APPLICABLE))) is N


def test_the_configs_start_token_counts_though_the_tokenizer_names_none() -> None:
    missing = Missing(reason="no template", outcome=Outcome.NOT_APPLICABLE)
    reserved = b.reach({ROW: Reach.SPECIAL})
    declared = b.declared(bos_token_ids=(ROW,))
    said = zero_input_rows(
        b.inputs({ROW: 0.0}),
        missing,
        b.mixing(Mixing.ATTENTION),
        reserved,
        missing,
        b.vocabulary(),
        declared,
        missing,
        b.plan(),
    )
    assert severity(said) is E


def test_an_adapter_that_stores_the_table_trains_it() -> None:
    missing = Missing(reason="-", outcome=Outcome.NOT_APPLICABLE)
    adapter = replace(b.stored(), base_model="org/base")
    fed = b.reach({ROW: Reach.REACHABLE})
    lora = b.plan(TrainingKind.LORA)
    inputs = b.inputs({ROW: 1e-12})
    assert isinstance(
        near_zero_input_rows(inputs, missing, b.mixing(), fed, missing, missing, missing, missing, lora), NotApplicable
    )
    assert severity(near_zero_input_rows(inputs, missing, b.mixing(), fed, missing, missing, missing, adapter, lora)) is E


def test_a_zero_row_that_is_also_the_padding_id_is_a_note_with_its_own_advice() -> None:
    missing = Missing(reason="-", outcome=Outcome.NOT_APPLICABLE)
    stop = b.vocabulary(special_ids={"eos": ROW, "pad": ROW})

    def said(inputs: InputRows, declared: Declared) -> Answer:
        rows = zero_input_rows if inputs.rows.zero_R[ROW] else near_zero_input_rows
        return rows(inputs, missing, b.mixing(), b.reach({ROW: Reach.SPECIAL}), missing, stop, declared, missing, b.plan())

    padded = b.declared(pad_token_ids=(ROW,), eos_token_ids=(ROW,))
    note = said(b.inputs({ROW: 0.0}), padded)
    assert severity(note) is N
    assert isinstance(note, Found)
    assert "padding_idx" in note.findings[0].message
    assert severity(said(b.inputs({ROW: 0.0}), b.declared())) is E
    assert severity(said(b.inputs({ROW: 1e-12}), padded)) is E  # padding_idx makes zeros, not small rows


@pytest.mark.parametrize(
    ("layers", "expected"), [(2, "at most about 1e12"), (24, "overflow to inf"), (None, "overflow to inf")]
)
def test_an_overflow_is_only_claimed_where_the_depth_allows_it(layers: int | None, expected: str) -> None:
    missing = Missing(reason="-")
    said = near_zero_input_rows(
        b.inputs({ROW: 1e-30}),
        missing,
        b.mixing(),
        b.reach({ROW: Reach.REACHABLE}),
        missing,
        b.vocabulary(),
        b.declared(num_layers=layers),
        missing,
        b.plan(),
    )
    assert isinstance(said, Found)
    assert expected in said.findings[0].message
    assert said.findings[0].severity is E


def test_a_note_claims_no_consequence() -> None:
    said = judge("text", mix=b.mixing(Mixing.ATTENTION))
    assert isinstance(said, Found)
    assert "stays ordinary" in said.findings[0].message
    assert "can be enough" not in said.findings[0].message
    encoder = judge("bos", mix=b.mixing(Mixing.ATTENTION, causal=False))
    assert isinstance(encoder, Found)
    assert "first visible position" not in encoder.findings[0].message


def test_a_decoder_that_reads_an_encoder_is_never_alone() -> None:
    both = replace(b.mixing(Mixing.ATTENTION, causal=None), is_encoder_decoder=True)
    assert severity(judge("text, may start a packed document", mix=both)) is N


def test_partial_utf8_is_undetermined_not_clear() -> None:
    arguments = (b.inputs({ROW: 1e-12}), Missing(reason="-"), b.mixing(), b.reach({ROW: Reach.PARTIAL_UTF8}))
    said = near_zero_input_rows(
        *arguments, Missing(reason="-"), b.vocabulary(), Missing(reason="-"), Missing(reason="-"), b.plan()
    )
    assert isinstance(said, Unknown)
    assert "17" in said.reason
    assert "multi-byte" in said.reason


def test_partial_utf8_in_the_template_is_found() -> None:
    said = near_zero_input_rows(
        b.inputs({ROW: 1e-12}),
        Missing(reason="-"),
        b.mixing(),
        b.reach({ROW: Reach.PARTIAL_UTF8}),
        b.template([ROW]),
        b.vocabulary(),
        Missing(reason="-"),
        Missing(reason="-"),
        b.plan(),
    )
    assert severity(said) is E


def test_a_zero_padding_row_is_healthy_unless_it_is_also_the_stop_token() -> None:
    def said(**roles: int) -> Answer:
        return zero_input_rows(
            b.inputs({0: 0.0}),
            b.outputs(),
            b.mixing(),
            b.reach({0: Reach.SPECIAL}),
            Missing(reason="no template"),
            b.vocabulary(special_ids=roles),
            Missing(reason="-"),
            Missing(reason="-"),
            b.plan(),
        )

    assert isinstance(said(pad=0), Clear)
    assert severity(said(pad=0, eos=0)) is E


def test_the_limit_is_taken_after_the_embedding_multiplier() -> None:
    assert severity(judge("text", norm=5e-7)) is E
    assert severity(judge("text", norm=5e-7, multiplier=12.0)) is None
    assert severity(judge("text", norm=5e-6)) is None
    assert severity(judge("text", norm=5e-6, multiplier=0.1)) is E


def test_without_a_tokenizer_the_rows_are_unknown_and_a_healthy_table_is_clear() -> None:
    missing = Missing(reason="no tokenizer file")
    rest = (b.mixing(), missing, missing, missing, missing, Missing(reason="-"), b.plan())
    said = near_zero_input_rows(b.inputs({ROW: 1e-12}), b.outputs(), *rest)
    assert isinstance(said, Unknown)
    assert "no tokenizer file" in said.reason
    assert isinstance(near_zero_input_rows(b.inputs(), b.outputs(), *rest), Clear)


def test_without_a_tokenizer_the_declared_padding_row_may_be_zero() -> None:
    def said(**ids: tuple[int, ...]) -> Answer:
        missing = Missing(reason="no tokenizer file")
        return zero_input_rows(
            b.inputs({0: 0.0}),
            b.outputs(),
            b.mixing(),
            missing,
            missing,
            missing,
            b.declared(**ids),
            Missing(reason="-"),
            b.plan(),
        )

    assert isinstance(said(pad_token_ids=(0,)), Clear)
    assert isinstance(said(pad_token_ids=(0,), eos_token_ids=(0,)), Unknown)
    assert isinstance(said(pad_token_ids=(1,)), Unknown)


def test_unknown_wiring_is_a_warning_that_says_so() -> None:
    said = judge("text", mix=Missing(reason="no layer names"))
    assert severity(said) is W
    assert isinstance(said, Found)
    assert said.reason is not None
    assert "no layer names" in said.reason


def test_the_message_carries_everything() -> None:
    said = judge("text", norm=1e-30)
    assert isinstance(said, Found)
    finding = said.findings[0]
    for needed in ("tok17", "1e-30", "recurrence", "clip_grad_norm_", "DeepSpeed", "Megatron-Core", "serving is unaffected"):
        assert needed in finding.message
    assert finding.where.table_row == finding.where.token_id == ROW
    assert finding.where.tensor == "model.embed_tokens.weight"
    assert finding.measured is not None
    assert finding.measured.value == 1e-30
    assert finding.remedy is not None


def test_a_finite_spike_is_not_called_an_overflow() -> None:
    said = judge("text", norm=1e-9)
    assert isinstance(said, Found)
    assert "overflow" not in said.findings[0].message
    assert "crushes" in said.findings[0].message


def test_tied_rows_are_dead_on_both_sides() -> None:
    said = judge("text", tied=True)
    assert isinstance(said, Found)
    assert "share this row" in said.findings[0].message


def test_long_lists_are_bounded_and_nothing_is_lost() -> None:
    many = dict.fromkeys(range(300), 1e-12)
    said = near_zero_input_rows(
        b.inputs(many, rows=400),
        Missing(reason="-"),
        b.mixing(),
        b.reach(dict.fromkeys(many, Reach.REACHABLE)),
        Missing(reason="-"),
        b.vocabulary(),
        Missing(reason="-"),
        Missing(reason="-"),
        b.plan(),
    )
    assert isinstance(said, Found)
    assert len(said.findings) == 101
    assert said.findings[-1].message.startswith("200 further tokens")
