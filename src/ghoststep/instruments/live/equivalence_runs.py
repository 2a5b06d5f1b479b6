"""Single texts run in eval mode: what the comparisons of `Equivalence` and its kin share. B examples, T positions, D dimensions."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ghoststep.engine import describe
from ghoststep.errors import CannotLook, DoesNotApply
from ghoststep.evidence.base import Evidence
from ghoststep.evidence.batch import BatchFacts
from ghoststep.evidence.equivalence import Variant, VariantReading
from ghoststep.evidence.influence import Influence
from ghoststep.instruments.live.base_probe import BaseProbe
from ghoststep.instruments.live.equivalence_arguments import Arguments, cut, take, to_float32
from ghoststep.instruments.live.equivalence_float32 import in_float32
from ghoststep.instruments.live.influence_probe import Probe
from ghoststep.instruments.live.influence_regions import changes
from ghoststep.instruments.live.kept_attributes import KeptAttributes
from ghoststep.registry import instrument
from ghoststep.subjects.setup import Setup

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

TOLERANCE = 1e-4
"""Change of a float32 hidden state from which benign changes of shape are measured beside it: usual ones cause up to 5e-6
(another batch size; 12 layers 1.2e-6)."""

LOW_PRECISION_TOLERANCE = 2e-2
"""The same in bfloat16 and float16, where a float32 copy of the weights decides; benign ones cause up to 2.2e-2."""

WITHOUT_COPY = 0.1
"""The same in bfloat16 and float16 where no float32 copy can be run."""

TIMES_BENIGN = 10.0
"""A change counts only if it is this many times what benign changes of shape cause in the same run."""

Found = list[tuple[float, int, int]]
"""(change, example, position) of every real position that was compared."""


class Runs:
    """Runs single examples in eval mode, each once; H is float32 [1, t, D]. `num_examples` counts what ran."""

    def __init__(self, probe: Probe, padding_BT: NDArray[np.bool_], *, is_causal: bool) -> None:
        self.probe, self.padding_BT, self.is_causal = probe, padding_BT, is_causal
        self.call = probe.call
        self.shape = (int(probe.base.shape[0]), int(probe.base.shape[1]))
        self.num_examples = 0.0
        self._kept: dict[tuple[int, int, int], torch.Tensor] = {}
        self._noise: dict[tuple[int, int, int, bool], float] = {}
        self._float32 = False

    def example(self, example: int, start: int, stop: int) -> Arguments:
        """The recorded arguments cut to one example's positions."""
        return cut(self.call.args, self.call.kwargs, example, start, stop, self.shape)

    def alone(self, example: int, start: int, stop: int) -> torch.Tensor:
        """H of one example's positions, run alone; kept."""
        key = (example, start, stop)
        if self._float32 or key not in self._kept:
            hidden = self.hidden(self.example(*key), (1, stop - start))
            if self._float32:
                return hidden
            self._kept[key] = hidden
        return self._kept[key]

    def several(self, examples: Sequence[int]) -> torch.Tensor:
        """H [len(examples), T, D] of these examples in one forward, in this order."""
        arguments = take(self.call.args, self.call.kwargs, examples, self.shape)
        return self.hidden(arguments, (len(examples), self.shape[1]))

    def hidden(self, arguments: Arguments, shape: tuple[int, int]) -> torch.Tensor:
        """H of any arguments. `CannotLook` where the model raises on them."""
        self.num_examples += shape[0]
        arguments = to_float32(arguments) if self._float32 else arguments
        with self.guarded():
            return self.probe.hidden_of(arguments, shape)

    @contextlib.contextmanager
    def guarded(self) -> Iterator[None]:
        """An exception of the user's model on arguments that the user never passed is a reason, no defect."""
        try:
            yield
        except (CannotLook, DoesNotApply):
            raise
        except Exception as error:
            raise CannotLook(f"the model raised {describe(error)}") from error

    def judge(self, variant: Variant, measure: Callable[[], Found], used_by: str, benign: tuple[int, int, int]) -> Judged:
        """A reading of what `measure` finds. What lies above the tolerance counts if it is more than benign changes of shape of
        the text `benign` (example, start, stop) cause, and in low precision if a float32 copy shows it too."""
        low = self.is_low
        tolerance = LOW_PRECISION_TOLERANCE if low else TOLERANCE
        reading = _reading(variant, measure(), tolerance, used_by)
        if not reading.num_above:
            return Judged(reading=reading)
        if low and reading.change != float("inf"):
            try:
                with in_float32(self.probe.core), self._in_float32():
                    exact = _reading(variant, measure(), max(TOLERANCE, TIMES_BENIGN * self._benign(*benign)), used_by)
            except CannotLook as reason:
                reading = replace(reading, tolerance=WITHOUT_COPY)
                return self._against_benign(reading, benign, f"a float32 copy could not be run ({reason})")
            if exact.num_above:
                return Judged(reading=replace(reading, starts_move=exact.starts_move))
            said = f"{variant.value}: {reading.change:.2g} in low precision, {exact.change:.2g} in a float32 copy, which is rounding"
            return Judged(reading=replace(reading, num_above=0, tolerance=max(tolerance, reading.change)), reasons=(said,))
        return self._against_benign(reading, benign, "")

    def _against_benign(self, reading: VariantReading, benign: tuple[int, int, int], why: str) -> Judged:
        noise = TIMES_BENIGN * self._benign(*benign)
        reasons = (why,) if why else ()
        if reading.change <= reading.tolerance:
            reading = replace(reading, num_above=0)
        if noise > reading.tolerance:
            said = f"benign changes of the same text's shape cause {noise / TIMES_BENIGN:.2g} of a hidden state"
            above = reading.num_above if reading.change > noise else 0
            return Judged(reading=replace(reading, tolerance=noise, num_above=above), reasons=(*reasons, said))
        return Judged(reading=reading, reasons=reasons)

    @property
    def is_low(self) -> bool:
        """True if hidden states are computed in bfloat16 or float16."""
        import torch

        return self.probe.readout.dtype in (torch.bfloat16, torch.float16)

    @contextlib.contextmanager
    def _in_float32(self) -> Iterator[None]:
        self._float32 = True
        try:
            yield
        finally:
            self._float32 = False

    @contextlib.contextmanager
    def _other_randomness(self) -> Iterator[None]:
        """Forwards start from other random numbers: each pass is else given the same ones, and noise would look repeatable."""
        core = self.probe.core
        with self.probe.quiet():
            sources = KeptAttributes(list(core.modules())).randomness()
            handle = core.register_forward_pre_hook(lambda m, a: _advance(sources))
            try:
                yield
            finally:
                handle.remove()

    def _benign(self, example: int, start: int, stop: int) -> float:
        """How far hidden states move by what must not matter: a second run with other random numbers, a copy of the text beside
        it in the batch, and, where no token sees later ones, a shorter text. Up to 5 single examples."""
        key = (example, start, stop, self._float32)
        if key in self._noise:
            return self._noise[key]
        arguments, time = self.example(example, start, stop), stop - start
        base = self.hidden(arguments, (1, time))
        with self._other_randomness():
            moved = [changes(self.hidden(arguments, (1, time)), base)]
        with contextlib.suppress(CannotLook):
            twice = take(arguments[0], arguments[1], (0, 0), (1, time))
            moved.append(changes(self.hidden(twice, (2, time))[:1], base))
        if self.is_causal and time > 2:
            shorter = self.hidden(self.example(example, start, stop - 1), (1, time - 1))
            moved.append(changes(shorter, base[:, :-1]))
        real_T = ~self.padding_BT[example, start:stop]  # what a PAD without any key is makes no difference
        self._noise[key] = max(float(m[0][real_T[: m.shape[1]]].max(initial=0.0)) for m in moved)
        return self._noise[key]


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """A reading with what is to be said about it."""

    reading: VariantReading
    reasons: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SingleRuns(Evidence):
    """Texts of the first batch, run alone. padding_BT: bool [B, T], nothing where no padding is known. Live: for instruments."""

    runs: Runs
    padding_BT: NDArray[np.bool_]
    influence: Influence

    def longest(self) -> tuple[int, int, int]:
        """(example, start, stop) of the longest unbroken text; `DoesNotApply` without one of two tokens."""
        spans = [(b, span_of(p)) for b, p in enumerate(self.padding_BT)]
        found = [(s[1] - s[0], -b, s) for b, s in spans if s is not None]
        if not found:
            raise DoesNotApply("no example has two real tokens side by side")
        _, b, span = max(found)
        return -b, *span


