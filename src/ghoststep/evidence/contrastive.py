"""Facts about a loss that compares embeddings of whole examples. N embeddings, B examples."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ghoststep.evidence.base import Evidence
from ghoststep.evidence.loss import LossKind

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class ContrastiveForm(enum.Enum):
    """How the similarities of pairs enter the loss, by its first and second derivatives."""

    SOFTMAX = "a softmax over candidates (InfoNCE)"
    COUPLED = "candidates that compete otherwise than in a plain softmax (smoothed, with a margin, weighted)"
    PAIRS = "each pair on its own (a sigmoid loss, a regression, a triplet of distances)"
    MARGIN = "piecewise linear in the similarities (a margin or triplet loss)"
    OTHER = "a comparison of examples of another form"


@dataclass(frozen=True, slots=True, kw_only=True)
class Anchor:
    """One embedding that the loss classifies among candidates: which it is pulled to, and how many it is pushed from.

    index, positives: among the N embeddings. weight: in the loss (a mean over B anchors gives 1/B each); NaN unless a softmax.
    """

    index: int
    positives: tuple[int, ...]
    num_negatives: int
    weight: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ContrastiveXray(Evidence):
    """What a contrastive loss does with the embeddings that reach it, from its gradient at fed orthogonal ones.

    The N embeddings are numbered through the places in order (query call, positive call, ...; one call of concatenated halves is
    one place). places: (name of the module, rows) each. pull_NN: float64 d loss / d similarity of each pair, at similarity 0;
    negative: pulled together, positive: pushed apart, 0: not compared. anchors: see `Anchor`; without a softmax every embedding
    with a positive. scale: factor between similarity and logit (1 / temperature, all factors multiplied), NaN unless a softmax.
    is_symmetric: positives classify their anchors, too. is_cosine: the length of the embeddings does not matter to the loss.
    residual: relative misfit of a softmax cross-entropy with these figures at random embeddings (0 exact; NaN unless a softmax).
    text_N: for each embedding a number that equal token ids share, or None where ids and embeddings could not be matched.
    misplaced: (i, j) anchors pulled to j, of another example of the batch, and not to what stands beside them (another column of
    the same example), without labels that say so. num_paired: anchors of which such a partner is known. columns: the batch's
    names of the columns of the first such pair. example_N: the example of the batch that each embedding stands for, -1 unknown.
    num_forward: forward passes that were run.
    """

    form: ContrastiveForm
    places: tuple[tuple[str, int], ...]
    pull_NN: NDArray[np.float64]
    anchors: tuple[Anchor, ...]
    scale: float
    is_symmetric: bool
    is_cosine: bool
    residual: float
    text_N: tuple[int, ...] | None
    example_N: tuple[int, ...] | None
    misplaced: tuple[tuple[int, int], ...]
    num_paired: int
    columns: tuple[str, str]
    num_forward: int

    @property
    def kind(self) -> LossKind:
        """`CONTRASTIVE` where the loss is explained by pairs of whole examples."""
        return LossKind.OTHER if self.form is ContrastiveForm.OTHER else LossKind.CONTRASTIVE
