"""The severity table of near-zero and zero input rows, in one place.

| mixing | the token may be fed | ... and can stand first in what the model sees |
|---|---|---|
| recurrent-gated, no attention beside it | error | error |
| attention (also beside a recurrence) | note | error |
| attention with learned positions added | note | note |

An exactly zero row is one step worse (not with learned positions, which lift it). A special token that neither template
nor tokenizer uses is a note. Under RL, a token outside the template is one step milder: rollouts do not produce it. A frozen table
is no training danger at all. Sources: measured amplification by architecture and position (Mamba-2 depth 24, row norm 1e-30: 9e28
mid-sequence; Llama depth 24: 6e27 at position 0 and 0.3 mid-sequence; GPT-2: 0.1 everywhere).
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass

from ghoststep.evidence.base import Missing
from ghoststep.evidence.checkpoint import Declared, StoredTensors
from ghoststep.evidence.plan import TrainingKind, TrainingPlan
from ghoststep.evidence.tokenizer import Reach, SuspectReach, TemplateTokens, Vocabulary
from ghoststep.evidence.wiring import Mixing, MixingClass
from ghoststep.finding import Outcome, Severity

SPIKE_NORM = 1e-6
"""Effective L2 norm under which one occurrence takes the step. With c ≈ 10 (Mamba-2: 8.5 to 11.5, measured) and N = 16384 loss
tokens a batch, the gradient c/(N·r) of a row of norm r passes 1e3, where clipping to 1 crushes all others, at r = 6e-7."""

OVERFLOW_NORM = 1e-20
"""Norm under which the fp32 gradient norm itself can overflow: c/(N·r) > 1.84e19 (the root of the largest float32) at
r < 2e-20 for N = 30 and smaller for larger batches; measured 1.9e-20 (N = 30), 3.6e-22 (N = 1008)."""

OVERFLOW_GRADIENT = 1.84e19
"""The root of the largest float32: a gradient norm beyond it is inf in fp32."""

HEALTHY_OUTPUT_FRACTION = 0.1
"""An output row of at least this share of the median output norm still scores its token: serving is unaffected."""

NOT_DECLARED = Missing(reason="no config")
_FED_ROLES = ("bos", "eos", "cls", "sep")  # pad is masked, mask and unk are not produced by training text


class Exposure(enum.Enum):
    """How training can feed a token."""

    TEMPLATE = "the chat template emits it"
    ROLE = "the tokenizer or the packing puts it between texts"
    TEXT = "ordinary text encodes to it"
    RESERVED = "only its literal string produces it"
    UNDETERMINED = "it is part of a multi-byte character: undetermined alone"
    UNRENDERED = "only its literal string produces it, or the chat template, which could not be rendered"
    NONE = "nothing produces it"


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenExposure:
    """One table row's token: how it is fed, and whether it can stand at the first visible position."""

    table_row: int
    token: str
    exposure: Exposure
    can_be_first: bool


def exposures(
    reach: SuspectReach,
    template: TemplateTokens | Missing,
    vocabulary: Vocabulary | Missing,
    declared: Declared | Missing = NOT_DECLARED,
) -> Mapping[int, TokenExposure]:
    """The exposure of every suspect table row that has a token; rows without one (alignment padding) are left out.

    Roles come from tokenizer and config together. A chat template that is there and could not be rendered leaves reserved
    tokens undetermined: it may emit them.
    """
    emitted = frozenset(template.ids) if isinstance(template, TemplateTokens) else frozenset()
    unrendered = isinstance(template, Missing) and template.outcome is not Outcome.NOT_APPLICABLE
    starts, fed = _role_ids(vocabulary, declared)
    first = starts | reach.starts_document
    if isinstance(template, TemplateTokens):
        first |= frozenset(template.first_ids)
    padding = padding_ids(vocabulary, declared)
    result = {}
    for table_row, kind in reach.reach.items():
        if kind is Reach.NO_TOKEN:
            continue
        exposure = _exposure(kind, table_row in emitted, table_row in fed)
        if exposure is Exposure.RESERVED and table_row in padding:
            exposure = Exposure.NONE  # padding_idx keeps this row at zero on purpose, and padding is masked
        elif exposure is Exposure.RESERVED and unrendered:
            exposure = Exposure.UNRENDERED
        is_fed = exposure in (Exposure.TEMPLATE, Exposure.ROLE, Exposure.TEXT)
        result[table_row] = TokenExposure(
            table_row=table_row,
            token=reach.tokens.get(table_row, ""),
            exposure=exposure,
            can_be_first=table_row in first and is_fed,
        )
    return result


def _role_ids(vocabulary: Vocabulary | Missing, declared: Declared | Missing) -> tuple[frozenset[int], frozenset[int]]:
    """Ids that start what the model sees (BOS, CLS, the decoder's start), and all that stand between texts (EOS, SEP too)."""
    starts: set[int] = set()
    fed: set[int] = set()
    if isinstance(vocabulary, Vocabulary):
        starts.update(vocabulary.prefix_ids)
        starts.update(i for role, i in vocabulary.special_ids.items() if role in ("bos", "cls"))
        fed.update(i for role, i in vocabulary.special_ids.items() if role in _FED_ROLES)
    if isinstance(declared, Declared):
        starts.update(declared.bos_token_ids, declared.generation.get("bos", ()), declared.generation.get("decoder_start", ()))
        fed.update(declared.eos_token_ids, declared.generation.get("eos", ()))
    return frozenset(starts), frozenset(starts | fed)


