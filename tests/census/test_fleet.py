"""Fifty checkpoints on a loopback Hub, one of them broken and one gated: every line and every total right."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path

import pytest

from ghoststep.census import run, spool, writers
from ghoststep.census.record import Record, RowCounts, Status
from ghoststep.census.terminal import to_terminal
from ghoststep.census.totals import duplicates, totals
from ghoststep.registry import load
from tests.census import fleet
from tests.census.fleet import ALIGNMENT, ATTENTION, FED, MAMBA, PARALLEL, PARTIAL, RESERVED, UNREACHABLE, Plan
from tests.local_hub import LocalHub

INSTRUMENTS = load().instruments
BROKEN, GATED = "org/broken", "org/gated"


def counts(rows: tuple[int, ...], plan: Plan) -> RowCounts:
    """The truth from the plan, written down independently of the code under test."""
    fed = [r for r in rows if r in FED and (FED[r] != "template" or plan.with_template)]
    return RowCounts(
        raw=len(rows),
        reachable=len(fed),
        undetermined=sum(r in (PARTIAL, PARTIAL + 1) for r in rows),
        reserved=sum(r == RESERVED for r in rows),
        unreachable=sum(r == UNREACHABLE for r in rows),
        no_token=sum(r >= ALIGNMENT for r in rows),
    )


@pytest.fixture(scope="module")
def built() -> list[Plan]:
    return fleet.plans()


@pytest.fixture(scope="module")
def hub(built: list[Plan]) -> Iterator[LocalHub]:
    with LocalHub() as server:
        for plan in built:
            server.add(f"org/{plan.name}", fleet.files(plan))
        broken = fleet.files(Plan(name="broken", near=(fleet.LETTER_A,)))
        server.add(BROKEN, broken | {"model.safetensors": broken["model.safetensors"][:-100]})
        server.add(GATED, fleet.files(Plan(name="gated")))
        server.repos[GATED].gated, server.repos[GATED].token = True, "hf_other"
        yield server


@pytest.fixture(scope="module")
def census(hub: LocalHub, built: list[Plan], tmp_path_factory: pytest.TempPathFactory) -> run.Census:
    names = [f"org/{plan.name}" for plan in built]
    names[10:10] = [BROKEN]
    names[20:20] = [GATED]
    with pytest.MonkeyPatch.context() as patch:
        for name in ("HF_TOKEN", "TRANSFORMERS_OFFLINE", "http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
            patch.delenv(name, raising=False)
        patch.setenv("HF_HUB_OFFLINE", "0")
        patch.setenv("HF_ENDPOINT", hub.url)
        patch.setenv("HF_HUB_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setattr("huggingface_hub.get_token", lambda: None)
        with spool.open_spool(None) as kept:
            return run.run([f"hf:{name}" for name in names], INSTRUMENTS, run.Settings(jobs=4), kept)


def by_name(census: run.Census, name: str) -> Record:
    return next(r for r in census.records if r.subject == f"hf:org/{name}")


def test_all_fifty_have_a_line_in_the_order_asked(census: run.Census, built: list[Plan]) -> None:
    assert len(census.records) == census.num_asked == 50
    good = [r for r in census.records if r.subject not in (f"hf:{BROKEN}", f"hf:{GATED}")]
    assert [r.subject for r in good] == [f"hf:org/{plan.name}" for plan in built]
    assert [r.subject for r in census.records].index(f"hf:{BROKEN}") == 10
    assert [r.subject for r in census.records].index(f"hf:{GATED}") == 20


def test_every_line_is_right(census: run.Census, built: list[Plan], hub: LocalHub) -> None:
    for plan in built:
        record = by_name(census, plan.name)
        assert (record.status, record.reason) == (Status.OK, None), plan.name
        assert record.wiring is not None
        assert record.tie is not None
        assert (record.wiring.value, record.tie.value) == (plan.wiring, "tied" if plan.tied else "untied"), plan.name
        near = plan.near if plan.norm < 1e-6 else ()
        assert record.near_zero == counts(near, plan), plan.name
        assert record.zero == counts(plan.zero, plan), plan.name
        for rows in (record.near_zero, record.zero):
            assert rows is not None
            assert rows.raw == sum(getattr(rows, f.name) for f in fields(rows)) - rows.raw, plan.name
        assert record.template_hits == (fleet.MARKER in near and plan.with_template), plan.name
        assert record.identical_rows == len(plan.identical) + (len(near) if len(near) > 1 else 0), plan.name
        sha = hub.repos[f"org/{plan.name}"].revisions["main"]
        assert record.revision == sha
        assert record.name == f"hf:org/{plan.name}@{sha[:7]}"
        assert record.bytes_read > 320 * 8 * 4
        assert record.seconds > 0


def test_the_broken_and_the_gated_one_say_why(census: run.Census) -> None:
    broken, gated = by_name(census, "broken"), by_name(census, "gated")
    assert broken.status is gated.status is Status.FAILED
    assert broken.reason is not None
    assert "model.safetensors" in broken.reason
    assert gated.reason is not None
    assert "gated or private" in gated.reason
    assert broken.fingerprint is gated.fingerprint is None


def test_totals(census: run.Census) -> None:
    found = {(t.wiring, t.tie): t for t in totals(census.records)}
    gated = found[MAMBA, "untied"]
    # 5 healthy + 8 kinds + template, just-above, tiny-norm + 1 copy
    assert (gated.checkpoints, gated.tables) == (17, 16)
    # text, bos, partial, reserved, unreachable, alignment, mixed, template, tiny-norm → text, bos, mixed, template, tiny-norm
    assert (gated.near_zero_raw, gated.near_zero_reachable, gated.near_zero_open) == (9, 5, 1)
    # alignment, zero-text, mixed → zero-text, mixed
    assert (gated.zero_raw, gated.zero_reachable) == (3, 2)
    assert gated.either_reachable == 6
    assert gated.near_zero_reachable_percent == 31.2
    assert gated.either_reachable_percent == 37.5
    attention = found[ATTENTION, "untied"]
    # 5 healthy + template, text, identical + 1 copy
    assert (attention.checkpoints, attention.tables, attention.near_zero_raw, attention.near_zero_reachable) == (9, 8, 2, 2)
    assert (found[ATTENTION, "tied"].tables, found[ATTENTION, "tied"].near_zero_reachable) == (6, 1)
    assert (found[PARALLEL, "untied"].tables, found[PARALLEL, "untied"].near_zero_reachable) == (6, 1)
    assert (found[MAMBA, "tied"].tables, found[MAMBA, "tied"].near_zero_reachable) == (5, 0)
    whole = found["all", "all"]
    assert (whole.checkpoints, whole.tables, whole.near_zero_raw, whole.near_zero_reachable) == (48, 46, 13, 9)
    assert whole.near_zero_reachable_percent == 19.6
    assert found["all", "tied"].tables + found["all", "untied"].tables == whole.tables


def test_duplicates_name_the_one_that_counts(census: run.Census) -> None:
    names = dict(zip([r.subject for r in census.records], duplicates(census.records), strict=True))
    assert names.pop("hf:org/copy-of-mamba-text") == by_name(census, "mamba-text").name
    assert names.pop("hf:org/copy-of-attention-text") == by_name(census, "attention-text").name
    assert set(names.values()) == {None}


def test_the_tokenizer_travels_only_where_a_row_is_suspicious(census: run.Census, hub: LocalHub) -> None:
    asked = {(parts[2], parts[-1]) for parts in (seen.path.split("/") for seen in hub.files_seen())}
    assert ("mamba-text", "tokenizer.json") in asked
    assert ("just-above", "config.json") in asked
    assert ("just-above", "tokenizer.json") not in asked
    assert not any(name.startswith("healthy") and file == "tokenizer.json" for name, file in asked)
    assert all(record.bytes_read > 0 for record in census.records if record.was_read)


def test_json_reads_back(census: run.Census) -> None:
    document = json.loads(writers.to_json(census))
    assert document["census"] == 1
    assert (document["asked"], document["interrupted"], document["norm_limit"]) == (50, False, 1e-6)
    lines = {line["record"]["subject"]: line for line in document["checkpoints"]}
    assert lines["hf:org/mamba-text"]["record"]["near_zero"]["reachable"] == 2
    assert lines["hf:org/mamba-text"]["record"]["wiring"] == MAMBA
    assert lines["hf:org/broken"]["record"]["near_zero"] is None
    assert lines["hf:org/copy-of-mamba-text"]["duplicate_of"].startswith("hf:org/mamba-text@")
    assert next(t for t in document["totals"] if (t["wiring"], t["tie"]) == ("all", "all"))["tables"] == 46


def test_csv_reads_back(census: run.Census) -> None:
    lines = list(csv.DictReader(io.StringIO(writers.to_csv(census))))
    assert len(lines) == 50
    assert tuple(lines[0]) == writers.COLUMNS
    mixed = next(line for line in lines if line["subject"] == "hf:org/mamba-mixed")
    assert (mixed["near_zero_raw"], mixed["near_zero_reachable"], mixed["zero_raw"], mixed["zero_no_token"]) == (
        "3",
        "1",
        "2",
        "1",
    )
    assert next(line for line in lines if line["subject"] == "hf:org/broken")["rows"] == ""
    sums = list(csv.DictReader(io.StringIO(writers.totals_to_csv(census))))
    assert (sums[-1]["wiring"], sums[-1]["tables"], sums[-1]["near_zero_reachable"]) == ("all", "46", "9")


def test_the_terminal_shows_every_checkpoint_and_the_totals(census: run.Census) -> None:
    text = to_terminal(census)
    head = text.split("\n\n")[0].splitlines()
    assert len(head) == 51
    column = head[0].index("near zero")
    mixed = next(line for line in head if "mamba-mixed" in line)
    assert mixed[column:].startswith("3 → 1 +1?")
    assert "50 checkpoints: 48 read (0 of them partially), 2 could not be read." in text
    assert "'J' table row 74, norm 1e-30, ordinary text encodes to it" in text
    last = text.split("\n\n")[-2].splitlines()[-1].split()
    assert last == ["all", "all", "48", "46", "13", "→", "9", "+1?", "4", "→", "3", "19.6", "21.7"]


def test_many_jobs_say_what_one_says(built: list[Plan], tmp_path: Path) -> None:
    chosen = [plan for plan in built if not plan.name.startswith("healthy")][:12]
    folders = [str(fleet.write(plan, tmp_path)) for plan in chosen] + [str(tmp_path / "absent")]
    found = []
    for jobs in (1, 4):
        with spool.open_spool(None) as kept:
            result = run.run(folders, INSTRUMENTS, run.Settings(jobs=jobs), kept)
        found.append([_timeless(r) for r in result.records])
    assert found[0] == found[1]
    assert [r.subject for r in found[0]] == folders


def _timeless(record: Record) -> Record:
    return replace(record, seconds=0.0)


def test_a_formula_is_no_formula_in_a_spreadsheet() -> None:
    evil = Record(subject="=cmd()", name="@x", status=Status.FAILED, reason="-1")
    text = writers.to_csv(run.Census(records=(evil,), num_asked=1))
    line = next(csv.DictReader(io.StringIO(text)))
    assert (line["subject"], line["name"], line["reason"]) == ("'=cmd()", "'@x", "'-1")


def test_a_table_read_only_in_part_gives_way_to_one_that_is_known() -> None:
    part = Record(subject="a", name="a", status=Status.PARTIAL, fingerprint="f", near_zero=RowCounts(raw=1, unknown=1))
    whole = Record(subject="b", name="b", status=Status.OK, fingerprint="f", near_zero=RowCounts(raw=1, reachable=1))
    assert duplicates([part, whole]) == ("b", None)
    assert totals([part, whole])[-1].near_zero_reachable == 1
    alone = totals([part])[-1]
    assert (alone.near_zero_reachable, alone.near_zero_open, alone.near_zero_reachable_percent) == (0, 1, 0.0)
