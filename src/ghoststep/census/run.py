"""All checkpoints, several at a time; one that fails costs its own line only."""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

from ghoststep.census.record import Record
from ghoststep.census.spool import Spool
from ghoststep.census.survey import failure, open_watched, survey, timed
from ghoststep.engine import describe
from ghoststep.errors import GhoststepError
from ghoststep.registry import Instrument

_GRACE_SECONDS = 2.0
"""After an interrupt, how long threads may take to notice; each stops at its next read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """`jobs` checkpoints are measured at once, each within `timeout_seconds` (None: no limit)."""

    jobs: int = 2
    timeout_seconds: float | None = None
    offline: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Census:
    """The finished records in the order of the arguments. `num_resumed` of them came from the state.

    `is_interrupted`: Ctrl-C ended it early. `num_stragglers` threads had not ended by then.
    """

    records: tuple[Record, ...]
    num_asked: int
    num_resumed: int = 0
    is_interrupted: bool = False
    num_stragglers: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """One finished subject: its place among the arguments, its key ("" when it could not be opened) and its record."""

    place: int
    key: str
    record: Record
    is_resumed: bool = False


def run(
    subjects: Sequence[str],
    instruments: Sequence[Instrument],
    settings: Settings,
    spool: Spool,
    on_done: Callable[[Done], None] = lambda _: None,
) -> Census:
    """Survey every subject. `on_done` is called in the caller's thread, after the record is in the state.

    With one job all work happens in the caller's thread, so that the engine's alarm can interrupt any measurement at the
    deadline; with several, a measurement ends at its next read (`Watched`). A KeyboardInterrupt ends the census, not the
    process: what is finished is returned. Memory: `jobs` tables' per-row arrays, and one record a subject.
    """
    stop = threading.Event()
    found: dict[int, Done] = {}
    threads: list[threading.Thread] = []

    def work(place: int, subject: str) -> Done:
        return _one(place, subject, instruments, settings, spool, stop)

    is_interrupted = False
    try:
        results = _in_turn(subjects, work) if settings.jobs == 1 else _in_threads(subjects, work, settings.jobs, threads, stop)
        with _calm_torch(settings.jobs):
            for done in results:
                found[done.place] = done  # first: an interrupt may come between the two lines
                if not done.is_resumed and done.key:
                    spool.append(done.key, done.record)
                on_done(done)
    except KeyboardInterrupt:
        is_interrupted = True
    finally:
        stop.set()
    deadline = time.monotonic() + _GRACE_SECONDS
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return Census(
        records=tuple(found[place].record for place in sorted(found)),
        num_asked=len(subjects),
        num_resumed=sum(done.is_resumed for done in found.values()),
        is_interrupted=is_interrupted,
        num_stragglers=sum(thread.is_alive() for thread in threads),
    )


def _in_turn(subjects: Sequence[str], work: Callable[[int, str], Done]) -> Iterator[Done]:
    return (work(place, subject) for place, subject in enumerate(subjects))


def _in_threads(
    subjects: Sequence[str],
    work: Callable[[int, str], Done],
    jobs: int,
    threads: list[threading.Thread],
    stop: threading.Event,
) -> Iterator[Done]:
    """Results as they come. Daemon threads: an interrupted census must not wait for a stalled server."""
    places = itertools.count()  # `next` on it is atomic: the threads share it
    results: queue.SimpleQueue[Done] = queue.SimpleQueue()

    def loop() -> None:
        while not stop.is_set() and (place := next(places)) < len(subjects):
            results.put(work(place, subjects[place]))

    for _ in range(min(jobs, len(subjects))):
        thread = threading.Thread(target=loop, name="census", daemon=True)
        threads.append(thread)
        thread.start()
    for _ in subjects:
        yield results.get()


def _one(
    place: int, subject: str, instruments: Sequence[Instrument], settings: Settings, spool: Spool, stop: threading.Event
) -> Done:
    """Open, look into the state, measure. Never raises but for Ctrl-C in the caller's own thread."""
    started = time.monotonic()
    key = ""
    try:
        opened = open_watched(
            subject, offline=settings.offline, timeout_seconds=settings.timeout_seconds, started=started, stop=stop
        )
        try:
            key = opened.key
            finished = spool.get(key)
            if finished is not None:
                record = replace(finished, subject=opened.subject, name=opened.name)
                return Done(place=place, key=key, record=record, is_resumed=True)
            record = survey(opened, instruments)
        finally:
            opened.watched.close()
    except GhoststepError as error:
        record = failure(subject, str(error))
    except OSError as error:
        record = failure(subject, f"{subject} cannot be read: {error.strerror or error}")
    except Exception as error:  # a stranger's checkpoint: whatever it makes a library raise costs this line only
        record = failure(subject, f"ghoststep failed here: {describe(error)}")
    except BaseException as error:  # in a thread nothing may escape, or its result would be waited for without end
        if threading.current_thread() is threading.main_thread():
            raise
        record = failure(subject, f"ghoststep failed here: {describe(error)}")
    return Done(place=place, key=key, record=timed(record, started))


def _calm_torch(jobs: int) -> AbstractContextManager[None]:
    """The table scan sets torch's number of threads and puts it back; two scans at once would put back each other's."""
    if jobs == 1:
        return nullcontext()
    from ghoststep.instruments.row_scan import single_threaded_torch

    return single_threaded_torch()
