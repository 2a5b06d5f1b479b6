"""Does the user's own train step keep its step when an amplified row is in the batch? One real step, watched, and undone."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ghoststep.errors import CannotLook, DoesNotApply
from ghoststep.evidence.amplification import Amplification, SpikedStep
from ghoststep.evidence.batch import BatchFacts
from ghoststep.instruments.live.amplification import multiplier
from ghoststep.instruments.live.amplification_places import Seat, seat_of
from ghoststep.instruments.live.calling import LiveCall, eager
from ghoststep.instruments.live.kept_batches import fresh
from ghoststep.instruments.live.live_tables import input_weight
from ghoststep.instruments.live.optimizers import held, holds_copies, watch_steps
from ghoststep.instruments.live.outputs import vectors
from ghoststep.instruments.live.snapshot import need_room, real_steps
from ghoststep.instruments.live.users_errors import as_it_is
from ghoststep.numerics import safe_norm, safe_row_norms
from ghoststep.registry import instrument
from ghoststep.subjects.setup import Setup

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

MAX_CALLS = 12


@instrument
def spiked_step(setup: Setup, call: LiveCall, batch: BatchFacts, amplified: Amplification) -> SpikedStep:
    """Run the user's train_step up to its first optimizer step, with the most amplified row at its worst place.

    The gradients that backward left are compared with those that the optimizer saw: whatever clips in between shows by what it
    does. `DoesNotApply` where no row takes the step; `CannotLook` without train_step or optimizer, or with `--fast`. Everything is
    put back bit for bit. Cost: one training step (a window of them under accumulation) and a copy of parameters and state.
    """
    rows = {r.table_row for p in amplified.places for r in p.readings}
    place, reading = max(
        (w for i in rows if (w := amplified.worst(i)) is not None),
        key=lambda w: (not math.isfinite(w[1].gradient), w[1].gradient),
    )
    if reading.gradient <= amplified.lost:
        raise DoesNotApply("no row takes the step")
    all_held = held(setup.optimizer)
    if setup.train_step is None or not all_held.optimizers:
        raise CannotLook("without train_step and optimizer, nothing shows how steps are clipped")
    if setup.fast:
        raise CannotLook("--fast takes no optimizer steps")
    if holds_copies(all_held, [p for p in setup.model.parameters() if p.requires_grad]):
        raise CannotLook("the optimizer holds copies of the parameters, so what it sees was not compared")
    need_room(setup.model, all_held)
    (_, table), _ = input_weight(setup, call)
    seat = seat_of(call, batch, place.example, place.position)
    seen = _Seen(table, [p for p in setup.model.parameters() if p.requires_grad])
    with real_steps(setup, all_held, setup.scheduler, setup.scaler), eager():
        factor = multiplier(call, table)
        handles = [seen.watch(), *_feed(call, seat, table, reading.table_row, factor)]
        undo = watch_steps(all_held, seen.stepped)
        try:
            for _ in range(min(max(setup.accumulation_steps, 1), MAX_CALLS)):
                with as_it_is(setup, "your train_step"):
                    setup.train_step(setup.model, setup.optimizer, fresh(setup.batches[0]))
        finally:
            undo()
            for handle in handles:
                handle.remove()
    return seen.told(reading.table_row, place.name)


def _feed(call: LiveCall, seat: Seat, table: torch.Tensor, table_row: int, factor: float) -> list[Any]:
    def feed(module: torch.nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        return seat.put(output, table[table_row].to(vectors(output).dtype) * factor) if seat.is_in(args, kwargs) else output

    assert call.embedding is not None
    return [call.embedding.register_forward_hook(feed, with_kwargs=True)]


class _Seen:
    """Norms of gradients: as backward left them, and as the first optimizer step saw them."""

    def __init__(self, table: torch.Tensor, trainable: Sequence[torch.Tensor]) -> None:
        self.table, self.trunk = table, [p for p in trainable if p is not table]
        self.left: dict[int, float] = {}
        self.rows_R: NDArray[Any] | None = None
        self.after: tuple[float, NDArray[Any]] | None = None
        self._handles: list[Any] = []

    def watch(self) -> _Seen:
        """Hooks on every parameter; `remove` takes them off."""
        self._handles = [p.register_post_accumulate_grad_hook(self._arrives) for p in [self.table, *self.trunk]]  # type: ignore[no-untyped-call]
        return self

    def remove(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()

    def _arrives(self, p: torch.Tensor) -> None:
        if self.after is None and p is self.table:
            self.rows_R = self._rows()
        elif self.after is None:
            self.left[id(p)] = safe_norm(_dense(p))

    def stepped(self, _optimizer: Any) -> None:
        """At the end of an optimizer's step; only the first counts."""
        if self.after is None and self.rows_R is not None:
            self.after = math.hypot(*(safe_norm(_dense(p)) for p in self.trunk if p.grad is not None), 0.0), self._rows()

    def _rows(self) -> NDArray[Any]:
        import numpy as np

        return np.zeros(len(self.table)) if self.table.grad is None else safe_row_norms(_dense(self.table))

    def told(self, table_row: int, place: str) -> SpikedStep:
        if self.rows_R is None or self.after is None:
            raise CannotLook("train_step took no optimizer step with a gradient of the input table")
        left, (trunk, after_R) = math.hypot(*self.left.values(), 0.0), self.after
        others = [i for i, norm in enumerate(self.rows_R.tolist()) if norm > 0 and i != table_row]
        kept = [float(after_R[i] / self.rows_R[i]) for i in others]
        return SpikedStep(
            table_row=table_row, place=place, kept_trunk=trunk / left if left > 0 else math.nan,
            kept_rows=statistics.median(kept) if kept else None,
        )  # fmt: skip


def _dense(p: torch.Tensor) -> torch.Tensor:
    assert p.grad is not None
    return p.grad.to_dense() if p.grad.is_sparse else p.grad
