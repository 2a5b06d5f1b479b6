"""Which subjects share a case, and how a setup and its saved files are looked at side by side."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ghoststep.engine import Case
from ghoststep.evidence.plan import TrainingKind, TrainingPlan
from ghoststep.finding import COULD_NOT_RUN, Outcome, SubjectInfo, Verdict
from ghoststep.registry import Registry

if TYPE_CHECKING:
    from ghoststep.subjects.base import Subject


def declared_plan(given: Sequence[Any], training: TrainingKind | None, seed: int) -> list[TrainingPlan]:
    """The declared plan. A setup shows by itself what it trains (`instruments.live`), and a run has trained it: nothing is assumed."""
    if training is None and any(s.kind in ("setup", "run") for s in given):
        return []
    kind = training or TrainingKind.FULL
    return [TrainingPlan(training=kind, training_declared=training is not None, seed=seed)]


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveFacts:
    """What looking at a setup showed beside its verdicts: what it trains, and why it cannot run, if so."""

    setup: Any
    training: TrainingKind | None
    cannot_run: str | None


def live_facts(live: Sequence[Any], case: Case) -> list[LiveFacts]:
    """One for the setup of a case, if there is one. Cost: finds its embedding table, if no check asked for that."""
    setup = next((s for s in live if s.kind == "setup"), None)
    if setup is None:
        return []
    plan = case.fact(TrainingPlan)
    training = plan.training if isinstance(plan, TrainingPlan) else None
    return [LiveFacts(setup=setup, training=training, cannot_run=case.cannot_run())]


def described(subject: Any, seen: Sequence[LiveFacts]) -> SubjectInfo:
    """The subject's own words, and why it cannot run, where that was met."""
    info: SubjectInfo = subject.info()
    why = next((s.cannot_run for s in seen if s.setup is subject and s.cannot_run), None)
    return info if why is None else replace(info, facts={COULD_NOT_RUN: why, **info.facts})


def kept_whole(subjects: Sequence[object]) -> contextlib.AbstractContextManager[None]:
    """Live subjects come out as they went in; files need nothing of the kind, and no torch."""
    if not any(getattr(s, "kind", None) == "setup" for s in subjects):
        return contextlib.nullcontext()
    from ghoststep.instruments.live import untouched

    return untouched.kept_whole(subjects)


def apart(given: Sequence[Any], *, offline: bool) -> tuple[list[Any], Any | None]:
    """A setup and its files are two cases: the live facts would hide what the files show. Files are a checkpoint that was given
    too, or the folder that the setup says it saved to (`checkpoint_dir`)."""
    setup = next((s for s in given if s.kind == "setup"), None)
    if setup is None:
        return list(given), None
    files = next((s for s in given if s.kind == "checkpoint"), None)
    if files is None and setup.checkpoint_dir is not None:
        from ghoststep.subjects.checkpoint import open_checkpoint

        files = open_checkpoint(str(setup.checkpoint_dir), offline=offline)
    return [s for s in given if s.kind != "checkpoint"], files


def saved_case(files: Any, case: Case, registry: Registry) -> Case:
    """A case over the files, under the plan that the setup itself shows."""
    plan = case.fact(TrainingPlan)
    return Case([files, *([plan] if isinstance(plan, TrainingPlan) else [])], registry.instruments)


_TELLING = (Outcome.BROKEN, Outcome.FOUND, Outcome.CLEAR, Outcome.UNKNOWN, Outcome.NOT_APPLICABLE)


def more_telling(live: Verdict, saved: Verdict) -> Verdict:
    """One verdict a check: what the live model shows, unless its saved files answer more. That they cannot be looked at adds
    nothing to a live answer."""
    answers = saved.outcome in (Outcome.BROKEN, Outcome.FOUND, Outcome.CLEAR)
    return saved if answers and _TELLING.index(saved.outcome) < _TELLING.index(live.outcome) else live


def group_subjects(subjects: Sequence[Subject]) -> list[list[Any]]:
    """Subjects that belong together share a case: one of each kind. Two of a kind are two cases, a single one joins them all."""
    by_kind: dict[str, list[Subject]] = {}
    for s in subjects:
        by_kind.setdefault(s.kind, []).append(s)
    several = sorted(by_kind.values(), key=len, reverse=True)  # the kind with most members comes first: it names the case
    cases: list[list[Any]] = []
    for i in range(len(several[0])):
        members = [group[0] if len(group) == 1 else group[i] for group in several if len(group) == 1 or i < len(group)]
        cases.append(members)
    return cases


def unique_names(names: Sequence[str]) -> list[str]:
    """Names, made unique: "model", "model (2)"."""
    seen: dict[str, int] = {}
    labels = []
    for name in names:
        seen[name] = seen.get(name, 0) + 1
        labels.append(name if seen[name] == 1 else f"{name} ({seen[name]})")
    return labels
