"""Amplification: the gradient of one input row against its norm, on the user's own model, dtype and loss.

The row is fed, not written: a hook on the input embedding puts a leaf of the chosen norm into one position of the first batch,
and the loss is differentiated by that leaf. No parameter is touched and no parameter gradient is made. B examples, T positions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ghoststep.errors import CannotLook, DoesNotApply
from ghoststep.evidence.amplification import (
    LOST_FACTOR,
    OVERFLOW_GRADIENT,
    Amplification,
    Place,
    Reading,
)
from ghoststep.evidence.batch import BatchFacts
from ghoststep.evidence.rows import InputRows
from ghoststep.instruments.live.amplification_places import Seat, depended_on, places_of, seat_of
from ghoststep.instruments.live.calling import LiveCall
from ghoststep.instruments.live.live_tables import input_weight
from ghoststep.instruments.live.outputs import vectors, with_vectors
from ghoststep.instruments.live.xray_run import frozen, loss_graph
from ghoststep.numerics import safe_norm
from ghoststep.registry import instrument
from ghoststep.severity import SPIKE_NORM
from ghoststep.subjects.setup import Setup

if TYPE_CHECKING:
    import torch

NORMS = (1.0, 1e-3, 1e-6, 1e-9, 1e-12, 1e-20, 1e-30)
"""Norms of a sweep, as multiples of the median row's."""

SEED = 20


@instrument
def amplification(setup: Setup, call: LiveCall, batch: BatchFacts, inputs: InputRows) -> Amplification:
    """Feed up to three near-zero rows of the table, as they are, at every kind of place that the batch has.

    `DoesNotApply` where no row is near zero (then nothing is run), or the table is frozen. `CannotLook` where the loss depends on
    no position. Cost: one forward and one backward without parameter gradients to find positions that the loss depends on, and one
    for each row and place, at most 13; 3 with `--fast`. Nothing is changed.
    """
    norms_R = inputs.rows.norms_R
    silent = _rows_without_gradient(call, batch)
    suspects = [int(i) for i in (norms_R * inputs.multiplier < SPIKE_NORM).nonzero()[0] if int(i) not in silent]
    if not suspects:
        raise DoesNotApply("no row of the input table is near zero" + (" but padding's" if silent else ""))
    (_, table), _ = input_weight(setup, call)
    if not table.requires_grad:
        raise DoesNotApply("the input table is frozen: its rows get no gradient")
    chosen = _chosen(suspects, norms_R, set(batch.ids_BT.ravel().tolist()), fast=setup.fast)
    fed = [Fed(row=table[i].detach().clone(), table_row=i, direction=i) for i in chosen]
    depended_BT = depended_on(setup, call, batch)
    if not depended_BT.any():
        raise CannotLook("no position of the first batch gets a gradient, so no row's gradient could be measured")
    seats = places_of(batch, depended_BT)[: 2 if setup.fast else None]
    return measure(setup, call, batch, table, seats, fed, inputs.rows.median_norm)


