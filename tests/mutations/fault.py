"""What a planted fault is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tests.mutations.architectures import Arch, Setup

Measure = Callable[[Arch, Setup, Setup], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault, how it is planted, what has to be said, and what it costs.

    codes: the expected code first; the others are the same harm seen from another side and count too (`why` says so).
    severity: the least severity of the expected finding (a note: and nothing worse is said). make: the broken setup, or None
    where it does not apply.
    healthy: the twin. measure: the harm in `unit`; below `bound` the cell is harmless and leaves the score.
    unknown_is_right: the only promise is that the expected check is not clear.
    """

    name: str
    family: str
    codes: tuple[str, ...]
    make: Callable[[Arch], Setup | None]
    healthy: Callable[[Arch], Setup]
    measure: Measure
    bound: float
    unit: str
    severity: str = "error"
    why: str = ""
    unknown_is_right: bool = False

    def harm(self, arch: Arch) -> float:
        """Measured on fresh twins; call only where it applies."""
        broken = self.make(arch)
        if broken is None:
            raise ValueError(f"{self.name} does not apply to {arch.name}")
        return self.measure(arch, broken, self.healthy(arch))
