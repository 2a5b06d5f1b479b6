"""An identity for a finding that survives another run: what is wrong and where, not how much and not in which words."""

from __future__ import annotations

import hashlib

from ghoststep.finding import Finding, Verdict, Where
from ghoststep.report.escape import utf8_text

_MOMENTS = ("micro_batch", "step")  # when, not where: they move between runs of one setup


def fingerprint(verdict: Verdict, finding: Finding) -> str:
    """32 hexadecimal digits from the code, the subject (if several were looked at) and the place.

    Left out: message, figures, severity, basis, remedy, symptoms, `step`, `micro_batch`, and `token` where an id or a table
    row already names it. Two findings of one check at one place share a fingerprint. Independent of the process, the order
    of findings and a trip through JSON; changed only together with the name under which outputs publish it
    (`ghoststep/v1`). A pure function, a few microseconds.
    """
    parts = ["v1", verdict.code, verdict.subject or ""]
    parts += [f"{key}={value}" for key, value in _place(finding.where)]
    joined = "\0".join(utf8_text(p).replace("\\", "\\\\").replace("\0", "\\0") for p in parts)
    return hashlib.sha256(joined.encode()).hexdigest()[:32]


def _place(where: Where) -> list[tuple[str, int | str]]:
    named_by_number = where.token_id is not None or where.table_row is not None
    skipped = (*_MOMENTS, "token") if named_by_number else _MOMENTS
    pairs = [(key, value) for key, value in where.items() if key not in skipped]
    return [(key, value.replace("\\", "/") if key == "file" and isinstance(value, str) else value) for key, value in pairs]
