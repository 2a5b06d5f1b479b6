"""What happens to flushed steps on the host: recorded, handed to the sinks, judged, acted on."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ghoststep.evidence.steps import RankRecord, RunFacts, RunRecord, Step, StepOutcome
from ghoststep.finding import Basis, Severity, Verdict
from ghoststep.sinks import Sinks
from ghoststep.watching.forensics import BatchKeeper, decode_tokens
from ghoststep.watching.guarded import Faults
from ghoststep.watching.judge import WINDOW, Alarm, Judge
from ghoststep.watching.policy import Policy
from ghoststep.watching.recorder import Recorder
from ghoststep.watching.ring import Flushed
from ghoststep.watching.spool import Spool
from ghoststep.watching.untrained import Untrained

MAX_KEPT = 4096
"""Steps kept in memory where there is no record on disk, so that the last report counts all of them."""

NOTED_BATCHES = 4
"""Batches that are kept for notes (a single step far above, a batch without a label): they leave room on the disk for errors."""

SUSPICIOUS_COEFFICIENT = 0.05
"""Clip coefficient below which a step's tokens are decoded, in case a check names them."""


BESIDE = ("decoding tokens: ", "keeping a batch: ", "batch: ", "sinks: ")
"""Hooks without which every verdict is as good."""


@dataclass(slots=True, kw_only=True)
class Flusher:
    """Everything on the host's side of one watch. spool, keeper and tokenizer may be None.

    aside: while it is a list, steps go there and nowhere else: those of a rollback's comparison are no steps of the run.
    """

    recorder: Recorder
    judge: Judge
    policy: Policy
    sinks: Sinks
    faults: Faults
    facts: RunFacts
    spool: Spool | None = None
    keeper: BatchKeeper | None = None
    tokenizer: Any = None
    run_dir: Path | None = None
    waiting: list[Flushed] = field(default_factory=list)
    window: deque[Step] = field(default_factory=lambda: deque(maxlen=WINDOW))
    kept: list[Step] = field(default_factory=list)
    num_steps: int = 0
    alarms: list[Alarm] = field(default_factory=list)
    aside: list[Step] | None = None
    num_noted: int = 0
    untrained: Untrained | None = None

    def add(self, flushed: Flushed | None) -> None:
        """Take a flush whose copy is on its way."""
        if flushed is not None:
            self.waiting.append(flushed)

    def take(self, *, wait: bool = False) -> None:
        """Work on every flush that has arrived; wait for the others only if asked to."""
        while self.waiting and (wait or self.waiting[0].has_arrived()):
            flushed = self.waiting.pop(0)
            self.faults.guarded("recorder", self._read)(flushed)

    def _read(self, flushed: Flushed) -> None:
        flushed.wait()
        steps = self.recorder.steps(flushed)
        if self.untrained is not None and self.aside is None:
            self.faults.guarded("untrained parameters", self._look_for_untrained)(self.untrained, flushed, steps)
        self._work(steps)

    def _look_for_untrained(self, untrained: Untrained, flushed: Flushed, steps: list[Step]) -> None:
        untrained.learned(flushed, steps)
        found = untrained.facts()
        if found != self.facts.untrained:
            self.facts = replace(self.facts, untrained=found)
            if self.spool is not None:
                self.spool.update(self.facts)

    def _work(self, steps: list[Step]) -> None:
        """Each part under its own guard: a sink that fails does not end the judging."""
        if self.aside is not None:
            self.aside.extend(steps)
            return
        self.window.extend(steps)
        self.num_steps += len(steps)
        if len(self.kept) + len(steps) <= MAX_KEPT:
            self.kept.extend(steps)
        self.faults.guarded("decoding tokens", self._decode)(steps)
        if self.spool is not None:
            self.faults.guarded("recording", self.spool.write)(steps)
        self.faults.guarded("sinks", self.sinks.write)(steps, self.facts)
        self.faults.guarded("judging", self._judge)(steps)
        self.faults.guarded("sinks", self.sinks.flush)()

    def _judge(self, steps: list[Step]) -> None:
        alarms = self.judge.look(steps, self.record())
        for alarm in alarms:
            self.faults.guarded("telling an alarm", self._tell)(alarm)
        self.faults.guarded("policy", self.policy.act)(alarms)

    def _tell(self, alarm: Alarm) -> None:
        self.alarms.append(alarm)
        finding = alarm.finding
        self.sinks.alarm(alarm.code, alarm.name, alarm.severity, finding.message, alarm.step)
        said = {"code": alarm.code, "name": alarm.name, "severity": alarm.severity.value, "message": finding.message}
        if self.spool is not None:
            self.spool.write_event("alarm", {**said, "step": alarm.step})
        if alarm.step is not None and self._is_evidence(alarm):
            self.faults.guarded("keeping a batch", self._save)(alarm.step)

    def _is_evidence(self, alarm: Alarm) -> bool:
        """Whether the batch of its step is worth a place on the disk."""
        if alarm.severity is not Severity.NOTE:
            return True
        self.num_noted += alarm.finding.basis is not Basis.RULE_OF_THUMB
        return alarm.finding.basis is not Basis.RULE_OF_THUMB and self.num_noted <= NOTED_BATCHES

    def _save(self, step: int) -> None:
        if self.keeper is not None and self.run_dir is not None:
            path, reason = self.keeper.save(step, self.facts.rank, self.run_dir)
            if self.spool is not None:
                self.spool.write_event("batch", {"step": step, "file": "" if path is None else path.name, "reason": reason})

    def _decode(self, steps: Sequence[Step]) -> None:
        if self.tokenizer is None:
            return
        wanted = {r.token_id for s in steps if _is_suspicious(s) for r in s.rows} - set(self.facts.tokens)
        if wanted and len(self.facts.tokens) < 10_000:
            self.facts = replace(self.facts, tokens={**self.facts.tokens, **decode_tokens(self.tokenizer, wanted)})
            if self.spool is not None:
                self.spool.update(self.facts)

    def record(self) -> RunRecord:
        """The last steps of this rank."""
        rank = RankRecord(facts=self.facts, steps=tuple(self.window))
        return RunRecord(ranks=(rank,), is_live=True, broken=self._broken())

    def whole(self) -> RunRecord | None:
        """Every step, if all of them are in memory; else None."""
        if self.num_steps != len(self.kept):
            return None
        return RunRecord(ranks=(RankRecord(facts=self.facts, steps=tuple(self.kept)),), is_live=True, broken=self._broken())

    def _broken(self) -> tuple[str, ...]:
        return tuple(line for line in self.broken() if not line.startswith(BESIDE))

    def broken(self) -> tuple[str, ...]:
        """Everything of ours that failed, one line each."""
        failed = [] if self.spool is None or self.spool.failed is None else [f"recording: {self.spool.failed}"]
        if self.keeper is not None and self.keeper.failed:
            failed.append(f"keeping a batch: {self.keeper.failed}")
        return (*self.faults.lines(), *failed, *(f"sinks: {said}" for said in self.sinks.broken))

    def verdicts(self) -> tuple[Verdict, ...]:
        """What every check says about the run so far."""
        self.judge.look((), self.record())
        return self.judge.verdicts(self.whole())

    def close(self) -> None:
        """Work on what still waits, then let go of files and sinks."""
        self.take(wait=True)
        self.faults.guarded("sinks", self.sinks.close)()
        if self.spool is not None:
            for line in self.broken():
                hook, _, reason = line.partition(": ")
                self.spool.write_event("broken", {"hook": hook, "reason": reason})
            self.spool.close()


def _is_suspicious(step: Step) -> bool:
    if step.outliers or step.outcome is not StepOutcome.STEPPED or step.norm is None or step.norm_after is None:
        return True
    return not step.norm_after >= SUSPICIOUS_COEFFICIENT * step.norm  # NaN and inf too
