"""`[tool.ghoststep]` of a pyproject.toml: what to check, how strictly, and which findings are accepted until when.

Unknown keys are errors, with the known ones named: a typing mistake must not switch a check off silently.
"""

from __future__ import annotations

import datetime
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import msgspec

from ghoststep.errors import ConfigError
from ghoststep.finding import Finding, Outcome, Severity, Verdict, Where
from ghoststep.registry import Check, Registry

_PLACE_KEYS = ("tensor", "module", "parameter", "token", "token_id", "table_row", "key")


class Acceptance(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="kebab"):
    """One accepted flaw: a code or name, optionally a place, always a reason and an end date.

    `file` is matched as the end of a finding's file ("model.safetensors" matches any folder).
    """

    code: str
    reason: Annotated[str, msgspec.Meta(min_length=1)]
    until: datetime.date
    file: str | None = None
    tensor: str | None = None
    module: str | None = None
    parameter: str | None = None
    token: str | None = None
    token_id: int | None = None
    table_row: int | None = None
    key: str | None = None

    @property
    def place(self) -> str:
        """Code and place in one line, for messages."""
        pairs = [f"{k}={getattr(self, k)!r}" for k in ("file", *_PLACE_KEYS) if getattr(self, k) is not None]
        return " ".join((self.code, *pairs))

    def matches(self, verdict: Verdict, finding: Finding) -> bool:
        """True if this acceptance covers the finding; the end date is not looked at."""
        return self.covers(verdict.code, verdict.name, finding.where)

    def covers(self, code: str, name: str, where: Where) -> bool:
        """The same for a code, a name and a place."""
        if self.code.lower() not in (code.lower(), name):
            return False
        for key in _PLACE_KEYS:
            wanted = getattr(self, key)
            if wanted is not None and wanted != getattr(where, key):
                return False
        return self.file is None or f"/{where.file or ''}".endswith(f"/{self.file}")


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="kebab"):
    """The table `[tool.ghoststep]`. Command-line options of the same name win over it."""

    select: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    fail_on: str = "error"
    training: str | None = None
    strict: bool = False
    allow_unknown: tuple[str, ...] = ()
    baseline: str | None = None
    checks: dict[str, dict[str, Any]] = {}
    accept: tuple[Acceptance, ...] = ()


def find_config(start: Path) -> Path | None:
    """The nearest pyproject.toml with a `[tool.ghoststep]` table, from `start` upwards."""
    for folder in (start, *start.parents):
        candidate = folder / "pyproject.toml"
        if candidate.is_file() and _mentions_us(candidate) and "ghoststep" in _tool_table(candidate):
            return candidate
    return None


def _mentions_us(path: Path) -> bool:
    """False for somebody else's pyproject.toml, which need not even be TOML (a template)."""
    try:
        return b"ghoststep" in path.read_bytes()
    except OSError:
        return False


def load_config(path: Path) -> Config:
    """Read and validate; `ConfigError` names the file, the key and what was expected."""
    tool = _tool_table(path)
    if "ghoststep" not in tool:
        raise ConfigError(f"{path}: has no table [tool.ghoststep]")
    table = tool["ghoststep"]
    try:
        return msgspec.convert(table, Config)
    except msgspec.ValidationError as error:
        known = ", ".join(f.encode_name for f in msgspec.structs.fields(Config))
        raise ConfigError(f"{path.name}: [tool.ghoststep]: {error}. Known keys: {known}.") from error


def _tool_table(path: Path) -> Mapping[str, Any]:
    try:
        import tomllib  # Python 3.11
    except ImportError:  # pragma: no cover - Python 3.10
        import tomli as tomllib  # type: ignore[import-not-found, no-redef, unused-ignore]
    try:
        with path.open("rb") as file:
            tool = tomllib.load(file).get("tool", {})
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read as TOML: {error}") from error
    return tool if isinstance(tool, Mapping) else {}


def check_options(config: Config, registry: Registry) -> dict[str, dict[str, Any]]:
    """Options by check name, typed as their keyword-only parameters say; `ConfigError` for unknown or ill-typed ones."""
    typed: dict[str, dict[str, Any]] = {}
    for key, table in config.checks.items():
        check = registry.find(key)
        typed[check.name] = {name.replace("-", "_"): _typed(check, name, value) for name, value in table.items()}
    return typed


