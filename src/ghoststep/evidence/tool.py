"""Facts about ghoststep's own run: acceptances, plugins, and what they did."""

from __future__ import annotations

import datetime
from dataclasses import dataclass

from ghoststep.evidence.base import Evidence


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceptanceUse(Evidence):
    """One acceptance of the configuration and how it was used. `place` is its written form ("GS306 token_id=5").

    `num_matched` findings were taken out. `days_left` counts to `until` (negative once it is over: it no longer applies).
    `checked` is False when its check did not run or could not look, so that nothing can be said about its use.
    """

    place: str
    reason: str
    until: datetime.date
    days_left: int
    num_matched: int
    checked: bool
    file: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolRun(Evidence):
    """What the run itself was like. `broken_plugins` maps a plugin's name to the reason it failed to load; `num_plugins` counts
    the packages of further checks that are installed."""

    acceptances: tuple[AcceptanceUse, ...] = ()
    broken_plugins: tuple[tuple[str, str], ...] = ()
    num_plugins: int = 0
