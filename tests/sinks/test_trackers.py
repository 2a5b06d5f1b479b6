"""W&B (offline), MLflow and trackio: what their own readers find, and that the user's run stays as it is."""

from __future__ import annotations

import importlib
import json
import math
import random
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ghoststep.finding import Severity
from ghoststep.sinks import Sinks
from tests.sinks.made_up import FACTS, ON_RANK_1, run

NOT_INSTALLED = "{0} is not installed: pip install {0}"
ALARM = ("GS401", "zeroed-step", Severity.ERROR, "the token '\x1b[31m'", 20)


def a_whole_run(sinks: Sinks, flushes: int = 2) -> None:
    for flush in range(flushes):
        sinks.write(run(32, lost=20), FACTS)
        if not flush:
            sinks.alarm(*ALARM)
        sinks.flush()
    sinks.close()
    assert not sinks.broken


def chunks(data: bytes) -> Iterator[bytes]:
    """Records of a log of LevelDB: blocks of 32 KiB of chunks (CRC, length, kind: 1 whole, 2 first, 3 middle, 4 last)."""
    at, whole = 7, b""
    while at + 7 <= len(data):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            yield whole
            whole = b""


class TestWandb:
    @pytest.fixture
    def wandb(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
        library = pytest.importorskip("wandb", reason=NOT_INSTALLED.format("wandb"))
        for name, value in {"WANDB_DIR": str(tmp_path), "WANDB_SILENT": "true"}.items():
            monkeypatch.setenv(name, value)
        monkeypatch.delenv("WANDB_MODE", raising=False)
        monkeypatch.chdir(tmp_path)
        yield library
        library.teardown()

    def rows(self, folder: Path) -> list[list[dict[str, Any]]]:
        """Of every offline run, oldest first, its rows."""
        records = importlib.import_module("wandb.proto.wandb_internal_pb2")
        importlib.import_module("wandb").teardown()  # `finish` returns before the service has written its last block
        found = []
        for file in sorted(folder.rglob("*.wandb"), key=lambda path: path.stat().st_ctime_ns):
            rows = []
            for data in chunks(file.read_bytes()):
                record = records.Record()
                record.ParseFromString(data)
                if record.WhichOneof("record_type") == "history":
                    items = record.history.item
                    rows.append({item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items})
            found.append(rows)
        return found

    def test_its_own_run_is_offline_and_has_every_step(self, wandb: Any, tmp_path: Path) -> None:
        before = random.getstate()
        a_whole_run(Sinks(["wandb:mine"]), flushes=1)
        assert random.getstate() == before
        assert wandb.run is None
        (rows,) = self.rows(tmp_path)
        assert [row["ghoststep/steps/number"] for row in rows] == list(range(1, 33))
        assert rows[19]["ghoststep/steps/lost"] == 1
        assert rows[19]["ghoststep/gradient/norm_before"] in (math.inf, "Infinity")

    def test_in_the_users_run_no_row_of_the_user_is_lost(self, wandb: Any, tmp_path: Path) -> None:
        mine = wandb.init(project="mine", mode="offline")
        sinks = Sinks(["wandb"])
        for number in range(1, 97):
            wandb.log({"loss": float(number)}, step=number)
            if number % 32 == 0:
                sinks.write(run(32, lost=20), FACTS)
                sinks.alarm(*ALARM)
                sinks.flush()
                wandb.log({"accuracy": float(number)}, step=number)
        sinks.close()
        assert not sinks.broken
        assert wandb.run is mine
        assert "zeroed-step (error), step 20: the token '\\x1b[31m'" in mine.summary["ghoststep/alarms/GS401"]
        wandb.finish()
        (rows,) = self.rows(tmp_path)
        assert [row["loss"] for row in rows if "loss" in row] == list(range(1, 97))
        assert [row["_step"] for row in rows if "loss" in row] == list(range(1, 97))
        assert [row["accuracy"] for row in rows if "accuracy" in row] == [32, 64, 96]
        ours = [row for row in rows if "ghoststep/steps/number" in row]
        assert [row["ghoststep/steps/lost"] for row in ours] == [1, 1, 1]
        assert [row["ghoststep/rows/token_id"] for row in ours] == [17, 17, 17]

    def test_two_watches_have_two_runs(self, wandb: Any, tmp_path: Path) -> None:
        first, second = Sinks(["wandb"]), Sinks(["wandb"])
        for sinks in (first, second):
            sinks.write(run(4), FACTS)
        for sinks in (first, second):
            sinks.close()
            assert not sinks.broken
        assert [len(rows) for rows in self.rows(tmp_path)] == [4, 4]

    def test_other_ranks_start_no_run(self, wandb: Any, tmp_path: Path) -> None:
        sinks = Sinks(["wandb"])
        sinks.write(run(4), ON_RANK_1)
        sinks.alarm(*ALARM)
        sinks.close()
        assert not list(tmp_path.rglob("*.wandb"))

    def test_a_run_that_the_user_has_finished_closes_the_sink(self, wandb: Any, caplog: pytest.LogCaptureFixture) -> None:
        wandb.init(project="mine", mode="offline")
        sinks = Sinks(["wandb"])
        sinks.write(run(4), FACTS)
        sinks.flush()
        wandb.finish()
        for _ in range(3):
            sinks.write(run(4), FACTS)
            sinks.flush()
        sinks.close()
        assert len(sinks.broken) == 1
        assert sum("a sink of ghoststep failed" in record.message for record in caplog.records) == 1


class TestMlflow:
    @pytest.fixture
    def mlflow(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
        library = pytest.importorskip("mlflow", reason=NOT_INSTALLED.format("mlflow"))
        monkeypatch.delenv("MLFLOW_EXPERIMENT_NAME", raising=False)
        monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
        library.set_tracking_uri((tmp_path / "mlruns").as_uri())
        yield library
        while library.active_run() is not None:
            library.end_run()
        library.set_tracking_uri(None)

    def test_its_own_run(self, mlflow: Any, tmp_path: Path) -> None:
        before = random.getstate()
        a_whole_run(Sinks([f"mlflow:{(tmp_path / 'mlruns').as_uri()}"]))
        assert random.getstate() == before
        assert mlflow.active_run() is None
        client = mlflow.MlflowClient()
        (found,) = client.search_runs([client.get_experiment_by_name("ghoststep").experiment_id])
        assert found.info.status == "FINISHED"
        assert found.info.run_name == "ghoststep-run-a"
        assert found.data.params["num_parameters"] == "73344"
        history = client.get_metric_history(found.info.run_id, "ghoststep/gradient/norm_before")
        assert [m.step for m in history[:32]] == list(range(1, 33))
        assert history[19].value == math.inf
        assert history[19].timestamp == 1_700_000_020_000
        assert found.data.tags["ghoststep.alarm.GS401"] == "zeroed-step (error), step 20: the token '\\x1b[31m'"

    def test_the_active_run_is_used_and_stays_open(self, mlflow: Any) -> None:
        with mlflow.start_run() as active:
            a_whole_run(Sinks(["mlflow"]))
            assert mlflow.active_run().info.run_id == active.info.run_id
            assert mlflow.MlflowClient().get_run(active.info.run_id).info.status == "RUNNING"
            mlflow.log_metric("loss", 1.0)
        found = mlflow.MlflowClient().get_run(active.info.run_id)
        assert found.data.metrics["ghoststep/steps/number"] == 32
        assert found.data.metrics["loss"] == 1.0

    def test_a_later_run_of_the_user_is_not_refused(self, mlflow: Any) -> None:
        sinks = Sinks(["mlflow"])
        sinks.write(run(4), FACTS)
        with mlflow.start_run() as active:
            sinks.write(run(4), FACTS)
            sinks.close()
        assert not sinks.broken
        assert mlflow.MlflowClient().get_run(active.info.run_id).data.metrics == {}

    def test_a_dead_server_closes_the_sink(self, mlflow: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
        sinks = Sinks(["mlflow:http://127.0.0.1:9"])
        for _ in range(2):
            sinks.write(run(4), FACTS)
            sinks.flush()
        sinks.close()
        assert len(sinks.broken) == 1


class TestTrackio:
    @pytest.fixture
    def trackio(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
        library = pytest.importorskip("trackio", reason=NOT_INSTALLED.format("trackio"))
        for name in ("trackio", "trackio.utils", "trackio.sqlite_storage"):
            module = importlib.import_module(name)
            if hasattr(module, "TRACKIO_DIR"):
                monkeypatch.setattr(module, "TRACKIO_DIR", tmp_path)
        return library

    def rows(self, project: str, name: str) -> list[dict[str, Any]]:
        storage = importlib.import_module("trackio.sqlite_storage").SQLiteStorage
        found: list[dict[str, Any]] = storage.get_logs(project, name)
        return found

    def test_its_own_run(self, trackio: Any, capsys: pytest.CaptureFixture[str]) -> None:
        before = random.getstate()
        a_whole_run(Sinks(["trackio:ours"]), flushes=1)
        assert random.getstate() == before
        rows = self.rows("ours", "ghoststep-run-a")
        assert [row["ghoststep/steps/number"] for row in rows] == list(range(1, 33))
        assert rows[19]["ghoststep/gradient/norm_before"] in (math.inf, "Infinity")
        assert [row["step"] for row in rows] == list(range(1, 33))
        assert capsys.readouterr().out == ""

    def test_the_users_run_stays_current_and_keeps_its_steps(self, trackio: Any) -> None:
        mine = trackio.init(project="mine", name="mine", config={"lr": 1}, embed=False)
        config = trackio.config
        finished: list[bool] = []
        mine.finish = lambda: finished.append(True)
        trackio.log({"loss": 1.0})
        sinks = Sinks(["trackio:mine"])
        sinks.write(run(4), FACTS)
        trackio.log({"loss": 2.0})
        sinks.close()
        trackio.log({"loss": 3.0})
        assert not sinks.broken
        assert trackio.config is config
        assert trackio.context_vars.current_run.get() is mine
        assert not finished
        del mine.finish
        trackio.finish()
        assert [(row["step"], row["loss"]) for row in self.rows("mine", "mine")] == [(0, 1.0), (1, 2.0), (2, 3.0)]
        assert len(self.rows("mine", "ghoststep-run-a")) == 4
