"""From flushed numbers to `Step` facts, on the host. P parameters, F steps of a flush."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ghoststep.evidence.steps import Step, StepOutcome, StepRow, TensorOutlier
from ghoststep.watching.ring import PLACE_COLUMNS, SCALARS, Flushed, HostFacts

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

NUM_TYPICAL = 64
"""Last steps whose norms give a tensor its own median."""

MIN_TYPICAL = 20
MAX_OUTLIERS = 8
GREW, SHRANK = 1e3, 1e-6
"""Factors against a tensor's own median from which its norm is kept as an outlier. Healthy norms move by some tens."""

OVERFLOW_PLACE = 1e18
"""Gradient of one place from which the squares of a table's gradient can leave float32: root of the largest number, 1.8e19, with
room for a token that occurs several times."""

MAX_NAMES = 4

NORM_FALLEN, LOSS_FALLEN = 1 / 30, 1 / 10
"""Of the largest typical gradient norm and loss of a run so far: below both it has converged, and its updates may well be too small
for its weights. Trainings that go on come near one of them (gradients fall by some ten after the first steps), not both."""

NUM_NEAR = 8
"""Steps whose median is typical of that time."""


class _Fall:
    """How far gradients and loss have fallen since the steps in which they were largest."""

    def __init__(self) -> None:
        self._recent: tuple[list[float], list[float]] = [], []
        self._heights = [0.0, 0.0]
        self._now = [math.inf, math.inf]

    def judged(self, share: float, norm: float | None, loss: float | None) -> float | None:
        """The share of stuck elements as it was measured; None where there is none, or where the run has converged."""
        for k, value in enumerate((norm, loss)):
            recent = self._recent[k]
            if value is not None and math.isfinite(value):
                recent.append(abs(value))
            if len(recent) == NUM_NEAR:
                self._now[k] = sorted(recent)[NUM_NEAR // 2]
                self._heights[k] = max(self._heights[k], self._now[k])
                recent.clear()
        is_low = self._now[0] < NORM_FALLEN * self._heights[0]
        has_learnt = self._heights[1] == 0 or self._now[1] < LOSS_FALLEN * self._heights[1]
        return None if math.isnan(share) or (is_low and has_learnt) else share


class Recorder:
    """Turns flushes into steps, and knows each tensor's usual norm."""

    def __init__(self, names: Sequence[str], table_names: Sequence[str], *, keep_norms: bool = False) -> None:
        import numpy as np

        self.names, self.table_names, self.keep_norms = list(names), list(table_names), keep_norms
        wanted = set(table_names)
        self.is_table_P = np.array([n in wanted for n in names], dtype=bool)
        self._history = np.full((NUM_TYPICAL, len(self.names)), np.nan, dtype=np.float32)
        self._num_seen = 0
        self._typical_P: NDArray[np.float32] | None = None
        self._typical_at = 0
        self._fall = _Fall()

    def steps(self, flushed: Flushed) -> list[Step]:
        """The steps of one flush, whose copy has arrived."""
        import numpy as np

        before, after = flushed.before.numpy(), flushed.after.numpy()
        more = flushed.more.numpy().astype(np.float64, copy=False)
        typical = self._typical()
        with np.errstate(all="ignore"):
            return [self._step(facts, before[i], after[i], more[i], typical) for i, facts in enumerate(flushed.host)]

    def _typical(self) -> NDArray[np.float32] | None:
        """Median norm of each tensor over its last steps, taken before this flush; None while there are too few. Taken anew
        when a quarter of those steps is new: sorting is most of a flush for a model of thousands of tensors."""
        import numpy as np

        if self._num_seen < MIN_TYPICAL:
            return None
        if self._typical_P is not None and self._num_seen - self._typical_at < NUM_TYPICAL // 4:
            return self._typical_P
        rows = self._history[: min(self._num_seen, NUM_TYPICAL)]
        counts = np.isfinite(rows).sum(axis=0)
        ordered = np.sort(rows, axis=0)  # NaN last
        median = ordered[np.maximum(counts - 1, 0) // 2, np.arange(rows.shape[1])]
        self._typical_at = self._num_seen
        self._typical_P = np.where(counts >= MIN_TYPICAL, median, np.nan).astype(np.float32)
        return self._typical_P

    def _step(
        self, facts: HostFacts, before_P: NDArray[Any], after_P: NDArray[Any], more: NDArray[Any],
        typical_P: NDArray[Any] | None,
    ) -> Step:  # fmt: skip
        import numpy as np

        scalars = dict(zip(SCALARS, more[: len(SCALARS)].tolist(), strict=True))
        scale = scalars["scale"] if scalars["scale"] > 0 else None
        has_P = before_P != -1
        before_P = np.where(has_P, before_P / np.float32(scale or 1.0), before_P)
        if facts.carried:
            after_P = self._carried(before_P, after_P, facts.carried)
        had_P = after_P != -1
        was_skipped = facts.was_skipped or scalars["found_inf"] > 0
        rows = self._rows(more[len(SCALARS) :], scale)
        bad_P = self._nonfinite(before_P, after_P, has_P, rows, is_cleared=scalars["found_inf"] == 0)
        bad_after_P = had_P & ~np.isfinite(after_P)
        loss = scalars["loss"] / (scale or 1.0) if facts.num_losses else None
        step = Step(
            number=facts.number, ended_at=facts.ended_at, seconds=facts.seconds,
            outcome=_outcome(facts, was_skipped), num_micro_batches=facts.num_micro_batches,
            num_dropped=facts.num_dropped, num_tokens=facts.num_tokens, loss=loss,
            norm=_total(before_P[has_P]), tables_norm=_total(before_P[has_P & self.is_table_P]),
            trunk_norm=_total(before_P[has_P & ~self.is_table_P]),
            norm_after=_total(after_P[had_P]), trunk_norm_after=_total(after_P[had_P & ~self.is_table_P]),
            num_gradients=int(has_P.sum()), num_zero_before=int((before_P == 0).sum()), num_zero_after=int((after_P == 0).sum()),
            num_nonfinite_before=int(bad_P.sum()), num_nonfinite_after=int(bad_after_P.sum()),
            nonfinite_before=self._named(bad_P), nonfinite_after=self._named(bad_after_P),
            lrs=facts.lrs, scale=scale, moved=_seen(scalars["moved"]), clip_bound=facts.clip_bound, clip_action=facts.clip_action,
            rows=rows, outliers=self._outliers(before_P, has_P, typical_P), num_graph_nodes=facts.num_graph_nodes,
            kept_gradients=_kept(facts, scalars["kept"]), stuck=self._fall.judged(scalars["stuck"], _total(before_P[has_P]), loss),
            norms=before_P.astype("<f4").tobytes() if self.keep_norms else b"",
        )  # fmt: skip
        self._history[self._num_seen % NUM_TYPICAL] = np.where(has_P & np.isfinite(before_P), before_P, np.nan)
        self._num_seen += 1
        return step

    def _carried(self, before_P: NDArray[Any], after_P: NDArray[Any], stepped: Sequence[int]) -> NDArray[Any]:
        """Norms after clipping where only some tensors were measured: one factor clips the whole trunk, and they show it."""
        import numpy as np

        seen_P = (after_P != -1) & (before_P > 0) & np.isfinite(before_P) & ~self.is_table_P
        if not seen_P.any():
            return after_P
        factor = np.sqrt(
            np.sum(np.square(after_P[seen_P], dtype=np.float64)) / np.sum(np.square(before_P[seen_P], dtype=np.float64))
        )
        left_P = np.zeros_like(seen_P)
        left_P[list(stepped)] = True
        left_P &= (after_P == -1) & (before_P != -1)
        carried_P = after_P.copy()
        carried_P[left_P] = 0.0 if factor == 0 else before_P[left_P] * np.float32(factor)
        return carried_P

    def _rows(self, flat: NDArray[Any], scale: float | None) -> tuple[StepRow, ...]:
        found = []
        for values in flat.reshape(-1, len(PLACE_COLUMNS)).tolist():
            place = dict(zip(PLACE_COLUMNS, values, strict=True))
            if place["norm"] == -1:
                continue
            example, position = divmod(int(place["flat"]), max(int(place["width"]), 1))
            found.append(
                StepRow(
                    table=self.table_names[int(place["table"])], token_id=int(place["id"]), micro_batch=int(place["micro"]),
                    example=example, position=position, gradient_norm=place["norm"] / (scale or 1.0),
                    row_norm_before=_readable(place["row_before"]), row_norm_after=_readable(place["row_after"]),
                )
            )  # fmt: skip
        return tuple(sorted(found, key=lambda r: -r.gradient_norm if r.gradient_norm == r.gradient_norm else -math.inf))

    def _nonfinite(
        self, before_P: NDArray[Any], after_P: NDArray[Any], has_P: NDArray[Any], rows: Sequence[StepRow], *, is_cleared: bool
    ) -> NDArray[Any]:
        """Tensors with NaN or inf in the gradient. A norm may be inf because squares overflowed: then clipping made zeros of
        finite values (of an inf it makes NaN), or one place of the table is huge and finite, or the loss scale is (is_cleared: the
        scaler looked at every element and found neither; in bf16 it doubles its scale without end)."""
        import numpy as np

        huge = {r.table for r in rows if OVERFLOW_PLACE < r.gradient_norm < math.inf}
        overflowed_P = np.array([n in huge for n in self.names], dtype=bool) if huge else np.zeros(len(self.names), dtype=bool)
        overflowed_P |= (after_P == 0) | (np.isfinite(after_P) if is_cleared else False)
        bad_P: NDArray[Any] = has_P & (np.isnan(before_P) | (np.isinf(before_P) & ~overflowed_P))
        return bad_P

    def _outliers(
        self, before_P: NDArray[Any], has_P: NDArray[Any], typical_P: NDArray[Any] | None
    ) -> tuple[TensorOutlier, ...]:
        import numpy as np

        if typical_P is None:
            return ()
        ratio_P = before_P / typical_P
        out_P = has_P & (typical_P > 0) & ((ratio_P > GREW) | ((ratio_P < SHRANK) & (before_P > 0)))
        places = np.flatnonzero(out_P)
        if len(places) > MAX_OUTLIERS:
            places = places[np.argsort(-np.abs(np.log(np.maximum(ratio_P[places], 1e-38))))[:MAX_OUTLIERS]]
        return tuple(
            TensorOutlier(parameter=self.names[i], norm=float(before_P[i]), typical=float(typical_P[i])) for i in places
        )

    def _named(self, chosen_P: NDArray[Any]) -> tuple[str, ...]:
        import numpy as np

        return tuple(self.names[i] for i in np.flatnonzero(chosen_P)[:MAX_NAMES])


def _outcome(facts: HostFacts, was_skipped: bool) -> StepOutcome:
    if facts.by_policy:
        return StepOutcome.SKIPPED_BY_POLICY
    return StepOutcome.SKIPPED_BY_SCALER if was_skipped else StepOutcome.STEPPED


def _total(norms: NDArray[Any]) -> float | None:
    """Norm of norms in float32, as torch's clip adds them up; None of nothing."""
    import numpy as np

    if not len(norms):
        return None
    return float(np.sqrt(np.sum(np.square(norms, dtype=np.float32), dtype=np.float32)))


def _kept(facts: HostFacts, is_same: float) -> bool | None:
    """is_same: 1 where nothing wrote to the gradients of an optimizer and their norms stayed; 0 where those changed unseen."""
    if is_same == 1:
        return True
    return False if is_same == 0 or facts.has_cleared else None


def _seen(value: float) -> float | None:
    return None if math.isnan(value) else value


def _readable(value: float) -> float | None:
    return None if value < 0 else value