def sweep(
    setup: Setup, call: LiveCall, batch: BatchFacts, *, norms: Sequence[float] = NORMS, places: Sequence[str] = (),
    rows: Sequence[int] | None = None,
) -> Amplification:  # fmt: skip
    """Feed a row of each norm (multiples of the table's median norm) at each place, in a random direction or in those of `rows`.

    places: names of `Place`; empty for all that the batch has. rows: table rows, fed as they are too; a row of exact zeros has no
    direction and is fed as it is only. The norm of all gradients is measured beside the row's, and once more at each norm where the
    law predicts that a step is lost. Where the loss depends on no such place, it is fed
    all the same, and every gradient is 0. Cost: one forward and backward with parameter gradients for each norm, row and place, and
    one without.
    `CannotLook` if the batch has none of the places, or a row is not there.
    """
    import torch

    (_, table), _ = input_weight(setup, call)
    median = float(table.detach().float().norm(dim=1).median())
    fed: list[Fed] = []
    for i in [-1] if rows is None else rows:
        if not -1 <= i < len(table):
            raise CannotLook(f"the table has rows 0 to {len(table) - 1}, and {i} was asked for")
        if i < 0:
            along = torch.randn(table.shape[1], generator=torch.Generator().manual_seed(SEED), dtype=torch.float64)
        else:
            fed.append(Fed(row=table[i].detach().clone(), table_row=i, direction=i))
            along = table[i].detach().double().cpu()
        size = safe_norm(along)
        if size > 0:
            unit = along / along.abs().max()
            unit = (unit / unit.norm()).to(table.device)
            fed += [Fed(row=(unit * norm * median).to(table.dtype), direction=i) for norm in norms]
    seats = places_of(batch, depended_on(setup, call, batch))
    chosen = [p for p in seats if not places or p[0] in places]
    if not chosen:
        raise CannotLook(f"the batch has none of the places {', '.join(places)}")
    return measure(setup, call, batch, table, chosen, fed, median, with_total=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fed:
    """A row to feed, in the table's dtype. table_row: -1 if it is none of the table's. direction: as in `Reading`."""

    row: torch.Tensor
    table_row: int = -1
    direction: int = -1


def _chosen(suspects: Sequence[int], norms_R: Any, in_batch: set[int], *, fast: bool) -> list[int]:
    """The smallest that is no exact zero, the smallest one in the batch (or else the largest), and an exact zero."""
    tiny = sorted((i for i in suspects if norms_R[i] > 0), key=lambda i: float(norms_R[i]))
    zeros = sorted((i for i in suspects if norms_R[i] == 0), key=lambda i: i not in in_batch)
    second = [i for i in tiny[1:] if i in in_batch][:1] or tiny[1:][-1:]
    return [*tiny[:1], *second, *zeros[:1]][: 1 if fast else None]


def _rows_without_gradient(call: LiveCall, batch: BatchFacts) -> set[int]:
    """`padding_idx`, which gets no gradient, and an id that stands for padding and nothing else in this batch: kept at zero on
    purpose."""
    real = set(batch.ids_BT.ravel().tolist() if batch.padding_BT is None else batch.ids_BT[~batch.padding_BT].tolist())
    silent = {getattr(call.embedding, "padding_idx", None)} - {None}
    return {int(i) for i in silent if i is not None} | ({batch.pad_id} - {None} - real if batch.pad_id is not None else set())


def measure(
    setup: Setup, call: LiveCall, batch: BatchFacts, table: torch.Tensor, seats: Sequence[tuple[str, int, int]],
    fed: Sequence[Fed], median: float, *, with_total: bool = False,
) -> Amplification:  # fmt: skip
    """Feed each row at each seat (name, example, position). with_total: with the gradients of all trainable parameters too."""
    measured = []
    trainable = [p for p in setup.model.parameters() if p.requires_grad] if with_total else []
    bound = float(setup.max_grad_norm) if setup.max_grad_norm is not None and 0 < setup.max_grad_norm < math.inf else 1.0
    with frozen(setup):
        factor = multiplier(call, table)
        for p in trainable:
            p.requires_grad_(True)
        for name, example, position in seats:
            seat = seat_of(call, batch, example, position)

            def read(one: Fed, seat: Seat = seat, *, is_check: bool = False) -> Reading:
                gradient, total, loss = _one(setup, call, seat, one.row, factor, trainable)
                return Reading(norm=safe_norm(one.row), gradient=gradient, table_row=one.table_row, direction=one.direction,
                               loss=loss, total=total, is_check=is_check)  # fmt: skip

            place = Place(name=name, example=example, position=position, readings=tuple(read(one) for one in fed))
            if with_total:
                more = [read(one, is_check=True) for one in _predicted(place, fed, LOST_FACTOR * bound)]
                place = replace(place, readings=(*place.readings, *more))
            measured.append(place)
    return Amplification(
        places=tuple(measured), multiplier=factor, num_loss_tokens=sum(batch.supervised_per_batch[:1]), median_norm=median,
        bound=bound, num_passes=1 + sum(len(p.readings) for p in measured),
    )  # fmt: skip


def _predicted(place: Place, fed: Sequence[Fed], lost: float) -> list[Fed]:
    """Rows at the norms where, by the law, a step gets lost and where it overflows: each law is checked at the spot."""
    rows = []
    for direction in {one.direction for one in fed}:
        alone = replace(place, readings=tuple(r for r in place.readings if r.direction == direction))
        shape = max((one for one in fed if one.direction == direction), key=lambda one: safe_norm(one.row))
        size = safe_norm(shape.row)
        for gradient in (lost, OVERFLOW_GRADIENT):
            norm = alone.critical_norm(gradient)
            if norm > 0 and size > 0:
                row = (shape.row.double() * (norm / size)).to(shape.row.dtype)
                rows.append(Fed(row=row, direction=direction))
    return rows


def multiplier(call: LiveCall, table: torch.Tensor) -> float:
    """What the embedding module multiplies a table row by, measured on the first look-up with a sizeable row."""
    import torch

    if call.embedding is None:
        raise CannotLook("no module looks token ids up, so no row can be fed")
    ids = call.ids[0].reshape(-1)[:64]
    with torch.no_grad():
        given, got = table[ids].double(), vectors(call.embedding(ids.reshape(1, -1))).reshape(len(ids), -1).double()
    square = (given * given).sum()
    if got.shape != given.shape or not square > 0:
        return 1.0
    return float((given * got).sum() / square)


def _one(
    setup: Setup, call: LiveCall, seat: Seat, row: torch.Tensor, factor: float, trainable: Sequence[torch.Tensor]
) -> tuple[float, float, float]:
    """Norm of d loss / d table row for this row at this seat, norm of all gradients (NaN without `trainable`), and the loss."""
    import torch

    leaf: list[torch.Tensor] = []

    def feed(module: torch.nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        if leaf or not seat.is_in(args, kwargs):
            return output
        given = vectors(output)
        leaf.append((row.to(given.dtype) * factor).detach().to(given.device).requires_grad_())
        return seat.put(output if trainable else with_vectors(output, given.detach()), leaf[0])

    assert call.embedding is not None
    handle = call.embedding.register_forward_hook(feed, with_kwargs=True)
    try:
        loss = loss_graph(setup, setup.batches[0])
        if not leaf:
            raise CannotLook("the embedding was not called with the batch's ids again")
        gradient, *others = torch.autograd.grad(loss, [leaf[0], *trainable], allow_unused=True)
    finally:
        handle.remove()
    own = 0.0 if gradient is None else safe_norm(gradient) * abs(factor)
    total = math.hypot(own, *(safe_norm(g) for g in others if g is not None)) if trainable else math.nan
    return own, total, float(loss.detach())
