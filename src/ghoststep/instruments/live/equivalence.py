"""Equivalence: the same text alone, as it stands in the batch, and padded on the other side. B examples, T positions."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ghoststep.errors import CannotLook, DoesNotApply
from ghoststep.evidence.batch import BatchFacts
from ghoststep.evidence.equivalence import Equivalence, Variant, VariantReading
from ghoststep.evidence.influence import Influence
from ghoststep.instruments.live.base_probe import BaseProbe
from ghoststep.instruments.live.equivalence_arguments import Arguments, cut, pad
from ghoststep.instruments.live.influence_probe import Probe
from ghoststep.instruments.live.influence_regions import changes
from ghoststep.registry import instrument
from ghoststep.subjects.setup import Setup

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

TOLERANCE = 1e-4
"""Largest change of a float32 hidden state by another shape alone; measured up to 5e-6 (another batch size, 12 layers 1.2e-6)."""

LOW_PRECISION_TOLERANCE = 0.1
"""The same in bfloat16 and float16; measured up to 2.2e-2."""

NUM_PADS = 3
"""Padding added for a side that the batch does not use."""


@instrument
def equivalence(setup: Setup, base: BaseProbe, batch: BatchFacts, influence: Influence) -> Equivalence:
    """Compare up to two padded examples, in eval mode, with themselves alone and unpadded, and padded on the other side.

    Cost: 6 forwards of a single example, so 6/B of a pass, 2/B more where something moved, 2/B less without the other side;
    none with `setup.fast`. Nothing is changed.
    """
    padding_BT = _padding(setup, base, batch, influence)
    runner = _Runner(base.probe)
    chosen = _examples(padding_BT)
    readings = []
    reasons: list[str] = []
    if chosen and padding_BT.any():
        readings.append(_as_batched(runner, padding_BT, chosen))
    side = _tokenizer_side(setup)
    other = {"right": Variant.LEFT, "left": Variant.RIGHT}.get(batch.sides)
    if other is None and batch.sides == "none" and side is not None:
        other = Variant.LEFT if side == "left" else Variant.RIGHT
    if other is not None and chosen:
        used = "the tokenizer" if side is not None and side in other.value else ""
        try:
            readings.append(_other_side(runner, batch, padding_BT, chosen[0], other, used))
        except CannotLook as reason:
            reasons.append(f"{other.value}: {reason}")
    if any(r.num_above for r in readings):
        noise = runner.noise(chosen[0], padding_BT)
        readings = [r if r.change > 10 * noise else replace(r, tolerance=10 * noise, num_above=0) for r in readings]
        reasons += [f"two runs of the same text alone differ by {noise:.2g} of a hidden state"] if noise else []
    if not readings:
        raise DoesNotApply("the first batch has no padding, and nothing says on which side it would stand")
    return Equivalence(
        readings=tuple(readings), side=batch.sides, has_position_ids=batch.has_position_ids,
        num_forward=runner.num_examples / padding_BT.shape[0], reasons=tuple(reasons),
    )  # fmt: skip


def _padding(setup: Setup, base: BaseProbe, batch: BatchFacts, influence: Influence) -> NDArray[np.bool_]:
    """The probed call's padding, or why nothing can be compared."""
    import numpy as np

    if setup.fast:
        raise CannotLook("not looked at with --fast")
    if batch.document_BT is not None:
        raise DoesNotApply("the batch is packed: a text never stands alone in it")
    if influence.is_time_first:
        raise CannotLook("the model takes time before batch: its arguments are not cut to single texts")
    if base.probe.num_streams > 1:
        raise DoesNotApply("an encoder's text and a decoder's are padded apart: neither stands alone")
    if batch.padding_BT is None:
        raise DoesNotApply(f"nothing says what padding is ({batch.padding_source})")
    rows, time = base.probe.ids_BT.shape
    if not np.array_equal(batch.ids_BT[:rows, :time], base.probe.ids_BT.numpy()):
        raise CannotLook("the batch's ids are not those of the probed call")
    return batch.padding_BT[:rows, :time]


