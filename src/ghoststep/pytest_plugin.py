"""A pytest plugin, found by its entry point: one fixture and nothing else. Importing it imports only pytest."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from ghoststep.finding import Report


@pytest.fixture
def ghoststep_check() -> Callable[..., Report]:
    """`ghoststep.testing.assert_clean`: call it with a setup, a checkpoint folder or a path."""
    from ghoststep.testing import assert_clean

    return assert_clean