def padding_ids(vocabulary: Vocabulary | Missing, declared: Declared | Missing) -> frozenset[int]:
    """Ids that config or tokenizer names as padding and nothing else: not as a start or stop token too."""
    pads: set[int] = set()
    if isinstance(vocabulary, Vocabulary):
        pads |= {i for role, i in vocabulary.special_ids.items() if role == "pad"}
    if isinstance(declared, Declared):
        pads.update(declared.pad_token_ids)
    _, fed = _role_ids(vocabulary, declared)
    return frozenset(pads - fed)


def _exposure(kind: Reach, emitted: bool, has_role: bool) -> Exposure:
    if emitted or kind is Reach.TEMPLATE:
        return Exposure.TEMPLATE
    if has_role:
        return Exposure.ROLE
    return {
        Reach.REACHABLE: Exposure.TEXT,
        Reach.SPECIAL: Exposure.RESERVED,
        Reach.PARTIAL_UTF8: Exposure.UNDETERMINED,
    }.get(kind, Exposure.NONE)


def row_severity(
    exposure: TokenExposure, mixing: MixingClass | Missing, training: TrainingKind, *, zero: bool
) -> Severity | None:
    """The cell of the table for a trained table, or None where there is no danger (nothing feeds the token, undetermined)."""
    if exposure.exposure in (Exposure.NONE, Exposure.UNDETERMINED, Exposure.UNRENDERED):
        return None
    if exposure.exposure is Exposure.RESERVED:
        return Severity.NOTE
    if isinstance(mixing, Missing):
        return Severity.WARNING  # the row is there and fed; only how hard it amplifies is open
    if mixing.mixing is Mixing.RECURRENT_GATED:
        severity = Severity.ERROR
    elif mixing.lifted_by_positions:
        return Severity.NOTE
    else:
        severity = Severity.ERROR if exposure.can_be_first and first_is_alone(mixing) else Severity.NOTE
        severity = severity.worse() if zero else severity
    if training is TrainingKind.RL and exposure.exposure is Exposure.TEXT:
        severity = severity.milder()
    return severity


def trains_tables(plan: TrainingPlan, stored: StoredTensors | Missing) -> bool:
    """True if the table looked at receives gradients: by the declared plan, or because an adapter stores it (it was trained)."""
    is_adapter = isinstance(stored, StoredTensors) and stored.base_model is not None
    return plan.training.trains_tables or is_adapter


def first_is_alone(mixing: MixingClass) -> bool:
    """True if the first visible position attends to nothing but itself: in a decoder. In an encoder it sees all others, in the
    decoder of an encoder-decoder the encoder's output."""
    return mixing.causal is not False and not mixing.is_encoder_decoder


def amplifies(mixing: MixingClass | Missing, exposure: TokenExposure) -> bool:
    """True if a near-zero row of this token can have a huge gradient in this wiring, or if the wiring is unknown."""
    if isinstance(mixing, Missing) or mixing.mixing is Mixing.RECURRENT_GATED:
        return True
    return not mixing.lifted_by_positions and exposure.can_be_first and first_is_alone(mixing)


def amplification(mixing: MixingClass | Missing, exposure: TokenExposure) -> str:
    """Why this wiring amplifies the row's gradient, or does not, in half a sentence."""
    if isinstance(mixing, Missing):
        return f"how this model mixes positions is unknown ({mixing.reason}), so it may amplify"
    if mixing.mixing is Mixing.RECURRENT_GATED:
        why = "nothing else at that position carries a normal value, so the row's gradient grows like 1/norm, the deeper the model "
        return f"{why}the further ({mixing.reason})"
    if mixing.lifted_by_positions:
        return "learned positions are added to the row and lift it, so its gradient stays ordinary"
    if amplifies(mixing, exposure):
        return (
            "attention reaches a normal token everywhere but at the first visible position, and this token can stand there "
            "(start of a sequence or of a packed document, or after left padding): its gradient then grows like 1/norm, the deeper "
            "the model the further"
        )
    return "attention reaches a normal token at every position where this one stands, so its gradient stays ordinary"


def ceiling(num_layers: int | None, epsilon: float) -> float:
    """The most that the layers can amplify, whatever the norm: two normalisations a layer, each by at most 1/sqrt(epsilon).

    Measured ceilings stay below it: Mamba 2 layers 5e3, 6 layers 2e7; Mamba-2 4 layers 7e14; MiniMax 4 layers 6e19 (epsilon 1e-5,
    row norm 1e-30). Infinite when the number of layers is unknown.
    """
    if num_layers is None:
        return math.inf
    return math.exp(min(700.0, -num_layers * math.log(epsilon)))


def consequence(effective_norm: float, most: float) -> str:
    """What the trainer in use would do with such a gradient; `most` is the ceiling of this depth."""
    if effective_norm < OVERFLOW_NORM and most > OVERFLOW_GRADIENT:
        return (
            "the fp32 gradient norm can overflow to inf; torch's clip_grad_norm_ then multiplies every gradient by 0 without a "
            "word, DeepSpeed ZeRO skips the step, Megatron-Core aborts"
        )
    bound = f", here at most about 1e{math.log10(most):.0f} times" if most < OVERFLOW_GRADIENT else ""
    return (
        f"the gradient norm spikes (finite{bound}, so nothing is skipped) and clipping crushes every other gradient: the step is "
        "wasted, with torch, DeepSpeed and Megatron-Core alike"
    )
