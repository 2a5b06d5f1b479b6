"""The watches of one process under `ghoststep run`: opened when a model starts to train, closed at any end that lets us."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ghoststep.launch.bootstrap import PLAN, REPORTER
from ghoststep.launch.plan import Plan, rank_of
from ghoststep.subjects.run_models import number_of, numbered

if TYPE_CHECKING:
    import torch

    from ghoststep.finding import Report

IDLE_STEPS = 100
"""Steps of other models after which a model that did not step is let go when another one starts: a sweep must not fill the memory."""

MAX_FOLDERS = 8
"""Folders that are tried for one more model before it goes unrecorded."""


@dataclass(slots=True)
class Seat:
    """One watched model."""

    watch: Any
    folder: Path | None
    parameters: set[int]
    last_step: int = 0


@dataclass(slots=True)
class Session:
    """This process's part of a run. fault: what failed in us, "" if nothing; notes: what the user should read at the end."""

    plan: Plan
    is_reporter: bool
    pid: int = field(default_factory=os.getpid)
    seats: list[Seat] = field(default_factory=list)
    closed: list[Report] = field(default_factory=list)
    folders: list[Path] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    fault: str = ""
    rank: int = field(default_factory=rank_of)
    num_steps: int = 0
    num_unowned: int = 0
    has_opened: bool = False
    has_reported: bool = False
    _tokenizer: Any = None

    def open(self, root: torch.nn.Module, optimizers: list[Any]) -> bool:
        """Watch this model from now on; True if that works."""
        if not self.has_opened:
            self._prepare()
        self.let_go_of_idle()
        watch, folder = self._started(root, optimizers)
        if watch is None:
            return False
        self.seats.append(Seat(watch, folder, {id(p) for p in root.parameters()}, self.num_steps))
        self.rank = watch.flusher.facts.rank
        if folder is not None:
            self.folders.append(folder)
        return True

    def watched(self) -> set[int]:
        """Ids of all parameters of watched models."""
        return {i for seat in self.seats for i in seat.parameters}

    def knows(self, optimizer: Any) -> bool:
        """Whether a watch has this optimizer."""
        return any(o is optimizer for seat in self.seats for o in seat.watch.optimizers)

    def offer(self, optimizer: Any) -> None:
        """Tell the watches whose parameters this optimizer holds."""
        for seat in self.seats:
            if any(id(p) in seat.parameters for g in optimizer.param_groups for p in g["params"]):
                seat.watch.add_optimizer(optimizer)

    def stepped(self, optimizer: Any) -> None:
        """Count a step for the models that it moved."""
        self.num_steps += 1
        for seat in self.seats:
            if any(o is optimizer for o in seat.watch.optimizers):
                seat.last_step = self.num_steps

    def stop_if_asked(self) -> None:
        """End the script as `sys.exit(1)` would, once a policy "stop" met an alarm."""
        for seat in self.seats:
            if seat.watch.should_stop:
                self.say("stopped by the policy `stop`")
                raise SystemExit(1)

    def let_go_of_idle(self) -> None:
        """Close the watches of models that have not stepped for long."""
        for seat in [s for s in self.seats if self.num_steps - s.last_step > IDLE_STEPS]:
            self._close(seat)

    def close(self) -> None:
        """Close every watch: the record is complete. May be called twice."""
        if os.getpid() == self.pid:
            for seat in list(self.seats):
                self._close(seat)

    def _close(self, seat: Seat) -> None:
        self.seats.remove(seat)
        try:
            seat.watch.close()
            spool = seat.watch.flusher.spool
            if seat.folder is None or spool is None or spool.failed is not None:
                self.closed.append(seat.watch.report())
                if seat.folder is not None and not seat.watch.flusher.num_steps:
                    self.folders.remove(seat.folder)
        except Exception as error:
            self.fault = self.fault or f"closing a watch: {type(error).__name__}: {error}"

    def say(self, text: str) -> None:
        """One line on stderr; the script's stdout is its own."""
        try:
            if sys.__stderr__ is not None:
                sys.__stderr__.write(f"ghoststep run: {text}\n")
                sys.__stderr__.flush()
        except (OSError, ValueError):
            return

    def _prepare(self) -> None:
        from ghoststep.launch import ending

        self.has_opened = True
        _log_to_stderr()
        ending.prepare(self)
        atexit.register(self.close)
        util = sys.modules.get("multiprocessing.util")
        if util is not None:  # a forked process of multiprocessing ends without atexit
            util.Finalize(None, self.close, exitpriority=10)
        if self.plan.tokenizer is not None:
            self._tokenizer = self._loaded_tokenizer(self.plan.tokenizer)

    def _loaded_tokenizer(self, given: str) -> Any:
        try:
            from ghoststep.subjects.setup import load_tokenizer

            return load_tokenizer(given, "--tokenizer")
        except Exception as error:
            self.say(f"tokens are named by their ids only: {error}")
            return None

    def _started(self, root: torch.nn.Module, optimizers: list[Any]) -> tuple[Any, Path | None]:
        """A started watch and its folder, or None and why on stderr. A policy that cannot work here is left out, and said."""
        from ghoststep.errors import UsageError

        policy = self.plan.policy
        passed_over: list[str] = []
        for folder in self._free_folders():
            try:
                try:
                    watch = self._watch(root, optimizers, folder, policy)
                    self._tell_passed_over(passed_over, folder)
                    return watch, folder
                except UsageError as error:
                    if policy is None or (folder is not None and str(folder) in str(error)):
                        raise
                    self.say(f"goes on without the policy: {error}")
                    policy = None
                    return self._watch(root, optimizers, folder, policy), folder
            except UsageError as error:
                why = str(error)
                if folder is None or str(folder) not in why:
                    break
                passed_over.append(why)
        self.say(f"{type(root).__qualname__} is not watched: {why}")
        return None, None

    def _tell_passed_over(self, reasons: list[str], folder: Path | None) -> None:
        """A record that does not go on where the user pointed must be said: it would be looked for there."""
        if reasons and self.rank == 0:
            self.say(f"recorded in {folder} instead, since {reasons[0]}")

    def _watch(self, root: Any, optimizers: list[Any], folder: Path | None, policy: Any) -> Any:
        from ghoststep.watching.watch import watch

        sinks = () if self.folders or self.closed or self.seats else self.plan.sinks  # two models in one sink would be mixed up
        return watch(
            root, optimizers, run_dir=folder, policy=policy, strict=self.plan.strict, sinks=sinks, detail=self.plan.detail,
            tokenizer=self._tokenizer,
        ).start()  # fmt: skip

    def _free_folders(self) -> list[Path | None]:
        if self.plan.run_dir is None:
            return [None]
        first = Path(self.plan.run_dir)
        number = 1 + max((number_of(f, first) for f in self.folders), default=0)
        return [numbered(first, n) for n in range(number, number + MAX_FOLDERS)]

    def forked(self) -> None:
        """In a forked child: what the parent watches is not ours, what we train ourselves is."""
        self.pid, self.is_reporter = os.getpid(), False
        if not self.has_opened:
            return
        from ghoststep.launch import ending
        from ghoststep.watching import patches

        ending.forget()
        for seat in self.seats:
            patches.leave(seat.watch)
        self.seats.clear()
        self.has_opened = False