def _typed(check: Check, name: str, value: object) -> object:
    for option in check.options:
        if option.name == name.replace("-", "_"):
            try:
                typed = msgspec.convert(value, option.type)
            except msgspec.ValidationError as error:
                raise ConfigError(f"[tool.ghoststep.checks.{check.name}] {name}: {error}") from error
            if isinstance(typed, float) and not math.isfinite(typed):
                raise ConfigError(f"[tool.ghoststep.checks.{check.name}] {name}: {typed} is no limit; expected a finite number")
            return typed
    known = ", ".join(o.name.replace("_", "-") for o in check.options) or "none"
    raise ConfigError(f"[tool.ghoststep.checks.{check.name}]: no option {name!r}; {check.code} knows: {known}")


def accept(
    verdicts: Sequence[Verdict], acceptances: Sequence[Acceptance], today: datetime.date
) -> tuple[tuple[Verdict, ...], tuple[int, ...]]:
    """Take accepted findings out. Returns the verdicts and, for each acceptance, how many findings it covers.

    An acceptance holds up to and including its `until` day; after that it covers nothing but is still counted, so that
    `expired-acceptance` can say what came back.
    """
    counts = [0] * len(acceptances)
    result = []
    for verdict in verdicts:
        kept: list[Finding] = []
        reasons: list[str] = []
        for i, acceptance in enumerate(acceptances):  # what stands under its cause is in use, though the cause speaks for it
            counts[i] += sum(acceptance.covers(s.code, "", s.where) for f in verdict.findings for s in f.symptoms)
        for finding in verdict.findings:
            covering = [i for i, a in enumerate(acceptances) if a.matches(verdict, finding)]
            for i in covering:
                counts[i] += 1
            in_force = [acceptances[i] for i in covering if acceptances[i].until >= today]
            if in_force:
                reasons.append(f"accepted until {in_force[0].until}: {in_force[0].reason}")
            else:
                kept.append(finding)
        result.append(take_out(verdict, kept, reasons))
    return tuple(result), tuple(counts)


def take_out(verdict: Verdict, kept: Sequence[Finding], reasons: Sequence[str]) -> Verdict:
    """The verdict with only `kept` findings. It stays found, as a note, when all were taken out: the flaw is still there."""
    if not reasons:
        return verdict
    accepted = verdict.accepted + len(reasons)
    why = "; ".join(dict.fromkeys((*([verdict.reason] if verdict.reason else []), *reasons)))
    if kept:
        return replace(verdict, accepted=accepted, reason=why).with_findings(kept)
    return replace(verdict, findings=(), accepted=accepted, reason=why, severity=Severity.NOTE)


def exit_code(
    verdicts: Sequence[Verdict], *, fail_on: Severity, strict: bool, allow_unknown: Sequence[str], unreadable: bool = False,
    cannot_run: bool = False,
) -> int:  # fmt: skip
    """0, 1 or 2 as every verb uses them; ghoststep's verdicts about itself (GS9xx) answer nothing about the subject.

    2 when a check broke, when one of the subjects got no answer at all, or when weights are there that could not be read
    (`unreadable`): that a tokenizer beside them is fine must not pass for a healthy checkpoint. Nor does a setup whose own code
    raises (`cannot_run`), whatever its tables look like.
    """
    about_subject = [v for v in verdicts if not v.code.startswith("GS9")]
    if any(v.outcome is Outcome.BROKEN or (v.code == "GS901" and v.findings) for v in verdicts):
        return 2
    subjects = {v.subject for v in about_subject} or {None}
    answered = {v.subject for v in about_subject if v.outcome in (Outcome.FOUND, Outcome.CLEAR)}
    if subjects - answered or unreadable or cannot_run:
        return 2
    if any(v.findings and v.severity.rank >= fail_on.rank for v in verdicts):
        return 1
    allowed = {code.lower() for code in allow_unknown}
    unknown = [v for v in about_subject if v.outcome is Outcome.UNKNOWN and not {v.code.lower(), v.name} & allowed]
    return 2 if strict and unknown else 0
