"""The card that a notebook shows for a report. Self-contained: inline styles, no script, nothing loaded, light and dark."""

from __future__ import annotations

from ghoststep.finding import Finding, Outcome, Report, Severity, Verdict
from ghoststep.report.escape import for_html
from ghoststep.report.order import reading_order
from ghoststep.report.phrases import (
    MAX_FINDINGS,
    by_reason,
    finding_severity,
    label,
    labels,
    more_line,
    number,
    place,
    power,
    quantity,
    summary_line,
    with_outcome,
)

_COLORS = {Severity.ERROR: "#c62828", Severity.WARNING: "#b26a00", Severity.NOTE: "#1565c0"}
_QUIET = "opacity:.7;font-size:90%"


def notebook_html(report: Report) -> str:
    """An HTML fragment; every text in it is escaped, whatever a tokenizer or a file name holds. O(size of the report)."""
    parts = [
        '<div style="border:1px solid rgba(128,128,128,.4);border-radius:6px;padding:.8em 1em;max-width:60em;line-height:1.45">'
    ]
    parts += [
        _subject(x.kind, x.name, [f"{k.replace('_', ' ')} {number(v)}" for k, v in x.facts.items()]) for x in report.subjects
    ]
    for v in reading_order(report.verdicts):
        if v.outcome is Outcome.FOUND:
            parts.append(_found(v))
        elif v.outcome is Outcome.BROKEN:
            parts.append(f"<p>{_badge('broken', '#6a1b9a')} <b>{for_html(label(v))}</b><br>{for_html(v.reason or '')}</p>")
    parts += [_group("could not look", with_outcome(report, Outcome.UNKNOWN), opened=True)]
    parts += [_clear(with_outcome(report, Outcome.CLEAR))]
    parts += [_group("not applicable", with_outcome(report, Outcome.NOT_APPLICABLE), opened=False)]
    parts.append(f'<div style="margin-top:.6em"><b>{for_html(summary_line(report))}</b></div></div>')
    return "\n".join(p for p in parts if p)


def _subject(kind: str, name: str, facts: list[str]) -> str:
    return f'<div>{for_html(kind)} <b>{for_html(name)}</b> <span style="{_QUIET}">{for_html(" · ".join(facts))}</span></div>'


def _badge(text: str, color: str) -> str:
    return f'<span style="background:{color};color:#fff;border-radius:3px;padding:0 .4em;font-size:85%">{for_html(text)}</span>'


def _found(verdict: Verdict) -> str:
    head = f"{_badge(verdict.severity.value, _COLORS[verdict.severity])} <b>{for_html(label(verdict))}</b>"
    items = [_finding(verdict, f) for f in verdict.findings[:MAX_FINDINGS]]
    more = more_line(len(verdict.findings))
    items += [f"<div>{for_html(more)}</div>"] if more else []
    items += [f'<div style="{_QUIET}">{for_html(verdict.reason)}</div>'] if verdict.reason else []
    return f'<div style="margin:.7em 0">{head}<div style="margin-left:1em">{"".join(items)}</div></div>'


def _finding(verdict: Verdict, f: Finding) -> str:
    figures = [f"{word} {quantity(q)}" for word, q in (("measured", f.measured), ("expected", f.expected)) if q]
    own = finding_severity(verdict, f)
    lines = [f"{own.value}: {f.message}" if own is not verdict.severity else f.message]
    lines += [f"fix: {f.remedy}"] if f.remedy else []
    lines += [f"↳ {s.code}: {s.message}" for s in f.symptoms[:MAX_FINDINGS]]
    quiet = " · ".join([p for p in (place(f.where), *figures) if p])
    tail = f'<div style="{_QUIET}">{for_html(quiet)}</div>' if quiet else ""
    return f'<div style="margin:.35em 0">{"<br>".join(for_html(x) for x in lines)}{tail}</div>'


def _group(title: str, verdicts: tuple[Verdict, ...], *, opened: bool) -> str:
    items = [f"<li>{for_html(', '.join(labels(group)))}: {for_html(reason)}</li>" for reason, group in by_reason(verdicts)]
    return _details(title, len(verdicts), items, opened=opened)


def _clear(verdicts: tuple[Verdict, ...]) -> str:
    items = [f"<li>{for_html(label(v) + (': ' + power(v.power) if v.power else ''))}</li>" for v in verdicts]
    return _details("clear", len(verdicts), items, opened=False)


def _details(title: str, count: int, items: list[str], *, opened: bool) -> str:
    if not items:
        return ""
    start = "<details open>" if opened else "<details>"
    return f'{start}<summary>{title} ({count})</summary><ul style="margin:.2em 0">{"".join(items)}</ul></details>'