def _log_to_stderr() -> None:
    """Alarms go to stderr even where the script sends its own log to stdout."""
    logger = logging.getLogger("ghoststep")
    if not logger.handlers:
        handler = logging.StreamHandler(sys.__stderr__)
        handler.setFormatter(logging.Formatter("ghoststep: %(message)s"))
        logger.addHandler(handler)
        logger.propagate = False


_session: Session | None = None


def current() -> Session:
    """This process's session, from the plan in the environment."""
    global _session  # noqa: PLW0603 - one process, one session
    if _session is None:
        _session = Session(Plan.decode(os.environ[PLAN]), os.environ.get(REPORTER) == str(os.getpid()))
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=_after_fork)
    return _session


def _after_fork() -> None:
    try:
        if _session is not None:
            _session.forked()
    except Exception:  # a fork of the script's must work whatever is wrong with us
        return


def report_at_exit() -> None:
    """The last thing that the reporting process does."""
    from ghoststep.launch import telling

    session = current()
    if not session.is_reporter or os.getpid() != session.pid:
        return
    was_interrupted = issubclass(getattr(sys, "last_type", None) or type(None), KeyboardInterrupt)
    session.close()
    telling.tell_session(session)
    if was_interrupted:
        # Python ends an interrupted script by SIGINT (130 in a shell) unless code of a string was run since, as our imports do:
        # CPython notes an unhandled interrupt in the innermost such run, caught later or not. So it is noted again.
        with contextlib.suppress(KeyboardInterrupt):
            exec("raise KeyboardInterrupt", {})
