"""`ghoststep.check`: open subjects, ask every check, diagnose, accept, order, report."""

from __future__ import annotations

import datetime
import inspect
import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ghoststep
from ghoststep import config as configuration
from ghoststep.cases import (
    LiveFacts,
    apart,
    declared_plan,
    described,
    group_subjects,
    kept_whole,
    live_facts,
    more_telling,
    saved_case,
    unique_names,
)
from ghoststep.config import Config
from ghoststep.diagnosis import diagnose
from ghoststep.engine import Case, ask
from ghoststep.errors import UsageError
from ghoststep.evidence.plan import TrainingKind
from ghoststep.evidence.tool import AcceptanceUse, ToolRun
from ghoststep.finding import Outcome, Report, Severity, Verdict
from ghoststep.registry import Registry, load

if TYPE_CHECKING:
    from ghoststep.subjects.base import Subject

NO_CONFIG = Config()
_VERSIONED = ("torch", "transformers", "tokenizers", "safetensors", "huggingface_hub", "numpy", "gguf")


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckSettings:
    """Everything that changes a report beside its subjects. Empty `select` means all checks.

    `training` None means full and prints as a default. `today` is the day acceptances are judged by (UTC).
    """

    training: TrainingKind | None = None
    select: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    fail_on: Severity = Severity.ERROR
    strict: bool = False
    allow_unknown: tuple[str, ...] = ()
    baseline: Path | None = None
    config: Config = NO_CONFIG
    config_file: str = "pyproject.toml"
    seed: int = 0
    offline: bool = False
    timeout_seconds: float | None = None
    today: datetime.date | None = None


def check(
    *subjects: object,
    training: str | None = None,
    select: Sequence[str] = (),
    ignore: Sequence[str] = (),
    fail_on: str | None = None,
    strict: bool = False,
    allow_unknown: Sequence[str] = (),
    baseline: str | Path | None = None,
    config: str | Path | None = None,
    seed: int = 0,
    offline: bool = False,
    fast: bool = False,
    timeout_seconds: float | None = None,
    **setup: Any,
) -> Report:
    """Look at subjects and return every verdict.

    Args:
        subjects: checkpoint folders or files (`str` or `Path`), `"hf:org/name[@rev]"`, `"path.py:function"` (a setup), a mapping
            that describes a setup, or opened subjects.
        setup: a setup by keywords: `model=`, `batch=`, `loss_fn=`, `optimizer=`, ... (see `ghoststep.Setup`).
        training: "full" (default), "lora", "frozen-embeddings" or "rl": decides which findings are dangers.
        select, ignore: codes, prefixes of codes ("GS3") or names.
        fail_on: "error" (default), "warning" or "note": from here on `exit_code` is 1.
        strict: unknown verdicts make `exit_code` 2, except those in `allow_unknown`.
        baseline: a JSON report; its findings are taken out, so that only new ones count.
        config: a pyproject.toml whose `[tool.ghoststep]` applies; none is searched for.
        seed: for instruments that sample; the same subjects and seed give the same report.
        offline: never touch the network.
        fast: a setup may cost at most about three training steps; some clear verdicts then have less power.
        timeout_seconds: what is not measured by then is unknown.

    Raises:
        UsageError, ConfigError, SubjectError: the call, the configuration or a subject cannot be used at all.

    Cost: reads the bytes of the embedding tables once (about 10 GB/s when cached), the tokenizer a few times; builds no model.
    """
    loaded = configuration.load_config(Path(config)) if config is not None else Config()
    settings = CheckSettings(
        training=parse_training(training or loaded.training),
        select=tuple(select) or loaded.select,
        ignore=tuple(ignore) or loaded.ignore,
        fail_on=parse_severity(fail_on or loaded.fail_on),
        strict=strict or loaded.strict,
        allow_unknown=tuple(allow_unknown) or loaded.allow_unknown,
        baseline=Path(baseline) if baseline else configured_baseline(loaded, Path(config) if config else None),
        config=loaded,
        config_file=str(config or "pyproject.toml"),
        seed=seed,
        offline=offline,
        timeout_seconds=timeout_seconds,
    )
    given = [*subjects, setup] if setup else list(subjects)
    return run(open_subjects(given, offline=offline, fast=fast, also_known=_OWN_KEYWORDS if setup else ()), settings)


