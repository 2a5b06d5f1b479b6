"""What may be said about a right setup, and why. Anything else makes a class not silent.

An entry allows one code with one outcome ("note" or "unknown"), everywhere or for the named classes. Errors, warnings and broken
checks are never allowed. A class whose checks about masks are all unknown is not silent, whatever stands here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tests.zoo_live.judge import Said
from tests.zoo_live.overrides import NO_PADS


@dataclass(frozen=True, slots=True, kw_only=True)
class Allowed:
    """`code` "*": any. `kinds` and `classes` empty: everywhere. `text`: what the verdict must say."""

    code: str
    outcome: str
    reason: str
    kinds: tuple[str, ...] = ()
    classes: tuple[str, ...] = ()
    text: str = ""

    def covers(self, said: Said, *, kind: str, name: str) -> bool:
        """True if this entry speaks of this verdict of this class."""
        right_place = (not self.kinds or kind in self.kinds) and (not self.classes or name in self.classes)
        return self.code in ("*", said.code) and self.outcome == said.outcome and right_place and self.text in said.text


_LEARNED_POSITIONS = (
    "CamembertForCausalLM", "Data2VecTextForCausalLM", "RobertaForCausalLM", "RobertaPreLayerNormForCausalLM",
    "XLMRobertaForCausalLM", "XLMRobertaXLForCausalLM", "XmodForCausalLM",
)  # fmt: skip
_INDEXED = ("AXK2ForCausalLM", "DeepseekV32ForCausalLM", "Dots3NoteForCausalLM")


def _unknown(codes: tuple[str, ...], classes: tuple[str, ...], reason: str) -> tuple[Allowed, ...]:
    return tuple(Allowed(code=code, outcome="unknown", classes=classes, reason=reason) for code in codes)


ALLOWED: tuple[Allowed, ...] = (
    Allowed(
        code="GS002", outcome="note", classes=("CpmAntForCausalLM", "MllamaForCausalLM", "MoshiForCausalLM"),
        reason="its table has rows for prompts, images or an audio start, which its head cannot predict",
    ),
    Allowed(
        code="GS106", outcome="note", classes=_INDEXED,
        reason="sparse attention keeps the best of an indexer's scores; where they tie, the length of the batch decides",
    ),
    Allowed(
        code="GS113", outcome="note", classes=_LEARNED_POSITIONS,
        reason="generate passes position_ids from 0, and the forward alone counts them from padding_idx + 1",
    ),
    Allowed(
        code="GS113", outcome="note", classes=("MoshiForCausalLM",),
        reason="its cache forgets what stands beyond the window, and its forward over a whole text has no window",
    ),
    Allowed(
        code="GS113", outcome="note", classes=("XLMWithLMHeadModel",),
        reason="its generation appends a mask token to every text, as in masked training",
    ),
    Allowed(
        code="GS616", outcome="note",
        reason="in the round in eval mode an optimizer is given as well: a real training step would lack dropout",
    ),
    *_unknown(("GS003", "GS005", "GS208", "GS210"), tuple(NO_PADS), "no tokenizer is given: one that pads would be wrong"),
    Allowed(
        code="*", outcome="unknown", classes=("RwkvForCausalLM",), text="backward() of your loss raised",
        reason="in eval mode the forward rescales its weights in place, and the backward raises: no step to look at",
    ),
    Allowed(
        code="*", outcome="unknown", classes=("ReformerForMaskedLM", "ReformerModelWithLMHead"),
        text="backward() of your loss raised", reason="in eval mode its backward raises: no step to look at",
    ),
    *_unknown(
        ("GS102", "GS105", "GS108", "GS203"), ("MraForMaskedLM",),
        "its attention is a CUDA kernel: on the CPU it gives zeros, and no position sees another",
    ),
    *_unknown(("GS108",), ("NeoMMEForMaskedLM",), "its output projections start at 0: as it is, no token moves another"),
    *_unknown(("GS113",), ("XLNetLMHeadModel",), "what it may see is given by perm_mask, which generation does not make"),
)  # fmt: skip


AT_FAULT: Mapping[str, tuple[str, str]] = {
    "CpmAntForCausalLM": ("GS101", "its forward marks the whole text as context, which every position may see, the future too"),
}
"""Classes that do what a check is there to find, in the code of the class itself: (the code that must be found, how it comes).

They count neither as silent nor as not silent, and their power is that finding.
"""


def reason_for(said: Said, *, kind: str, name: str) -> str | None:
    """Why this may be said, or None."""
    return next((a.reason for a in ALLOWED if a.covers(said, kind=kind, name=name)), None)
