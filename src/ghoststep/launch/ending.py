"""SIGTERM ends a process before anything can be written; here it closes the watches first and then ends it all the same."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ghoststep.launch.session import Session

GRACE_SECONDS = 3.0
"""Time for the main thread to notice the signal. One that hangs in a collective never does; it must end no later than without us."""

_noticed = threading.Event()
_handler: Any = None
_pipe: tuple[int, int] | None = None


def prepare(session: Session) -> None:
    """Handle SIGTERM, unless the script does; it may take over later, too."""
    if threading.current_thread() is not threading.main_thread() or os.name != "posix":
        return
    if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        return
    global _handler, _pipe  # noqa: PLW0603 - signals are the process's

    def handle(number: int, frame: Any) -> None:
        _noticed.set()
        _last_words(session)
        _die()

    _handler = handle
    signal.signal(signal.SIGTERM, handle)
    _pipe = os.pipe()
    os.set_blocking(_pipe[1], False)
    before = signal.set_wakeup_fd(_pipe[1], warn_on_full_buffer=False)
    if before != -1:  # asyncio or another library listens there
        signal.set_wakeup_fd(before)
        return
    threading.Thread(target=_stand_by, args=(_pipe[0],), name="ghoststep-sigterm", daemon=True).start()


def forget() -> None:
    """In a forked child: signals are its own again, and its wakeups must not reach our thread in the parent."""
    if _handler is not None and signal.getsignal(signal.SIGTERM) is _handler:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if _pipe is not None:
        previous = signal.set_wakeup_fd(-1)
        if previous not in (-1, _pipe[1]):
            signal.set_wakeup_fd(previous)


def _last_words(session: Session) -> None:
    try:
        session.close()
        if session.is_reporter:
            from ghoststep.launch import telling

            telling.tell_session(session)
    except Exception as error:
        session.say(f"the report failed: {type(error).__name__}: {error}")


def _stand_by(descriptor: int) -> None:
    """The thread that sees the signal even while the main thread is away in C code."""
    while True:
        try:
            numbers = os.read(descriptor, 64)
        except OSError:
            return
        if not numbers:
            return
        if signal.SIGTERM in numbers and signal.getsignal(signal.SIGTERM) is _handler and not _noticed.wait(GRACE_SECONDS):
            _die()


def _die() -> None:
    """End by SIGTERM's default action; any thread may call."""
    try:
        libc = ctypes.CDLL(None)
        libc.signal.argtypes, libc.signal.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
        libc.signal(int(signal.SIGTERM), None)
        os.kill(os.getpid(), signal.SIGTERM)
        signal.pause()
    finally:
        os._exit(128 + signal.SIGTERM)
