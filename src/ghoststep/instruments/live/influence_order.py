"""Does the order of earlier tokens matter? Two of them change places, against one of them being replaced."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ghoststep.instruments.live.influence_plan import document_stop
from ghoststep.instruments.live.influence_session import Session

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

ROUNDING = 2e-6
"""Relative change of a float32 hidden state that adding the same numbers in another order can cause."""


def order_change(session: Session) -> tuple[float, float] | None:
    """(change when two tokens change places) / (change when they are replaced), and the ratio that rounding alone reaches.

    Read at the last real position of each example's first document; None if no example has two different tokens before it.
    Costs two forwards.
    """
    import numpy as np
    import torch

    from ghoststep.instruments.live.influence_regions import changes

    at, probe = session.at, session.probe
    ids = torch.from_numpy(at.ids.copy())
    where_BT = np.zeros(at.ids.shape, dtype=bool)
    targets: list[tuple[int, int]] = []
    for b in session.examples[:1] if session.coupled else session.examples:
        first = int(np.flatnonzero(at.real[b])[0])
        last = document_stop(at, b, first) - 1
        pair = _different_pair(at.ids[b], first, last)
        if pair is None:
            continue
        one, two = pair
        ids[b, one], ids[b, two] = ids[b, two].clone(), ids[b, one].clone()
        where_BT[b, [one, two]] = True
        targets.append((b, last))
    if not targets:
        return None
    swapped = changes(probe.hidden(ids), probe.base)
    replaced = session.changed(where_BT)
    moved = [(swapped[t], replaced[t]) for t in targets if np.isfinite(swapped[t]) and replaced[t] > 0]
    if not moved:
        return None
    largest = max(r for _, r in moved)
    noise = max(session.floor, ROUNDING) if session.floor > ROUNDING * 10 else ROUNDING
    return float(max(s for s, _ in moved) / largest), float(noise / largest)


def _different_pair(ids: NDArray[np.int64], first: int, last: int) -> tuple[int, int] | None:
    """The two nearest positions right before `last` that hold different tokens."""
    for two in range(last - 1, first, -1):
        if ids[two] != ids[two - 1]:
            return two - 1, two
    return None
