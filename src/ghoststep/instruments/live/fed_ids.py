"""Ids of the batches that the input table has no row for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ghoststep.errors import CannotLook, DoesNotApply
from ghoststep.evidence.base import Missing
from ghoststep.evidence.batch import FedIds, IdPlace
from ghoststep.finding import Outcome
from ghoststep.instruments.live.calling import LiveCall, compute_loss, eager, is_varied, unwrap
from ghoststep.instruments.live.untouched import untouched
from ghoststep.instruments.live.users_errors import IdBeyondTable, guard_look_ups
from ghoststep.registry import instrument
from ghoststep.subjects.setup import Setup

if TYPE_CHECKING:
    import torch

FEW = 3


@instrument
def fed_ids(setup: Setup, call: LiveCall | Missing) -> FedIds:
    """The first batch's ids as they reach the table; further batches by the entry that holds those ids.

    Where the first run stopped at such an id, it is begun again up to there, and so is that of a further batch with such an id.
    Cost: no pass, or the beginning of one (a whole forward of a batch whose odd ids the model maps by itself).
    """
    import torch

    can_resize = hasattr(unwrap(setup.model)[0], "resize_token_embeddings")
    if isinstance(call, Missing):
        if not call.cannot_run:
            raise (DoesNotApply if call.outcome is Outcome.NOT_APPLICABLE else CannotLook)(call.reason)
        stop = _run_again(setup, 0)
        if stop is None:
            raise CannotLook(call.reason)
        bad = _beyond(stop.ids, stop.num_rows, 0)
        return FedIds(
            table=f"{stop.module}.weight", num_rows=stop.num_rows, num_ids=stop.ids.numel(), num_batches=1,
            num_beyond=len(bad), beyond=tuple(bad[:FEW]), can_resize=can_resize,
        )  # fmt: skip
    num_rows = call.num_table_rows
    if not call.ids or num_rows is None:
        raise DoesNotApply("no module looks token ids up in a table")
    found, num_ids = [], sum(i.numel() for i in call.ids)
    entries = _entries(setup, call)
    for number, batch in enumerate(setup.batches[1:], start=1):
        given = [batch[key] for key in entries if isinstance(batch.get(key), torch.Tensor)]
        num_ids += sum(ids.numel() for ids in given)
        beyond = [place for ids in given for place in _beyond(ids, num_rows, number)]
        if beyond and _run_again(setup, number) is not None:  # the model may map such ids before it looks them up
            found += beyond
    return FedIds(
        table=f"{call.embedding_name}.weight", num_rows=num_rows, num_ids=num_ids,
        num_batches=len(setup.batches) if entries else 1, num_beyond=len(found), beyond=tuple(found[:FEW]), can_resize=can_resize,
    )  # fmt: skip


def _run_again(setup: Setup, number: int) -> IdBeyondTable | None:
    """Of this batch: the stop at an id without a table row, or None. Ids that only count up are positions, no tokens."""
    import torch

    core, _ = unwrap(setup.model)
    handles = guard_look_ups(core)
    try:
        with untouched(setup), eager(), torch.no_grad():
            try:
                compute_loss(setup, setup.batches[number])
            except IdBeyondTable as stop:
                return stop if is_varied(stop.ids) else None
            except (Exception, SystemExit):  # the user's own code, told by the first run
                return None
    finally:
        for handle in handles:
            handle.remove()
    return None


def _entries(setup: Setup, call: LiveCall) -> list[str]:
    """Keys of the first batch whose values are ids that were looked up."""
    import torch

    def is_fed(value: object) -> bool:
        if not isinstance(value, torch.Tensor) or value.is_floating_point():
            return False
        return any(i.shape == value.shape and bool((i == value.to(i.device)).all()) for i in call.ids)

    first = setup.batches[0]
    return [k for k, v in first.items() if is_fed(v)][:1] if len(call.ids) == 1 else [k for k, v in first.items() if is_fed(v)]


def _beyond(ids: torch.Tensor, num_rows: int, batch: int) -> list[IdPlace]:
    outside = (ids < 0) | (ids >= num_rows)
    found = []
    for place in outside.nonzero().tolist():
        example, position = (place[0], place[1]) if len(place) == 2 else (None, place[0] if len(place) == 1 else None)
        found.append(IdPlace(token_id=int(ids[tuple(place)]), batch=batch, example=example, position=position))
    return found
