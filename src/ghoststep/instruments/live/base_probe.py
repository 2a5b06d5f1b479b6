"""The first, unchanged pass that influence and equivalence share."""

from __future__ import annotations

from dataclasses import dataclass

from ghoststep.evidence.base import Evidence
from ghoststep.instruments.live.calling import LiveCall
from ghoststep.instruments.live.influence_probe import Probe
from ghoststep.registry import instrument


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseProbe(Evidence):
    """A probe of the first call in the user's mode: where hidden states are read, and what they are. Live: for instruments."""

    probe: Probe


@instrument
def base_probe(call: LiveCall) -> BaseProbe:
    """One forward under hooks. Nothing is changed."""
    return BaseProbe(probe=Probe(call))
