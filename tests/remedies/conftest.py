"""Steps clipped on the accelerators' route are told one call later: none may be left over from another test."""

from __future__ import annotations

import pytest

from ghoststep.remedies.clip_later import tell_waiting


@pytest.fixture(autouse=True)
def nothing_waits() -> None:
    """Empty the queue."""
    tell_waiting()