@instrument
def single_runs(setup: Setup, base: BaseProbe, batch: BatchFacts, influence: Influence) -> SingleRuns:
    """What single texts can be run, or why none. No forward of its own."""
    import numpy as np

    if setup.fast:
        raise CannotLook("not looked at with --fast")
    probe = base.probe.turned() if influence.is_time_first else base.probe
    if probe.num_streams > 1:
        raise DoesNotApply("an encoder's text and a decoder's are padded apart: neither stands alone")
    rows, time = probe.ids_BT.shape
    if influence.is_time_first and not np.array_equal(batch.ids_BT[:rows, :time], probe.ids_BT.numpy()):
        raise CannotLook("the model takes time before batch: its arguments are not cut to single texts")
    if not np.array_equal(batch.ids_BT[:rows, :time], probe.ids_BT.numpy()):
        raise CannotLook("the batch's ids are not those of the probed call")
    padding = batch.padding_BT
    padding_BT = np.zeros((rows, time), dtype=bool) if padding is None else padding[:rows, :time]
    runs = Runs(probe, padding_BT, is_causal=influence.is_causal_by_measure)
    return SingleRuns(runs=runs, padding_BT=padding_BT, influence=influence)


def span_of(padding_T: NDArray[np.bool_]) -> tuple[int, int] | None:
    """(start, stop) of the real tokens if they are at least two and stand side by side."""
    real = (~padding_T).nonzero()[0]
    if len(real) < 2 or len(real) != real[-1] - real[0] + 1:
        return None
    return int(real[0]), int(real[-1]) + 1


def compared(hidden: Any, base: Any, example: int, first: int) -> Found:
    """Changes of H [1, t, D] against H [1, t, D] as (change, example, position); position `first` is the first of them."""
    return [(float(c), example, first + i) for i, c in enumerate(changes(hidden, base)[0])]


def _advance(sources: Sequence[Any]) -> None:
    """Draw from torch's global generator and from these."""
    import torch

    torch.rand(97)
    for source in sources:
        if isinstance(source, torch.Generator):
            torch.rand(97, generator=source, device=source.device)
        else:
            source.random()


def _reading(variant: Variant, found: Found, tolerance: float, used_by: str) -> VariantReading:
    change, example, position = max(found, default=(0.0, -1, -1))
    above = sum(c > tolerance for c, _, _ in found)
    starts = {(b, min(t for _, other, t in found if other == b)) for _, b, _ in found}
    return VariantReading(
        variant=variant, change=change, tolerance=tolerance, example=example, position=position,
        num_positions=len(found), num_above=above, used_by=used_by,
        starts_move=any(c > tolerance and (b, t) in starts for c, b, t in found),
    )  # fmt: skip
