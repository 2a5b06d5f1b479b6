"""Does the order of earlier tokens matter? A few of them change places, against their being replaced."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ghoststep.instruments.live.influence_plan import document_stop, replacements
from ghoststep.instruments.live.influence_session import Session

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

ROUNDING = 2e-6
"""Relative change of a float32 hidden state that adding the same numbers in another order can cause."""

NUM_TURNED = 6
"""So many tokens are read backwards: rotary angles of two neighbours differ too little to show in a flat attention."""


def order_change(session: Session) -> tuple[float, float] | None:
    """(change when a few tokens change places) / (change when they are replaced), and the ratio that rounding alone reaches.

    Read at the last real position of each example's first document; None if no example has two different tokens before it.
    Costs one forward, in which every second example has its tokens replaced; two where examples see each other or there is one.
    """
    import numpy as np

    at = session.at
    runs: dict[int, slice] = {}
    targets: dict[int, int] = {}
    for b in session.examples[:1] if session.coupled else session.examples:
        first = int(np.flatnonzero(at.real[b])[0])
        targets[b] = document_stop(at, b, first) - 1
        run = _varied_run(at.ids[b], first, targets[b])
        if run is not None:
            runs[b] = run
    if not runs:
        return None
    chosen = list(runs)
    if len(chosen) > 1:
        change_BT = _changed(session, runs, chosen[0::2], chosen[1::2])
        swapped = [float(change_BT[b, targets[b]]) for b in chosen[0::2]]
        replaced = [float(change_BT[b, targets[b]]) for b in chosen[1::2]]
    else:
        (b,) = chosen
        swapped = [float(_changed(session, runs, chosen, [])[b, targets[b]])]
        replaced = [float(_changed(session, runs, [], chosen)[b, targets[b]])]
    moved, largest = [s for s in swapped if np.isfinite(s)], max((r for r in replaced if np.isfinite(r)), default=0.0)
    if not moved or largest <= 0:
        return None
    noise = max(session.floor, ROUNDING) if session.floor > ROUNDING * 10 else ROUNDING
    return max(moved) / largest, noise / largest


def _changed(session: Session, runs: dict[int, slice], swapped: list[int], replaced: list[int]) -> NDArray[np.float64]:
    """Changes [B, T] after the runs of some examples were turned round and those of others replaced. One forward."""
    import numpy as np

    from ghoststep.instruments.live.influence_regions import changes

    where_BT = np.zeros(session.at.ids.shape, dtype=bool)
    for b in replaced:
        where_BT[b, runs[b]] = True
    session.seed += 1
    ids_BT = replacements(session.at, where_BT, session.probe.tables, session.special, session.seed)
    for b in swapped:
        ids_BT[b, runs[b]] = ids_BT[b, runs[b]].flip(0)
    return changes(session.probe.hidden(ids_BT), session.probe.base)


def _varied_run(ids: NDArray[np.int64], first: int, last: int) -> slice | None:
    """Positions of up to `NUM_TURNED` tokens that read otherwise backwards, as near before `last` as there are two different."""
    for two in range(last - 1, first, -1):
        if ids[two] != ids[two - 1]:
            run = slice(max(first, two + 1 - NUM_TURNED), two + 1)
            return run if (ids[run] != ids[run][::-1]).any() else slice(two - 1, two + 1)
    return None
