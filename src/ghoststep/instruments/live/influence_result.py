"""From what a measurement saw to the evidence. B examples, T positions, S source positions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ghoststep.evidence.base import Missing
from ghoststep.evidence.batch import BatchFacts
from ghoststep.evidence.influence import CausalIntent, Influence, Reading, Region
from ghoststep.instruments.live.influence_regions import Regions
from ghoststep.instruments.live.influence_session import Session

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


def power(regions: Regions, floor: float) -> tuple[float, int]:
    """Median influence of the past among pairs above the floor, and their number."""
    import numpy as np

    past = regions.tallies.get(Region.PAST)
    seen = [v for v in past.values if v > floor and np.isfinite(v)] if past is not None else []
    return (float(np.median(seen)) if seen else 0.0), len(seen)


def influence_of(
    sessions: list[Session], plain: Session, order: tuple[float, float] | None, intent: CausalIntent,
    batch: BatchFacts | Missing, *, perturbed: bool,
) -> Influence:  # fmt: skip
    """Join the sessions (the user's mode first; `plain` without perturbed parameters) into one fact."""
    paid = sessions if plain in sessions else [*sessions, plain]
    first = sessions[0]
    swaps = _strongest([{r: x for r, x in s.swaps.readings(s.floor).items() if _tells(s, x, first)} for s in sessions])
    gradients = _strongest([s.gradients.readings(0.0) for s in sessions])
    past, num_past = power(first.swaps, first.floor)
    if not num_past:
        past, num_past = power(first.gradients, 0.0)
    near = [n for s in sessions for n in (*s.gradients.near_past, *s.swaps.near_past)]
    matrix, example = _matrix(first)
    future = [r for r in (swaps.get(Region.FUTURE), gradients.get(Region.FUTURE)) if r is not None]
    return Influence(
        matrix_ST=matrix, matrix_example=example, readings=swaps, gradient_readings=gradients,
        trained_future=_worst([x for s in sessions if _tells(s, x := _trained(s), first)]),
        trained_future_gradient=_worst(
            [s.gradients.reading(Region.FUTURE, s.gradients.trained_future, 0.0) for s in sessions]
        ),
        intent=intent, floor=first.floor, past=past, num_past=num_past,
        near_past=(sum(v for v, _, _ in near), len(near)), blind_example=_blind(near),
        order_change=None if order is None else order[0], order_floor=0.0 if order is None else order[1],
        has_attention=first.probe.attention.num_operations > 0, probes_perturbed=perturbed,
        nothing_visible=_nothing_visible(first),
        is_causal_by_measure=all(r.relative <= (first.floor if r.method == "swap" else 1e-6) for r in future),
        encoder_padding=first.encoder_padding,
        is_time_first=first.probe.time_first,
        against_order=any(
            s.coupled == "discrete" and s.swaps.backward > s.floor * s.swaps.reference() >= s.swaps.forward for s in sessions
        ),
        coupled=next((s.coupled for s in sessions if s.coupled), ""), mode=first.swaps.mode,
        serial=any(bool(s.coupled) for s in sessions), readout=first.probe.readout.name,
        num_examples=int(first.at.ids.shape[0]), num_forward=sum(s.probe.num_forward for s in paid),
        num_backward=sum(s.probe.num_backward for s in paid), separators=_separators(first, batch),
        reasons=tuple(dict.fromkeys(r for s in sessions for r in s.reasons)),
    )  # fmt: skip


def _tells(session: Session, reading: Reading, first: Session) -> bool:
    """False for what a mode noisier than the user's own shows below its own floor: it is judged by the first session's."""
    return session is first or session.floor <= first.floor or reading.num_above > 0


def _trained(session: Session) -> Reading:
    return session.swaps.reading(Region.FUTURE, session.swaps.trained_future, session.floor)


def _blind(near: list[tuple[bool, int, int]]) -> tuple[int, int] | None:
    """A position of an example where nothing looked at sees its past. One such position may be the first of a chunk: unless
    no example sees any, an example needs two."""
    somewhere = any(visible for visible, _, _ in near)
    for example in dict.fromkeys(b for _, b, _ in near):
        mine = [(visible, t) for visible, b, t in near if b == example]
        if not any(visible for visible, _ in mine) and len({t for _, t in mine}) >= (2 if somewhere else 1):
            return example, mine[0][1]
    return None


def _strongest(found: list[dict[Region, Reading]]) -> dict[Region, Reading]:
    best: dict[Region, Reading] = {}
    for readings in found:
        for region, reading in readings.items():
            if region not in best or reading.relative > best[region].relative:
                best[region] = reading
    return best


def _worst(readings: list[Reading]) -> Reading | None:
    looked = [r for r in readings if r.num_pairs]
    return max(looked, key=lambda r: r.relative) if looked else None


def _matrix(session: Session) -> tuple[NDArray[np.float64], int]:
    """What was looked at in one example: columns of the targets whose gradient was taken, and what replaced blocks moved.

    A block that moves nothing at a position fills all its pairs with 0; one that does stands at its token nearest to it.
    """
    import numpy as np

    time = session.at.ids.shape[1]
    matrix = np.full((time, time), np.nan)
    example = session.gradient_rows[0][0][0] if session.gradient_rows else session.examples[0]
    reference = session.swaps.reference()
    real = session.at.real[example]
    for block, change_T in session.swap_rows:
        if block.example != example:
            continue
        for t in real.nonzero()[0].tolist():
            value = float(change_T[t]) / reference
            if block.start <= t < block.stop:
                matrix[t, t] = np.fmax(matrix[t, t], value)
            elif value == 0.0:
                line = matrix[block.start : block.stop, t]
                line[np.isnan(line)] = 0.0
            else:
                s = block.start if t < block.start else block.stop - 1
                matrix[s, t] = np.fmax(matrix[s, t], value)
    for (b, t), norms in session.gradient_rows:
        if b == example:
            column = norms / session.gradients.reference()
            matrix[:, t] = np.fmax(matrix[:, t], np.where(np.isfinite(column) & real, column, np.nan))
    return matrix, example


def _nothing_visible(session: Session) -> tuple[tuple[int, int], ...]:
    import torch

    real = torch.from_numpy(session.at.real)
    nowhere = ~torch.isfinite(session.probe.base).all(dim=-1) & real
    empty = session.probe.attention.empty_BT
    if empty is not None and empty.shape[0] in (1, real.shape[0]):
        nowhere = empty & real if nothing_visible_at_all(session) else nowhere | (empty & real)
    return tuple((int(b), int(t)) for b, t in nowhere.nonzero())


def nothing_visible_at_all(session: Session) -> bool:
    """No real position has a finite hidden state, and attention operations were seen whose real queries have no key."""
    import torch

    real = torch.from_numpy(session.at.real)
    empty = session.probe.attention.empty_BT
    finite = torch.isfinite(session.probe.base).all(dim=-1) & real
    return not bool(finite.any()) and empty is not None and empty.shape[0] in (1, len(real)) and bool((empty & real).any())


def _separators(session: Session, batch: BatchFacts | Missing) -> tuple[tuple[int, int], ...]:
    """EOS or BOS tokens in the middle of an example without an announced boundary, across which a later position was seen to see."""
    import numpy as np

    if not isinstance(batch, BatchFacts) or batch.document_BT is not None or session.probe.num_streams > 1:
        return ()  # what an encoder-decoder's decoder starts and ends with separates nothing
    marks = {i for i in (*batch.eos_ids, batch.bos_id) if i is not None}
    at = session.at
    inner = at.real.copy()
    for b in range(inner.shape[0]):
        places = np.flatnonzero(at.real[b])
        inner[b, places[:1]] = inner[b, places[-1:]] = False
    found = np.argwhere(np.isin(at.ids, list(marks)) & inner)
    crossed = [
        (int(b), int(s))
        for b, s in found
        if any(
            example == b and t > s and (norms[:s][at.real[b, :s]] > 0).any() for (example, t), norms in session.gradient_rows
        )
    ]
    return tuple(crossed)