_OWN_KEYWORDS = tuple(name for name, p in inspect.signature(check).parameters.items() if p.kind is p.KEYWORD_ONLY)


def configured_baseline(loaded: Config, path: Path | None) -> Path | None:
    """The baseline that a configuration names, beside its file."""
    return path.parent / loaded.baseline if path is not None and loaded.baseline else None


def parse_training(value: str | None) -> TrainingKind | None:
    """`UsageError` lists the known kinds."""
    try:
        return None if value is None else TrainingKind(value)
    except ValueError as error:
        raise UsageError(f"training {value!r} is unknown; expected one of {[k.value for k in TrainingKind]}") from error


def parse_severity(value: str) -> Severity:
    """`UsageError` lists the known severities."""
    try:
        return Severity(value)
    except ValueError as error:
        raise UsageError(f"severity {value!r} is unknown; expected one of {', '.join(s.value for s in Severity)}") from error


def open_subjects(
    subjects: Sequence[object], *, offline: bool, fast: bool = False, also_known: Sequence[str] = ()
) -> list[Subject]:
    """Open what is given by name or as a mapping; pass opened subjects through."""
    from ghoststep.subjects import open_subject  # lazy: brings numpy along
    from ghoststep.subjects.run_models import with_further_models

    if not subjects:
        raise UsageError("nothing to check: give a checkpoint folder, a file, hf:org/name or path.py:function")
    opened: list[Subject] = []
    for given in subjects:
        if isinstance(given, str | Path):
            opened.append(open_subject(str(given), offline=offline, fast=fast))
        elif isinstance(given, Mapping):
            from ghoststep.subjects.setup import make_setup

            opened.append(make_setup(given, fast=fast, also_known=also_known))
        elif isinstance(getattr(given, "kind", None), str):
            opened.append(given)  # type: ignore[arg-type]
        else:
            raise UsageError(f'cannot check a {type(given).__name__}: expected a path, "hf:org/name", or an opened subject')
    return with_further_models(opened)


def run(subjects: Sequence[Subject], settings: CheckSettings, registry: Registry | None = None) -> Report:
    """Ask every selected check about every subject. Several subjects of one kind get a case, and verdicts, each."""
    start = time.perf_counter()
    registry = registry or load()
    config = settings.config
    options = configuration.check_options(config, registry)
    checks = registry.select(settings.select, settings.ignore)
    if not checks:
        raise UsageError("nothing left to ask: every selected check is also ignored")
    if settings.timeout_seconds is not None and not settings.timeout_seconds > 0:
        raise UsageError(f"timeout {settings.timeout_seconds}: expected a positive number of seconds")
    for acceptance in config.accept:
        registry.find(acceptance.code)  # a mistyped code is told before the work, not after it
    subject_checks = [c for c in checks if not c.code.startswith("GS9")]
    verdicts: list[Verdict] = []
    cases = group_subjects(subjects)
    labels = unique_names([given[0].name for given in cases]) if len(cases) > 1 else [None]
    seen: list[LiveFacts] = []
    deadline = None if settings.timeout_seconds is None else start + settings.timeout_seconds
    for given, label in zip(cases, labels, strict=True):
        remaining = None if deadline is None else max(0.0, deadline - time.perf_counter())
        live, files = apart(given, offline=settings.offline)
        case = Case(
            [*live, *declared_plan(live, settings.training, settings.seed)], registry.instruments, timeout_seconds=remaining
        )
        saved = None if files is None else saved_case(files, case, registry)
        with kept_whole(live):
            for c in subject_checks:
                verdict = ask(case, c, options.get(c.name))
                if saved is not None:
                    verdict = more_telling(verdict, ask(saved, c, options.get(c.name)))
                verdicts.append(replace(verdict, subject=label))
        seen += live_facts(live, case)
    diagnosed = diagnose(verdicts, registry.checks)
    today = settings.today or datetime.datetime.now(datetime.timezone.utc).date()
    accepted, counts = configuration.accept(diagnosed, config.accept, today)
    if settings.baseline is not None:
        from ghoststep.report.baseline import less_baseline

        accepted = less_baseline(accepted, settings.baseline)
    tool = _tool_run(settings, registry, diagnosed, counts, today)
    tool_case = Case([tool])
    # A plugin that did not load is told whatever was selected: its checks cannot be named by --select either.
    always = ("GS901",) if registry.broken_plugins else ()
    tool_checks = [c for c in registry.checks if c.code.startswith("GS9") and (c in checks or c.code in always)]
    everything = [*accepted, *(ask(tool_case, c, options.get(c.name)) for c in tool_checks)]
    return _report(subjects, everything, settings, options, registry, time.perf_counter() - start, seen)


