"""What is told: once an engaged step, in words, to the log and to listeners."""

from __future__ import annotations

import logging

import pytest
import torch

from ghoststep import clip_grad_norm_
from ghoststep.remedies import clip_events
from ghoststep.remedies.clip_events import MAX_ROWS, ClipAction, ClipEvent, listening
from ghoststep.remedies.clip_later import tell_waiting
from tests.remedies.clip_models import fill, on_device, small, table_of

torch.set_num_threads(1)


def spike(rows: int = 1) -> torch.nn.Module:
    model = small(200)
    fill(model, 0.01)
    table_of(model)[:rows] *= 1e25
    return model


@pytest.mark.parametrize(("mode", "action"), [
    ("row", ClipAction.CAPPED_ROWS), ("group", ClipAction.GROUPS_APART), ("global", ClipAction.RESCALED),
])  # fmt: skip
def test_one_event_a_step(mode: str, action: ClipAction, caplog: pytest.LogCaptureFixture) -> None:
    heard: list[ClipEvent] = []
    with listening(heard.append), caplog.at_level(logging.WARNING, "ghoststep.clip"):
        norm = clip_grad_norm_(spike(2), 1.0, mode)
    (event,) = heard
    assert event.action is action
    assert event.norm == pytest.approx(float(norm))
    assert event.num_rows == 2
    assert {r.table_row for r in event.rows} == {0, 1}
    assert event.rows[0].norm >= event.rows[1].norm
    assert event.rows[0].table == "0.weight"
    assert event.worst_trunk == ""
    assert action.value in event.message
    assert "0.weight row" in event.message


def test_many_rows_are_counted_and_not_all_named() -> None:
    heard: list[ClipEvent] = []
    with listening(heard.append):
        clip_grad_norm_(spike(60), 1.0)
    assert heard[0].num_rows == 60
    assert len(heard[0].rows) == MAX_ROWS
    assert "and 56 more" in heard[0].message


def test_the_device_route_tells_one_call_later() -> None:
    heard: list[ClipEvent] = []
    with listening(heard.append):
        on_device(spike(), 1.0)
        assert not heard
        model = small()
        fill(model, 0.01)
        on_device(model, 1.0)
        assert [e.num_rows for e in heard] == [1]
        tell_waiting()
    assert len(heard) == 1  # the healthy step has nothing to tell


def test_a_listener_that_fails_does_not_end_a_training_run(caplog: pytest.LogCaptureFixture) -> None:
    def fails(event: ClipEvent) -> None:
        raise ValueError(event.mode)

    with listening(fails):
        clip_grad_norm_(spike(), 1.0)
    assert "a listener of clip events failed" in caplog.text
    clip_grad_norm_(spike(), 1.0)
    assert caplog.text.count("a listener of clip events failed") == 1


def test_the_log_thins_out(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of the first ten, then 16, 32, 64."""
    import itertools

    monkeypatch.setattr(clip_events, "_count", itertools.count(1))
    heard: list[ClipEvent] = []
    with listening(heard.append), caplog.at_level(logging.WARNING, "ghoststep.clip"):
        for _ in range(70):
            clip_grad_norm_(spike(), 1.0)
    assert len(heard) == 70
    numbers = [int(r.getMessage().rsplit("event ", 1)[1].rstrip("]")) for r in caplog.records]
    assert numbers == [*range(1, 11), 16, 32, 64]


def test_a_healthy_step_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    model = small()
    fill(model, 1.0)
    with caplog.at_level(logging.DEBUG, "ghoststep.clip"):
        clip_grad_norm_(model, 1.0)
    assert not caplog.records
