"""The one kind of result: findings at places, verdicts of checks, and the report that holds them.

These types and their JSON form (`ghoststep.report.json_format`, schema version 1) are stable: other tools build on them.
They hold plain Python values only and import nothing heavy, so that `explain` and `checks` stay fast.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace

Scalar = int | float | str | bool


class Severity(enum.Enum):
    """How much harm a finding does. Compare with `rank`: a larger rank is worse."""

    ERROR = "error"
    """Training is wasted or wrong because of it; fix before spending compute."""
    WARNING = "warning"
    """Likely harm, or harm under conditions named in the message."""
    NOTE = "note"
    """Worth knowing; no action is needed for a healthy run."""

    @property
    def rank(self) -> int:
        """0 for a note, 1 for a warning, 2 for an error."""
        return {Severity.NOTE: 0, Severity.WARNING: 1, Severity.ERROR: 2}[self]

    def worse(self) -> Severity:
        """One step worse: note → warning → error → error."""
        return {Severity.NOTE: Severity.WARNING}.get(self, Severity.ERROR)

    def milder(self) -> Severity:
        """One step milder: error → warning → note → note."""
        return {Severity.ERROR: Severity.WARNING}.get(self, Severity.NOTE)


class Outcome(enum.Enum):
    """What one check says about one subject. Only `CLEAR` means healthy."""

    FOUND = "found"
    """The flaw is there; the findings say where."""
    CLEAR = "clear"
    """Looked, with enough power, and the flaw is not there."""
    NOT_APPLICABLE = "not-applicable"
    """The question makes no sense for this subject; the reason says why."""
    UNKNOWN = "unknown"
    """Could not look; the reason says what was missing."""
    BROKEN = "broken"
    """The check or one of its instruments raised: a defect of the check, never of the subject."""


class Basis(enum.Enum):
    """How far a finding can be trusted. Independent of its severity."""

    PROOF = "proof"
    """Follows from the files or the computation itself."""
    MEASURED = "measured"
    """Follows from a measurement and a threshold whose source is stated."""
    RULE_OF_THUMB = "rule-of-thumb"
    """Experience; always a note."""

    @property
    def rank(self) -> int:
        """0 for a proof, 1 for a measurement, 2 for a rule of thumb."""
        return list(Basis).index(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Where:
    """The place of a finding. Every key is optional; `None` means "does not apply".

    `token` is the token's raw string from an untrusted tokenizer: every output escapes it for itself.
    `table_row` counts rows of an embedding table, `example` examples of a batch, `position` tokens of an example, all from 0.
    `other_example` and `other_position` name the other end of a relation (who is seen). `key` is a key of a config, `group` the
    number of an optimizer's parameter group.
    """

    file: str | None = None
    tensor: str | None = None
    module: str | None = None
    parameter: str | None = None
    table_row: int | None = None
    token_id: int | None = None
    token: str | None = None
    example: int | None = None
    position: int | None = None
    document: int | None = None
    micro_batch: int | None = None
    step: int | None = None
    rank: int | None = None
    other_example: int | None = None
    other_position: int | None = None
    key: str | None = None
    group: int | None = None

    def items(self) -> list[tuple[str, int | str]]:
        """The keys that are set, in declaration order."""
        pairs = ((f.name, getattr(self, f.name)) for f in fields(self))
        return [(name, value) for name, value in pairs if value is not None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantity:
    """A measured or expected value with its unit ("1" for a pure number, "L2 norm", "table rows", "bytes", ...)."""

    value: Scalar
    unit: str = "1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Power:
    """The smallest effect that a clear verdict would have seen. Without it, clear is only "nothing seen"."""

    quantity: str
    smallest_detectable: float
    unit: str = "1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Symptom:
    """What another check saw and a found cause explains: its message, severity and place as it stood there."""

    code: str
    message: str
    where: Where = field(default_factory=Where)
    severity: Severity | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One flaw at one place.

    `message` reads cause → proof → fix. `severity` and `basis` default to those of the check (`None` until the engine
    fills them in).
    """

    message: str
    where: Where = field(default_factory=Where)
    measured: Quantity | None = None
    expected: Quantity | None = None
    severity: Severity | None = None
    basis: Basis | None = None
    remedy: str | None = None
    symptoms: tuple[Symptom, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What one check says. `severity` and `basis` are those of the worst finding, or the check's own where none was found.

    `reason` says why the outcome is not-applicable, unknown or broken, what remains open beside the findings, or which
    cause explains a found symptom. `subject` is set when several subjects of one kind were looked at.
    `accepted` counts findings that an acceptance or a baseline took out.
    """

    code: str
    name: str
    outcome: Outcome
    severity: Severity
    basis: Basis
    reason: str | None = None
    power: Power | None = None
    findings: tuple[Finding, ...] = ()
    seconds: float = 0.0
    subject: str | None = None
    accepted: int = 0

    def with_findings(self, findings: Sequence[Finding]) -> Verdict:
        """This verdict with other findings (at least one): its severity and basis become those of the worst."""
        worst = min(findings, key=lambda f: (-(f.severity or self.severity).rank, (f.basis or self.basis).rank))
        severity, basis = worst.severity or self.severity, worst.basis or self.basis
        return replace(self, outcome=Outcome.FOUND, findings=tuple(findings), severity=severity, basis=basis)


COULD_NOT_RUN = "could_not_run"
"""The fact of a `SubjectInfo` that says why the subject's own code fails, whoever runs it; absent where it runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SubjectInfo:
    """What was looked at: `kind` ("checkpoint", "setup", ...), `name` as the user gave it, and facts worth printing."""

    kind: str
    name: str
    facts: Mapping[str, Scalar] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Verdicts counted once each: the three severities split `found`; together the fields add up to all verdicts."""

    error: int = 0
    warning: int = 0
    note: int = 0
    clear: int = 0
    not_applicable: int = 0
    unknown: int = 0
    broken: int = 0

    @property
    def found(self) -> int:
        """Verdicts with a finding, whatever its severity."""
        return self.error + self.warning + self.note


def summarise(verdicts: Iterable[Verdict]) -> Summary:
    """Count verdicts by outcome, found ones by severity."""
    counts = {f.name: 0 for f in fields(Summary)}
    for verdict in verdicts:
        key = verdict.severity if verdict.outcome is Outcome.FOUND else verdict.outcome
        counts[key.value.replace("-", "_")] += 1
    return Summary(**counts)


class FindingsError(AssertionError):
    """Raised by `Report.raise_for`; `report` holds everything."""

    def __init__(self, message: str, report: Report) -> None:
        super().__init__(message)
        self.report = report


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """All verdicts of one run, in reading order, with what is needed to repeat it."""

    subjects: tuple[SubjectInfo, ...]
    verdicts: tuple[Verdict, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, object] = field(default_factory=dict)
    seconds: float = 0.0
    exit_code: int = 0

    @property
    def summary(self) -> Summary:
        """Verdicts by outcome; see `Summary`."""
        return summarise(self.verdicts)

    @property
    def findings(self) -> tuple[tuple[Verdict, Finding], ...]:
        """Every finding with its verdict, in reading order."""
        return tuple((v, f) for v in self.verdicts for f in v.findings)

    def verdict(self, code_or_name: str) -> Verdict:
        """The first verdict with this code or name; `KeyError` names the known ones."""
        for v in self.verdicts:
            if code_or_name in (v.code, v.name):
                return v
        raise KeyError(f"no verdict {code_or_name!r}; this report has {[v.code for v in self.verdicts]}")

    def raise_for(self, severity: Severity | str = Severity.ERROR) -> Report:
        """Raise `FindingsError` if a finding is at or above `severity`, a check broke, or nothing could be answered.

        Returns the report otherwise. What was accepted or stands in a baseline does not count.
        """
        limit = Severity(severity)
        bad = [v for v in self.verdicts if v.outcome is Outcome.BROKEN or (v.findings and v.severity.rank >= limit.rank)]
        lines = [f"{v.code} {v.name}: {v.findings[0].message if v.findings else v.reason}" for v in bad]
        if not bad and self.exit_code == 2:
            unknown = [v for v in self.verdicts if v.outcome is Outcome.UNKNOWN]
            fails = [f"could not run: {s.facts[COULD_NOT_RUN]}" for s in self.subjects if COULD_NOT_RUN in s.facts]
            lines = fails or ["could not look:", *(f"{v.code} {v.name}: {v.reason}" for v in unknown)]
        if lines:
            raise FindingsError("\n".join(lines), self)
        return self

    def __str__(self) -> str:
        """The report as a terminal shows it, so that `print(report)` can be read; `repr` is the data."""
        from ghoststep.report import render  # lazy: the renderers import this module

        return render(self, "terminal").rstrip("\n")

    def _repr_html_(self) -> str:
        from ghoststep.report.html import notebook_html  # lazy: only notebooks need it

        return notebook_html(self)
