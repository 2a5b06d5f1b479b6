"""What all evidence has in common, and what stands in its place when there is none."""

from __future__ import annotations

from dataclasses import dataclass

from ghoststep.finding import Outcome


class Evidence:
    """Marker base of every fact. The engine injects a fact into checks and instruments by its class."""

    __slots__ = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Missing:
    """A fact that could not be had. A check that can work without a fact asks for `Fact | Missing`.

    `outcome` is what a check that needs the fact has to answer: unknown, not-applicable or broken. `is_absent` is True where
    the subject that would show it was not given at all (a checkpoint alone says nothing about masks): not applicable.
    `cannot_run` is True where the user's own code failed when it was run as it is: the whole subject cannot run.
    """

    reason: str
    outcome: Outcome = Outcome.UNKNOWN
    is_absent: bool = False
    cannot_run: bool = False
