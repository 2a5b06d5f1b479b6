"""The report for people at a terminal: what is wrong first, what could not be looked at next, the counts last.

Everything is laid out as `rich.text.Text`, never as markup, so that a token such as "[red]" stays what it is.
"""

from __future__ import annotations

from dataclasses import replace

import ghoststep
from ghoststep.finding import COULD_NOT_RUN, Finding, Outcome, Report, Severity, Verdict, Where
from ghoststep.report.order import reading_order
from ghoststep.report.page import Page
from ghoststep.report.phrases import (
    MAX_FINDINGS,
    by_reason,
    counted,
    expected,
    finding_severity,
    label,
    labels,
    more_line,
    number,
    place,
    power,
    quantity,
    severity_counts,
    summary_line,
    unsaid,
    with_outcome,
)
from ghoststep.text import visible

_BADGES = {Severity.ERROR: "bold white on red", Severity.WARNING: "bold black on yellow", Severity.NOTE: "bold white on blue"}
_WORDS = {Severity.ERROR: "bold red", Severity.WARNING: "yellow", Severity.NOTE: "blue"}
_BODY = 3  # columns that findings are indented by
_KEY = 10  # columns for "where", "measured", "fix"


def render(report: Report, *, color: bool = False, width: int = 100) -> str:
    """The whole report at `width` columns (at least 40), with ANSI colours if `color`; the last line counts the verdicts.

    At most `MAX_FINDINGS` findings of a verdict are printed. No line but the last is wider than `width`.
    """
    page = Page(max(width, 40), color=color)
    _header(page, report)
    verdicts = reading_order(report.verdicts)
    found = [v for v in verdicts if v.outcome is Outcome.FOUND]
    told = {(v.subject, s.code, s.message): v.code for v in found for f in v.findings[:MAX_FINDINGS] for s in f.symptoms}
    if found:
        page.rule(severity_counts(report), _WORDS[max((v.severity for v in found), key=lambda s: s.rank)])
        page.blank()
    for v in found:
        _found(page, v, told)
    broken = [v for v in verdicts if v.outcome is Outcome.BROKEN]
    if broken:
        page.rule("broken: defects of the checks, not of what they looked at", "magenta")
        _by_reason(page, broken, "magenta")
    unknown = [v for v in verdicts if v.outcome is Outcome.UNKNOWN]
    if unknown:
        page.rule(f"could not look ({len(unknown)})", "yellow")
        above = next((str(x.facts[COULD_NOT_RUN]) for x in report.subjects if COULD_NOT_RUN in x.facts), None)
        _by_reason(page, unknown, "yellow", above)
    _quiet(page, report)
    _footer(page, report, found)
    return page.render()


def _header(page: Page, report: Report) -> None:
    # A run has trained what it trained: the question which training is meant does not come up.
    is_run = bool(report.subjects) and all(x.kind == "run" for x in report.subjects)
    training = None if is_run else report.options.get("training")
    ran = f" · {counted(len(report.verdicts), 'verdict')} in {report.seconds:.1f} s" if report.seconds > 0 else ""
    page.add(page.text(("ghoststep", "bold"), f" {ghoststep.__version__}", (ran, "dim")))
    page.blank()
    key = max([len(visible(x.kind)) for x in report.subjects] + [len("training") if training is not None else 0]) + 2
    for x in report.subjects:
        page.pair(visible(x.kind), page.text((visible(x.name), "bold")), 0, key)
        facts = [f"{visible(k.replace('_', ' '))} {number(v)}" for k, v in x.facts.items() if k != COULD_NOT_RUN]
        page.flow(facts, key, style="dim")
    if training is not None:
        how = " (measured: nothing of the input table is trained)" if _is_measured(report, "frozen-embeddings") else ""
        page.pair("training", page.text(visible(str(training)), (how, "dim")), 0, key)
    if not report.subjects:
        page.add(page.text("nothing was looked at"))
    page.blank()
    for x in report.subjects:
        if COULD_NOT_RUN in x.facts:
            page.rule("could not run", "bold red")
            page.blank()
            page.add(page.text((visible(str(x.facts[COULD_NOT_RUN])), "bold")), _BODY)
            page.add(
                page.text("The setup fails without ghoststep too; what needs the failing part could not be looked at."), _BODY
            )
            page.blank()


def _is_measured(report: Report, training: str) -> bool:
    return report.options.get("training_measured") is True and report.options.get("training") == training


