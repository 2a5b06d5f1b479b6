"""Measure a setup once and draw both pictures of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ghoststep.pictures.influence_matrix import influence_svg, influence_text
from ghoststep.pictures.label_strip import label_svg, label_text
from ghoststep.pictures.words import TokenText

if TYPE_CHECKING:
    from ghoststep.evidence.batch import BatchFacts
    from ghoststep.evidence.influence import Influence
    from ghoststep.evidence.loss import LossXray
    from ghoststep.subjects.setup import Setup


@dataclass(frozen=True, slots=True, kw_only=True)
class Pictures:
    """What was measured on a setup, ready to be drawn. A fact that could not be had is None, and `reasons` says why.

    token_text: the tokenizer's strings, None without a tokenizer.
    """

    batch: BatchFacts | None
    influence: Influence | None
    xray: LossXray | None
    token_text: TokenText | None
    reasons: tuple[str, ...]

    def influence_text(self, *, width: int = 80, color: bool = False) -> str:
        """Who sees whom, for a terminal; the reason in one line where it could not be measured."""
        if self.influence is None:
            return self._why("who sees whom")
        return influence_text(self.influence, self.batch, width=width, color=color, token_text=self.token_text)

    def influence_svg(self) -> str:
        """Who sees whom, as SVG; "" where it could not be measured."""
        return "" if self.influence is None else influence_svg(self.influence, self.batch, token_text=self.token_text)

    def label_text(self, *, example: int = 0, width: int = 80, color: bool = False, max_positions: int = 512) -> str:
        """What the loss trains on, for a terminal; the reason in one line where it could not be measured."""
        if self.xray is None or self.batch is None:
            return self._why("what the loss trains on")
        return label_text(
            self.xray,
            self.batch,
            example=example,
            width=width,
            color=color,
            token_text=self.token_text,
            max_positions=max_positions,
        )

    def label_svg(self, *, example: int = 0) -> str:
        """What the loss trains on, as SVG; "" where it could not be measured."""
        if self.xray is None or self.batch is None:
            return ""
        return label_svg(self.xray, self.batch, example=example, token_text=self.token_text)

    def _why(self, what: str) -> str:
        return f"{what}: could not be measured ({'; '.join(self.reasons) or 'no batch'})\n"


def pictures_of(setup: Setup | Mapping[str, Any]) -> Pictures:
    """Run the loss X-ray and the influence instrument on a setup; the setup is left as it was.

    `UsageError` for a mapping that is no setup. Cost: that of the two instruments, and for examples of
    up to 64 positions one forward and backward for each position more: a picture has no gaps then.
    """
    from ghoststep.engine import Case
    from ghoststep.evidence.base import Missing
    from ghoststep.evidence.batch import BatchFacts
    from ghoststep.evidence.influence import Influence
    from ghoststep.evidence.loss import LossXray
    from ghoststep.evidence.picture import InfluenceMap
    from ghoststep.evidence.plan import TrainingPlan
    from ghoststep.registry import load
    from ghoststep.subjects.setup import make_setup

    opened = make_setup(setup) if isinstance(setup, Mapping) else setup
    case = Case([opened, TrainingPlan()], load().instruments)
    batch, influence, xray = (case.fact(kind) for kind in (BatchFacts, Influence, LossXray))
    whole = case.fact(InfluenceMap) if isinstance(influence, Influence) else None
    if isinstance(influence, Influence) and isinstance(whole, InfluenceMap):
        influence = replace(influence, matrix_ST=whole.matrix_ST)
    return Pictures(
        batch=batch if isinstance(batch, BatchFacts) else None,
        influence=influence if isinstance(influence, Influence) else None,
        xray=xray if isinstance(xray, LossXray) else None,
        token_text=_strings(opened.tokenizer),
        reasons=tuple(dict.fromkeys(m.reason for m in (batch, influence, xray) if isinstance(m, Missing))),
    )


def _strings(tokenizer: Any) -> TokenText | None:
    """From id to the text that it stands for; transformers and tokenizers, and whatever else can decode one id."""
    if tokenizer is None or not hasattr(tokenizer, "decode"):
        return None

    def token_text(token_id: int) -> str:
        text = tokenizer.decode([token_id], skip_special_tokens=False)
        return text if isinstance(text, str) else str(token_id)

    return token_text
