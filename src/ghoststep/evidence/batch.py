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

    ids_BT: int64 token ids (the decoder's of an encoder-decoder). Several calls of the model in one loss (chosen and rejected
        answers) stand below one another, shorter ones filled up with -1, which counts as padding.
    padding_BT: bool, True where a position is PAD by intent, or None when nothing says so; `padding_source` names the source
        ("attention_mask", "pad_token_id 0", ...). Intent in this order: attention_mask == 0, else runs of the pad id at the
        ends of an example outside supervised positions, else unknown.
    document_BT: int64 number of the announced document that a position belongs to (restarting position_ids, a segment or
        sequence id entry, cu_seqlens, a block-diagonal mask), or None when no boundary is announced.
    labels_BT: int64 labels as given in the batch (-100 and other negatives kept), or None.
    roles_BT: int64 role of each position (0 prompt, 1 answer, 2 template) as the setup declares it, or None.
    sides: "right", "left", "both" or "none": where padding stands.
    has_attention_mask / has_position_ids: the batch passes them.
    supervised_per_batch: labels that are not negative in each batch of the setup; empty when the batches carry no labels.
    pad_id, bos_id, eos_ids: from the setup, its tokenizer, or the model's configs, in this order; None or empty if unknown.
    special_ids: ids of the tokenizer's special and added tokens.
    intent: the setup's declared intent ("causal", "masked", ...), or None.
    adds_bos: the tokenizer puts bos_id in front of a text by itself; None without a tokenizer or bos_id.
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
    roles_BT: NDArray[np.int64] | None = None
    supervised_per_batch: tuple[int, ...] = ()
    pad_id: int | None = None
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    special_ids: frozenset[int] = frozenset()
    adds_bos: bool | None = None
    intent: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class IdPlace:
    """One id of a batch and where it stands; `example` and `position` are None where the ids have no such shape."""

    token_id: int
    batch: int
    example: int | None
    position: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class FedIds(Evidence):
    """The ids that the batches feed to the input table, against its number of table rows; seen before the look-up.

    beyond: the first few ids without a table row. num_beyond: how many positions hold such an id. num_ids: positions looked at,
    in `num_batches` batches. can_resize: the model has `resize_token_embeddings`.
    """

    table: str
    num_rows: int
    num_ids: int
    num_batches: int
    num_beyond: int
    beyond: tuple[IdPlace, ...]
    can_resize: bool
