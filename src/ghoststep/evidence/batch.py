"""Facts about the batch that a setup trains on. B examples, T positions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ghoststep.evidence.base import Evidence

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchFacts(Evidence):
    """The first batch as the input embedding saw it, with what its other entries declare.

    ids_BT: int64 token ids. padding_BT: bool, True where a position is PAD by intent, or None when nothing says so;
        `padding_source` names the source ("attention_mask", "pad_token_id 0", ...). Intent in this order: attention_mask == 0,
        else the pad id outside supervised positions, else unknown.
    document_BT: int64 number of the announced document that a position belongs to (restarting position_ids, a segment or
        sequence id entry, cu_seqlens, a block-diagonal mask), or None when no boundary is announced.
    labels_BT: int64 labels as given in the batch (-100 and other negatives kept), or None.
    sides: "right", "left", "both" or "none": where padding stands.
    has_attention_mask / has_position_ids: the batch passes them.
    """

    ids_BT: NDArray[np.int64]
    padding_BT: NDArray[np.bool_] | None
    padding_source: str
    document_BT: NDArray[np.int64] | None
    document_source: str
    labels_BT: NDArray[np.int64] | None
    sides: str
    has_attention_mask: bool
    has_position_ids: bool
    num_batches: int = 1
