"""TensorBoard's own reader finds what was written."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from ghoststep.finding import Severity
from ghoststep.sinks import Sinks
from tests.sinks.made_up import FACTS, ON_RANK_1, run

accumulators = pytest.importorskip(
    "tensorboard.backend.event_processing.event_accumulator", reason="tensorboard is not installed: pip install tensorboard"
)


def read(folder: Path) -> Any:
    found = accumulators.EventAccumulator(str(folder))
    found.Reload()
    return found


def test_scalars_at_their_steps_and_an_alarm_as_a_block_of_code(tmp_path: Path) -> None:
    sinks = Sinks([f"tensorboard:{tmp_path / 'a'}"])
    sinks.write(run(32, lost=20), FACTS)
    sinks.alarm("GS401", "zeroed-step", Severity.ERROR, "the token '<script>\x1b[31m'\n# of step 20", 20)
    sinks.flush()
    found = read(tmp_path / "a")  # before the close
    sinks.close()
    assert not sinks.broken
    norms = found.Scalars("ghoststep/gradient/norm_before")
    assert [event.step for event in norms] == list(range(1, 33))
    assert norms[19].value == math.inf
    assert norms[19].wall_time == 1_700_000_020.0
    assert {event.value for event in found.Scalars("ghoststep/steps/lost")} == {0, 1}
    assert found.Scalars("ghoststep/rows/token_id")[19].value == 17
    (tag,) = found.Tags()["tensors"]
    assert tag.startswith("ghoststep/alarms/GS401")
    (event,) = found.Tensors(tag)
    text = event.tensor_proto.string_val[0].decode()
    assert event.step == 20
    assert text.splitlines()[1] == "    the token '<script>\\x1b[31m'"
    assert all(line.startswith("    ") for line in text.splitlines())


def test_other_ranks_write_beside(tmp_path: Path) -> None:
    sinks = Sinks([f"tensorboard:{tmp_path}"])
    sinks.write(run(2), ON_RANK_1)
    sinks.close()
    assert len(read(tmp_path / "rank-00001").Scalars("ghoststep/loss/value")) == 2
    assert not list(tmp_path.glob("events*"))
