"""What the clip did in a step that was not an ordinary one: one event a step, logged and handed to whoever asked."""

from __future__ import annotations

import contextlib
import enum
import itertools
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass

logger = logging.getLogger("ghoststep.clip")

MAX_ROWS = 32
"""Spiking table rows named in one event; the rest is counted."""


class ClipAction(enum.Enum):
    """What was done to the gradients."""

    CAPPED_ROWS = "capped rows"
    GROUPS_APART = "clipped tables and trunk apart"
    RESCALED = "scaled without overflow"
    REMOVED_ROWS = "removed non-finite rows"
    SKIPPED = "skipped the step"
    AS_TORCH = "clipped as torch does"
    MEASURED = "only measured"


@dataclass(frozen=True, slots=True, kw_only=True)
class SpikingRow:
    """One table row whose gradient took the step. norm: before the clip; NaN or inf if it was removed."""

    table: str
    table_row: int
    norm: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ClipEvent:
    """One engaged step, or one that a huge gradient outside the tables took (`AS_TORCH`: nothing was done about it).

    norm: of the gradient that was kept, before clipping. trunk_norm: of everything but the tables.

    cap: bound for a row, in row mode. rows: at most `MAX_ROWS` of num_rows. worst_trunk: the tensor outside the tables with the
    largest norm, if the trunk is non-finite, or if few of its tensors take the step as spiking rows would, or if no row spikes;
    else "".
    """

    action: ClipAction
    mode: str
    max_norm: float
    norm: float
    trunk_norm: float
    cap: float
    rows: tuple[SpikingRow, ...]
    num_rows: int
    worst_trunk: str = ""

    @property
    def message(self) -> str:
        """One line: what spiked, what was done."""
        named = ", ".join(f"{r.table} row {r.table_row} (norm {r.norm:.3g})" for r in self.rows[:4])
        more = f" and {self.num_rows - 4} more" if self.num_rows > 4 else ""
        where = f"{named}{more}" if named else "no table row stands out"
        text = f"{self.action.value}: gradient norm {self.norm:.4g}, max_norm {self.max_norm:.4g}; {where}"
        if self.worst_trunk and self.action is ClipAction.SKIPPED:
            text += f"; not finite outside the embedding tables: {self.worst_trunk}. No gradient is left, so no weight moves"
        elif self.worst_trunk:
            text += (
                f"; outside the embedding tables the norm is {self.trunk_norm:.3g}, most of it in {self.worst_trunk}: "
                "capping rows cannot help there"
            )
        return text


Listener = Callable[[ClipEvent], None]
_listeners: list[Listener] = []
_count = itertools.count(1)


@contextlib.contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Hand every event to `listener` inside the block. What it raises is logged, never raised into a training step."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


def tell(event: ClipEvent) -> None:
    """Log the event (all of the first ten, then each time their number doubles) and hand it to the listeners."""
    number = next(_count)
    if number <= 10 or number & (number - 1) == 0:
        logger.warning("%s [event %d]", event.message, number)
    for listener in list(_listeners):
        try:
            listener(event)
        except Exception:
            logger.exception("a listener of clip events failed")