def _found(page: Page, v: Verdict, told: dict[tuple[str | None, str, str], str]) -> None:
    findings = [f for f in v.findings if (v.subject, v.code, f.message) not in told]  # the rest stands under its cause
    badge = (f" {v.severity.value.upper()} ", _BADGES[v.severity])
    page.add(page.text(badge, " ", (label(v), "bold"), (f" · {v.basis.value.replace('-', ' ')}", "dim")), hang=_BODY)
    shown = findings[:MAX_FINDINGS]
    several = len(shown) > 1
    shared = shown[0].remedy if several and len({f.remedy for f in shown}) == 1 else None
    files = {_container(f.where) for f in shown}
    common = files.pop() if several and len(files) == 1 else Where()
    if place(common):
        page.pair("in", page.text((place(common), "cyan")), _BODY, _KEY)
    said: set[str] = set()
    for f in shown:
        message = unsaid(f.message, said)
        _finding(page, v, replace(f, message=message), common=common, bullet=several, with_remedy=shared is None)
    more = more_line(len(findings))
    if more:
        page.add(page.text((more, "dim")), _BODY)
    if shared:
        page.pair("fix all", page.text((visible(shared), "green")), _BODY, _KEY)
    if v.reason:
        page.pair("open" if findings else "because", page.text(visible(v.reason)), _BODY, _KEY)
    elif not findings:
        causes = dict.fromkeys(told[key] for f in v.findings if (key := (v.subject, v.code, f.message)) in told)
        page.pair("because", page.text("follows from ", ", ".join(visible(c) for c in causes)), _BODY, _KEY)
    page.blank()


def _container(where: Where) -> Where:
    """The part of a place that many findings of one check have in common."""
    return Where(file=where.file, tensor=where.tensor, module=where.module, parameter=where.parameter)


def _finding(page: Page, v: Verdict, f: Finding, *, common: Where, bullet: bool, with_remedy: bool) -> None:
    severity = finding_severity(v, f)
    lead = [(f"{severity.value}: ", _WORDS[severity])] if severity is not v.severity else []
    message = page.text(*lead, visible(f.message))
    if bullet:
        page.pair("•", message, 1, _BODY - 1)
    else:
        page.add(message, _BODY)
    where = place(replace(f.where, file=None, tensor=None, module=None, parameter=None) if place(common) else f.where)
    if where:
        page.pair("where", page.text((where, "cyan")), _BODY, _KEY)
    if f.measured:
        wanted = f"  (expected {expected(f.measured, f.expected)})" if f.expected else ""
        page.pair("measured", page.text((quantity(f.measured), "bold"), (wanted, "dim")), _BODY, _KEY)
    elif f.expected:
        page.pair("expected", page.text(quantity(f.expected)), _BODY, _KEY)
    if f.remedy and with_remedy:
        page.pair("fix", page.text((visible(f.remedy), "green")), _BODY, _KEY)
    for s in f.symptoms[:MAX_FINDINGS]:
        page.pair("↳ causes", page.text((visible(s.code), "bold"), f" {visible(s.message)}"), _BODY, _KEY)
    if len(f.symptoms) > MAX_FINDINGS:
        page.add(page.text((f"↳ … and {len(f.symptoms) - MAX_FINDINGS:,} more (see --format json)", "dim")), _BODY)


def _by_reason(page: Page, verdicts: list[Verdict], style: str, above: str | None = None) -> None:
    told: list[str] = [] if above is None else [above]
    for reason, group in by_reason(verdicts):
        page.flow(labels(group), 1, style=style, between=", ")
        again = next((t for t in told if t in reason), None)  # the same cause, met by way of another fact
        page.add(page.text(visible(reason if again is None else reason.replace(again, "(as above)"))), _BODY)
        told.append(reason)
    page.blank()


def _quiet(page: Page, report: Report) -> None:
    clear = with_outcome(report, Outcome.CLEAR)
    if clear:
        page.rule(f"clear ({len(clear)})", "green")
        column = min(max(len(label(v)) for v in clear) + 2, 40)
        for v in clear:
            said = [power(v.power)] if v.power else []
            said += [visible(v.reason)] if v.reason else []
            page.pair(label(v), page.text(("; ".join(said), "dim")), 1, column, key_style="green")
        page.blank()
    skipped = with_outcome(report, Outcome.NOT_APPLICABLE)
    if skipped:
        page.rule(f"not applicable ({len(skipped)})", "dim")
        for reason, group in by_reason(skipped):
            page.add(page.text((", ".join(labels(group)), "dim"), (": " + visible(reason), "dim")), 1, hang=2)
        page.blank()


def _footer(page: Page, report: Report, found: list[Verdict]) -> None:
    if found:
        page.add(page.text(("more on a check: ", "dim"), f"ghoststep explain {visible(found[0].code)}"))
    s = report.summary
    style = (
        "bold red" if s.error or s.broken else "bold yellow" if s.found or s.unknown else "bold green" if s.clear else "bold"
    )
    page.whole(page.text((summary_line(report), style)))
