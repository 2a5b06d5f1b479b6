"""kill -9 at any moment: every step whose `write` had returned is in the record, bit for bit."""

from __future__ import annotations

import contextlib
import mmap
import os
import random
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ghoststep.evidence.steps import RankRecord
from ghoststep.run_folder import MANIFEST, read_manifest, segments
from ghoststep.subjects.run import Run
from ghoststep.watching.spool import RESUMED_AFTER_KILL
from tests.watch.spool_steps import bits, make_steps

# A line in: run folder, shared file. Forks a writer that counts, in the shared file, the last step whose `write` has returned.
WRITERS = """
import mmap, os, pathlib, struct, sys
from ghoststep.watching.spool import Spool
from tests.watch.spool_steps import make_facts, make_steps
Spool.segment_bytes = 6000
for line in sys.stdin:
    folder, shared = line.split()
    pid = os.fork()
    if pid == 0:
        try:
            with open(shared, "r+b") as file:
                counter = mmap.mmap(file.fileno(), 8)
            spool = Spool(pathlib.Path(folder), make_facts())
            next_number = spool.last_number + 1
            while spool.failed is None and next_number < 100_000:
                steps = make_steps(range(next_number, next_number + 1 + next_number % 9))
                spool.write(steps)
                next_number += len(steps)
                struct.pack_into("<q", counter, 0, next_number - 1)
                if next_number % 5 == 0:
                    spool.update(make_facts(tokens={next_number: "x"}))
                    spool.write_event("finding", {"step": next_number})
        finally:
            os._exit(3)
    print(pid, flush=True)
    print(os.waitpid(pid, 0)[1], flush=True)
"""


class Server:
    """The forking process; nothing that is read from it can hang."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", WRITERS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
        )

    def start(self, folder: Path, shared: Path) -> int:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{folder} {shared}\n".encode())
        return self.number()

    def number(self, seconds: float = 20) -> int:
        assert self.process.stdout is not None
        line = b""
        while not line.endswith(b"\n"):
            assert select.select([self.process.stdout], [], [], seconds)[0], "the server says nothing"
            byte = self.process.stdout.read(1)
            assert byte, "the server ended"
            line += byte
        return int(line)

    def stop(self) -> None:
        self.process.kill()
        self.process.wait(timeout=20)
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()


def count(shared: Path) -> int:
    """The last step whose `write` has returned, as the writer counts."""
    with shared.open("r+b") as file, contextlib.closing(mmap.mmap(file.fileno(), 8)) as counter:
        return int.from_bytes(counter[:], "little")


def wait_for(shared: Path, number: int, seconds: float = 20) -> None:
    until = time.monotonic() + seconds
    while count(shared) < number:
        assert time.monotonic() < until, "the writer does not write"


def survivors(folder: Path) -> RankRecord | None:
    """What a reader gets; None where the writer was killed before the first frame."""
    run = Run(folder)
    if run.unreadable is not None:
        assert "no step" in run.unreadable or "no rank" in run.unreadable
        return None
    assert run.read().complaints == ()
    return run.record().ranks[0]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_killed_at_200_random_moments_no_written_step_is_lost(tmp_path: Path) -> None:
    """Four writers after one another in each folder: three of them also die while they take over from a dead one."""
    server, chance, shared = Server(), random.Random(7), tmp_path / "counter"
    num_kills = num_steps = num_torn = num_rotated = num_early = 0
    try:
        for attempt in range(50):
            folder, known = tmp_path / f"run-{attempt}", 0
            for _ in range(4):
                shared.write_bytes(bytes(8))
                pid = server.start(folder, shared)
                if chance.random() < 0.5:  # while it opens the folder, takes over or writes its first frames
                    time.sleep(0.006 * chance.random())
                else:
                    wait_for(shared, known + chance.randrange(1, 120))
                os.kill(pid, signal.SIGKILL)
                assert server.number() == signal.SIGKILL, "the writer ended by itself"
                num_kills += 1
                known = max(known, count(shared))
                record = survivors(folder) if folder.exists() else None
                if known == 0 or record is None:
                    assert known == 0
                    num_early += 1
                    continue
                last = record.steps[-1].number
                assert known <= last <= known + 9  # one more flush may have been written whole, and not counted yet
                assert bits(record.steps) == bits(make_steps(range(1, last + 1)))
                assert {g.reason for g in record.gaps} <= {RESUMED_AFTER_KILL}
                assert not record.is_closed
                known = last
                num_steps += last
            rank = folder / "rank-00000"
            if (rank / MANIFEST).exists():
                read_manifest(rank)
            num_rotated += len(segments(rank)) > 4 if rank.exists() else 0
            num_torn += (rank / f"{MANIFEST}.tmp").exists()
    finally:
        server.stop()
    assert num_kills == 200
    assert num_steps > 2000, "the writers hardly wrote"
    assert num_early < 80, "the moments missed the writing"
    assert num_rotated > 10


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_read_again_and_again_while_it_is_written(tmp_path: Path) -> None:
    """A reader beside a writer that rotates, replaces its manifest and never waits: always a whole beginning, never damage."""
    server, folder, shared = Server(), tmp_path / "run", tmp_path / "counter"
    shared.write_bytes(bytes(8))
    lasts: list[int] = []
    try:
        pid = server.start(folder, shared)
        until = time.monotonic() + 2
        while time.monotonic() < until or (len(lasts) < 5 and time.monotonic() < until + 20):
            known = count(shared)
            if known == 0:
                continue
            record = survivors(folder)
            assert record is not None
            assert record.gaps == ()
            assert len(record.steps) == record.steps[-1].number >= known
            if len(lasts) % 5 == 0:
                assert bits(record.steps) == bits(make_steps(range(1, len(record.steps) + 1)))
            lasts.append(known)
        os.kill(pid, signal.SIGKILL)
        assert server.number() == signal.SIGKILL
    finally:
        server.stop()
    assert len(set(lasts)) >= 5
