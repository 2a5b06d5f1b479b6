"""How an influence is judged: thresholds and their basis in one place, for every check on who sees whom.

| reading | error above | warning above | basis |
|---|---|---|---|
| swap, float32 | 1e-3 of the past | 1e-5 | a decoder shows exactly 0; expert groups of another size 1e-7; a -10 mask 1e-4 |
| swap, bfloat16 and float16 | 2e-2 | - | another shape alone moves hidden states by up to 2e-2 |
| gradient, any dtype | 1e-3 of the past | 1e-6 | a decoder shows exactly 0; FFT convolutions round to 1e-7; a -15 mask 3e-6 |
"""

from __future__ import annotations

from dataclasses import dataclass

from ghoststep.evidence.influence import Influence, Reading, Region
from ghoststep.finding import Power, Quantity, Severity
from ghoststep.registry import Unknown

ERROR_RATIO = 1e-3
SWAP_WARNING_RATIO = 1e-5
GRADIENT_WARNING_RATIO = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """An influence that should not be, and how bad it is."""

    reading: Reading
    severity: Severity

    @property
    def proof(self) -> str:
        """The measurement in words: which token, which position, how much."""
        r = self.reading
        (se, sp), (te, tp) = r.source, r.target
        where = f"in {r.text}, " if r.text else ""
        source = f"position {sp}" if se == te else f"position {sp} of example {se}"
        if r.method == "swap":
            return (
                f"{where}replacing tokens from {source} on moves the hidden state at position {tp} of example {te} by "
                f"{r.absolute:.2g} of its norm, {r.relative:.2g} of what an earlier token does "
                f"({r.num_above} of {r.num_pairs} pairs looked at, {r.mode} mode)"
            )
        return (
            f"{where}the gradient of position {tp} of example {te} at the token of {source} is {r.relative:.2g} of that at an "
            f"earlier token ({r.num_above} of {r.num_pairs} pairs looked at, {r.mode} mode)"
        )

    @property
    def measured(self) -> Quantity:
        """The relative influence."""
        return Quantity(value=self.reading.relative, unit="influence over that of the own past")


NOTHING_EXPECTED = Quantity(value=0.0, unit="influence over that of the own past")


def judge(swap: Reading | None, gradient: Reading | None, floor: float) -> Seen | None:
    """The worse of two readings of one region, or None if both are nothing. `floor`: see `Influence.floor`."""
    found: list[Seen] = []
    if swap is not None and swap.relative > max(SWAP_WARNING_RATIO, floor):
        bad = swap.relative > ERROR_RATIO
        found.append(Seen(reading=swap, severity=Severity.ERROR if bad else Severity.WARNING))
    if gradient is not None and gradient.relative > GRADIENT_WARNING_RATIO:
        bad = gradient.relative > ERROR_RATIO
        found.append(Seen(reading=gradient, severity=Severity.ERROR if bad else Severity.WARNING))
    return max(found, key=lambda s: s.severity.rank) if found else None


def judge_region(influence: Influence, region: Region) -> Seen | None:
    """`judge` on one region of an influence."""
    return judge(influence.readings.get(region), influence.gradient_readings.get(region), influence.floor)


def looked_at(influence: Influence, region: Region) -> bool:
    """True if at least one pair of this region was measured."""
    return region in influence.readings or region in influence.gradient_readings


def power_of(influence: Influence) -> Power:
    """What a clear verdict would have seen."""
    gradient = Region.PAST in influence.gradient_readings and influence.gradient_readings[Region.PAST].relative > 0
    smallest = GRADIENT_WARNING_RATIO if gradient else max(SWAP_WARNING_RATIO, influence.floor)
    return Power(quantity="influence over that of the own past", smallest_detectable=smallest)


def without_power(influence: Influence) -> Unknown | None:
    """Unknown where not even the own past was seen, or a text of the call was not looked at: silence then means nothing."""
    if influence.has_power:
        return not_read(influence)
    return Unknown(
        reason="no position was seen to depend on its own past either (measured at "
        f"{influence.readout}, {influence.num_forward} forward passes), so seeing nothing proves nothing"
    )


def not_read(influence: Influence) -> Unknown | None:
    """Unknown where one of several texts of the call was not looked at."""
    return Unknown(reason=influence.unread) if influence.unread else None


def examples_mixed(influence: Influence) -> Unknown | None:
    """Unknown where examples see each other through continuous paths: then every other reading carries that one too."""
    if influence.coupled != "continuous":
        return None
    return Unknown(
        reason="examples of the batch see each other (GS105): within one example nothing can be told apart from that"
    )


def through_nothing(influence: Influence, seen: Seen) -> bool:
    """A query without any key averages over everything, and hands that on to the positions behind it: not a cause of its own."""
    example, position = seen.reading.target
    return any(b == example and t <= position for b, t in influence.nothing_visible)