def _tool_run(
    settings: CheckSettings, registry: Registry, verdicts: Sequence[Verdict], counts: Sequence[int], today: datetime.date
) -> ToolRun:
    looked = {v.code.lower() for v in verdicts if v.outcome in (Outcome.FOUND, Outcome.CLEAR, Outcome.NOT_APPLICABLE)}
    uses = []
    for acceptance, count in zip(settings.config.accept, counts, strict=True):
        wanted = registry.find(acceptance.code)
        uses.append(
            AcceptanceUse(
                place=acceptance.place,
                reason=acceptance.reason,
                until=acceptance.until,
                days_left=(acceptance.until - today).days,
                num_matched=count,
                checked=wanted.code.lower() in looked,
                file=settings.config_file,
            )
        )
    broken = tuple((p.name, p.reason) for p in registry.broken_plugins)
    return ToolRun(acceptances=tuple(uses), broken_plugins=broken, num_plugins=len(registry.versions) + len(broken))


def _report(
    subjects: Sequence[Subject],
    verdicts: Sequence[Verdict],
    settings: CheckSettings,
    options: Mapping[str, Mapping[str, Any]],
    registry: Registry,
    seconds: float,
    seen: Sequence[LiveFacts],
) -> Report:
    from ghoststep.report.order import reading_order

    # A setup shows by itself what it trains; where several do not agree, the default stands.
    shown = {s.training for s in seen if s.training is not None}
    training = settings.training or (shown.pop() if len(shown) == 1 else TrainingKind.FULL)
    return Report(
        subjects=tuple(described(s, seen) for s in subjects),
        verdicts=reading_order(verdicts),
        environment=environment(registry),
        options={
            "training": training.value,
            "training_declared": settings.training is not None,
            "training_measured": settings.training is None and any(s.training is training for s in seen),
            "select": list(settings.select),
            "ignore": list(settings.ignore),
            "fail_on": settings.fail_on.value,
            "strict": settings.strict,
            "allow_unknown": list(settings.allow_unknown),
            "baseline": settings.baseline.name if settings.baseline else None,
            "checks": {name: dict(table) for name, table in options.items()},
            "seed": settings.seed,
            "offline": settings.offline,
            "timeout_seconds": settings.timeout_seconds,
        },
        seconds=seconds,
        exit_code=configuration.exit_code(
            verdicts,
            fail_on=settings.fail_on,
            strict=settings.strict,
            allow_unknown=[c.code for c in registry.select(settings.allow_unknown)] if settings.allow_unknown else [],
            unreadable=any(getattr(s, "unreadable", None) is not None for s in subjects),
            cannot_run=any(s.cannot_run for s in seen),
        ),
    )


def environment(registry: Registry) -> dict[str, str]:
    """Versions that a result may depend on; asks package metadata, imports nothing."""
    versions = {"ghoststep": ghoststep.__version__, "python": platform.python_version(), "platform": platform.system()}
    for name in _VERSIONED:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return {**versions, **registry.versions}
