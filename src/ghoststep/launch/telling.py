"""The report at the end of a run: of all its models and ranks, from the record, or from memory where there is none."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ghoststep.finding import Outcome, Report, Severity
from ghoststep.launch.plan import Plan
from ghoststep.subjects.run_models import written_since

if TYPE_CHECKING:
    from ghoststep.launch.session import Session

WAIT_SECONDS = 5.0
"""How long the first rank waits for the others to close their records; they end at about the same time."""


def tell_session(session: Session) -> None:
    """In the process that trains, or whose children do. Ranks other than the first stay silent."""
    if session.has_reported or session.rank != 0:
        return
    session.has_reported = True
    reports = [*recorded(session.plan, wait=True), *session.closed]
    if session.fault:
        session.say(f"failed itself, the script did not notice: {session.fault}")
    if not reports:
        session.say(f"nothing trained was seen{_why(session)}")
        return
    tell(session.plan, reports)


def _why(session: Session) -> str:
    if "torch" not in sys.modules:
        return ": torch was not imported"
    if session.fault:
        return ""
    if session.has_opened:
        return ": training began, and no step of it was finished"
    if session.num_unowned:
        return (
            f": an optimizer stepped, but its {session.num_unowned} tensors belong to no module (built from a copy of the model, or of "
            "parameters that were replaced since, it trains nothing that runs; DeepSpeed keeps copies of its own)"
        )
    here = ""
    if session.plan.run_dir is None:  # started processes leave the report to this one, which knows them by their record alone
        here = " in this process; processes that it started are in no report with --no-record"
    return f": no module with an optimizer ran with gradients{here}"


def recorded(plan: Plan, *, wait: bool = False, title: str = "") -> list[Report]:
    """What the checks say about each model's record, all ranks together; nothing where nothing was recorded. Steps that were there
    before are an earlier run's. title: for the report, where the folder's name says nothing."""
    if plan.run_dir is None:
        return []
    from ghoststep import api
    from ghoststep.registry import load
    from ghoststep.subjects.run import Run
    from ghoststep.watching.judge import run_checks

    first = Path(plan.run_dir)
    written = written_since(first, plan.before)
    folders = list(written)
    if wait:
        _wait_for_ranks(folders)
    codes = tuple(c.code for c in run_checks(load(with_instruments=False).checks))
    names = [title + (f" ({f.name})" if f != first else "") if title else str(f) for f in folders]
    runs = [Run(f, name=n, after=written[f]) for f, n in zip(folders, names, strict=True)]
    runs = [r for r in runs if r.unreadable is None]
    return [api.run([r], api.CheckSettings(select=codes)) for r in runs]


def _wait_for_ranks(folders: Sequence[Path]) -> None:
    from ghoststep.run_folder import rank_folders, read_tail

    end = time.monotonic() + WAIT_SECONDS
    for folder in folders:
        ranks = rank_folders(folder) if folder.is_dir() else {}
        while len(ranks) > 1 and time.monotonic() < end and not all(read_tail(r).is_closed for r in ranks.values()):
            time.sleep(0.05)


def tell(plan: Plan, reports: Sequence[Report]) -> None:
    """On stderr, or where and how the user asked for it."""
    from ghoststep import report
    from ghoststep.report.destination import want_color, width, write

    joined = _joined(reports)
    if plan.format or plan.output:
        color = not plan.output and sys.stdout is not None and want_color(sys.stdout.isatty())
        text = report.render(joined, plan.format or "terminal", color=color, width=width())
        write(text, Path(plan.output) if plan.output else None)
        return
    stream = sys.__stderr__
    if stream is None:
        return
    text = report.render(joined, "terminal", color=want_color(stream.isatty()), width=width())
    encoding = stream.encoding or "utf-8"
    stream.write("\n" + text.encode(encoding, "backslashreplace").decode(encoding))
    if plan.run_dir is not None and Path(plan.run_dir).is_dir():
        from ghoststep.text import visible

        stream.write(f"record: {visible(plan.run_dir)}\n")
    stream.flush()


def _joined(reports: Sequence[Report]) -> Report:
    """One report of several models, each verdict with its model's name."""
    if len(reports) == 1:
        return reports[0]
    from ghoststep.report.order import reading_order

    names = _told_apart([r.subjects[0].name for r in reports])
    verdicts = [replace(v, subject=name) for r, name in zip(reports, names, strict=True) for v in r.verdicts]
    subjects = [replace(s, name=name) for r, name in zip(reports, names, strict=True) for s in r.subjects]
    return replace(
        reports[0], subjects=tuple(subjects), verdicts=reading_order(verdicts),
        seconds=sum(r.seconds for r in reports), exit_code=max(r.exit_code for r in reports),
    )  # fmt: skip


def _told_apart(names: Sequence[str]) -> list[str]:
    """Two models of one class without a record have the same name: the later ones get a number."""
    return [n if (before := names[:i].count(n)) == 0 else f"{n} ({before + 1})" for i, n in enumerate(names)]


def has_findings(reports: Sequence[Report], fail_on: str) -> bool:
    """Whether something at least this severe was found."""
    least = Severity(fail_on)
    return any(v.outcome is Outcome.FOUND and v.severity.rank >= least.rank for r in reports for v in r.verdicts)