class _Runner:
    """Runs single examples in eval mode; H is float32 [1, t, D]."""

    def __init__(self, probe: Probe) -> None:
        self.probe, self.num_examples = probe, 0
        self.call = probe.call
        self.shape = (int(probe.base.shape[0]), int(probe.base.shape[1]))

    def example(self, example: int, start: int, stop: int) -> Arguments:
        return cut(self.call.args, self.call.kwargs, example, start, stop, self.shape)

    def hidden(self, arguments: Arguments, time: int) -> torch.Tensor:
        self.num_examples += 1
        return self.probe.hidden_of(arguments, (1, time))

    def noise(self, example: int, padding_BT: NDArray[np.bool_]) -> float:
        """How far two runs of the same text differ: randomness of the model's own that no seed repeats."""
        span = _span(padding_BT[example])
        assert span is not None  # `_examples` chose it
        one, two = (self.hidden(self.example(example, *span), span[1] - span[0]) for _ in range(2))
        return float(changes(two, one).max())

    def tolerance(self) -> float:
        import torch

        low = self.probe.readout.dtype in (torch.bfloat16, torch.float16)
        return LOW_PRECISION_TOLERANCE if low else TOLERANCE


def _examples(padding_BT: NDArray[np.bool_]) -> list[int]:
    """Up to two examples with one run of at least two real tokens, those with most padding first."""
    order = sorted(range(len(padding_BT)), key=lambda b: -int(padding_BT[b].sum()))
    return [b for b in order if _span(padding_BT[b]) is not None][:2]


def _span(padding_T: NDArray[np.bool_]) -> tuple[int, int] | None:
    real = (~padding_T).nonzero()[0]
    if len(real) < 2 or len(real) != real[-1] - real[0] + 1:
        return None
    return int(real[0]), int(real[-1]) + 1


def _as_batched(runner: _Runner, padding_BT: NDArray[np.bool_], chosen: list[int]) -> VariantReading:
    time = padding_BT.shape[1]
    found: list[tuple[float, int, int]] = []
    for b in chosen:
        span = _span(padding_BT[b])
        if span is None or span == (0, time):
            continue
        start, stop = span
        alone = runner.hidden(runner.example(b, start, stop), stop - start)
        padded = runner.hidden(runner.example(b, 0, time), time)[:, start:stop]
        found += [(float(c), b, start + i) for i, c in enumerate(changes(padded, alone)[0])]
    return _reading(Variant.AS_BATCHED, found, runner.tolerance(), "the batch")


def _other_side(
    runner: _Runner, batch: BatchFacts, padding_BT: NDArray[np.bool_], example: int, variant: Variant, used: str
) -> VariantReading:
    if batch.pad_id is None or not batch.has_attention_mask:
        raise CannotLook("no pad id, or no attention mask to say what padding is")
    if batch.has_position_ids:
        raise CannotLook("the batch passes position_ids, which only its collator could extend")
    span = _span(padding_BT[example])
    assert span is not None  # `_examples` chose it
    start, stop = span
    arguments = runner.example(example, start, stop)
    alone = runner.hidden(arguments, stop - start)
    left = variant is Variant.LEFT
    ids = runner.probe.ids_BT[example, start:stop]
    padded = pad(*arguments, stop - start, NUM_PADS, left=left, pad_id=batch.pad_id, ids=ids)
    hidden = runner.hidden(padded, stop - start + NUM_PADS)
    hidden = hidden[:, NUM_PADS:] if left else hidden[:, :-NUM_PADS]
    found = [(float(c), example, start + i) for i, c in enumerate(changes(hidden, alone)[0])]
    return _reading(variant, found, runner.tolerance(), used)


def _reading(variant: Variant, found: list[tuple[float, int, int]], tolerance: float, used: str) -> VariantReading:
    change, example, position = max(found, default=(0.0, -1, -1))
    above = sum(c > tolerance for c, _, _ in found)
    starts = {(b, min(t for _, other, t in found if other == b)) for _, b, _ in found}
    return VariantReading(
        variant=variant, change=change, tolerance=tolerance, example=example, position=position,
        num_positions=len(found), num_above=above, used_by=used,
        starts_move=any(c > tolerance and (b, t) in starts for c, b, t in found),
    )  # fmt: skip


def _tokenizer_side(setup: Setup) -> str | None:
    side = getattr(setup.tokenizer, "padding_side", None)
    return side if side in ("left", "right") else None
