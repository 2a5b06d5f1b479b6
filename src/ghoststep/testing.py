"""For people's own tests: assert that a setup or a checkpoint is clean. `pytest` users get the fixture `ghoststep_check`.

def test_my_training_setup_is_clean():
    ghoststep.testing.assert_clean(make_setup())
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ghoststep.finding import Report


def assert_clean(
    subject: Any, *more: Any, fail_on: str = "warning", allow_unknown: Sequence[str] | None = None, **options: Any
) -> Report:
    """Check and raise `FindingsError` (an AssertionError that holds the report) if anything is found at or above `fail_on`.

    `subject` is anything `ghoststep.check` takes: a mapping with `model`, `batch`, ..., a `Setup`, a path. Also raises if a check
    broke or nothing could be answered; with `allow_unknown` (a list of codes) every other unknown verdict counts too.
    `options` go to `ghoststep.check`: `training=`, `select=`, `ignore=`, `fast=`, ...
    """
    from ghoststep.api import check

    strict = allow_unknown is not None
    given: Mapping[str, Any] = {"strict": strict, "allow_unknown": tuple(allow_unknown or ()), **options}
    return check(subject, *more, fail_on=fail_on, **given).raise_for(fail_on)
