"""One JSON line a step, which a strict reader reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NoReturn

import pytest

from ghoststep.errors import UsageError
from ghoststep.finding import Severity
from ghoststep.sinks import Sinks, metrics
from tests.sinks.made_up import FACTS, ON_RANK_1, healthy, run


def lines(path: Path) -> list[dict[str, Any]]:
    def refuse(word: str) -> NoReturn:
        raise AssertionError(f"{word} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def test_steps_and_alarms(tmp_path: Path) -> None:
    path = tmp_path / "new" / "steps.jsonl"
    sinks = Sinks([f"jsonl:{path}"])
    sinks.write(run(32, lost=20), FACTS)
    sinks.alarm("GS401", "zeroed-step", Severity.ERROR, "token '\x1b[31m\n\ud800' <script>", 20)
    sinks.flush()
    found = lines(path)  # before the close: a reader may follow a running training
    sinks.close()
    assert not sinks.broken
    steps, (alarm,) = found[:-1], found[-1:]
    assert [line["ghoststep/steps/number"] for line in steps] == list(range(1, 33))
    assert steps[0] == {"run": "run-a", "rank": 0, "time": 1_700_000_001.0, **metrics(healthy(1))}
    assert steps[19]["ghoststep/gradient/norm_before"] == "Infinity"
    assert steps[19]["ghoststep/steps/lost"] == 1
    assert (alarm["alarm"], alarm["severity"], alarm["step"]) == ("GS401", "error", 20)
    assert alarm["message"] == "token '\x1b[31m\n\\ud800' <script>"


def test_a_resumed_run_appends_and_another_rank_has_its_own_file(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    for facts in (FACTS, FACTS, ON_RANK_1):
        sinks = Sinks([f"jsonl:{path}"])
        sinks.write(run(2), facts)
        sinks.close()
    assert len(lines(path)) == 4
    assert [line["rank"] for line in lines(tmp_path / "steps.rank-00001.jsonl")] == [1, 1]


def test_a_folder_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is a folder"):
        Sinks([f"jsonl:{tmp_path}"])
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="cannot write"):
        Sinks([f"jsonl:{tmp_path / 'file' / 'steps.jsonl'}"])


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs the full device of Linux")
def test_a_full_disk_closes_the_sink_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    sinks = Sinks(["jsonl:/dev/full"])
    for _ in range(3):
        sinks.write(run(32), FACTS)
        sinks.flush()
    sinks.close()
    assert len(sinks.broken) == 1
    assert "No space left" in sinks.broken[0]
    assert len(caplog.records) == 1
