"""Which tokens to replace, and by what. B examples, T positions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ghoststep.evidence.base import Missing
from ghoststep.evidence.batch import BatchFacts
from ghoststep.evidence.loss import LossXray

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

FRACTIONS = (0.5, 0.25, 0.75, 0.12, 0.88, 0.4, 0.62, 0.05)
"""Where in an example's trained positions the boundary between target and replaced block stands, probe by probe."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Positions:
    """What is known of each position of the probed call. All [B, T]; `document` is 0 where no boundary is announced."""

    ids: NDArray[np.int64]
    real: NDArray[np.bool_]
    padding: NDArray[np.bool_]
    document: NDArray[np.int64]
    trained: NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Consecutive positions of one document of one example whose tokens are replaced together; if `alike`, all by one token."""

    example: int
    start: int
    stop: int
    alike: bool = False


def positions(
    ids_BT: NDArray[np.int64], batch: BatchFacts | Missing, xray: LossXray | Missing, *, is_decoder: bool = False
) -> Positions:
    """Facts of the batch cut to the probed call's shape; where they do not fit, everything is one real document.

    `is_decoder`: behind an encoder. It usually starts with the pad id, which is then no padding.
    """
    import numpy as np

    shape = ids_BT.shape
    padding = np.zeros(shape, dtype=bool)
    document = np.zeros(shape, dtype=np.int64)
    labels = None
    rows, time = shape
    batch, xray = turned(ids_BT, batch, xray)
    if isinstance(batch, BatchFacts) and np.array_equal(batch.ids_BT[:rows, :time], ids_BT):
        if batch.padding_BT is not None:
            padding = batch.padding_BT[:rows, :time].copy()
            if is_decoder and time > 1:
                padding[~padding[:, 1], 0] = False
        if batch.document_BT is not None:
            document = batch.document_BT[:rows, :time].copy()
        if batch.labels_BT is not None:
            labels = batch.labels_BT[:rows, :time]
    real = ~padding & (document >= 0)
    trained = None
    if isinstance(xray, LossXray) and _covers(xray.target_BT, ids_BT) and np.nan_to_num(xray.weight_BT).any():
        trained = np.nan_to_num(xray.weight_BT[: shape[0], : shape[1]]) != 0
    elif labels is not None and (labels >= 0).any():
        # Shifted or not, not known here: a position counts if it or the next one has a label.
        given = labels >= 0
        trained = given.copy()
        trained[:, :-1] &= given[:, 1:]
    known = trained is not None and bool((trained & real).any())
    return Positions(
        ids=ids_BT, real=real, padding=padding, document=document,
        trained=trained & real if known and trained is not None else real,
    )  # fmt: skip


def turned(
    ids_BT: NDArray[np.int64], batch: BatchFacts | Missing, xray: LossXray | Missing
) -> tuple[BatchFacts | Missing, LossXray | Missing]:
    """The facts with batch and time exchanged where they were read from a model that takes time first."""
    import numpy as np

    if isinstance(batch, BatchFacts) and batch.ids_BT.shape[0] > ids_BT.shape[1] and batch.ids_BT.shape[1] >= ids_BT.shape[0]:
        rows, time = ids_BT.shape[1], ids_BT.shape[0]  # several calls stand below one another, and this is one of them
        if np.array_equal(batch.ids_BT[:rows, :time].T, ids_BT) and not np.array_equal(batch.ids_BT[:time, :rows], ids_BT):
            padding, labels = _cut(batch.padding_BT, rows, time), _cut(batch.labels_BT, rows, time)
            batch = replace(batch, ids_BT=batch.ids_BT[:rows, :time], padding_BT=padding, labels_BT=labels)
    if isinstance(batch, BatchFacts) and batch.ids_BT.shape != ids_BT.shape and np.array_equal(batch.ids_BT.T, ids_BT):
        batch = replace(
            batch, ids_BT=ids_BT, padding_BT=_turn(batch.padding_BT), document_BT=None, labels_BT=_turn(batch.labels_BT)
        )
        if isinstance(xray, LossXray) and xray.target_BT.shape == ids_BT.T.shape:
            xray = replace(
                xray, target_BT=xray.target_BT.T, weight_BT=xray.weight_BT.T, ambiguous_BT=xray.ambiguous_BT.T,
                target_probability_BT=xray.target_probability_BT.T,
            )  # fmt: skip
    return batch, xray


def _cut(table: NDArray[Any] | None, rows: int, time: int) -> NDArray[Any] | None:
    return None if table is None or table.ndim != 2 else table[:rows, :time]


def _turn(table: NDArray[Any] | None) -> NDArray[Any] | None:
    return None if table is None or table.ndim != 2 else table.T


def _covers(larger: NDArray[Any], smaller: NDArray[Any]) -> bool:
    return larger.ndim == 2 and larger.shape[0] >= smaller.shape[0] and larger.shape[1] >= smaller.shape[1]


def choose_block(at: Positions, example: int, fraction: float) -> Block | None:
    """The block right behind a trained position that has a later token in its document: half of what follows there."""
    import numpy as np

    targets = [int(t) for t in np.flatnonzero(at.trained[example]) if _next_is_mine(at, example, int(t))]
    if not targets:
        targets = [int(t) for t in np.flatnonzero(at.real[example]) if _next_is_mine(at, example, int(t))]
    if not targets:
        return None
    start = targets[min(len(targets) - 1, int(fraction * len(targets)))] + 1
    stop = document_stop(at, example, start)
    return Block(example=example, start=start, stop=start + max(1, (stop - start) // 2))


def document_stop(at: Positions, example: int, position: int) -> int:
    """One past the last position of the run of real tokens of the same document."""
    stop = position
    time = at.ids.shape[1]
    while stop < time and at.real[example, stop] and at.document[example, stop] == at.document[example, position]:
        stop += 1
    return stop


def _next_is_mine(at: Positions, example: int, t: int) -> bool:
    following = t + 1
    return (
        following < at.ids.shape[1]
        and bool(at.real[example, following])
        and bool(at.document[example, following] == at.document[example, t])
    )


def suggested_block(at: Positions, example: int, open_TT: NDArray[np.bool_]) -> Block | None:
    """A block that some attention operation shows to a trained position before it, farthest inside the example; else None."""
    import numpy as np

    for t in np.flatnonzero(at.trained[example])[::-1]:
        if not _next_is_mine(at, example, int(t)):
            continue
        stop = document_stop(at, example, int(t))
        later = np.flatnonzero(open_TT[t, t + 1 : stop])
        if len(later):
            return Block(example=example, start=int(t) + 1, stop=int(t) + 2 + int(later[0]))
    return None


def replacements(
    at: Positions, where_BT: NDArray[np.bool_], tables: Sequence[torch.nn.Module], special: Iterable[int], seed: int
) -> torch.Tensor:
    """ids [B, T] int64 with ordinary tokens of the batch put where `where_BT`, each the farthest in the table of a few drawn.

    Never a special token; where the batch has under three ordinary tokens, ids are drawn from the whole table.
    """
    import numpy as np
    import torch

    generator = torch.Generator().manual_seed(seed)
    weight = getattr(tables[0], "weight", None)
    num_rows = int(weight.shape[0]) if weight is not None else int(at.ids.max()) + 1
    banned = set(special) | set(np.unique(at.ids[at.padding]).tolist())
    pool = [i for i in np.unique(at.ids[at.real]).tolist() if i not in banned and 0 <= i < num_rows]
    if len(pool) < 8:
        drawn = torch.randint(0, num_rows, (64,), generator=generator).tolist()
        pool = sorted(set(pool) | ({i for i in drawn if i not in banned} or set(drawn)))
    pool_N = torch.tensor(pool)
    ids = torch.from_numpy(at.ids.copy())
    places = torch.from_numpy(np.argwhere(where_BT))
    if not len(places):
        return ids
    old = ids[places[:, 0], places[:, 1]]
    drawn_PK = pool_N[torch.randint(0, len(pool), (len(places), 6), generator=generator)]
    ids[places[:, 0], places[:, 1]] = drawn_PK.gather(1, _farthest(weight, old, drawn_PK)).squeeze(1)
    return ids


def _farthest(weight: Any, old: torch.Tensor, drawn_PK: torch.Tensor) -> torch.Tensor:
    """Which of the drawn ids has the row farthest from the old token's; any that differs where the table cannot be read."""
    import torch

    try:
        table = weight.detach()
        rows = table[drawn_PK.to(table.device)].float() - table[old.clamp(min=0).to(table.device)].float().unsqueeze(1)
        farthest: torch.Tensor = rows.norm(dim=-1).nan_to_num(0.0).argmax(dim=1, keepdim=True).cpu()
        return farthest
    except (RuntimeError, IndexError, AttributeError, TypeError, NotImplementedError):
        return (drawn_PK != old.unsqueeze(1)).to(torch.int64).argmax(dim=1, keepdim=True)
